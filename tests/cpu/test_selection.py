"""Lists that queries choose, against the papers' definitions in loops, and attention over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, masks

Q, K = torch.randn(2, 37, 4, 8), torch.randn(2, 50, 2, 8)


def chosen(scores: list[float], always: set[int], count: int) -> set[int]:
    """The best of the blocks up to a query's own, with those that always are."""
    order = sorted(range(len(scores)), key=lambda j: (j in always, scores[j]), reverse=True)
    return set(order[:count])


def check(lists: Tensor, expected: dict[tuple[int, int, int], set[int]], top_k: int) -> None:
    assert lists.shape == (2, 37, 2, top_k) and lists.dtype == torch.int32
    for (b, i, h), wanted in expected.items():
        found = lists[b, i, h].tolist()
        assert set(found) - {-1} == wanted
        assert len(wanted) == min(top_k, (i + 13) // 8 + 1)
        assert found.count(-1) == top_k - len(wanted)


def places() -> list[tuple[int, int, int]]:
    return [(b, i, h) for b in range(2) for i in range(37) for h in range(2)]


@pytest.mark.parametrize("top_k", [1, 3, 9])
def test_moba(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_attn_cuda.masks.selection.CHUNK_SCORES", 2000)  # a few queries
    expected = {}
    for b, i, h in places():
        own = (i + 13) // 8
        means = [K[b, 8 * j : 8 * j + 8, h].mean(0) for j in range(own)]
        scores = [sum((Q[b, i, 2 * h + g] @ mean).item() for g in range(2)) for mean in means]
        expected[b, i, h] = chosen([*scores, 0.0], {own}, top_k)
    check(masks.moba_key_lists(Q, K, key_list_block=8, top_k=top_k), expected, top_k)


@pytest.mark.parametrize(("top_k", "initial", "local"), [(3, 1, 2), (4, 0, 1), (9, 1, 0)])
def test_nsa(top_k: int, initial: int, local: int) -> None:
    width, stride = 6, 2
    compressed = torch.randn(2, 23, 2, 8)
    expected = {}
    for b, i, h in places():
        position = i + 13
        visible = [c for c in range(23) if stride * c + width - 1 <= position]
        importance = [0.0] * (position // 8 + 1)
        for g in range(2):
            products = compressed[b, visible, h] @ Q[b, i, 2 * h + g] * 0.4
            for c, p in zip(visible, products.softmax(0).tolist(), strict=True):
                for key in range(stride * c, stride * c + width, stride):
                    importance[key // 8] += p
        own = position // 8
        always = {j for j in range(own + 1) if j < initial or j > own - local}
        expected[b, i, h] = chosen(importance, always, top_k)
    lists = masks.nsa_key_lists(
        *(Q, compressed, 50), key_list_block=8, top_k=top_k, compression_block=width,
        compression_stride=stride, initial=initial, local=local, softmax_scale=0.4,
    )  # fmt: skip
    check(lists, expected, top_k)


def test_autocast_does_not_round_scores() -> None:
    exact = masks.moba_key_lists(Q, K, key_list_block=1, top_k=9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(exact, masks.moba_key_lists(Q, K, key_list_block=1, top_k=9))


def test_attention_over_all_that_is_chosen_is_causal_attention() -> None:
    lists = masks.moba_key_lists(Q, K, key_list_block=8, top_k=7)
    out = flash_attn_func(Q, K, K, causal=True, key_lists=lists, key_list_block=8)
    assert torch.equal(out, flash_attn_func(Q, K, K, causal=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k: must be at least 1, got 0"),
        ({"key_list_block": 24}, ValueError, "key_list_block: must be a multiple of 16, a stride"),
        ({"compression_block": 2.0}, TypeError, "compression_block: must be an integer"),
        ({"k_compressed": K[0]}, ValueError, "k_compressed: must be floating with four dim"),
        ({"k_compressed": K[..., :4]}, ValueError, "k_compressed: heads must divide those of q"),
        ({"q": None}, TypeError, "q: must be a torch.Tensor, got NoneType"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        masks.nsa_key_lists(**{"q": Q, "k_compressed": K, "seqlen_k": 800} | changes)
