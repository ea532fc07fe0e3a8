"""The operators under autograd, compilers and modes, by every form of a call, against the
reference, which is differentiated by torch. Those of caches are in test_cache_operators.py, and
torch.vmap is in test_mapped_operators.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.operators import attention as attention_operators
from flash_attn_cuda.operators.attention import GRADIENTS
from tests.cases.forms import (
    DENSE,
    FORMS,
    STARTS,
    Form,
    Outputs,
    gradients_of,
    loss,
    masked,
    over_forms,
)
from tests.cases.masked_operators import (
    SCALE,
    backward_fields,
    forward_fields,
    int32,
    make_inputs,
    make_sparsity,
)
from tests.cases.operators import arguments, backward_arguments, gradients_arguments
from tests.cases.roads import arrivals
from tests.reference import attention

__all__ = ["arrivals"]  # pytest finds it here

_ops = torch.ops.flash_attn_cuda


# -- opcheck ---------------------------------------------------------------------------------------

NO_LISTS = dict.fromkeys(("block_rows", "block_columns", "mask_bits"))
CHANGES: dict[str, dict[str, Any]] = {
    "everything": {},
    "lists": {"bias": None, "sink": None},
    "lists without bits": {"bias": None, "mask_bits": None},
    "bias": {**NO_LISTS, "sink": None},
    "no masks": {
        **{**NO_LISTS, "bias": None, "softcap": 1.5, "dropout_p": 0.4},
        **{"return_softmax": True, "deterministic": True},
    },
}
over_packed = pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])


@over_packed
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_opcheck_forward(name: str, requires_grad: bool, is_packed: bool) -> None:
    given = forward_fields(is_packed, requires_grad, **CHANGES[name])
    opcheck(_ops.attention, arguments(**given))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_over_pages(requires_grad: bool) -> None:
    """All but a backward, which there is none of (test_refusals.py)."""
    pool = torch.randn(4, 5, 2, 16, dtype=torch.float64, requires_grad=requires_grad)
    given = forward_fields(True, requires_grad, **NO_LISTS, bias=None, k=pool, v=pool)
    given["block_table"] = int32(2, 0, 3, 1).view(2, 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = () if requires_grad else ("test_aot_dispatch_dynamic",)
    opcheck(_ops.attention, arguments(**given), test_utils=(*checks, *more))


@over_packed
@pytest.mark.parametrize(
    "changes",
    [{}, {"dout": None}, {"dlse": None}, {"wants_dbias": False}, {"sink": None}],
    ids=str,
)
def test_opcheck_gradients(is_packed: bool, changes: dict[str, Any]) -> None:
    given = gradients_arguments(**backward_fields(is_packed, **changes))
    opcheck(_ops.attention_gradients, given)
    found = dict(zip(GRADIENTS, _ops.attention_gradients(*given), strict=True))
    assert found["dq"].shape == ((14, 4, 16) if is_packed else (2, 7, 4, 16))
    assert found["dbias"].shape == ((1, 4, 7, 9) if changes.get("wants_dbias", True) else (0,))
    assert found["dsink"].shape == ((0,) if "sink" in changes else (4,))


@over_packed
def test_opcheck_backward(is_packed: bool) -> None:
    """Into all targets, or some."""
    given = backward_fields(is_packed, bias=None, sink=None, wants_dbias=False, **NO_LISTS)
    targets = {f"d{name}": torch.empty_like(given[name]) for name in "qkv"}
    opcheck(_ops.attention_backward, backward_arguments(**given, **targets))
    opcheck(_ops.attention_backward, backward_arguments(**given, dk=targets["dk"]))


@over_packed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtype_of_the_gradient_of_a_bias(dtype: torch.dtype, is_packed: bool) -> None:
    """The bias's own, of tensors without storage too."""
    given = backward_fields(is_packed, dtype=torch.bfloat16, bias_dtype=dtype)
    opcheck(_ops.attention_gradients, gradients_arguments(**given), test_utils="test_faketensor")
    dbias = _ops.attention_gradients(*gradients_arguments(**given))[GRADIENTS.index("dbias")]
    assert dbias.dtype == dtype and dbias.shape == (1, 4, 7, 9)


# -- autograd --------------------------------------------------------------------------------------


@over_forms
def test_gradients(form: Form) -> None:
    inputs = form.make_inputs(requires_grad=True)
    torch.testing.assert_close(form.attend(*inputs), form.expected(*inputs))
    wanted, every = gradients_of(form.expected, inputs), tuple(range(len(inputs)))
    torch.testing.assert_close(gradients_of(form.attend, inputs), wanted)
    of_function = torch.func.grad(lambda *x: loss(form.attend(*x)), every)
    torch.testing.assert_close(of_function(*inputs), wanted)


@over_forms
def test_some_inputs_and_some_results(form: Form) -> None:
    inputs = form.make_inputs()
    for index, result in ((i, j) for i in range(len(inputs)) for j in (0, 1)):
        leaf = inputs[index].requires_grad_()
        found, wanted = (
            torch.autograd.grad(
                loss(function(*inputs)[result : result + 1]) + 0.0 * leaf.sum(), leaf
            )[0]
            for function in (form.attend, form.expected)
        )
        torch.testing.assert_close(found, wanted)
        leaf.requires_grad_(False)


@over_forms
def test_no_graph_without_need(form: Form) -> None:
    assert all(x.grad_fn is None for x in form.attend(*form.make_inputs()))
    with torch.no_grad():
        assert form.attend(*form.make_inputs(requires_grad=True))[0].grad_fn is None
    with torch.inference_mode():
        form.attend(*form.make_inputs())


def test_a_gradient_that_nothing_wants_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    on_cpu = attention_operators.backward_on_cpu

    def spy(call: AttentionCall, incoming: Incoming) -> Any:
        seen.append((incoming.wants_dbias, call.sink is not None))
        return on_cpu(call, incoming)

    monkeypatch.setattr(attention_operators, "backward_on_cpu", spy)
    for wanted in ((), (3,), (4,), (3, 4)):
        inputs = FORMS["masked"].make_inputs()
        leaves = [inputs[index].requires_grad_() for index in (0, *wanted)]
        torch.autograd.grad(loss(masked(*inputs)), leaves)
    assert seen == [(False, False), (True, False), (False, True), (True, True)]


def test_packed_tensors() -> None:
    q, k, v = (x.requires_grad_() for x in FORMS["packed"].make_inputs())
    k, v = k, v[..., :16]
    cu_q, cu_k = STARTS.values()
    out = flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), cu_q, cu_k, None, None)
    torch.testing.assert_close(out, flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 6))
    qkv = torch.stack((q, q * 2.0, q * 3.0), 1)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu_q, torch.tensor(7))
    torch.testing.assert_close(out, flash_attn_varlen_func(*qkv.unbind(1), cu_q, cu_q, 7, 7))


def test_dropout_agrees_with_what_it_says_it_drops() -> None:
    q, k, v = FORMS["packed"].make_inputs(requires_grad=True)
    out, _, s_dmask = flash_attn_varlen_func(
        q, k, v, *STARTS.values(), 7, 6, 0.5, return_attn_probs=True
    )
    assert s_dmask.shape == (3, 4, 7, 6) and not s_dmask.requires_grad
    probs = s_dmask[2, :, :7, :6]
    torch.testing.assert_close(probs.abs().sum(-1), torch.ones(4, 7, dtype=torch.float64))
    kept = probs.masked_fill(probs.signbit(), 0.0) * 2.0
    values = v[5:11].repeat_interleave(2, 1)
    torch.testing.assert_close(out[3:], torch.einsum("hmn,nhd->mhd", kept, values))
    # The backward uses the same mask: out is linear in v.
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum())


@pytest.mark.parametrize("name", ["dense", "masked"])
def test_checkpointed_dropout_is_that_of_the_forward(name: str) -> None:
    """What is recomputed in the backward drops what the forward dropped, compiled or not."""
    torch._dynamo.reset()
    leaves = FORMS[name].make_inputs(requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = None, sink: Any = None) -> Tensor:
        return flash_attn_func(q, k, v, 0.5, attn_mask=bias, sink=sink)

    def checkpointed(*x: Tensor) -> Tensor:
        return checkpoint(attend, *x, use_reentrant=False)

    results = []
    for function in (attend, checkpointed, torch.compile(checkpointed, backend="aot_eager")):
        torch.manual_seed(2)
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@over_packed
def test_dropout_drops_what_it_drops_without_a_mask(is_packed: bool) -> None:
    """A mask that hides nothing, a bias of zeros and no sink leave the call as it was."""
    q, k, v, bias, _ = make_inputs(seqlens=(140, 150))
    sparsity = BlockSparsity.from_mask(torch.ones(140, 150, dtype=torch.bool))
    results = []
    for given in ({}, {"attn_mask": bias.zero_(), "block_mask": sparsity}):
        torch.manual_seed(3)
        if is_packed:
            lengths = (int32(0, 140, 280), int32(0, 150, 300), 140, 150)
            tensors = (x.flatten(0, 1) for x in (q, k, v))
            results.append(flash_attn_varlen_func(*tensors, *lengths, 0.4, **given))
        else:
            results.append(flash_attn_func(q, k, v, 0.4, **given))
    torch.testing.assert_close(*results)


# -- compilers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "aot_eager") for name in FORMS), ("masked", "inductor")]
)
def test_compiled(name: str, backend: str) -> None:
    torch._dynamo.reset()
    form = FORMS[name]
    compiled = torch.compile(form.attend, fullgraph=True, backend=backend)
    inputs = form.make_inputs(requires_grad=True)
    found, wanted = (gradients_of(function, inputs) for function in (compiled, form.expected))
    torch.testing.assert_close(found, wanted)


def counted() -> tuple[list[Any], Callable[..., Any]]:
    """The graphs that a backend was given, and that backend."""
    graphs: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    return graphs, backend


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_dynamic_shapes_of_packed_sequences(dropout_p: float) -> None:
    torch._dynamo.reset()
    graphs, backend = counted()

    def model(qkv: Tensor, cu: Tensor, longest: Any) -> Outputs:
        return flash_attn_varlen_qkvpacked_func(
            qkv * 2.0, cu, longest, dropout_p, window_size=(4, -1), return_attn_probs=True
        )[:2]

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for batch, length in ((3, 7), (5, 9), (6, 11)):
        qkv = torch.randn(batch * length, 3, 2, 8, dtype=torch.float64, requires_grad=True)
        cu = torch.arange(batch + 1, dtype=torch.int32) * length
        results = []
        for function in (model, compiled):
            torch.manual_seed(1)
            outputs = function(qkv, cu, length)
            results.append((*outputs, *torch.autograd.grad(loss(outputs), qkv)))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(compiled(qkv, cu, cu.diff().max())[1], results[0][1])
    assert len(graphs) == 2  # max_seqlen as an integer and as a tensor


def prepared(sparsity: BlockSparsity, *x: Tensor) -> Tensor:
    return flash_attn_func(*x[:3], attn_mask=x[3], block_mask=sparsity, sink=x[4])


def blocks(mask: Tensor, *x: Tensor) -> Tensor:
    options = {"block_mask": mask, "block_size": (64, 128)}
    return flash_attn_func(*x[:3], attn_mask=x[3], sink=x[4], **options)


@pytest.mark.parametrize("function", [prepared, blocks])
def test_dynamic_shapes_of_masks(function: Callable[..., Tensor]) -> None:
    """One graph; its tiles are no two sizes alike, as a compiler would take those for one."""
    torch._dynamo.reset()
    graphs, backend = counted()
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for seqlens in ((330, 840), (390, 900), (460, 1000)):
        leaves = make_inputs(requires_grad=True, seqlens=seqlens)
        if function is prepared:
            mask: Any = make_sparsity(seqlens)
        else:
            mask = torch.rand(2, 1, -(-seqlens[0] // 64), -(-seqlens[1] // 128)) < 0.5
        outs = compiled(mask, *leaves), function(mask, *leaves)
        torch.testing.assert_close(*outs)
        gradients = (torch.autograd.grad(x.sin().sum(), leaves) for x in outs)
        torch.testing.assert_close(*gradients)
    assert len(graphs) == 1


def test_dynamic_shapes_of_dense_masks() -> None:
    """Lists of blocks are made in the graph, of symbols."""
    torch._dynamo.reset()
    graphs, backend = counted()

    def model(q: Tensor, k: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
        most = (q.shape[1], k.shape[1])
        cu_seqlens = (starts * most[0], starts * most[1])
        tensors = (x.flatten(0, 1) for x in (q, k, k))
        out = flash_attn_varlen_func(*tensors, *cu_seqlens, *most, attn_mask=mask)
        return out.view_as(q)

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for seqlens in ((140, 150), (330, 420)):
        q, k, *_ = make_inputs(requires_grad=True, seqlens=seqlens)
        mask = torch.rand(2, 4, *seqlens) < 0.5
        outs = compiled(q, k, mask, int32(0, 1, 2)), attention(q, k, k, mask=mask)[0]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), (q, k)) for x in outs))
    assert len(graphs) == 1


def test_compiled_after_unpadding() -> None:
    """total is a number that only the data tells."""
    torch._dynamo.reset()

    def model(x: Tensor, mask: Tensor) -> Tensor:
        cu = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        return flash_attn_varlen_qkvpacked_func(x[mask], cu, None, causal=True)

    x = torch.randn(2, 6, 3, 2, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(x, mask), model(x, mask))


class Windowed(torch.nn.Module):
    def forward(self, q: Tensor, left: int) -> Tensor:
        return flash_attn_func(q, q, q, window_size=(left, 0))


def windowed(q: Tensor, left: int) -> tuple[Tensor, ...]:
    rows, bounds, window = q.flatten(0, 1), int32(0, 7, 14), {"window_size": (left, 0)}
    of_rows = flash_attn_varlen_func(rows, rows, rows, bounds, bounds, 7, 7, **window)
    return Windowed()(q, left), of_rows, flash_attn_with_kvcache(q, q, q, **window)


def test_windows_of_symbols() -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 7, 4, 16)
    compiled = torch.compile(windowed, fullgraph=True, backend="aot_eager")
    for left in (3, 4, 5, -1):
        torch.testing.assert_close(compiled(q, left), windowed(q, left))
    sizes = {"q": None, "left": Dim.DYNAMIC}
    for strict in (False, True):
        program = torch.export.export(Windowed(), (q, 3), dynamic_shapes=sizes, strict=strict)
        torch.testing.assert_close(program.module()(q, 5), Windowed()(q, 5))


class Module(torch.nn.Module):
    """A call of each form, of a batch and of tokens that may be any."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = torch.nn.Parameter(torch.randn(4))

    def forward(self, q: Tensor, bias: Tensor, rows: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
        of_rows = flash_attn_varlen_func(rows, rows, rows, cu, cu, None, None, causal=True)
        return flash_attn_func(q, q, q, attn_mask=bias, sink=self.sink), of_rows


def test_export_keeps_the_operator() -> None:
    model, (q, bias, rows) = Module(), map(torch.randn, ((2, 7, 4, 16), (1, 4, 7, 7), (10, 2, 8)))
    shapes = ({0: Dim("batch", min=2)}, None, {0: Dim("tokens", min=2)}, {0: Dim("bounds", min=2)})
    program = torch.export.export(
        model, (q, bias, rows, int32(0, 4, 10)), dynamic_shapes=shapes, strict=False
    )
    assert str(program.graph).count("flash_attn_cuda.attention") == 2
    more = (torch.cat((q, q)), bias, torch.cat((rows, rows)), int32(0, 1, 2, 20))
    torch.testing.assert_close(program.module()(*more), model(*more))


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dims", [(16, 16), (192, 128), (20, 16), (16, 20), (20, 12)], ids=str)
def test_fake_cuda_tensors(head_dims: tuple[int, int]) -> None:
    """Shapes on CUDA without a device; head dims that are no multiples of 8 are padded and cut."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    with FakeTensorMode():
        shapes = zip(DENSE, (head_dims[0], *head_dims), strict=True)
        q, k, v = (torch.empty(*shape[:3], d, **half) for shape, d in shapes)
        mask = torch.empty(7, 9, device="cuda", dtype=torch.bool)
        masks = {"block_mask": BlockSparsity.from_mask(mask), "sink": torch.empty(4, **half)}
        masks["attn_mask"] = torch.empty(2, 1, 1, 9, device="cuda")
        rows, cu = [x.flatten(0, 1) for x in (q, k, v)], torch.empty(3, device="cuda").int()
        probs = {"return_attn_probs": True}
        for results, shape, of_lse, dropped in (
            (flash_attn_func(q, k, v, **probs), (2, 7), (2, 4, 7), (0,)),
            (flash_attn_func(q, k, v, **masks, **probs), (2, 7), (2, 4, 7), (0,)),
            (flash_attn_func(q, k, v, 0.1, **probs), (2, 7), (2, 4, 7), (2, 4, 7, 9)),
            (
                flash_attn_varlen_func(*rows, cu, cu, 7, 9, attn_mask=mask, **probs),
                *((14,), (4, 14), (0,)),
            ),
            (
                flash_attn_varlen_func(*rows, cu, cu, 5, None, 0.1, **probs),
                *((14,), (4, 14), (2, 4, 5, 18)),
            ),
        ):
            out, lse, s_dmask = results
            assert out.shape == (*shape, 4, head_dims[1]) and out.device == q.device
            assert lse.shape == of_lse and lse.dtype == torch.float32
            assert s_dmask.shape == dropped and out.dtype == s_dmask.dtype == q.dtype


@over_forms
def test_meta_tensors(form: Form) -> None:
    inputs = form.make_inputs(dtype=torch.float32, device="meta", requires_grad=True)
    out, _ = form.attend(*inputs)
    out.sum().backward()
    assert out.shape == (*form.shapes[0][:-1], 24)
    assert all(x.grad.shape == x.shape and x.grad.dtype == x.dtype for x in inputs)


def test_autocast() -> None:
    """Operators compute in the dtype given; public functions cast. A bias of fp32 stays as it is,
    one of another dtype becomes q's.
    """
    q, k, v, bias, sink = make_inputs(dtype=torch.float32)
    given = arguments(q, k, v, softmax_scale=SCALE)
    wanted = _ops.attention(*given)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(_ops.attention(*given)[0], wanted)
    for of_pairs in (bias, bias.half()):
        of_pairs.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn_func(q, k, v, attn_mask=of_pairs, sink=sink)
        (dbias,) = torch.autograd.grad(out.float().sin().sum(), of_pairs)
        assert out.dtype == torch.bfloat16 and dbias.dtype == of_pairs.dtype
        expected = attention(q, k, v, bias=bias, sink=sink)[0]
        torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)


def test_default_device_does_not_leak_in() -> None:
    q, k, v = FORMS["dense"].make_inputs(requires_grad=True)
    with torch.device("meta"):
        out = flash_attn_func(q, k, v, causal=True)
        (dq,) = torch.autograd.grad(out.sum(), q)
    assert out.device.type == dq.device.type == "cpu"


def test_nothing_to_attend_to() -> None:
    """B = 0, and sequences that are all empty."""
    q = torch.randn(0, 4, 8, requires_grad=True)
    for batch in (0, 2):
        cu = torch.zeros(batch + 1, dtype=torch.int32)
        out, lse, _ = flash_attn_varlen_func(q, q, q, cu, cu, 0, 0, return_attn_probs=True)
        assert out.shape == q.shape and lse.shape == (4, 0)
        out.sum().backward()


# -- wrong arguments -------------------------------------------------------------------------------


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# Whether packed, what is changed of a call with everything, and the error.
# The rules and arrays themselves are in test_rules.py and test_arrays.py.
WRONG: tuple[tuple[bool, dict[str, Any], type[Exception], str], ...] = (
    (False, {"block_rows": None}, ValueError,
     "block_rows: must be given with block_columns, got None"),
    (True, {"block_rows": ints(2, 1, 2, 3)}, ValueError,
     "block_columns: must have shape (2, 1, 1, 4) as block_rows has (2, 1, 2, 3)"),
    (False, {"block_columns": ints(1, 1, 1, 3)}, ValueError,
     "block_columns: must have shape (2, 1, 1, 3) as block_rows has (2, 1, 1, 3)"),
    (False, {"bias": torch.zeros(4, 7, 9).double()}, ValueError,
     "bias: must have shape (2 or 1, 4 or 1, 7 or 1, 9), got (4, 7, 9)"),
    (False, {"bias": torch.zeros(1, 1, 1, 9).half()}, TypeError, "bias: dtype must be torch.float"),
    (False, {"sink": torch.zeros(4)}, TypeError, "sink: dtype must be torch.float64, got torch.f"),
)  # fmt: skip
OF_GRADIENTS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"bias": None}, ValueError, "wants_dbias: must be False without a bias, got True"),
    ({"rng_state": None}, ValueError, "rng_state: must be given with dropout, as the"),
    ({"dlse": torch.zeros(1)}, TypeError, "dlse: dtype must be torch.float64"),
    ({"dout": torch.zeros(2, 7, 4, 8).double()}, ValueError, "dout: must have shape (2, 7, 4, 16)"),
    ({"out": torch.zeros(2, 7, 4, 8).double()}, ValueError, "out: must have shape (2, 7, 4, 16)"),
)


@pytest.mark.parametrize(("is_packed", "changes", "error", "words"), WRONG)
def test_wrong_arguments(
    is_packed: bool, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match="^" + re.escape(words)):
        _ops.attention(*arguments(**forward_fields(is_packed, **changes)))


def test_wrong_arguments_of_gradients() -> None:
    for changes, error, words in OF_GRADIENTS:
        given = gradients_arguments(**backward_fields(packed=False, **changes))
        with pytest.raises(error, match="^" + re.escape(words)):
            _ops.attention_gradients(*given)
