"""Padding removed and put back: flash_attn_cuda.padding against loops over rows."""

from __future__ import annotations

import pytest
import torch

from flash_attn_cuda.integrations.padding import (
    IndexFirstAxisResidual,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from tests.cases.harness import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu)]
MASKS = {
    "right": [[1, 1, 1, 0], [1, 0, 0, 0]],
    "left": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "holes": [[1, 0, 1, 0], [0, 1, 0, 1]],
    "full": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "an empty row": [[0, 0, 0, 0], [1, 1, 0, 0]],
    "nothing": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


def hidden_states(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(2, 4, *shape, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_tokens_of_the_mask_are_packed(device: str, dtype: torch.dtype, name: str) -> None:
    x = hidden_states(device, 3, 5)
    mask = torch.tensor(MASKS[name], device=device).to(dtype)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    rows = [x[b, s] for b in range(2) for s in range(4) if MASKS[name][b][s]]
    lengths = [sum(row) for row in MASKS[name]]
    assert packed.shape == (sum(lengths), 3, 5)
    assert all(torch.equal(row, expected) for row, expected in zip(packed, rows, strict=True))
    assert cu_seqlens.tolist() == [0, lengths[0], sum(lengths)]
    assert cu_seqlens.dtype == seqused.dtype == torch.int32 and indices.dtype == torch.int64
    assert type(max_seqlen) is int and max_seqlen == max(lengths)
    assert seqused.tolist() == lengths

    padded = pad_input(packed, indices, 2, 4)
    assert torch.equal(padded, x * (mask != 0)[..., None, None])
    weight = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(padded, x, weight)
    assert torch.equal(gradient, weight * (mask != 0)[..., None, None])


def test_unused_tokens_get_room_but_do_not_count() -> None:
    x = hidden_states("cpu")
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 4] and cu_seqlens.tolist() == [0, 3, 4]
    assert max_seqlen == 3 and seqused.tolist() == [2, 1]
    assert torch.equal(packed, x.flatten()[indices])
    assert torch.equal(unpad_input(x, mask.bool(), unused.bool())[1], indices)


def test_an_empty_batch() -> None:
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(
        torch.zeros(0, 4, 3), torch.ones(0, 4)
    )
    assert packed.shape == (0, 3) and cu_seqlens.tolist() == [0] and max_seqlen == 0
    assert seqused.shape == (0,) and pad_input(packed, indices, 0, 4).shape == (0, 4, 3)


def test_rows_of_several_sequences() -> None:
    x = torch.arange(18.0).view(3, 6)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and max_seqlen == 6
    assert packed.tolist() == [*range(5), *range(6, 11), *range(12, 18)] == indices.tolist()


def test_rows_by_index() -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(index_first_axis(x, indices), x[indices])
    for function in (index_first_axis_residual, IndexFirstAxisResidual.apply):
        taken, whole = function(x, indices)
        assert torch.equal(taken, x[indices]) and whole is x
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), (x,))
    placed = index_put_first_axis(x, torch.tensor([6, 0, 3, 1, 2]), 7)
    assert torch.equal(placed[6], x[0]) and placed[4:6].abs().max() == 0
    assert torch.autograd.gradcheck(
        lambda x: index_put_first_axis(x, torch.tensor([6, 0, 3, 1, 2]), 7), (x,)
    )


@pytest.mark.parametrize("name", ["attention_mask", "unused_mask"])
def test_masks_of_another_shape_are_refused(name: str) -> None:
    masks = {"attention_mask": torch.ones(2, 4), name: torch.ones(2, 3)}
    with pytest.raises(ValueError, match=rf"{name}: must have .* \(2, 4\), got \(2, 3\)"):
        unpad_input(torch.zeros(2, 4, 5), **masks)
    with pytest.raises(TypeError, match=f"{name}: must be a torch.Tensor, got list"):
        unpad_input(torch.zeros(2, 4, 5), **(masks | {name: [[1, 1, 1, 1]] * 2}))


def test_a_tensor_without_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_states: must have shape .* got \(4,\)"):
        unpad_input(torch.zeros(4), torch.ones(4))
