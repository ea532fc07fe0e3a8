"""The same calls for two families of kernels: a process runs the one or, limited, the other.

``python -m tests.cases.families FILE`` saves what the calls give, with the kernels that planning
names.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.report.explain import call_of_shapes, explain
from tests.cases.attention import DTYPE_NAMES, Alibi, AttentionCase, VarlenCase
from tests.cases.harness import attend, make_case, make_varlen_case, run_forward_backward

HEAD_DIMS = (64, 96, 128, 192, 256)  # each with rows of its own in both families

CASES: tuple[AttentionCase | VarlenCase, ...] = (
    *(
        make_case(
            seqlen_q=301,
            seqlen_k=457,
            num_heads_q=4,
            num_heads_k=2,
            head_dim=d,
            dtype=dtype,
            **mask,
        )
        for d, dtype, mask in zip(
            (*HEAD_DIMS, 40, 72, 224),
            (torch.bfloat16, torch.float16) * 4,
            ({}, {"causal": True}, {"window": (100, 20)}, {"window": (-1, 7)}) * 2,
            strict=True,
        )
    ),
    make_case(seqlen_q=1500, seqlen_k=1500, causal=True),
    make_case(seqlen_q=1000, seqlen_k=1000, causal=True),
    make_case(seqlen_q=200, seqlen_k=333, head_dim=128, softcap=5.0, alibi=Alibi.per_batch),
    make_varlen_case(lengths_q=(200, 0, 17, 333), causal=True, head_dim=128, num_heads_k=1),
    make_varlen_case(
        lengths_q=(64, 17, 128, 33),
        used_q=(10, 17, 128, 5),
        used_k=(64, 5, 100, 33),
        leftpad=(60, 5, 0, 3),
    ),
)
DROPOUT_CASES: tuple[AttentionCase, ...] = tuple(
    make_case(
        seqlen_q=200,
        seqlen_k=301,
        head_dim=d,
        num_heads_k=2,
        dropout_p=p,
        dtype=dtype,
        causal=causal,
    )
    for d, p, dtype, causal in (
        (64, 0.17, torch.bfloat16, True),
        (96, 0.5, torch.float16, False),
        (128, 0.1, torch.bfloat16, False),
        (192, 0.9, torch.float16, True),
        (256, 0.3, torch.bfloat16, False),
    )
)


def planned(
    case: AttentionCase | VarlenCase, pass_name: str = "forward", **further: bool
) -> dict[str, Any]:
    """What the extension says that a pass of this case would run; `further`: what it has beyond
    the case, block_sparse or bias.
    """
    packed = isinstance(case, VarlenCase)
    call = call_of_shapes(
        dtype=DTYPE_NAMES[case.dtype],
        head_dim=case.head_dim,
        head_dim_v=case.value_dim,
        batch_size=case.batch,
        seqlen_q=case.total_q if packed else case.seqlen_q,
        seqlen_k=case.total_k if packed else case.seqlen_k,
        num_heads_q=case.num_heads_q,
        num_heads_k=case.num_heads_k,
        causal=case.causal,
        window_size_left=case.window[0],
        window_size_right=case.window[1],
        packed=packed,
        softcap=case.softcap,
        alibi=case.alibi is not None,
        dropout_p=case.dropout_p,
        deterministic=case.deterministic,
        max_seqlen_q=case.max_seqlen_q if packed and pass_name == "forward" else 0,
        **further,
    )
    return explain(pass_name, call)


def kept_pairs(case: AttentionCase) -> Tensor:
    """(B, Hq, Sq, Sk) booleans: which probabilities reach the output, a head_dim of keys at a time,
    through values that are rows of the identity. Scores are small, so that none of them rounds to
    0.
    """
    inputs = case.make_inputs()
    inputs = replace(inputs, q=inputs.q * 0.25)
    parts = []
    for begin in range(0, case.seqlen_k, case.head_dim):
        keys = min(case.head_dim, case.seqlen_k - begin)
        v = torch.zeros_like(inputs.v)
        v[:, begin : begin + keys] = torch.eye(keys, case.head_dim, device=v.device)[:, None]
        out = attend(case, inputs, inputs.q, inputs.k, v)[0]
        parts.append(out[..., :keys].transpose(1, 2) != 0)
    return torch.cat(parts, -1)


def results() -> dict[str, dict[str, Any]]:
    """By case: out, lse and gradients, the kernels' family by pass; of cases with dropout also the
    pairs that it kept.
    """
    made: dict[str, dict[str, Any]] = {}
    for case in (*CASES, *DROPOUT_CASES):
        result = run_forward_backward(case, case.make_inputs())
        passes = ("forward", "backward")
        family = {name: planned(case, name)["config"]["family"] for name in passes}
        made[str(case)] = {"family": family, "tensors": result.tensors()}
    for case in DROPOUT_CASES:
        made[str(case)]["kept"] = kept_pairs(case)
    return made


if __name__ == "__main__":
    torch.save(results(), Path(sys.argv[1]))
