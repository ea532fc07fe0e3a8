"""Small models of transformers, their inputs, and the comparison of their attentions.

Import it after pytest.importorskip("transformers").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from flash_attn_cuda.integrations.transformers import register
from tests.cases.harness import DEVICE

OURS = "flash_attn_cuda"
EXACT = "attention_written_out"
IMAGE = 96  # the token that stands for a part of an image
WINDOW = 5  # shorter than every sequence here
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # scores far from uniform
    "pad_token_id": 0,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Model:
    """A family of models: its configuration, and the attention of transformers to compare with."""

    name: str
    reference: str = "sdpa"
    options: dict[str, Any] = field(default_factory=dict)
    second_reference: str | None = None  # where rounding in one alone may cancel by luck

    def build(self, **options: Any) -> Any:
        model_class = getattr(transformers, f"{self.name}ForCausalLM")
        return model_class(model_class.config_class(**(SIZES | self.options | options)))

    def make(self, attention: str, device: str, dtype: torch.dtype, **options: Any) -> Any:
        torch.manual_seed(0)
        model = self.build(**options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".sinks"):
                    parameter.mul_(10.0)  # of the size of scores
                if self.name == "Gemma4" and name.endswith(".q_norm.weight"):
                    parameter.mul_(0.1)  # nothing else makes scores small
                if name.endswith(".mm_input_projection_weight"):
                    parameter.normal_(std=0.2)  # 0 otherwise
                if "vision" in name and name.endswith("k_proj.bias"):
                    parameter.requires_grad_(False)  # a gradient of 0, of which rounding is all
        model = model.to(device=device, dtype=dtype).eval()
        model.set_attn_implementation(attention)
        config = model.config.get_text_config()
        assert config._attn_implementation == attention  # transformers may choose another one
        return model


@dataclass(frozen=True)
class ImageModel(Model):
    """A family that reads an image of four tokens with text; `text`: its model of the language."""

    reference: str = "eager"
    text: str = ""

    def build(self, **options: Any) -> Any:
        config_class = getattr(transformers, f"{self.name}Config")
        model_class = getattr(transformers, f"{self.name}ForConditionalGeneration")
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
        config = config_class(
            text_config=SIZES | {"model_type": self.text} | self.options | options,
            vision_config=vision
            | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64},
            image_token_index=IMAGE,
            **({"mm_tokens_per_image": 4} if self.name == "Gemma3" else {"projection_dim": 64}),
        )
        return model_class(config)

    def inputs(self, padded: str, device: str) -> dict[str, Tensor]:
        """Of two rows of 12 tokens, the second one of 9 tokens and padding on one side: in
        PaliGemma a prefix of image and text, in Gemma 3 text around an image.
        """
        mask = lengths_mask([12, 12 if padded == "none" else 9], padded, device)
        first = 3 if self.name == "Gemma3" else 0
        number = mask.cumsum(1) - 1 - 100 * (1 - mask)  # of a token in its row
        is_image = (number >= first) & (number < first + 4)
        tokens = random_tokens(2, 12, device=device).clamp_max(IMAGE - 1)
        generator = torch.Generator().manual_seed(2)
        return {
            "input_ids": torch.where(is_image, IMAGE, tokens),
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator).to(device),
            "attention_mask": mask,
            "token_type_ids": (is_image if first else number >= 7).long(),
        }


LLAMA = Model("Llama")
MISTRAL = Model("Mistral", options={"sliding_window": WINDOW})
GEMMA = Model(
    "Gemma2",
    reference="eager",
    options={
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
GPT_OSS = Model(
    "GptOss",
    reference="eager",
    options={
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 8,  # all of them: a choice would jump with rounding
        "experts_implementation": "batched_mm",  # the default has no fp64
    },
)
GEMMA_4 = Model(
    "Gemma4",
    reference="eager",
    second_reference="sdpa",  # whose errors are up to nine times the first's
    options={
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,  # the later two share keys
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "hidden_size_per_layer_input": 16,
    },
)
PALIGEMMA = ImageModel("PaliGemma", text="gemma")
PALIGEMMA_2 = ImageModel("PaliGemma", text="gemma2", options=GEMMA.options)
GEMMA_3 = ImageModel(
    "Gemma3",
    text="gemma3_text",
    options={name: GEMMA.options[name] for name in GEMMA.options if "softcap" not in name},
)
MODELS = [pytest.param(model, id=model.name) for model in (LLAMA, MISTRAL, GEMMA, GPT_OSS, GEMMA_4)]
PLACES = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param(DEVICE, torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu),
    pytest.param(DEVICE, torch.float16, id="gpu-fp16", marks=pytest.mark.gpu),
]
over_image_models = pytest.mark.parametrize(
    "model",
    [
        pytest.param(PALIGEMMA, id="PaliGemma"),
        pytest.param(PALIGEMMA_2, id="PaliGemma2"),
        pytest.param(GEMMA_3, id="Gemma3"),
    ],
)
over_models = pytest.mark.parametrize("model", MODELS)
over_places = pytest.mark.parametrize(("device", "dtype"), PLACES)


def register_attentions() -> None:
    """Make OURS and EXACT known to transformers."""
    register()
    AttentionInterface.register(EXACT, attention_written_out)
    masking_utils.AttentionMaskInterface.register(EXACT, mask_written_out)


def mask_written_out(*args: Any, **kwargs: Any) -> Tensor:
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(*args, **kwargs)


def attention_written_out(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    hidden = scores.new_zeros((), dtype=torch.bool) if attention_mask is None else ~attention_mask
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if s_aux is not None:  # the sink is a key without a value
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(hidden, 0.0)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


def lengths_mask(lengths: list[int], side: str, device: str) -> Tensor:
    """(batch, longest) int64, 0 at padding on one side."""
    longest = max(lengths)
    rows = []
    for length in lengths:
        padding, real = [0] * (longest - length), [1] * length
        rows.append(padding + real if side == "left" else real + padding)
    return torch.tensor(rows, device=device)


def mask_for(model: Any, visible: Tensor) -> Tensor:
    """A 4-D mask of booleans as the model's attention takes it."""
    if model.config._attn_implementation != "eager":
        return visible
    hidden = torch.finfo(model.dtype).min
    return torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, hidden)


def packed_masks(model: Any, positions: Tensor) -> dict[str, Tensor]:
    """GptOss's masks of packed sequences, which start at position 0."""
    sequence = (positions == 0).cumsum(1)
    distance = positions[:, None, :, None] - positions[:, None, None, :]
    visible = (sequence[:, None, :, None] == sequence[:, None, None, :]) & (distance >= 0)
    return {
        "full_attention": mask_for(model, visible),
        "sliding_attention": mask_for(model, visible & (distance < WINDOW)),
    }


def random_tokens(*shape: int, device: str) -> Tensor:
    return torch.randint(
        1, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1)
    ).to(device)


Outputs = dict[str, Tensor]


def outputs_of(model: Any, real: Tensor | None, backward: bool, **inputs: Any) -> Outputs:
    """Logits at real tokens and, with `backward`, the loss and every parameter's gradient."""
    if backward:
        inputs["labels"] = inputs["input_ids"].clone()
        if real is not None:  # what is predicted at padding is not ours to say
            inputs["labels"][:, 1:][(real[:, 1:] * real[:, :-1]) == 0] = -100
    result = model(**inputs)
    logits = result.logits if real is None else result.logits[real.bool()]
    outputs = {"logits": logits.detach().double()}
    if backward:
        model.zero_grad()
        result.loss.backward()
        outputs["loss"] = result.loss.detach().double()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                outputs[name] = parameter.grad.double()
    return outputs


def assert_as_good(
    actual: Outputs, references: Sequence[Outputs], exact: Outputs, dtype: torch.dtype
) -> None:
    # References keep P. A flash backward makes it of lse, which fp32 rounds by |lse| * 2^-24: Gemma
    # 4's scores, which nothing scales, are large.
    times = 12 if dtype == torch.float32 else 3
    for name, truth in exact.items():
        error = (actual[name] - truth).abs().max().item()
        # A reference that is exact by luck is no measure: of few numbers, that is likely.
        few = truth.numel() < 16
        floor = max(2e-6, few * (0.5 if name == "loss" else 8.0) * torch.finfo(dtype).eps)
        worst = max((reference[name] - truth).abs().max().item() for reference in references)
        allowed = times * worst + floor * truth.abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def check(
    model: Model,
    device: str,
    dtype: torch.dtype,
    run: Callable[[Any], Outputs],
    **options: Any,
) -> None:
    """Compare run(model) on ours with transformers' own attention."""
    exact = run(model.make(EXACT, device, torch.float64, **options))
    names = filter(None, (model.reference, model.second_reference))
    references = [run(model.make(name, device, dtype, **options)) for name in names]
    assert_as_good(run(model.make(OURS, device, dtype, **options)), references, exact, dtype)
