"""What each rank does in one attention over a group, as programs of events.py.

Rows that travel and pairs that are computed come from the package's plans and steps; the order of
calls and transfers, and the copies between them, follow context_parallel/attention.py, exchange.py,
head_exchange.py and ulysses.py line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from benchmarks.context_parallel.events import Program, Start, Times, Wait, Work, simulate
from flash_attn_cuda.context_parallel import Band, Plan, steps
from flash_attn_cuda.context_parallel.load import HeadGroups, Load
from flash_attn_cuda.context_parallel.load import Heads as KeyHeads
from flash_attn_cuda.context_parallel.plan import equal_plan, sum_below

SCHEMES = ("all_gather", "ring", "ulysses", "ulysses+ring")
PASSES = ("forward", "backward")
CAUSAL = Band(None, 0)
ELEMENT, FP32 = 2, 4  # bytes of q, k, v and their gradients; of results of parts


@dataclass(frozen=True)
class Constants:
    """Of a machine. Rates and nvlink_gbps were measured on two H100s, causal, head_dim 128, 64k
    tokens, at commit 761dbe6; the others are assumed.
    """

    forward_tflops: float = 685.0  # of visible pairs
    backward_tflops: float = 550.0
    launch_us: float = 3.0  # the least that a kernel takes on the device
    part_us: float = 0.5  # of a packed call, for each of its sequences
    sms: int = 132
    tile_rows: int = 128  # of queries in the forward, of keys in the backward: one SM's work
    memory_gbps: float = 2500.0  # read and written by copies
    nvlink_gbps: float = 305.0  # of a GPU in each direction
    nvlink_us: float = 15.0  # a transfer's least time
    infiniband_gbps: float = 50.0
    infiniband_us: float = 25.0
    peer_us: float = 1.0  # each further rank that a transfer is with
    gpus_per_node: int = 8
    slowdown: float = 0.1  # of kernels while a transfer runs, whose kernel takes SMs

    def attention_rate(self, which: str) -> float:
        """Operations per second."""
        return 1e12 * (self.forward_tflops if which == "forward" else self.backward_tflops)

    def transfer_seconds(self, rank: int, sent: dict[int, int], received: dict[int, int]) -> float:
        """Of bytes to and from each rank; links carry both ways at once, and NVLink and InfiniBand
        at once.
        """
        peers = {peer for side in (sent, received) for peer in side if peer != rank}
        if not peers:
            return 0.0
        slowest = 0.0
        for side in (sent, received):
            travels = {peer: x for peer, x in side.items() if peer != rank}
            inside = sum(x for peer, x in travels.items() if self._is_near(rank, peer))
            outside = sum(travels.values()) - inside
            slowest = max(slowest, inside / self.nvlink_gbps, outside / self.infiniband_gbps)
        leaves = any(not self._is_near(rank, peer) for peer in peers)
        latency = (self.infiniband_us if leaves else self.nvlink_us) * 1e-6
        return latency + self.peer_us * 1e-6 * (len(peers) - 1) + slowest * 1e-9

    def _is_near(self, rank: int, peer: int) -> bool:
        return rank // self.gpus_per_node == peer // self.gpus_per_node


@dataclass(frozen=True)
class Heads:
    q: int = 32
    k: int = 8
    dim: int = 128


def operations_of_pair(heads: Heads, which: str) -> float:
    """Of two products in the forward, of five in the backward."""
    return 4.0 * heads.q * heads.dim * (1.0 if which == "forward" else 2.5)


def visible_pairs(part: steps.Part, band: Band) -> int:
    queries = range(part.first_q, part.first_q + steps.length(part.q))
    keys = (part.first_k, part.first_k + steps.length(part.k))
    if not part.is_masked:
        return len(queries) * steps.length(part.k)
    end, begin = len(queries) * keys[1], len(queries) * keys[0]
    if band.right is not None:
        end = sum_clamped(queries.start + band.right + 1, queries.stop + band.right + 1, *keys)
    if band.left is not None:
        begin = sum_clamped(queries.start - band.left, queries.stop - band.left, *keys)
    return end - begin


def sum_clamped(first: int, end: int, low: int, high: int) -> int:
    """Of x from first up to end - 1, each at least low and at most high."""
    below, above = max(first, min(end, low)), min(end, max(first, high))
    return (below - first) * low + sum_below(below, above) + (end - above) * high


class Exchanges:
    """Rows that travel under a plan, each pair of ranks asked once."""

    def __init__(self, plan: Plan, band: Band) -> None:
        self.plan, self.band = plan, band
        self._held: dict[tuple[int, int, bool], list[steps.Held]] = {}
        self._rows: dict[tuple[int, int, bool], int] = {}
        self._calls: dict[tuple[int, int], list[list[steps.Part]]] = {}

    def held(self, source: int, rank: int, *, cut_alone: bool = False) -> list[steps.Held]:
        key = (source, rank, cut_alone)
        if key not in self._held:
            self._held[key] = steps.wanted_of(
                self.plan, source, rank, self.band, cut_alone=cut_alone
            )
        return self._held[key]

    def rows(self, source: int, rank: int, *, cut_alone: bool = False) -> int:
        key = (source, rank, cut_alone)
        if key not in self._rows:
            held = self.held(source, rank, cut_alone=cut_alone)
            self._rows[key] = sum(len(x.piece) for x in held)
        return self._rows[key]

    def hop_calls(self, source: int, rank: int) -> list[list[steps.Part]]:
        key = (source, rank)
        if key not in self._calls:
            keys = [steps.Held(*x) for x in self.plan.placed(rank)]
            if source != rank:
                keys = steps.in_order(self.held(source, rank))
            parts = steps.hop_parts(self.plan, rank, self.band, keys)
            self._calls[key] = steps.calls_of(parts, keeps_places=False)
        return self._calls[key]

    @cached_property
    def distances(self) -> list[int]:
        """Of the hops that somebody needs."""
        ranks = range(1, len(self.plan.ranks))
        return [x for x in ranks if not steps.is_hop_empty(self.plan, x, self.band)]


@dataclass(frozen=True)
class Problem:
    """Sequences over a group of ranks, which are of one length or documents."""

    lengths: tuple[int, ...]
    ranks: int
    documents: bool = False
    heads: Heads = Heads()
    band: Band = CAUSAL

    @cached_property
    def plan(self) -> Plan:
        if self.documents:
            return Plan.balanced(self.lengths, self.ranks, self.band)
        return equal_plan(self.lengths, self.ranks)

    def rows_of(self, scheme: str) -> int:
        """Of a shard."""
        if self.documents and scheme == "ulysses":
            return -(-sum(self.lengths) // self.ranks)
        return self.plan.rows

    @cached_property
    def pairs(self) -> int:
        return sum(self.band.pairs(0, x, x) for x in self.lengths)

    def exchanges(self, ulysses_size: int) -> Exchanges:
        """Between the groups of so many ranks."""
        if ulysses_size not in self._exchanges:
            plan = self.plan if ulysses_size == 1 else self.plan.joined(ulysses_size)
            self._exchanges[ulysses_size] = Exchanges(plan, self.band)
        return self._exchanges[ulysses_size]

    @cached_property
    def _exchanges(self) -> dict[int, Exchanges]:
        return {}

    def share_seconds(self, constants: Constants, which: str) -> float:
        """One rank's share of the pairs at the full rate."""
        operations = self.pairs * operations_of_pair(self.heads, which) / self.ranks
        return operations / constants.attention_rate(which)

    def takes_ulysses(self, ranks: int) -> bool:
        heads = self.heads
        return heads.q % ranks == 0 and (heads.k % ranks == 0 or ranks % heads.k == 0)

    def ulysses_size(self, scheme: str, constants: Constants) -> int:
        """1: no ulysses. ulysses+ring has it within a node."""
        if scheme == "ulysses":
            return self.ranks
        if scheme == "ulysses+ring":
            sizes = range(1, min(self.ranks, constants.gpus_per_node) + 1)
            return max(x for x in sizes if self.ranks % x == 0 and self.takes_ulysses(x))
        return 1


@dataclass
class Builder:
    """The program of one rank, and what it adds up to."""

    constants: Constants
    which: str
    rank: int
    folded: bool  # peers are taken to come to a transfer when this rank does
    program: list[Work | Start | Wait] = field(default_factory=list)
    sent: int = 0  # bytes
    received: int = 0
    pairs: int = 0  # times heads of queries
    transfers: int = 0

    def copy(self, accessed: float, kernels: int = 1) -> None:
        """Kernels that read and write so many bytes together."""
        c = self.constants
        seconds = max(c.launch_us * 1e-6 * kernels, accessed / c.memory_gbps * 1e-9)
        self.program.append(Work(seconds, False))

    def attention(self, call: Sequence[steps.Part], heads: Heads, band: Band) -> None:
        c = self.constants
        pairs = sum(visible_pairs(part, band) for part in call)
        operations = operations_of_pair(heads, self.which)
        per_second = c.attention_rate(self.which)
        by_q = ((steps.length(x.q), steps.length(x.k)) for x in call)
        tiles = (x if self.which == "forward" else x[::-1] for x in by_q)
        longest = max(min(c.tile_rows, rows) * met for rows, met in tiles) / heads.q
        seconds = max(pairs, longest * c.sms) * operations / per_second
        fixed = (c.launch_us + c.part_us * len(call)) * 1e-6
        self.program.append(Work(seconds + fixed, True))
        self.pairs += pairs * heads.q

    def start(self, sent: dict[int, int], received: dict[int, int]) -> int:
        seconds = self.constants.transfer_seconds(self.rank, sent, received)
        peers = frozenset(x for side in (sent, received) for x in side if x != self.rank)
        self.transfers += 1
        peers = frozenset() if self.folded else peers
        self.program.append(Start(self.transfers, seconds, peers))
        self.sent += sum(x for peer, x in sent.items() if peer != self.rank)
        self.received += sum(x for peer, x in received.items() if peer != self.rank)
        return self.transfers

    def wait(self, number: int | None) -> None:
        if number is not None:
            self.program.append(Wait(number))


@dataclass(frozen=True)
class Inner:
    """Attention in the group that keys travel in: ring_rank of `plan`, whose ranks in the whole are
    ring_rank * stride + offset.
    """

    builder: Builder
    exchanges: Exchanges
    heads: Heads
    ring_rank: int
    stride: int
    offset: int

    def bytes_of(self, rows: dict[int, int], of_row: int) -> dict[int, int]:
        return {
            self.global_rank(rank): count * of_row
            for rank, count in rows.items()
            if count > 0
        }  # fmt: skip

    def global_rank(self, rank: int) -> int:
        return rank * self.stride + self.offset

    @property
    def ranks(self) -> int:
        return len(self.exchanges.plan.ranks)

    @property
    def rows(self) -> int:
        return self.exchanges.plan.rows

    @property
    def is_forward(self) -> bool:
        return self.builder.which == "forward"

    def of_queries(self, rows: int, size: int, heads: Heads | None = None) -> int:
        heads = heads or self.heads
        return rows * heads.q * heads.dim * size

    def of_keys(self, rows: int, size: int, heads: Heads | None = None) -> int:
        """Bytes of keys and values together."""
        heads = heads or self.heads
        return rows * heads.k * 2 * heads.dim * size

    def attend(self, scheme: str) -> None:
        if scheme in ("ring", "ulysses+ring"):
            self.merged()
        else:
            self.gathered()

    def finish_gradients(self) -> None:
        """Sums in fp32 to the dtype of q, k and v."""
        self.builder.copy(self.of_keys(self.rows, FP32 + ELEMENT), 2)

    # -- all at once -------------------------------------------------------------------------------

    def gathered(self) -> None:
        ex, me, add = self.exchanges, self.ring_rank, self.builder
        everyone = range(self.ranks)
        sent = {x: ex.rows(me, x, cut_alone=True) for x in everyone}
        received = {x: ex.rows(x, me, cut_alone=True) for x in everyone}
        arrived = [x for source in everyone for x in ex.held(source, me, cut_alone=True)]
        reorders = any(x.piece > y.piece for x, y in pairwise(arrived))
        own = steps.without_gaps(steps.whole_parts(ex.plan, me, ex.band))
        parts = steps.gathered_parts(ex.plan, me, ex.band, keeps_places=False)
        places = parts[-1].k[1] if parts else 0  # of keys, those that several parts see as often
        calls = steps.without_gaps(parts)
        cut_rows = sum(steps.length(part.q) for part in parts)
        count = sum(received.values())
        reorders = reorders or places > count
        groups = [self.heads_of(x) for x in self.head_groups()] if ex.plan.travelling else []

        def ask(heads: Heads) -> int:
            add.copy(2 * self.of_keys(sum(sent.values()), ELEMENT, heads), 2)
            row = self.of_keys(1, ELEMENT, heads)
            return add.start(self.bytes_of(sent, row), self.bytes_of(received, row))

        def attend(calls: Sequence[Sequence[steps.Part]], heads: Heads) -> None:
            for call in calls:
                add.attention(call, heads, ex.band)
                if not self.is_forward and calls is not own:
                    q_rows = steps.length((call[0].q[0], call[-1].q[1]))
                    add.copy(self.of_queries(q_rows, FP32 + ELEMENT, heads))

        going: list[tuple[int, Heads]] = []
        coming = [(ask(heads), heads) for heads in groups]
        if self.is_forward:
            attend(own, self.heads)
        for here, heads in coming:
            add.wait(here)
            if reorders:
                add.copy(2 * self.of_keys(places, ELEMENT, heads))
            attend(calls, heads)
            if self.is_forward:
                continue
            if reorders:
                add.copy(2 * self.of_keys(count, FP32, heads))
            if places > count:
                add.copy(3 * self.of_keys(places - count, FP32, heads))
            row = self.of_keys(1, FP32, heads)
            back = add.start(self.bytes_of(received, row), self.bytes_of(sent, row))
            going.append((back, heads))
        if not self.is_forward and own:
            attend(own, self.heads)
        if going:
            add.copy(self.of_keys(cut_rows, FP32))  # zeros
        for number, heads in going:
            add.wait(number)
            add.copy(3 * self.of_keys(sum(sent.values()), FP32, heads), self.ranks)
        if going:  # sums in fp32 to the dtype of k and v
            add.copy(self.of_keys(cut_rows, FP32 + ELEMENT), 2)

    def heads_of(self, heads_k: int) -> Heads:
        """So many heads of keys, and the queries that share them."""
        return Heads(self.heads.q // self.heads.k * heads_k, heads_k, self.heads.dim)

    def head_groups(self) -> HeadGroups:
        """As ContextParallel chooses them."""
        load = Load.of(self.exchanges.plan, self.exchanges.band)
        heads = KeyHeads(self.heads.q, self.heads.k, 2 * self.heads.dim, ELEMENT)
        return load.head_groups(heads, backward=not self.is_forward)

    # -- hop by hop --------------------------------------------------------------------------------

    def is_whole(self, calls: Sequence[Sequence[steps.Part]]) -> bool:
        """Whether the first call is of all rows."""
        every = (0, self.rows)
        places = [((x[0].q[0], x[-1].q[1]), (x[0].k[0], x[-1].k[1])) for x in calls[:1]]
        return places == [(every, every)]

    def merged(self) -> None:
        ex, me, add = self.exchanges, self.ring_rank, self.builder
        row = self.of_keys(1, ELEMENT)
        hops = [0, *ex.distances]

        def ends(distance: int) -> tuple[int, int]:
            """(the source, the target)."""
            return (me - distance) % self.ranks, (me + distance) % self.ranks

        def ask(distance: int) -> int | None:
            if distance == 0:
                return None
            source, target = ends(distance)
            sent, received = ex.rows(me, target), ex.rows(source, me)
            add.copy(2 * self.of_keys(sent, ELEMENT))
            return add.start(
                self.bytes_of({target: sent}, row), self.bytes_of({source: received}, row)
            )

        going = []
        is_first = True
        # Of the backward's work on the rank's own keys, done before and after the others'.
        shares = 2 if len(hops) > 1 and self.heads.k % 2 == 0 and not self.is_forward else 1
        half = Heads(self.heads.q // shares, self.heads.k // shares, self.heads.dim)
        coming = ask(hops[0])
        for number, distance in enumerate(hops):
            here = coming
            if number + 1 < len(hops):
                coming = ask(hops[number + 1])
            add.wait(here)
            source, target = ends(distance)
            calls = list(ex.hop_calls(source, me))
            if not self.is_forward and distance > 0:
                add.copy(self.of_keys(ex.rows(source, me), FP32))  # zeros that calls add to
            elif not self.is_forward and (shares > 1 or not self.is_whole(calls)):
                zeros = shares if self.is_whole(calls) else 1
                both = self.of_keys(self.rows, FP32) + self.of_queries(self.rows, FP32)
                add.copy(both // zeros, 2)
            for call in calls:
                add.attention(call, half if distance == 0 else self.heads, ex.band)
                q_rows = steps.length((call[0].q[0], call[-1].q[1]))
                if self.is_forward and not is_first:
                    add.copy(3 * self.of_queries(q_rows, FP32))  # merge_
                is_first = False
            if not self.is_forward and distance > 0:
                back = self.of_keys(1, FP32)
                gave, got = ex.rows(me, target), ex.rows(source, me)
                sides = self.bytes_of({source: got}, back), self.bytes_of({target: gave}, back)
                going.append((add.start(*sides), gave))
        for call in ex.hop_calls(me, me) if shares > 1 else ():
            add.attention(call, half, ex.band)
        for sent_back, gave in going:
            add.wait(sent_back)
            add.copy(3 * self.of_keys(gave, FP32))
        add.copy(self.of_queries(self.rows, FP32 + ELEMENT))
        if not self.is_forward:
            self.finish_gradients()


@dataclass(frozen=True)
class Shares:
    """Heads that ranks share out. Sizes are those of a rank's row, of all heads, in bytes."""

    builder: Builder
    neighbours: range
    rows: int
    reorders: bool  # rows, between the order of the shards and that of the joined plan

    def all_to_all(self, of_row: int) -> None:
        sides = {x: self.rows * of_row // len(self.neighbours) for x in self.neighbours}
        self.builder.wait(self.builder.start(sides, sides))

    def all_rows(self, of_row: int, tensors: int) -> None:
        self.builder.copy(2 * self.rows * of_row, tensors)
        self.all_to_all(of_row)
        self.reorder(of_row)

    def reorder(self, of_row: int) -> None:
        if self.reorders:
            self.builder.copy(2 * self.rows * of_row)

    def own_rows(self, of_row: int, tensors: int) -> None:
        self.reorder(of_row)
        self.all_to_all(of_row)
        self.builder.copy(2 * self.rows * of_row, tensors)


def program_of(
    problem: Problem,
    scheme: str,
    which: str,
    rank: int,
    constants: Constants,
    exchanges: Exchanges,
    folded: bool,
) -> Builder:
    """exchanges: of the plan of the ranks that keys travel between, problem.plan.joined(...)."""
    add = Builder(constants, which, rank, folded)
    size, rows = problem.ulysses_size(scheme, constants), problem.rows_of(scheme)
    heads = problem.heads
    k_heads = heads.k if heads.k % size == 0 else size
    own = Heads(heads.q // size, k_heads // size, heads.dim)
    inner = Inner(add, exchanges, own, rank // size, size, rank % size)
    if size == 1:
        inner.attend(scheme)
        return add
    first = rank // size * size
    in_order = problem.documents and scheme == "ulysses"
    shares = Shares(add, range(first, first + size), rows, reorders=not in_order)
    q_row, k_row = (x * heads.dim * ELEMENT for x in (heads.q, k_heads))

    def repeat_keys() -> None:
        if k_heads != heads.k:
            add.copy(2 * rows * (k_heads + heads.k) * heads.dim * ELEMENT, 2)

    if which == "forward":
        repeat_keys()
        shares.all_rows(q_row + 2 * k_row, 3)
        inner.attend(scheme)
        shares.own_rows(q_row, 1)
    else:
        shares.all_rows(q_row, 1)
        inner.attend(scheme)
        if scheme == "ulysses+ring":
            add.copy(2 * rows * (q_row + 2 * k_row), 3)  # side by side
        shares.own_rows(q_row + 2 * k_row, 3)
        repeat_keys()
    return add


@dataclass(frozen=True)
class Outcome:
    """slowest: of the rank that ends last. builders: of the ranks that were simulated."""

    slowest: Times
    builders: tuple[Builder, ...]

    @property
    def most_bytes(self) -> int:
        return max(max(x.sent, x.received) for x in self.builders)


def run(
    problem: Problem, scheme: str, which: str, constants: Constants, *, fold_above: int = 64
) -> Outcome:
    """fold_above: of more ranks than that only some are simulated, each as if its peers were where
    it is: up to 3 / ranks too fast where transfers of a ring take as long as its kernels. Under a
    zigzag all have the same pairs; rank 0 gets the most rows, the last one sends the most.

    Raises ValueError where the heads do not allow the scheme.
    """
    size = problem.ulysses_size(scheme, constants)
    if not problem.takes_ulysses(size):
        raise ValueError(
            f"ulysses over {size} ranks takes a multiple of them of query heads, and a multiple or "
            "a divisor of key heads"
        )
    exchanges = problem.exchanges(size)
    folded = problem.ranks > fold_above
    ranks = representatives(problem.ranks) if folded else range(problem.ranks)
    builders = tuple(
        program_of(problem, scheme, which, rank, constants, exchanges, folded) for rank in ranks
    )
    programs: list[Program] = [x.program for x in builders]
    if folded:
        times = [simulate([x], slowdown=constants.slowdown)[0] for x in programs]
    else:
        times = simulate(programs, slowdown=constants.slowdown)
    return Outcome(max(times, key=lambda x: x.end), builders)


def representatives(ranks: int) -> list[int]:
    return sorted({0, ranks // 2, ranks - 1})
