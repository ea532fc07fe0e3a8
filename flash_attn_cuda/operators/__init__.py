"""Custom operators of torch, namespace `flash_attn_cuda`."""
