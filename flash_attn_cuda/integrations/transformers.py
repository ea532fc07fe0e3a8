"""Models of Hugging Face transformers on this package's attention.

    from flash_attn_cuda.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flash_attn_cuda")

Runs what transformers runs with "flash_attention_2", on the CPU too: causal and bidirectional
attention, sliding windows, softcap, grouped-query attention, dropout, generation with dynamic and
static caches, padding on either side or anywhere, and batches packed by position_ids or by
cu_seq_lens_q and cu_seq_lens_k; also attention sinks, as gpt-oss has them. A mask that is none of
these (a custom 4-D one, a prefix, blocks of images as in PaliGemma and Gemma 3) runs on the kernels
for masks, with all of the above. Gemma 4 runs with both of its layer kinds, whose head dims are 256
and 512, and T5, mT5 and UMT5 with their relative biases. What those lack, such as wider heads, runs
on torch's attention, which is said once; with a softcap, sinks or relative biases, which that
lacks, it raises.

Reading the padding mask, once per forward pass, waits for the GPU, as in transformers' own mask for
flash-attention; no layer waits, unless masks are copied on their way to it, as in a model that is
spread over GPUs. torch.compile breaks the graph where a padding mask is read (before torch 2.14
also for masks that are not just causal), and nowhere else of ours. With fullgraph=True, in
torch.export and where torch.vmap maps it, a mask is not read, which costs: tokens are sorted in
every layer, or the kernels for masks run where there is a window.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils, modeling_flash_attention_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from ..functions.interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .padding import pad_input, unpad_input
from .transformers_masks import Pattern, meaning_of, packed_by_positions, without_meaning
from .transformers_masks import attention_mask as attention_mask_function
from .transformers_own_masks import mask_arguments, torch_attention, what_kernels_lack
from .transformers_relative import make_tables, relative_bias_of
from .transformers_sequences import Sequences, for_decoding, is_decoding

__all__ = ["attention", "register"]

_registered: set[str] = set()


def register(name: str = "flash_attn_cuda") -> None:
    """Make attn_implementation=`name` known to transformers. Calling it again changes nothing.

    A name should have "flash" in it. Under any other name transformers slices masks as 4-D ones
    where layers of Gemma 4 share keys, and generate() raises an IndexError.

    Raises:
        ImportError: transformers is too old: its mask functions must take q_length.
        ValueError: transformers has an attention of that name already.
    """
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            "flash_attn_cuda.integrations.transformers needs a transformers whose mask functions "
            f"take q_length, got version {transformers.__version__}"
        )
    if name == "eager" or AttentionInterface._global_mapping.get(name, attention) is not attention:
        raise ValueError(f"name: must not be one that transformers has already, got {name!r}")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask_function)
    _registered.add(name)
    _answer_for_registered_names()
    _join_the_compatible()
    _make_masks_of_chunks()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (out (batch, seqlen_q, heads, value_dim), None).

    Args:
        module: the attention layer; its is_causal counts where nothing else says it.
        query: (batch, heads_q, seqlen_q, head_dim).
        key: (batch, heads_k, seqlen_k, head_dim), what was cached included.
        value: (batch, heads_k, seqlen_k, value_dim).
        attention_mask: what the registered mask function made, or a 4-D mask, bool or added to the
            scores: both say all there is about causality, windows and padding, whatever the layer
            says. A copy of the former, or any other 2-D mask, says what is padding, and if there is
            any and a window as well, every layer waits for the GPU.
        dropout, scaling, softcap: flash_attn_func's dropout_p, softmax_scale and softcap.
        sliding_window: number of keys that a causal query sees, its own included; a bidirectional
            one sees that many on either side.
        position_ids: (1, seqlen): several runs from the same lowest number are packed sequences.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences in the flattened
            batch, as flash_attn_varlen_func takes them.
        deterministic: bitwise repeatable backward; None asks the environment's
            FLASH_ATTENTION_DETERMINISTIC and torch.use_deterministic_algorithms.
        s_aux: (heads_q,): attention sinks, flash_attn_func's sink, with their gradient.
        position_bias: what a layer of T5, mT5 or UMT5 made, with its gradient.

    Raises:
        NotImplementedError: another position_bias, a paged cache, keys chosen by indices, keys that
            a compressor made.
        ValueError: a 4-D mask does not broadcast to what there is of queries and keys.
    """
    _refuse(module, kwargs)
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    meaning = meaning_of(attention_mask)
    if meaning is not None:
        pattern, sequences, own_mask = meaning.pattern, meaning.sequences, None
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        pattern = Pattern.of_layer(causal, sliding_window, _chunk_of(module))
        sequences, own_mask = _sequences_or_mask(attention_mask, seqlen_q, seqlen_k, pattern)
    query, key, value = _half_precision(module, query, key, value)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "dropout_p": dropout,
        "deterministic": _deterministic(deterministic),
        "sink": s_aux,
        "relative_bias": relative_bias_of(module, position_bias),
    }
    if own_mask is not None:
        return _attend_by_mask(module, query, key, value, own_mask, options, kwargs)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options |= {
        "causal": pattern.causal,
        "window_size": pattern.window_size(max(seqlen_q, seqlen_k)),
        "attention_chunk": pattern.chunk,
    }
    out: Any
    if sequences is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        starts = (cu_seq_lens_q.int(), cu_seq_lens_k.int())
        sequences = Sequences(*starts, max_seqlens=(max_length_q, max_length_k))
    elif sequences is None:
        sequences = packed_by_positions(position_ids, batch, seqlen_q, seqlen_k)
    if sequences is not None:
        out = sequences.attend(query, key, value, **options)
    elif is_decoding(query, key, value, **options):
        out = flash_attn_with_kvcache(query, key, value, **for_decoding(options))
    else:
        out = flash_attn_func(query, key, value, **options)
    return out, None


def _attend_by_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention by a 4-D mask, which says all there is about what a query sees."""
    ordered, sink = options["deterministic"], options["sink"]
    lacking = what_kernels_lack(mask, query, key, value, sink)
    torch_can = sink is options["relative_bias"] is None and options["softcap"] <= 0.0
    if lacking is not None and torch_can:
        kwargs = {"dropout": options["dropout_p"], "scaling": options["softmax_scale"], **kwargs}
        return torch_attention(module, query, key, value, mask, lacking, ordered, kwargs)
    options |= mask_arguments(mask, query, key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out: Any = flash_attn_func(query, key, value, **options)
    return out, None


def _sequences_or_mask(
    mask: Tensor | None, seqlen_q: int, seqlen_k: int, pattern: Pattern
) -> tuple[Sequences | None, Tensor | None]:
    """A mask without its Meaning: as Sequences, or in four dimensions."""
    if mask is not None and mask.dim() != 4:
        made = without_meaning(mask, seqlen_q, seqlen_k, pattern)
        return (made, None) if isinstance(made, Sequences) else (None, made)
    return None, mask


def _chunk_of(module: nn.Module) -> int:
    """The chunk of a layer that has one, which only its model's configuration says; else 0."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if not types or not isinstance(index, int) or index >= len(types):
        return 0
    is_chunked = types[index] == "chunked_attention"
    return int(getattr(config, "attention_chunk_size", None) or 0) if is_chunked else 0


def _refuse(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise for what would change the result and is not implemented."""
    of_layer = {"compressor": getattr(module, "compressor", None)}
    for name, what in (
        ("position_bias", "an additive bias is"),
        ("cache", "transformers' paged cache is"),
        ("indices", "a choice of keys for every query is"),
        ("compressor", "attention to keys that stand for several, as in DeepSeek-V4, is"),
    ):
        if (kwargs | of_layer).get(name) is not None:
            raise NotImplementedError(f"{name}: {what} not implemented by flash_attn_cuda")


def _half_precision(module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """fp32 tensors in the dtype of the layer's weights: some trainers norm in fp32.

    On the CPU, which computes fp32, only if the others are not.
    """
    dtypes = {x.dtype for x in tensors}
    device = tensors[0].device.type
    if torch.float32 not in dtypes or (len(dtypes) == 1 and device != "cuda"):
        return tensors
    if device in ("cuda", "cpu") and torch.is_autocast_enabled(device):
        return tensors
    present = (x.dtype for x in (*tensors, *module.parameters()))
    wanted = itertools.chain([_compute_dtype(module)], present)
    half = next((dtype for dtype in wanted if dtype in (torch.float16, torch.bfloat16)), None)
    return tensors if half is None else tuple(x.to(half) for x in tensors)


def _compute_dtype(module: nn.Module) -> torch.dtype | None:
    """What transformers' flash-attention casts to: the model's dtype where weights are quantized,
    else that of the first linear layer.
    """
    config = getattr(module, "config", None)
    if hasattr(config, "_is_quantized"):
        return getattr(config, "dtype", None)
    linear = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    return next((layer.weight.dtype for layer in linear), None)


def _deterministic(wish: bool | None) -> bool:
    if wish is not None:
        return wish
    wanted = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    return wanted or torch.are_deterministic_algorithms_enabled()


def _answer_for_registered_names() -> None:
    """Let transformers load our functions where it would look for a kernel on its hub.

    It takes every name with "flash" in it for a build of flash-attention, whose functions it loads
    when it makes the model, although it then calls only what AttentionInterface holds.
    """
    original = getattr(modeling_flash_attention_utils, "_lazy_imports", None)
    if original is None or getattr(original, "_knows_flash_attn_cuda", False):
        return

    @functools.wraps(original)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in _registered:
            return original(implementation, *args, **kwargs)
        attention = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
        return (*attention, pad_input, unpad_input)

    lazy_imports._knows_flash_attn_cuda = True  # type: ignore[attr-defined]
    modeling_flash_attention_utils._lazy_imports = lazy_imports


def _join_the_compatible() -> None:
    """Let our names through in models that list the implementations with "flash" they run on.

    Models with attention sinks do, and transformers puts the first of the list in place of any name
    that is not on it. Flash-attention 4 on the list says that sinks are all they ask for.
    """
    original = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if original is None or getattr(original, "_knows_flash_attn_cuda", False):
        return

    @functools.wraps(original)
    def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        known = getattr(self, "_compatible_flash_implementations", None) or []
        if attn_implementation in _registered - {*known} and "flash_attention_4" in known:
            self._compatible_flash_implementations = [*known, attn_implementation]
        if attn_implementation in _registered:
            make_tables(self, _registered)
        return original(self, attn_implementation, *args, **kwargs)

    check._knows_flash_attn_cuda = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check


def _make_masks_of_chunks() -> None:
    """Let transformers make masks of chunks (Llama 4) for our names.

    It raises for every name with "flash" in it where there is more than one chunk, before it asks
    the mask function, which can.
    """
    original = getattr(masking_utils, "is_flash_attention_requested", None)
    if original is None or getattr(original, "_knows_flash_attn_cuda", False):
        return

    @functools.wraps(original)
    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        if getattr(config, "_attn_implementation", None) in _registered:
            return False
        return bool(original(config, *args, **kwargs))

    is_flash_attention_requested._knows_flash_attn_cuda = True  # type: ignore[attr-defined]
    masking_utils.is_flash_attention_requested = is_flash_attention_requested
