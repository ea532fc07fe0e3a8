"""Masks, biases and sinks beside the tables of test_dense.py and test_varlen.py: ready-made masks,
tensors anywhere in memory, large values, bits that repeat, graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity, flash_attn_func, flash_attn_with_kvcache, masks
from tests.cases.attention import AttentionCase
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    bits,
    captured,
    make_cache_case,
    make_case,
    make_varlen_case,
    no_host_sync,
    scaled,
)
from tests.cases.masked import MaskedCase, MaskedInputs, RandomBias, RandomMask
from tests.cases.masked_harness import (
    check_filled_rows,
    check_large_values,
    run_masked,
    skip_without_masked_row,
)
from tests.cases.matrix import inputs_of
from tests.cases.repeats import Load

pytestmark = pytest.mark.gpu

HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128])


# -- ready-made masks ------------------------------------------------------------------------------


def check_made_mask(check: Check, of: AttentionCase, made: BlockSparsity) -> None:
    """Computes the mask that to_mask() shows."""
    inputs = MaskedInputs(of.make_inputs(), made.to_mask(), None, None, None)
    check(MaskedCase(of, RandomMask(given="sparsity")), inputs=inputs, block_mask=made)


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
    mask = torch.zeros(of.seqlen_q, of.seqlen_k, dtype=torch.bool, device=DEVICE)
    mask[:, 128:200] = True
    mask[:, 130] = False
    mask[70:200] = True
    return of, mask


@HEAD_DIM
@pytest.mark.parametrize("heads_k", [1, 2])
@pytest.mark.parametrize("seqlen_q", [4500, 9000, 16_500])
def test_keys_that_all_queries_see(
    check: Check, seqlen_q: int, heads_k: int, head_dim: int
) -> None:
    of, mask = long_tile_case(seqlen_q, heads_k, head_dim)
    check_made_mask(check, of, BlockSparsity.from_mask(mask))


@HEAD_DIM
def test_gradients_of_shared_tiles_repeat(head_dim: int) -> None:
    """Whoever ends last adds the parts in their order."""
    of, mask = long_tile_case(16_500, 2, head_dim)
    skip_without_masked_row(MaskedCase(of, RandomMask(given="sparsity")))
    inputs = of.make_inputs()
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = flash_attn_func(*leaves, block_mask=BlockSparsity.from_mask(mask))
    first = torch.autograd.grad(out, leaves[1:], inputs.dout, retain_graph=True)
    for _ in range(scaled(30, 2)):
        again = torch.autograd.grad(out, leaves[1:], inputs.dout, retain_graph=True)
        assert all(map(torch.equal, first, again))


@HEAD_DIM
def test_bits_at_any_address(check: Check, head_dim: int) -> None:
    """Hopper kernels load bits by TMA, and leave what it cannot move to the sm80 ones."""
    of = make_case(batch=1, seqlen_q=150, seqlen_k=300, head_dim=head_dim)
    made = BlockSparsity.from_mask(torch.rand(of.seqlen_q, of.seqlen_k, device=DEVICE) < 0.5)
    assert made.bits is not None
    room = torch.empty(made.bits.numel() + 1, dtype=torch.int32, device=DEVICE)
    moved = room[1:].view(made.bits.shape).copy_(made.bits)
    check_made_mask(check, of, replace(made, bits=moved))


@HEAD_DIM
@pytest.mark.parametrize(
    "name", ["prefix_lm", "document", "sliding_window", "dilated", "strided", "bigbird"]
)
def test_ready_made_masks(check: Check, name: str, head_dim: int) -> None:
    """Causal in the mask or in the call."""
    seqlen = scaled(1000, 400)
    of = make_case(batch=2, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_k=2, head_dim=head_dim)
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
    check_made_mask(check, of, made)


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
    inputs = inputs_of(case)
    masked, plain = (
        run_masked(each, inputs, use_dlse=False) for each in (case, replace(case, mask=None))
    )
    for name, x in masked.tensors().items():
        y = plain.tensors()[name].float()
        seen = y.isfinite()
        assert torch.equal(x.isfinite(), seen), name
        error = (x.float() - y)[seen].abs().max()
        assert error <= 0.03 * y[seen].abs().max(), f"{name}: {error}"


# -- biases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [-1e4, -3e4, 1e4])
def test_large_values(fill: float) -> None:
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, dtype=torch.float16)
    check_large_values(MaskedCase(of, None, RandomBias("hq", fp32=True)), fill, rtol=1e-3)


@HEAD_DIM
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", [-1e9, -1e12, -1e30, torch.finfo(torch.float32).min])
def test_filled_rows(fill: float, dtype: torch.dtype, head_dim: int) -> None:
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, head_dim=head_dim, dtype=dtype)
    check_filled_rows(MaskedCase(of, None, RandomBias("hq", fp32=True)), fill)


@pytest.mark.parametrize("fp32", [False, True], ids=["same", "fp32"])
@pytest.mark.parametrize("strides", ["expanded", "transposed", "sliced", "misaligned"])
def test_any_strides(check: Check, strides: str, fp32: bool) -> None:
    """The results are those of a contiguous bias, to the bit but for what is summed by atomics."""
    of = make_case(seqlen_q=130, seqlen_k=200, num_heads_k=2)
    case = MaskedCase(of, None, RandomBias("q" if strides == "expanded" else "bhq", fp32))
    inputs = inputs_of(case)
    bias = inputs.bias
    if strides == "expanded":
        same = bias.expand(2, 4, -1, -1)
    elif strides == "transposed":
        same = bias.mT.contiguous().mT
    elif strides == "sliced":
        same = torch.full((2, 5, 140, 211), torch.nan, dtype=bias.dtype, device=bias.device)
        same = same[:, 1:, 3:133, 5:205].copy_(bias)
    else:
        same = torch.empty(bias.numel() + 1, dtype=bias.dtype, device=bias.device)
        same = same[1:].view(bias.shape).copy_(bias)
    tensors = (inputs.of.q, inputs.of.k, inputs.of.v)
    # What TMA cannot load runs the kernels of a bias in fp32, whatever its dtype.
    suits_tma = strides in ("expanded", "transposed")
    expected = flash_attn_func(*tensors, attn_mask=bias if suits_tma else bias.float())
    assert torch.equal(bits(flash_attn_func(*tensors, attn_mask=same)), bits(expected))
    check(case, inputs=replace(inputs, bias=same))


def test_infinite_gradients_in_a_fixed_order() -> None:
    """Sums of integers know them too."""
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, deterministic=True)
    case = MaskedCase(of, None, RandomBias("h", fp32=True))
    inputs = inputs_of(case)
    inputs.of.dout[0, 7, 1] = torch.inf
    finite = run_masked(case, inputs, use_dlse=False).dbias.isfinite()
    assert not finite[0, 1].any() and finite[0, [0, 2, 3]].all()


# -- sinks -----------------------------------------------------------------------------------------


@HEAD_DIM
def test_values_at_the_ends(check: Check, head_dim: int) -> None:
    """None at all (-inf), ones that no key comes near, and ones that no key notices."""
    of = make_case(seqlen_q=200, seqlen_k=150, num_heads_k=2, head_dim=head_dim, causal=True)
    for mask in (None, RandomMask(0.3, 64, "hq", "sparsity")):
        case = MaskedCase(of, mask, None, torch.float32)
        inputs = case.make_inputs()
        inputs.sink.copy_(torch.tensor([-torch.inf, 40.0, -40.0, 0.0]))
        check(case, inputs=inputs)
        actual, plain = (run_masked(x, inputs) for x in (case, replace(case, sink=None)))
        assert torch.equal(bits(actual.lse[:, 0]), bits(plain.lse[:, 0]))
        assert actual.dsink[0] == 0.0 and actual.out[:, :, 1].abs().max() < 1e-12


def test_queries_without_a_key() -> None:
    """out is 0, lse the sink, and what comes in through lse goes to the sink."""
    of = make_case(seqlen_q=300, seqlen_k=70, num_heads_k=2, causal=True)
    case = MaskedCase(of, None, None, torch.float32)
    inputs = inputs_of(case)
    actual = run_masked(case, inputs)
    assert not actual.out[:, :230].any() and not actual.dq[:, :230].any()
    expected = inputs.sink[None, :, None].expand(2, -1, 230)
    torch.testing.assert_close(actual.lse[:, :, :230], expected)
    changed = replace(inputs, of=replace(inputs.of, dlse=inputs.of.dlse.clone()))
    changed.of.dlse[:, :, :230] += 1.0
    torch.testing.assert_close(
        run_masked(case, changed).dsink, actual.dsink + 2 * 230.0, rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 70), (70, 0)])
def test_sinks_without_queries_or_keys(check: Check, seqlen_q: int, seqlen_k: int) -> None:
    of = make_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2)
    check(MaskedCase(of, None, None, torch.float32))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_a_sink_repeats(deterministic: bool) -> None:
    """Bit for bit, whether or not that is asked of dq too."""
    length = scaled(1500, 300)
    options = {"num_heads_k": 2, "deterministic": deterministic}
    for of in (
        make_case(seqlen_q=length, seqlen_k=length, **options),
        make_varlen_case(lengths_q=(length, 0, 70, *(17,) * 20), causal=True, **options),
    ):
        case = MaskedCase(of, None, None, torch.float32)
        inputs = inputs_of(case)
        expected = run_masked(case, inputs)
        load = Load()
        for _ in range(5):
            load.push()
            assert_same_bits(run_masked(case, inputs), expected, deterministic=deterministic)


def test_graphs_replay_with_other_sinks() -> None:
    """In every dtype, which the call makes fp32 on the device."""
    of = make_case(seqlen_q=130, seqlen_k=150, num_heads_k=2, causal=True)
    inputs = inputs_of(of)
    q, k, v = inputs.q, inputs.k, inputs.v
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sink = torch.zeros(4, dtype=dtype, device=DEVICE)

        def step(sink: Any = sink) -> tuple[torch.Tensor, torch.Tensor]:
            leaf = sink.detach().requires_grad_()
            out = flash_attn_func(q, k, v, sink=leaf)
            return out.detach(), torch.autograd.grad(out, leaf, inputs.dout)[0]

        step()
        with no_host_sync():
            step()
        replay = captured(step)
        for value in (1.0, -2.0):
            sink.copy_(torch.arange(4) * value)
            for x, y in zip(replay(), step(), strict=True):
                assert torch.equal(bits(x), bits(y)), (dtype, value)


def test_decoding_graphs_replay_with_other_sinks() -> None:
    case = make_cache_case(sink=torch.float32)
    inputs = inputs_of(case, backward=False)
    given = inputs.arguments()
    for splits in (1, 5):
        replay = captured(lambda n=splits: flash_attn_with_kvcache(**given, num_splits=n))
        for value in (1.0, -2.0):
            inputs.sink.copy_(torch.arange(4) * value)
            expected = flash_attn_with_kvcache(**given, num_splits=splits)
            assert torch.equal(bits(replay()), bits(expected)), (splits, value)
