"""What keeping the rounding of O costs: a recorded call's time over that of keep_rounding=False."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.core.feature_tables import Column, Row, Target, ratio
from benchmarks.core.metrics import Pass
from benchmarks.core.runner import Call, Subject, make_call, make_input_sets, measure
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import is_cuda
from benchmarks.suites.feature_cost import TIMED_COLUMNS, plain_case, timed_row
from tests.cases.attention import AttentionCase, AttentionInputs

HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 16_384)
KEPT, LOST = "keep_rounding", "keep_rounding=False"
TAKES_ONE_PERCENT = Target("over_lost", 1.01, at_least=False)

COLUMNS = (
    *TIMED_COLUMNS,
    Column("/ without", "over_lost", ratio),
)


@dataclass(frozen=True)
class RoundingGroup:
    """A call whose gradients are wanted."""

    case: AttentionCase

    def __str__(self) -> str:
        mask = "causal" if self.case.causal else "full"
        return f"d{self.case.head_dim} S{self.case.seqlen_q} {mask}"


def groups(device: str = "cuda", quick: bool = False) -> list[RoundingGroup]:
    head_dims, seqlens = (HEAD_DIMS[:1], SEQLENS[1:2]) if quick else (HEAD_DIMS, SEQLENS)
    return [
        RoundingGroup(plain_case(seqlen, head_dim, causal, device))
        for head_dim in head_dims
        for seqlen in seqlens
        for causal in (False, True)
    ]


def calls(
    case: AttentionCase, which: Pass, keeps: bool, inputs: list[AttentionInputs]
) -> list[Call]:
    from flash_attn_cuda import flash_attn_func

    attend = partial(flash_attn_func, causal=case.causal, keep_rounding=keeps)
    return [make_call(attend, which, x.q, x.k, x.v, x.dout) for x in inputs]


def measure_group(group: RoundingGroup, protocol: Protocol) -> Iterator[Row]:
    case, inputs = group.case, make_input_sets(group.case)
    for which in Pass:
        subjects = [
            Subject(name, partial(calls, case, which, name == KEPT, inputs))
            for name in (KEPT, LOST)
        ]
        measured = measure(subjects, records=True, on_cuda=is_cuda(case), protocol=protocol)
        times = [x.timing and x.timing.median_ms for x in measured]
        over_lost = times[0] / times[1] if times[0] and times[1] else None
        for name, measurement in zip((KEPT, LOST), measured, strict=True):
            row: Row = {
                **timed_row(str(group), case, which, name, measurement),
                "over_lost": over_lost if name == KEPT else None,
            }
            row["targets"] = [TAKES_ONE_PERCENT.judge(row)] if name == KEPT else []
            yield row
