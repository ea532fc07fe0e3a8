"""Trees of drafted tokens over a KV cache (tree_mask) beside causal calls of as many queries, dense
and in pages, each in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.core.feature_tables import Column, Row, Target, number, quotient, ratio, timing_of
from benchmarks.core.runner import Call, Subject, measure
from benchmarks.core.turns import Protocol
from benchmarks.suites.decode import CapturedCalls
from benchmarks.suites.prefill import Prefill, PrefillGroup
from tests.cases.kvcache import draw_tree

KEYS = 8192
PLACES = {"dense": None, "paged 64": 64}
CALLS = 10  # of a graph
TREE = "tree"

COLUMNS = (
    Column("D", "head_dim"),
    Column("batch", "batch"),
    Column("queries", "seqlen_q"),
    Column("cache", "cache"),
    Column("mask", "what"),
    Column("us a call", "microseconds", number(4)),
    Column("/ causal", "over_causal", ratio),
)


def groups(device: str = "cuda", quick: bool = False) -> list[PrefillGroup]:
    batches = (1,) if quick else (1, 8)
    return [
        PrefillGroup(batch, queries, KEYS, device=device)
        for batch in batches
        for queries in (16, 64)
    ]


def measure_group(group: PrefillGroup, protocol: Protocol) -> Iterator[Row]:
    prefill = Prefill(group)
    trees = [draw_tree("drawn", group.seqlen_q, prefill.generator) for _ in range(group.batch)]
    on_cuda = torch.device(group.device).type == "cuda"
    masks = {"causal": {"causal": True}, TREE: {"tree_mask": torch.stack(trees)}}

    def prepare(page_size: int | None, what: str) -> list[Call]:
        (attend,) = prefill.ours(page_size, **masks[what])

        def run() -> None:
            for _ in range(CALLS):
                attend()

        return [CapturedCalls(run) if on_cuda else run]

    whats = [(cache, what) for cache in PLACES for what in masks]
    subjects = [Subject(f"{x} {what}", partial(prepare, PLACES[x], what)) for x, what in whats]
    measured = measure(subjects, records=False, on_cuda=on_cuda, protocol=protocol)
    causal_us = None
    for (cache, what), subject, measurement in zip(whats, subjects, measured, strict=True):
        timing = measurement.timing and measurement.timing.divided_by(CALLS)
        microseconds = timing and timing.median_ms * 1e3
        if what != TREE:
            causal_us = microseconds
        row = {
            "name": f"{group} {subject.name}",
            "group": str(group),
            "batch": group.batch,
            "seqlen_q": group.seqlen_q,
            "head_dim": group.head_dim,
            "cache": cache,
            "what": what,
            **timing_of(measurement, timing),
            "microseconds": microseconds,
            "over_causal": quotient(causal_us, microseconds) if what == TREE else None,
        }
        targets = [Target("over_causal", 0.97)] if what == TREE else []
        row["targets"] = [target.judge(row) for target in targets]
        yield row
