"""What calls with masks touch: nothing that no list names, whatever lists hold. No waiting, CUDA
graphs, the same bits run after run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity, flash_attn_func, flash_attn_varlen_func
from flash_attn_cuda.installed import build_info
from tests.cases import binding
from tests.cases.attention import VarlenCase
from tests.cases.bad_input import Guard
from tests.cases.harness import (
    DEVICE,
    assert_same_bits,
    bits,
    captured,
    make_case,
    make_varlen_case,
    no_host_sync,
    scaled,
)
from tests.cases.masked import MaskedCase, MaskedInputs, RandomBias, RandomMask, expand_blocks
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.matrix import inputs_of
from tests.cases.operators import arguments, attention, gradients_arguments
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 96, 128])
OPS = torch.ops.flash_attn_cuda


# -- what is not visited ---------------------------------------------------------------------------


@HEAD_DIM
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tiles_that_nobody_visits_are_not_read(head_dim: int, causal: bool) -> None:
    """Keys and values of the second tile are NaN for one sequence and key head, those of the last
    one for a sequence; queries and dout of a tile that visits no others than these see NaN alone.
    """
    of = make_case(seqlen_q=500, seqlen_k=500, num_heads_k=2, head_dim=head_dim, causal=causal)
    case = MaskedCase(of, RandomMask(1.0, 128, "bhq", "blocks"))
    inputs = inputs_of(case)
    inputs.blocks[0, :2, :, 1] = False  # of the query heads of key head 0
    inputs.blocks[1, :, :, 3] = False
    inputs = replace(inputs, mask=expand_blocks(inputs.blocks, (128, 128), 500, 500))
    expected, naive = masked_reference(case, inputs)
    for x in (inputs.of.k, inputs.of.v):
        x[0, 128:256, 0] = torch.nan
        x[1, 384:] = torch.nan
    assert_close(run_masked(case, inputs), expected, naive)


@HEAD_DIM
def test_queries_that_visit_no_tile_are_not_read_for_it(head_dim: int) -> None:
    """NaN in the last queries, which see the first tile of keys alone: it is the only one whose
    gradients they reach.
    """
    of = make_case(seqlen_q=400, seqlen_k=400, num_heads_k=2, head_dim=head_dim)
    case = MaskedCase(of, RandomMask(1.0, 128, "q", "blocks"))
    inputs = inputs_of(case)
    inputs.blocks[..., 3, 1:] = False
    inputs.blocks[..., :3, 0] = False
    inputs = replace(inputs, mask=expand_blocks(inputs.blocks, (128, 128), 400, 400))
    expected, naive = masked_reference(case, inputs)
    for x in (inputs.of.q, inputs.of.dout):
        x[:, 384:] = torch.nan
    results = (run_masked(case, inputs), expected, naive)
    for result in results:  # what NaN reaches does not count
        for x in (result.out, result.dq, result.lse.mT):
            x[:, 384:] = 0.0
        for x in (result.dk, result.dv):
            x[:, :128] = 0.0
    assert_close(*results)


def test_what_bits_say_of_other_pieces_does_not_matter() -> None:
    """They are looked at where a list says so, and lists may share them."""
    of = make_case(seqlen_q=300, seqlen_k=400, num_heads_k=2)
    case = MaskedCase(of, RandomMask(0.5, 64, "hq", "sparsity"))
    inputs = inputs_of(case)
    made = BlockSparsity.from_mask(inputs.mask)
    results = []
    for noise in (made.bits, torch.zeros_like(made.bits), torch.full_like(made.bits, -1), None):
        sparsity = replace(made, bits=noise)
        leaves = [x.detach().requires_grad_() for x in (inputs.of.q, inputs.of.k, inputs.of.v)]
        out, lse, _ = flash_attn_func(*leaves, block_mask=sparsity, return_attn_probs=True)
        gradients = torch.autograd.grad(out, leaves, inputs.of.dout)
        results.append(AttentionResult(out.detach(), lse.detach(), *gradients))
    for result in results[1:]:
        assert_same_bits(result, results[0])


# -- lists that are wrong --------------------------------------------------------------------------


def random_like(x: Tensor, least: int, most: int) -> Tensor:
    return torch.randint(least, most, x.shape, device=x.device).to(x.dtype)


def forward_into(out: Tensor, case: MaskedCase, inputs: MaskedInputs, lists: BlockSparsity) -> None:
    """The extension's forward: the public functions make their output themselves."""
    lengths: dict[str, Any] = {}
    if isinstance(case.of, VarlenCase):
        lengths = dict(zip(("max_seqlen_q", "max_seqlen_k"), case.seqlens, strict=True))
        lengths |= inputs.of.lengths()
    binding.forward(
        *(build_info.extension, inputs.of.q, inputs.of.k, inputs.of.v),
        **lengths,
        causal=case.of.causal,
        block_rows=lists.rows,
        mask_bits=lists.bits,
        out=out,
    )


@HEAD_DIM
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "values", [(-(2**31), 2**31), (-3, 300), (0, 5000), (2**30, 2**31)], ids=str
)
def test_corrupt_lists_are_harmless(values: tuple[int, int], packed: bool, head_dim: int) -> None:
    """Counts, orders, tiles and pieces at random, forward and backward: nothing is read or written
    outside of the tensors, and the next call is right.
    """
    if packed:
        of: Any = make_varlen_case(
            lengths_q=(200, 0, 300), num_heads_k=2, head_dim=head_dim, causal=True
        )
    else:
        of = make_case(seqlen_q=300, seqlen_k=300, num_heads_k=2, head_dim=head_dim)
    case = MaskedCase(of, RandomMask(0.5, 1, "hq", "sparsity"))
    inputs = inputs_of(case)
    good = BlockSparsity.from_mask(inputs.mask)
    for given in (good.bits, None):
        bad = replace(
            good,
            rows=random_like(good.rows, *values),
            columns=random_like(good.columns, *values),
            bits=given,
        )
        leaves = [x.detach().requires_grad_() for x in (inputs.of.q, inputs.of.k, inputs.of.v)]
        if packed:
            out = flash_attn_varlen_func(
                *leaves, **inputs.of.lengths(), max_seqlen_q=300, max_seqlen_k=300, block_mask=bad
            )
        else:
            out = flash_attn_func(*leaves, block_mask=bad)
        torch.autograd.grad(out, leaves, inputs.of.dout)
        if DEVICE == "cuda":
            guard = Guard("out", torch.full_like(inputs.of.q, torch.nan), 200 if packed else 1)
            forward_into(guard.tensor, case, inputs, bad)
            guard.check()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert_close(run_masked(case, inputs), *masked_reference(case, inputs))


@pytest.mark.cuda_only
def test_sequences_longer_than_the_mask_see_nothing_beyond_it() -> None:
    """Whatever max_seqlen says: the host does not know that lengths on the device do not fit.
    Nothing faults, and what the mask covers is right.
    """
    of = make_varlen_case(lengths_q=(100, 300), num_heads_k=2)
    case = MaskedCase(of, RandomMask(0.5, 1, "q", "sparsity"))
    inputs = inputs_of(case)
    mask = inputs.mask[..., :128, :128]
    sparsity = BlockSparsity.from_mask(mask)
    tensors = [getattr(inputs.of, name).detach().requires_grad_() for name in "qkv"]
    bounds = {"max_seqlen_q": 128, "max_seqlen_k": 128}
    out = flash_attn_varlen_func(*tensors, **inputs.of.lengths(), **bounds, block_mask=sparsity)
    torch.autograd.grad(out, tensors, inputs.of.dout)
    torch.cuda.synchronize()
    first = [x[:100] for x in tensors]
    expected = flash_attn_func(
        *(x[None] for x in first), block_mask=BlockSparsity.from_mask(mask[..., :100, :100])
    )
    torch.testing.assert_close(out[:100], expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.cuda_only
@HEAD_DIM
@pytest.mark.parametrize("bounds", [(0, 700, 300), (0, -5, 10**9), (-7, 100, 300)], ids=str)
def test_lists_of_sequences_with_wrong_lengths(bounds: tuple[int, ...], head_dim: int) -> None:
    """Nothing is read or written outside of the tensors, and the next call is right."""
    of = make_varlen_case(lengths_q=(200, 100), num_heads_k=2, head_dim=head_dim, causal=True)
    case = MaskedCase(of, RandomMask(0.5, 64, "bhq", "key_lists"))
    inputs = inputs_of(case)
    lists = {name: x for name, x in case.arguments(inputs).items() if name.startswith("key_list")}
    wrong = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seqlens_q": wrong, "cu_seqlens_k": wrong}
    most = {"max_seqlen_q": 300, "max_seqlen_k": 300}
    leaves = [getattr(inputs.of, name).detach().requires_grad_() for name in "qkv"]
    out = flash_attn_varlen_func(*leaves, **lengths, **most, causal=True, **lists)
    torch.autograd.grad(out, leaves, inputs.of.dout)
    assert build_info.extension.device_errors() is not None
    assert_close(run_masked(case, inputs), *masked_reference(case, inputs))


@pytest.mark.cuda_only
def test_lists_of_queries_take_no_memory_of_pairs() -> None:
    """Forward and backward take less than the bits of a mask alone."""
    seqlen = 65_536
    of = make_case(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=4, num_heads_k=1, head_dim=64
    )
    inputs = of.make_inputs()
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    lists = torch.randint(seqlen // 64, (1, seqlen, 1, 16), dtype=torch.int32, device=DEVICE)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_attn_func(*leaves, causal=True, key_lists=lists, key_list_block=64)
    torch.autograd.grad(out, leaves, inputs.dout)
    assert torch.cuda.max_memory_allocated() - before < seqlen**2 // 8


# -- no waiting, graphs ----------------------------------------------------------------------------


STEPS = {
    "mask": (RandomMask(0.3, 1, "hq"), None, None),
    "tiles": (RandomMask(0.3, 128, "bhq"), None, torch.float32),
    "bias": (None, RandomBias("bhq"), None),
    "lists": (RandomMask(0.3, 64, "bhq", "key_lists"), None, torch.float32),
    "all": (RandomMask(0.3, 64, "bhq", "sparsity"), RandomBias("bhq", fp32=True), torch.bfloat16),
}


def step_case(name: str) -> MaskedCase:
    of = make_case(seqlen_q=400, seqlen_k=400, num_heads_k=2, causal=True)
    return MaskedCase(of, *STEPS[name])


@pytest.mark.parametrize("name", STEPS)
def test_nothing_waits_for_the_device(name: str) -> None:
    """Making a BlockSparsity included."""
    case = step_case(name)
    inputs = inputs_of(case)
    run_masked(case, inputs)
    with no_host_sync():
        run_masked(case, inputs)


@pytest.mark.parametrize("name", STEPS)
def test_graphs_replay_with_other_masks(name: str) -> None:
    """A mask is made of what its tensor holds when the graph is replayed."""
    case = step_case(name)
    static = inputs_of(case)
    replay = captured(lambda: run_masked(case, static))
    for seed in (1, 2):
        fresh = case.make_inputs(seed)
        for to, source, names in (
            (static.of, fresh.of, ("q", "k", "v", "dout", "dlse")),
            (static, fresh, ("mask", "blocks", "bias", "sink")),
        ):
            for field in names:
                if getattr(to, field) is not None:
                    getattr(to, field).copy_(getattr(source, field))
        assert_same_bits(replay(), run_masked(case, fresh), f"replay {seed}", summed=case.summed)


def test_graphs_replay_with_other_lists() -> None:
    """A prepared BlockSparsity whose contents are replaced between replays."""
    of = make_case(seqlen_q=400, seqlen_k=400, num_heads_k=2)
    case = MaskedCase(of, RandomMask(0.3, 1, "hq", "sparsity"))
    inputs = inputs_of(case)
    static = BlockSparsity.from_mask(inputs.mask)
    tensors = (inputs.of.q, inputs.of.k, inputs.of.v)
    replay = captured(lambda: flash_attn_func(*tensors, block_mask=static))
    for density in (0.05, 0.9):
        other = replace(case, mask=replace(case.mask, density=density)).make_inputs(1)
        fresh = BlockSparsity.from_mask(other.mask)
        for name in ("rows", "columns", "bits"):
            getattr(static, name).copy_(getattr(fresh, name))
        expected = flash_attn_func(*tensors, block_mask=fresh)
        assert torch.equal(bits(replay()), bits(expected)), density


# -- the same bits ---------------------------------------------------------------------------------


@HEAD_DIM
def test_results_repeat(head_dim: int) -> None:
    of = make_case(
        seqlen_q=scaled(1500, 300), seqlen_k=scaled(1500, 300), num_heads_k=2, head_dim=head_dim
    )
    for deterministic, mask, bias in (
        (False, RandomMask(0.2, 128, "hq", "sparsity"), None),
        (False, RandomMask(0.2, 1, "q", "sparsity"), RandomBias("bhq")),
        (False, RandomMask(0.2, 64, "bhq", "key_lists"), None),
        (True, RandomMask(0.2, 16, "bhq", "key_lists"), None),
        (True, RandomMask(0.8, 128, "bhq", "key_lists"), None),
    ):
        case = MaskedCase(replace(of, deterministic=deterministic), mask, bias, torch.float32)
        inputs = inputs_of(case)
        expected = run_masked(case, inputs)
        for _ in range(3):
            found = run_masked(case, inputs)
            assert_same_bits(found, expected, deterministic=deterministic, summed=case.summed)


# -- opcheck ---------------------------------------------------------------------------------------


def test_opcheck() -> None:
    """dq is summed by atomic adds: two runs may differ by one rounding."""
    of = make_case(seqlen_q=140, seqlen_k=150, num_heads_k=2, causal=True)
    case = MaskedCase(of, RandomMask(0.5, 1, "hq", "sparsity"), RandomBias("bhq"), torch.float32)
    inputs = inputs_of(case)
    made = BlockSparsity.from_mask(inputs.mask)
    q, k, v, bias, sink = (
        x.detach().requires_grad_()
        for x in (inputs.of.q, inputs.of.k, inputs.of.v, inputs.bias, inputs.sink)
    )
    described = {
        "softmax_scale": 0.125,
        "causal": True,
        "block_rows": made.rows,
        "block_columns": made.columns,
        "mask_bits": made.bits,
    }
    forward = arguments(q, k, v, bias=bias, sink=sink, **described)
    close = {"atol": 1e-2, "rtol": 1e-2}
    torch.library.opcheck(OPS.attention.default, forward, **close)
    detached = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    detached = {name: x.detach() for name, x in detached.items()}
    found = attention(**detached, **described)._asdict()
    incoming = {"dout": inputs.of.dout, "dlse": inputs.of.dlse, "wants_dbias": True}
    incoming |= {name: found[name] for name in ("out", "softmax_lse", "rng_state")}
    backward = gradients_arguments(**detached, **described, **incoming)
    torch.library.opcheck(OPS.attention_gradients.default, backward, **close)
