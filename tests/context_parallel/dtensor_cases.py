"""What the ranks do in tests of DTensors: attention over shards gives what one process has."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

from flash_attn_cuda import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_cuda.functions.interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_cuda.functions.rotary import apply_rotary_emb

BATCH, SEQLEN, HEAD_DIM = 3, 24, 8
BOUNDS = [0, 5, 5, 17, 40]  # of packed sequences; rows behind them belong to none
TOTAL = 42
REPLICATED = Replicate()


def line_of_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def close(found: Any, wanted: Tensor, what: str) -> None:
    assert isinstance(found, DTensor), what
    torch.testing.assert_close(
        found.full_tensor(), wanted, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}"
    )


@dataclass(frozen=True)
class Case:
    """A call and where its tensors are: q, and where they are not as q, keys. `options` are made of
    their names, by OPTIONS.
    """

    heads_q: int = 4
    heads_k: int = 2
    cut: str | None = "heads"  # of q
    keys_are_replicated: bool = False
    is_packed: bool = False
    options: tuple[str, ...] = ()

    def rows(self, seqlen: int) -> tuple[int, ...]:
        return (TOTAL,) if self.is_packed else (BATCH, seqlen)

    def dim(self, cut: str | None) -> Placement:
        return {None: REPLICATED, "batch": Shard(0), "heads": Shard(len(self.rows(0)))}[cut]


Made = tuple[Any, Placement]  # a value, and where it is if it is a DTensor


def _slopes(case: Case) -> dict[str, Made]:
    cut = Shard(0) if case.cut == "heads" else REPLICATED
    return {"alibi_slopes": (torch.rand(case.heads_q), cut)}


def _slopes_of_batch(case: Case) -> dict[str, Made]:
    # Replicated, whatever q is: each rank takes its part.
    return {"alibi_slopes": (torch.rand(BATCH, case.heads_q), REPLICATED)}


def _sink(case: Case) -> dict[str, Made]:
    cut = Shard(0) if case.cut == "heads" else REPLICATED
    return {"sink": (torch.randn(case.heads_q, dtype=torch.float64).requires_grad_(), cut)}


def _bias(case: Case) -> dict[str, Made]:
    shape = (1, case.heads_q, SEQLEN, SEQLEN)
    cut = Shard(1) if case.cut == "heads" else REPLICATED
    return {"attn_mask": (torch.randn(shape, dtype=torch.float64).requires_grad_(), cut)}


def _shared_bias(case: Case) -> dict[str, Made]:
    shape = (BATCH, 1, 1, SEQLEN)
    cut = Shard(0) if case.cut == "batch" else REPLICATED
    return {"attn_mask": (torch.randn(shape, dtype=torch.float64).requires_grad_(), cut)}


def _mask(case: Case) -> dict[str, Made]:
    cut = {"batch": Shard(0), "heads": Shard(1), None: REPLICATED}[case.cut]
    return {"attn_mask": (torch.rand(BATCH, case.heads_q, SEQLEN, SEQLEN) < 0.5, cut)}


def _mask_of_heads(case: Case) -> dict[str, Made]:
    cut = Shard(0) if case.cut == "heads" else REPLICATED
    return {"attn_mask": (torch.rand(case.heads_q, SEQLEN, SEQLEN) < 0.5, cut)}


OPTIONS: dict[str, Callable[[Case], dict[str, Made]]] = {
    "causal": lambda case: {"causal": (True, REPLICATED)},
    "window": lambda case: {"window_size": ((7, 2), REPLICATED), "softcap": (2.0, REPLICATED)},
    "dropout": lambda case: {"dropout_p": (0.3, REPLICATED)},
    "slopes": _slopes,
    "slopes-of-batch": _slopes_of_batch,
    "sink": _sink,
    "bias": _bias,
    "shared-bias": _shared_bias,
    "mask": _mask,
    "mask-of-heads": _mask_of_heads,
    "chunks": lambda case: {"attention_chunk": (8, REPLICATED)},
    "logits": lambda case: {"return_max_logits": (True, REPLICATED)},
    "lengths": lambda case: {
        "seqused_q": (torch.tensor([3, 0, 12, 20], dtype=torch.int32), REPLICATED),
        "leftpad_k": (torch.tensor([1, 0, 2, 0], dtype=torch.int32), REPLICATED),
    },
}


def call(case: Case, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    if not case.is_packed:
        return flash_attn_func(q, k, v, return_attn_probs="dropout_p" not in options, **options)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)  # a plain tensor beside DTensors
    probs = "dropout_p" not in options
    return flash_attn_varlen_func(
        q, k, v, bounds, bounds, 23, None, return_attn_probs=probs, **options
    )


Derive = Callable[..., dict[str, Tensor]]


def gradients(loss: Tensor, leaves: dict[str, Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def derivatives_of_gradients(
    loss: Tensor, leaves: dict[str, Tensor], weights: list[Tensor]
) -> dict[str, Tensor]:
    """Of their product with a direction, by the leaves, and by the weights of the results, which is
    the derivative of those in that direction.
    """
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    pairs = zip(found, leaves.values(), strict=True)
    product = torch.stack([(dx * x.detach().cos()).sum() for dx, x in pairs]).sum()
    by = leaves | {f"result {n}": x for n, x in enumerate(weights)}
    derivatives = torch.autograd.grad(product, list(by.values()), allow_unused=True)
    return {n: x for n, x in zip(by, derivatives, strict=True) if x is not None}


def derived(
    case: Case, inputs: list[Tensor], options: dict[str, Any], weights: list[Tensor], derive: Derive
) -> dict[str, Tensor]:
    """Out, max_logits, and derivatives of a loss of out and softmax_lse."""
    results = call(case, *inputs, options)
    out, *rest = results if isinstance(results, tuple) else (results,)
    found = {"out": out}
    if options.get("return_max_logits"):
        found["max_logits"] = rest.pop()
    weights = [x.requires_grad_() for x in weights]
    loss = (out * weights[0]).sum()
    if rest:
        loss = loss + torch.where(rest[0].isfinite(), rest[0], 0.0).mul(weights[1]).sum()
    given = {n: x for n, x in options.items() if isinstance(x, Tensor) and x.requires_grad}
    leaves = dict(zip("qkv", inputs, strict=True)) | given
    return found | derive(loss, leaves, weights)


def equals_one(cases: list[Case], derive: Derive = gradients) -> None:
    """Results and gradients over DTensors of each case are those of plain tensors."""
    mesh = line_of_ranks()
    for case in cases:
        _equals_one(case, mesh, derive)


def second_derivatives_equal_one(cases: list[Case]) -> None:
    equals_one(cases, derivatives_of_gradients)


def _equals_one(case: Case, mesh: DeviceMesh, derive: Derive) -> None:
    torch.manual_seed(7)
    shapes = (
        (*case.rows(SEQLEN), heads, HEAD_DIM) for heads in (case.heads_q, *[case.heads_k] * 2)
    )
    plain = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
    made = {n: x for option in case.options for n, x in OPTIONS[option](case).items()}
    lse = (case.heads_q, TOTAL) if case.is_packed else (BATCH, case.heads_q, SEQLEN)
    weights = [torch.randn_like(plain[0]), torch.randn(lse, dtype=torch.float64)]

    torch.manual_seed(11)
    options = {name: value for name, (value, _) in made.items()}
    wanted = derived(case, plain, options, [x.clone() for x in weights], derive)

    q_at = case.dim(case.cut)
    k_at = REPLICATED if case.keys_are_replicated else q_at
    sharded = [_shard(x, mesh, at) for x, at in zip(plain, (q_at, k_at, k_at), strict=True)]
    sharded_options = {
        name: _shard(x, mesh, at) if isinstance(x, Tensor) else x for name, (x, at) in made.items()
    }
    torch.manual_seed(11 + mesh.get_rank())  # the first rank's seed is everyone's
    replicated = [distribute(x, mesh, [REPLICATED]) for x in weights]
    found = derived(case, sharded, sharded_options, replicated, derive)
    assert found["out"].placements == (q_at,)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        close(found[name], x, f"{case}: {name}")


def _shard(x: Tensor, mesh: DeviceMesh, at: Placement) -> DTensor:
    return distribute(x.detach(), mesh, [at]).requires_grad_(x.requires_grad)


def over_a_cache() -> None:
    """An append and attention over what the cache then holds, which every rank has its part of."""
    mesh = line_of_ranks()
    torch.manual_seed(1)  # plain tensors are the same on every rank
    lengths = torch.tensor([4, 0, 9], dtype=torch.int32)
    cos, sin = torch.rand(2, 16, HEAD_DIM // 2, dtype=torch.float64)
    for at, chunk in ((Shard(2), 0), (Shard(0), 0), (Shard(0), 4), (REPLICATED, 0)):
        q, new_k, new_v = (torch.randn(3, 2, n, HEAD_DIM, dtype=torch.float64) for n in (4, 2, 2))
        caches = [torch.randn(3, 16, 2, HEAD_DIM, dtype=torch.float64) for _ in "kv"]
        sharded = [_shard(x, mesh, at) for x in (q, *caches, new_k, new_v)]
        options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
        options |= {"rotary_cos": cos, "rotary_sin": sin, "attention_chunk": chunk}
        found = flash_attn_with_kvcache(*sharded, **options)
        wanted = flash_attn_with_kvcache(q, *caches, new_k, new_v, **options)
        names = ("out", "lse", "k_cache", "v_cache")
        pairs = zip((*found, *sharded[1:3]), (*wanted, *caches), strict=True)
        for name, (x, y) in zip(names, pairs, strict=True):
            close(x, y, f"{at}: {name}")


def over_pages() -> None:
    """Heads of pages, and sequences whose pages every rank has; packed queries too."""
    mesh = line_of_ranks()
    torch.manual_seed(2)
    q = torch.randn(3, 2, 4, HEAD_DIM, dtype=torch.float64)
    pages = [torch.randn(7, 4, 2, HEAD_DIM, dtype=torch.float64) for _ in "kv"]
    table = torch.tensor([[6, 1], [0, 3], [2, 5]], dtype=torch.int32)
    lengths = torch.tensor([8, 3, 5], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "block_table": table}
    wanted = flash_attn_with_kvcache(q, *pages, **options)
    by_heads = {Shard(2): Shard(0), Shard(0): REPLICATED}
    of_scores: dict[str, Any] = {
        "attn_mask": (torch.rand(3, 4, 2, 8) < 0.5, {Shard(2): Shard(1), Shard(0): Shard(0)}),
        "relative_bias": (torch.randn(4, 7, dtype=torch.float64), by_heads),
    }
    for at, pages_at in ((Shard(2), Shard(2)), (Shard(0), REPLICATED), (Shard(2), REPLICATED)):
        sharded = [_shard(x, mesh, pages_at) for x in pages]
        close(flash_attn_with_kvcache(_shard(q, mesh, at), *sharded, **options), wanted, f"{at}")
        for name, (x, where) in of_scores.items():
            of_whole = flash_attn_with_kvcache(q, *pages, **options, **{name: x})
            given = options | {name: _shard(x, mesh, where[at])}
            found = flash_attn_with_kvcache(_shard(q, mesh, at), *sharded, **given)
            close(found, of_whole, f"{name} {at}")
    bounds = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    sharded = [_shard(x, mesh, Shard(2)) for x in pages]
    flat = _shard(q.flatten(0, 1), mesh, Shard(1))
    packed = (bounds, None, 2, None)
    paged = {"seqused_k": lengths, "block_table": table}
    close(flash_attn_varlen_func(flat, *sharded, *packed, **paged), wanted.flatten(0, 1), "packed")


def over_lists() -> None:
    """Latent attention over pages that every rank has, by lists: plain tensors, or DTensors."""
    mesh = line_of_ranks()
    torch.manual_seed(3)
    table = torch.tensor([[6, 1], [0, 3], [2, 5]], dtype=torch.int32)
    lengths = torch.tensor([8, 3, 5], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "block_table": table, "softmax_scale": 0.3}
    for heads_k in (1, 2):
        q, qv = (torch.randn(3, 2, 4, HEAD_DIM, dtype=torch.float64) for _ in "qv")
        pages = [torch.randn(7, 4, heads_k, HEAD_DIM, dtype=torch.float64) for _ in "kv"]
        parts = [_shard(x, mesh, REPLICATED) for x in pages]
        lists = torch.randint(-1, 3, (3, 2, heads_k, 5), dtype=torch.int32)
        wanted = flash_attn_with_kvcache(q, *pages, qv=qv, key_lists=lists, **options)
        for at, lists_at in ((2, None), (0, Shard(0)), (0, None), (2, REPLICATED)):
            queries = [_shard(x, mesh, Shard(at)) for x in (q, qv)]
            given = lists if lists_at is None else _shard(lists, mesh, lists_at)
            found = flash_attn_with_kvcache(
                queries[0], *parts, qv=queries[1], key_lists=given, **options
            )
            close(found, wanted, f"{heads_k} key heads, {at}, {lists_at}")


def over_e4m3() -> None:
    """Caches and pages of e4m3, whose scales are plain tensors of the whole, or DTensors."""
    mesh, rank = line_of_ranks(), torch.distributed.get_rank()
    torch.manual_seed(4)
    e4m3 = torch.float8_e4m3fn

    def shard(x: Tensor, at: Placement) -> DTensor:
        """Of what gloo does not send."""
        part = x.chunk(2, at.dim)[rank] if isinstance(at, Shard) else x
        return DTensor.from_local(part.contiguous().clone(), mesh, [at], run_check=False)

    q, k, v = (torch.randn(2, n, h, 16, dtype=torch.float64) for n, h in ((2, 4), (1, 2), (1, 2)))
    caches = [(100.0 * torch.randn(2, 9, 2, 16)).to(e4m3) for _ in "kv"]
    of_heads, of_batch, of_tokens = torch.rand(2), torch.rand(2, 2), torch.rand(2, 9, 2)
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    for at, keys_at in ((Shard(2), Shard(2)), (Shard(0), Shard(0)), (Shard(2), REPLICATED)):
        for k_scale, v_scale in ((of_heads, of_batch), (0.25, of_tokens)):
            given: dict[str, Any] = {"k_descale": k_scale, "v_descale": v_scale}
            given |= {"cache_seqlens": lengths, "causal": True}
            if keys_at == REPLICATED:  # ranks share the cache
                parts, new = [shard(x, keys_at) for x in caches], []
                wanted = flash_attn_with_kvcache(q, *caches, **given)
            else:
                parts, new = [shard(x, keys_at) for x in caches], [shard(x, at) for x in (k, v)]
                written = [x.clone() for x in caches]
                wanted = flash_attn_with_kvcache(q, *written, k, v, **given)
            close(flash_attn_with_kvcache(shard(q, at), *parts, *new, **given), wanted, f"{at}")
            for x, y in zip(parts, written if new else [], strict=bool(new)):
                local = shard(y, keys_at).to_local()
                assert torch.equal(x.to_local().view(torch.uint8), local.view(torch.uint8))
        pages_at = REPLICATED if at == Shard(0) else keys_at
        given = {"k_descale": of_tokens, "v_descale": of_batch, "block_table": table}
        given |= {"cache_seqlens": lengths}
        wanted = flash_attn_with_kvcache(q, *caches, **given)
        if pages_at == Shard(2):
            given["k_descale"] = shard(of_tokens, Shard(2))
        parts = [shard(x, pages_at) for x in caches]
        close(flash_attn_with_kvcache(shard(q, at), *parts, **given), wanted, f"pages, {at}")
    parts = [shard(x, Shard(2)) for x in caches]
    scales = {f"{name}_descale": shard(of_tokens, Shard(2)) for name in "kv"}
    with pytest.raises(NotImplementedError, match=r"^quantize: must be None where tensors are D"):
        flash_attn_with_kvcache(
            *(shard(q, Shard(2)), *parts, *(shard(x, Shard(2)) for x in (k, v))),
            cache_seqlens=lengths,
            **scales,
            quantize="token",
        )
    for heads_k in (1, 2):  # of latent rows, whose columns have two scales
        rotary = torch.randn(2, 9, heads_k, 16, dtype=torch.float64)
        latent, scale = (torch.randn(2, 9, heads_k, n) for n in (128, 2))
        qv = torch.randn(2, 2, 4, 128, dtype=torch.float64)
        given = {"qv": qv, "v_descale": scale, "softmax_scale": 0.1, "cache_seqlens": lengths}
        wanted = flash_attn_with_kvcache(q, rotary, latent.to(e4m3), **given)
        parts = [shard(x, REPLICATED) for x in (rotary, latent.to(e4m3))]
        given["qv"] = shard(qv, Shard(2))
        found = flash_attn_with_kvcache(shard(q, Shard(2)), *parts, **given)
        close(found, wanted, f"latent rows, {heads_k} key heads")


def other_operators() -> None:
    """q, k and v as one tensor; partial results; rotations; FlashAttention-2's functions."""
    mesh = line_of_ranks()
    torch.manual_seed(3)
    qkv = torch.randn(3, 10, 3, 2, HEAD_DIM, dtype=torch.float64)
    close(
        flash_attn_qkvpacked_func(_shard(qkv, mesh, Shard(3))), flash_attn_qkvpacked_func(qkv), ""
    )

    partial = torch.randn(3, 2, 5, 4, HEAD_DIM, dtype=torch.float64)
    lse = torch.randn(partial.shape[:-1], dtype=torch.float64)
    out, combined = flash_attn_combine(partial, lse)
    for dim in (1, 2, 3):
        parts = [_shard(x, mesh, Shard(dim)) for x in (partial, lse)]
        given = _shard(torch.zeros_like(out), mesh, Shard(dim - 1))
        for found in (flash_attn_combine(*parts), flash_attn_combine(*parts, out=given)):
            close(found[0], out, "combined")
            close(found[1], combined, "combined lse")

    cos, sin = torch.rand(2, 16, 3, dtype=torch.float64)
    offsets = torch.tensor([1, 4, 0])
    x = qkv[:, :, 0]
    rotated = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    for dim in (0, 2):
        sharded = _shard(x, mesh, Shard(dim)).requires_grad_()
        close(apply_rotary_emb(sharded, cos, sin, seqlen_offsets=offsets), rotated, "rotated")
    written = _shard(x, mesh, Shard(2))
    assert apply_rotary_emb(written, cos, sin, inplace=True, seqlen_offsets=offsets) is written
    close(written, rotated, "rotated in place")
    _private_functions(mesh)


def _private_functions(mesh: DeviceMesh) -> None:
    def run(q: Tensor, k: Tensor, dout: Tensor, grads: list[Tensor]) -> tuple[Tensor, ...]:
        scale_and_mask = (0.5, True, -1, -1, 0.0, None)
        out, lse, _, rng_state = _flash_attn_forward(q, k, k, 0.2, *scale_and_mask, False)
        given = (dout, q, k, k, out, lse, *grads, 0.2, *scale_and_mask, False, rng_state)
        return out, lse, *grads, _flash_attn_backward(*given)

    q, dout = torch.randn(2, 3, 16, 4, HEAD_DIM, dtype=torch.float64)
    k = torch.randn(3, 16, 2, HEAD_DIM, dtype=torch.float64)
    torch.manual_seed(4)
    wanted = run(q, k, dout, [torch.zeros_like(x) for x in (q, k, k)])
    for at, k_at, dk_at in (
        (Shard(2), Shard(2), Shard(2)),
        (Shard(0), Shard(0), Shard(0)),
        (Shard(2), REPLICATED, Partial()),
    ):
        grads = [
            DTensor.from_local(torch.zeros_like(_shard(x, mesh, y).to_local()), mesh, [z])
            if z != Shard(0)
            else _shard(torch.zeros_like(x), mesh, z)
            for x, y, z in ((q, at, at), (k, k_at, dk_at), (k, k_at, dk_at))
        ]
        torch.manual_seed(4 + mesh.get_rank())
        found = run(_shard(q, mesh, at), _shard(k, mesh, k_at), _shard(dout, mesh, at), grads)
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "d"), found, wanted, strict=True):
            close(x, y, f"{at}: {name}")


# name: (placements of q, k and v, options, what the error says).
REFUSED: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], str]] = {
    "sequence": ((Shard(1), Shard(1), Shard(1)), {},
        r"^q: must be sharded over batch \(Shard\(0\)\) or heads \(Shard\(2\)\) or replicated on "
        r"mesh dimension 'tp', got .*: redistribute it; flash_attn_cuda.context_parallel takes"),
    "head-dim": ((Shard(3), REPLICATED, REPLICATED), {}, "^q: must be sharded .*: redistribute it"),
    "sum": ((Partial(), REPLICATED, REPLICATED), {}, r"^q: must be .*artial|^q: must be .*P\(sum"),
    "keys-of-batch": ((Shard(0), REPLICATED, REPLICATED), {},
        "^k: must be .* on mesh dimension 'tp', where q is sharded over batch, got .*: redist"),
    "values": ((Shard(2), Shard(2), REPLICATED), {},
        "^v: must be .*sharded over heads, got .*: re"),
    "queries": ((REPLICATED, Shard(2), Shard(2)), {},
        "^k: must be .*q is replicated, got .*: redis"),
    "plain-keys": ((Shard(2), None, Shard(2)), {}, "^k: must be a DTensor .*got a torch.Tensor"),
    "plain-queries": ((None, Shard(2), Shard(2)), {}, "^q: must be a DTensor .*got a torch.Tensor"),
    "few-heads": ((Shard(2),) * 3, {"heads_k": 1}, "^k: must have a multiple of 2 heads .*, got 1"),
    "odd-heads": ((Shard(2),) * 3, {"heads_q": 3, "heads_k": 3},
        "^q: must have a multiple of 2 he"),
    "slopes": ((Shard(0),) * 3, {"alibi_slopes": Shard(0)},
        "^alibi_slopes: must be .*where q is sharded over batch, got .*: redistribute it"),
    "bias": ((Shard(2),) * 3, {"attn_mask": Shard(2)},
        "^attn_mask: must be .*where q is sharded over heads, got .*: redistribute it"),
    "dropout-and-mask": ((Shard(2),) * 3, {"dropout_p": 0.1, "attn_mask": None},
        "^dropout_p: must be 0 with an attn_mask or a block_mask where DTensors are sharded"),
}  # fmt: skip


def refused() -> None:
    """Each error names the argument, where it is and that it has to move; no rank waits."""
    mesh = line_of_ranks()
    for name, (places, options, message) in REFUSED.items():
        heads_q, heads_k = options.get("heads_q", 4), options.get("heads_k", 2)
        tensors = [torch.randn(4, 8, n, HEAD_DIM) for n in (heads_q, heads_k, heads_k)]
        given: dict[str, Any] = {x: y for x, y in options.items() if not x.startswith("heads")}
        if "alibi_slopes" in given:
            given["alibi_slopes"] = _at(torch.rand(heads_q), mesh, given["alibi_slopes"])
        if "attn_mask" in given:
            is_whole = given["attn_mask"] is None
            mask = torch.ones(8, 8, dtype=torch.bool) if is_whole else torch.ones(1, 1, 8, 8)
            given["attn_mask"] = _at(mask, mesh, given["attn_mask"])
        q, k, v = (_at(x, mesh, place) for x, place in zip(tensors, places, strict=True))
        _raises(name, message, lambda q=q, k=k, v=v, given=given: flash_attn_func(q, k, v, **given))
    _refuses_groups_that_ranks_split()
    _refuses_appends(mesh)


def _raises(name: str, message: str, run: Callable[[], Any]) -> None:
    try:
        run()
    except (TypeError, ValueError, NotImplementedError) as error:
        assert re.search(message, str(error)), f"{name}: {error}"
    else:
        raise AssertionError(f"{name}: was not refused")


def _at(x: Tensor, mesh: DeviceMesh, place: Any) -> Tensor:
    if place is None:
        return x
    if isinstance(place, Partial):
        return DTensor.from_local(x, mesh, [place])
    return distribute(x, mesh, [place])


def _refuses_groups_that_ranks_split() -> None:
    """6 heads over 2 ranks, of which each key head serves 2."""
    mesh = line_of_ranks()
    q, k = (distribute(torch.randn(2, 8, n, HEAD_DIM), mesh, [at]) for n, at in _GROUPS)
    message = "^k: must be sharded over heads as q is.*3 heads of replicated keys.*redistribute k"
    _raises("groups", message, lambda: flash_attn_func(q, k, k))


_GROUPS = ((6, Shard(2)), (3, REPLICATED))


def _refuses_appends(mesh: DeviceMesh) -> None:
    """Where ranks that share a cache would each write a part of it."""
    q, k = torch.randn(4, 1, 4, HEAD_DIM), torch.randn(4, 1, 2, HEAD_DIM)
    cache = torch.zeros(6, 8, 2, HEAD_DIM)
    lengths = torch.zeros(4, dtype=torch.int32)
    for at, cache_at, options, message in (
        (Shard(2), REPLICATED, {}, "^k_cache: must be sharded over heads"),
        (
            Shard(0),
            REPLICATED,
            {"cache_batch_idx": lengths + 1},
            "^q: must not be sharded over batch",
        ),
    ):
        entries = cache if options else cache[:4]
        caches = [_at(entries.clone(), mesh, cache_at) for _ in "kv"]
        new = [_at(k, mesh, Shard(0) if at == Shard(0) else REPLICATED) for _ in "kv"]
        given = (_at(q, mesh, at), *caches, *new)

        def run(given: Any = given, options: Any = options) -> Any:
            return flash_attn_with_kvcache(*given, cache_seqlens=lengths, **options)

        _raises("append", message, run)


def over_two_dimensions() -> None:
    """Batch over one dimension of a mesh and heads over the other, with shared key heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    q_at = [Shard(0), Shard(2)]
    for heads_k, k_at in ((2, q_at), (1, [Shard(0), REPLICATED])):
        torch.manual_seed(5)
        plain = [
            torch.randn(3, 16, n, HEAD_DIM, dtype=torch.float64).requires_grad_()
            for n in (4, heads_k, heads_k)
        ]
        dout = torch.randn_like(plain[0])
        options = {"dropout_p": 0.2, "causal": True}
        torch.manual_seed(6)
        out = flash_attn_func(*plain, **options)
        out.backward(dout)
        sharded = [
            distribute(x.detach(), mesh, at).requires_grad_()
            for x, at in zip(plain, (q_at, k_at, k_at), strict=True)
        ]
        torch.manual_seed(6 + mesh.get_rank())
        found = flash_attn_func(*sharded, **options)
        close(found, out, "out")
        found.backward(distribute(dout, mesh, [REPLICATED, REPLICATED]))
        for name, x, y in zip("qkv", sharded, plain, strict=True):
            close(x.grad, y.grad, f"d{name}")


def compiled() -> None:
    """torch.compile, of one graph."""
    mesh = line_of_ranks()
    torch.manual_seed(8)
    plain = [torch.randn(2, 8, n, HEAD_DIM).requires_grad_() for n in (4, 2, 2)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True) * 2

    out = attend(*plain)
    out.square().sum().backward()
    sharded = [_shard(x, mesh, Shard(2)) for x in plain]
    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(*sharded)
    found.square().sum().backward()
    torch.testing.assert_close(found.full_tensor(), out)
    for x, y in zip(sharded, plain, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)


def on_gpus(cut: str, dropout_p: float, is_packed: bool) -> None:
    """Sharded calls of kernels give what replicated ones give, whose dropout has the same seed."""
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("tp",))
    rows = (2 * 384,) if is_packed else (size, 384)
    at = Shard(0) if cut == "batch" else Shard(len(rows))
    torch.manual_seed(12)
    heads = (4 * size, size, size, 4 * size)
    plain = [torch.randn(*rows, n, 64, device="cuda").bfloat16() for n in heads]
    bounds = torch.tensor([0, 200, 768], dtype=torch.int32, device="cuda")
    found = []
    for place in (REPLICATED, at):
        q, k, v, dout = (_shard(x, mesh, place) for x in plain)
        for x in (q, k, v):
            x.requires_grad_()
        torch.manual_seed(13)
        options = {"causal": True, "dropout_p": dropout_p}
        if is_packed:
            out = flash_attn_varlen_func(q, k, v, bounds, bounds, 568, 568, **options)
        else:
            out = flash_attn_func(q, k, v, **options)
        out.backward(dout)
        found.append([x.full_tensor() for x in (out, q.grad, k.grad, v.grad)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
