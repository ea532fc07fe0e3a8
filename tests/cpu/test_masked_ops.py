"""The operators of masks, biases and sinks: opcheck, compile, export, torch.func."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_attn_cuda.call import AttentionCall, Incoming
from flash_attn_cuda.operators import attention as attention_operators
from tests.cases.masked_operators import (
    SCALE,
    backward_fields,
    forward_fields,
    int32,
    make_inputs,
    make_sparsity,
)
from tests.cases.operators import arguments, gradients_arguments
from tests.cases.roads import Arrivals, arrivals
from tests.reference import attention

__all__ = ["arrivals"]  # pytest finds it here

_ops = torch.ops.flash_attn_cuda


def both_outputs(*x: Tensor, sparsity: BlockSparsity | None = None) -> tuple[Tensor, Tensor]:
    q, k, v, bias, sink = x
    out, lse, _ = flash_attn_func(
        *(q, k, v), softmax_scale=SCALE, causal=True, return_attn_probs=True,
        attn_mask=bias, block_mask=sparsity, sink=sink,
    )  # fmt: skip
    return out, lse


def expected_outputs(*x: Tensor, sparsity: BlockSparsity | None = None) -> tuple[Tensor, Tensor]:
    q, k, v, bias, sink = x
    mask = None if sparsity is None else sparsity.to_mask()
    return attention(q, k, v, softmax_scale=SCALE, causal=True, mask=mask, bias=bias, sink=sink)


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((x.sin() * (i + 1)).sum() for i, x in enumerate(outputs))


# -- opcheck ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward(packed: bool, requires_grad: bool) -> None:
    opcheck(_ops.attention, arguments(**forward_fields(packed, requires_grad)))
    for without in (("bias", "sink"), ("block_rows", "block_columns", "mask_bits"), ("mask_bits",)):
        given = forward_fields(packed, requires_grad, **dict.fromkeys(without))
        opcheck(_ops.attention, arguments(**given))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dout": None}, {"dlse": None}, {"wants_dbias": False}, {"sink": None}],
    ids=str,
)
def test_opcheck_gradients(packed: bool, changes: dict[str, Any]) -> None:
    given = gradients_arguments(**backward_fields(packed, **changes))
    opcheck(_ops.attention_gradients, given)
    dq, _, _, dbias, dsink = _ops.attention_gradients(*given)
    assert dq.shape == ((14, 4, 16) if packed else (2, 7, 4, 16))
    assert dbias.shape == ((1, 4, 7, 9) if changes.get("wants_dbias", True) else (0,))
    assert dsink.shape == ((0,) if "sink" in changes else (4,))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtype_of_the_gradient_of_a_bias(dtype: torch.dtype, packed: bool) -> None:
    """The bias's own, of tensors without storage too."""
    for wants_dbias in (True, False):
        fields = backward_fields(
            packed, dtype=torch.bfloat16, bias_dtype=dtype, wants_dbias=wants_dbias
        )
        given = gradients_arguments(**fields)
        opcheck(_ops.attention_gradients, given, test_utils="test_faketensor")
        dbias = _ops.attention_gradients(*given)[3]
        assert dbias.dtype == dtype and dbias.shape == ((1, 4, 7, 9) if wants_dbias else (0,))


def test_gradients_are_those_of_autograd() -> None:
    given = forward_fields(packed=False, requires_grad=True, dropout_p=0.3)
    out, lse, _, rng_state, _ = _ops.attention(*arguments(**given))
    assert [x.requires_grad for x in (out, lse, rng_state)] == [True, True, False]
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    leaves = [given[name] for name in ("q", "k", "v", "bias", "sink")]
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    given |= {name: x.detach() for name, x in given.items() if isinstance(x, Tensor)}
    given |= {"dout": dout, "dlse": dlse, "out": out.detach(), "softmax_lse": lse.detach()}
    given |= {"rng_state": rng_state, "wants_dbias": True}
    actual = _ops.attention_gradients(*gradients_arguments(**given))
    torch.testing.assert_close(actual, expected)


# -- compilers, modes, transforms ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(both_outputs, fullgraph=True, backend=backend)
    leaves, sparsity = make_inputs(requires_grad=True), make_sparsity()
    actual = compiled(*leaves, sparsity=sparsity)
    expected = expected_outputs(*leaves, sparsity=sparsity)
    torch.testing.assert_close(actual, expected)
    gradients = (torch.autograd.grad(loss(x), leaves) for x in (actual, expected))
    torch.testing.assert_close(*gradients)


def test_compile_with_dynamic_shapes() -> None:
    """A prepared mask, blocks and biases of any size take one graph; its tiles are no two sizes
    alike, as a compiler would take those for one.
    """

    def prepared(sparsity: BlockSparsity, *x: Tensor) -> tuple[Tensor, Tensor]:
        return both_outputs(*x, sparsity=sparsity)

    def blocks(mask: Tensor, *x: Tensor) -> Tensor:
        q, k, v, bias, sink = x
        return (
            flash_attn_func(
                q, k, v, attn_mask=bias, block_mask=mask, block_size=(64, 128), sink=sink
            ),
        )

    for function in (prepared, blocks):
        torch._dynamo.reset()
        graphs = []

        def backend(module: Any, _: Any, graphs: Any = graphs) -> Any:
            graphs.append(module)
            return module

        compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
        for seqlens in ((330, 840), (390, 900), (460, 1000)):
            leaves = make_inputs(requires_grad=True, seqlens=seqlens)
            if function is prepared:
                mask: Any = make_sparsity(seqlens)
            else:
                mask = torch.rand(2, 1, -(-seqlens[0] // 64), -(-seqlens[1] // 128)) < 0.5
            actual, expected = compiled(mask, *leaves), function(mask, *leaves)
            torch.testing.assert_close(actual, expected)
            gradients = (torch.autograd.grad(loss(x), leaves) for x in (actual, expected))
            torch.testing.assert_close(*gradients)
        assert len(graphs) == 1, function.__name__


@pytest.mark.parametrize(
    ("packed", "backend", "sizes"),
    [(False, "aot_eager", [(40, 50)]), (True, "eager", [(40, 50), (140, 150)])],
    ids=["dense", "packed"],
)
def test_compile_with_a_dense_mask(
    packed: bool, backend: str, sizes: list[tuple[int, int]]
) -> None:
    """Lists of blocks are made in the graph; of symbols, where there are several sizes."""
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
        if not packed:
            return flash_attn_func(q, k, k, attn_mask=mask)
        most = (q.shape[1], k.shape[1])
        cu_seqlens = (starts * most[0], starts * most[1])
        tensors = (x.flatten(0, 1) for x in (q, k, k))
        out = flash_attn_varlen_func(*tensors, *cu_seqlens, *most, attn_mask=mask)
        return out.view_as(q)

    dynamic = len(sizes) > 1
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for seqlens in sizes:
        q, k, *_ = make_inputs(requires_grad=True, seqlens=seqlens)
        mask = torch.rand(2, 4, *seqlens) < 0.5
        actual, expected = compiled(q, k, mask, int32(0, 1, 2)), attention(q, k, k, mask=mask)[0]
        torch.testing.assert_close(actual, expected)
        gradients = (torch.autograd.grad(x.sin().sum(), (q, k)) for x in (actual, expected))
        torch.testing.assert_close(*gradients)


def test_export_keeps_the_operator() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink = torch.nn.Parameter(torch.randn(4))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, attn_mask=bias, sink=self.sink)

    model, (q, k, v, bias, _) = Module(), make_inputs(dtype=torch.float32)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch}, {0: batch}, {0: batch}, None)
    program = torch.export.export(model, (q, k, v, bias), dynamic_shapes=shapes)
    assert "flash_attn_cuda.attention" in str(program.graph)
    more = tuple(torch.cat((x, x)) for x in (q, k, v))
    torch.testing.assert_close(program.module()(*more, bias), model(*more, bias))


@pytest.mark.parametrize("head_dim", [16, 20])
def test_fake_cuda_tensors(head_dim: int) -> None:
    with FakeTensorMode():
        half = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = (torch.empty(2, s, 4, head_dim, **half) for s in (7, 9))
        bias, sink = torch.empty(2, 1, 1, 9, device="cuda"), torch.empty(4, **half)
        mask = torch.empty(7, 9, device="cuda", dtype=torch.bool)
        sparsity = BlockSparsity.from_mask(mask)
        out, lse, s_dmask = flash_attn_func(
            *(q, k, k), attn_mask=bias, block_mask=sparsity, sink=sink, return_attn_probs=True
        )
        assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
        assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32 and s_dmask.shape == (0,)
        cu = torch.empty(3, device="cuda", dtype=torch.int32)
        packed = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), cu, cu, 7, 9)
        out, lse, _ = flash_attn_varlen_func(*packed, attn_mask=mask, return_attn_probs=True)
        assert out.shape == (14, 4, head_dim) and lse.shape == (4, 14)


def test_meta_tensors() -> None:
    half = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    q, bias, sink = (torch.empty(n, **half) for n in ((2, 7, 4, 16), (2, 1, 1, 7), (4,)))
    mask = BlockSparsity.from_mask(torch.empty(7, 7, device="meta", dtype=torch.bool))
    flash_attn_func(q, q, q, attn_mask=bias, block_mask=mask, sink=sink).sum().backward()
    for x in (q, bias, sink):
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype


def test_func_grad() -> None:
    inputs, sparsity = make_inputs(), make_sparsity()
    every = (0, 1, 2, 3, 4)
    gradients = (
        torch.func.grad(lambda *x, f=f: loss(f(*x, sparsity=sparsity)), argnums=every)(*inputs)
        for f in (both_outputs, expected_outputs)
    )
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("index", range(5))
def test_func_grad_through_vmap(index: int) -> None:
    """Where a mapped tensor does not say that it requires grad."""
    inputs = make_inputs()
    x = torch.stack([inputs[index], inputs[index].flip(0)])

    def through(x: Tensor) -> Tensor:
        return loss(both_outputs(*inputs[:index], x, *inputs[index + 1 :]))

    actual = torch.func.grad(lambda x: torch.vmap(through)(x).sum())(x)
    torch.testing.assert_close(actual, torch.stack([torch.func.grad(through)(each) for each in x]))


@pytest.mark.parametrize("index", range(5))
def test_forward_mode(index: int) -> None:
    inputs, sparsity = make_inputs(), make_sparsity()

    def along(function: Any) -> Any:
        def of_one(x: Tensor) -> Any:
            return function(*inputs[:index], x, *inputs[index + 1 :], sparsity=sparsity)

        return torch.func.jvp(of_one, (inputs[index],), (inputs[index].cos(),))[1]

    torch.testing.assert_close(along(both_outputs), along(expected_outputs))


MAPPED: dict[str, tuple[int | None, ...]] = {
    "shared": (0, None, 0, None, None),
    "bias": (None, 0, None, 0, None),
    "sink": (0, 0, 0, 0, 0),
    "mask": (0, 0, 0, 0, None),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_larger_batch(name: str, arrivals: Arrivals) -> None:
    """Where a sink is the same for all entries, and masks and biases are or have a batch of each;
    but for gradients of what is shared, of which each entry has its own.
    """
    in_dims, inputs = MAPPED[name], make_inputs()
    inputs[3] = inputs[3].repeat(2, 1, 1, 1) if in_dims[3] == 0 else inputs[3]
    of_mask = make_sparsity().to_mask()[:1] if name == "mask" else None
    sparsity = None if of_mask is None else BlockSparsity.from_mask(of_mask)
    stacked = [
        x if dim is None else torch.stack([x, x.flip(1) if x.dim() > 1 else 2.0 * x])
        for x, dim in zip(inputs, in_dims, strict=True)
    ]

    def of(function: Any) -> Any:
        def derivatives(*x: Tensor) -> Any:
            def outputs(*moved: Tensor) -> Any:
                return function(*moved, *x[3:], sparsity=sparsity)

            along = torch.func.jvp(outputs, x[:3], x[:3])
            return along, torch.func.grad(lambda *y: loss(outputs(*y)), (0, 1, 2))(*x[:3])

        return torch.vmap(derivatives, in_dims)(*stacked)

    found = of(both_outputs)
    torch.testing.assert_close(found, of(expected_outputs))
    shapes = {tuple(x.q.shape[:1]) for x in arrivals.forward}
    assert shapes == ({(2,)} if name == "sink" else {(4,)})


@pytest.mark.parametrize("mapped", ["q", "sink"])
def test_vmap_with_dropout(mapped: str) -> None:
    q, k, v, _, sink = make_inputs()
    given = {"q": q, "k": k, "v": v, "sink": sink}
    x = torch.stack([given[mapped]] * 2)

    def attend(x: Tensor) -> Tensor:
        return flash_attn_func(**{**given, mapped: x}, dropout_p=0.5)

    with pytest.raises(RuntimeError, match=r"^dropout_p: .*got randomness='error'"):
        torch.vmap(attend)(x)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: .*randomness='same'"):
        torch.vmap(attend, randomness="same")(x)
    torch.manual_seed(0)
    out = torch.vmap(attend, randomness="different")(x)
    torch.manual_seed(0)
    torch.testing.assert_close(out, torch.stack([attend(each) for each in x]))
    assert not torch.equal(out[0], out[1])


def test_double_backward() -> None:
    inputs, sparsity = make_inputs(requires_grad=True), make_sparsity()
    second = []
    for function in (both_outputs, expected_outputs):
        first = torch.autograd.grad(
            loss(function(*inputs, sparsity=sparsity)), inputs, create_graph=True
        )
        second.append(torch.autograd.grad(loss(first), inputs))
    torch.testing.assert_close(*second)


def test_no_graph_without_need() -> None:
    assert both_outputs(*make_inputs())[0].grad_fn is None
    with torch.no_grad():
        assert both_outputs(*make_inputs(requires_grad=True))[0].grad_fn is None
    with torch.inference_mode():
        both_outputs(*make_inputs(), sparsity=make_sparsity())


def test_a_gradient_that_nothing_wants_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    on_cpu = attention_operators.backward_on_cpu

    def spy(call: AttentionCall, incoming: Incoming) -> Any:
        seen.append((incoming.wants_dbias, call.sink is not None))
        return on_cpu(call, incoming)

    monkeypatch.setattr(attention_operators, "backward_on_cpu", spy)
    for wanted in ((), (3,), (4,), (3, 4)):
        inputs = make_inputs()
        leaves = [inputs[index].requires_grad_() for index in (0, *wanted)]
        torch.autograd.grad(loss(both_outputs(*inputs)), leaves)
    assert seen == [(False, False), (True, False), (False, True), (True, True)]


# -- wrong arguments -------------------------------------------------------------------------------

OPERATOR: list[tuple[bool, dict[str, Any], type[Exception], str]] = [
    (
        False,
        {"block_rows": None},
        ValueError,
        "block_rows: must be given with block_columns, got None",
    ),
    (
        False,
        {"block_columns": None},
        ValueError,
        "block_columns: must be given with block_rows, got None",
    ),
    (
        False,
        {"block_rows": None, "block_columns": None},
        ValueError,
        "mask_bits: must be None without a block mask, got a tensor",
    ),
    (
        False,
        {"block_rows": torch.zeros(2, 1, 1, 3)},
        TypeError,
        "block_rows: dtype must be torch.int32, got torch.float32",
    ),
    (
        False,
        {"block_rows": torch.zeros(2, 1, 2, 3).int()},
        ValueError,
        "block_rows: must have shape (2 or 1, 4 or 1, 1, 3), got (2, 1, 2, 3)",
    ),
    (
        True,
        {"block_rows": torch.zeros(2, 1, 2, 2).int()},
        ValueError,
        "block_rows: must have shape (2 or 1, 4 or 1, 1 or more, 3 or more), got (2, 1, 2, 2)",
    ),
    (
        True,
        {"block_rows": torch.zeros(2, 1, 2, 3).int()},
        ValueError,
        "block_columns: must have shape (2, 1, 1, 4) as block_rows has (2, 1, 2, 3)",
    ),
    (
        False,
        {"block_columns": torch.zeros(1, 1, 1, 3).int()},
        ValueError,
        "block_columns: must have shape (2, 1, 1, 3) as block_rows has (2, 1, 1, 3)",
    ),
    (
        False,
        {"mask_bits": torch.zeros(2, 1, 7, 3).int()},
        ValueError,
        "mask_bits: must have shape (2 or 1, 4 or 1, 7, 4), got (2, 1, 7, 3)",
    ),
    (
        True,
        {"mask_bits": torch.zeros(2, 1, 7, 8).int()},
        ValueError,
        "mask_bits: must have the rows and words of block_rows, (2, 1, 1, 3), got shape (2,",
    ),
    (
        False,
        {"bias": torch.zeros(4, 7, 9).double()},
        ValueError,
        "bias: must have shape (2 or 1, 4 or 1, 7 or 1, 9), got (4, 7, 9)",
    ),
    (False, {"bias": torch.zeros(1, 1, 1, 9).half()}, TypeError, "bias: dtype must be torch.float"),
    (False, {"sink": torch.zeros(4)}, TypeError, "sink: dtype must be torch.float64, got torch.f"),
    (False, {"max_seqlen_k": 8}, ValueError, "max_seqlen_k: must be the length of k (9) without"),
    (
        False,
        {"seqused_q": int32(7, 2)},
        ValueError,
        "seqused_q: must be None without cu_seqlens_q, got a tensor",
    ),
    (True, {"seqused_q": int32(7)}, ValueError, "seqused_q: must have shape (2,), got (1,)"),
]


@pytest.mark.parametrize(
    ("packed", "changes", "error", "words"), OPERATOR, ids=lambda x: str(x)[:60]
)
def test_wrong_operator_arguments(
    packed: bool, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match="^" + re.escape(words)):
        _ops.attention(*arguments(**forward_fields(packed, **changes)))


def test_wrong_arguments_of_the_gradients() -> None:
    for changes, error, words in (
        ({"bias": None}, ValueError, "wants_dbias: must be False without a bias, got True"),
        ({"softcap": 1.0}, NotImplementedError, "attn_mask: has no gradient with softcap"),
        ({"deterministic": True}, NotImplementedError, "deterministic: must be False with a block"),
        ({"rng_state": None}, ValueError, "rng_state: must be given with dropout, as the"),
        ({"dlse": torch.zeros(1)}, TypeError, "dlse: dtype must be torch.float64"),
    ):
        with pytest.raises(error, match="^" + re.escape(words)):
            given = gradients_arguments(**backward_fields(packed=False, **changes))
            _ops.attention_gradients(*given)
