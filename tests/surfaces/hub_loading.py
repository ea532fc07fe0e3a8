"""What Hugging Face's kernels package, and transformers by it, compute with a folder for their hub:

python -m tests.surfaces.hub_loading FOLDER [cpu|cuda] prints differences from this package, which
is loaded beside, and from transformers' sdpa, as parts of the largest number.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import Any

import kernels
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

import flash_attn_cuda

NAME = "somebody/flash-attn-cuda"


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def results(module: ModuleType, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> list[Tensor]:
    torch.manual_seed(1)
    out = module.flash_attn_func(q, k, v, dropout_p, causal=True)
    return [out, *torch.autograd.grad(out.sum(), (q, k, v))]


def of_functions(kernel: ModuleType, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Grouped heads, with dropout and without; compiled."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
    q, k, v = (torch.randn(2, 96, heads, 64, **options) for heads in (4, 2, 2))
    found: dict[str, Any] = {}
    for dropout_p in (0.0, 0.1):
        pairs = zip(
            *(results(x, q, k, v, dropout_p) for x in (kernel, flash_attn_cuda)), strict=True
        )
        found[f"functions, dropout {dropout_p}"] = max(difference(*pair) for pair in pairs)
    compiled = torch.compile(kernel.flash_attn_func, backend="aot_eager", fullgraph=True)
    found["compiled"] = difference(compiled(q, k, v), kernel.flash_attn_func(q, k, v))
    return found


def of_a_model(device: str, dtype: torch.dtype) -> float:
    """Logits of a padded batch by the folder and by sdpa."""
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, pad_token_id=0, **sizes, **heads)
    model = LlamaForCausalLM(config).to(device, dtype)
    tokens = torch.randint(1, 97, (2, 40), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    logits = []
    for name in (NAME, "sdpa"):
        model.set_attn_implementation(name, allow_all_kernels=True)
        logits.append(model(tokens, attention_mask=mask).logits[mask.bool()])
    return difference(*logits)


def main(folder: str, device: str = "cpu") -> None:
    os.environ["LOCAL_KERNELS"] = f"{NAME}={folder}"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kernel = kernels.get_kernel(NAME, version=1)
    found = {"name": kernel.__name__, "reason": kernel.cuda_unavailable_reason()}
    found |= of_functions(kernel, device, dtype)
    if is_kernels_available():  # this transformers takes this release of kernels
        found["model"] = of_a_model(device, dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
