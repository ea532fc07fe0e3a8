"""deterministic=True: the same bits in every run, while the device is busy with other things. The
forward is bitwise repeatable in any case.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from flash_attn_cuda import BlockSparsity, flash_attn_func
from tests.cases.attention import Alibi
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    attend_over_cache,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward,
    run_forward_backward,
    scaled,
)
from tests.cases.masked import MaskedCase, RandomBias, RandomMask
from tests.cases.masked_harness import run_masked
from tests.cases.matrix import inputs_of
from tests.cases.repeats import (
    REPEATS,
    assert_repeatable,
    assert_same_forward,
    crowded_case,
    reordered,
)

pytestmark = pytest.mark.gpu

BUCKETS = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256, 512])


@BUCKETS
@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"window": (300, 40), "num_heads_k": 2}],
    ids=["full", "causal", "window_gqa"],
)
def test_every_head_dim(head_dim: int, features: dict[str, Any]) -> None:
    assert_repeatable(crowded_case(head_dim=head_dim, **features), REPEATS)


@pytest.mark.parametrize(
    "features",
    [
        {"dropout_p": 0.2, "causal": True},
        {"num_heads_k": 1, "causal": True},
        {"softcap": 5.0, "alibi": Alibi.per_batch},
        {"dtype": torch.float16, "batch": 1, "num_heads_q": 1, "num_heads_k": 1},
        {"seqlen_q": 100, "seqlen_k": scaled(4000, 200)},
        {"head_dim": 59, "causal": True},
        {"head_dim": 192, "head_dim_v": 128, "causal": True},
        {"max_logits": True, "softcap": 30.0},
        {"max_logits": True, "num_heads_k": 1},
    ],
    ids=[
        *("dropout", "mqa", "softcap_alibi", "one_head", "few_queries", "padded", "values"),
        *("softcap_max_logits", "max_logits"),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_features(head_dim: int, features: dict[str, Any]) -> None:
    assert_repeatable(crowded_case(**{"head_dim": head_dim, **features}), REPEATS)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize(
    "features",
    [{}, {"dropout_p": 0.2}, {"num_heads_k": 1, "window": (100, 0)}],
    ids=["causal", "dropout", "window_mqa"],
)
def test_packed_sequences(head_dim: int, features: dict[str, Any]) -> None:
    lengths = (scaled(1500, 150), 1, 0, 300, *(17,) * 20, 700 if not ON_CPU else 70)
    case = make_varlen_case(
        lengths_q=lengths, head_dim=head_dim, causal=True, deterministic=True, **features
    )
    assert_repeatable(case, REPEATS)


@pytest.mark.parametrize(
    "features",
    [
        *({}, {"causal": True, "num_heads_k": 2}, {"window": (300, 40), "dropout_p": 0.2}),
        {"window": (200, -1), "softcap": 5.0},
    ],
    ids=["full", "causal_gqa", "window_dropout", "left_softcap"],
)
@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (RandomMask(0.5, 1, "bhq", "sparsity"), None),
        (RandomMask(0.3, 128, "hq", "blocks"), RandomBias("bhq")),
        *((None, RandomBias(own, fp32=True)) for own in ("hq", "", "bh")),
        (RandomMask(0.1, 64, "q", "blocks"), RandomBias(reach=100)),
    ],
    ids=["bits", "blocks_bias", "bias_of_batch", "bias_of_keys", "bias_of_queries", "by_distance"],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_masks_and_biases(
    head_dim: int, mask: RandomMask | None, bias: RandomBias | None, features: dict[str, Any]
) -> None:
    """With the gradients of a bias, whatever it is shared by, and of a sink."""
    of = crowded_case(head_dim=head_dim, **features)
    assert_repeatable(MaskedCase(of, mask, bias, torch.float32), REPEATS // 8 + 1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_of_packed_sequences(head_dim: int) -> None:
    lengths = (scaled(1500, 150), 1, 0, 300, *(17,) * 20, 700 if not ON_CPU else 70)
    for fields in ({"causal": True}, {"window": (200, -1), "num_heads_k": 1}):
        of = make_varlen_case(lengths_q=lengths, head_dim=head_dim, deterministic=True, **fields)
        case = MaskedCase(of, RandomMask(0.4, 64, "bq", "sparsity"), RandomBias(reach=50))
        assert_repeatable(case, REPEATS // 4 + 1)


def test_lists_that_are_none_keep_nobody_waiting() -> None:
    """What CTAs skip and visit then is another matter."""
    length = scaled(2000, 300)
    of = make_case(seqlen_q=length, seqlen_k=length, deterministic=True)
    inputs = inputs_of(MaskedCase(of, RandomMask(given="sparsity"))).of
    made = BlockSparsity.from_mask(torch.ones(length, length, dtype=torch.bool, device=DEVICE))
    torch.manual_seed(3)
    for high in (5, 1 << 14, 1 << 30):
        columns = torch.randint_like(made.columns, -high, high)
        wrong = replace(made, columns=columns)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = flash_attn_func(*leaves, block_mask=wrong, deterministic=True)
        torch.autograd.grad(out, leaves, inputs.dout)
        assert torch.isfinite(out).all()


@BUCKETS
@pytest.mark.parametrize("lengths", [(150, 1300), (1100, 150), (1100, 1300)])
def test_without_a_fixed_order(head_dim: int, lengths: tuple[int, int]) -> None:
    """All that is added to dq is in it, whoever adds last."""
    seqlen_q, seqlen_k = (scaled(length, 100) for length in lengths)
    for causal in (False, True):
        case = crowded_case(
            head_dim=head_dim,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            causal=causal,
            deterministic=False,
        )
        assert_repeatable(case, REPEATS // 2)


def test_only_the_order_of_sums_differs() -> None:
    """A fixed order changes no gradient by more than a rounding of its sums."""
    case = crowded_case(causal=True, num_heads_k=2)
    inputs = inputs_of(case)
    plain = replace(case, deterministic=False)
    expected, actual = run_forward_backward(plain, inputs), run_forward_backward(case, inputs)
    for name, x in actual.tensors().items():
        assert reordered(x, expected.tensors()[name]).all(), name


@BUCKETS
def test_the_forward_always_gives_the_same_bits(head_dim: int) -> None:
    """Without asking for it, and with everything that makes random numbers or long rows."""
    cases = [
        crowded_case(head_dim=head_dim, causal=True, deterministic=False),
        crowded_case(head_dim=head_dim, dropout_p=0.3, num_heads_k=2, deterministic=False),
        make_varlen_case(lengths_q=(700 if not ON_CPU else 70, 0, 33), head_dim=head_dim),
    ]
    for case in cases:
        inputs = inputs_of(case, backward=False)
        assert_same_forward(partial(run_forward, case, inputs), REPEATS // 4 + 1, str(case))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("mask", "bias"),
    [(None, RandomBias("bhq")), (None, RandomBias("q")), (RandomMask(0.5, 1, "hq"), None)],
    ids=["bias", "shared_bias", "bits"],
)
def test_what_comes_beside_the_keys_is_read_in_time(
    mask: RandomMask | None, bias: RandomBias | None, head_dim: int
) -> None:
    """Tiles of a bias and of a mask's bits, which the next one follows into the same memory."""
    of = crowded_case(seqlen_k=scaled(4096, 160), head_dim=head_dim, deterministic=False)
    case = MaskedCase(of, mask, bias)
    inputs = inputs_of(case, backward=False)
    assert_same_forward(
        partial(run_masked, case, inputs, backward=False), REPEATS // 2 + 1, str(case)
    )


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("seqlens_q", [1, 7])
def test_whichever_split_is_last_combines_them(
    seqlens_q: int, head_dim: int, page_size: int | None
) -> None:
    """The CTAs that share the keys of a tile end in any order."""
    lengths = (scaled(5000, 300), 0, 70, scaled(900, 100))
    case = make_cache_case(
        cached=lengths,
        capacity=scaled(5008, 320),
        seqlens_q=seqlens_q,
        head_dim=head_dim,
        page_size=page_size,
    )
    inputs = inputs_of(case)
    for num_splits in (0, 1, 5):
        run = partial(attend_over_cache, case, inputs, num_splits=num_splits)
        assert_same_forward(lambda run=run: run()[0], REPEATS, f"{case}, {num_splits} splits")


@pytest.mark.cuda_only
def test_workspace_is_at_most_one_fp32_dq() -> None:
    """Beyond what the default mode takes, which sums dq in fp32 as well."""
    peaks = []
    for deterministic in (False, True):
        case = make_case(
            batch=1,
            seqlen_q=4096,
            seqlen_k=4096,
            num_heads_q=16,
            num_heads_k=16,
            head_dim=128,
            causal=True,
            deterministic=deterministic,
        )
        inputs = inputs_of(case)
        run_forward_backward(case, inputs)
        gc.collect()  # what a failed test left behind
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_forward_backward(case, inputs)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    fp32_dq = 4 * inputs.q.numel()
    results = 4 * inputs.q.numel() * inputs.q.element_size()  # out, dq, dk, dv
    results += inputs.q.numel()  # what rounding takes from out
    statistics = 16 * inputs.dlse.numel() + (1 << 20)
    assert peaks[1] <= fp32_dq + results + statistics + (1 << 16)
    assert peaks[1] <= peaks[0] + (1 << 20)
