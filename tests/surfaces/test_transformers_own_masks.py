"""Masks of transformers with a row of their own for every query: prefixes, blocks of images,
padding inside a window, whatever a caller gives. They run on the kernels; torch's attention is
forbidden but where a test asks for it.
"""

# ruff: noqa: E402 - what follows importorskip needs transformers
from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from flash_attn_cuda import BlockSparsity
from flash_attn_cuda.integrations import transformers_masks, transformers_own_masks
from flash_attn_cuda.integrations.transformers_masks import attention_mask, meaning_of, sparsity_of
from tests.cases.harness import ON_CPU
from tests.surfaces.transformers_cases import (
    EXACT,
    GEMMA,
    LLAMA,
    MISTRAL,
    OURS,
    PALIGEMMA,
    PALIGEMMA_2,
    ImageModel,
    Model,
    Outputs,
    attention_written_out,
    check,
    lengths_mask,
    outputs_of,
    over_image_models,
    over_places,
    random_tokens,
    register_attentions,
)


@pytest.fixture(scope="module", autouse=True)
def _registered(one_thread: None) -> None:
    register_attentions()


TORCH_ATTENTION = transformers_own_masks.sdpa_attention_forward


@pytest.fixture(autouse=True)
def _no_torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's attention ran")

    monkeypatch.setattr(transformers_own_masks, "sdpa_attention_forward", forbidden)


@pytest.fixture
def torch_attention(monkeypatch: pytest.MonkeyPatch, _no_torch_attention: None) -> list[Tensor]:
    """Allows torch's attention, of which nothing has been said yet; the queries it got."""
    queries = []

    def counted(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(query)
        return TORCH_ATTENTION(module, query, *args, **kwargs)

    monkeypatch.setattr(transformers_own_masks, "sdpa_attention_forward", counted)
    monkeypatch.setattr(transformers_own_masks, "_said", set())
    return queries


def attend(*args: Any, **kwargs: Any) -> Tensor:
    out, _ = AttentionInterface._global_mapping[OURS](torch.nn.Module(), *args, **kwargs)
    return out


# Models that read images: prefixes (PaliGemma), blocks (Gemma 3)


@over_places
@over_image_models
@pytest.mark.parametrize("padded", ["left", "right", "none"])
def test_training_on_images(
    model: ImageModel, device: str, dtype: torch.dtype, padded: str
) -> None:
    inputs = model.inputs(padded, device)

    def run(m: Any) -> Outputs:
        given = inputs | {"pixel_values": inputs["pixel_values"].to(m.dtype)}
        return outputs_of(m, inputs["attention_mask"], True, **given)

    check(model, device, dtype, run)


@over_places
@over_image_models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_images_in_a_cache(model: ImageModel, device: str, dtype: torch.dtype, cache: str) -> None:
    """A prompt with an image, and three tokens after it, one by one; sliding layers drop keys."""
    inputs = model.inputs("left", device)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, device=device).long()], 1)
    later = random_tokens(2, 15, device=device)[:, 12:]

    @torch.no_grad()
    def run(m: Any) -> Outputs:
        config = m.config.get_text_config()
        if cache == "static":
            past = transformers.StaticCache(config=config, max_cache_len=20)
        else:
            past = transformers.DynamicCache(config=config)
        given = inputs | {"pixel_values": inputs["pixel_values"].to(m.dtype)}
        logits = [m(**given, past_key_values=past).logits[inputs["attention_mask"].bool()]]
        for end in (13, 14, 15):
            part = m(
                later[:, end - 13 : end - 12],
                attention_mask=mask[:, :end],
                past_key_values=past,
            )
            logits.append(part.logits[:, 0])
        return {"logits": torch.cat(logits).double()}

    check(model, device, dtype, run)


@over_image_models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_greedy_generation_from_images(model: ImageModel, cache: str) -> None:
    if cache == "static" and model is PALIGEMMA_2:
        pytest.skip("transformers itself fails on the masks that generate() makes for it")
    inputs = model.inputs("left", "cpu")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    ours, reference = (
        model.make(name, "cpu", torch.float32).generate(**inputs, **options)
        for name in (OURS, model.reference)
    )
    assert ours.shape == (2, 18) and torch.equal(ours, reference)


def test_compiled() -> None:
    """A mask that the mask function makes between two graphs, with what it is for the kernels."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]])
    tokens = random_tokens(2, 10, device="cpu")

    def run(m: Any) -> Outputs:
        if m.config._attn_implementation == OURS:
            torch.compiler.reset()
            m.forward = torch.compile(m.forward, backend="aot_eager")
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        return outputs_of(m, mask, True, **inputs)

    check(GEMMA, "cpu", torch.float32, run, num_hidden_layers=2)


# One layer


BOTH = pytest.mark.parametrize("softcap", [None, 2.0])
WITH_SINKS = pytest.mark.parametrize("with_sinks", [False, True])
SHAPES = [(2, 1, 6, 9), (1, 1, 6, 9), (1, 4, 6, 9), (2, 4, 6, 9), (2, 1, 1, 9)]


def qkv_and_sinks(with_sinks: bool, device: str, dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 8), (4,)]
    made: list[Tensor | None] = [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]
    if not with_sinks:
        made[3] = None
    return made


def visible_pairs(shape: tuple[int, ...], device: str) -> Tensor:
    """Half of them, with a query that sees nothing and keys that are never seen."""
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    visible[..., 7] = False
    if shape[2] > 1:
        visible[0, 0, 1] = False
    return visible.to(device)


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, -torch.inf)


def results(
    attention: Callable[..., Any], tensors: list[Tensor | None], mask: Tensor, **options: Any
) -> list[Tensor]:
    """out and the gradients of q, k, v and sinks, fp64."""
    q, k, v, sinks = (x if x is None else x.detach().requires_grad_() for x in tensors)
    out, _ = attention(torch.nn.Module(), q, k, v, mask, scaling=0.3, s_aux=sinks, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, inputs, dout))]


@over_places
@BOTH
@WITH_SINKS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer(
    shape: tuple[int, ...], with_sinks: bool, softcap: float | None, device: str, dtype: torch.dtype
) -> None:
    """A mask of its own says everything: the layer's window and causality count no more."""
    attention = AttentionInterface._global_mapping[OURS]
    tensors = qkv_and_sinks(with_sinks, device, dtype)
    visible = visible_pairs(shape, device)
    exact = [x if x is None else x.detach().double() for x in tensors]
    truth = results(attention_written_out, exact, visible, softcap=softcap)
    reference = results(attention_written_out, tensors, visible, softcap=softcap)
    for mask in (visible, added(visible, torch.float32), added(visible, dtype)):
        found = results(attention, tensors, mask, softcap=softcap, sliding_window=2)
        for actual, low, expected in zip(found, reference, truth, strict=True):
            error, rounding = (actual - expected).abs().max(), (low - expected).abs().max()
            assert error <= 3 * rounding + 2 * torch.finfo(dtype).eps * expected.abs().max()


def test_masks_of_another_floating_dtype() -> None:
    q, k, v, _ = qkv_and_sinks(False, "cpu", torch.float32)
    visible = visible_pairs((2, 1, 6, 9), "cpu")
    expected = attend(q, k, v, visible)
    for dtype in (torch.float64, torch.bfloat16):
        torch.testing.assert_close(attend(q, k, v, added(visible, dtype)), expected)
    with pytest.raises(TypeError, match=r"attn_mask: dtype must be one of .* got torch.int64"):
        attend(q, k, v, visible.long())


@pytest.mark.parametrize(
    "shape", [(2, 1, 6, 8), (2, 1, 6, 1), (2, 2, 6, 9), (3, 1, 6, 9), (2, 1, 5, 9)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_another_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, _ = qkv_and_sinks(False, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"attention_mask: must broadcast to .*\(2, 4, 6, 9\)"):
        attend(q, k, v, torch.ones(shape, dtype=dtype))


def test_the_gradient_of_a_mask() -> None:
    q, k, v, _ = qkv_and_sinks(False, "cpu", torch.float64)
    bias = torch.randn(2, 4, 6, 9, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(attend(q, k, v, bias, scaling=0.3).square().sum(), bias)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    weights = (q @ keys.mT * 0.3 + bias).softmax(-1)
    (expected,) = torch.autograd.grad((weights @ values).square().sum(), bias)
    torch.testing.assert_close(gradient, expected)


def test_dropout() -> None:
    q, k, v, _ = qkv_and_sinks(False, "cpu", torch.float32)
    visible = visible_pairs((2, 1, 6, 9), "cpu")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(q, k, v, visible, dropout=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


# What no kernel has


def test_large_head_dims(torch_attention: list[Tensor]) -> None:
    q, k, v = (torch.randn(1, 2, 5, 520) for _ in range(3))
    visible = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.warns(UserWarning, match="no kernel for head dims above 512"):
        out = attend(q, k, v, visible)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert len(torch_attention) == 1
    with pytest.raises(ValueError, match="head_dim"):
        attend(q, k, v, visible, softcap=2.0)


@pytest.mark.gpu
@pytest.mark.cuda_only
def test_fp32_on_a_gpu(device: str, torch_attention: list[Tensor]) -> None:
    assert not ON_CPU
    q, k, v = (torch.randn(1, 2, 5, 16, device=device) for _ in range(3))
    visible = torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device).tril()
    with pytest.warns(UserWarning, match="no kernel for tensors that are neither fp16 nor bf16"):
        out = attend(q, k, v, visible)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    with torch.autocast("cuda", torch.bfloat16):
        assert attend(q, k, v, visible).dtype == torch.bfloat16
    assert len(torch_attention) == 1


def test_said_while_compiling(torch_attention: list[Tensor]) -> None:
    """In one graph."""
    q = torch.randn(1, 2, 5, 520, requires_grad=True)
    visible = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: Tensor) -> Tensor:
        return attend(q, q, q, visible, scaling=0.3, deterministic=True)

    torch.compiler.reset()
    with pytest.warns(UserWarning, match="no kernel for head dims above 512") as told:
        outs = [compiled(q), compiled(q)]
    assert len([x for x in told if "no kernel" in str(x.message)]) == 1
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(q, q, q, is_causal=True, scale=0.3).transpose(1, 2)
    for out in outs:
        torch.testing.assert_close(out, expected)


# How often masks are made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that a BlockSparsity was made of."""
    masks: list[Tensor] = []
    original = BlockSparsity.from_mask

    def counted(mask: Tensor, **kwargs: Any) -> BlockSparsity:
        masks.append(mask)
        return original(mask, **kwargs)

    monkeypatch.setattr(BlockSparsity, "from_mask", staticmethod(counted))
    return masks


@pytest.mark.parametrize(("model", "count"), [(PALIGEMMA, 1), (PALIGEMMA_2, 2)], ids=str)
def test_masks_are_made_once_a_forward(model: ImageModel, count: int, made: list[Tensor]) -> None:
    m = model.make(OURS, "cpu", torch.float32)
    m(**model.inputs("left", "cpu"))
    assert len(made) == count


def test_a_given_mask_is_read_once(made: list[Tensor]) -> None:
    model = LLAMA.make(OURS, "cpu", torch.float32)
    reference = LLAMA.make(EXACT, "cpu", torch.float32)
    tokens = random_tokens(1, 6, device="cpu")
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()

    def agrees() -> bool:
        expected = reference(tokens, attention_mask=mask).logits
        return torch.allclose(model(tokens, attention_mask=mask).logits, expected, atol=1e-5)

    assert agrees() and agrees() and len(made) == 1  # of two layers, twice
    mask[..., 1:, 0] = False
    with torch.inference_mode():
        assert agrees() and len(made) == 2
    model(tokens, attention_mask=mask).logits.sum().backward()  # on what inference has made
    assert len(made) == 2
    with torch.inference_mode():
        mask = mask.clone()
        assert agrees()
        mask[..., 3, 1] = False
        assert agrees()


def test_a_made_mask_that_was_written_into() -> None:
    q = torch.randn(1, 2, 6, 16)
    mask = attention_mask(1, 6, 6, mask_function=lambda b, h, q, k: k <= q)
    assert mask is not None and sparsity_of(mask) is not None and meaning_of(mask) is None
    assert sparsity_of(mask.clone()) is None
    mask[..., 4, 1] = False
    assert sparsity_of(mask) is None
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    torch.testing.assert_close(attend(q, q, q, mask), expected.transpose(1, 2))


@pytest.mark.parametrize("batch", ["plain", "padded", "packed"])
@pytest.mark.parametrize("model", [LLAMA, MISTRAL, GEMMA], ids=lambda model: model.name)
@torch.no_grad()
def test_patterns_need_no_pairs(
    model: Model, batch: str, made: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask of pairs was made")

    monkeypatch.setattr(transformers_masks, "sdpa_mask", forbidden)
    inputs = {"input_ids": random_tokens(2, 9, device="cpu"), "use_cache": batch != "packed"}
    if batch == "padded":
        inputs["attention_mask"] = lengths_mask([9, 4], "left", "cpu")
    elif batch == "packed":
        inputs["position_ids"] = torch.tensor([[*range(3), *range(6)], [*range(8), 0]])
    assert model.make(OURS, "cpu", torch.float32)(**inputs).logits.isfinite().all()
    assert not made


def test_functions_that_lost_their_names() -> None:
    """As those that torch.compile makes anew on Python 3.10."""
    makers = (
        masking_utils.sliding_window_causal_mask_function(7),
        masking_utils.sliding_window_bidirectional_mask_function(7),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1]])),
    )
    for function in makers:
        closure = function.__closure__
        again = FunctionType(function.__code__, function.__globals__, closure=closure)
        again.__qualname__ = function.__code__.co_name
        known, found = (transformers_masks.recognise(each) for each in (function, again))
        assert known is not None and found is not None
        assert vars(found).keys() == vars(known).keys()
        for name, value in vars(known).items():
            assert value is getattr(found, name) or value == getattr(found, name), name
