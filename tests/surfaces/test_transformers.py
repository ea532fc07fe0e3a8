"""Models of transformers on this package's attention, against transformers' own attention.

The truth is the model in fp64 with attention written out over transformers' own 4-D mask: our error
may be three times that of its sdpa (or, for softcap and sinks, eager) attention in the dtype under
test.
"""

# ruff: noqa: E402 - what follows importorskip needs transformers
from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.surfaces.transformers_cases import (
    EXACT,
    GEMMA,
    GEMMA_4,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    OURS,
    SIZES,
    WINDOW,
    Model,
    Outputs,
    assert_as_good,
    check,
    lengths_mask,
    mask_for,
    outputs_of,
    over_models,
    over_places,
    packed_masks,
    random_tokens,
    register_attentions,
)


@pytest.fixture(scope="module", autouse=True)
def _registered(one_thread: None) -> None:
    register_attentions()


# Padded and packed batches, with gradients. Every model has each way once, and some the others.


EVERY = (LLAMA, MISTRAL, GEMMA, GPT_OSS, GEMMA_4)


def some(name: str, first: Any, **others: Any) -> pytest.MarkDecorator:
    """Every model with the first value of `name`, and those that are listed with others."""
    pairs = [(model, first) for model in EVERY]
    pairs += [(model, value) for value, models in others.items() for model in models]
    return pytest.mark.parametrize(
        ("model", name), pairs, ids=lambda x: x.name if isinstance(x, Model) else str(x)
    )


@over_places
@some("side", "left", right=(LLAMA, GEMMA_4), none=(MISTRAL, GPT_OSS))
def test_padded_batches(model: Model, device: str, dtype: torch.dtype, side: str) -> None:
    mask = lengths_mask([11, 4, 1] if side != "none" else [11, 11, 11], side, device)
    tokens = random_tokens(3, 11, device=device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    check(
        *(model, device, dtype),
        lambda m: outputs_of(
            m, mask, True, input_ids=tokens, attention_mask=mask, position_ids=positions
        ),
    )


@over_places
@over_models
def test_checkpointed_layers(model: Model, device: str, dtype: torch.dtype) -> None:
    mask = lengths_mask([9, 5], "left", device)
    tokens = random_tokens(2, 9, device=device)

    def run(m: Any) -> Outputs:
        # Its name of transformers' newer releases, or the older one.
        enable = getattr(m, "activation_checkpointing_enable", None)
        (enable or m.gradient_checkpointing_enable)()
        m.train()
        return outputs_of(m, mask, True, input_ids=tokens, attention_mask=mask)

    check(model, device, dtype, run)


@over_places
@some("batch", "of two rows", of_one_row=(LLAMA, GPT_OSS))
def test_batches_packed_by_positions(
    model: Model, device: str, dtype: torch.dtype, batch: str
) -> None:
    rows = 1 if batch == "of_one_row" else 2
    lengths = [[7, 1, 8], [3, 13]][:rows]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    inputs = {
        "input_ids": random_tokens(rows, 16, device=device),
        "position_ids": positions.to(device),
        "use_cache": False,
    }

    def run(m: Any) -> Outputs:
        given = dict(inputs)
        # GptOss makes its masks without position_ids: only flash-attention, of one row, sees that
        # it is packed.
        if model is GPT_OSS and rows == 1 and m.config._attn_implementation != OURS:
            given["attention_mask"] = packed_masks(m, inputs["position_ids"])
        return outputs_of(m, None, True, **given)

    check(model, device, dtype, run)


@over_places
@some("how", "positions, with a cache", cu_seq_lens=(MISTRAL, GPT_OSS))
def test_packed_sequences_do_not_see_each_other(
    model: Model, device: str, dtype: torch.dtype, how: str
) -> None:
    lengths = [7, 1, 8]
    tokens = random_tokens(1, 16, device=device)
    starts = torch.tensor([0, 7, 8, 16], device=device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    packed = {"input_ids": tokens, "position_ids": positions}
    if how == "cu_seq_lens":
        packed |= {f"cu_seq_lens_{x}": starts for x in "qk"}
        packed |= {f"max_length_{x}": 8 for x in "qk"}
        packed["use_cache"] = False

    @torch.no_grad()
    def run(m: Any) -> Outputs:
        if m.config._attn_implementation == OURS:
            return outputs_of(m, None, False, **packed)
        parts = [m(part).logits for part in tokens.split(lengths, dim=1)]
        return {"logits": torch.cat(parts, 1).double()}

    check(model, device, dtype, run)


# Each way with a model: a compile takes seconds a layer.
COMPILED = [
    *((GEMMA, "padded", True), (LLAMA, "padded", False), (GPT_OSS, "packed", True)),
    *((MISTRAL, "plain", True), (GEMMA_4, "plain", True)),
]


@over_places
@pytest.mark.parametrize(
    ("model", "batch", "whole"), COMPILED, ids=lambda x: getattr(x, "name", str(x))
)
def test_compiled(model: Model, device: str, dtype: torch.dtype, batch: str, whole: bool) -> None:
    if batch == "plain" and model is GEMMA_4 and torch.__version__ < "2.14":
        pytest.skip("this torch does not trace copy.copy, by which layers share keys")
    inputs: dict[str, Any] = {"input_ids": random_tokens(2, 9, device=device)}
    inputs["use_cache"] = batch == "plain"
    mask = None
    if batch == "padded":
        mask = inputs["attention_mask"] = lengths_mask([9, 4], "left", device)
    elif batch == "packed":
        rows = [[*range(3), *range(6)], [*range(8), 0]]
        inputs["position_ids"] = torch.tensor(rows, device=device)

    def run(m: Any) -> Outputs:
        torch.compiler.reset()
        if m.config._attn_implementation == OURS:
            m.forward = torch.compile(m.forward, backend="aot_eager", fullgraph=whole)
        return outputs_of(m, mask, True, **inputs)

    has_one_kind_of_layer = "layer_types" not in model.options
    check(model, device, dtype, run, **({"num_hidden_layers": 1} if has_one_kind_of_layer else {}))


# Attention with a cache


@over_places
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@some("side", "left", right=(LLAMA, GEMMA_4), none=(MISTRAL, GPT_OSS))
def test_prompt_in_parts(
    model: Model, device: str, dtype: torch.dtype, side: str, cache: str
) -> None:
    """A prompt of three parts and two single tokens, each over what the cache holds already."""
    lengths = [8, 3] if side != "none" else [8, 8]
    mask = torch.cat([lengths_mask(lengths, side, device), torch.ones(2, 6).to(device).long()], 1)
    tokens = random_tokens(2, 14, device=device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)

    @torch.no_grad()
    def run(m: Any) -> Outputs:
        if cache == "static":
            past = transformers.StaticCache(config=m.config, max_cache_len=20)
        else:
            past = transformers.DynamicCache(config=m.config)
        logits = []
        for begin, end in ((0, 8), (8, 11), (11, 12), (12, 13), (13, 14)):
            part = m(
                tokens[:, begin:end],
                attention_mask=mask[:, :end] if side != "none" else None,
                position_ids=positions[:, begin:end],
                past_key_values=past,
            )
            logits.append(part.logits)
        return {"logits": torch.cat(logits, 1)[mask.bool()].double()}

    check(model, device, dtype, run)


@over_places
@over_models
@pytest.mark.parametrize(("cache", "padded"), [("dynamic", True), ("static", False)])
def test_greedy_generation(
    model: Model, device: str, dtype: torch.dtype, cache: str, padded: bool
) -> None:
    mask = lengths_mask([8, 3] if padded else [8, 8], "left", device)
    tokens = random_tokens(2, 8, device=device) * mask
    options = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    ours, reference = (
        model.make(name, device, dtype).generate(tokens, attention_mask=mask, **options)
        for name in (OURS, model.reference)
    )
    assert ours.shape == (2, 20)
    if dtype == torch.float32:
        assert torch.equal(ours, reference)
        return
    # Each token must be the best one, or as good within rounding, after the ones before it.
    judge = model.make(model.reference, device, torch.float32)
    whole = torch.cat([mask, torch.ones(2, 12, device=device, dtype=mask.dtype)], 1)
    positions = (whole.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = judge(ours, attention_mask=whole, position_ids=positions).logits[:, 7:-1]
    chosen = logits.gather(-1, ours[:, 8:, None])[..., 0]
    assert (logits.amax(-1) - chosen).max() <= 0.03 * logits.abs().max()


# Masks of their own for every query


@over_places
@over_models
def test_a_4d_mask(model: Model, device: str, dtype: torch.dtype) -> None:
    tokens = random_tokens(2, 9, device=device)
    mask = torch.rand(2, 1, 9, 9, device=device) < 0.5
    mask |= torch.eye(9, dtype=torch.bool, device=device)
    check(
        *(model, device, dtype),
        lambda m: outputs_of(m, None, True, input_ids=tokens, attention_mask=mask_for(m, mask)),
    )


@over_places
@over_models
def test_padding_in_between(model: Model, device: str, dtype: torch.dtype) -> None:
    rows = [[1, 1, 0, 0, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]]
    mask = torch.tensor(rows, device=device)
    tokens = random_tokens(2, 10, device=device)
    check(
        *(model, device, dtype),
        lambda m: outputs_of(m, mask, True, input_ids=tokens, attention_mask=mask),
    )


# Bidirectional attention


@over_places
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_an_encoder(device: str, dtype: torch.dtype, side: str) -> None:
    mask = lengths_mask([11, 4] if side != "none" else [11, 11], side, device)
    tokens = random_tokens(2, 11, device=device)

    def run(name: str, dtype: torch.dtype) -> Outputs:
        torch.manual_seed(0)
        sizes = {key: SIZES[key] for key in SIZES if key not in ("head_dim", "num_key_value_heads")}
        model = transformers.BertModel(transformers.BertConfig(**sizes)).to(device, dtype).eval()
        model.set_attn_implementation(name)
        states = model(tokens, attention_mask=mask).last_hidden_state[mask.bool()]
        (gradient,) = torch.autograd.grad(
            states.square().sum(), [model.embeddings.word_embeddings.weight]
        )
        return {"states": states.detach().double(), "gradient": gradient.double()}

    assert_as_good(run(OURS, dtype), [run("sdpa", dtype)], run(EXACT, torch.float64), dtype)


@over_places
@pytest.mark.parametrize("seqlen", [6, 11])
def test_an_encoder_and_a_decoder(device: str, dtype: torch.dtype, seqlen: int) -> None:
    mask = lengths_mask([11, 4], "right", device)
    tokens, targets = random_tokens(2, 11, device=device), random_tokens(2, seqlen, device=device)

    @torch.no_grad()
    def run(name: str, dtype: torch.dtype) -> Outputs:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "d_model": 64, "max_position_embeddings": 32, "init_std": 0.2}
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 96}
        model = transformers.BartModel(transformers.BartConfig(**sizes)).to(device, dtype).eval()
        model.set_attn_implementation(name)
        out = model(tokens, attention_mask=mask, decoder_input_ids=targets)
        return {"states": out.last_hidden_state.double()}

    assert_as_good(run(OURS, dtype), [run("sdpa", dtype)], run(EXACT, torch.float64), dtype)


# Layers that do not know their masks


def model_of_unaware_layers(family: str) -> Any:
    """Phimoe's layers lack the window, PegasusX's decoder is not causal, T5Gemma's encoder has a
    window without its last key.
    """
    if family == "Phimoe":
        sizes = SIZES | {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2}
        del sizes["head_dim"]
        options = {"bos_token_id": 1, "experts_implementation": "batched_mm"}
        return transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes, **options))
    if family == "PegasusX":
        sizes = {"vocab_size": 97, "d_model": 64, "init_std": 0.2, "block_size": 4, "dropout": 0.0}
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 96}
        config = transformers.PegasusXConfig(**sizes, num_global_tokens=2)
        return transformers.PegasusXForConditionalGeneration(config)
    layers = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    part = transformers.T5GemmaModuleConfig(
        **SIZES, **layers, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    )
    options = {"vocab_size": 97, "dropout_rate": 0.0, "initializer_range": 0.2}
    return transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=part, decoder=part, **options)
    )


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("family", ["Phimoe", "PegasusX", "T5Gemma"])
def test_layers_that_do_not_know_their_masks(family: str, side: str) -> None:
    mask = lengths_mask([11, 4] if side != "none" else [11, 11], side, "cpu")
    inputs = {"input_ids": random_tokens(2, 11, device="cpu")}
    if side != "none":
        inputs["attention_mask"] = mask
    if family != "Phimoe":
        inputs["decoder_input_ids"] = random_tokens(2, 9, device="cpu")

    @torch.no_grad()
    def run(name: str, dtype: torch.dtype) -> Outputs:
        torch.manual_seed(0)
        model = model_of_unaware_layers(family).to(dtype).eval()
        model.set_attn_implementation(name)
        logits = model(**inputs).logits
        return {"logits": (logits[mask.bool()] if family == "Phimoe" else logits).double()}

    exact = run(EXACT, torch.float64)
    assert_as_good(run(OURS, torch.float32), [run("eager", torch.float32)], exact, torch.float32)


# Training


@over_places
@pytest.mark.parametrize("family", [LLAMA, GPT_OSS], ids=lambda model: model.name)
def test_dropout(family: Model, device: str, dtype: torch.dtype) -> None:
    model = family.make(OURS, device, dtype, attention_dropout=0.3)
    tokens = random_tokens(2, 9, device=device)
    kept = model(tokens).logits
    model.train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        assert not torch.equal(model(tokens).logits, kept)
    assert losses[0] == losses[1] != losses[2]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(x is not None and x.isfinite().all() for x in gradients)
