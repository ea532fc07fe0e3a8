"""What the tests of the Hopper kernels for a bias share: cases, and comparing a call with the
reference.

What holds of any bias is tested in gpu/test_dense.py and gpu/test_masked.py too. In these tests a
bias's rows have a multiple of 8 keys, or strides that are one, so that TMA can load them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.harness import make_case
from tests.cases.masked import MaskedCase, MaskedInputs, RandomBias
from tests.cases.masked_harness import masked_reference, run_masked
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

OWN = ("q", "hq", "bq", "bhq")  # what has rows of its own for queries
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128])


def bias_case(
    own: str,
    lengths: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    *,
    hidden: float = 0.0,
    sink: torch.dtype | None = None,
    **fields: Any,
) -> MaskedCase:
    """A dense call with a bias: `lengths` of queries and keys, `heads` of queries and keys."""
    of = make_case(
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        **fields,
    )
    return MaskedCase(of, None, RandomBias(own, hidden=hidden), sink)


def with_bias(inputs: MaskedInputs, bias: Tensor) -> MaskedInputs:
    return replace(inputs, bias=bias)


def assert_right(case: MaskedCase, inputs: MaskedInputs, **changes: Any) -> AttentionResult:
    """What the call gives, compared with the reference; `changes` are other arguments of it."""
    actual = run_masked(case, inputs, **changes)
    assert_close(actual, *masked_reference(case, inputs))
    return actual
