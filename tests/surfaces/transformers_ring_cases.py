"""What the ranks of a test do with ring_flash_attn's functions for models of transformers: each has
a shard of packed documents, and what one process over every document alone gives these rows.

The models are those of transformers_cases, in fp64. Import it after
pytest.importorskip("transformers").
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flash_attn_cuda.integrations import ring_flash_attn as ring
from flash_attn_cuda.integrations import transformers_ring
from tests.surfaces.transformers_cases import (
    EXACT,
    GEMMA,
    GEMMA_4,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    SIZES,
    Model,
    register_attentions,
)

MODELS = {model.name: model for model in (LLAMA, MISTRAL, GEMMA, GPT_OSS, GEMMA_4)}
ROWS = 24  # of the whole batch
DOCUMENTS = ((7, 14, 3), (24,), (5, 1, 6, 12), (2, 0, 15, 7))
NO_GRADIENT = 1e-9  # the largest that is none
LIMITS = {"Gemma2": 1e-6, "Gemma4": 1e-6}  # their norms are fp32


class Batch:
    """Packed documents: tokens, what is to be predicted, and places, each (1, ROWS)."""

    def __init__(self, lengths: tuple[int, ...], seed: int = 0) -> None:
        self.bounds = [0, *accumulate(lengths)]
        drawn = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, SIZES["vocab_size"], (1, ROWS), generator=drawn)
        self.labels = self.tokens.roll(-1, 1)
        self.labels[0, [end - 1 for end in self.bounds[1:]]] = -100
        self.places = torch.cat([torch.arange(length) for length in lengths])[None]
        self.cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32)

    def of_documents(self, model: Any) -> Tensor:
        """Logits (ROWS, words) of each document alone."""
        parts = [
            model(input_ids=self.tokens[:, begin:end], use_cache=False).logits[0]
            for begin, end in pairwise(self.bounds)
            if begin < end
        ]
        return torch.cat(parts)

    def of_rank(self, model: Any, **options: Any) -> tuple[slice, Tensor]:
        """This rank's rows, and their logits."""
        share = ROWS // dist.get_world_size()
        mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        ring.update_ring_flash_attn_params(self.cu_seqlens, dist.group.WORLD)
        options = {"position_ids": self.places[:, mine], "use_cache": False, **options}
        return mine, model(input_ids=self.tokens[:, mine], **options).logits[0]

    def loss(self, logits: Tensor, rows: slice = slice(None)) -> Tensor:
        return cross_entropy(logits, self.labels[0, rows], reduction="sum")


def models_of(model: Model, **options: Any) -> tuple[Any, Any]:
    """(in one process, over the ranks), with the same weights."""
    register_attentions()
    whole = model.make(EXACT, "cpu", torch.float64, **options)
    shared = model.make(EXACT, "cpu", torch.float64, **options)
    over_ranks(shared)
    return whole, shared


def over_ranks(model: Any) -> None:
    """As set_attn_implementation does where there is a GPU, without which it refuses."""
    model.config._attn_implementation = "flash_attention_2"


def sum_gradients(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def assert_close(found: Tensor, wanted: Tensor, what: str, limit: float = 1e-9) -> None:
    scale = max(wanted.abs().max().item(), NO_GRADIENT)
    error = (found - wanted).abs().max().item()
    assert error <= limit * scale, f"{what}: error {error:.3g} of {scale:.3g}"


def equals_one_process(name: str, heads_k_stride: int, **options: Any) -> None:
    """Logits and gradients, for documents cut anywhere."""
    ring.substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride)
    whole, shared = models_of(MODELS[name], **options)
    limit = LIMITS.get(name, 1e-9)
    for seed, lengths in enumerate(DOCUMENTS):
        batch = Batch(lengths, seed)
        wanted = batch.of_documents(whole)
        rows, found = batch.of_rank(shared)
        assert_close(found, wanted[rows], f"logits of {lengths}", limit)
        for model, loss in (
            (whole, batch.loss(wanted)),
            (shared, batch.loss(found, rows)),
        ):
            model.zero_grad()
            loss.backward()
        sum_gradients(shared)
        pairs = zip(whole.named_parameters(), shared.parameters(), strict=True)
        for (parameter, x), y in pairs:
            assert_close(y.grad, x.grad, f"{parameter} of {lengths}", limit)


def trains_as_one_process() -> None:
    """With new documents in each step, and activations that are computed again."""
    ring.substitute_hf_flash_attn(dist.group.WORLD, 1)
    whole, shared = models_of(LLAMA)
    whole.train()
    shared.train()
    shared.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizers = [torch.optim.AdamW(x.parameters(), 1e-2, eps=1e-4) for x in (whole, shared)]
    for seed, lengths in enumerate(DOCUMENTS):
        batch = Batch(lengths, seed)
        rows, found = batch.of_rank(shared)
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch.loss(batch.of_documents(whole)).backward()
        batch.loss(found, rows).backward()
        sum_gradients(shared)
        for optimizer in optimizers:
            optimizer.step()
    for (name, x), y in zip(whole.named_parameters(), shared.parameters(), strict=True):
        assert_close(y, x, name)


def padding_ends_documents() -> None:
    """A mask at the end of a document changes nothing in front of it; elsewhere it is refused."""
    ring.substitute_hf_flash_attn(dist.group.WORLD, 2)
    whole, shared = models_of(LLAMA)
    batch = Batch((9, 7, 8))
    mask = torch.ones(1, ROWS, dtype=torch.int64)
    mask[0, 14:16] = mask[0, 21:] = 0
    with torch.no_grad():
        wanted = batch.of_documents(whole)
        share = ROWS // dist.get_world_size()
        mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        rows, found = batch.of_rank(shared, attention_mask=mask[:, mine])
        real = mask[0, rows].bool()
        assert_close(found[real], wanted[rows][real], "logits")
        wrong = torch.ones(1, share, dtype=torch.int64)
        wrong[0, 5] = 0
        with pytest.raises(NotImplementedError, match=r"attention_mask: padding must be behind"):
            batch.of_rank(shared, attention_mask=wrong)
        for causal, said in ((True, "behind its real"), (False, "of its own")):
            x = torch.zeros(1, 4, share, 16)
            with pytest.raises(NotImplementedError, match=rf"must be {said}.* behind row \d"):
                transformers_ring.flash_attention_forward(
                    layer(shared), x, x, x, wrong, is_causal=causal
                )


def layer(model: Any) -> Any:
    return model.model.layers[0].self_attn


def bidirectional_and_direct() -> None:
    """Of tensors: a layer that is not causal, and transformers' own function."""
    ring.substitute_hf_flash_attn(dist.group.WORLD, 1)
    _, shared = models_of(MISTRAL)
    batch = Batch((10, 14))
    share = ROWS // dist.get_world_size()
    rows = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    ring.update_ring_flash_attn_params(batch.cu_seqlens, dist.group.WORLD)
    drawn = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(1, heads, ROWS, 16, generator=drawn, dtype=torch.float64) for heads in (4, 2, 2)
    )
    document = torch.arange(2).repeat_interleave(torch.tensor((10, 14)))
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    visible = (document[:, None] == document) & (distance.abs() < 4)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~visible, -torch.inf)
    wanted = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)[:, rows]
    mine = [x[:, :, rows] for x in (q, k, v)]
    found, nothing = transformers_ring.flash_attention_forward(
        layer(shared), *mine, None, scaling=0.3, sliding_window=4, is_causal=False
    )
    assert nothing is None
    assert_close(found, wanted, "out")
    for function in (
        modeling_flash_attention_utils._flash_attention_forward,
        *transformers_ring.create_ring_flash_attention_forward(dist.group.WORLD, 2),
    ):
        direct = function(
            *(x.transpose(1, 2) for x in mine),
            attention_mask=None,
            query_length=share,
            is_causal=False,
            softmax_scale=0.3,
            sliding_window=4,
        )
        assert_close(direct, wanted, "out of a direct call")
    given = transformers_ring.DATA_PARAMS
    asked: list[Any] = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *a: asked.append(a) or gather(*a)
    try:
        out = ring.llama3_flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in mine), **given, heads_k_stride=1, causal=True
        )
    finally:
        dist.all_gather_object = gather
    assert not any(isinstance(told, tuple) for _, told, _ in asked)  # a rank's own documents
    assert out.shape == (share, 4, 16)


def switches_and_refusals() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = ROWS // ranks
    _, shared = models_of(LLAMA)
    x = torch.zeros(1, 4, share, 16)
    forward, one = transformers_ring.flash_attention_forward, layer(shared)
    before = transformers_ring._state.documents
    transformers_ring._state.documents = None
    ring.substitute_hf_flash_attn(dist.group.WORLD, 1)
    try:
        with pytest.raises(RuntimeError, match=r"update_ring_flash_attn_params: must be called"):
            forward(one, x, x, x, None)
    finally:
        transformers_ring._state.documents = before
    ring.update_ring_flash_attn_params(Batch((24,)).cu_seqlens, dist.group.WORLD)
    assert forward(one, x, x, x, None)[0].shape == (1, share, 4, 16)
    with pytest.raises(ValueError, match=rf"query: must have {share} rows, .* of the 24 of .* got"):
        forward(one, x[:, :, 1:], x[:, :, 1:], x[:, :, 1:], None)
    with pytest.raises(ValueError, match=r"query: must be a batch of one, .* got a batch of 2"):
        forward(one, *[torch.cat((x, x))] * 3, None)
    with pytest.raises(NotImplementedError, match=r"key: must have the rows of .*use_ring_attn\(F"):
        forward(one, x[:, :, :1], x, x, None)
    with pytest.raises(NotImplementedError, match=r"block_table: must be None, as caches"):
        forward(one, x, x, x, None, block_table=x)
    with pytest.raises(NotImplementedError, match=r"position_bias: an additive bias"):
        forward(one, x, x, x, None, position_bias=x)
    with pytest.raises(NotImplementedError, match=r"attention_mask: must be one of padding, \(1, "):
        forward(one, x, x, x, torch.ones(1, 1, share, share, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"heads_k_stride: must be a positive integer, got 0"):
        ring.substitute_hf_flash_attn(dist.group.WORLD, 0)
    ring.substitute_hf_flash_attn(dist.group.WORLD, 3)
    with pytest.raises(ValueError, match=r"heads_k_stride: must divide the 4 heads of .* got 3"):
        forward(one, x, x, x, None)
    with pytest.raises(ValueError, match=r"cu_seqlens: must end at a positive multiple of world_s"):
        ring.update_ring_flash_attn_params(torch.tensor([0, 24 * ranks + 1]), dist.group.WORLD)
    alone = [dist.new_group([other]) for other in range(ranks)]
    ring.substitute_hf_flash_attn(alone[rank], 1)
    with pytest.raises(ValueError, match=rf"process_group: .* got ranks \[{rank}\], and .*\[0, 1"):
        forward(one, x, x, x, None)
    ring.substitute_hf_flash_attn(dist.group.WORLD, 1)
    substituted = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    assert substituted is forward
    asked: list[Any] = []
    original, transformers_ring._state.original = (
        transformers_ring._state.original,
        lambda *a, **b: asked.append(b) or (a[1], None),
    )
    assert original is not forward  # also where substitution was asked for several times
    transformers_ring.use_ring_attn(False)
    try:
        assert substituted(one, x, x, x, None, dropout=0.5, is_causal=True)[0] is x
    finally:
        transformers_ring.use_ring_attn(True)
        transformers_ring._state.original = original
    assert asked[0]["dropout"] == 0.5 and asked[0]["is_causal"]
