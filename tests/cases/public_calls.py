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


def _dense(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_func(q, k, v, alibi_slopes=slopes, **FEATURES, **LSE)


def _dense_plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_func(q * 1.5, k, v, causal=True, **LSE)[:2]


def _dropout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_func(q, k, v, 0.3, causal=True, deterministic=True, **LSE)


def _kvpacked(q: Tensor, kv: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_kvpacked_func(q, kv, alibi_slopes=slopes, **FEATURES, **LSE)


def _qkvpacked(qkv: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_qkvpacked_func(qkv, causal=True, **LSE)


def _make_dense(size: int, head_dim: int = 64) -> Tensors:
    q = normal(2, 5 + 8 * size, HEADS_Q, head_dim)
    return {"q": q} | {name: normal(2, 9 + 7 * size, HEADS_K, head_dim) for name in "kv"}


def _narrow(made: Tensors, name: str = "v") -> Tensors:
    """With values of another head dim than queries and keys."""
    return made | {name: made[name][..., :40].contiguous()}


def _slopes(size: int) -> Tensors:
    return {"slopes": torch.rand(HEADS_Q).to(DEVICE)}


def _cu_seqlens(size: int, *names: str) -> Tensors:
    """Three sequences, one of them empty, 4 + 9 * size tokens in all."""
    return {name: lengths(0, 4, 4, 4 + 9 * size) for name in names}


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, slopes: Tensor, used: Tensor
) -> tuple[Tensor, ...]:
    return flash_attn_varlen_func(
        *(q, k, v, cu_q, cu_k, None, None), alibi_slopes=slopes, seqused_k=used, **FEATURES, **LSE
    )


def _varlen_dropout(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor
) -> tuple[Tensor, ...]:
    """max_seqlen as 0-d tensors, as callers that never ask the host have it."""
    longest = cu_q.diff().max()
    return flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, longest, longest, 0.3, causal=True, deterministic=True, **LSE
    )[:2]


def _varlen_kvpacked(q: Tensor, kv: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, None, None, causal=True, **LSE)


def _varlen_qkvpacked(qkv: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_varlen_qkvpacked_func(qkv, cu, None, window_size=(5, -1), **LSE)


def _make_varlen(size: int, head_dim: int = 64) -> Tensors:
    total = 4 + 9 * size
    made = {"q": normal(total, HEADS_Q, head_dim)}
    made |= {name: normal(total, HEADS_K, head_dim) for name in "kv"}
    return made | _cu_seqlens(size, "cu_q", "cu_k")


def _varlen_paged(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    cu_q: Tensor,
    used: Tensor,
    table: Tensor,
    **sink: Tensor,
) -> tuple[Tensor, ...]:
    cu_k = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return flash_attn_varlen_func(
        q, pool_k, pool_v, cu_q, cu_k, None, None, causal=True, block_table=table, **sink, **LSE
    )


def _make_pool(size: int) -> Tensors:
    # No two sizes alike: a compiler would take them for one, and compile again when they part.
    table = lengths(*range(3 * 3 * size)).view(3, 3 * size).flip(0)
    pool = {f"pool_{name}": normal(9 * size + 1, 5, HEADS_K, 64) for name in "kv"}
    return pool | {"used": lengths(3, 0, 10 * size), "table": table}


def _make_varlen_paged(size: int) -> Tensors:
    made = {"q": normal(4 + 9 * size, HEADS_Q, 64)}
    return made | _make_pool(size) | _cu_seqlens(size, "cu_q")


def _decode(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, used: Tensor, **sink: Tensor
) -> tuple[Tensor, ...]:
    return flash_attn_with_kvcache(
        q, cache_k, cache_v, cache_seqlens=used, causal=True, return_softmax_lse=True, **sink
    )


def _make_cache(size: int, head_dim: int = 64) -> Tensors:
    made = {"q": normal(3, 1, HEADS_Q, head_dim)}
    made |= {f"cache_{name}": normal(4, 30 * size, HEADS_K, head_dim) for name in "kv"}
    return made | {"used": lengths(7, 0, 25 * size)}


def _append(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    used: Tensor,
    entries: Tensor,
    leftpad: Tensor,
) -> tuple[Tensor, ...]:
    return flash_attn_with_kvcache(
        *(q, cache_k, cache_v, k, v, cos, sin),
        cache_seqlens=used,
        cache_batch_idx=entries,
        cache_leftpad=leftpad,
        return_softmax_lse=True,
        **FEATURES,
    )


def _make_append(size: int) -> Tensors:
    made = {**_make_cache(size), "q": normal(3, 2, HEADS_Q, 64)}
    made |= {name: normal(3, 2, HEADS_K, 64) for name in "kv"}
    made |= {name: normal(30 * size, 16) for name in ("cos", "sin")}
    return made | {"entries": lengths(2, 0, 3), "leftpad": lengths(1, 0, 5)}


def _paged_append(
    q: Tensor, pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, used: Tensor, table: Tensor
) -> tuple[Tensor, ...]:
    return flash_attn_with_kvcache(
        *(q, pool_k, pool_v, k, v),
        cache_seqlens=used - 1,
        block_table=table,
        causal=True,
        num_splits=2,
        return_softmax_lse=True,
    )


def _make_paged_append(size: int) -> Tensors:
    made = {**_make_pool(size), "q": normal(3, 1, HEADS_Q, 64)}
    made["used"] = made["used"] + 1 - (made["used"] == 10 * size).int()
    return made | {name: normal(3, 1, HEADS_K, 64) for name in "kv"}


def _packed_queries(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, used: Tensor, cu_q: Tensor
) -> tuple[Tensor, ...]:
    return flash_attn_with_kvcache(
        *(q, cache_k[:3], cache_v[:3]),
        cache_seqlens=used,
        cu_seqlens_q=cu_q,
        causal=True,
        batch_invariant=True,
        return_softmax_lse=True,
    )


def _make_packed_queries(size: int) -> Tensors:
    made = {**_make_cache(size), "q": normal(4 + 9 * size, HEADS_Q, 64)}
    return made | _cu_seqlens(size, "cu_q")


def _varlen_into(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor
) -> tuple[Tensor, ...]:
    return flash_attn_varlen_func(q, k, v, cu_q, cu_k, None, None, causal=True, out=out, **LSE)[:2]


def _append_into(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    k: Tensor,
    v: Tensor,
    used: Tensor,
    table: Tensor,
    out: Tensor,
) -> tuple[Tensor, ...]:
    return flash_attn_with_kvcache(
        *(q, pool_k, pool_v, k, v), cache_seqlens=used - 1, block_table=table, out=out,
        return_softmax_lse=True,
    )  # fmt: skip


def _into(made: Tensors) -> Tensors:
    """With a tensor for the result."""
    return made | {"out": torch.zeros_like(made["q"])}


def _masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, blocks: Tensor, sink: Tensor
) -> tuple[Tensor, ...]:
    return flash_attn_func(
        *(q, k, v), causal=True, attn_mask=bias, block_mask=blocks, block_size=(64, 128),
        sink=sink, **LSE,
    )  # fmt: skip


def _make_masked(size: int) -> Tensors:
    """Of several tiles, whose numbers are no other extents, which a compiler would take for one.
    The bias is shared by nothing, so that its gradient is no sum.
    """
    seqlen_q, seqlen_k = 110 + 100 * size, 740 + 100 * size
    made = {"q": normal(2, seqlen_q, HEADS_Q, 64)}
    made |= {name: normal(2, seqlen_k, HEADS_K, 64) for name in "kv"}
    made["bias"] = normal(2, HEADS_Q, seqlen_q, seqlen_k)
    blocks = torch.rand(2, 1, -(-seqlen_q // 64), -(-seqlen_k // 128)) < 0.5
    return made | {"blocks": blocks.to(DEVICE), "sink": torch.rand(HEADS_Q).to(DEVICE)}


def _varlen_masked(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, bias: Tensor, sink: Tensor
) -> tuple[Tensor, ...]:
    most = (q.shape[0], k.shape[0])
    return flash_attn_varlen_func(
        *(q, k, v, cu_q, cu_k, *most), window_size=(9, 2), attn_mask=bias, sink=sink, **LSE
    )


def _combine(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, ...]:
    return flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)


def _make_partials(size: int) -> Tensors:
    shape = (3, 2, 4 * size, HEADS_Q)
    return {
        "out_partial": normal(*shape, 64, dtype=torch.float32),
        "lse_partial": normal(*shape, dtype=torch.float32),
    }


CACHES, POOLS = ("cache_k", "cache_v"), ("pool_k", "pool_v")
PUBLIC_CALLS = [
    PublicCall("dense", _dense, lambda n: _make_dense(n) | _slopes(n), ("q", "k", "v")),
    PublicCall("dense_plain", _dense_plain, _make_dense, ("q", "k", "v")),
    PublicCall("dense_padded", _dense_plain, lambda n: _make_dense(n, 60), ("q", "k", "v")),
    PublicCall(
        "dense_narrow_values", _dense_plain, lambda n: _narrow(_make_dense(n)), ("q", "k", "v")
    ),
    PublicCall("dense_dropout", _dropout, _make_dense, ("q", "k", "v"), dropout=True),
    PublicCall(
        "kvpacked",
        _kvpacked,
        lambda n: {
            "q": normal(2, 7 * n, HEADS_Q, 64),
            "kv": normal(2, 5 + n, 2, HEADS_K, 64),
            **_slopes(n),
        },
        ("q", "kv"),
    ),
    PublicCall("qkvpacked", _qkvpacked, lambda n: {"qkv": normal(2, 7 * n, 3, 4, 64)}, ("qkv",)),
    PublicCall(
        "varlen",
        _varlen,
        lambda n: _make_varlen(n) | _slopes(n) | {"used": lengths(3, 0, 8 * n)},
        ("q", "k", "v"),
    ),
    PublicCall(
        "varlen_narrow_values",
        _varlen,
        lambda n: _narrow(_make_varlen(n)) | _slopes(n) | {"used": lengths(3, 0, 8 * n)},
        ("q", "k", "v"),
    ),
    PublicCall("varlen_dropout", _varlen_dropout, _make_varlen, ("q", "k", "v"), dropout=True),
    PublicCall(
        "varlen_kvpacked",
        _varlen_kvpacked,
        lambda n: {
            "q": normal(4 + 9 * n, HEADS_Q, 64),
            "kv": normal(4 + 9 * n, 2, HEADS_K, 64),
            **_cu_seqlens(n, "cu_q", "cu_k"),
        },
        ("q", "kv"),
    ),
    PublicCall(
        "varlen_qkvpacked",
        _varlen_qkvpacked,
        lambda n: {"qkv": normal(4 + 9 * n, 3, 4, 64), **_cu_seqlens(n, "cu")},
        ("qkv",),
    ),
    PublicCall("varlen_paged", _varlen_paged, _make_varlen_paged),
    PublicCall(
        "decode", lambda q, cache_k, cache_v, used: _decode(q, cache_k[1:], cache_v[1:], used),
        _make_cache,
    ),
    PublicCall(
        "decode_odd_head_dim",
        lambda q, cache_k, cache_v, used: _decode(q, cache_k[1:], cache_v[1:], used),
        lambda n: _make_cache(n, 59),
    ),
    PublicCall(
        "decode_narrow_values",
        lambda q, cache_k, cache_v, used: _decode(q, cache_k[1:], cache_v[1:], used),
        lambda n: _narrow(_make_cache(n), "cache_v"),
    ),
    PublicCall("append", _append, _make_append, mutated=CACHES),
    PublicCall("paged_append", _paged_append, _make_paged_append, mutated=POOLS),
    PublicCall("varlen_into", _varlen_into, lambda n: _into(_make_varlen(n)), mutated=("out",)),
    PublicCall(
        "varlen_padded_into", _varlen_into, lambda n: _into(_make_varlen(n, 60)), mutated=("out",)
    ),
    PublicCall(
        "append_into",
        _append_into,
        lambda n: _into(_make_paged_append(n)),
        mutated=(*POOLS, "out"),
    ),
    PublicCall("packed_queries", _packed_queries, _make_packed_queries),
    PublicCall("combine", _combine, _make_partials),
    PublicCall("masked", _masked, _make_masked, ("q", "k", "v", "bias", "sink")),
    PublicCall(
        "varlen_masked",
        _varlen_masked,
        lambda n: {
            **_make_varlen(n),
            "bias": normal(3, 1, 1, 4 + 9 * n, dtype=torch.float32),
            "sink": normal(HEADS_Q),
        },
        ("q", "k", "v", "sink"),
    ),
    PublicCall(
        "varlen_paged_sink",
        lambda sink, **given: _varlen_paged(**given, sink=sink),
        lambda n: {**_make_varlen_paged(n), "sink": normal(HEADS_Q)},
    ),
    PublicCall(
        "decode_sink",
        lambda q, cache_k, cache_v, used, sink: _decode(
            q, cache_k[1:], cache_v[1:], used, sink=sink
        ),
        lambda n: {**_make_cache(n), "sink": normal(HEADS_Q, dtype=torch.float32)},
    ),
]  # fmt: skip
