"""What the ranks do in tests of context parallelism together with torch's other parallelisms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda import flash_attn_func
from flash_attn_cuda.context_parallel import ContextParallel
from flash_attn_cuda.context_parallel.parallel import IS_TRACED

WIDTH, HEADS, SEQLEN, BATCH = 32, 4, 32, 4
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Where a model is, and in which dtype."""

    device: str
    dtype: torch.dtype

    def put(self, x: Any) -> Any:
        """A tensor or a module."""
        return x.to(self.device, self.dtype)


CPU = Place("cpu", torch.float64)
CUDA = Place("cuda", torch.bfloat16)


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


class Block(nn.Module):
    """x (batch, seqlen, WIDTH) -> the same: attention and an MLP, with normalisation before each.

    heads: how many of HEADS this block has, from first_head on; its layers are cut accordingly.
    """

    def __init__(self, attention: Attention, heads: int = HEADS) -> None:
        super().__init__()
        self.attention = attention
        self.heads = heads
        inner = WIDTH // HEADS * heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def attended(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        return self.out(self.attention(q, k, v).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(x)
        return x + self.mlp(x)


def model_of(attention: Attention, layers: int = 2, place: Place = CPU) -> nn.Sequential:
    """The same weights at every call and on every rank."""
    torch.manual_seed(3)
    return place.put(nn.Sequential(*(Block(attention) for _ in range(layers))))


def whole_input(place: Place = CPU) -> tuple[Tensor, Tensor]:
    """(x, target), each (BATCH, SEQLEN, WIDTH)."""
    generator = torch.Generator().manual_seed(4)
    x, target = torch.randn(2, BATCH, SEQLEN, WIDTH, generator=generator, dtype=torch.float64)
    return place.put(x), place.put(target)


def gradients_of_whole(layers: int = 2, place: Place = CPU) -> dict[str, Tensor]:
    model = model_of(whole_attention, layers, place)
    x, target = whole_input(place)
    F.mse_loss(model(x), target).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """In low precision to some roundings of a tensor's largest value."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        rtol, atol = 1e-9, 1e-11
        if x.dtype != torch.float64:
            rtol, atol = 0.0, 8.0 * torch.finfo(x.dtype).eps * x.abs().max().item()
        torch.testing.assert_close(
            found[name], x, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def causal(parallel: ContextParallel) -> Attention:
    return lambda q, k, v: parallel.attend(q, k, v, causal=True)


def with_fsdp(scheme: str, over_both: bool, place: Place = CPU) -> None:
    """Weights sharded over "fsdp", or over all ranks; batches over "fsdp", sequences over
    "context".
    """
    mesh = init_device_mesh(place.device, (2, 2), mesh_dim_names=("fsdp", "context"))
    parallel = ContextParallel(mesh["context"], scheme)
    model = model_of(causal(parallel), place=place)
    weights = mesh._flatten("all") if over_both else mesh["fsdp"]
    for block in model:
        fully_shard(block, mesh=weights)
    fully_shard(model, mesh=weights)
    x, target = (
        parallel.shard(t.chunk(2)[mesh.get_local_rank("fsdp")]).contiguous()
        for t in whole_input(place)
    )
    F.mse_loss(model(x), target).backward()
    found = {}
    for name, weight in model.named_parameters():
        assert isinstance(weight.grad, DTensor)
        found[name] = weight.grad.full_tensor()
        if not over_both:  # of "fsdp" alone: the mean over "context" is left to the caller
            dist.all_reduce(found[name], group=mesh.get_group("context"))
            found[name] /= 2
    assert_close(found, gradients_of_whole(place=place))


def consistency_loss(model: nn.Sequential, passes: int, *path: Tensor) -> Tensor:
    """A consistency model's: the output follows its own derivative along a path, x and its
    direction. Of two passes the first gives that in forward mode, without gradients, and the blocks
    of the other are computed again in the backward.
    """
    x, direction = path
    with torch.set_grad_enabled(passes == 1):
        out, slope = torch.func.jvp(model, (x,), (direction,))
    y = out
    if passes == 2:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
    return F.mse_loss(y, (x - 0.1 * slope).detach())


def with_forward_mode_in_a_step(passes: int) -> None:
    """Weights sharded over both ranks, and so batches."""
    mesh = init_device_mesh("cpu", (2,))
    x, direction = whole_input()
    whole = model_of(whole_attention)
    consistency_loss(whole, passes, x, direction).backward()
    model = model_of(whole_attention)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = (t.chunk(2)[dist.get_rank()].contiguous() for t in (x, direction))
    consistency_loss(model, passes, *own).backward()
    found = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
    assert_close(found, {name: weight.grad for name, weight in whole.named_parameters()})


class Summed(torch.autograd.Function):
    """The sum over a group, whose gradient every rank already has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SummedBack(torch.autograd.Function):
    """x, whose gradient is the sum over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def with_tensor_parallel(scheme: str, has_alibi: bool, place: Place = CPU) -> None:
    """Heads over "tensor" (Megatron-LM, Shoeybi et al., 2019, section 3), sequences over
    "context".
    """
    mesh = init_device_mesh(place.device, (2, 2), mesh_dim_names=("tensor", "context"))
    tensor = mesh.get_group("tensor")
    heads = HEADS // 2
    first = heads * mesh.get_local_rank("tensor")
    slopes = None
    if has_alibi:
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=place.device)
    mine = None if slopes is None else slopes[first : first + heads]
    parallel = ContextParallel(mesh["context"], scheme)

    whole = Block(lambda q, k, v: flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes))
    part = Block(lambda q, k, v: parallel.attend(q, k, v, causal=True, alibi_slopes=mine), heads)
    torch.manual_seed(5)
    for weight in whole.parameters():
        nn.init.normal_(weight, std=0.2)
    whole = place.put(whole)
    rows = slice(first * WIDTH // HEADS, (first + heads) * WIDTH // HEADS)

    def cut(name: str, x: Tensor) -> Tensor:
        if name in ("q.weight", "k.weight", "v.weight"):
            return x[rows]
        return x[:, rows] if name == "out.weight" else x

    weights = {name: cut(name, x).clone() for name, x in whole.state_dict().items()}
    place.put(part).load_state_dict(weights)

    x, target = whole_input(place)
    x_of_whole = x.clone().requires_grad_()
    F.mse_loss(whole(x_of_whole), target).backward()

    x, target = (parallel.shard(t).requires_grad_(t is x) for t in (x, target))
    normed = SummedBack.apply(part.norm(x), tensor)
    q, k, v = (f(normed).unflatten(-1, (heads, -1)) for f in (part.q, part.k, part.v))
    y = x + Summed.apply(part.out(part.attention(q, k, v).flatten(2)), tensor)
    F.mse_loss(y + part.mlp(y), target).backward()
    found, wanted = {}, {}
    for (name, mine_), (_, whole_) in zip(
        part.named_parameters(), whole.named_parameters(), strict=True
    ):
        dist.all_reduce(mine_.grad, group=mesh.get_group("context"))
        found[name], wanted[name] = mine_.grad / 2, cut(name, whole_.grad)
    found["x"] = parallel.unshard(x.grad) / 2
    wanted["x"] = x_of_whole.grad
    assert_close(found, wanted)


def compiled(scheme: str, seqlens: tuple[int, ...]) -> None:
    """A model, in one graph where dynamo traces attend: results and gradients are those without
    compilation.
    """
    torch._dynamo.reset()
    parallel = ContextParallel(None, scheme)
    model = model_of(causal(parallel), layers=1)  # a compile takes seconds a layer
    fast = torch.compile(model, backend="aot_eager", fullgraph=IS_TRACED)
    for seqlen in seqlens:
        x, _ = whole_input()
        x = parallel.shard(x[:, :seqlen])
        results = []
        for function in (model, fast):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            out = function(leaf)
            out.square().sum().backward()
            grads = {name: w.grad.clone() for name, w in model.named_parameters()}
            results.append({"out": out.detach(), "x": leaf.grad, **grads})
        assert_close(*results[::-1])


def compiled_options(scheme: str, ulysses_size: int | None = None) -> None:
    """Every option, documents, and the log-sum-exp."""
    torch._dynamo.reset()
    parallel = ContextParallel(None, scheme, ulysses_size=ulysses_size)
    plan = parallel.plan([0, 5, 40, 40, 83, 96], window_size=(20, -1))
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        parallel.shard(torch.randn(96, HEADS, 8, generator=generator, dtype=torch.float64), plan)
        for _ in range(3)
    )
    sink = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    slopes = torch.rand(HEADS, generator=generator)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        return parallel.attend(
            *(q, k, v, plan),
            causal=True,
            window_size=(20, -1),
            softcap=3.0,
            alibi_slopes=slopes,
            sink=sink,
            return_lse=True,
            return_max_logits=True,
        )

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=IS_TRACED)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        out, softmax_lse, max_logits = function(*leaves)
        (out.square().sum() + softmax_lse.clamp(min=-1e3).sum()).backward()
        found = {"out": out.detach(), "softmax_lse": softmax_lse.detach(), "logits": max_logits}
        grads = {n: x.grad for n, x in zip(("q", "k", "v", "sink"), leaves, strict=True)}
        results.append({**found, **grads})
    assert_close(*results[::-1])


def compiled_where_ranks_send_nothing() -> None:
    """In the hops of a window the first rank receives no row and the last one sends none. Rank 0's
    loss leaves out what others' losses have.
    """
    torch._dynamo.reset()
    parallel = ContextParallel(None, "ring")
    rows = 16 * dist.get_world_size()
    plan = parallel.plan([0, rows], causal=True, window_size=(5, -1))
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        parallel.shard(torch.randn(rows, HEADS, 8, generator=generator, dtype=torch.float64), plan)
        for _ in range(3)
    )

    leaves_out = dist.get_rank() == 0

    def loss_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given: dict[str, Any] = {"causal": True, "window_size": (5, -1), "return_lse": True}
        out, softmax_lse = parallel.attend(q, k, v, plan, **given)
        loss = softmax_lse.square().sum()
        return loss if leaves_out else loss + out.square().sum()

    results = []
    for function in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=IS_TRACED)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        loss = function(*leaves)
        loss.backward()
        grads = {n: x.grad for n, x in zip("qkv", leaves, strict=True)}
        results.append({"loss": loss.detach(), **grads})
    assert_close(*results[::-1])


def compiled_dropout() -> None:
    """Drawn anew at each call, by all ranks together: the same kind of mask as without."""
    torch._dynamo.reset()
    parallel = ContextParallel(None, "ring")
    ones = torch.ones(1, 64, HEADS, 8, dtype=torch.float64)

    def attend(q: Tensor) -> Tensor:
        return parallel.attend(q, q, q, dropout_p=0.5)

    function = torch.compile(attend, backend="aot_eager", fullgraph=IS_TRACED)
    torch.manual_seed(dist.get_rank())
    first, second = function(ones), function(ones)
    assert not torch.equal(first, second)
    assert abs(first.mean().item() - 1.0) < 0.05


def checkpointed(scheme: str, use_reentrant: bool, is_compiled: bool = False) -> None:
    """Blocks whose activations are computed again in the backward."""
    torch._dynamo.reset()
    parallel = ContextParallel(None, scheme)
    model = model_of(causal(parallel))

    def forward(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    function = forward
    if is_compiled:
        function = torch.compile(forward, backend="aot_eager", fullgraph=IS_TRACED)
    x, target = (parallel.shard(t) for t in whole_input())
    F.mse_loss(function(x.requires_grad_()), target).backward()
    found = {}
    for name, weight in model.named_parameters():
        dist.all_reduce(weight.grad)
        found[name] = weight.grad / parallel.size
    assert_close(found, gradients_of_whole())
