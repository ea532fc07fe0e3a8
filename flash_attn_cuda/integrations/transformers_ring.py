"""Models of Hugging Face transformers over the ranks of a group: what the functions of
ring_flash_attn.adapters do, with their names and parameters.

    substitute_hf_flash_attn(group, heads_k_stride=1)  # once
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flash_attention_2")
    for each batch:
        update_ring_flash_attn_params(cu_seqlens, group)  # bounds of its packed documents
        model(tokens of this rank, position_ids=of the same tokens)

A batch is packed documents, one behind the other, in as many equal contiguous shards as there are
ranks: rank r of N gives rows [r L, (r + 1) L) of L N in all, as (1, L), and gets the same rows of
the model's output. Wherever documents begin and end, attention is that of one process over the
whole: causal or bidirectional, with a sliding window, a softcap, attention sinks, grouped queries
and dropout as ContextParallel has them. What a parameter's gradient lacks, other ranks have: sum
over the group.

- A sliding window is transformers': that many keys, a query's own included, on either side if the
  layer is not causal. In ring_flash_attn it is one wider, and missing where a shard is no longer.
- The documents are those of update_ring_flash_attn_params alone; position_ids, cu_seq_lens_q and
  such are not read. They count until the next call, so for the backward pass too where activations
  are computed again in it.
- attention_mask says which tokens are padding. Padding is part of a document, whose last tokens it
  must be, or a document of its own; out at padding is nobody's. A rank looks at its own rows, once
  for each mask, and waits for the GPU then.
- A cache holds a rank's own keys: use_ring_attn(False) before generation, which then is
  transformers' own.

Attention of other names, such as "sdpa" and "flash_attention_3", stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..context_parallel import ContextParallel, Plan
from .names import refused_names
from .ring_plans import bounds_of, equal_shards, llama3_flash_attn_prepare_cu_seqlens, remember_plan
from .sequences import refuse_given
from .transformers import _chunk_of, _deterministic, _half_precision, _refuse
from .transformers_masks import Pattern

__all__ = [
    "DATA_PARAMS",
    "check_params",
    "create_ring_flash_attention_forward",
    "flash_attention_forward",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "use_ring_attn",
]

__getattr__ = refused_names(
    "ring_flash_attn.adapters.hf_adapter",
    {"RING_ATTN_SWITCH": "call use_ring_attn, which sets it"},
)

IMPLEMENTATION = "flash_attention_2"
_NO_CACHE = "caches are not spread over ranks: use_ring_attn(False) before generation"

# What llama3_flash_attn_varlen_func takes for the batch of update_ring_flash_attn_params, by its
# parameters' names, for callers that give it to that function themselves.
DATA_PARAMS: dict[str, Any] = {}


@dataclass(frozen=True)
class _Documents:
    """Of a packed batch, all ranks'."""

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]  # of all processes, in the group's order
    plan: Plan
    inner: tuple[int, ...]  # rows of this rank at which another document begins than at row 0

    @functools.cached_property
    def longest(self) -> int:
        return max(end - begin for begin, end in pairwise(self.bounds))


@dataclass
class _State:
    group: ProcessGroup | None = None
    heads_k_stride: int = 1
    is_on: bool = True
    documents: _Documents | None = None
    original: Callable[..., Any] | None = None  # of ALL_ATTENTION_FUNCTIONS
    checked: Any = field(default_factory=WeakTensorKeyDictionary)  # masks: what they were read for


_state = _State()


# -- the functions of ring_flash_attn --------------------------------------------------------------


def substitute_hf_flash_attn(process_group: ProcessGroup, heads_k_stride: int) -> None:
    """Make "flash_attention_2" of transformers attention over the ranks of a group.

    For every model in this process, made before or after. A further call changes the group. Models
    that call transformers' _flash_attention_forward themselves get it too.

    Args:
        process_group: the ranks, in the order of their shards; None for all.
        heads_k_stride: how many heads of keys a transfer brings; it divides heads_k.
    """
    if not isinstance(heads_k_stride, int) or heads_k_stride < 1:
        raise ValueError(f"heads_k_stride: must be a positive integer, got {heads_k_stride!r}")
    _state.group, _state.heads_k_stride = _group_of(process_group), heads_k_stride
    if ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] is not flash_attention_forward:
        _state.original = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
        ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = flash_attention_forward
    _substitute_direct_calls()


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: ProcessGroup) -> None:
    """Say where the documents of the batch to come are, on every rank the same.

    Args:
        cu_seqlens: (documents + 1,) integers, bounds of the whole batch's documents. The last is a
            multiple of the ranks: pad the last document, or add one. A tensor on a GPU is waited
            for.
        process_group: that of substitute_hf_flash_attn.
    """
    group = _group_of(process_group)
    rank, ranks = group.rank(), group.size()
    *made, of_keys = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, ranks)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    DATA_PARAMS.update({**dict(zip(names, made, strict=True)), "local_k_slice": of_keys})
    bounds = bounds_of("cu_seqlens", cu_seqlens)
    plan = equal_shards(bounds, ranks)
    remember_plan(cast(Tensor, made[0]), of_keys, True, group, plan)
    rows = bounds[-1] // ranks
    inner = tuple(x - rank * rows for x in bounds if rank * rows < x < (rank + 1) * rows)
    ranks_of_all = tuple(dist.get_process_group_ranks(group))
    _state.documents = _Documents(bounds, ranks_of_all, plan, inner)


def use_ring_attn(flag: bool) -> None:
    """Whether "flash_attention_2" is attention over the group, or as it was before."""
    _state.is_on = bool(flag)


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Whether two functions have the same number of parameters."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def create_ring_flash_attention_forward(
    process_group: ProcessGroup, heads_k_stride: int
) -> list[Callable[..., Tensor]]:
    """One function with the parameters of transformers' _flash_attention_forward, over a group.

    It takes query_states (1, rows, heads_q, head_dim), key_states and value_states (1, rows,
    heads_k, ...), attention_mask, query_length, is_causal, and by name dropout, softmax_scale,
    sliding_window, softcap, deterministic and s_aux; others are not read.
    """
    group = _group_of(process_group)

    def forward(
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Tensor | None,
        query_length: int,
        is_causal: bool,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        use_top_left_mask: bool = False,
        softcap: float | None = None,
        deterministic: bool | None = None,
        *_: Any,
        **kwargs: Any,
    ) -> Tensor:
        refuse_given(_NO_CACHE, block_table=kwargs.get("block_table"))
        return _attend(
            *(query_states, key_states, value_states),
            attention_mask=attention_mask,
            group=group,
            heads_k_stride=heads_k_stride,
            is_causal=is_causal,
            dropout=dropout,
            scaling=softmax_scale,
            sliding_window=sliding_window,
            softcap=softcap,
            deterministic=deterministic,
            sink=kwargs.get("s_aux"),
        )

    original = modeling_flash_attention_utils._flash_attention_forward
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return [forward]


def flash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, over the group of substitute_hf_flash_attn.

    Args:
        module: the attention layer; its is_causal counts unless that is given.
        query: (1, heads_q, rows, head_dim), this rank's rows.
        key, value: (1, heads_k, rows, ...), of the same rows.
        attention_mask: (1, rows), zero at padding, or None.
        dropout, scaling, sliding_window, softcap, and of kwargs is_causal, deterministic and s_aux:
            as in flash_attn_cuda.integrations.transformers.attention.

    Returns:
        (out (1, rows, heads_q, value_dim), None).

    Raises:
        RuntimeError: substitute_hf_flash_attn or update_ring_flash_attn_params was not called.
        ValueError: a batch of several, other rows than those documents have, heads_k_stride that
            does not divide heads_k, or a group that is not that of the documents.
        NotImplementedError: keys of a cache, a mask other than of padding, padding in front of a
            document's real tokens, chunks, and what that attention refuses.
    """
    if not _state.is_on:
        options = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        options |= {"softcap": softcap, **kwargs}
        assert _state.original is not None
        return cast(
            "tuple[Tensor, None]",
            _state.original(module, query, key, value, attention_mask, **options),
        )
    if _state.group is None:
        raise RuntimeError("substitute_hf_flash_attn: must be called first")
    _refuse(module, kwargs)
    refuse_given(_NO_CACHE, block_table=kwargs.get("block_table"))
    if _chunk_of(module) != 0:
        raise NotImplementedError(
            f"attention_chunk: must be 0 over several ranks, got {_chunk_of(module)}"
        )
    is_causal = kwargs.get("is_causal")
    query, key, value = _half_precision(module, query, key, value)
    out = _attend(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attention_mask=attention_mask,
        group=_state.group,
        heads_k_stride=_state.heads_k_stride,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        dropout=dropout,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        deterministic=kwargs.get("deterministic"),
        sink=kwargs.get("s_aux"),
    )
    return out, None


# -- attention -------------------------------------------------------------------------------------


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None,
    group: ProcessGroup,
    heads_k_stride: int,
    is_causal: bool,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    deterministic: bool | None,
    sink: Tensor | None,
) -> Tensor:
    """Out like query, (1, rows, heads_q, head_dim), with value's head_dim."""
    documents = _documents(group)
    _check_rows(query, key, documents)
    _check_padding(attention_mask, documents, bool(is_causal))
    heads_k = key.shape[2]
    if heads_k % heads_k_stride:
        raise ValueError(
            f"heads_k_stride: must divide the {heads_k} heads of keys, got {heads_k_stride}"
        )
    pattern = Pattern.of_layer(bool(is_causal), sliding_window)
    out = _parallel(group, heads_k // heads_k_stride).attend(
        *(x.squeeze(0) for x in (query, key, value)),
        documents.plan,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=pattern.causal,
        window_size=pattern.window_size(documents.longest),
        softcap=softcap or 0.0,
        deterministic=_deterministic(deterministic),
        sink=sink,
    )
    return cast(Tensor, out).unsqueeze(0)


@torch.compiler.disable
@functools.lru_cache(maxsize=16)
def _parallel(group: ProcessGroup, head_groups: int) -> ContextParallel:
    return ContextParallel(group, "all_gather", head_groups=head_groups)


def _group_of(group: ProcessGroup | None) -> ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError("process_group: torch.distributed must be initialised first")
    return found


@torch.compiler.disable
def _documents(group: ProcessGroup) -> _Documents:
    documents = _state.documents
    if documents is None:
        raise RuntimeError(
            "update_ring_flash_attn_params: must be called with each batch's cu_seqlens before the "
            "model is"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks != documents.ranks:
        raise ValueError(
            "process_group: must be the same for substitute_hf_flash_attn, got ranks "
            f"{list(ranks)}, and for update_ring_flash_attn_params, got {list(documents.ranks)}"
        )
    return documents


def _check_rows(query: Tensor, key: Tensor, documents: _Documents) -> None:
    """query, key: (1, rows, heads, head_dim)."""
    rows = documents.plan.rows
    if query.shape[0] != 1:
        raise ValueError(
            "query: must be a batch of one, documents packed one behind the other, got a batch of "
            f"{query.shape[0]}"
        )
    if key.shape[1] > query.shape[1]:
        raise NotImplementedError(
            f"key: must have the rows of query, as {_NO_CACHE}; got {key.shape[1]} keys for "
            f"{query.shape[1]} queries"
        )
    if query.shape[1] != rows:
        raise ValueError(
            f"query: must have {rows} rows, this rank's share of the {documents.bounds[-1]} of "
            f"update_ring_flash_attn_params, got {query.shape[1]}"
        )


@torch.compiler.disable
def _check_padding(mask: Tensor | None, documents: _Documents, is_causal: bool) -> None:
    """Raise unless what is padding is never seen: behind a document's last real token."""
    if mask is None:
        return
    rows = documents.plan.rows
    if mask.shape != (1, rows):
        raise NotImplementedError(
            f"attention_mask: must be one of padding, (1, {rows}), over several ranks, got shape "
            f"{tuple(mask.shape)}"
        )
    wanted = (mask._version if not mask.is_inference() else None, documents, is_causal)
    if _state.checked.get(mask) == wanted:
        return
    real = mask[0].bool()
    is_wrong = ~real[:-1] & real[1:] if is_causal else real[:-1] != real[1:]
    is_wrong[_as_index([x - 1 for x in documents.inner], mask)] = False
    if is_wrong.any():
        found = "in front of them" if is_causal else "beside them"
        rule = "behind its real tokens or of its own" if is_causal else "of its own"
        raise NotImplementedError(
            f"attention_mask: padding must be {rule} in the documents of "
            f"update_ring_flash_attn_params, got padding {found}, behind row "
            f"{int(is_wrong.int().argmax())} of this rank"
        )
    if wanted[0] is not None:
        _state.checked[mask] = wanted


def _as_index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


# -- models that call transformers' function themselves --------------------------------------------


def _substitute_direct_calls() -> None:
    """Also where a model's module has imported the function by then."""
    original = modeling_flash_attention_utils._flash_attention_forward
    if hasattr(original, "_over_ranks"):
        return

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not _state.is_on or _state.group is None:
            return original(*args, **kwargs)
        (over_ranks,) = create_ring_flash_attention_forward(_state.group, _state.heads_k_stride)
        return over_ranks(*args, **kwargs)

    forward._over_ranks = True  # type: ignore[attr-defined]
    modeling_flash_attention_utils._flash_attention_forward = forward
    for name, module in list(sys.modules.items()):
        is_model = name.startswith(("transformers.models.", "transformers_modules."))
        if is_model and vars(module).get("_flash_attention_forward") is original:
            module._flash_attention_forward = forward  # type: ignore[attr-defined]
