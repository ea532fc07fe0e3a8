"""T5, mT5 and UMT5 of transformers, whose relative position biases are tables here, beside their
own eager attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import t5_relative_bias

transformers = pytest.importorskip("transformers")

from tests.surfaces.transformers_cases import (  # noqa: E402
    OURS,
    Outputs,
    assert_as_good,
    lengths_mask,
    over_places,
    random_tokens,
    register_attentions,
)

REACH = 9  # shorter than the sequences


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_attentions()


def make(family: str, attention: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96}
    sizes |= {"num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    sizes |= {"relative_attention_max_distance": REACH, "decoder_start_token_id": 0}
    # Smooth: where ReLU's argument is rounded across 0, gradients jump.
    sizes |= {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=2.0)
    model = model.to(device, dtype).eval()
    model.set_attn_implementation(attention)
    return model


def mask_of(padding: str, device: str) -> Tensor:
    if padding != "between":
        return lengths_mask([23, 14] if padding != "none" else [23, 23], padding, device)
    mask = torch.ones(2, 23, dtype=torch.long, device=device)
    mask[0, 5:9] = mask[1, 20:] = 0
    return mask


@over_places
@pytest.mark.parametrize(
    ("family", "padding"),
    [("T5", "left"), ("T5", "right"), ("T5", "between"), ("MT5", "none"), ("UMT5", "right")],
)
def test_training(family: str, padding: str, device: str, dtype: torch.dtype) -> None:
    """An encoder, and a decoder whose own padding is at the right; gradients of tables too."""
    mask, tokens = mask_of(padding, device), random_tokens(2, 23, device=device)
    labels = random_tokens(2, 17, device=device)

    def run(attention: str, dtype: torch.dtype) -> Outputs:
        model = make(family, attention, device, dtype)
        found = model(input_ids=tokens, attention_mask=mask, labels=labels)
        found.loss.backward()
        gradients = {
            name: x.grad.double() for name, x in model.named_parameters() if x.grad is not None
        }
        assert any("relative_attention_bias" in name for name in gradients)
        return {"logits": found.logits.detach().double(), **gradients}

    assert_as_good(run(OURS, dtype), [run("eager", dtype)], run("eager", torch.float64), dtype)


@pytest.mark.parametrize(
    ("family", "cache"), [("T5", "static"), ("MT5", "dynamic"), ("UMT5", "dynamic")]
)
def test_generation(family: str, cache: str) -> None:
    mask, tokens = mask_of("left", "cpu"), random_tokens(2, 23, device="cpu")

    def generated(attention: str) -> Tensor:
        model = make(family, attention, "cpu", torch.float64)
        options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        found = model.generate(tokens, attention_mask=mask, cache_implementation=cache, **options)
        return torch.stack(found.logits)

    torch.testing.assert_close(generated(OURS), generated("eager"))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_table_of_a_model(bidirectional: bool) -> None:
    model = make("T5", "eager", "cpu", torch.float64)
    part = model.encoder if bidirectional else model.decoder
    layer = part.block[0].layer[0].SelfAttention
    table = t5_relative_bias(
        layer.relative_attention_bias.weight, bidirectional=bidirectional, max_distance=REACH
    )
    pairs = layer.compute_bias(REACH + 1, 2 * REACH + 1)  # the last row has all distances
    torch.testing.assert_close(pairs[0, :, REACH], table, rtol=0, atol=0)


def test_another_bias_is_refused() -> None:
    model = make("T5", OURS, "cpu", torch.float32)
    layer = model.encoder.block[0].layer[0].SelfAttention
    with pytest.raises(NotImplementedError, match=r"^position_bias: .* got shape \(1, 4, 5, 5\)"):
        layer(torch.randn(1, 5, 64), position_bias=torch.randn(1, 4, 5, 5))
