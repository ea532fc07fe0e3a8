"""What an attention over a group takes by a formula, which knows only shapes: what simulated
programs (programs.py) come to where copies and launches cost nothing.
"""

from __future__ import annotations

from benchmarks.context_parallel.programs import ELEMENT, FP32, Constants, Problem
from flash_attn_cuda.context_parallel.load import Heads as KeyHeads
from flash_attn_cuda.context_parallel.load import Load


def closed_form(problem: Problem, scheme: str, which: str, constants: Constants) -> float:
    """Seconds of one sequence over a group, without copies and launches: attention at its rate,
    links at theirs, the slowest link of the group for all that leaves a rank, and a transfer's
    latency. Transfers and attention hide each other where attention.py lets them.
    """
    c, heads = constants, problem.heads
    size = problem.ulysses_size(scheme, c)
    rows, hops = sum(problem.lengths) / problem.ranks, problem.ranks // size
    k_heads = heads.k if heads.k % size == 0 else size
    compute = problem.share_seconds(c, which)
    row = 2 * k_heads * heads.dim * ELEMENT  # of keys and values, in bytes

    def link(span: int, peers: int, sizes: float, share: float) -> float:
        """share: of the bytes goes by the slower link where the ranks span nodes."""
        leaves = span > c.gpus_per_node
        seconds = sizes * share / c.infiniband_gbps if leaves else sizes / c.nvlink_gbps
        latency = c.infiniband_us if leaves else c.nvlink_us
        return seconds * 1e-9 + (latency + c.peer_us * (peers - 1)) * 1e-6

    around = 0.0
    if size > 1:
        outside = (size - min(size, c.gpus_per_node)) / (size - 1)
        for heads_moved in (heads.q + 2 * k_heads, heads.q):
            moved = rows * heads_moved * heads.dim * ELEMENT * (size - 1) / size
            around += link(size, size - 1, moved, outside)
    if hops == 1:
        return around + compute
    span = problem.ranks
    if scheme == "all_gather":
        load = Load.of(problem.plan, problem.band)
        key_heads = KeyHeads(heads.q, heads.k, 2 * heads.dim, ELEMENT)
        groups = load.head_groups(key_heads, backward=which == "backward")
        outside = (span - min(span, c.gpus_per_node)) / (span - 1)
        bytes_of_head = (span - 1) * rows * row / heads.k
        fetches = [link(span, span - 1, x * bytes_of_head, outside) for x in groups]
        here = done = 0.0
        for fetch, x in zip(fetches, groups, strict=True):
            here += fetch
            done = max(done, here) + compute * x / heads.k
        if which == "forward":
            return done
        backs = [link(span, span - 1, FP32 / ELEMENT * x * bytes_of_head, outside) for x in groups]
        alone = compute if len(groups) == 1 else 0.0  # between the only two transfers
        return max(fetches[0] + compute + backs[-1], sum(fetches) + sum(backs) + alone)
    moved = rows * row  # size * rows of k_heads / size heads
    fetch = link(span, 1, moved, 1.0)
    back = link(span, 1, FP32 / ELEMENT * moved, 1.0)
    if which == "forward":
        return around + compute / hops + (hops - 1) * max(fetch, compute / hops)
    alone = compute / hops if hops == 2 else 0.0
    through = (hops - 1) * (fetch + back) + alone
    if k_heads // size % 2 == 1:
        return around + max(compute + back, through)
    half = compute / hops / 2  # of the work on a rank's own keys
    waits = max(0.0, fetch - half) + max(0.0, back - half)
    return around + max(compute + waits, through)
