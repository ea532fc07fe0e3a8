"""The public names of other packages that this one has, or refuses by name.

    served   the name is here: with these parameters, in this order, with these defaults, or None
             where it is no function or has no signature of its own
    refused  it is not here: an AttributeError names it and says this

Others that these packages' modules define are of no use to code that calls attention: classes and
settings of their kernels, helpers of their functions. The lists were written from the releases and
commits that `of` names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Module:
    """name: as it is imported once compat.install() was called."""

    name: str
    of: str
    served: dict[str, str | None]
    refused: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # another package, without which the module is not there

    def signatures(self) -> dict[str, str]:
        return {name: shown for name, shown in self.served.items() if shown is not None}


# -- FlashAttention-2 ------------------------------------------------------------------------------

FA2 = "flash-attn 2.8.3.post2"

_TRAINING = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_MASK = "causal, window_size_left, window_size_right, softcap, alibi_slopes"
_GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"

_FA2_FUNCTIONS: dict[str, str | None] = {
    "flash_attn_func": f"q, k, v, {_TRAINING}",
    "flash_attn_kvpacked_func": f"q, kv, {_TRAINING}",
    "flash_attn_qkvpacked_func": f"qkv, {_TRAINING}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_TRAINING}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_TRAINING}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_TRAINING}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
_FA2_PRIVATE = {
    "_flash_attn_forward": f"q, k, v, dropout_p, softmax_scale, {_MASK}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {_LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
    ),
    "_flash_attn_backward": (
        f"{_GRADIENTS}, dropout_p, softmax_scale, {_MASK}, deterministic, rng_state=None"
    ),
    "_flash_attn_varlen_backward": (
        f"{_GRADIENTS}, {_LENGTHS}, dropout_p, softmax_scale, {_MASK}, deterministic, "
        "rng_state=None, zero_tensors=False"
    ),
}

FLASH_ATTENTION_2 = Module(
    "flash_attn",
    f"{FA2}, flash_attn/__init__.py",
    {"__version__": None, **_FA2_FUNCTIONS},
)
FLASH_ATTENTION_2_INTERFACE = Module(
    "flash_attn.flash_attn_interface",
    f"{FA2}, flash_attn/flash_attn_interface.py",
    {
        **_FA2_FUNCTIONS,
        **_FA2_PRIVATE,
        **{f"_wrapped{name}": shown for name, shown in _FA2_PRIVATE.items()},
        "flash_attn_gpu": None,
        "maybe_contiguous": "x",
    },
    refused={
        "FlashAttnFunc": "call flash_attn_func",
        "FlashAttnKVPackedFunc": "call flash_attn_kvpacked_func",
        "FlashAttnQKVPackedFunc": "call flash_attn_qkvpacked_func",
        "FlashAttnVarlenFunc": "call flash_attn_varlen_func",
        "FlashAttnVarlenKVPackedFunc": "call flash_attn_varlen_kvpacked_func",
        "FlashAttnVarlenQKVPackedFunc": "call flash_attn_varlen_qkvpacked_func",
    },
)
BERT_PADDING = Module(
    "flash_attn.bert_padding",
    f"{FA2}, flash_attn/bert_padding.py",
    {
        "IndexFirstAxis": None,
        "IndexFirstAxisResidual": None,
        "IndexPutFirstAxis": None,
        "index_first_axis": None,
        "index_first_axis_residual": None,
        "index_put_first_axis": None,
        "pad_input": "hidden_states, indices, batch, seqlen",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    },
)
_ROTARY = "seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
_ROTARY_EMB = f"x, cos, sin, interleaved=False, inplace=False, {_ROTARY}"
ROTARY = Module(
    "flash_attn.layers.rotary",
    f"{FA2}, flash_attn/layers/rotary.py",
    {
        "ApplyRotaryEmb": None,
        "ApplyRotaryEmbKV_": None,
        "ApplyRotaryEmbQKV_": None,
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
        "apply_rotary": f"x, cos, sin, {_ROTARY}, interleaved=False, inplace=False, "
        "conjugate=False",
        "apply_rotary_emb": _ROTARY_EMB,
        "apply_rotary_emb_func": _ROTARY_EMB,
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "apply_rotary_emb_qkv_": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
            "num_heads_q=None"
        ),
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "rotate_half": "x, interleaved=False",
    },
)
TRITON_ROTARY = Module(
    "flash_attn.ops.triton.rotary",
    f"{FA2}, flash_attn/ops/triton/rotary.py",
    {"apply_rotary": ROTARY.served["apply_rotary"]},
    refused={"rotary_kernel": "call apply_rotary"},
)

# -- FlashAttention-3 ------------------------------------------------------------------------------

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_WINDOW = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
_SCHEDULE = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
_PLAN = (
    "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
)

FLASH_ATTENTION_3 = Module(
    "flash_attn_interface",
    "Dao-AILab/flash-attention, commit 01afd16, hopper/flash_attn_interface.py",
    {
        "flash_attn_func": (
            f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, {_WINDOW}, "
            f"{_SCHEDULE}"
        ),
        "flash_attn_qkvpacked_func": (
            f"qkv, softmax_scale=None, causal=False, {_DESCALES}, {_WINDOW}, deterministic=False, "
            "num_heads_q=None, sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            f"q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, "
            f"causal=False, qv=None, {_DESCALES}, {_WINDOW}, {_SCHEDULE}"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
            "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            f"{_DESCALES}, softmax_scale=None, causal=False, {_WINDOW}, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
            "return_softmax_lse=False"
        ),
        "_flash_attn_forward": (
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
            "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
            "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
            f"{_DESCALES}, softmax_scale=None, causal=False, window_size_left=-1, "
            "window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, "
            "sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, "
            "dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, "
            "window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0"
        ),
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "get_scheduler_metadata": (
            f"{_PLAN}attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
    },
    refused={
        "FlashAttnFunc": "call flash_attn_func",
        "FlashAttnQKVPackedFunc": "call flash_attn_qkvpacked_func",
        "FlashAttnVarlenFunc": "call flash_attn_varlen_func",
        "flash_attn_3_gpu": "call this module's functions",
    },
)

# -- FlashAttention-4 ------------------------------------------------------------------------------

FA4 = "flash-attn-4 4.0.0b36"

_SCORES = "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None"
_HINTS = "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False"
_MODS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
_GATHER = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
_ORDER = r"leave dq_write_order None"

_FA4_TRAINING: dict[str, str | None] = {
    "flash_attn_func": (
        f"q, k, v, qv=None, gather_kv_indices=None, {_SCORES}, {_HINTS}, {_MODS}, "
        "aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
        f"block_sparse_tensors_bwd=None, return_lse=False, {_GATHER}"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
        f"gather_kv_indices=None, page_table=None, {_SCORES}, {_HINTS}, {_MODS}, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        f"{_GATHER}"
    ),
}
FLASH_ATTENTION_4 = Module(
    "flash_attn.cute",
    f"{FA4}, flash_attn/cute/__init__.py",
    {"__version__": None, **_FA4_TRAINING},
)
FLASH_ATTENTION_4_INTERFACE = Module(
    "flash_attn.cute.interface",
    f"{FA4}, flash_attn/cute/interface.py",
    {
        **_FA4_TRAINING,
        "BlockSparseTensorsTorch": None,
        "SchedulerMetadataTensorsTorch": None,
        "flash_attn_combine": (
            "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
            "virtual_batch_idx=None, return_lse=True"
        ),
        "get_scheduler_metadata": (
            "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
            "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, "
            "seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, "
            "seqused_q=None, seqused_k=None, leftpad_k=None, seqlen_k_per_split=None, _arch=None"
        ),
    },
    refused={
        "FlashAttnFunc": "call flash_attn_func",
        "FlashAttnVarlenFunc": "call flash_attn_varlen_func",
        "_flash_attn_fwd": "which return softmax_lse with return_lse",
        "_flash_attn_bwd": r"call torch\.autograd\.grad",
    },
)
BLOCK_SPARSITY = Module(
    "flash_attn.cute.block_sparsity",
    f"{FA4}, flash_attn/cute/block_sparsity.py",
    {"BlockSparseTensorsTorch": None},
    refused={
        "compute_dq_write_order": _ORDER,
        "compute_dq_write_order_from_block_mask": _ORDER,
        "fast_sampling": r"make a flash_attn_cuda\.BlockSparsity",
    },
)

# -- vLLM ------------------------------------------------------------------------------------------

VLLM = Module(
    "flash_attn_cuda.integrations.vllm",
    "vllm-project/vllm, commit 01420e0, vllm/vllm_flash_attn/flash_attn_interface.py",
    {
        "fa_version_unsupported_reason": "fa_version",
        "flash_attn_varlen_func": (
            "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
            "seqused_k=None, q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, "
            "window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False, "
            "return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
            "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, "
            "num_splits=0, output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, "
            "cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, block_sparse_tensors=None, "
            "aux_tensors=None, aux_tensor_leading_dims=None, dynamic_causal=None"
        ),
        "get_scheduler_metadata": (
            f"{_PLAN}has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
        "is_fa_version_supported": "fa_version",
    },
    refused={
        "sparse_attn_func": r"call flash_attn_cuda\.flash_attn_func with block_mask",
        "sparse_attn_varlen_func": r"call flash_attn_cuda\.flash_attn_varlen_func with block_mask",
    },
)

# -- FlashMLA --------------------------------------------------------------------------------------

FLASH_MLA_INTERFACE = Module(
    "flash_mla.flash_mla_interface",
    "deepseek-ai/FlashMLA 02fe0d0, flash_mla/flash_mla_interface.py",
    {
        "FlashMLASchedMeta": None,
        "flash_mla_sparse_fwd": (
            "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, indexer_topk=0"
        ),
        "flash_mla_with_kvcache": (
            "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
            "num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, "
            "indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, "
            "topk_length=None, extra_topk_length=None"
        ),
        "get_mla_metadata": "*args, **kwargs",
    },
    refused={
        f"flash_attn_varlen_{form}func": rf"call flash_attn_cuda\.flash_attn_varlen_{form}func"
        for form in ("", "kvpacked_", "qkvpacked_")
    },
)
FLASH_MLA = replace(FLASH_MLA_INTERFACE, name="flash_mla")

# -- FlashInfer ------------------------------------------------------------------------------------

FLASHINFER_MLA = Module(
    "flash_attn_cuda.integrations.flashinfer_mla",
    "flashinfer-ai/flashinfer 00e3d68, flashinfer/mla.py",
    {
        "BatchMLAPagedAttentionWrapper": (
            "float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, "
            "kv_indices=None, kv_len_arr=None, backend='auto'"
        ),
    },
)
FLASHINFER_MLA_METHODS = {
    "plan": (
        "self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, "
        "head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False"
    ),
    "run": (
        "self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, "
        "profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False"
    ),
}

# -- ring_flash_attn -------------------------------------------------------------------------------

RING = "ring_flash_attn 0.1.8"

_RING_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, group=None"
)
_RING_LENGTHS = {
    "ring_flash_attn": "",
    "zigzag_ring_flash_attn": "",
    "stripe_flash_attn": "",
    "ring_flash_attn_varlen": "cu_seqlens, max_seqlen, ",
    "zigzag_ring_flash_attn_varlen": "cu_seqlens, max_seqlen, ",
    "llama3_flash_attn_varlen": f"{_LENGTHS}, heads_k_stride, local_k_slice, ",
}
_RING_FORMS = {"": "q, k, v", "kvpacked_": "q, kv", "qkvpacked_": "qkv"}
_RING_TRANSFORMERS: dict[str, str | None] = {
    "substitute_hf_flash_attn": "process_group, heads_k_stride",
    "update_ring_flash_attn_params": "cu_seqlens, process_group",
}
RING_FLASH_ATTENTION = Module(
    "ring_flash_attn",
    f"{RING}, ring_flash_attn/__init__.py",
    {
        **{
            f"{stem}_{form}func": f"{tensors}, {lengths}{_RING_OPTIONS}"
            for stem, lengths in _RING_LENGTHS.items()
            for form, tensors in _RING_FORMS.items()
        },
        "llama3_flash_attn_prepare_cu_seqlens": "cu_seqlens, causal, rank, world_size",
        **_RING_TRANSFORMERS,
    },
)
RING_ADAPTERS = Module(
    "ring_flash_attn.adapters",
    f"{RING}, ring_flash_attn/adapters/__init__.py",
    _RING_TRANSFORMERS,
    needs="transformers",
)
RING_HF_ADAPTER = Module(
    "ring_flash_attn.adapters.hf_adapter",
    f"{RING}, ring_flash_attn/adapters/hf_adapter.py",
    {
        **_RING_TRANSFORMERS,
        "DATA_PARAMS": None,
        "check_params": "f1, f2",
        "create_ring_flash_attention_forward": "process_group, heads_k_stride",
        "flash_attention_forward": (
            "module, query, key, value, attention_mask, dropout=0.0, scaling=None, "
            "sliding_window=None, softcap=None, **kwargs"
        ),
        "use_ring_attn": "flag",
    },
    refused={"RING_ATTN_SWITCH": "call use_ring_attn"},
    needs="transformers",
)

MODULES = (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_2_INTERFACE,
    BERT_PADDING,
    ROTARY,
    TRITON_ROTARY,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    FLASH_ATTENTION_4_INTERFACE,
    BLOCK_SPARSITY,
    VLLM,
    FLASH_MLA,
    FLASH_MLA_INTERFACE,
    FLASHINFER_MLA,
    RING_FLASH_ATTENTION,
    RING_ADAPTERS,
    RING_HF_ADAPTER,
)
