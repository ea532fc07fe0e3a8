"""What an attention call must satisfy, as data: which arguments go together.

A rule has one line here. checks/rules.py interprets it for the CPU, compilers and transforms;
build_tools/generate_call.py makes the extension's C++ of it, with the same words and the same
exceptions. Shapes and dtypes of arrays and ranges of numbers stand with the fields (call.py).

This file imports nothing of the package: a build reads it before torch is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

E4M3 = "torch.float8_e4m3fn"
WANTED = "in a call whose gradients are wanted"
DIRECTED = "in a call that is differentiated in a direction"


class Rules(NamedTuple):
    """Of a fact, and of arguments where it holds.

    fact: a field that is given, True or above 0, or a function of the call (call.py, call.h);
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


class Known(NamedTuple):
    """How errors speak of a fact or field that callers know by another argument."""

    name: str
    absent: str  # what it must be
    given: str  # what it was


KNOWN = {
    "has_masks": Known("attn_mask", "None", "a tensor"),
    "quantizes_tokens": Known("quantize", "None", "'token'"),
}

NUMBERS = ("dropout_p",)  # which are off at 0

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
_OF_TRAINING = ("dropout_p", "has_masks", "fp32_results", "origin")
_OF_PACKED = ("origin", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table")
_ROTARY = ("rotary_cos", "rotary_sin")
_OF_NEW = ("cu_seqlens_k_new", *_ROTARY)
_OF_CACHE = ("cache_batch_idx", "seqlen_k", "k_new", "v_new", *_OF_NEW)
_SCALES = ("k_descale", "v_descale")

OF_CALL = (
    Rules("is_of_one_length", "without cu_seqlens_q", absent=_OF_PACKED),
    Rules("not over_cache", "without over_cache", absent=_OF_CACHE),
    Rules("over_cache", "over a cache", refused=_OF_TRAINING),
    Rules("block_table", "with a block_table", refused=_OF_TRAINING),
    Rules("has_masks", "with a mask or a bias", refused=("fp32_results", "origin")),
    Rules("not has_lists", "without a block mask", absent=("mask_bits",)),
    Rules("wants_s_dmask", "with return_softmax and dropout", refused=("has_masks", "origin")),
    Rules("is_fp8", f"where {{k}} is of {E4M3}", refused=_OF_TRAINING, given=_SCALES),
    Rules(
        "not is_fp8",
        f"where {{k}} is not of {E4M3}",
        absent=("q_descale", *_SCALES, "quantizes_tokens"),
    ),
    Rules(
        "appends_fp8",
        f"where {{k_new}} is of {E4M3}",
        absent=("quantizes_tokens",),
        refused=_ROTARY,
    ),
    Rules("v_new", "with {v_new}", given=("k_new",)),
    Rules("k_new", "with {k_new}", given=("v_new",)),
    Rules("not k_new", "without {k_new}", absent=(*_OF_NEW, "quantizes_tokens")),
    Rules("rotary_cos", "with rotary_cos", given=("rotary_sin",)),
    Rules("rotary_sin", "with rotary_sin", given=("rotary_cos",)),
)

# Where a derivative is wanted of what has no backward.
OF_BACKWARD = (
    Rules(
        "is_fp8",
        refusal=f"{{k}}: must not be of {E4M3} {WANTED}, as attention over it has no backward",
    ),
    Rules(
        "over_cache", refusal=f"{{k}}: must not be attended to {WANTED}, as that has no backward"
    ),
    Rules("block_table", refusal=f"block_table: must be None {WANTED}, got a tensor"),
)
OF_DETERMINISTIC = (
    Rules("has_lists", "with a block mask", refused=("deterministic",)),
    Rules("bias", "with a floating attn_mask", refused=("deterministic",)),
)
OF_DIRECTION = (
    Rules("is_fp8", refusal=f"{{k}}: must not be of {E4M3} {DIRECTED}"),
    Rules("reads_in_place", refusal=f"block_table: must be None {DIRECTED}, as must be a cache"),
    Rules("fp32_results", refusal=f"fp32_results: must be False {DIRECTED}, got True"),
)
# Arguments are those that come into a backward, or tangents, and facts theirs or the call's.
OF_INCOMING = (
    Rules("not fp32_results", "without fp32_results", absent=("accumulate",)),
    Rules("accumulate", "with accumulate", given=("dq", "dk", "dv")),
    Rules("not bias", "without a bias", absent=("wants_dbias",)),
)
OF_TANGENTS = (
    Rules("not bias", "without bias", absent=("tbias",)),
    Rules("not sink", "without sink", absent=("tsink",)),
)
