"""What transformers' masks are read as, and what the registered attention takes and refuses."""

# ruff: noqa: E402 - what follows importorskip needs transformers
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.harness import ON_CPU

transformers = pytest.importorskip("transformers")

from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from flash_attn_cuda.integrations.transformers import register
from flash_attn_cuda.integrations.transformers_masks import (
    Pattern,
    attention_mask,
    meaning_of,
    packed_by_positions,
    recognise,
    without_meaning,
)
from flash_attn_cuda.integrations.transformers_sequences import Sequences
from tests.surfaces.transformers_cases import (
    GPT_OSS,
    LLAMA,
    OURS,
    SIZES,
    attention_written_out,
    lengths_mask,
    random_tokens,
    register_attentions,
)


@pytest.fixture(scope="module", autouse=True)
def _registered(one_thread: None) -> None:
    register_attentions()


# What is recognised


def test_patterns() -> None:
    causal = masking_utils.causal_mask_function
    segments = torch.tensor([[0, 0, 1]])

    def packed(function: Any, positions: Tensor, segments: Tensor) -> Any:
        """As transformers makes the mask of packed sequences."""
        remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # of 5.23
        within = function if remap is None else remap(function, positions)
        same = masking_utils.packed_sequence_mask_function(segments)
        return masking_utils.and_masks(within, same)

    known = {
        causal: Pattern(right=0),
        masking_utils.bidirectional_mask_function: Pattern(),
        masking_utils.sliding_window_causal_mask_function(7): Pattern(6, 0),
        masking_utils.sliding_window_bidirectional_mask_function(7): Pattern(7, 7),
    }
    for function, pattern in known.items():
        assert recognise(function) == pattern
        together = recognise(packed(function, torch.tensor([[0, 1, 0]]), segments))
        assert together is not None and together.segments is segments
        assert together.is_like(pattern)
    left_padding = torch.zeros(1, dtype=torch.int64)
    chunks = masking_utils.chunked_causal_mask_function(4, left_padding)
    assert recognise(chunks) == Pattern(right=0, chunk=4)
    for function in (
        packed(chunks, torch.tensor([[0, 1, 0]]), segments),
        masking_utils.or_masks(causal, masking_utils.blockwise_overlay(segments)),
        masking_utils.and_masks(causal, lambda b, h, q, k: q != k),
        lambda b, h, q, k: q >= k,
    ):
        assert recognise(function) is None


def test_a_mask_that_lost_its_sequences_says_the_same() -> None:
    q, k, v = (torch.randn(2, n, 2, 8) for n in (4, 9, 9))
    for mask in (
        torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9], dtype=torch.bool),
        torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool),
    ):
        sequences = without_meaning(mask, 4, 9, Pattern(right=0))
        assert isinstance(sequences, Sequences)
        actual = sequences.attend(q, k, v, causal=True)
        end = int(mask.any(0).nonzero().max()) + 1
        places = torch.arange(end - 4, end)[:, None]
        visible = mask[:, None, None, :] & (torch.arange(9) <= places)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
        real = mask[:, end - 4 : end]
        torch.testing.assert_close(actual[real], expected.transpose(1, 2)[real])


@pytest.mark.parametrize(
    ("pattern", "seqlen_q"), [(Pattern(3, 0), 9), (Pattern(3, 0), 4), (Pattern(3, 3), 9)]
)
@pytest.mark.parametrize("padding", ["outside", "inside"])
def test_a_window_over_a_mask_that_lost_its_sequences(
    pattern: Pattern, seqlen_q: int, padding: str
) -> None:
    mask = lengths_mask([6, 9], "left", "cpu").bool()
    if padding == "inside":
        mask[1, 4] = False
    q, k, v = (torch.randn(2, n, 2, 8) for n in (seqlen_q, 9, 9))
    places = torch.arange(9 - seqlen_q, 9)[:, None]
    distance = torch.arange(9) - places
    right = 9 if pattern.right is None else pattern.right
    visible = mask[:, None, None, :] & (distance >= -3) & (distance <= right)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
    sequences = without_meaning(mask, seqlen_q, 9, pattern)
    assert isinstance(sequences, Sequences) == (padding == "outside")
    real = mask[:, -seqlen_q:]
    attention = AttentionInterface._global_mapping[OURS]
    layer = {"is_causal": pattern.causal, "sliding_window": 4}
    actual, _ = attention(torch.nn.Module(), *heads, mask, **layer)
    torch.testing.assert_close(actual[real], expected.transpose(1, 2)[real])


def test_chunks_over_a_mask_that_lost_its_sequences() -> None:
    mask = lengths_mask([6, 9], "left", "cpu").bool()
    mask[1, 4] = False
    chunks = masking_utils.chunked_causal_mask_function(4, torch.tensor([3, 0]))
    expected = masking_utils.sdpa_mask(2, 9, 9, mask_function=chunks, attention_mask=mask)
    actual = without_meaning(mask, 9, 9, Pattern(right=0, chunk=4))
    assert isinstance(actual, Tensor) and torch.equal(actual, expected)


def test_a_window_of_queries_that_are_anywhere() -> None:
    with pytest.raises(NotImplementedError, match=r"attention_mask: must be what .* \(4 and 9\)"):
        without_meaning(torch.ones(1, 9, dtype=torch.bool), 4, 9, Pattern(3, 3))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    ("pattern", "function"),
    [
        (Pattern(right=0), masking_utils.causal_mask_function),
        (Pattern(), masking_utils.bidirectional_mask_function),
        (Pattern(2, 0), masking_utils.sliding_window_causal_mask_function(3)),
        (Pattern(2, 2), masking_utils.sliding_window_bidirectional_mask_function(2)),
    ],
)
def test_a_mask_says_more_than_the_layer(
    pattern: Pattern, function: Callable[..., Tensor], is_given: bool
) -> None:
    """Of real tokens alone it is all true, and there for its pattern, which holds for any layer."""
    given = torch.ones(2, 9, dtype=torch.bool) if is_given else None
    mask = attention_mask(2, 9, 9, mask_function=function, attention_mask=given)
    meaning = meaning_of(mask)
    assert mask is not None and mask.all() and mask is not given
    assert meaning is not None and meaning.sequences is None and meaning.pattern == pattern
    assert meaning_of(mask.clone()) is None
    assert without_meaning(mask.clone(), 9, 9, pattern) is None  # a copy does not lose that
    assert attention_mask(2, 9, 9, mask_function=function, attention_mask=mask) is mask
    assert attention_mask(2, 4, 9, mask_function=function, attention_mask=mask) is not mask

    visible = masking_utils.sdpa_mask(
        *(2, 9, 9), mask_function=function, allow_is_causal_skip=False, device="cpu"
    )
    heads = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
    attention = AttentionInterface._global_mapping[OURS]
    for wrong in ({"is_causal": not pattern.causal}, {"sliding_window": 4}):
        out, _ = attention(torch.nn.Module(), *heads, mask, **wrong)
        torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_mask_of_keys_that_lost_its_sequences() -> None:
    """As many queries as keys, which need not be the same tokens: all queries are real."""
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    mask = lengths_mask([6, 3], "right", "cpu").bool()
    sequences = without_meaning(mask, 6, 6, Pattern())
    assert isinstance(sequences, Sequences)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    visible = mask[:, None, None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
    actual = sequences.attend(q, k, v, causal=False)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def function_of(kind: str, padding: Tensor) -> Callable[..., Tensor]:
    """A mask function as models make it; `padding`: of each row, in front of its tokens."""
    causal, both = masking_utils.causal_mask_function, masking_utils.and_masks
    match kind:
        case "window":
            return masking_utils.sliding_window_causal_mask_function(3)
        case "window on both sides":
            return masking_utils.sliding_window_bidirectional_mask_function(2)
        case "chunks":
            return masking_utils.chunked_causal_mask_function(4, padding)
        case "packed":
            segments = (torch.arange(9) >= 5 - padding[:, None]).long()
            return both(causal, masking_utils.packed_sequence_mask_function(segments))
        case "unknown":
            return both(causal, lambda b, h, q, k: q != k + 1)
    return causal if kind == "causal" else masking_utils.bidirectional_mask_function


KINDS = ("causal", "bidirectional", "window", "window on both sides", "chunks", "unknown")


@pytest.mark.parametrize(
    ("where", "rows", "kind"),
    [
        *product(("one graph", "vmap"), ("with holes", "of a step"), KINDS),
        *product(("one graph",), ("unmasked",), KINDS),
        *product(("one graph", "vmap"), ("unmasked",), ("packed",)),
    ],
)
def test_masks_that_nobody_may_read(where: str, rows: str, kind: str) -> None:
    if where == "vmap" and rows != "unmasked" and torch.__version__ < "2.11":
        pytest.skip("torch.vmap of this torch has no rule for views in another dtype")
    attention, layer = AttentionInterface._global_mapping[OURS], torch.nn.Module()
    mask = lengths_mask([6, 9], "left", "cpu").bool()
    mask[1, 4] = False
    padding = (mask.cumsum(1) == 0).sum(1) * (rows != "unmasked")
    q_length = 1 if rows == "of a step" else 9
    sizes = {"q_length": q_length, "kv_length": 9, "q_offset": 9 - q_length}
    heads = [torch.randn(2, 2, n, 8) for n in (q_length, 9, 9)]
    given = None if rows == "unmasked" else mask

    def attend(*heads: Tensor, given: Tensor | None, padding: Tensor) -> Tensor:
        made = attention_mask(
            batch_size=len(heads[0]),
            mask_function=function_of(kind, padding),
            attention_mask=given,
            **sizes,
        )
        return attention(layer, *heads, made)[0]

    visible = masking_utils.sdpa_mask(
        batch_size=2,
        mask_function=function_of(kind, padding),
        attention_mask=given,
        allow_is_causal_skip=False,
        **sizes,
    )
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
    if where == "one graph":
        torch.compiler.reset()
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        actual = compiled(*heads, given=given, padding=padding)
    else:
        many = [x[:, None] for x in (*heads, mask, padding)]

        def attend_to_one(q: Tensor, k: Tensor, v: Tensor, m: Tensor, p: Tensor) -> Tensor:
            return attend(q, k, v, given=None if given is None else m, padding=p)

        actual = torch.vmap(attend_to_one)(*many)[:, 0]
    real = mask[:, -q_length:] if given is not None else torch.ones(2, q_length).bool()
    torch.testing.assert_close(actual[real], expected.transpose(1, 2)[real])


def test_positions_of_one_tensor_are_read_once() -> None:
    packed, rising = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 1, 2, 3]])
    first = packed_by_positions(packed, 1, 4, 4)
    assert first is not None and packed_by_positions(packed, 1, 4, 4) is first
    with torch.inference_mode():
        of_inference = packed_by_positions(rising.clone(), 1, 4, 4)
    assert of_inference is None
    assert packed_by_positions(packed, 1, 4, 4) is first
    for inside in (torch.func.grad, torch.inference_mode()):  # what is kept is of neither
        again, found = packed.clone(), []
        inside(lambda x, p=again, f=found: f.append(packed_by_positions(p, 1, 4, 4)) or x)(
            torch.ones(())
        )
        assert packed_by_positions(again, 1, 4, 4) is found[0]
        assert found[0].cu_seqlens_q.untyped_storage()  # which a wrapper has not
        assert not found[0].cu_seqlens_q.is_inference()
    packed.copy_(rising)
    assert packed_by_positions(packed, 1, 4, 4) is None


def test_packed_sequences_of_which_the_bounds_alone_tell() -> None:
    heads = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    starts = torch.tensor([0, 4, 9])
    bounds = {f"cu_seq_lens_{x}": starts for x in "qk"} | {f"max_length_{x}": 5 for x in "qk"}
    attention = AttentionInterface._global_mapping[OURS]
    out, _ = attention(torch.nn.Module(), *heads, None, **bounds)
    parts = zip(*(x.split([4, 5], 2) for x in heads), strict=True)
    expected = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts
    ]
    torch.testing.assert_close(out, torch.cat(expected, 2).transpose(1, 2))


def test_packed_sequences_counted_or_not() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0], [3, 3, 4, 4, 4, 4, 4, 4]])
    counted = Sequences.packed(segments)
    assert counted.cu_seqlens_q.tolist() == [0, 3, 4, 6, 8, 10, 16]
    assert counted.seqused_q is not None
    assert counted.seqused_q.tolist() == [3, 1, 2, 0, 2, 6]
    bounded = Sequences.packed(segments, at_most=True)
    assert bounded.seqused_q is not None
    assert bounded.cu_seqlens_q.tolist() == [0, 3, 4, 6, 8, 10] + [16] * 11
    assert bounded.seqused_q.tolist() == [3, 1, 2, 0, 2, 6] + [0] * 10


# Registration


def test_names() -> None:
    register("our_flash_attn_cuda")
    register("our_flash_attn_cuda")
    assert "our_flash_attn_cuda" in AttentionInterface._global_mapping
    model = LLAMA.make("our_flash_attn_cuda", "cpu", torch.float32)
    assert model(random_tokens(1, 5, device="cpu")).logits.isfinite().all()
    for name in ("sdpa", "eager", "flash_attention_2"):
        with pytest.raises(ValueError, match=f"name: must not be one .* got '{name}'"):
            register(name)


def llama4(chunk: int) -> Any:
    sizes = SIZES | {"intermediate_size_mlp": 96, "num_local_experts": 2, "moe_layers": []}
    layers = ["chunked_attention", "full_attention"]
    config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=chunk, layer_types=layers)
    torch.manual_seed(0)
    return transformers.Llama4ForCausalLM(config).eval()


@pytest.mark.parametrize("name", [OURS, "ours_by_another_name"])
@pytest.mark.parametrize("side", ["left", "right", None])
@torch.no_grad()
def test_chunks(name: str, side: str | None) -> None:
    """Llama 4's, of which transformers makes no masks for names with "flash" in them."""
    register(name)
    model = llama4(4)
    mask = None if side is None else lengths_mask([11, 6], side, "cpu")

    def logits(implementation: str) -> Tensor:
        model.set_attn_implementation(implementation)
        found = model(random_tokens(2, 11, device="cpu"), attention_mask=mask).logits
        return found if mask is None else found[mask.bool()]

    torch.testing.assert_close(logits(name), logits("eager"))


@pytest.mark.parametrize("side", ["left", None])
@torch.no_grad()
def test_chunks_of_a_cache(side: str | None) -> None:
    """Generation beyond several chunks, each token against the whole sequence by eager."""
    register(OURS)
    model = llama4(4)
    mask = None if side is None else lengths_mask([6, 3], side, "cpu")
    tokens = random_tokens(2, 6, device="cpu")
    outputs = []
    for implementation in (OURS, "eager"):
        model.set_attn_implementation(implementation)
        outputs.append(
            model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=9,
                do_sample=False,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        )
    ours, eager = outputs
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(eager.scores))


def test_models_that_list_the_implementations_they_run_on() -> None:
    model_class = transformers.GptOssForCausalLM
    listed = list(model_class._compatible_flash_implementations)
    config = transformers.GptOssConfig(**(SIZES | GPT_OSS.options))
    model = model_class._from_config(config, attn_implementation=OURS)
    assert model.config._attn_implementation == OURS
    assert model_class._compatible_flash_implementations == listed and OURS not in listed

    class OnlyOnAnother(transformers.LlamaForCausalLM):
        _compatible_flash_implementations = ("another_flash",)

    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match="another_flash"):
        OnlyOnAnother._from_config(config, attn_implementation=OURS)


@pytest.mark.parametrize("name", ["position_bias", "cache", "indices"])
def test_what_would_be_dropped_is_refused(name: str) -> None:
    attention = AttentionInterface._global_mapping[OURS]
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match=f"{name}: .* not implemented"):
        attention(torch.nn.Module(), x, x, x, None, **{name: x})


def test_compressed_keys_are_refused() -> None:
    attention = AttentionInterface._global_mapping[OURS]
    layer, x = torch.nn.Module(), torch.zeros(1, 1, 2, 8)
    layer.compressor = None
    attention(layer, x, x, x, None)
    layer.compressor = torch.nn.Module()
    with pytest.raises(NotImplementedError, match=r"compressor: .* not implemented"):
        attention(layer, x, x, x, None)


# Sinks


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sinks_with_a_4d_mask(softcap: float | None) -> None:
    attention = AttentionInterface._global_mapping[OURS]
    q = torch.randn(2, 4, 6, 16)
    k, v = torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 8)
    sinks = torch.randn(4)
    visible = torch.rand(2, 1, 6, 9) < 0.5
    visible[0, 0, 1] = False
    options = {"scaling": 0.3, "softcap": softcap, "s_aux": sinks}
    expected, _ = attention_written_out(None, q, k, v, visible, **options)
    added = torch.zeros(2, 1, 6, 9).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (visible, added):
        # A mask of its own says everything: the layer's window and causality count no more.
        out, _ = attention(torch.nn.Module(), q, k, v, mask, sliding_window=2, **options)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("seqlen_q", [4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_alone_want_a_gradient(seqlen_q: int, dtype: torch.dtype) -> None:
    attention = AttentionInterface._global_mapping[OURS]
    q, k, v = (torch.randn(2, 2, n, 16, dtype=dtype) for n in (seqlen_q, 9, 9))
    sinks = torch.randn(2, requires_grad=True)
    visible = torch.ones(seqlen_q, 9, dtype=torch.bool).tril(9 - seqlen_q)
    out, _ = attention(torch.nn.Module(), q, k, v, None, scaling=0.25, s_aux=sinks)
    exact = sinks.detach().double().requires_grad_()
    qkv = (x.double() for x in (q, k, v))
    expected, _ = attention_written_out(None, *qkv, visible, scaling=0.25, s_aux=exact)
    dout = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, sinks, dout)
    (truth,) = torch.autograd.grad(expected, exact, dout.double())
    assert gradient.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(gradient.double(), truth, rtol=tolerance, atol=tolerance)


def test_sinks_of_another_number_of_heads() -> None:
    attention = AttentionInterface._global_mapping[OURS]
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="sink: "):
        attention(torch.nn.Module(), q, k, k, None, s_aux=torch.zeros(2))


def test_values_of_fewer_dimensions() -> None:
    attention = AttentionInterface._global_mapping[OURS]
    q, k, v = (torch.randn(1, 2, 5, dim) for dim in (16, 16, 8))
    out, weights = attention(torch.nn.Module(), q, k, v, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert weights is None


class QuantizedConfig:
    _is_quantized = True
    dtype = torch.bfloat16


class QuantizedLinear(torch.nn.Linear):
    """As of bitsandbytes: its weight is packed bytes, beside which adapters are in fp32."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
        self.adapter = torch.nn.Linear(4, 2)


def layers_of_half_precision() -> list[torch.nn.Module]:
    quantized = QuantizedLinear()
    quantized.config = QuantizedConfig()
    of_another_part = torch.nn.Sequential(
        torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.LayerNorm(4, dtype=torch.float16)
    )
    return [torch.nn.Linear(4, 4, dtype=torch.bfloat16), quantized, of_another_part]


@pytest.mark.parametrize("number", range(3))
def test_states_of_two_dtypes(number: int) -> None:
    attention = AttentionInterface._global_mapping[OURS]
    layer = layers_of_half_precision()[number]
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    rounded = [x.bfloat16() for x in (q, k, v)]
    expected, _ = attention(layer, *rounded, None)
    for states in ((q, *rounded[1:]), (rounded[0], k, rounded[2])):
        out, _ = attention(layer, *states, None)
        assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out, _ = attention(torch.nn.Module(), q, *rounded[1:], None)
    assert torch.equal(out, expected)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(layer, q, *rounded[1:], None)
    assert torch.equal(out, expected)


def test_states_without_data() -> None:
    """As models are traced on the device "meta", which knows no autocast."""
    attention = AttentionInterface._global_mapping[OURS]
    q, k, v = (torch.randn(1, 2, 5, 16, device="meta") for _ in range(3))
    out, _ = attention(torch.nn.Module(), q, k, v, None)
    assert out.device.type == "meta" and out.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
def test_fp32_states_over_half_precision_weights(device: str, number: int) -> None:
    attention = AttentionInterface._global_mapping[OURS]
    layer = layers_of_half_precision()[number].to(device)
    q, k, v = (torch.randn(1, 2, 5, 16, device=device) for _ in range(3))
    out, _ = attention(layer, q, k, v, None)
    assert out.dtype == (torch.float32 if ON_CPU else torch.bfloat16)
