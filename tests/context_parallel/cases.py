"""What the ranks of a test do: attention of shards, compared with attention of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.context_parallel import Band, ContextParallel, Plan, attention
from flash_attn_cuda.context_parallel.attention import head_slices
from flash_attn_cuda.context_parallel.load import HeadGroups, Heads, Load
from flash_attn_cuda.operators.derivatives import run_operator


@dataclass(frozen=True)
class Case:
    """lengths: of one, a batch of sequences of that length; of several, documents."""

    scheme: str
    ranks: int
    lengths: tuple[int, ...] = (96,)
    batch: int | None = 1  # None: documents
    heads_q: int = 4
    heads_k: int = 4
    head_dim: int = 8
    head_dim_v: int = 8
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    has_alibi: bool = False
    has_sink: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    max_logits: bool = False
    ulysses_size: int | None = None
    head_groups: int | tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    seed: int = 0

    @property
    def sequences(self) -> tuple[int, ...]:
        """Lengths of all of them."""
        return self.lengths * (1 if self.batch is None else self.batch)

    def options(self) -> dict[str, Any]:
        names = ("causal", "window_size", "softcap", "dropout_p", "deterministic")
        return {name: getattr(self, name) for name in names}


@dataclass
class Whole:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    slopes: Tensor | None
    sink: Tensor | None
    cu_seqlens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case) -> Whole:
        """Packed, the same on every rank."""
        generator = torch.Generator().manual_seed(case.seed)
        lengths = case.sequences
        total = sum(lengths)

        def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(dtype).to(case.device)

        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        return cls(
            random(total, case.heads_q, case.head_dim),
            random(total, case.heads_k, case.head_dim),
            random(total, case.heads_k, case.head_dim_v),
            random(total, case.heads_q, case.head_dim_v),
            random(case.heads_q, total, dtype=wide),
            random(case.heads_q, dtype=torch.float32).abs() if case.has_alibi else None,
            random(case.heads_q, dtype=wide) if case.has_sink else None,
            [0, *accumulate(lengths)],
        )

    def in_fp64_on_cpu(self) -> Whole:
        """The same numbers."""
        names = ("q", "k", "v", "dout", "dlse", "sink")
        inputs = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{name: None if x is None else x.cpu().double() for name, x in inputs.items()},
            slopes=None if self.slopes is None else self.slopes.cpu(),
        )

    def call(self, case: Case, rng_state: Tensor | None, **given: Tensor | None) -> AttentionCall:
        bounds = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.q.device)
        options = case.options()
        del options["deterministic"]
        left, right = options.pop("window_size")
        return AttentionCall(
            **given,
            **options,
            softmax_scale=case.head_dim**-0.5,
            window_size_left=left,
            window_size_right=right,
            alibi_slopes=self.slopes,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=max(case.lengths, default=0),
            max_seqlen_k=max(case.lengths, default=0),
            rng_state=rng_state,
        )

    def results(self, case: Case, rng_state: Tensor | None) -> dict[str, Tensor]:
        """Of one call, on one rank."""
        inputs = [x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v)]
        sink = None if self.sink is None else self.sink.clone().requires_grad_()
        given = dict(zip("qkv", inputs, strict=True))
        call = self.call(case, rng_state, sink=sink, **given)
        results = run_operator(replace(call, return_max_logits=case.max_logits))
        torch.autograd.backward((results.out, results.softmax_lse), (self.dout, self.dlse))
        found = {"out": results.out.detach(), "softmax_lse": results.softmax_lse.detach().t()}
        found |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), inputs, strict=True)}
        if case.max_logits:
            found["max_logits"] = results.max_logits
        return found if sink is None else found | {"dsink": sink.grad}


def sharded_results(
    case: Case, parallel: ContextParallel, whole: Whole
) -> tuple[dict[str, Tensor], Plan | None]:
    """What the ranks have found, whole again."""
    plan = None
    if case.batch is None:
        multiple = 16 if case.dropout_p else 1
        plan = parallel.plan(
            whole.cu_seqlens, causal=case.causal, window_size=case.window_size, multiple=multiple
        )

    def cut(x: Tensor) -> Tensor:
        if plan is not None:
            return parallel.shard(x, plan).contiguous()
        return parallel.shard(x.unflatten(0, (case.batch, *case.lengths))).contiguous()

    def join(x: Tensor) -> Tensor:
        joined = parallel.unshard(x, plan)
        return joined if plan is not None else joined.flatten(0, 1)

    inputs = [cut(x).requires_grad_() for x in (whole.q, whole.k, whole.v)]
    sink = None if whole.sink is None else whole.sink.clone().requires_grad_()
    out, softmax_lse, *max_logits = parallel.attend(
        *inputs,
        plan,
        **case.options(),
        alibi_slopes=whole.slopes,
        sink=sink,
        return_lse=True,
        return_max_logits=case.max_logits,
    )
    dlse = cut(whole.dlse.t())
    torch.autograd.backward(
        (out, softmax_lse), (cut(whole.dout), dlse.transpose(-1, -2).contiguous())
    )
    by_row = softmax_lse.transpose(-1, -2)
    found = {"out": join(out), "softmax_lse": join(by_row)}
    found |= {n: join(x.grad) for n, x in zip(("dq", "dk", "dv"), inputs, strict=True)}
    if sink is not None:
        dist.all_reduce(sink.grad)
        found["dsink"] = sink.grad
    if case.max_logits:
        assert not max_logits[0].requires_grad
        found["max_logits"] = max_logits[0]
    return found, plan


def make(case: Case) -> ContextParallel:
    return ContextParallel(
        None, case.scheme, ulysses_size=case.ulysses_size, head_groups=case.head_groups
    )


def equals_the_whole(case: Case) -> None:
    whole, parallel = Whole.of(case), group_of(case)
    drawn = keep_draws(parallel)
    torch.manual_seed(case.seed + dist.get_rank())
    found, _ = sharded_results(case, parallel, whole)
    wanted = whole.results(case, drawn[0] if drawn else None)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


def has_groups_of_either_pass(case: Case) -> None:
    """The forward's groups of heads in the forward, the backward's in the backward. No other test
    has these lengths, whose groups are kept.
    """
    asked = []

    def chosen(load: Load, heads: Heads, *, backward: bool) -> HeadGroups:
        return (2, 2) if backward else (1, 3)

    def slices(heads_q: int, groups: HeadGroups) -> Iterator[tuple[slice, slice]]:
        asked.append(groups)
        return head_slices(heads_q, groups)

    with (
        mock.patch.object(Load, "head_groups", chosen),
        mock.patch.object(attention, "head_slices", slices),
    ):
        equals_the_whole(replace(case, lengths=(104,)))
    assert asked == [(1, 3), (2, 2)]


def is_as_close_as_one_call(case: Case) -> None:
    """In low precision: errors of results over the ranks, at most twice those of one call over the
    whole on one device; both against fp64 on the CPU.
    """
    whole, parallel = Whole.of(case), group_of(case)
    drawn = keep_draws(parallel)
    torch.manual_seed(case.seed + dist.get_rank())
    found, _ = sharded_results(case, parallel, whole)
    rng_state = drawn[0] if drawn else None
    wanted = whole.in_fp64_on_cpu().results(case, None if rng_state is None else rng_state.cpu())
    assert_as_close(found, whole.results(case, rng_state), wanted, whole)


def assert_as_close(
    found: dict[str, Tensor], one_call: dict[str, Tensor], wanted: dict[str, Tensor], whole: Whole
) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(found[name].isneginf().cpu(), x.isneginf()), name
        own, usual = (
            (y.double().cpu() - x).nan_to_num(0.0).abs() for y in (found[name], one_call[name])
        )
        assert own.isfinite().all(), name
        unit = torch.finfo(one_call[name].dtype).eps * x[x.isfinite()].abs().max()
        unit *= (
            16 if name in ("softmax_lse", "max_logits") else 1
        )  # of sums whose terms are larger than they
        of_mean = unit / 8
        if name == "dsink":
            unit = unit_of_dsink(wanted, whole)
            of_mean = unit / 2
        assert own.max() <= 2 * usual.max() + unit, f"{name}: {own.max()} {usual.max()}"
        assert own.mean() <= 1.5 * usual.mean() + of_mean, f"{name}: {own.mean()} {usual.mean()}"


def unit_of_dsink(wanted: dict[str, Tensor], whole: Whole) -> Tensor:
    """What rounding out may do to the largest: dsink sums exp(sink - lse) (dlse - dout out), whose
    roundings add up as a random walk. There are as many as heads, and the errors of one call over
    so few may all be small by chance.
    """
    assert whole.sink is not None
    share = (whole.sink.double().cpu() - wanted["softmax_lse"]).exp()
    share = share.masked_fill(wanted["softmax_lse"].isneginf(), 0.0)
    terms = share[..., None] * whole.dout.double().cpu() * wanted["out"]
    return torch.finfo(whole.q.dtype).eps * terms.square().sum((0, 2)).sqrt().max()


def dsink_of_rounded(wanted: dict[str, Tensor], whole: Whole, seed: int) -> Tensor:
    """As from an out whose probabilities were rounded to q's dtype, and then out itself."""
    assert whole.sink is not None
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(wanted["out"].shape, generator=generator, dtype=torch.float64) - 0.5
    out = wanted["out"] * (1.0 + torch.finfo(whole.q.dtype).eps / 2 * noise)
    softmax_d = (whole.dout.double() * out.to(whole.q.dtype)).sum(-1) - whole.dlse.t()
    share = (whole.sink - wanted["softmax_lse"]).exp()
    return -(share * softmax_d).sum(0)


def keep_draws(parallel: ContextParallel) -> list[Tensor]:
    """The random states that calls from now on draw."""
    drawn: list[Tensor] = []
    draw = type(parallel)._draw
    parallel._draw = lambda q: drawn.append(draw(parallel, q)) or drawn[-1]
    return drawn


def with_groups_of_its_heads(case: Case) -> Case:
    """The same number of groups, or one, where the case's do not fit its heads of keys."""
    groups, heads = case.head_groups, case.heads_k
    if isinstance(groups, int) and heads % groups:
        groups = 1
    if isinstance(groups, tuple) and sum(groups) != heads:
        groups = (1, heads - 1) if heads > 1 else (1,)
    return replace(case, head_groups=groups)


def of_ranks(case: Case, ranks: int) -> Case:
    """A case of two ranks with so many, as large as all schemes need it: a head of keys for each
    rank, unless there is one for all, and of a batch's length two parts for each, which dropout
    takes at multiples of 16.
    """

    def up_to(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    heads_k = case.heads_k if case.heads_k == 1 else up_to(case.heads_k, ranks)
    heads_q = case.heads_q // case.heads_k * heads_k
    lengths = case.lengths
    if case.batch is not None:
        lengths = (up_to(lengths[0], 2 * ranks * 16),)
    return replace(case, ranks=ranks, heads_q=heads_q, heads_k=heads_k, lengths=lengths)


_parallels: dict[Any, ContextParallel] = {}


def group_of(case: Case) -> ContextParallel:
    """Of all ranks; made once."""
    key = (case.scheme, case.ranks, case.ulysses_size, case.head_groups)
    if case.ranks == dist.get_world_size():
        if key not in _parallels:
            _parallels[key] = make(case)
        return _parallels[key]
    raise ValueError(f"ranks: the test has {dist.get_world_size()} of them, got {case.ranks}")


def attend_with_own(difference: str) -> None:
    """One rank's call is not that of the others."""
    is_first = dist.get_rank() == 0
    x = torch.zeros(1, 16, 4, 8)
    k = x.double() if is_first and difference == "dtype" else x
    if is_first and difference == "heads":
        k = x[:, :, :2]
    returned = {name: True for name in ("return_lse", "return_max_logits") if difference == name}
    ContextParallel(None, "ulysses").attend(x, k, k, **returned if is_first else {})


def attend_with_own_softcap(scheme: str = "ring", ulysses_size: int | None = None) -> None:
    whole = Whole.of(Case(scheme, dist.get_world_size()))
    parallel = ContextParallel(None, scheme, ulysses_size=ulysses_size)
    q, k, v = (parallel.shard(x[None]) for x in (whole.q, whole.k, whole.v))
    parallel.attend(q, k, v, softcap=float(dist.get_rank()))


def repeats(case: Case) -> None:
    whole, parallel = Whole.of(case), group_of(case)
    first, _ = sharded_results(case, parallel, whole)
    for _ in range(2):
        again, _ = sharded_results(case, parallel, whole)
        for name, x in first.items():
            assert torch.equal(x, again[name]), name


def in_a_graph(case: Case) -> None:
    """A captured forward and backward, replayed with other numbers."""
    whole, parallel = Whole.of(case), group_of(case)

    def cut(whole: Whole) -> list[Tensor]:
        return [parallel.shard(x[None]).contiguous() for x in (whole.q, whole.k, whole.v)]

    static = [x.requires_grad_() for x in cut(whole)]

    def step() -> tuple[Tensor, ...]:
        out = parallel.attend(*static, **case.options())
        return out.detach(), *torch.autograd.grad(out, static, torch.ones_like(out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # plans and communicators are made here
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            for x, y in zip(static, cut(Whole.of(replace(case, seed=seed))), strict=True):
                x.copy_(y)
        graph.replay()
        for x, y in zip(captured, step(), strict=True):
            assert torch.equal(x, y)


def round_trips() -> None:
    parallel = ContextParallel()
    x = torch.randn(2, 48, 3, generator=torch.Generator().manual_seed(1))
    mine = parallel.shard(x)
    assert mine.shape == (2, 48 // parallel.size, 3)
    assert torch.equal(parallel.unshard(mine), x)
    positions = torch.arange(48).expand(2, -1)
    assert torch.equal(parallel.shard(positions)[0], parallel.position_ids(48))

    plan = parallel.plan([0, 5, 5, 70, 131])
    packed = torch.randn(131, 3, generator=torch.Generator().manual_seed(2))
    mine = parallel.shard(packed, plan)
    assert mine.shape == (plan.rows, 3)
    assert torch.equal(parallel.unshard(mine, plan), packed)
    positions = torch.cat([torch.arange(n) for n in plan.lengths])
    assert torch.equal(parallel.shard(positions, plan), parallel.position_ids(plan=plan))


def trains_after_inference(scheme: str) -> None:
    """What validation in inference mode, or a call that makes fake tensors, has made serves
    training: gradients are those without.
    """

    def forward(parallel: ContextParallel) -> tuple[Tensor, Tensor]:
        plan = parallel.plan([0, 5, 48, 64])
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(64, 4 * 8, generator=generator, dtype=torch.float64)
        places = embedding(parallel.position_ids(64), weight.requires_grad_())
        x = (places + embedding(parallel.position_ids(plan=plan), weight)).unflatten(-1, (4, 8))
        out = parallel.attend(x[None], x[None], x[None], causal=True)
        return out + parallel.attend(x, x, x, plan, causal=True), weight

    gradients = []
    for first in (nullcontext(), torch.inference_mode(), FakeTensorMode()):
        parallel = ContextParallel(None, scheme)
        with first:  # ranks cannot agree on what is fake
            parallel.position_ids(64) if isinstance(first, FakeTensorMode) else forward(parallel)
        out, weight = forward(parallel)
        gradients += torch.autograd.grad(out.square().sum(), weight)
    assert all(torch.equal(gradients[0], x) for x in gradients[1:])


def chooses_by_what_travels() -> None:
    """Heads of one long sequence, keys of the few documents that are cut."""
    parallel = ContextParallel()
    assert parallel._scheme_of(Plan.zigzag([64], parallel.size), 4, 4) == "ulysses"
    assert parallel._scheme_of(Plan.zigzag([64], parallel.size), 32, 2) == "all_gather"
    assert parallel._scheme_of(parallel.plan([0, 10, 20, 30, 40]), 4, 4) == "all_gather"


def over_a_mesh() -> None:
    """A mesh of two dimensions, (ring, ulysses), is ulysses+ring, its ranks in any order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    case = Case("ulysses+ring", 4, lengths=(64,), batch=2)
    whole = Whole.of(case)
    permuted = ([[0, 2], [1, 3]], [[1, 0], [3, 2]], [[2, 3], [0, 1]])
    for of_two in (mesh, *(DeviceMesh("cpu", ranks) for ranks in permuted)):
        found, _ = sharded_results(case, ContextParallel(of_two), whole)
        for name, x in whole.results(case, None).items():
            torch.testing.assert_close(found[name], x)
    found, _ = sharded_results(
        replace(case, scheme="all_gather"),
        ContextParallel(mesh["ring"], "all_gather"),
        whole,
    )
    torch.testing.assert_close(found["dk"], whole.results(case, None)["dk"])


def over_a_permuted_mesh() -> None:
    """Ranks of one dimension are sorted; of two, rows in different orders could not be, which every
    rank refuses.
    """
    over_four = ContextParallel(DeviceMesh("cpu", [2, 0, 3, 1]))
    x = torch.arange(48).view(1, 48)
    assert torch.equal(over_four.unshard(over_four.shard(x)), x)
    for ranks in ([[0, 3], [2, 1]], [[0, 1], [3, 2]]):
        with pytest.raises(ValueError, match="group: a mesh of two dimensions must have"):
            ContextParallel(DeviceMesh("cpu", ranks))


def over_an_unsorted_group() -> None:
    group = dist.new_group([0, 3, 2, 1], sort_ranks=False)
    parallel = ContextParallel(group, "ring")
    x = torch.arange(48).view(1, 48)
    assert torch.equal(parallel.unshard(parallel.shard(x)), x)
    with pytest.raises(ValueError, match=r"group: ranks must ascend for .* got \[0, 3, 2, 1\]"):
        ContextParallel(group, "ulysses+ring", ulysses_size=2)


def under_a_checkpoint(dropout_p: float) -> None:
    """What is computed again has the same random numbers."""
    parallel = ContextParallel(None, "ring")
    whole = Whole.of(Case("ring", parallel.size, lengths=(128,)))
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(dist.get_rank())
        q, k, v = (parallel.shard(x[None]).requires_grad_() for x in (whole.q, whole.k, whole.v))

        def attend(*qkv: Tensor) -> Tensor:
            return parallel.attend(*qkv, causal=True, dropout_p=dropout_p)

        out = (
            checkpoint(attend, q, k, v, use_reentrant=False) if is_checkpointed else attend(q, k, v)
        )
        out.square().sum().backward()
        gradients.append((q.grad, k.grad, v.grad))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def refuses() -> None:
    size = dist.get_world_size()
    parallel = ContextParallel()
    x = torch.zeros(1, 16, 4, 8)
    packed = torch.zeros(12, 4, 8)
    plan = parallel.plan([0, 12 * size])
    with pytest.raises(ValueError, match=rf"seqlen: must be a multiple of {2 * size}, .* got 30"):
        parallel.shard(torch.zeros(1, 30, 4))
    with pytest.raises(ValueError, match="q: must have 4 dimensions without a plan"):
        parallel.attend(packed, packed, packed)
    with pytest.raises(ValueError, match="q: must have 3 dimensions with a plan"):
        parallel.attend(x, x, x, plan)
    with pytest.raises(ValueError, match="q: must have the plan's 12 rows of a shard, got 11"):
        parallel.attend(packed[:11], packed[:11], packed[:11], plan)
    with pytest.raises(ValueError, match=r"k: must have q's rows \(1, 16\), got \(1, 8\)"):
        parallel.attend(x, x[:, :8], x)
    with pytest.raises(ValueError, match="k: must have q's head_dim 8 and v's 4 heads"):
        parallel.attend(x, x[..., :4], x)
    with pytest.raises(ValueError, match=r"k: number of heads must divide that of q \(4\), got 3"):
        parallel.attend(x, x[:, :, :3], x[:, :, :3])
    with pytest.raises(TypeError, match=r"k: must have the dtype of q \(torch.float32\), got"):
        parallel.attend(x, x.double(), x)
    with pytest.raises(TypeError, match=r"v: must have the dtype of q \(torch.float32\), got"):
        parallel.attend(x, x, x.double())
    with pytest.raises(ValueError, match=f"plan: must be of {size} ranks, got one of 3"):
        parallel.attend(packed, packed, packed, Plan.balanced([36], 3, Band()))
    with pytest.raises(ValueError, match=r"dropout_p: must be 0 where .* multiples of 16"):
        parallel.attend(packed, packed, packed, parallel.plan([0, 5, 12 * size]), dropout_p=0.1)
    with pytest.raises(ValueError, match=r"cu_seqlens: must start at 0 .* got \[0, 4, 3\]"):
        parallel.plan([0, 4, 3])
    with pytest.raises(ValueError, match="multiple: must be positive, got 0"):
        parallel.plan([0, 4], multiple=0)
    with pytest.raises(ValueError, match=r"scheme: must be one of auto, ring, .* got 'star'"):
        ContextParallel(None, "star")
    with pytest.raises(ValueError, match=rf"ulysses_size: must divide the {size} ranks .* got 3"):
        ContextParallel(None, "ulysses+ring", ulysses_size=3)
    with pytest.raises(ValueError, match="ulysses_size: must be None unless"):
        ContextParallel(None, "ring", ulysses_size=2)
    with pytest.raises(ValueError, match="head_groups: must divide the 4 heads of keys, got 3"):
        ContextParallel(None, "all_gather", head_groups=3).attend(x, x, x)
    for groups in ([1, 2], [4, 0], [5, -1], []):
        with pytest.raises(ValueError, match=r"head_groups: must be positive and add up to the 4"):
            ContextParallel(None, "all_gather", head_groups=groups).attend(x, x, x)
    with pytest.raises(ValueError, match="head_groups: must be None unless scheme is 'auto' or"):
        ContextParallel(None, "ulysses", head_groups=2)
    with pytest.raises(ValueError, match="heads: ulysses over"):
        three = x[:, :, :3]
        ContextParallel(None, "ulysses").attend(three, three, three)
    with pytest.raises(ValueError, match="seqlen: must be given, or a plan, and not both"):
        parallel.position_ids()
