"""Functions with the names, parameters and results of other attention packages, on this one's.

    flash_attention_3   the module flash_attn_interface
    flash_attention_4   flash_attn.cute
    ring_flash_attn     ring_flash_attn, for sequences over several ranks
    sequences           what the first two share: refusals by name, and sequences in any layout

compat.install() makes the modules resolve here. Nothing is imported before somebody asks for it.
"""
