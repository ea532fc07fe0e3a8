"""The arguments of flash_attn_cuda._C, which FlashAttention-2's callers pass by position, as its
sources have them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "csrc/torch_binding"
BINDINGS = (SOURCES / "module.cpp").read_text()
DECLARATIONS = "".join(path.read_text() for path in SOURCES.glob("*.h"))

SCORES = "p_dropout softmax_scale"
MASK = "is_causal window_left window_right softcap"
FORWARD = "q k v out"
BACKWARD = "dout q k v out softmax_lse dq dk dv"
LENGTHS = "cu_seqlens_q cu_seqlens_k"
MOST = "max_seqlen_q max_seqlen_k"

# FlashAttention-2's order.
POSITIONAL = {
    "fwd": f"{FORWARD} alibi_slopes {SCORES} {MASK} return_softmax unused_generator",
    "varlen_fwd": (
        f"{FORWARD} {LENGTHS} seqused_k leftpad_k block_table alibi_slopes {MOST} {SCORES} "
        f"zero_tensors {MASK} return_softmax unused_generator num_splits"
    ),
    "bwd": f"{BACKWARD} alibi_slopes {SCORES} {MASK} deterministic unused_generator rng_state",
    "varlen_bwd": (
        f"{BACKWARD} {LENGTHS} alibi_slopes {MOST} {SCORES} zero_tensors {MASK} deterministic "
        "unused_generator rng_state"
    ),
    "fwd_kvcache": (
        "q kcache vcache k v seqlens_k rotary_cos rotary_sin cache_batch_idx leftpad_k "
        f"block_table alibi_slopes out softmax_scale {MASK} is_rotary_interleaved num_splits"
    ),
}


def definitions() -> dict[str, str]:
    """The text of each module.def, by the function's name."""
    found = re.findall(r'module\.def\(\s*"(\w+)",(.*?)\);\n', BINDINGS, flags=re.DOTALL)
    return dict(found)


def arguments(definition: str) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of each argument."""
    return [(name, bool(rest)) for name, rest in re.findall(r'py::arg\("(\w+)"\)( =)?', definition)]


BOUND = [name for name, text in definitions().items() if arguments(text)]


@pytest.mark.parametrize("function", POSITIONAL)
def test_flash_attention_2s_order(function: str) -> None:
    """What is added stands behind it, and may be left out."""
    expected = POSITIONAL[function].split()
    given = arguments(definitions()[function])
    assert [name for name, _ in given[: len(expected)]] == expected
    assert all(has_default for _, has_default in given[len(expected) :])


@pytest.mark.parametrize("function", BOUND)
def test_names_are_those_of_the_declaration(function: str) -> None:
    """pybind11 gives the nth name to the nth parameter, whatever that is called."""
    definition = definitions()[function]
    names = [name for name, _ in arguments(definition)]
    declared = re.search(rf"[ >]{function}\(([^;]*)\);", DECLARATIONS)
    assert declared is not None
    assert re.findall(r"(\w+)(?:,|$)", declared[1].replace("\n", " ")) == names
    described = "".join(re.findall(r'"(.*?)(?:\\n)*"', definition.split("py::arg")[0]))
    is_described = described.startswith(f"{function}(")
    assert is_described or function not in POSITIONAL
    if is_described:
        listed = described[len(function) + 1 : described.index(")")].split(",")
        assert [name.split("=")[0].strip() for name in listed] == names
