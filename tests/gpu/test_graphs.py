"""No host sync, and CUDA graphs that are replayed with other lengths than they were captured with.

On the CPU backend a "graph" is the function itself: that debugs the tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    check_device_errors,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_cuda.functions.interface import _flash_attn_forward
from tests.cases.harness import (
    DEVICE,
    assert_same_up_to_one_rounding,
    bits,
    captured,
    make_case,
    no_host_sync,
    scaled,
    skip_without_row,
)
from tests.cases.public_calls import PUBLIC_CALLS, PublicCall, lengths, normal

pytestmark = pytest.mark.gpu

HEADS_Q, HEADS_K = 4, 2
Results = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _rows() -> None:
    skip_without_row(make_case(head_dim=64, causal=True))


def assert_same(actual: Results, expected: Results, context: str) -> None:
    for name, y in expected.items():
        if name == "dq":
            assert_same_up_to_one_rounding(actual[name], y, f"{context}: dq")
        else:
            different = int((bits(actual[name]) != bits(y)).sum())
            assert different == 0, f"{context}: {different} elements of {name} differ"


@pytest.mark.parametrize("call", PUBLIC_CALLS, ids=str)
def test_nothing_waits_for_the_device(call: PublicCall) -> None:
    arguments = call.make(2)
    call.run(call.function, arguments)
    with no_host_sync():
        call.run(call.function, arguments)


@pytest.mark.parametrize("call", PUBLIC_CALLS, ids=str)
def test_every_public_function_can_be_captured(call: PublicCall) -> None:
    """Replayed on new values of the same shapes, results are those of an eager call."""
    if call.dropout:
        pytest.skip("masks change at every replay: see the tests of dropout below")
    static = {name: x.clone() for name, x in call.make(2).items()}
    replay = captured(lambda: call.run(call.function, static))
    for seed in (1, 2):
        torch.manual_seed(seed)
        fresh = call.make(2)
        for name, x in fresh.items():
            static[name].copy_(x)
        assert_same(replay(), call.run(call.function, fresh), f"replay {seed}")


# -- training --------------------------------------------------------------------------------------


def varlen_step(
    tensors: dict[str, Tensor], *, max_seqlen: Any = None, dropout_p: float = 0.0, **options: Any
) -> Results:
    """Forward and backward of packed sequences."""
    leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
    out, lse, dmask = flash_attn_varlen_func(
        *(*leaves, tensors["cu_q"], tensors["cu_k"], max_seqlen, max_seqlen, dropout_p),
        causal=True,
        return_attn_probs=True,
        **options,
    )
    gradients = torch.autograd.grad([out, lse], leaves, [tensors["dout"], tensors["dlse"]])
    results = {"out": out, "lse": lse, "dmask": dmask}
    return results | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def varlen_tensors(total: int, cu_q: Tensor, cu_k: Tensor) -> dict[str, Tensor]:
    return {
        "q": normal(total, HEADS_Q, 64),
        "k": normal(total, HEADS_K, 64),
        "v": normal(total, HEADS_K, 64),
        "dout": normal(total, HEADS_Q, 64),
        "dlse": normal(HEADS_Q, total, dtype=torch.float32),
        "cu_q": cu_q,
        "cu_k": cu_k,
    }


@pytest.mark.parametrize("max_seqlen", [None, 300, "tensor"], ids=str)
def test_training_step_with_other_lengths(max_seqlen: Any) -> None:
    """Captured with even lengths, replayed with one long sequence, with empty ones, with many tiny
    ones: what max_seqlen was while capturing bounds nothing (an int of it is the tensor's size).
    """
    total = 300
    if max_seqlen == "tensor":
        max_seqlen = torch.tensor(100, dtype=torch.int32, device=DEVICE)
    static = varlen_tensors(total, *(lengths(0, 100, 200, 300) for _ in range(2)))
    replay = captured(lambda: varlen_step(static, max_seqlen=max_seqlen))
    for cu_q, cu_k in (
        ((0, 0, 0, 300), (0, 0, 0, 300)),
        ((0, 300, 300, 300), (0, 1, 150, 300)),
        ((0, 1, 2, 300), (0, 299, 299, 300)),
        ((0, 90, 90, 170), (0, 1, 80, 131)),  # fewer tokens than the buffers hold
        ((0, 100, 200, 300), (0, 100, 200, 300)),
    ):
        fresh = varlen_tensors(total, lengths(*cu_q), lengths(*cu_k))
        for name, x in fresh.items():
            static[name].copy_(x)
        assert_same(replay(), varlen_step(fresh), f"{cu_q} {cu_k}")
    check_device_errors()


MANY = 512
TINY = [2 * i for i in range(MANY + 1)]
ONE = [0] * MANY + [1024]
NONE = [0] * (MANY + 1)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
def test_more_sequences_than_tiles(trains: bool) -> None:
    """Sequences may have a tile each, which CTAs draw, or fewer than there are CTAs in all: what
    CTAs draw from begins anew either way. In inference nothing else writes to where it lies."""

    def run(tensors: dict[str, Tensor]) -> Results:
        if trains:
            return varlen_step(tensors)
        bounds = (tensors["cu_q"], tensors["cu_k"], None, None)
        q, k, v = (tensors[name] for name in "qkv")
        return {"out": flash_attn_varlen_func(q, k, v, *bounds, causal=True)}

    static = varlen_tensors(1024, *(lengths(*TINY) for _ in range(2)))
    replay = captured(lambda: run(static))
    for repeat, ends in enumerate((TINY, ONE, ONE, TINY, NONE, ONE, TINY, TINY)):
        fresh = varlen_tensors(1024, *(lengths(*ends) for _ in range(2)))
        for name, x in fresh.items():
            static[name].copy_(x)
        assert_same(replay(), run(fresh), f"replay {repeat}")
    check_device_errors()


def test_training_step_with_fewer_tokens_than_the_buffers_hold() -> None:
    """seqused says how much of each sequence there is: the way to pad a captured step."""
    cu = lengths(0, 64, 128, 192)
    static = varlen_tensors(192, cu, cu) | {"used": lengths(64, 64, 64)}

    def step(tensors: dict[str, Tensor]) -> Results:
        return varlen_step(tensors, seqused_q=tensors["used"], seqused_k=tensors["used"])

    replay = captured(lambda: step(static))
    for used in ((64, 64, 64), (1, 63, 0), (0, 0, 0), (30, 64, 2)):
        fresh = varlen_tensors(192, cu, cu) | {"used": lengths(*used)}
        for name in ("q", "k", "v", "dout"):  # nothing reads beyond what is used
            for b, n in enumerate(used):
                fresh[name][64 * b + n : 64 * (b + 1)] = torch.nan
        for name, x in fresh.items():
            static[name].copy_(x)
        results = replay()
        assert_same(results, step(fresh), str(used))
        for name in ("out", "dq", "dk", "dv"):
            assert results[name].isfinite().all(), f"{used}: {name}"


def test_every_replay_draws_a_fresh_mask() -> None:
    """And the backward of a replay uses the mask of its own forward."""
    shape = (2, 40, HEADS_Q, 64)
    ones = torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
    static = {name: normal(*shape) for name in ("q", "k", "v")}

    def step() -> Results:
        v = static["v"].detach().requires_grad_()
        out, _, dmask = flash_attn_func(
            static["q"], static["k"], v, 0.5, causal=True, return_attn_probs=True
        )
        (dv,) = torch.autograd.grad(out, v, ones)
        return {"out": out.detach(), "dmask": dmask, "dv": dv}

    torch.manual_seed(3)
    replay = captured(step)
    masks = []
    for _ in range(4):
        results = {name: x.clone() for name, x in replay().items()}
        dmask = results["dmask"].float()
        kept = dmask.masked_fill(torch.signbit(dmask), 0.0)
        expected = 2.0 * kept.sum(-2).transpose(1, 2)[..., None]  # dV = dropped P^T 1, kept twice
        torch.testing.assert_close(
            results["dv"].float(), expected.expand(shape), rtol=2.0**-6, atol=2.0**-5
        )
        masks.append(torch.signbit(dmask))
    for i, x in enumerate(masks):
        for y in masks[:i]:
            assert 0.3 < (x ^ y)[..., 20:, :20].float().mean() < 0.7, "masks are not independent"


def test_replays_follow_the_generator() -> None:
    """manual_seed before a replay decides its masks; rng_state says which they were."""
    q = normal(1, 33, HEADS_Q, 64)

    def step() -> tuple[Tensor, ...]:
        return _flash_attn_forward(q, q, q, 0.5, 0.125, False, -1, -1, 0.0, None, True)

    replay = captured(step)

    def seeded(seed: int) -> list[list[Tensor]]:
        torch.manual_seed(seed)
        return [[x.clone() for x in replay()] for _ in range(2)]

    first, again, other = seeded(1), seeded(1), seeded(2)
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x[3], y[3]) and torch.equal(bits(x[2]), bits(y[2]))
    states = {tuple(run[3].tolist()) for run in (*first, *other)}
    assert len(states) == 4
    assert not torch.equal(bits(first[0][2]), bits(first[1][2]))
    assert not torch.equal(bits(first[0][2]), bits(other[0][2]))


# -- decode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [0, 1, 5])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_decode_steps_from_one_graph(paged: bool, num_splits: int) -> None:
    """Each replay appends a token; lengths are advanced on the device, pages change owners."""
    batch, page_size, pages = 3, 16, 20
    capacity = page_size * pages
    steps = 4
    used = lengths(0, 300, 37)
    table = torch.randperm(batch * pages)[: batch * pages].view(batch, pages).int().to(DEVICE)
    shape = (batch * pages, page_size) if paged else (batch, capacity)
    caches = [normal(*shape, HEADS_K, 64) for _ in range(2)]
    static = {"q": normal(batch, 1, HEADS_Q, 64)}
    static |= {name: normal(batch, 1, HEADS_K, 64) for name in "kv"}

    def attend(tensors: Results, into: list[Tensor], at: Tensor, blocks: Tensor) -> Results:
        out, lse = flash_attn_with_kvcache(
            *(tensors["q"], *into, tensors["k"], tensors["v"]),
            cache_seqlens=at,
            block_table=blocks if paged else None,
            causal=True,
            num_splits=num_splits,
            return_softmax_lse=True,
        )
        return {"out": out, "lse": lse, "k_cache": into[0], "v_cache": into[1]}

    replay = captured(lambda: attend(static, caches, used, table))
    start = [x.copy_(normal(*x.shape)).clone() for x in caches]
    eager_caches, eager_used, eager_table = start, lengths(0, 300, 37), table.clone()
    used.copy_(eager_used)
    for step in range(steps):
        fresh = {name: normal(*x.shape) for name, x in static.items()}
        for name, x in fresh.items():
            static[name].copy_(x)
        expected = attend(fresh, eager_caches, eager_used, eager_table)
        assert_same(replay(), expected, f"step {step}")
        used += 1
        eager_used += 1
        if step == 1:  # another sequence takes the place of the longest
            used[1] = eager_used[1] = 5
            for blocks in (table, eager_table):
                blocks[1] = blocks[1].flip(0)
    check_device_errors()


@pytest.mark.parametrize("num_splits", [0, 7])
def test_replays_of_more_parts_than_places(num_splits: int) -> None:
    """What CTAs draw from begins anew with every replay, other calls in between or not."""
    batch = scaled(200, 8)
    caches = [normal(batch, 700, HEADS_K, 64) for _ in range(2)]
    q, used = normal(batch, 1, HEADS_Q, 64), lengths(*[0] * batch)

    def attend(at: Tensor) -> Results:
        out, lse = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=at, num_splits=num_splits, return_softmax_lse=True
        )
        return {"out": out, "lse": lse}

    replay = captured(lambda: attend(used))
    for repeat in range(6):
        used_by = batch if repeat % 3 else batch // 3  # of these, fewer than there are places for
        values = [(repeat * 97 + 41 * i * i) % (701 if i % 5 else 90) for i in range(used_by)]
        values += [0] * (batch - used_by)
        used.copy_(lengths(*values))
        first = {name: x.clone() for name, x in replay().items()}
        assert_same(replay(), first, f"repeat {repeat}")
        if repeat % 2 == 0:
            assert_same(first, attend(lengths(*values)), f"repeat {repeat}")


def test_a_replay_sees_lengths_far_above_the_captured_ones() -> None:
    """Captured with nearly empty caches: grids and splits must not depend on it."""
    capacity = 2000
    caches = [normal(2, capacity, HEADS_K, 64) for _ in range(2)]
    q, used = normal(2, 1, HEADS_Q, 64), lengths(1, 0)

    def attend(at: Tensor) -> Results:
        out, lse = flash_attn_with_kvcache(q, *caches, cache_seqlens=at, return_softmax_lse=True)
        return {"out": out, "lse": lse}

    replay = captured(lambda: attend(used))
    for values in ((2000, 1), (0, 0), (1999, 2000), (64, 65)):
        used.copy_(lengths(*values))
        expected = attend(lengths(*values))
        assert_same(replay(), expected, str(values))
        assert (expected["out"].float().abs().amax((1, 2, 3)) > 0).tolist() == [
            x > 0 for x in values
        ]
