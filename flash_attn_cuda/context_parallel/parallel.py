"""ContextParallel: one sequence, or one batch of packed documents, over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..call.checks import check_numbers, check_sm_margin
from ..call.fields import OF_BACKWARD, TENSORS, AttentionCall, default_softmax_scale, options_of
from ..call.tensors import check_device_and_dtype
from ..call.window import UNLIMITED, WindowSize, window_bounds
from ..functions.arguments import cast_for_autocast, needs_padding, pad_head_dim
from ..functions.attend import may_be_differentiated
from ..functions.kept import are_tensors_fake, outside_transforms
from .attention import Work
from .derivatives import attend_in_context
from .exchange import number_in_graph, of_all_ranks
from .groups import compare_facts, groups_of, rank_of, size_of
from .head_exchange import Across, check_heads
from .load import HeadGroups, Heads, Load, even_groups
from .plan import (
    Band,
    Plan,
    equal_plan,
    hash_of,
    places_in_shards,
    plan_pads,
    rows_of_joined,
)
from .schedule import Schedule, Sight, gathering, order_on_device, ringing
from .transforms import dual_names, refuse_forward_mode

SCHEMES = ("auto", "ring", "all_gather", "ulysses", "ulysses+ring")
# Dynamo of torch 2.10 and 2.11 takes no objects in `prepare`, and that of 2.11 traces gradients of
# the ring that are wrong: there attend is a graph break.
IS_TRACED = torch.__version__ >= "2.14"  # a TorchVersion, which compares as versions do

_NUMBERS = tuple(name for name in OF_BACKWARD if name not in TENSORS)  # of an AttentionCall
MOST_KEPT = 256  # schedules, indices and agreements, of which packed batches each have their own


class ContextParallel:
    """Attention whose sequences lie on the ranks of a group, a part on each.

    Args:
        group: a ProcessGroup; a DeviceMesh of one dimension, or of two, (ring, ulysses); None for
            all ranks.
        scheme: how keys and queries meet:
            "all_gather": every rank gets the keys that it sees (Llama 3, Dubey et al., 2024,
            section 3.3.2), and each query meets its keys in one call;
            "ring": the keys of one rank after the other (Liu et al., "Ring Attention", 2023), of
            which each rank holds one share at a time;
            "ulysses": every rank gets all rows of some heads (Jacobs et al., "DeepSpeed Ulysses",
            2023), of which there must be a multiple of the ranks;
            "ulysses+ring": ulysses in groups of ulysses_size neighbouring ranks, a ring over them;
            "auto": of all_gather and ulysses the one that moves fewer bytes, by the heads and by
            what of the plan's documents is cut.
        ulysses_size: for "ulysses+ring" of a group that is no mesh of two dimensions. It makes new
            groups. By NCCL after init_process_group(device_id=...) all ranks of the world make them
            together, and a part of the world would wait for the others: it takes two dimensions of
            a mesh that all ranks have made, mesh["ring", "ulysses"].
        head_groups: of all_gather, into how many equal groups the heads of keys are split for their
            way, or how many heads each group has; all are asked for at once, and each is worked on
            as it comes. None: chosen by the length, for either pass. "auto" heeds it where it takes
            all_gather.
        sm_margin: multiprocessors that attention kernels on Hopper leave free for transfers, which
            otherwise may have to wait until a kernel that began earlier ends.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        scheme: str = "auto",
        *,
        ulysses_size: int | None = None,
        head_groups: int | Sequence[int] | None = None,
        sm_margin: int = 0,
    ) -> None:
        check_sm_margin(sm_margin)
        if scheme not in SCHEMES:
            raise ValueError(f"scheme: must be one of {', '.join(SCHEMES)}, got {scheme!r}")
        if scheme != "ulysses+ring" and ulysses_size is not None:
            raise ValueError(
                f"ulysses_size: must be None unless scheme is 'ulysses+ring', got {ulysses_size}"
            )
        if scheme not in ("auto", "all_gather") and head_groups is not None:
            raise ValueError(
                f"head_groups: must be None unless scheme is 'auto' or 'all_gather', got "
                f"{head_groups}"
            )
        self.scheme = scheme
        self.head_groups = head_groups
        self.sm_margin = sm_margin
        self._ring, self._ulysses = groups_of(group, scheme, ulysses_size)
        self.size = size_of(self._ring) * size_of(self._ulysses)
        self.rank = rank_of(self._ring) * size_of(self._ulysses) + rank_of(self._ulysses)
        self._prepared: dict[Any, Any] = {}
        self._captured: dict[Any, Any] = {}
        self._agreed: dict[Any, None] = {}

    # -- shards ------------------------------------------------------------------------------------

    def plan(
        self,
        cu_seqlens: Tensor | Sequence[int],
        *,
        causal: bool = True,
        window_size: WindowSize = UNLIMITED,
        multiple: int = 1,
    ) -> Plan:
        """Which rank has which rows of a packed batch, (total, ...), of documents: by scheme
        "ulysses" as many of them in order, by others so that each has as many visible pairs.

        Args:
            cu_seqlens: (documents + 1,) integers of the whole batch, the same on every rank. A
                tensor on a GPU is waited for: give one on the CPU, or a list.
            causal: with window_size, of the attention to come, whose visible pairs are shared out.
            multiple: of tokens, where a document may be cut; 16 for dropout.
        """
        bounds = [int(x) for x in cu_seqlens]
        lengths = [end - begin for begin, end in pairwise(bounds)]
        if not bounds or bounds[0] != 0 or any(x < 0 for x in lengths):
            raise ValueError(
                f"cu_seqlens: must start at 0 and not decrease, got {bounds[:8]}"
                f"{', ...' if len(bounds) > 8 else ''}"
            )
        if multiple < 1:
            raise ValueError(f"multiple: must be positive, got {multiple}")
        if self.scheme == "ulysses":
            return Plan.in_order(lengths, self.size, multiple=multiple)
        band = Band.of(causal, window_bounds(window_size))
        return Plan.balanced(lengths, self.size, band, multiple=multiple)

    def shard(self, x: Tensor, plan: Plan | None = None, dim: int | None = None) -> Tensor:
        """This rank's rows of x: of (batch, seqlen, ...) along dim 1, of a packed (total, ...)
        with its plan along dim 0. Padding of a plan is zero.
        """
        if plan is None:
            dim = 1 if dim is None else dim
            plan = self._plan_of_length(x.shape[dim])
        dim = 0 if dim is None else dim
        if x.shape[dim] != plan.total:
            raise ValueError(
                f"x: must have the plan's {plan.total} rows in dimension {dim}, got {x.shape[dim]}"
            )
        rows = self._index((plan, "rows"), x.device, lambda: plan.rows_of(self.rank))
        taken = x.index_select(dim, rows.clamp(min=0))
        shape = [1] * x.dim()
        shape[dim] = -1
        return taken.masked_fill((rows < 0).view(shape), 0) if plan_pads(plan) else taken

    def unshard(self, x: Tensor, plan: Plan | None = None, dim: int | None = None) -> Tensor:
        """The whole of what every rank has a shard of, on every rank; without gradients."""
        if plan is None:
            dim = 1 if dim is None else dim
            plan = self._plan_of_length(x.shape[dim] * self.size)
        dim = 0 if dim is None else dim
        if x.shape[dim] != plan.rows:
            raise ValueError(
                f"x: must have the {plan.rows} rows of a shard in dimension {dim}, "
                f"got {x.shape[dim]}"
            )
        rows = x.detach().movedim(dim, 0).contiguous()
        for group in (self._ulysses, self._ring):
            if group is not None:
                rows = of_all_ranks(rows, group)
        places = self._index((plan, "places"), x.device, lambda: places_in_shards(plan))
        return rows.index_select(0, places).movedim(0, dim)

    def position_ids(
        self, seqlen: int | None = None, plan: Plan | None = None, device: Any = None
    ) -> Tensor:
        """(rows,) int64: of each row of this rank the place in its sequence, for rotary embeddings;
        of sequences of one length, seqlen in all, or of a plan.
        """
        if (seqlen is None) == (plan is None):
            raise ValueError("seqlen: must be given, or a plan, and not both")
        found = self._plan_of_length(int(seqlen or 0)) if plan is None else plan
        where = torch.device("cpu" if device is None else device)
        return self._index((found, "positions"), where, lambda: found.positions_of(self.rank))

    # -- attention ---------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan | None = None,
        *,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        sink: Tensor | None = None,
        return_lse: bool = False,
        keep_rounding: bool = True,
        return_max_logits: bool = False,
    ) -> Any:
        """flash_attn_func, or with a plan flash_attn_varlen_func, of this rank's shards.

        Differentiable, once, in q, k, v and sink, whose gradient is that of this rank's rows: in
        reverse mode, and by all_gather and ulysses in forward mode, where tangents are those of
        this rank's rows. Options have to be the same on every rank, return_max_logits and with
        ulysses return_lse among them, which is asked once of each plan and set of options; and so
        has whether there are tangents.

        Args:
            q: (batch, seqlen / ranks, heads_q, head_dim), as shard cuts it; with a plan (rows,
                heads_q, head_dim).
            k, v: likewise, with heads_k that divides heads_q.
            alibi_slopes: (heads_q,) or (sequences, heads_q).
            keep_rounding, return_max_logits: as flash_attn_func's.

        Returns:
            out as q, or (out[, softmax_lse][, max_logits]), softmax_lse of return_lse (batch,
            heads_q, seqlen / ranks), packed (heads_q, rows). Padding rows of a plan have out 0 and
            softmax_lse -inf. max_logits (batch, heads_q), packed (sequences, heads_q), of the rows
            of all ranks, is the same on each and has no gradient.

        Raises:
            TypeError: an argument is a DTensor, or not of the type or dtype required.
            ValueError: shapes, devices or numbers do not fit, or differ between the ranks.
            NotImplementedError: a second derivative is asked for, or a forward-mode one of a ring.
        """
        check_shapes(q, k, v, plan, self.size)
        settings = options_of(
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
        )
        q, k, v = cast_for_autocast(q, k, v)
        # Of columns unpadded.
        settings.setdefault("softmax_scale", default_softmax_scale(index(q.shape[-1])))
        check_numbers(AttentionCall(q, k, v, **settings))
        left, right = window_bounds(window_size)
        batch_and_rows = None if plan is not None else (index(q.shape[0]), index(q.shape[1]))
        prepared = prepare(
            self,
            plan,
            batch_and_rows,
            (index(q.shape[-2]), index(k.shape[-2]), index(k.shape[-1]) + index(v.shape[-1])),
            k.dtype,
            q.device,
            (settings.pop("causal"), left, right),
            settings.get("dropout_p", 0.0),
            alibi_slopes is not None,
        )
        band = prepared.sight.band
        settings["window_size_left"] = -1 if band.left is None else band.left
        settings["window_size_right"] = -1 if band.right is None else band.right
        if batch_and_rows is not None:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        settings["return_max_logits"] = bool(return_max_logits)
        call = AttentionCall(q, k, v, sink=sink, **settings)
        dual = dual_names(q=q, k=k, v=v, sink=sink)
        self._agree(prepared, call, return_lse, forward_mode=bool(dual))
        if prepared.schedule.merges:
            refuse_forward_mode(prepared.scheme, dual)
        for name, x in (("k", k), ("v", v)):
            check_device_and_dtype(name, x, q)
        keeps = keep_rounding and may_be_differentiated(call)
        found = self._attend_packed(q, k, v, sink, prepared, settings, return_lse, keeps)
        out, softmax_lse, max_logits = found
        if batch_and_rows is not None:
            out = out.unflatten(0, batch_and_rows)
            if softmax_lse is not None:
                softmax_lse = softmax_lse.unflatten(1, batch_and_rows).transpose(0, 1)
        results = tuple(x for x in (out, softmax_lse, max_logits) if x is not None)
        return out if len(results) == 1 else results

    if not IS_TRACED:
        attend = torch.compiler.disable(attend)

    def _attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        prepared: Prepared,
        settings: dict[str, Any],
        return_lse: bool,
        keeps_rounding: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(out, softmax_lse) of this rank's rows and max_logits, None for what is not returned."""
        columns = v.shape[-1]
        if q.is_cuda and needs_padding(q, v):
            q, k, v = (pad_head_dim(x) for x in (q, k, v))
        across = prepared.across
        if across is not None:
            check_heads(q.shape[1], k.shape[1], across.ranks)
            repeats = max(1, across.ranks // k.shape[1])
            if repeats > 1:
                k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        settings["sm_margin"] = self.sm_margin
        sequences = len(prepared.plan.lengths) if settings.pop("return_max_logits") else None
        slopes = settings.pop("alibi_slopes", None)
        rng_state = self._draw(q) if prepared.sight.has_dropout else None
        work = Work(
            prepared.scheme,
            prepared.schedule,
            settings,
            self._groups_for(prepared.scheme)[1],
            prepared.head_groups,
            across=across,
            returns_lse=return_lse,
            sequences=sequences,
            number=number_in_graph() if is_compiling() else 0,
            keeps_rounding=keeps_rounding,
        )
        found = attend_in_context(q, k, v, sink, slopes, rng_state, work)
        return found[0][..., :columns], *found[1:]

    def _scheme_of(self, plan: Plan, heads_q: int, heads_k: int) -> str:
        if self.scheme != "auto":
            return self.scheme
        if self._ulysses is not None:
            return "ulysses+ring"
        ranks = self.size
        # Rows of a rank's keys, times heads, that all_gather brings it; and ulysses, which moves
        # all but one share of queries, keys, values and results.
        gathered = plan.travelling / ranks * heads_k
        moved = plan.rows * (heads_q + heads_k) * (ranks - 1) / ranks
        divides = heads_q % ranks == 0 and (heads_k % ranks == 0 or ranks % heads_k == 0)
        return "ulysses" if moved < gathered and divides else "all_gather"

    def _groups_for(self, scheme: str) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """(the group that ulysses is over, the group that keys travel in)."""
        if scheme == "ulysses":
            return self._ring, None
        return (self._ulysses if scheme == "ulysses+ring" else None), self._ring

    def _schedule(
        self, plan: Plan, scheme: str, heads: int, sight: Sight, device: torch.device
    ) -> Schedule:
        """Of the group that keys travel in, whose ranks `plan` is of."""
        make = ringing if scheme in ("ring", "ulysses+ring") else gathering
        rank = 0 if len(plan.ranks) == 1 else rank_of(self._ring)
        key = (plan, make.__name__, heads, sight, device)
        return self._once(key, lambda: make(plan, rank, heads, sight, device))

    def _head_groups(
        self, plan: Plan, band: Band, schedule: Schedule, heads: Heads
    ) -> tuple[HeadGroups, HeadGroups]:
        """Of the forward and of the backward."""
        if schedule.merges or all(hop.exchange is None for hop in schedule.hops):
            return (heads.k,), (heads.k,)
        if self.head_groups is None:
            load = Load.of(plan, band)
            return load.head_groups(heads, backward=False), load.head_groups(heads, backward=True)
        groups = self._given_head_groups(heads.k)
        return groups, groups

    def _given_head_groups(self, heads_k: int) -> HeadGroups:
        if isinstance(self.head_groups, Sequence):
            groups = tuple(index(x) for x in self.head_groups)
            if min(groups, default=0) < 1 or sum(groups) != heads_k:
                raise ValueError(
                    f"head_groups: must be positive and add up to the {heads_k} heads of keys, got "
                    f"{list(groups)}"
                )
            return groups
        assert self.head_groups is not None
        count = index(self.head_groups)
        if count < 1 or heads_k % count:
            raise ValueError(f"head_groups: must divide the {heads_k} heads of keys, got {count}")
        return even_groups(heads_k, count)

    def _draw(self, q: Tensor) -> Tensor:
        """(seed, offset) of the first rank."""

        def draw() -> Tensor:
            state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
            for group in (self._ring, self._ulysses):
                if group is not None:
                    state = of_all_ranks(state, group)[:2]
            return state

        return outside_transforms(draw)

    def _across(self, plan: Plan, inside: Plan, scheme: str, device: torch.device) -> Across | None:
        """How ulysses gets from the plan to the joined one, `inside`."""
        group, ring = self._groups_for(scheme)
        if group is None:
            return None
        orders = rows_of_joined(plan, inside, 0 if ring is None else rank_of(ring))
        order, places = (order_on_device(x, device) for x in orders)
        return Across(group, size_of(group), order, places)

    # -- what is made once -------------------------------------------------------------------------

    def _once(self, key: Any, make: Any) -> Any:
        if are_tensors_fake():
            return make()
        if key not in self._prepared:
            with torch.inference_mode(False):  # training may use what validation has made
                keep(self._prepared, key, outside_transforms(make))
        if is_captured():  # a graph reads it for as long as it lives
            self._captured[key] = self._prepared[key]
        return self._prepared[key]

    def _prepare(self, plan: Plan, heads: Heads, sight: Sight, device: torch.device) -> Prepared:
        def make() -> Prepared:
            scheme = self._scheme_of(plan, heads.q, heads.k)
            group, _ = self._groups_for(scheme)
            inside = plan if group is None else plan.joined(size_of(group))
            schedule = self._schedule(inside, scheme, heads.q, sight, device)
            return Prepared(
                plan,
                sight,
                scheme,
                schedule,
                self._head_groups(inside, sight.band, schedule, heads),
                self._across(plan, inside, scheme, device),
            )

        return self._once((plan, "prepared", heads, sight, device), make)

    def _index(self, key: Any, device: torch.device, rows: Any) -> Tensor:
        def make() -> Tensor:
            return torch.tensor(rows(), dtype=torch.int64, device=device)

        return self._once((key, device), make)

    def _plan_of_length(self, seqlen: int) -> Plan:
        return self._once((seqlen, "zigzag"), lambda: equal_plan((seqlen,), self.size))

    def _plan_of_batch(self, batch: int, rows: int) -> Plan:
        lengths = (rows * self.size,) * batch
        return self._once((batch, rows, "zigzag"), lambda: equal_plan(lengths, self.size))

    def _agree(
        self, prepared: Prepared, call: AttentionCall, return_lse: bool, *, forward_mode: bool
    ) -> None:
        """Raises on every rank if they do not call with the same plan, options, shapes and dtypes;
        asks the others once of each. A rank that has agreed on its own combination before asks
        nobody, and no difference is found.
        """
        if (
            self.size == 1
            or is_compiling()
            or (call.q.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return
        numbers = {name: getattr(call, name) for name in _NUMBERS}
        tensors = {"q": call.q, "k": call.k, "v": call.v}
        shapes = tuple((tuple(x.shape), x.dtype) for x in tensors.values())
        exchanges_lse = return_lse and prepared.across is not None
        plan, sight, has_sink = prepared.plan, prepared.sight, call.sink is not None
        key = (plan, sight, *numbers.values(), shapes, has_sink, exchanges_lse, forward_mode)
        if key in self._agreed:
            return
        facts = {
            "plan": str(hash_of(plan)),
            "band": str(sight.band),
            **{name: str(value) for name, value in numbers.items()},
            "has_alibi": str(sight.has_alibi),
            **{name: f"{tuple(x.shape)} {x.dtype}" for name, x in tensors.items()},
            "sink": "a tensor" if has_sink else "None",
            "return_lse": str(exchanges_lse),
            "forward-mode gradients": "some" if forward_mode else "none",
            "scheme": prepared.scheme,
            "head_groups": str(prepared.head_groups),
        }
        outside_transforms(lambda: compare_facts(facts, self._ring, self._ulysses))
        keep(self._agreed, key, None)


def is_captured() -> bool:
    """Whether kernels of this thread become part of a CUDA graph."""
    return (
        not is_compiling()
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """The oldest gives way; in the same order on every rank, as calls are."""
    while len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value


# -- what is made before a call --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """What of an attention follows from its plan and options."""

    plan: Plan
    sight: Sight
    scheme: str
    schedule: Schedule
    head_groups: tuple[HeadGroups, HeadGroups]
    across: Across | None


@torch.compiler.assume_constant_result
def prepare(
    parallel: ContextParallel,
    plan: Plan | None,
    batch_and_rows: tuple[int, int] | None,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    mask: tuple[bool, int, int],
    dropout_p: float,
    has_alibi: bool,
) -> Prepared:
    """Under torch.compile this runs once for a graph, and what it returns is a constant there: the
    graph has the collectives and the calls of one plan, and the index tensors of its schedule. Its
    arguments are constants there too, sizes by operator.index: other ones are another graph.

    Args:
        batch_and_rows: of sequences of one length, in place of a plan: how many, and rows of each
            on a rank.
        heads: Heads without the size of an item, which dtype gives.
        mask: causal, and how far a query sees to its left and right.
    """
    if plan is None:
        assert batch_and_rows is not None
        plan = parallel._plan_of_batch(*batch_and_rows)
    causal, left, right = mask
    sight = Sight(Band.of(causal, (left, right)), dropout_p > 0.0, has_alibi)
    if sight.has_dropout and plan.multiple < 16:
        raise ValueError(
            "dropout_p: must be 0 where sequences are not cut at multiples of 16 "
            f"(plan(..., multiple=16) cuts there), got {dropout_p}"
        )
    return parallel._prepare(plan, Heads(*heads, dtype.itemsize), sight, device)


# -- arguments -------------------------------------------------------------------------------------


def check_shapes(q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, ranks: int) -> None:
    dims = 4 if plan is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, DTensor):
            raise TypeError(f"{name}: must be a plain tensor, got a DTensor (to_local() of it)")
        if x.dim() != dims:
            kind = "without a plan" if plan is None else "with a plan"
            raise ValueError(f"{name}: must have {dims} dimensions {kind}, got {tuple(x.shape)}")
        if x.shape[: dims - 2] != q.shape[: dims - 2]:
            raise ValueError(
                f"{name}: must have q's rows {tuple(q.shape[: dims - 2])}, "
                f"got {tuple(x.shape[: dims - 2])}"
            )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k: must have q's head_dim {q.shape[-1]} and v's {v.shape[-2]} heads, "
            f"got {tuple(k.shape)}"
        )
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"k: number of heads must divide that of q ({q.shape[-2]}), got {k.shape[-2]}"
        )
    if plan is None:
        return
    if len(plan.ranks) != ranks:
        raise ValueError(f"plan: must be of {ranks} ranks, got one of {len(plan.ranks)}")
    if q.shape[0] != plan.rows:
        raise ValueError(f"q: must have the plan's {plan.rows} rows of a shard, got {q.shape[0]}")
