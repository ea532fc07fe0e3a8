"""Masks, biases and sinks on the CPU backend against the fp64 reference, through the public
functions. How it reads lists and bits: test_masked_lists.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_cuda import BlockSparsity, flash_attn_func, masks
from tests.cases.attention import Alibi
from tests.cases.cpu_harness import assert_fp64_close
from tests.cases.masked import (
    OWN,
    MaskedCase,
    RandomBias,
    RandomMask,
    masked_dense,
    masked_varlen,
)
from tests.cases.masked_harness import (
    attend_masked,
    check_filled_rows,
    masked_reference,
    run_masked,
)
from tests.cases.pairwise import pairwise
from tests.reference import attention_with_gradients
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")

FP64: dict[str, Any] = {"device": "cpu", "head_dim": 8, "dtype": torch.float64}
BASE: dict[str, Any] = {**FP64, "num_heads_q": 4, "num_heads_k": 2}


def check(case: MaskedCase, seed: int = 0) -> None:
    inputs = case.make_inputs(seed)
    assert_fp64_close(run_masked(case, inputs), masked_reference(case, inputs)[0])


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("size", [1, 64, 128])
def test_masks(size: int, own: str) -> None:
    ways = {"attn_mask": (130, 257), "sparsity": (33, 140)}
    if size > 1:
        ways["blocks"] = (300, 70)
    for way, (seqlen_q, seqlen_k) in ways.items():
        mask = RandomMask(0.4, size, own, way)
        check(masked_dense(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **BASE))


LISTS = [(1, 1), (8, 1), (32, 64), (64, 1), (64, 64), (128, 128), (16, 128)]


@pytest.mark.parametrize(("block", "queries"), LISTS)
@pytest.mark.parametrize("own", ["bhq", "h", "bq"])
def test_key_lists(block: int, queries: int, own: str) -> None:
    mask = RandomMask(0.3, block, own, "key_lists", queries)
    check(masked_dense(mask, seqlen_q=150, seqlen_k=201, causal=own == "bq", **BASE))
    for seqlen_q, seqlen_k in ((0, 70), (70, 0), (0, 0)):
        check(masked_dense(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **BASE))
    if queries == 1:
        lengths = {"lengths_q": (33, 0, 70), "lengths_k": (130, 5, 64), "used_k": (100, 5, 0)}
        check(masked_varlen(mask, **lengths, **BASE | {"window": (60, -1)}))


@pytest.mark.parametrize("given", ["attn_mask", "sparsity", "blocks"])
@pytest.mark.parametrize(("block", "queries"), [(16, 1), (64, 64)])
def test_lists_with_another_mask(block: int, queries: int, given: str) -> None:
    make, of = masked_dense, {"seqlen_q": 130, "seqlen_k": 201}
    if queries == 1:
        make, of = masked_varlen, {"lengths_q": (130, 70), "lengths_k": (201, 9)}
    size = 1 if given == "attn_mask" else 64
    listed = make(RandomMask(0.5, block, "bhq", "key_lists", queries), **of, **BASE)
    other = make(RandomMask(0.6, size, "bh", given), **of, **BASE)
    inputs, masking = listed.make_inputs(), other.make_inputs(5)
    both = replace(inputs, mask=inputs.mask & masking.mask)
    more = {name: x for name, x in other.arguments(masking).items() if "mask" in name}
    more |= {name: x for name, x in other.arguments(masking).items() if name == "block_size"}
    assert_fp64_close(run_masked(listed, inputs, **more), masked_reference(listed, both)[0])


def test_larger_masks_of_packed_sequences_with_lists() -> None:
    case = masked_varlen(
        RandomMask(0.5, 16, "bhq", "key_lists"), lengths_q=(30, 7), lengths_k=(60, 9), **BASE
    )
    inputs = case.make_inputs()
    mask = torch.rand(1, 4, 150, 90) < 0.6
    more = {"block_mask": BlockSparsity.from_mask(mask)}
    both = replace(inputs, mask=inputs.mask & mask[..., :30, :60])
    assert_fp64_close(run_masked(case, inputs, **more), masked_reference(case, both)[0])


def test_lists_without_entries() -> None:
    q, k = torch.randn(2, 70, 4, 8), torch.randn(2, 90, 2, 8)
    lists = torch.empty(2, 70, 2, 0, dtype=torch.int32)
    out, lse, _ = flash_attn_func(q, k, k, key_lists=lists, return_attn_probs=True)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key_lists": [0]}, TypeError, "key_lists: must be a torch.Tensor, got list"),
        ({"key_lists": torch.zeros(2, 70, 2, 3).long()}, TypeError, "key_lists: dtype must be "),
        ({"key_lists": torch.zeros(2, 70, 4, 3).int()}, ValueError,
         r"key_lists: must have shape \(2, 70, 2, n\), .*, got \(2, 70, 4, 3\)"),
        ({"key_list_queries": 64}, ValueError, r"key_lists: must have shape \(2, 2, 2, n\)"),
        ({"key_list_block": 24}, ValueError, r"key_list_block: must be one of \(1, 8, .*, got 24"),
        ({"key_list_queries": 2}, ValueError, r"key_list_queries: must be one of .*, got 2"),
        ({"key_list_block": 8.0}, TypeError, "key_list_block: must be an integer, got float"),
        ({"key_lists": None, "key_list_block": 64}, ValueError,
         "key_lists: must be given with a key_list_block of 64, got None"),
    ],
)  # fmt: skip
def test_bad_key_lists(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k = torch.randn(2, 70, 4, 8), torch.randn(2, 90, 2, 8)
    lists = {"key_lists": torch.zeros(2, 70, 2, 3, dtype=torch.int32)}
    with pytest.raises(error, match=f"^{message}"):
        flash_attn_func(q, k, k, **lists | given)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("sink", [None, torch.float64], ids=["no_sink", "sink"])
def test_densities(density: float, sink: torch.dtype | None) -> None:
    """From rows that see nothing, with out 0 and lse -inf or the sink, to all of them."""
    for size in (1, 64):
        mask = RandomMask(density, size, "hq", "sparsity")
        check(masked_dense(mask, None, sink, seqlen_q=150, seqlen_k=150, **BASE))


@pytest.mark.parametrize("block_size", [(64, 64), (64, 192), (256, 64), (128, 128)], ids=str)
def test_block_sizes(block_size: tuple[int, int]) -> None:
    case = masked_dense(RandomMask(), seqlen_q=300, seqlen_k=270, **BASE)
    blocks = torch.rand(2, 1, -(-300 // block_size[0]), -(-270 // block_size[1])) < 0.5
    pairs = blocks.repeat_interleave(block_size[0], 2).repeat_interleave(block_size[1], 3)
    inputs = replace(case.make_inputs(), mask=pairs[..., :300, :270])
    q, k, v = inputs.of.q, inputs.of.k, inputs.of.v
    out = flash_attn_func(q, k, v, block_mask=blocks, block_size=block_size)
    torch.testing.assert_close(out, masked_reference(case, inputs)[0].out)


def test_masks_of_fewer_dimensions() -> None:
    case = masked_dense(seqlen_q=40, seqlen_k=50, **BASE)
    q, k, v = (getattr(case.make_inputs().of, name) for name in "qkv")
    for shape in ((40, 50), (1, 50), (4, 40, 50), (1, 40, 50), (2, 1, 1, 50)):
        mask, bias = torch.rand(shape) < 0.5, torch.randn(shape, dtype=torch.float64)
        wide = mask[(None,) * (4 - len(shape))], bias[(None,) * (4 - len(shape))]
        for narrow, features in ((mask, {"mask": wide[0]}), (bias, {"bias": wide[1]})):
            expected = attention_with_gradients(q, k, v, torch.zeros_like(q), **features)
            torch.testing.assert_close(flash_attn_func(q, k, v, attn_mask=narrow), expected.out)


def test_any_strides() -> None:
    case = masked_dense(seqlen_q=40, seqlen_k=50, **BASE)
    q, k, v = (getattr(case.make_inputs().of, name) for name in "qkv")
    for mask in (torch.rand(1, 1, 40, 50) < 0.5, torch.randn(1, 1, 40, 50, dtype=torch.float64)):
        expected = flash_attn_func(q, k, v, attn_mask=mask)
        for same in (mask.expand(2, 4, 40, 50), mask.mT.contiguous().mT):
            torch.testing.assert_close(flash_attn_func(q, k, v, attn_mask=same), expected)


def test_ready_made_masks() -> None:
    q, k, v = (torch.randn(2, 300, 4, 8, dtype=torch.float64) for _ in range(3))
    made = (
        masks.sliding_window(300, (40, 3), global_tokens=5),
        masks.prefix_lm(300, torch.tensor([7, 200])),
        masks.dilated(300, (5, 5), 9),
        masks.bigbird(300, seed=3),
    )
    for sparsity in made:
        expected = attention_with_gradients(q, k, v, q, mask=sparsity.to_mask()).out
        torch.testing.assert_close(flash_attn_func(q, k, v, block_mask=sparsity), expected)


def test_block_masks_of_torch() -> None:
    """With blocks that are full, partial and hidden, and lists for every sequence and head."""
    q, k, v = (torch.randn(2, 300, 4, 8, dtype=torch.float64) for _ in range(3))

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < 20 + 60 * h + 30 * b

    block_mask = create_block_mask(visible, 2, 4, 300, 300, device="cpu", BLOCK_SIZE=128)
    index = [torch.arange(n).view(shape) for n, shape in zip(
        (2, 4, 300, 300), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True
    )]  # fmt: skip
    expected = attention_with_gradients(q, k, v, q, mask=visible(*index)).out
    torch.testing.assert_close(flash_attn_func(q, k, v, block_mask=block_mask), expected)
    out = flash_attn_func(q, k, v, block_mask=BlockSparsity.from_block_mask(block_mask))
    torch.testing.assert_close(out, expected)


# -- biases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("fp32", [False, True], ids=["same", "fp32"])
def test_biases(own: str, fp32: bool) -> None:
    """Gradients are summed over what a bias is shared by; those of fp32 are rounded to that."""
    for lengths in ((130, 257), (33, 20)):
        seqlen_q, seqlen_k = lengths
        case = masked_dense(
            *(None, RandomBias(own, fp32)), seqlen_q=seqlen_q, seqlen_k=seqlen_k, **BASE
        )
        inputs = case.make_inputs()
        actual, expected = run_masked(case, inputs), masked_reference(case, inputs)[0]
        assert actual.dbias.dtype == inputs.bias.dtype
        if fp32:
            torch.testing.assert_close(actual.dbias, expected.dbias.float())
            actual.dbias = None
        assert_fp64_close(actual, expected)


def test_a_bias_of_minus_infinity_hides() -> None:
    """Also all keys of a row, which then has no gradient; as torch's own attention has it."""
    bias = torch.randn(2, 4, 40, 50, dtype=torch.float64)
    hidden = torch.rand(bias.shape) < 0.5
    hidden[:, :, 3] = True
    bias.masked_fill_(hidden, -torch.inf)
    case = masked_dense(None, RandomBias(), seqlen_q=40, seqlen_k=50, **BASE)
    inputs = replace(case.make_inputs(), bias=bias)
    actual = run_masked(case, inputs)
    assert_fp64_close(actual, masked_reference(case, inputs)[0])
    assert not actual.out[:, 3].any() and not actual.dbias[hidden].any()
    q, k, v = (getattr(inputs.of, name).transpose(1, 2) for name in "qkv")
    expected = scaled_dot_product_attention(q, k, v, bias, enable_gqa=True).transpose(1, 2)
    rows = [i for i in range(40) if i != 3]
    torch.testing.assert_close(actual.out[:, rows], expected[:, rows])


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives_of_a_bias_by_distance(packed: bool) -> None:
    """Those of the bias that it stands for."""
    bias = RandomBias(reach=20)
    case = masked_dense(None, bias, seqlen_q=40, seqlen_k=70, **BASE)
    if packed:
        case = masked_varlen(None, bias, lengths_q=(40, 3), lengths_k=(9, 70), **BASE)
    inputs = case.make_inputs()

    def gradients(is_relative: bool, table: Tensor) -> list[Tensor]:
        given = inputs if is_relative else replace(inputs, relative_bias=None)
        leaf = table if is_relative else case.over_pairs(table)
        leaves = {"bias": leaf, "q": inputs.of.q.clone().requires_grad_()}
        out = attend_masked(case, given, leaves)
        found = torch.autograd.grad(out.square().sum(), (leaves["q"], table), create_graph=True)
        loss = sum(x.sin().sum() for x in found)
        return [out, *found, *torch.autograd.grad(loss, (leaves["q"], table))]

    assert inputs.relative_bias is not None
    table = inputs.relative_bias.requires_grad_()
    for x, y in zip(gradients(True, table), gradients(False, table), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", [-1e9, -1e12, -1e30, "least"])
def test_rows_filled_with_a_large_number(fill: float | str, dtype: torch.dtype) -> None:
    base = {**BASE, "dtype": dtype}
    case = masked_dense(None, RandomBias("hq", fp32=True), seqlen_q=90, seqlen_k=133, **base)
    check_filled_rows(case, torch.finfo(torch.float32).min if fill == "least" else float(fill))


@pytest.mark.parametrize("wanted", [("bias",), ("sink",), ("bias", "sink"), ("q",), ("k", "bias")])
def test_gradients_of_some(wanted: tuple[str, ...]) -> None:
    case = masked_dense(
        *(RandomMask(given="sparsity"), RandomBias("h"), torch.float64),
        seqlen_q=40, seqlen_k=50, **BASE,
    )  # fmt: skip
    inputs = case.make_inputs()
    tensors = {name: getattr(inputs.of, name).clone() for name in "qkv"}
    tensors |= {"bias": inputs.bias.clone(), "sink": inputs.sink.clone()}
    for name in wanted:
        tensors[name].requires_grad_()
    q, k, v, bias, sink = tensors.values()
    sparsity = BlockSparsity.from_mask(inputs.mask)
    out, lse, _ = flash_attn_func(
        q, k, v, attn_mask=bias, block_mask=sparsity, sink=sink, return_attn_probs=True
    )
    leaves = [tensors[name] for name in wanted]
    gradients = torch.autograd.grad([out, lse], leaves, [inputs.of.dout, inputs.of.dlse])
    expected = masked_reference(case, inputs)[0].tensors()
    for name, gradient in zip(wanted, gradients, strict=True):
        torch.testing.assert_close(gradient, expected[f"d{name}"])
    for name in set(tensors) - set(wanted):
        assert tensors[name].grad is None


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_of_one_output(output: int) -> None:
    case = masked_dense(RandomMask(), None, torch.float64, seqlen_q=40, seqlen_k=50, **BASE)
    inputs = case.make_inputs()
    of = inputs.of
    sink = inputs.sink.requires_grad_()
    made = flash_attn_func(
        of.q, of.k, of.v, attn_mask=inputs.mask, sink=sink, return_attn_probs=True
    )
    incoming = (of.dout, of.dlse)[output]
    (actual,) = torch.autograd.grad(made[output], sink, incoming)
    dout, dlse = (of.dout, None) if output == 0 else (torch.zeros_like(of.dout), of.dlse)
    features = {"mask": inputs.mask, "sink": inputs.sink.detach()}
    expected = attention_with_gradients(of.q, of.k, of.v, dout, dlse, **features)
    torch.testing.assert_close(actual, expected.dsink)


def test_sinks_of_minus_infinity_are_none() -> None:
    case = masked_dense(RandomMask(0.02), None, torch.float64, seqlen_q=40, seqlen_k=50, **BASE)
    inputs = case.make_inputs()
    inputs.sink[1] = -torch.inf
    actual, plain = run_masked(case, inputs), run_masked(replace(case, sink=None), inputs)
    assert torch.equal(actual.lse[:, 1], plain.lse[:, 1]) and (plain.lse == -torch.inf).any()
    torch.testing.assert_close(actual.out[:, :, 1], plain.out[:, :, 1])
    assert actual.dsink[1] == 0.0 and actual.dsink.isfinite().all()
    assert_fp64_close(actual, masked_reference(case, inputs)[0])


def test_a_sink_of_any_dtype_gets_its_gradient_in_that() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = masked_dense(
            *(None, None, dtype),
            **{**BASE, "dtype": torch.bfloat16, "seqlen_q": 40, "seqlen_k": 50},
        )
        inputs = case.make_inputs()
        actual = run_masked(case, inputs)
        assert actual.dsink.dtype == dtype
        assert_close(actual, *masked_reference(case, inputs))


# -- together --------------------------------------------------------------------------------------

FEATURES = {
    "lengths": [(1, 1), (33, 64), (130, 140), (200, 70), (3, 290)],
    "heads": [(1, 1), (4, 4), (6, 2)],
    "head_dims": [(8, 8), (16, 8), (8, 24)],
    "mask": [
        *(None, RandomMask(0.5, 1, "q"), RandomMask(0.3, 1, "bhq"), RandomMask(0.5, 64, "hq")),
        *(RandomMask(0.5, 1, "b"), RandomMask(0.6, 128, "bq", "blocks")),
        RandomMask(0.4, 16, "bhq", "key_lists"),
    ],
    "bias": [
        *(None, RandomBias("bhq"), RandomBias("h"), RandomBias("q", hidden=0.3)),
        *(RandomBias(reach=40), RandomBias(reach=500, hidden=0.1)),
    ],
    "sink": [None, torch.float64],
    "causal": [False, True],
    "window": [(-1, -1), (20, -1), (7, 3)],
    "softcap": [0.0, 2.5],
    "alibi": [None, *Alibi],
    "dropout_p": [0.0, 0.17],
}


def together(row: dict[str, Any]) -> dict[str, Any]:
    """Fields of a MaskedCase of a row of FEATURES that there can be."""
    fields = dict(row)
    heads_q, heads_k = fields.pop("heads")
    fields["head_dim"], fields["head_dim_v"] = fields.pop("head_dims")
    mask, bias = fields["mask"], fields["bias"]
    if mask is not None and bias is not None and mask.given == "attn_mask":
        fields["mask"] = replace(mask, given="sparsity")
    if bias is not None and fields["softcap"] > 0.0:
        fields["bias"] = replace(bias, requires_grad=False)
    return {**FP64, **fields, "num_heads_q": heads_q, "num_heads_k": heads_k}


@pytest.mark.parametrize("row", pairwise(FEATURES), ids=lambda row: str(together(row)["mask"]))
def test_everything_together(row: dict[str, Any]) -> None:
    fields = together(row)
    seqlen_q, seqlen_k = fields.pop("lengths")
    check(masked_dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **fields))


PACKED = {
    "lengths": [
        {"lengths_q": (33, 0, 150), "lengths_k": (64, 5, 140)},
        {"lengths_q": (0, 0, 7), "lengths_k": (3, 0, 0)},
        {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
        {"lengths_q": (70, 20), "lengths_k": (200, 90), "leftpad": (60, 90), "used_k": (190, 90)},
    ],
    **{name: FEATURES[name] for name in FEATURES if name != "lengths"},
}


@pytest.mark.parametrize("row", pairwise(PACKED, 1), ids=lambda row: str(together(row)["mask"]))
def test_everything_together_packed(row: dict[str, Any]) -> None:
    fields = together(row)
    lengths = fields.pop("lengths")
    check(masked_varlen(**lengths, **fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_close(dtype: torch.dtype) -> None:
    for mask, bias in (
        (RandomMask(0.3, 1, "bhq"), None),
        (RandomMask(0.5, 64, "q", "blocks"), RandomBias("hq", fp32=True)),
        (None, RandomBias("b")),
        (None, RandomBias(reach=60)),
    ):
        fields = {**BASE, "dtype": dtype, "seqlen_q": 130, "seqlen_k": 150}
        case = masked_dense(mask, bias, torch.float32, **fields)
        inputs = case.make_inputs()
        actual, (expected, naive) = run_masked(case, inputs), masked_reference(case, inputs)
        if dtype == torch.float32:  # as precise as what is computed with
            for name, x in actual.tensors().items():
                exact = expected.tensors()[name]
                assert (x - exact).nan_to_num().abs().max() <= 1e-5 * exact[
                    exact.isfinite()
                ].abs().max(), name
        else:
            assert_close(actual, expected, naive)
