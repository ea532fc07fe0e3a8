"""One call of every public function, small, with its features on: for what must hold of all of them
(no host sync, torch.compile, opcheck, graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tests.cases.harness import DEVICE

Tensors = dict[str, Tensor]
HEADS_Q, HEADS_K = 4, 2
FEATURES: dict[str, Any] = {"softmax_scale": 0.2, "window_size": (9, 2), "softcap": 15.0}
LSE: dict[str, Any] = {"return_attn_probs": True}
NO_BOUNDS: dict[str, Any] = {"max_seqlen_q": None, "max_seqlen_k": None}


@dataclass(frozen=True)
class PublicCall:
    """`function(**make(size))` is the call; `size` from 1 up varies every length."""

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    make: Callable[[int], Tensors]
    leaves: tuple[str, ...] = ()  # arguments with a gradient
    mutated: tuple[str, ...] = ()  # arguments written in place
    dropout: bool = False

    def __str__(self) -> str:
        return self.name

    def run(self, function: Callable[..., Any], arguments: Tensors) -> Tensors:
        """Outputs, gradients and what was mutated, of `function` on copies of the arguments."""
        copies = {name: x.detach().clone() for name, x in arguments.items()}
        for name in self.leaves:
            copies[name].requires_grad_()
        if self.dropout:  # not otherwise: a graph that is being captured cannot be seeded
            torch.manual_seed(5)
        outputs = function(**copies)
        results = {f"output{i}": x.detach() for i, x in enumerate(outputs)}
        if self.leaves:
            incoming = [x.detach().sin() for x in outputs[:2]]
            incoming[1] = incoming[1].nan_to_num(0.0)  # of rows without a key
            leaves = [copies[name] for name in self.leaves]
            gradients = torch.autograd.grad(outputs[:2], leaves, incoming)
            results |= {f"d{name}": x for name, x in zip(self.leaves, gradients, strict=True)}
        return results | {name: copies[name] for name in self.mutated}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(DEVICE, dtype)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _with(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function of tensors alone, with the rest of its arguments."""

    def call(**tensors: Any) -> Any:
        return function(**tensors, **options)

    return call


def _two(function: Callable[..., Any]) -> Callable[..., Any]:
    """out and lse alone."""

    def call(**tensors: Any) -> Any:
        return function(**tensors)[:2]

    return call


def _scaled_dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_func(q * 1.5, k, v, causal=True, **LSE)[:2]


def _varlen_dropout(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, ...]:
    """max_seqlen as 0-d tensors, as callers that never ask the host have it."""
    longest = cu_seqlens_q.diff().max()
    options: dict[str, Any] = {"causal": True, "deterministic": True, **LSE}
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest, longest, 0.3, **options
    )[:2]


def _varlen_paged(
    q: Tensor, k: Tensor, v: Tensor, used: Tensor, block_table: Tensor, **others: Tensor
) -> tuple[Tensor, ...]:
    cu_seqlens_k = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_k=cu_seqlens_k, block_table=block_table, causal=True, **others,
        **NO_BOUNDS, **LSE,
    )  # fmt: skip


def _varlen_masked(q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> tuple[Tensor, ...]:
    bounds = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
    return flash_attn_varlen_func(q, k, v, **bounds, window_size=(9, 2), **others, **LSE)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, **others: Tensor) -> tuple[Tensor, ...]:
    """Over a part of a cache."""
    return flash_attn_with_kvcache(
        q, k_cache[1:], v_cache[1:], causal=True, return_softmax_lse=True, **others
    )


def _packed_queries(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, **others: Tensor
) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"causal": True, "batch_invariant": True, "return_softmax_lse": True}
    return flash_attn_with_kvcache(q, k_cache[:3], v_cache[:3], **others, **options)


def _paged_append(cache_seqlens: Tensor, **others: Any) -> tuple[Tensor, ...]:
    return flash_attn_with_kvcache(
        cache_seqlens=cache_seqlens - 1, return_softmax_lse=True, **others
    )


# -- tensors ---------------------------------------------------------------------------------------


def _make_dense(size: int, head_dim: int = 64) -> Tensors:
    q = normal(2, 5 + 8 * size, HEADS_Q, head_dim)
    return {"q": q} | {name: normal(2, 9 + 7 * size, HEADS_K, head_dim) for name in "kv"}


def _narrow(made: Tensors, name: str = "v") -> Tensors:
    """With values of another head dim than queries and keys."""
    return made | {name: made[name][..., :40].contiguous()}


def _slopes(made: Tensors) -> Tensors:
    return made | {"alibi_slopes": torch.rand(HEADS_Q).to(DEVICE)}


def _sink(made: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return made | {"sink": normal(HEADS_Q, dtype=dtype)}


def _into(made: Tensors) -> Tensors:
    """With a tensor for the result."""
    return made | {"out": torch.zeros_like(made["q"])}


def _packed(size: int, names: str = "qk", **shapes: tuple[int, ...]) -> Tensors:
    """Three sequences, one of them empty, 4 + 9 * size tokens in all."""
    bounds = {f"cu_seqlens{x and '_' + x}": lengths(0, 4, 4, 4 + 9 * size) for x in names or [""]}
    return {name: normal(4 + 9 * size, *shape) for name, shape in shapes.items()} | bounds


def _make_varlen(size: int, head_dim: int = 64) -> Tensors:
    keys = (HEADS_K, head_dim)
    return _packed(size, q=(HEADS_Q, head_dim), k=keys, v=keys)


def _used(size: int) -> Tensors:
    return {"seqused_k": lengths(3, 0, 8 * size)}


def _pool(size: int, used: str, *names: str) -> Tensors:
    # No two sizes alike: a compiler would take them for one, and compile again when they part.
    table = lengths(*range(3 * 3 * size)).view(3, 3 * size).flip(0)
    pool = {name: normal(9 * size + 1, 5, HEADS_K, 64) for name in names}
    return pool | {used: lengths(3, 0, 10 * size), "block_table": table}


def _make_varlen_paged(size: int) -> Tensors:
    return _packed(size, "q", q=(HEADS_Q, 64)) | _pool(size, "used", "k", "v")


def _make_cache(size: int, head_dim: int = 64, **others: Tensor) -> Tensors:
    made = {"q": normal(3, 1, HEADS_Q, head_dim)}
    made |= {name: normal(4, 30 * size, HEADS_K, head_dim) for name in CACHES}
    return made | {"cache_seqlens": lengths(7, 0, 25 * size)} | others


def _make_append(size: int) -> Tensors:
    made = _make_cache(size, q=normal(3, 2, HEADS_Q, 64))
    made |= {name: normal(3, 2, HEADS_K, 64) for name in "kv"}
    made |= {name: normal(30 * size, 16) for name in ("rotary_cos", "rotary_sin")}
    return made | {"cache_batch_idx": lengths(2, 0, 3), "cache_leftpad": lengths(1, 0, 5)}


def _make_paged_append(size: int) -> Tensors:
    made = _pool(size, "cache_seqlens", *CACHES) | {"q": normal(3, 1, HEADS_Q, 64)}
    used = made["cache_seqlens"]
    made["cache_seqlens"] = used + 1 - (used == 10 * size).int()
    return made | {name: normal(3, 1, HEADS_K, 64) for name in "kv"}


def _make_masked(size: int) -> Tensors:
    """Of several tiles, whose numbers are no other extents, which a compiler would take for one.
    The bias is shared by nothing, so that its gradient is no sum.
    """
    seqlen_q, seqlen_k = 110 + 100 * size, 740 + 100 * size
    made = {"q": normal(2, seqlen_q, HEADS_Q, 64)}
    made |= {name: normal(2, seqlen_k, HEADS_K, 64) for name in "kv"}
    made["attn_mask"] = normal(2, HEADS_Q, seqlen_q, seqlen_k)
    blocks = torch.rand(2, 1, -(-seqlen_q // 64), -(-seqlen_k // 128)) < 0.5
    return made | {"block_mask": blocks.to(DEVICE), "sink": torch.rand(HEADS_Q).to(DEVICE)}


def _make_partials(size: int) -> Tensors:
    shape = (3, 2, 4 * size, HEADS_Q)
    return {
        "out_partial": normal(*shape, 64, dtype=torch.float32),
        "lse_partial": normal(*shape, dtype=torch.float32),
    }


CACHES = ("k_cache", "v_cache")
QKV = ("q", "k", "v")
CAUSAL: dict[str, Any] = {"causal": True, **LSE}
_dense = _with(flash_attn_func, **FEATURES, **LSE)
_dropout = _with(flash_attn_func, dropout_p=0.3, deterministic=True, **CAUSAL)
_kvpacked = _with(flash_attn_kvpacked_func, **FEATURES, **LSE)
_qkvpacked = _with(flash_attn_qkvpacked_func, **CAUSAL)
_varlen = _with(flash_attn_varlen_func, **NO_BOUNDS, **FEATURES, **LSE)
_varlen_into = _two(_with(flash_attn_varlen_func, **NO_BOUNDS, **CAUSAL))
_varlen_kvpacked = _with(flash_attn_varlen_kvpacked_func, **NO_BOUNDS, **CAUSAL)
_varlen_qkvpacked = _with(
    flash_attn_varlen_qkvpacked_func, max_seqlen=None, window_size=(5, -1), **LSE
)
_append = _with(flash_attn_with_kvcache, return_softmax_lse=True, **FEATURES)
_masked = _with(flash_attn_func, block_size=(64, 128), **CAUSAL)
_combine = _with(flash_attn_combine, out_dtype=torch.bfloat16)

PUBLIC_CALLS = [
    PublicCall("dense", _dense, lambda n: _slopes(_make_dense(n)), QKV),
    PublicCall("dense_plain", _scaled_dense, _make_dense, QKV),
    PublicCall("dense_padded", _scaled_dense, lambda n: _make_dense(n, 60), QKV),
    PublicCall("dense_narrow_values", _scaled_dense, lambda n: _narrow(_make_dense(n)), QKV),
    PublicCall("dense_dropout", _dropout, _make_dense, QKV, dropout=True),
    PublicCall(
        "kvpacked", _kvpacked,
        lambda n: _slopes(
            {"q": normal(2, 7 * n, HEADS_Q, 64), "kv": normal(2, 5 + n, 2, HEADS_K, 64)}
        ),
        ("q", "kv"),
    ),
    PublicCall("qkvpacked", _qkvpacked, lambda n: {"qkv": normal(2, 7 * n, 3, 4, 64)}, ("qkv",)),
    PublicCall("varlen", _varlen, lambda n: _slopes(_make_varlen(n)) | _used(n), QKV),
    PublicCall(
        "varlen_narrow_values", _varlen,
        lambda n: _slopes(_narrow(_make_varlen(n))) | _used(n), QKV,
    ),
    PublicCall("varlen_dropout", _varlen_dropout, _make_varlen, QKV, dropout=True),
    PublicCall(
        "varlen_kvpacked", _varlen_kvpacked,
        lambda n: _packed(n, q=(HEADS_Q, 64), kv=(2, HEADS_K, 64)), ("q", "kv"),
    ),
    PublicCall(
        "varlen_qkvpacked", _varlen_qkvpacked, lambda n: _packed(n, "", qkv=(3, 4, 64)), ("qkv",)
    ),
    PublicCall("varlen_paged", _varlen_paged, _make_varlen_paged),
    PublicCall("decode", _decode, _make_cache),
    PublicCall("decode_odd_head_dim", _decode, lambda n: _make_cache(n, 59)),
    PublicCall("decode_narrow_values", _decode, lambda n: _narrow(_make_cache(n), "v_cache")),
    PublicCall("append", _append, _make_append, mutated=CACHES),
    PublicCall(
        "append_tree", _with(flash_attn_with_kvcache, return_softmax_lse=True),
        lambda n: _make_append(n) | {"tree_mask": (torch.rand(3, 2, 2) < 0.5).to(DEVICE)},
        mutated=CACHES,
    ),
    PublicCall(
        "paged_append", _with(_paged_append, causal=True, num_splits=2), _make_paged_append,
        mutated=CACHES,
    ),
    PublicCall("varlen_into", _varlen_into, lambda n: _into(_make_varlen(n)), mutated=("out",)),
    PublicCall(
        "varlen_padded_into", _varlen_into, lambda n: _into(_make_varlen(n, 60)), mutated=("out",)
    ),
    PublicCall(
        "append_into", _paged_append, lambda n: _into(_make_paged_append(n)),
        mutated=(*CACHES, "out"),
    ),
    PublicCall(
        "packed_queries", _packed_queries,
        lambda n: _make_cache(n) | _packed(n, "q", q=(HEADS_Q, 64)),
    ),
    PublicCall("combine", _combine, _make_partials),
    PublicCall("masked", _masked, _make_masked, (*QKV, "attn_mask", "sink")),
    PublicCall(
        "varlen_masked", _varlen_masked,
        lambda n: _sink(_make_varlen(n))
        | {"attn_mask": normal(3, 1, 1, 4 + 9 * n, dtype=torch.float32)},
        (*QKV, "sink"),
    ),
    PublicCall("varlen_paged_sink", _varlen_paged, lambda n: _sink(_make_varlen_paged(n))),
    PublicCall("decode_sink", _decode, lambda n: _sink(_make_cache(n), torch.float32)),
]  # fmt: skip
