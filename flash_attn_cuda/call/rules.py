"""What an attention call must satisfy, as data: which arguments go together, and what their sizes
and dtypes must be.

A rule has one line here. call/interpret.py interprets it for the CPU, compilers and transforms;
build_tools/generate/call_rules.py makes the extension's C++ of it, with the same words and the same
exceptions. Shapes and dtypes of arrays and ranges of numbers stand with the fields (fields.py).

This file imports nothing of the package: a build reads it before torch is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

E4M3 = "torch.float8_e4m3fn"
E8M0 = "torch.float8_e8m0fnu"
MAX_HEAD_DIM = 512
MAX_ROWS_WITH_ORIGIN = 2**28
FP8_MULTIPLE = 16  # of the head dims of e4m3
LEAST_GROUP = 64  # columns of a latent row that share a scale; a power of two
MAX_HEAD_DIM_WITH_QV = 64  # of q and k, on CUDA
TILE = 128  # queries, or keys
WANTED = "in a call whose gradients are wanted"
DIRECTED = "in a call that is differentiated in a direction"


class Rules(NamedTuple):
    """Of a fact, and of arguments where it holds.

    fact: a field that is given, True or above 0, or a function of the call (fields.py, call.h);
    "not" before it.
    where: the fact in an error's words; {k} and other names stand for what the caller knows them
    as.
    absent: None, False or 0 there (ValueError).
    refused: likewise, as no backend does it (NotImplementedError).
    given: not None there (ValueError).
    refusal: the fact itself is refused, in these words (NotImplementedError).
    """

    fact: str
    where: str = ""
    absent: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    refusal: str = ""


class Must(NamedTuple):
    """Of sizes and dtypes.

    argument: the one that an error names.
    holds: of a call. build_tools/generate/cpp_of_python.py says what a lambda may be made of.
    words: what must be and what is. {k} stands for what the caller knows it as, {heads_k} for that
    function of the call, {softcap.value} for that field, {k.shape}, {k.shape[1]}, {k.dtype}... for
    the tensor's.
    where: the fact where it must hold, as Rules.fact; "": everywhere.
    """

    argument: str
    holds: Callable[[Any], bool]
    words: str
    where: str = ""
    kind: type[Exception] = ValueError


class Known(NamedTuple):
    """How errors speak of a fact or field that callers know by another argument."""

    name: str
    absent: str  # what it must be
    given: str  # what it was


KNOWN = {
    "has_masks": Known("attn_mask", "None", "a tensor"),
    "has_lists": Known("block_mask", "None", "a mask"),
    "quantizes_tokens": Known("quantize", "None", "'token'"),
    "bounds_right": Known("window_size", "unbounded on the right", "a right bound"),
    "has_cache_seqlens": Known("cache_seqlens", "None", "a tensor"),
}

NUMBERS = ("dropout_p", "softcap")  # which are off at 0

IN_FLOAT32 = {"finite": "finite in float32", "normal": "off (0) or a normal number in float32"}


def range_in_words(said: Mapping[str, Any]) -> str:
    """What a number must be, of what its field's argument() says."""
    least, most, below = (said.get(x) for x in ("at_least", "at_most", "below"))
    if kind := said.get("in_float32"):
        return IN_FLOAT32[kind]
    if most is not None:
        return f"from {least} to {most}"
    return f"at least {least}" + ("" if below is None else f" and below {below}")


# What calls alone have that a backward follows.
_OF_TRAINING = ("dropout_p", "has_masks", "fp32_results", "origin", "return_max_logits")
_LACKED_IN_PLACE = ("dropout_p", "has_lists", "bias_by_distance", *_OF_TRAINING[2:])
_OF_PACKED = (
    *("origin", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table", "qv"),
    "tree_mask",
)
_LACKED_BY_FEW = (*_OF_TRAINING, "relative_bias")
_ROTARY = ("rotary_cos", "rotary_sin")
_OF_NEW = ("cu_seqlens_k_new", *_ROTARY)
_OF_CACHE = ("cache_batch_idx", "seqlen_k", "k_new", "v_new", *_OF_NEW)
_SCALES = ("k_descale", "v_descale")
_LACKED_BY_LISTS = ("alibi_slopes", "leftpad_k", *_OF_TRAINING)
_SCALE_OF_QV = "as a model scales by the head dim that it has without absorption"

OF_CALL = (
    Rules("is_of_one_length", "without cu_seqlens_q", absent=_OF_PACKED),
    Rules("not over_cache", "without over_cache", absent=_OF_CACHE),
    Rules("over_cache", "over a cache", refused=_LACKED_IN_PLACE),
    Rules("block_table", "with a block_table", refused=_LACKED_IN_PLACE),
    Rules("has_masks", "with a mask or a bias", refused=("fp32_results", "origin")),
    Rules("relative_bias", "with a relative_bias", refused=("has_masks",)),
    Rules("not has_lists", "without a block mask", absent=("mask_bits",)),
    Rules("not bias", "without a bias", absent=("bias_by_distance",)),
    Rules("wants_s_dmask", "with return_softmax and dropout", refused=("has_masks", "origin")),
    Rules("is_fp8", f"where {{k}} is of {E4M3}", refused=(*_LACKED_BY_FEW, "qv"), given=_SCALES),
    Rules("is_fp8_latent", f"where {{v}} alone is of {E4M3}", given=("v_descale",)),
    Rules("qv", "with qv", refused=(*_LACKED_BY_FEW, "alibi_slopes")),
    Rules("qv", f"with qv, {_SCALE_OF_QV}", given=("softmax_scale",)),
    Rules(
        "tree_mask",
        "with a tree_mask, which says what of their own keys queries see",
        absent=("causal", "bounds_right"),
        refused=_LACKED_BY_FEW,
    ),
    Rules("key_lists", "with key_lists", refused=("tree_mask",)),
    Rules("reads_plain_keys_in_place", "over a cache or pages without qv", refused=("key_lists",)),
    Rules("lists_blocks", "with key_lists without qv", refused=_LACKED_BY_LISTS),
    Rules("has_idle_block", refusal="key_list_block: must be 1, got {key_list_block.value}"),
    Rules("not is_fp8", f"where {{k}} is not of {E4M3}", absent=("q_descale", "k_descale")),
    Rules(
        "not has_fp8_values",
        f"where {{v}} is not of {E4M3}",
        absent=("v_descale", "quantizes_tokens"),
    ),
    Rules(
        "appends_fp8",
        f"where {{k_new}} is of {E4M3}",
        absent=("quantizes_tokens",),
        refused=_ROTARY,
    ),
    Rules(
        "not is_fp8_latent",
        f"where {{v}} alone is not of {E4M3}",
        absent=("values_include_rope",),
    ),
    Rules("v_new", "with {v_new}", given=("k_new",)),
    Rules("k_new", "with {k_new}", given=("v_new", "has_cache_seqlens")),
    Rules("not k_new", "without {k_new}", absent=(*_OF_NEW, "quantizes_tokens")),
    Rules("seqlen_k", "with seqlen_k", absent=("seqused_k",)),
    Rules("rotary_cos", "with rotary_cos", given=("rotary_sin",)),
    Rules("rotary_sin", "with rotary_sin", given=("rotary_cos",)),
    Rules("not reads_in_place", "without a cache and pages", absent=("relative_bias",)),
)

# Where a derivative is wanted of what has no backward.
OF_BACKWARD = (
    Rules("qv", refusal=f"qv: must be None {WANTED}, as attention with it has no backward"),
    Rules(
        "is_fp8",
        refusal=f"{{k}}: must not be of {E4M3} {WANTED}, as attention over it has no backward",
    ),
    Rules(
        "over_cache", refusal=f"{{k}}: must not be attended to {WANTED}, as that has no backward"
    ),
    Rules("block_table", refusal=f"block_table: must be None {WANTED}, got a tensor"),
    Rules("tree_mask", refusal=f"tree_mask: must be None {WANTED}, got a tensor"),
)
OF_DIRECTION = (
    Rules("qv", refusal=f"qv: must be None {DIRECTED}, got a tensor"),
    Rules("is_fp8", refusal=f"{{k}}: must not be of {E4M3} {DIRECTED}"),
    Rules("reads_in_place", refusal=f"block_table: must be None {DIRECTED}, as must be a cache"),
    Rules("fp32_results", refusal=f"fp32_results: must be False {DIRECTED}, got True"),
    Rules("tree_mask", refusal=f"tree_mask: must be None {DIRECTED}, got a tensor"),
    Rules("lists_blocks", refusal=f"key_lists: must be None {DIRECTED}, got a tensor"),
)
# Where autograd records a call.
OF_RECORDED = (
    Rules(
        "out",
        refusal=f"out: must be None {WANTED}, got a tensor (torch.no_grad() says that none is)",
    ),
    Rules("fp32_results", refusal=f"fp32_results: must be False {WANTED}, got True"),
)
# Of a call that has the lists of both passes.
OF_LISTS = (
    Rules("block_rows", "with block_rows", given=("block_columns",)),
    Rules("block_columns", "with block_columns", given=("block_rows",)),
)
# Arguments are those that come into a backward, or tangents, and facts theirs or the call's.
OF_INCOMING = (
    Rules("dropout_p", "with dropout, as the forward returned it", given=("rng_state",)),
    Rules("not fp32_results", "without fp32_results", absent=("accumulate",)),
    Rules("accumulate", "with accumulate", given=("dq", "dk", "dv")),
    Rules("not bias", "without a bias", absent=("wants_dbias",)),
)
OF_TANGENTS = (
    Rules("not bias", "without bias", absent=("tbias",)),
    Rules("not sink", "without sink", absent=("tsink",)),
)

DENSE = "(batch, seqlen, heads, head_dim)"
PACKED = "(total, heads, head_dim)"
_KEYS = (
    ("block_table", "(num_pages, page_size, heads, head_dim)"),
    ("over_cache", "(batch_cache, capacity, heads, head_dim)"),
    ("is_packed", PACKED),
    ("", DENSE),
)
# (fact, dimensions): a tensor has those of the first fact that holds.
LAYOUTS = {"q": (("is_packed", PACKED), ("", DENSE)), "k": _KEYS, "v": _KEYS}

_ONE_HEAD = "must have at least one head, got shape"
_HEAD_DIM = "last dimension (head_dim)"
_HEAD_DIM_V = "last dimension (head_dim_v)"
_RANGE = f"must be from 1 to {MAX_HEAD_DIM}, got"
_MULTIPLE = f"must be a multiple of {FP8_MULTIPLE} of {E4M3}, got"
_A_SCALE = "must have a scale for every token"
_WRITTEN = "where quantize writes it, got"

# Of q, k and v, which have the dimensions of their layouts.
OF_TENSORS = (
    Must("v", lambda call: call.v.dtype == call.k.dtype,
         "must have the dtype of {k} ({k.dtype}), got {v.dtype}", "reads_e4m3", TypeError),
    Must("k", lambda call: call.k.dtype == call.q.dtype,
         "must have the dtype of {q} ({q.dtype}), got {k.dtype}", "not reads_e4m3", TypeError),
    Must("v", lambda call: call.v.dtype == call.q.dtype or call.is_fp8_latent(),
         "must have the dtype of {q} ({q.dtype}), got {v.dtype}", "not reads_e4m3", TypeError),
    Must("q", lambda call: 1 <= call.head_dim() <= MAX_HEAD_DIM,
         f"{_HEAD_DIM} {_RANGE} {{head_dim}}"),
    Must("q", lambda call: call.heads_q() >= 1, f"{_ONE_HEAD} {{q.shape}}"),
    Must("k", lambda call: call.heads_k() >= 1, f"{_ONE_HEAD} {{k.shape}}"),
    Must("k", lambda call: call.heads_q() % call.heads_k() == 0,
         "number of heads must divide that of {q} ({heads_q}), got {heads_k}"),
    Must("k", lambda call: call.head_dim_k() == call.head_dim(),
         f"{_HEAD_DIM} must be that of {{q}} ({{head_dim}}), got {{head_dim_k}}"),
    Must("v", lambda call: 1 <= call.head_dim_v() <= MAX_HEAD_DIM,
         f"{_HEAD_DIM_V} {_RANGE} {{head_dim_v}}"),
)  # fmt: skip
# As quantize_kv checks them too.
OF_VALUES = (
    Must("v", lambda call: call.v.shape[:-1] == call.k.shape[:-1],
         "must have the shape of {k} but for the last dimension, {k.shape}, got {v.shape}"),
    Must("k", lambda call: call.entries() == call.batch(),
         "batch must be that of {q} ({batch}), got {entries}", "is_dense"),
)  # fmt: skip
# Of e4m3.
OF_E4M3 = (
    Must("k", lambda call: call.head_dim_k() % FP8_MULTIPLE == 0,
         f"{_HEAD_DIM} {_MULTIPLE} {{head_dim_k}}", "not is_fp8_latent"),
    Must("k", lambda call: call.head_dim_k() % 8 == 0,
         f"{_HEAD_DIM} must be a multiple of 8 beside {{v}} of {E4M3}, got {{head_dim_k}}",
         "is_fp8_latent"),
    Must("v", lambda call: call.head_dim_v() % FP8_MULTIPLE == 0,
         f"{_HEAD_DIM_V} {_MULTIPLE} {{head_dim_v}}"),
    Must("v", lambda call: call.value_columns() <= MAX_HEAD_DIM,
         f"{_HEAD_DIM_V} and that of {{k}}, which values_include_rope adds, must be at most "
         f"{MAX_HEAD_DIM} together, got {{value_columns}}", "values_include_rope"),
)  # fmt: skip
# Of what kernels read without a cache; the public functions pad.
OF_CUDA = (
    Must("q", lambda call: call.head_dim() % 8 == 0,
         f"{_HEAD_DIM} must be a multiple of 8 on CUDA, got {{head_dim}}", "not over_cache"),
    Must("v", lambda call: call.head_dim_v() % 8 == 0,
         f"{_HEAD_DIM_V} must be a multiple of 8 on CUDA, got {{head_dim_v}}", "not over_cache"),
    Must("q", lambda call: call.head_dim() <= MAX_HEAD_DIM_WITH_QV,
         f"{_HEAD_DIM} must be at most {MAX_HEAD_DIM_WITH_QV} with qv on CUDA, got {{head_dim}}",
         "qv"),
)  # fmt: skip
# Before it is known how many sequences there are, and then.
OF_BOUNDS = (
    Must("cu_seqlens_q", lambda call:
         call.cu_seqlens_q.dim() == 1 and call.cu_seqlens_q.shape[0] >= 1,
         "must have shape (batch + 1,), got {cu_seqlens_q.shape}", "is_packed"),
)  # fmt: skip
OF_BATCH = (
    Must("max_seqlen_q", lambda call:
         call.max_seqlen_q == 0 or call.max_seqlen_q == call.q.shape[1],
         "must be the length of q ({q.shape[1]}) without cu_seqlens_q, got {max_seqlen_q.value}",
         "is_dense"),
    Must("max_seqlen_k", lambda call:
         call.max_seqlen_k == 0 or call.max_seqlen_k == call.k.shape[1],
         "must be the length of k ({k.shape[1]}) without cu_seqlens_q, got {max_seqlen_k.value}",
         "is_dense"),
    Must("cu_seqlens_k", lambda call: call.cu_seqlens_k is not None,
         "must be a torch.Tensor, got NoneType", "needs_cu_seqlens_k", TypeError),
    Must("k", lambda call: call.entries() == call.batch(),
         "batch must be that of {q} ({batch}) without cache_batch_idx, got {entries}",
         "reads_entries_in_order"),
)  # fmt: skip
# Of arrays, which have their dtypes.
OF_ARRAYS = (
    Must("qv", lambda call:
         call.qv.dim() == call.q.dim() and call.qv.shape[:-1] == call.q.shape[:-1],
         "must have the shape of {q} but for the last dimension, {q.shape}, got {qv.shape}", "qv"),
    Must("qv", lambda call: call.qv.shape[-1] == call.head_dim_v(),
         "last dimension must be that of {v} ({head_dim_v}), got {qv.shape}", "qv"),
    Must("key_lists", lambda call:
         call.key_lists.dim() == call.q.dim() and call.key_lists.shape[0] == call.q.shape[0]
         and call.key_lists.shape[-3] == call.q.shape[-3]
         and call.key_lists.shape[-2] == call.heads_k(),
         "must have a list for every query of {q}, {q.shape}, and head of {k} ({heads_k}), got "
         "{key_lists.shape}", "key_lists"),
    Must("tree_mask", lambda call: call.is_packed() or (
         call.tree_mask.dim() == 3 and call.tree_mask.shape[0] == call.q.shape[0]
         and call.tree_mask.shape[1] == call.q.shape[1]
         and call.tree_mask.shape[2] == call.q.shape[1]),
         "must have shape ({q.shape[0]}, {q.shape[1]}, {q.shape[1]}), got {tree_mask.shape}",
         "tree_mask"),
    Must("tree_mask", lambda call: not call.is_packed() or (
         call.tree_mask.dim() == 2 and call.tree_mask.shape[0] == call.q.shape[0]
         and call.tree_mask.shape[1] >= call.max_seqlen_q),
         "must have a row for each query ({q.shape[0]}) and at least max_seqlen_q "
         "({max_seqlen_q.value}) columns, got {tree_mask.shape}", "tree_mask"),
    Must("relative_bias", lambda call:
         call.relative_bias.dim() == 2 and call.relative_bias.shape[0] == call.heads_q()
         and call.relative_bias.shape[1] % 2 == 1,
         "must have shape ({heads_q}, 2 * reach + 1), got {relative_bias.shape}", "relative_bias"),
    Must("key_list_block", lambda call:
         call.key_list_block == 1 or call.key_list_block == 8 or call.key_list_block == 16
         or call.key_list_block == 32 or call.key_list_block == 64 or call.key_list_block == 128,
         "must be 1, 8, 16, 32, 64 or 128, got {key_list_block.value}", "lists_blocks"),
    Must("block_table", lambda call: call.cache_batch_idx is not None
         or (call.block_table.dim() == 2 and call.block_table.shape[0] == call.batch()),
         "must have shape ({batch}, max_pages), got {block_table.shape}", "block_table"),
    Must("block_table", lambda call: call.block_table.dim() == 2,
         "must have shape (batch, max_pages), got {block_table.shape}", "block_table"),
    Must("k", lambda call: call.k.shape[1] >= 1,
         "pages must have at least one row, got shape {k.shape}", "block_table"),
    Must("k_descale", lambda call: call.k_descale is None or call.k_descale.dim() == 3,
         f"{_A_SCALE} of {{k}}, shape {{k.shape[:-1]}}, {_WRITTEN} {{k_descale.shape}}",
         "quantizes_tokens"),
    Must("v_descale", lambda call: call.v_descale.dim() >= 3,
         f"{_A_SCALE} of {{k}}, shape {{k.shape[:-1]}}, {_WRITTEN} {{v_descale.shape}}",
         "quantizes_tokens"),
    Must("k_descale", lambda call: call.k_descale is None or not is_expanded(call.k_descale),
         f"must not be expanded {_WRITTEN} strides {{k_descale.strides}}", "quantizes_tokens"),
    Must("v_descale", lambda call: not is_expanded(call.v_descale),
         f"must not be expanded {_WRITTEN} strides {{v_descale.strides}}", "quantizes_tokens"),
    Must("v_descale", lambda call:
         call.k_descale is None or not is_same(call.k_descale, call.v_descale),
         "must be another tensor than k_descale where quantize writes it", "quantizes_tokens"),
    Must("v_descale", lambda call: call.v_descale.dim() < 4 or (
         call.v_descale.shape[3] >= 1
         and call.head_dim_v() % (LEAST_GROUP * call.v_descale.shape[3]) == 0
         and MAX_HEAD_DIM * call.v_descale.shape[3] % call.head_dim_v() == 0),
         "last dimension must divide the columns of {v} ({head_dim_v}) into groups of 64, 128, 256 "
         "or 512, got {v_descale.shape}", "is_fp8_latent"),
    Must("v_descale", lambda call: call.v_descale.dim() == 4,
         f"must have a scale for each group of a token's columns where it is of {E8M0}, got "
         "{v_descale.shape}", "has_e8m0_scales"),
    Must("origin", lambda call:
         call.q.shape[0] <= MAX_ROWS_WITH_ORIGIN and call.k.shape[0] <= MAX_ROWS_WITH_ORIGIN,
         f"must be None for more than {MAX_ROWS_WITH_ORIGIN} rows, got q of {{q.shape}} and k of "
         "{k.shape}", "origin"),
    Must("k_new", lambda call: call.cu_seqlens_k_new is not None or call.k_new.dim() == 4,
         f"must have 4 dimensions {DENSE}, got shape {{k_new.shape}}", "k_new"),
    Must("k_new", lambda call: call.cu_seqlens_k_new is None or call.k_new.dim() == 3,
         f"must have 3 dimensions {PACKED}, got shape {{k_new.shape}}", "k_new"),
    Must("rotary_cos", lambda call:
         call.rotary_cos.dim() == 2 and 2 <= 2 * call.rotary_cos.shape[1] <= call.head_dim(),
         "must have shape (seqlen_rotary, rotary_dim / 2) with a rotary_dim from 2 to head_dim "
         "({head_dim}), got {rotary_cos.shape}", "rotary_cos"),
    Must("rotary_sin", lambda call: call.rotary_sin.shape == call.rotary_cos.shape,
         "must have shape {rotary_cos.shape}, got {rotary_sin.shape}", "rotary_sin"),
)  # fmt: skip
_BITS = "must have the rows and words of"
# Of tensors over pairs, which have their shapes.
OF_PAIRS = (
    Must("mask_bits", lambda call: call.mask_bits is None or (
         tiles_of(call.mask_bits.shape[2]) == call.block_rows.shape[2]
         and call.mask_bits.shape[3] == 4 * (call.block_rows.shape[3] - 2)),
         f"{_BITS} block_rows, {{block_rows.shape}}, got shape {{mask_bits.shape}}", "block_rows"),
    Must("mask_bits", lambda call: call.mask_bits is None or (
         tiles_of(call.mask_bits.shape[2]) == call.block_columns.shape[3] - 2
         and call.mask_bits.shape[3] == 4 * call.block_columns.shape[2]),
         f"{_BITS} block_columns, {{block_columns.shape}}, got shape {{mask_bits.shape}}",
         "block_columns"),
)  # fmt: skip


def tiles_of(seqlen: int) -> int:
    """Tiles of queries, or of keys, that lists of blocks have."""
    return -(-seqlen // TILE)


def is_expanded(tensor: Any) -> bool:
    """Whether a dimension's entries are one in memory."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return any(step == 0 and size > 1 for step, size in strides)


def is_same(a: Any, b: Any) -> bool:
    return a is b
