"""Packed sequences of uneven lengths, causal: speed against dense batches of the same mean length
and against other kernels for packed sequences; and one sequence in chunks of that length.

Every subject of a group has the same tokens, heads and data. Operations are counted on visible
pairs, of which uneven lengths have more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.core.feature_tables import Column, Row, Target, number, quotient, ratio, timing_of
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.metrics import Pass
from benchmarks.core.runner import Call, Subject, make_call, measure
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import (
    BACKENDS,
    Attend,
    Unsupported,
    found,
    require_cuda,
    require_ours,
)
from benchmarks.peers.fa3 import flash_attention_3_packed
from tests.cases.attention import AttentionCase, VarlenCase

TOKENS = 32_768
HIDDEN = 2048
MEANS = (256, 1024, 4096)
HEAD_DIMS = (64, 128, 256)

PACKED, EQUAL, DENSE, TORCH = "packed", "packed, equal", "dense", "torch packed"
FA3, CHUNKS = "FlashAttention-3 packed", "one, in chunks"
TARGETS = (Target("over_dense", 0.95), Target("over_torch", 1.0))
CHUNKS_TARGET = Target("over_equal", 0.9)  # of the packed call with chunks as sequences

COLUMNS = (
    Column("D", "head_dim"),
    Column("mean", "mean"),
    Column("sequences", "sequences"),
    Column("longest", "longest"),
    Column("pass", "pass"),
    Column("what", "what"),
    Column("ms", "median_ms", number(4)),
    Column("TFLOP/s", "tflops", number(3)),
    Column("/ dense", "over_dense", ratio),
    Column("/ torch", "over_torch", ratio),
    Column("/ FA3", "over_fa3", ratio),
    Column("/ equal", "over_equal", ratio),
)


@dataclass(frozen=True)
class VarlenGroup:
    """The same tokens packed unevenly, packed evenly, and dense."""

    mean: int  # tokens of a sequence
    head_dim: int
    tokens: int = TOKENS
    hidden: int = HIDDEN
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def __str__(self) -> str:
        return f"d{self.head_dim} mean {self.mean}"

    @property
    def count(self) -> int:
        return self.tokens // self.mean

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @cached_property
    def packed(self) -> VarlenCase:
        return self._packed(log_normal_lengths(self.count, self.mean))

    @cached_property
    def equal(self) -> VarlenCase:
        return self._packed((self.mean,) * self.count)

    @cached_property
    def dense(self) -> AttentionCase:
        return AttentionCase(
            batch=self.count,
            seqlen_q=self.mean,
            seqlen_k=self.mean,
            num_heads_q=self.heads,
            num_heads_k=self.heads,
            head_dim=self.head_dim,
            causal=True,
            dtype=self.dtype,
            device=self.device,
        )

    def _packed(self, lengths: tuple[int, ...]) -> VarlenCase:
        return VarlenCase(
            lengths_q=lengths,
            num_heads_q=self.heads,
            num_heads_k=self.heads,
            head_dim=self.head_dim,
            causal=True,
            dtype=self.dtype,
            device=self.device,
        )


def groups(device: str = "cuda", quick: bool = False) -> list[VarlenGroup]:
    means, head_dims = (MEANS[1:2], HEAD_DIMS[1:2]) if quick else (MEANS, HEAD_DIMS)
    result = [VarlenGroup(mean, d, device=device) for d in head_dims for mean in means]
    return result if quick else [*result, VarlenGroup(8192, 128, tokens=65_536, device=device)]


def measure_group(group: VarlenGroup, protocol: Protocol) -> Iterator[Row]:
    """Rows of both passes. One set of inputs will do: 384 MiB do not fit a cache."""
    inputs = group.packed.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    cases = {
        PACKED: group.packed,
        EQUAL: group.equal,
        DENSE: group.dense,
        TORCH: group.packed,
        FA3: group.packed,
        CHUNKS: group.dense,
    }
    for which in Pass:
        subjects = [
            Subject(PACKED, partial(packed_calls, ours_packed, group.packed, which, tensors)),
            Subject(EQUAL, partial(packed_calls, ours_packed, group.equal, which, tensors)),
            Subject(DENSE, partial(dense_calls, group.dense, which, tensors)),
            Subject(TORCH, partial(packed_calls, torch_packed, group.packed, which, tensors)),
            Subject(FA3, partial(packed_calls, fa3_packed, group.packed, which, tensors)),
            Subject(CHUNKS, partial(chunk_calls, group, which, tensors)),
        ]
        measured = measure(
            subjects,
            records=which is Pass.backward,
            on_cuda=torch.device(group.device).type == "cuda",
            protocol=protocol,
        )
        rows = {}
        for subject, measurement in zip(subjects, measured, strict=True):
            case, timing = cases[subject.name], measurement.timing
            lengths = group.packed.lengths_q if case is group.packed else group.equal.lengths_q
            rows[subject.name] = {
                "name": f"{group} {which.value} {subject.name}",
                "group": f"{group} {which.value}",
                "case": str(case),
                "head_dim": group.head_dim,
                "mean": group.mean,
                "sequences": len(lengths),
                "longest": max(lengths),
                "lengths": list(lengths),
                "pass": which.value,
                "what": subject.name,
                **timing_of(measurement),
                "peak_bytes": measurement.peak_bytes,
                "tflops": timing and timing.teraflops(case, which),
                "over_dense": None,
                "over_torch": None,
                "over_fa3": None,
                "over_equal": None,
                "targets": [],
            }
        add_ratios(rows)
        yield from rows.values()


def add_ratios(rows: dict[str, Row]) -> None:
    """Of speeds: packed over dense and peers, and evenly packed over dense."""
    dense, peer = rows[DENSE]["tflops"], rows[TORCH]["tflops"]
    rows[EQUAL]["over_dense"] = quotient(rows[EQUAL]["tflops"], dense)
    packed = rows[PACKED]
    packed["over_dense"] = quotient(packed["tflops"], dense)
    packed["over_torch"] = quotient(packed["tflops"], peer)
    packed["over_fa3"] = quotient(packed["tflops"], rows[FA3]["tflops"])
    packed["targets"] = [target.judge(packed) for target in TARGETS]
    chunks = rows[CHUNKS]
    chunks["over_dense"] = quotient(chunks["tflops"], dense)
    chunks["over_equal"] = quotient(chunks["tflops"], rows[EQUAL]["tflops"])
    chunks["targets"] = [CHUNKS_TARGET.judge(chunks)]


def packed_calls(
    prepare: Callable[[VarlenCase], Attend],
    case: VarlenCase,
    which: Pass,
    tensors: Sequence[Tensor],
) -> list[Call]:
    return [make_call(prepare(case), which, *leaves(tensors))]


def dense_calls(case: AttentionCase, which: Pass, tensors: Sequence[Tensor]) -> list[Call]:
    views = [x.view(case.query_shape) for x in tensors]
    return [make_call(BACKENDS["ours"].prepare(case), which, *leaves(views))]


def chunk_calls(group: VarlenGroup, which: Pass, tensors: Sequence[Tensor]) -> list[Call]:
    from flash_attn_cuda import flash_attn_func

    require_ours(group.device)
    views = [x.unsqueeze(0) for x in tensors]
    attend = partial(flash_attn_func, causal=True, attention_chunk=group.mean)
    return [make_call(attend, which, *leaves(views))]


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory; q, k and v require gradients, dout, the last, does not."""
    return [x.detach().requires_grad_(index < 3) for index, x in enumerate(tensors)]


def offsets(case: VarlenCase) -> Tensor:
    """(B + 1) int32."""
    lengths = torch.tensor((0, *case.lengths_q), device=case.device)
    return lengths.cumsum(0).to(torch.int32)


def ours_packed(case: VarlenCase) -> Attend:
    from flash_attn_cuda import flash_attn_varlen_func

    require_ours(case.device)
    cu_seqlens, longest = offsets(case), case.max_seqlen_q
    return lambda q, k, v: flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, longest, longest), causal=case.causal
    )


def torch_packed(case: VarlenCase) -> Attend:
    """What torch.nn.attention.varlen.varlen_attn calls, without its two wrappers' host time."""
    if torch.device(case.device).type != "cuda":
        raise Unsupported("runs on CUDA devices only")
    attend = torch.ops.aten._flash_attention_forward
    cu_seqlens, longest = offsets(case), case.max_seqlen_q
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    return lambda q, k, v: attend(q, k, v, *lengths, 0.0, case.causal, False)[0]


def fa3_packed(case: VarlenCase) -> Attend:
    require_cuda(case)
    attend = found(flash_attention_3_packed)
    cu_seqlens, longest = offsets(case), case.max_seqlen_q
    return lambda q, k, v: attend(q, k, v, cu_seqlens, longest, case.causal)
