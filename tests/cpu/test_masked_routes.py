"""Where calls with masks, biases and sinks go: the extension or the operators, and with what."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_attn_cuda.cpu import backward_on_cpu
from flash_attn_cuda.cpu.tiles import sink_gradient
from tests.cases.masked_operators import backward_fields, int32, make_inputs, make_sparsity
from tests.cases.operators import backward_call
from tests.cases.roads import Extension, extension
from tests.reference import attention

__all__ = ["extension"]  # pytest finds it here

# -- dropout, autocast -----------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dropout_drops_what_it_drops_without_a_mask(packed: bool) -> None:
    """A mask that hides nothing, a bias of zeros and no sink leave the call as it was."""
    q, k, v, bias, _ = make_inputs(seqlens=(140, 150))
    sparsity = BlockSparsity.from_mask(torch.ones(140, 150, dtype=torch.bool))
    masks = {"attn_mask": bias.zero_(), "block_mask": sparsity}
    results = []
    for given in ({}, masks):
        torch.manual_seed(3)
        if packed:
            lengths = (int32(0, 140, 280), int32(0, 150, 300), 140, 150)
            tensors = (x.flatten(0, 1) for x in (q, k, v))
            results.append(flash_attn_varlen_func(*tensors, *lengths, 0.4, **given))
        else:
            results.append(flash_attn_func(q, k, v, 0.4, **given))
    torch.testing.assert_close(*results)


def test_checkpointed_dropout_is_that_of_the_forward() -> None:
    leaves, sparsity = make_inputs(requires_grad=True), make_sparsity()

    def attend(*x: Tensor) -> Tensor:
        return flash_attn_func(*x[:3], 0.5, attn_mask=x[3], block_mask=sparsity, sink=x[4])

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(2)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
        else:
            out = attend(*leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    torch.testing.assert_close(results[1], results[0])


def test_autocast() -> None:
    """A bias of fp32 stays as it is; one of another dtype becomes q's."""
    q, k, v, bias, sink = make_inputs(dtype=torch.float32)
    for given in (bias, bias.half()):
        given.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn_func(q, k, v, attn_mask=given, sink=sink)
        assert out.dtype == torch.bfloat16
        (dbias,) = torch.autograd.grad(out.float().sin().sum(), given)
        assert dbias.dtype == given.dtype
        expected = attention(q, k, v, bias=bias, sink=sink)[0]
        torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)


# -- routes ----------------------------------------------------------------------------------------


class TestExtensionRoute:
    """What the extension is given, with a stand-in for it and its CUDA tensors."""

    def test_inference(self, extension: Extension) -> None:
        """Straight to the extension: head_dim padded, a parameter as the tensor that it is."""
        q, k, v, bias, sink = make_inputs(dtype=torch.bfloat16)
        sparsity = make_sparsity()
        out, lse, _ = flash_attn_func(
            *(x[..., :13] for x in (q, k, v)), window_size=(10**12, 0), attn_mask=bias,
            block_mask=sparsity, sink=torch.nn.Parameter(sink, requires_grad=False),
            return_attn_probs=True,
        )  # fmt: skip
        (given,) = extension.calls
        assert out.shape == (2, 7, 4, 13) and lse.shape == (2, 4, 7)
        assert given.q.shape[-1] == 16 and given.softmax_scale == 13**-0.5
        assert given.block_rows is sparsity.rows and given.block_columns is sparsity.columns
        assert given.mask_bits is sparsity.bits and given.cu_seqlens_q is None
        assert given.bias.shape == (1, 4, 7, 9) and given.bias.dtype == torch.bfloat16
        assert type(given.sink) is Tensor and given.sink.dtype == torch.float32
        assert given.window_size_left == 2**31 - 1 and given.window_size_right == 0

    def test_packed(self, extension: Extension) -> None:
        q, k, v, _, sink = make_inputs(dtype=torch.bfloat16)
        cu_q, cu_k, used = int32(0, 7, 10), int32(0, 9, 17), int32(7, 2)
        tensors = (x.flatten(0, 1) for x in (q, k, v))
        flash_attn_varlen_func(
            *(*tensors, cu_q, cu_k, None, torch.tensor(9)), seqused_q=used, sink=sink
        )
        (given,) = extension.calls
        assert given.cu_seqlens_k is cu_k and given.seqused_q is used
        assert given.max_seqlen_q == 14 and given.max_seqlen_k == 18
        assert given.block_rows is None and given.bias is None

    def test_gradient_of_a_sink(self) -> None:
        """softmax_d comes padded to 128 rows, whatever they hold."""
        call, incoming = backward_call(**backward_fields(packed=False))
        expected = backward_on_cpu(call, incoming).dsink
        dout_out = (incoming.dout * incoming.out).sum(-1).transpose(1, 2)
        softmax_d = torch.full((2, 4, 128), torch.nan, dtype=torch.float64)
        softmax_d[..., :7] = dout_out - incoming.dlse
        found = sink_gradient(call, incoming.softmax_lse, softmax_d)
        torch.testing.assert_close(found, expected)
