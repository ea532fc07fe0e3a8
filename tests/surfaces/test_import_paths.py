"""Every path that users import from: those of README and documents, and what they say is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MODULES = {
    "call": "AttentionCall Gradients Incoming Results Tangents",
    "compat": "VERSION install is_installed uninstall",
    "context_parallel": "Band ContextParallel Piece Plan",
    "cpu": "Tiling backward_on_cpu combine forward_on_cpu",
    "integrations.vllm": "flash_attn_varlen_func get_scheduler_metadata",
    "masks": "bigbird dilated document nsa_key_lists prefix_lm sliding_window strided",
    "masks.sparsity": "BlockSparsity",
    "padding": "index_first_axis index_put_first_axis pad_input unpad_input",
    "rotary": "apply_rotary_emb apply_rotary_emb_func",
    "rotary_layers": "RotaryEmbedding apply_rotary apply_rotary_emb_kv_ apply_rotary_emb_qkv_",
    "surfaces.flash_attention_3": "_flash_attn_forward flash_attn_func flash_attn_with_kvcache",
    "surfaces.flash_attention_4": "flash_attn_func flash_attn_varlen_func",
    "surfaces.flash_mla": "flash_mla_with_kvcache get_mla_metadata",
    "surfaces.flashinfer_mla": "BatchMLAPagedAttentionWrapper",
    "surfaces.ring_flash_attn": "ring_flash_attn_func llama3_flash_attn_prepare_cu_seqlens",
}
OF_TRANSFORMERS = {
    "integrations.transformers": "register",
    "integrations.transformers_ring": "DATA_PARAMS substitute_hf_flash_attn use_ring_attn",
}
DOCUMENTS = (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))
IMPORTS = sorted(
    {
        line
        for path in DOCUMENTS
        for line in re.findall(
            r"(?m)^ *((?:from|import) flash_attn_cuda[^#\n]*\w)", path.read_text()
        )
    }
)


@pytest.mark.parametrize("name", sorted({**MODULES, **OF_TRANSFORMERS}))
def test_a_module_has_its_names(name: str) -> None:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    module = importlib.import_module(f"flash_attn_cuda.{name}")
    wanted = {**MODULES, **OF_TRANSFORMERS}[name].split()
    assert not [attribute for attribute in wanted if not hasattr(module, attribute)]


@pytest.mark.parametrize("line", IMPORTS)
def test_what_documents_import_is_there(line: str) -> None:
    if "transformers" in line:
        pytest.importorskip("transformers")
    exec(line, {})


def test_documents_import_something() -> None:
    assert len(IMPORTS) >= 4


def test_a_module_is_the_same_by_all_its_paths() -> None:
    """What one path's caller sets or registers, the others see."""
    compat = importlib.import_module("flash_attn_cuda.compat")
    compat.install()
    try:
        for path, ours in (
            ("flash_attn_interface", "surfaces.flash_attention_3"),
            ("flash_attn.cute", "surfaces.flash_attention_4"),
            ("flash_attn.bert_padding", "padding"),
            ("flash_attn.layers.rotary", "rotary_layers"),
        ):
            served = importlib.import_module(path)
            own = importlib.import_module(f"flash_attn_cuda.{ours}")
            for name in own.__all__:
                assert getattr(served, name) is getattr(own, name), (path, name)
    finally:
        compat.uninstall()
