"""merge_: attention over some keys takes in attention over others, in one kernel on CUDA; against
fp64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.context_parallel.merge import merge_
from flash_attn_cuda.installed import build_info
from tests.cases.harness import DEVICE
from tests.cases.merge import MergeCase, merge_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(merge_cases(DEVICE)), ids=str)
def test_merge(case: MergeCase) -> None:
    assert not case.problems()


def test_repeats_bit_by_bit() -> None:
    case = MergeCase(300, 3, 128, torch.bfloat16, DEVICE)
    first = case.run(case.make())
    for _ in range(3):
        for x, y in zip(first, case.run(case.make()), strict=True):
            assert torch.equal(x, y)


@pytest.mark.cuda_only
def test_a_part_without_keys_is_not_read() -> None:
    case = MergeCase(40, 2, 64, None, DEVICE)
    out, lse, part, part_lse = case.make()
    lse[0, :20], part_lse[1, :20] = -torch.inf, -torch.inf
    out[:20, 0], part[:20, 1] = torch.nan, torch.nan
    expected = torch.stack((part[:20, 0], out[:20, 1]), 1)
    merge_(out, lse, part, part_lse)
    assert torch.equal(out[:20], expected)
    assert out.isfinite().all()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def test_a_nan_is_kept() -> None:
    """Also beside a part without keys, either way round."""
    case = MergeCase(20, 1, 64, None, DEVICE)
    out, lse, part, part_lse = case.make()
    lse[0, 3], part_lse[0, 3] = torch.nan, -torch.inf
    lse[0, 7], part_lse[0, 7] = -torch.inf, torch.nan
    merge_(out, lse, part, part_lse)
    for row in (3, 7):
        assert lse[0, row].isnan() and out[row].isnan().all()


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("name", "make", "error", "message"),
    [
        ("out", lambda: zeros(5, 2, 64).cpu(), ValueError, "must be a CUDA tensor"),
        ("out", lambda: zeros(5, 2, 64).half(), TypeError, "must be a dense tensor of Float"),
        ("out", lambda: zeros(5, 2, 60), ValueError, "head_dim must be .* multiple of 8"),
        ("out", lambda: zeros(5, 128), ValueError, "must have shape"),
        ("out", lambda: zeros(5, 2, 64, 2)[..., 0], ValueError, "must have rows of head_dim"),
        ("out", lambda: zeros(1, 2, 64).expand(5, 2, 64), ValueError, "must have rows"),
        ("part", lambda: zeros(5, 2, 72), ValueError, "must have shape"),
        ("part", lambda: zeros(5, 2, 64, dtype=torch.bfloat16), TypeError, "dtype must be"),
        ("softmax_lse", lambda: zeros(5, 2), ValueError, "must have shape"),
        ("part_lse", lambda: zeros(5, 2).t(), ValueError, "must have the rows of a head"),
        ("result", lambda: zeros(5, 2, 64), TypeError, "dtype must be float16 or bfloat16"),
        ("result", lambda: zeros(5, 2, 72).half(), ValueError, "must have shape"),
    ],
)
def test_bad_arguments(
    name: str, make: Callable[[], Tensor], error: type[Exception], message: str
) -> None:
    """The extension refuses what its kernel could not address."""
    given = {
        "out": zeros(5, 2, 64),
        "softmax_lse": zeros(2, 5),
        "part": zeros(5, 2, 64),
        "part_lse": zeros(2, 5),
        "result": None,
    }
    assert build_info.extension is not None
    with pytest.raises(error, match=f"{name}: {message}"):
        build_info.extension.merge(**(given | {name: make()}))
