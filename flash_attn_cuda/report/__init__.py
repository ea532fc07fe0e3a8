"""What python -m flash_attn_cuda reports of an installation."""
