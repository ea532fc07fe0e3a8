"""forward and backward of flash_attn_cuda._C with masks, biases and sinks: their errors, and what
they do with tensors as they come.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.fields import Gradients, Results
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.report.explain import call_of_shapes, explain
from tests.cases import binding
from tests.cases.harness import make_case, skip_without_row
from tests.cases.masked import OWN, MaskedCase, RandomBias

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_only]

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_K, HEAD_DIM = 2, 200, 300, 4, 2, 64
TILES_Q, TILES_K = 2, 3  # of 128
ALL_BY_BITS = 0xAA  # of a tile's four pieces


@pytest.fixture
def extension() -> Any:
    skip_without_row(make_case(head_dim=HEAD_DIM))
    return build_info.extension


def skip_without_features(*features: str) -> None:
    """Skip where the build has no kernels with these features for either pass."""
    for pass_name in ("forward", "backward"):
        if not any(
            row.pass_name == pass_name
            and row.dtype == "bf16"
            and row.head_dim >= HEAD_DIM
            and set(features) <= set(row.features)
            for row in build_info.compiled_rows()
        ):
            pytest.skip(f"no compiled {pass_name} row with {' and '.join(features)}")


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def inputs() -> dict[str, Tensor]:
    keys = (BATCH, SEQLEN_K, HEADS_K, HEAD_DIM)
    return {"q": tensor(BATCH, SEQLEN_Q, HEADS, HEAD_DIM), "k": tensor(*keys), "v": tensor(*keys)}


def packed() -> dict[str, Any]:
    """The same as packed sequences, of which the middle one is empty."""
    lengths = {
        f"cu_seqlens_{name}": torch.tensor([0, seqlen, seqlen, 2 * seqlen]).int().cuda()
        for name, seqlen in (("q", SEQLEN_Q), ("k", SEQLEN_K))
    }
    most = {"max_seqlen_q": SEQLEN_Q, "max_seqlen_k": SEQLEN_K}
    return {**{name: x.flatten(0, 1) for name, x in inputs().items()}, **lengths, **most}


SCALE = {"softmax_scale": 0.125}
OF_BACKWARD = ("dlse", "rng_state", "wants_dbias", "wants_softmax_d")


def forward(extension: Any, **given: Any) -> Results:
    return binding.forward(extension, **{**SCALE, **given})


def backward(extension: Any, **given: Any) -> Gradients:
    """Where `given` lacks them, gradients and results of the forward are made up."""
    q = given["q"]
    own = {
        "dout": torch.ones_like(q),
        "out": torch.ones_like(q),
        "softmax_lse": q.new_ones((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32),
    }
    given = {**SCALE, **own, **given}
    results = given.pop("out"), given.pop("softmax_lse")
    incoming = {name: given.pop(name) for name in OF_BACKWARD if name in given}
    return binding.backward(extension, **given, results=results, incoming=incoming)


# -- errors ----------------------------------------------------------------------------------------


# Of tensors on the CPU tests/cpu/test_arrays.py has them.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wants_dbias": True}, "wants_dbias: must be False without a bias, got True"),
        ({"dropout_p": 0.5},
         "rng_state: must be given with dropout, as the forward returned it, got None"),
        ({"sink": torch.zeros(HEADS)}, "sink: must be on the device of q (cuda:0), got cpu"),
        *(({name: torch.zeros(1)}, f"{name}: must be on the device of q")
          for name in ("dout", "softmax_lse", "dlse")),
    ],
)  # fmt: skip
def test_bad_backwards(extension: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        backward(extension, **inputs(), **changes)


# -- sinks -----------------------------------------------------------------------------------------


def over_cache(extension: Any, **given: Any) -> Results:
    return forward(extension, over_cache=True, **given)


@pytest.mark.parametrize(
    ("function", "make"), [(forward, inputs), (forward, packed), (over_cache, inputs)]
)
def test_a_sink_joins_the_denominator(extension: Any, function: Any, make: Any) -> None:
    given = make()
    sink = torch.tensor([0.0, 6.0, -3.0, -math.inf], device="cuda")
    out, lse, *_ = function(extension, **given)
    with_sink, lse_with_sink, *_ = function(extension, **given, sink=sink)
    by_head = sink[:, None]  # lse is (.., heads, queries)
    torch.testing.assert_close(lse_with_sink, torch.logaddexp(lse, by_head), rtol=1e-5, atol=1e-4)
    share = (lse - lse_with_sink).exp().transpose(-1, -2)[..., None]
    torch.testing.assert_close(with_sink.float(), out.float() * share, rtol=2.0**-6, atol=2.0**-8)


def sink_gradient(sink: Tensor, lse: Tensor, softmax_d: Tensor) -> tuple[Tensor, Tensor]:
    """By definition, in fp64, and the sum of its terms' sizes. Rows with lse -inf, and those that
    the sink has no part in, give 0 whatever softmax_d is.
    """
    lse = lse.double()
    share = (sink.double()[:, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
    of_rows = torch.where(share == 0.0, 0.0, share * softmax_d[..., : lse.shape[-1]].double())
    by_head = of_rows.transpose(0, -2).flatten(1)
    return -by_head.sum(1), by_head.abs().sum(1)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("make", [inputs, packed])
def test_the_gradient_of_a_sink(extension: Any, make: Any, with_dlse: bool) -> None:
    """Whatever dout, out and softmax_lse are, and with lse as it comes."""
    given = make()
    q = given["q"]
    sink = torch.tensor([0.5, -3.0, 2.0, -math.inf], device="cuda")
    rows = (*q.shape[:-3], HEADS, q.shape[-3])
    lse = torch.randn(rows, device="cuda")
    chance = torch.rand(rows, device="cuda")
    lse[chance < 0.1] = -math.inf
    lse[chance > 0.9] = math.inf
    saved = {"dout": tensor(*q.shape), "out": tensor(*q.shape)}
    saved["out"][..., -1, :] = math.nan  # of the head whose sink is none
    if with_dlse:
        saved["dlse"] = torch.randn(rows, device="cuda")
    results = backward(extension, **given, **saved, softmax_lse=lse, sink=sink)
    dsink = results[5]
    expected, terms = sink_gradient(sink, lse, results[3])
    assert dsink.shape == (HEADS,) and dsink[-1] == 0.0
    assert (dsink - expected).abs().le(1e-5 * terms).all(), (dsink, expected)
    other = backward(extension, **given, **saved, softmax_lse=strided(lse), sink=sink)
    assert torch.equal(other[5], dsink)
    saved["softmax_lse"] = lse
    unseen = backward(extension, **given, **saved, sink=sink, wants_softmax_d=False)
    assert unseen[3] is None and torch.equal(unseen[5], dsink)
    without = backward(extension, **given, **saved)
    assert without[5] is None
    # dk, but of the key head whose gradients are nan
    assert torch.equal(without[1][..., :-1, :], results[1][..., :-1, :])


@pytest.mark.parametrize("rows", ["none", "no_sequence"])
def test_the_gradient_of_a_sink_without_queries(extension: Any, rows: str) -> None:
    given = packed()
    if rows == "none":
        given["q"] = given["q"][:0]
    given |= {"cu_seqlens_q": torch.zeros_like(given["cu_seqlens_q"]), "max_seqlen_q": 0}
    sink = torch.zeros(HEADS, device="cuda")
    dsink = backward(extension, **given, sink=sink)[-1]
    assert dsink.shape == (HEADS,) and not dsink.any()


# -- tensors as they come --------------------------------------------------------------------------


def masks() -> dict[str, Tensor]:
    """Lists of all tiles, random bits, and a bias as large as can be."""

    def lists(tiles: int, others: int) -> Tensor:
        row = [others, 0, *(256 * other + ALL_BY_BITS for other in range(others))]
        table = torch.tensor([[row] * tiles] * HEADS, dtype=torch.int32)[None]
        table[..., 1] = torch.arange(tiles)
        return table.repeat(BATCH, 1, 1, 1).cuda()

    shape = (BATCH, HEADS, SEQLEN_Q, 4 * TILES_K)
    return {
        "block_rows": lists(TILES_Q, TILES_K),
        "block_columns": lists(TILES_K, TILES_Q),
        "mask_bits": torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda"),
        "bias": tensor(BATCH, HEADS, SEQLEN_Q, SEQLEN_K),
    }


def both_passes(
    extension: Any, tensors: dict[str, Tensor], dout: Tensor, given: dict[str, Tensor], **more: Any
) -> dict[str, Tensor]:
    """All results but dq, which sums in any order."""
    given = dict(given)
    columns = given.pop("block_columns")
    found = forward(extension, **tensors, **given)
    assert found.rng_state is None
    del given["block_rows"]
    results = {name: getattr(found, name) for name in ("out", "softmax_lse")}
    saved = {"dout": dout, "block_columns": columns, **results}
    gradients = backward(extension, **tensors, **given, **saved, **more)
    return results | {x: getattr(gradients, x) for x in ("dk", "dv", "softmax_d", "dbias")}


def strided(x: Tensor) -> Tensor:
    """The same values, every other element of memory."""
    return torch.stack([x, x], -1)[..., 0]


def test_masks_kernels_cannot_address_are_copied(extension: Any) -> None:
    skip_without_features("block_sparse", "bias")
    tensors, dout, given = inputs(), tensor(BATCH, SEQLEN_Q, HEADS, HEAD_DIM), masks()
    wanted = both_passes(extension, tensors, dout, given, wants_dbias=True)
    odd = {name: strided(x) for name, x in given.items()}
    for name, x in both_passes(extension, tensors, dout, odd, wants_dbias=True).items():
        assert torch.equal(x, wanted[name]), name
    assert wanted["dbias"].shape == given["bias"].shape and wanted["dbias"].any()


@pytest.mark.parametrize("seqlen_k", [SEQLEN_K, SEQLEN_K + 4])
@pytest.mark.parametrize("own", OWN)
def test_dtype_of_dbias(extension: Any, own: str, seqlen_k: int) -> None:
    """fp32 where it is a sum, else the bias's; the values are those for the same bias in fp32."""
    skip_without_features("bias")
    of = make_case(seqlen_q=SEQLEN_Q, seqlen_k=seqlen_k, num_heads_k=HEADS_K)
    drawn = MaskedCase(of, None, RandomBias(own)).make_inputs()
    tensors = {name: getattr(drawn.of, name) for name in "qkv"}
    results = []
    for bias in (drawn.bias, drawn.bias.float()):
        out, lse, *_ = forward(extension, **tensors, bias=bias)
        saved = {"dout": drawn.of.dout, "out": out, "softmax_lse": lse}
        results.append(backward(extension, **tensors, bias=bias, wants_dbias=True, **saved).dbias)
    dbias, of_fp32 = results
    assert dbias.shape == of_fp32.shape == drawn.bias.shape
    assert dbias.dtype == (torch.bfloat16 if own == "bhq" else torch.float32)
    assert of_fp32.dtype == torch.float32
    error = (dbias.float() - of_fp32).abs().max()
    assert error <= 0.03 * of_fp32.abs().max(), f"off by {error}"


def test_expanded_masks_are_those_of_one(extension: Any) -> None:
    """Batch and heads of 1, as they are and expanded; the bias by rows as well."""
    skip_without_features("block_sparse", "bias")
    tensors, dout, given = inputs(), tensor(BATCH, SEQLEN_Q, HEADS, HEAD_DIM), masks()
    one = {name: x[:1, :1] for name, x in given.items()}
    one["bias"] = one["bias"][:, :, :1].float()  # whose gradient is fp32 where it is no sum, too
    whole = {name: one[name].expand_as(x) for name, x in given.items()}
    expanded = both_passes(extension, tensors, dout, whole, wants_dbias=True)
    shared = both_passes(extension, tensors, dout, one, wants_dbias=True)
    for name in ("out", "softmax_lse", "dk", "dv", "softmax_d"):
        assert torch.equal(shared[name], expanded[name]), name
    assert shared["dbias"].shape == one["bias"].shape
    summed = expanded["dbias"].sum((0, 1, 2), keepdim=True)
    torch.testing.assert_close(shared["dbias"], summed, rtol=1e-4, atol=1e-4)


def test_no_dbias_where_none_is_wanted(extension: Any) -> None:
    skip_without_features("bias")
    tensors = inputs()
    given = {"bias": tensor(1, HEADS, SEQLEN_Q, SEQLEN_K, dtype=torch.float32)}
    out = torch.empty_like(tensors["q"])
    results = forward(extension, **tensors, **given, out=out)
    assert results[0] is out
    saved = {"out": out, "softmax_lse": results[1]}
    assert backward(extension, **tensors, **given, **saved)[4] is None


@pytest.mark.parametrize("features", [("block_sparse",), ("bias",), ("block_sparse", "bias")])
def test_explained_kernels_have_the_features(features: tuple[str, ...]) -> None:
    skip_without_features(*features)
    call = call_of_shapes(
        dtype="bf16",
        head_dim=HEAD_DIM,
        batch_size=1,
        seqlen_q=2048,
        seqlen_k=1024,
        num_heads_q=8,
        num_heads_k=2,
        causal=True,
        **dict.fromkeys(features, True),
    )
    for kernel_pass in ("forward", "backward"):
        plan = explain(kernel_pass, call)
        assert set(features) <= set(plan["config"]["features"])
