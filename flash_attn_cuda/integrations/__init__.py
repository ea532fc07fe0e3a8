"""Other packages' functions on this one's.

    compat              makes the names of other packages' modules resolve here, by its install()
    padding, rotary_layers   flash_attn.bert_padding and flash_attn.layers.rotary
    flash_attention_3   the module flash_attn_interface
    flash_attention_4   flash_attn.cute
    ring_flash_attn     ring_flash_attn, for sequences over several ranks
    sequences           what FlashAttention-3 and 4 share: refusals by name, and any layout
    transformers, transformers_ring, vllm, sdpa   ties to other libraries, and to torch's attention

Nothing but sdpa, of which torch learns a name, is imported before somebody asks for it.
"""
