"""The guards that GPU tests put around tensors find whatever is written there."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cases.bad_input import Guard

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("margin", [1, 3])
def test_guards(margin: int, dtype: torch.dtype) -> None:
    inside = torch.arange(24).view(4, 3, 2).to(dtype)
    values = (1.0, 0.0, -torch.inf, torch.nan) if dtype.is_floating_point else (1, 0)
    places = ((-1, "before"), (-margin, "before"), (4, "behind"), (3 + margin, "behind"))
    for value, (row, where) in product(values, places):
        guard = Guard("dq", inside, margin)
        assert torch.equal(guard.tensor, inside)
        around = guard.tensor.as_strided((), (), guard.tensor.storage_offset() + 6 * row + 5)
        assert around.isnan() or not dtype.is_floating_point
        guard.tensor.fill_(value)  # its own rows are anybody's
        guard.check()
        around.fill_(value)
        with pytest.raises(AssertionError, match=f"^dq: 1 elements {where} it were written"):
            guard.check()
