"""Packed sequences: by tables, lengths of every kind with all features against the fp64 reference,
forward and backward; then what is the same as something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda import (
    check_device_errors,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_cuda.functions.interface import _flash_attn_varlen_backward
from tests.cases.attention import BUCKET_HEAD_DIMS, Alibi, Layout, arrange
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    make_case,
    make_varlen_case,
    run_forward_backward,
    run_reference,
    scaled,
)
from tests.cases.masked import RandomBias, RandomMask
from tests.cases.matrix import BOTH, DTYPES, Call, check_calls, each, grid, inputs_of, pairs
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def lengths(queries: tuple[int, ...], keys: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"lengths_q": queries, "lengths_k": keys}


LENGTHS: dict[str, dict[str, Any]] = {
    "one": lengths((150,)),
    "even": lengths((64, 64, 64)),
    "odd": lengths((1, 129, 17, 64, 63, 200)),
    "with_empty": lengths((0, 70, 0, 0, 33, 0)),
    "single_tokens": lengths((1,) * 37),
    "empty_queries": lengths((0, 40, 0), (50, 70, 0)),
    "empty_keys": lengths((40, 50, 3), (0, 60, 0)),
    "decode": lengths((1, 1, 1, 1), (200, 1, 0, 65)),
    "more_queries": lengths((200, 130, 5), (70, 129, 1)),
    "more_keys": lengths((70, 1, 129), (200, 130, 300)),
    "all_empty": lengths((0, 0, 0)),
    "no_queries": lengths((0, 0), (30, 70)),
    "no_keys": lengths((30, 70), (0, 0)),
    "no_sequences": lengths(()),
}
OF_ANY = {
    "mixed": lengths((64, 0, 200, 17, 130), (90, 33, 129, 0, 130)),
    "same": lengths((200, 0, 17, 333)),
    "empty": lengths((0, 0, 0), (5, 0, 200)),
    "used": {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
    "leftpad": {**lengths((70, 20), (200, 90)), "leftpad": (130, 90)},
}


def log_normal(count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.exp(torch.randn(count, generator=generator) + 4.5).int().tolist())


def with_a_part(of: dict[str, Any]) -> dict[str, Any]:
    """Of each sequence some rows are used, behind some that are padding."""
    queries, keys = of["lengths_q"], of["lengths_k"] or of["lengths_q"]
    return of | {
        "used_q": tuple(n - n // 3 for n in queries),
        "used_k": tuple(n - n // 5 for n in keys),
        "leftpad": tuple(n // 4 for n in keys),
    }


TABLE: dict[str, list[Call]] = {
    "lengths": grid(num_heads_k=2, of=[*LENGTHS.values()], causal=BOTH),
    "buckets": grid(
        head_dim=[*BUCKET_HEAD_DIMS, 40, 59],
        of=[
            LENGTHS["odd"] | {"num_heads_k": 2, "causal": True},
            LENGTHS["more_queries"] | {"num_heads_k": 1, "dtype": FP16},
        ],
    ),
    "max_logits": grid(
        num_heads_k=2, causal=BOTH, max_logits=True, head_dim=[64, 128],
        of=[*LENGTHS.values(), with_a_part(LENGTHS["more_keys"])],
    ),
    "heads": grid(
        heads=[(1, 1), (6, 2), (16, 1), (12, 4)], causal=True,
        of=[LENGTHS["more_keys"], LENGTHS["with_empty"]],
    ),
    "a long one and many tiny ones": grid(
        heads=(2, 1), causal=BOTH,
        lengths_q=(*(3, 1, 0, 2) * 20, scaled(4000, 500), *(1, 0, 5) * 20),
    ),
    "log-normal": grid(num_heads_k=2, causal=True, lengths_q=log_normal(scaled(60, 12))),
    # Rows that are nobody's hold NaN in every input; out, dq, dk, dv are 0 there.
    "parts": grid(
        lengths_q=(64, 17, 128, 33), num_heads_k=2, head_dim=[64, 128],
        used=[
            *({"used_q": (64, 0, 1, 33)}, {"used_k": (1, 17, 0, 30)}),
            {"used_q": (10, 17, 128, 0), "used_k": (64, 5, 100, 3)},
            {"leftpad": (0, 17, 100, 1)},
            {"used_q": (10, 17, 128, 5), "used_k": (64, 5, 100, 33), "leftpad": (60, 5, 0, 3)},
        ],
        of=[
            *({}, {"causal": True}, {"dropout_p": 0.2}),
            {"window": (20, 3), "alibi": Alibi.per_batch},
        ],
    ),
    "value dims": grid(
        lengths_q=(200, 0, 17, 129, 64), lengths_k=(150, 30, 0, 300, 64), num_heads_k=2,
        causal=BOTH,
        head_dims=[(192, 128), (160, 72), (128, 64), (96, 32), (96, 64), (256, 128), (59, 33)],
        used=[
            {},
            {"used_q": (190, 0, 17, 65, 1), "used_k": (150, 20, 0, 257, 33)},
            {
                **{"used_q": (190, 0, 17, 65, 1), "used_k": (150, 20, 0, 257, 33)},
                "leftpad": (10, 0, 0, 64, 32),
            },
        ],
    ),
    "pairs": pairs(
        seed=1,
        of=[
            make(LENGTHS[name])
            for name in ("odd", "with_empty", "more_queries", "more_keys", "empty_keys")
            for make in (dict, with_a_part)
        ],
        dtype=DTYPES,
        head_dim=[32, 64, 96, 111, 128, 192, 256, 320, 512],
        heads=[(4, 4), (6, 2), (4, 1)],
        range=[
            *({}, {"causal": True}, {"window": (33, -1)}, {"window": (-1, 9)}),
            {"window": (40, 3)},
        ],
        softcap=[0.0, 4.0],
        alibi=[None, *Alibi],
        dropout_p=[0.0, 0.2],
        deterministic=BOTH,
        softmax_scale=[None, -0.2],
    ),
}  # fmt: skip

SCORES: dict[str, list[Call]] = {
    # Sequences have masks of their own, which are larger than most of them.
    "masks": grid(
        of=[*OF_ANY.values()], num_heads_k=2, head_dim=[64, 128], causal=BOTH,
        mask=[
            *(RandomMask(0.5, 1, "bhq", "attn_mask"), RandomMask(0.5, 64, "bq", "sparsity")),
            *(RandomMask(0.5, 128, "h", "blocks"), RandomMask(0.4, 64, "bhq", "key_lists")),
        ],
    ),
    "masks and features": grid(
        of=OF_ANY["mixed"], num_heads_k=1,
        mask=[RandomMask(0.5, 1, "bhq", "sparsity"), RandomMask(0.5, 64, "q", "blocks")],
        features=[
            {"window": (70, 3), "alibi": Alibi.per_batch},
            {"dropout_p": 0.3, "softcap": 4.0},
            {"causal": True, "dropout_p": 0.1, "head_dim": 96},
        ],
    ),
    "masks of many sequences": grid(
        lengths_q=tuple((7 * i) % 150 for i in range(scaled(200, 30))), heads=(2, 1), causal=True,
        mask=RandomMask(0.4, 64, "bq", "sparsity"),
    ),
    "biases": grid(
        of=[*OF_ANY.values()], num_heads_k=2, head_dim=[64, 128], causal=BOTH,
        bias=[
            *({"bias": RandomBias("bhq")}, {"bias": RandomBias("h", fp32=True)}),
            *({"bias": RandomBias("")}, {"bias": RandomBias("q", fp32=True)}),
            {"bias": RandomBias(reach=40)},
            {"bias": RandomBias("b"), "mask": RandomMask(0.5, 64, "bhq", "sparsity"), "sink": BF16},
        ],
    ),
    "fixed order": grid(
        of=[*OF_ANY.values()], num_heads_k=2, head_dim=[64, 128], deterministic=True,
        mask=[
            *({"mask": RandomMask(0.4, 1, "bhq", "sparsity")}, {"bias": RandomBias("bh")}),
            {"mask": RandomMask(0.5, 64, "h", "blocks"), "bias": RandomBias("q"), "causal": True},
            {"bias": RandomBias(reach=40), "softcap": 4.0},
        ],
    ),
    # Rows behind the used ones, and of no sequence, have lse -inf and give the sink nothing.
    "sinks": grid(
        of=[*OF_ANY.values()], num_heads_k=2, causal=BOTH, sink=FP32,
        kernel=[{"head_dim": 64}, {"head_dim": 128, "dtype": FP16}],
    ),
    # More shares of a head's gradient than a thread block adds at a time.
    "sinks of many rows": grid(
        lengths_q=scaled((*(150,) * 200, 3000, 1, 0, 77), (150, 300, 1, 0, 77)), heads=(2, 2),
        head_dim=[8, 64, 128, 256, 512], causal=True, sink=FP32,
    ),
}  # fmt: skip


@each(TABLE)
def test_packed(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(SCORES)
def test_masks_biases_and_sinks(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


# -- the same as something else --------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["none", "every_other", "runs"])
def test_more_sequences_than_a_grid_dimension_holds(empty: str) -> None:
    """70,000 sequences of two tokens, empty ones between them; a batch of two tokens says what is
    right.
    """
    count = scaled(70_000, 500)
    dense = make_case(
        batch=count, seqlen_q=2, seqlen_k=2, num_heads_q=2, num_heads_k=1, head_dim=32
    )
    dense = replace(dense, causal=True)
    inputs = inputs_of(dense)
    ends = {
        "none": torch.arange(count + 1) * 2,
        "every_other": (torch.arange(2 * count + 1) + 1) // 2 * 2,
        "runs": torch.cat(
            [torch.zeros(70_000), torch.arange(count + 1) * 2, 2 * count * torch.ones(9)]
        ),
    }[empty]
    cu_seqlens = ends.to(DEVICE, torch.int32)
    leaves = [x.flatten(0, 1).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_varlen_func(
        *(*leaves, cu_seqlens, cu_seqlens, 2, 2), causal=True, return_attn_probs=True
    )
    incoming = [inputs.dout.flatten(0, 1), inputs.dlse.transpose(0, 1).flatten(1)]
    gradients = torch.autograd.grad([out, lse], leaves, incoming)
    unpacked = [x.unflatten(0, (count, 2)) for x in (out, *gradients)]
    lse = lse.unflatten(1, (count, 2)).transpose(0, 1)
    actual = AttentionResult(unpacked[0].detach(), lse.detach(), *unpacked[1:])
    assert_close(actual, *run_reference(dense, inputs))
    check_device_errors()


def test_every_row_of_given_gradients_is_written() -> None:
    """Into tensors that held NaN, rows that nobody uses included."""
    used = {"used_q": (10, 17, 0, 5), "used_k": (64, 0, 100, 2)}
    case = make_varlen_case(lengths_q=(64, 17, 128, 33), num_heads_k=2, causal=True, **used)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs, keep_rounding=False)
    targets = [torch.full_like(x, torch.nan) for x in (inputs.q, inputs.k, inputs.v)]
    softmax_d = _flash_attn_varlen_backward(
        *(inputs.dout, inputs.q, inputs.k, inputs.v, expected.out, expected.lse, *targets),
        *(inputs.cu_seqlens_q, inputs.cu_seqlens_k, 128, 128, 0.0, 0.125, True, -1, -1, 0.0),
        *(None, False),
        dlse=inputs.dlse,
        seqused_q=inputs.seqused_q,
        seqused_k=inputs.seqused_k,
    )
    assert softmax_d.shape == expected.lse.shape
    assert_same_bits(AttentionResult(expected.out, expected.lse, *targets), expected)


def test_max_seqlen_is_only_a_bound() -> None:
    """Exact, too large, unknown, or a tensor that nobody reads: the same bits."""
    case = make_varlen_case(**LENGTHS["odd"], num_heads_k=2, causal=True)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    longest = case.max_seqlen_q
    for bounds in (
        (None, None),
        (longest + 1, 10 * longest),
        (case.total_q, None),
        (1 << 30, 1 << 40),
        (torch.tensor(longest), torch.tensor(longest, dtype=torch.int32)),
        (torch.tensor(longest, device=DEVICE), torch.tensor(3, device=DEVICE)),
    ):
        given = dict(zip(("max_seqlen_q", "max_seqlen_k"), bounds, strict=True))
        assert_same_bits(run_forward_backward(case, inputs, **given), expected, str(bounds))


@pytest.mark.parametrize("head_dim", [64, 59])
def test_packed_functions(head_dim: int) -> None:
    """qkv and kv in one tensor: same bits as the three tensors apart, gradient in one piece."""
    case = make_varlen_case(**LENGTHS["odd"], head_dim=head_dim, causal=True)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}

    qkv = torch.stack([inputs.q, inputs.k, inputs.v], 1).requires_grad_()
    out, lse, _ = flash_attn_varlen_qkvpacked_func(qkv, inputs.cu_seqlens_q, 200, **options)
    (dqkv,) = torch.autograd.grad([out, lse], [qkv], [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, *dqkv.unbind(1)), expected, "qkv")

    q = inputs.q.detach().requires_grad_()
    kv = torch.stack([inputs.k, inputs.v], 1).requires_grad_()
    bounds = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, 200, 200)
    out, lse, _ = flash_attn_varlen_kvpacked_func(q, kv, *bounds, **options)
    dq, dkv = torch.autograd.grad([out, lse], [q, kv], [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, dq, *dkv.unbind(1)), expected, "kv")


@pytest.mark.parametrize("layout", [Layout.packed, Layout.heads_first, Layout.misaligned])
def test_layouts(layout: Layout) -> None:
    case = make_varlen_case(**LENGTHS["more_keys"], num_heads_k=2, causal=True)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    moved = {
        name: arrange(getattr(inputs, name)[None], layout)[0] for name in ("q", "k", "v", "dout")
    }
    assert_same_bits(run_forward_backward(case, replace(inputs, **moved)), expected)
