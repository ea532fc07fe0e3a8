"""Masks of tiles and of pairs against the fp64 reference, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda import BlockSparsity, flash_attn_func, masks
from tests.cases.attention import HEAD_RATIOS, Alibi, AttentionCase, Layout
from tests.cases.harness import DEVICE, make_case, make_varlen_case, scaled
from tests.cases.masked import OWN, MaskedCase, RandomMask
from tests.cases.masked_harness import CheckMask, run_masked, skip_without_masked_row
from tests.cases.pairwise import pairwise
from tests.reference import attention_with_gradients, low_precision
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128])


@HEAD_DIM
@pytest.mark.parametrize("size", [1, 64, 128])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_densities(check_mask: CheckMask, density: float, size: int, head_dim: int) -> None:
    """Heads with lists of their own; with few visits there are rows and tiles that see nothing."""
    for causal, dtype in ((False, torch.bfloat16), (True, torch.float16)):
        of = make_case(
            batch=1,
            seqlen_q=scaled(700, 300),
            seqlen_k=scaled(901, 390),
            num_heads_k=2,
            head_dim=head_dim,
            causal=causal,
            dtype=dtype,
        )
        check_mask(MaskedCase(of, RandomMask(density, size, "hq", "sparsity")))


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize(
    ("given_as", "size"), [("attn_mask", 1), ("sparsity", 64), ("blocks", 128)]
)
def test_what_shares_a_mask(check_mask: CheckMask, given_as: str, size: int, own: str) -> None:
    of = make_case(batch=3, seqlen_q=200, seqlen_k=333, num_heads_k=2)
    check_mask(MaskedCase(of, RandomMask(0.4, size, own, given_as)))


@pytest.mark.parametrize("head_dim", [8, 32, 40, 59, 72, 96, 111, 160, 192, 200, 256, 512])
@pytest.mark.parametrize("size", [1, 64])
def test_head_dims(check_mask: CheckMask, size: int, head_dim: int) -> None:
    of = make_case(batch=1, seqlen_q=211, seqlen_k=300, num_heads_k=2, head_dim=head_dim)
    check_mask(MaskedCase(of, RandomMask(0.4, size, "hq", "sparsity")))
    check_mask(MaskedCase(replace(of, causal=True), RandomMask(0.4, size, "q", "sparsity")))


LENGTHS = (
    *((1, 1), (1, 300), (300, 1), (3, 64), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127)),
    *((255, 257), (256, 256), (321, 65), (64, 513), (500, 33)),
)


@HEAD_DIM
@CAUSAL
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_lengths(
    check_mask: CheckMask, lengths: tuple[int, int], causal: bool, head_dim: int
) -> None:
    for size in (1, 64, 128):
        of = make_case(
            batch=1,
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=2,
            num_heads_k=1,
            head_dim=head_dim,
            causal=causal,
        )
        check_mask(MaskedCase(of, RandomMask(0.6, size, "hq", "sparsity")), seed=size)


@HEAD_DIM
@CAUSAL
def test_many_tiles(check_mask: CheckMask, causal: bool, head_dim: int) -> None:
    """Lists of any length, from none to all of the tiles, and many of them for every CTA."""
    for density in (0.03, 0.3):
        of = make_case(
            batch=1,
            seqlen_q=scaled(4200, 1200),
            seqlen_k=scaled(3900, 1100),
            num_heads_q=4,
            num_heads_k=2,
            head_dim=head_dim,
            causal=causal,
        )
        check_mask(MaskedCase(of, RandomMask(density, 128, "hq", "blocks")))
        check_mask(MaskedCase(of, RandomMask(density, 1, "q", "sparsity")))


@pytest.mark.parametrize("heads", HEAD_RATIOS, ids=str)
def test_head_ratios(check_mask: CheckMask, heads: tuple[int, int]) -> None:
    """Query heads of one key head, each with lists of its own."""
    of = make_case(batch=2, seqlen_q=140, seqlen_k=270, num_heads_q=heads[0], num_heads_k=heads[1])
    check_mask(MaskedCase(of, RandomMask(0.5, 64, "bhq", "sparsity")))
    check_mask(MaskedCase(replace(of, head_dim=128), RandomMask(0.5, 1, "h", "attn_mask")))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_memory_layouts(check_mask: CheckMask, layout: Layout) -> None:
    for head_dim in (64, 128):
        of = make_case(
            seqlen_q=140, seqlen_k=270, num_heads_k=2, head_dim=head_dim, layout=layout, causal=True
        )
        check_mask(MaskedCase(of, RandomMask(0.5, 64, "q", "sparsity")))


@pytest.mark.parametrize(
    "features",
    [
        {"window": (70, -1)},
        {"window": (-1, 40)},
        {"window": (33, 20)},
        {"softcap": 3.0},
        {"alibi": Alibi.per_head},
        {"alibi": Alibi.per_batch, "causal": True},
        {"dropout_p": 0.17},
        {"dropout_p": 0.5, "softcap": 3.0, "alibi": Alibi.per_head, "window": (90, 5)},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0, "causal": True},
    ],
    ids=lambda features: "-".join(features),
)
@HEAD_DIM
def test_with_other_features(
    check_mask: CheckMask, features: dict[str, Any], head_dim: int
) -> None:
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, head_dim=head_dim, **features)
    for size, own in ((1, "bq"), (128, "hq")):
        check_mask(MaskedCase(of, RandomMask(0.5, size, own, "sparsity")))


# -- packed sequences ------------------------------------------------------------------------------

PACKED: dict[str, dict[str, Any]] = {
    "mixed": {"lengths_q": (64, 0, 200, 17, 130), "lengths_k": (90, 33, 129, 0, 130)},
    "same": {"lengths_q": (200, 0, 17, 333)},
    "empty": {"lengths_q": (0, 0, 0), "lengths_k": (5, 0, 200)},
    "used": {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
    "leftpad": {"lengths_q": (70, 20), "lengths_k": (200, 90), "leftpad": (130, 90)},
}


@HEAD_DIM
@CAUSAL
@pytest.mark.parametrize("lengths", PACKED)
def test_packed(check_mask: CheckMask, lengths: str, causal: bool, head_dim: int) -> None:
    """Sequences have masks of their own, which are larger than most of them."""
    of = make_varlen_case(**PACKED[lengths], num_heads_k=2, head_dim=head_dim, causal=causal)
    for size, own, given_as in (
        (1, "bhq", "attn_mask"),
        (64, "bq", "sparsity"),
        (128, "h", "blocks"),
    ):
        check_mask(MaskedCase(of, RandomMask(0.5, size, own, given_as)))


def test_packed_with_other_features(check_mask: CheckMask) -> None:
    for features in (
        {"window": (70, 3), "alibi": Alibi.per_batch},
        {"dropout_p": 0.3, "softcap": 4.0},
        {"causal": True, "dropout_p": 0.1, "head_dim": 96},
    ):
        of = make_varlen_case(**PACKED["mixed"], num_heads_k=1, **features)
        check_mask(MaskedCase(of, RandomMask(0.5, 1, "bhq", "sparsity")))
        check_mask(MaskedCase(of, RandomMask(0.5, 64, "q", "blocks")))


def test_many_packed_sequences(check_mask: CheckMask) -> None:
    lengths = tuple((7 * i) % 150 for i in range(scaled(200, 30)))
    of = make_varlen_case(lengths_q=lengths, num_heads_q=2, num_heads_k=1, causal=True)
    check_mask(MaskedCase(of, RandomMask(0.4, 64, "bq", "sparsity")))


# -- ready-made masks ------------------------------------------------------------------------------


def long_tile_case(seqlen_q: int, heads_k: int, head_dim: int) -> tuple[AttentionCase, Tensor]:
    """Keys that all queries see: a long tile between short ones, whose steps CTAs share in the
    backward.
    """
    of = make_case(
        batch=1,
        seqlen_q=scaled(seqlen_q, 300),
        seqlen_k=300,
        num_heads_q=2,
        num_heads_k=heads_k,
        head_dim=head_dim,
    )
    skip_without_masked_row(MaskedCase(of, RandomMask(given="sparsity")))
    mask = torch.zeros(of.seqlen_q, of.seqlen_k, dtype=torch.bool, device=DEVICE)
    mask[:, 128:200] = True
    mask[:, 130] = False
    mask[70:200] = True
    return of, mask


@HEAD_DIM
@pytest.mark.parametrize("heads_k", [1, 2])
@pytest.mark.parametrize("seqlen_q", [4500, 9000, 16_500])
def test_keys_that_all_queries_see(seqlen_q: int, heads_k: int, head_dim: int) -> None:
    of, mask = long_tile_case(seqlen_q, heads_k, head_dim)
    check_made_mask(of, BlockSparsity.from_mask(mask))


@HEAD_DIM
def test_gradients_of_shared_tiles_repeat(head_dim: int) -> None:
    """Whoever ends last adds the parts in their order."""
    of, mask = long_tile_case(16_500, 2, head_dim)
    sparsity = BlockSparsity.from_mask(mask)
    inputs = of.make_inputs()
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = flash_attn_func(*leaves, block_mask=sparsity)
    first = torch.autograd.grad(out, leaves[1:], inputs.dout, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(out, leaves[1:], inputs.dout, retain_graph=True)
        assert all(map(torch.equal, first, again))


@HEAD_DIM
def test_bits_at_any_address(head_dim: int) -> None:
    """Hopper kernels load bits by TMA, and leave what it cannot move to the sm80 ones."""
    of = make_case(batch=1, seqlen_q=150, seqlen_k=300, head_dim=head_dim)
    skip_without_masked_row(MaskedCase(of, RandomMask(given="sparsity")))
    mask = torch.rand(of.seqlen_q, of.seqlen_k, device=DEVICE) < 0.5
    made = BlockSparsity.from_mask(mask)
    assert made.bits is not None
    room = torch.empty(made.bits.numel() + 1, dtype=torch.int32, device=DEVICE)
    bits = room[1:].view(made.bits.shape).copy_(made.bits)
    check_made_mask(of, replace(made, bits=bits))


@HEAD_DIM
@pytest.mark.parametrize(
    "name", ["prefix_lm", "document", "sliding_window", "dilated", "strided", "bigbird"]
)
def test_ready_made_masks(name: str, head_dim: int) -> None:
    """The mask that to_mask() shows is what a call computes, causal in the mask or in the call."""
    seqlen = scaled(1000, 400)
    of = make_case(batch=2, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_k=2, head_dim=head_dim)
    case = MaskedCase(of, RandomMask(given="sparsity"))
    skip_without_masked_row(case)
    ids = torch.arange(seqlen, device=DEVICE).expand(2, -1) // torch.tensor(
        [[90], [131]], device=DEVICE
    )
    on = {"device": DEVICE}
    made: BlockSparsity = {
        "prefix_lm": lambda: masks.prefix_lm(seqlen, torch.tensor([7, 300], device=DEVICE)),
        "document": lambda: masks.document(ids, causal=True),
        "sliding_window": lambda: masks.sliding_window(seqlen, (90, 3), global_tokens=5, **on),
        "dilated": lambda: masks.dilated(seqlen, (20, 20), 7, **on),
        "strided": lambda: masks.strided(seqlen, 50, causal=True, **on),
        "bigbird": lambda: masks.bigbird(seqlen, seed=3, **on),
    }[name]()
    check_made_mask(of, made)


def check_made_mask(of: AttentionCase, made: BlockSparsity) -> None:
    inputs = of.make_inputs()
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_func(*leaves, block_mask=made, return_attn_probs=True)
    gradients = torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])
    arguments = (*(x.detach() for x in leaves), inputs.dout, inputs.dlse)
    masked = {"mask": made.to_mask()}
    expected = attention_with_gradients(*arguments, **masked)
    actual = replace(expected, out=out.detach(), lse=lse.detach(), noise={})
    actual.dq, actual.dk, actual.dv = gradients
    assert_close(actual, expected, low_precision(*arguments, **masked))


# -- everything together ---------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "head_dim": (40, 64, 96, 128, 256, 320, 512),
    "heads": ((4, 4), (6, 2), (4, 1)),
    "lengths": ((130, 130), (70, 201), (201, 70), (1, 150), (113, 64), (257, 129)),
    "mask": (
        *(RandomMask(0.5, 1, "bhq", "attn_mask"), RandomMask(0.5, 64, "hq", "sparsity")),
        *(RandomMask(0.5, 128, "bq", "blocks"), RandomMask(0.5, 1, "b", "sparsity")),
    ),
    "range": ({}, {"causal": True}, {"window": (33, -1)}, {"window": (60, 9)}),
    "softcap": (0.0, 4.0),
    "alibi": (None, Alibi.per_head, Alibi.per_batch),
    "dropout_p": (0.0, 0.2),
    "softmax_scale": (None, -0.2),
    "sink": (None, torch.float32),
}


def combined_case(heads: Any, lengths: Any, mask: Any, sink: Any, **fields: Any) -> MaskedCase:
    """A case of one combination of SETTINGS."""
    of = make_case(
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        **fields.pop("range"),
        **fields,
    )
    return MaskedCase(of, mask, None, sink)


@pytest.mark.parametrize("case", [combined_case(**row) for row in pairwise(SETTINGS)], ids=str)
def test_combinations(check_mask: CheckMask, case: MaskedCase) -> None:
    check_mask(case)


@st.composite
def masked_cases(draw: st.DrawFn) -> MaskedCase:
    heads_k = draw(st.integers(1, 3))
    limit = scaled(700, 200)
    of = make_case(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(st.integers(1, limit)),
        seqlen_k=draw(st.integers(1, limit)),
        num_heads_q=heads_k * draw(st.integers(1, 4)),
        num_heads_k=heads_k,
        head_dim=draw(st.sampled_from([64, 128]) | st.integers(1, 256)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        causal=draw(st.booleans()),
        softcap=draw(st.just(0.0) | st.floats(0.5, 50.0, width=32)),
        dropout_p=draw(st.just(0.0) | st.floats(0.01, 0.9)),
    )
    mask = RandomMask(
        draw(st.floats(0.0, 1.0)),
        draw(st.sampled_from([1, 64, 128, 192])),
        draw(st.sampled_from(OWN)),
        "sparsity",
    )
    return MaskedCase(of, mask, None, draw(st.sampled_from([None, torch.bfloat16])))


@settings(
    max_examples=scaled(80, 20),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=masked_cases(), seed=st.integers(0, 1 << 20))
def test_random_cases(check_mask: CheckMask, case: MaskedCase, seed: int) -> None:
    check_mask(case, seed=seed)


# -- dropout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@HEAD_DIM
def test_dropout_drops_what_it_drops_without_a_mask(packed: bool, head_dim: int) -> None:
    """A mask that hides nothing leaves a call with the same seed as it was, gradients included."""
    fields = {"num_heads_k": 2, "head_dim": head_dim, "dropout_p": 0.4, "causal": True}
    if packed:
        of: Any = make_varlen_case(lengths_q=(200, 0, 131), **fields)
    else:
        of = make_case(seqlen_q=200, seqlen_k=333, **fields)
    case = MaskedCase(of, RandomMask(1.0, 1, "q", "sparsity"))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    masked, plain = run_masked(case, inputs), run_masked(replace(case, mask=None), inputs)
    for name, x in masked.tensors().items():
        y = plain.tensors()[name].float()
        error = (x.float() - y).abs().max()
        assert error <= 0.03 * y[y.isfinite()].abs().max(), f"{name}: {error}"
