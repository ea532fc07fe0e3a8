"""ring_flash_attn's functions for transformers' models: in processes over gloo, in fp64, against
one process.
"""

from __future__ import annotations

import importlib

import pytest

from flash_attn_cuda.integrations import compat
from tests.context_parallel.ranks import Ranks

pytest.importorskip("transformers")

from tests.surfaces import transformers_ring_cases as cases


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        *(("Llama", 1), ("Llama", 2), ("Mistral", 1), ("Gemma2", 2), ("GptOss", 1)),
        ("Gemma4", 1),
    ],
)
def test_equals_one_process(two: Ranks, name: str, stride: int) -> None:
    """Grouped queries, a window, a softcap, sinks, layers of two head dims that share keys."""
    two.run(cases.equals_one_process, name, stride)


def test_training(two: Ranks) -> None:
    two.run(cases.trains_as_one_process)


def test_padding(two: Ranks) -> None:
    two.run(cases.padding_ends_documents)


def test_bidirectional_and_direct_calls(two: Ranks) -> None:
    two.run(cases.bidirectional_and_direct)


def test_switches_and_refusals(two: Ranks) -> None:
    two.run(cases.switches_and_refusals)


def test_modules_of_the_package() -> None:
    compat.install()
    try:
        names: dict[str, object] = {}
        code = (
            "import ring_flash_attn.adapters.hf_adapter\n"
            "from ring_flash_attn.adapters import substitute_hf_flash_attn\n"
            "from ring_flash_attn.adapters.hf_adapter import DATA_PARAMS, use_ring_attn\n"
            "from ring_flash_attn.adapters.hf_adapter import create_ring_flash_attention_forward\n"
        )
        exec(code, names)
        ours = importlib.import_module("flash_attn_cuda.integrations.transformers_ring")
        assert names["DATA_PARAMS"] is ours.DATA_PARAMS
        assert names["substitute_hf_flash_attn"] is ours.substitute_hf_flash_attn
        assert ours.check_params(ours.use_ring_attn, len)
    finally:
        compat.uninstall()
