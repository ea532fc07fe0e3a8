"""ring_flash_attn, the package of ring attention, on this package: in processes over gloo, in fp64,
against one call over the whole.
"""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
import torch

from flash_attn_cuda.integrations import compat
from flash_attn_cuda.integrations import ring_flash_attn as ring
from tests.context_parallel.cases import Case
from tests.context_parallel.ranks import Ranks
from tests.surfaces import ring_flash_attn_cases as cases
from tests.surfaces.public_names import RING_FLASH_ATTENTION
from tests.surfaces.ring_flash_attn_cases import Call

BATCH = ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn")
PACKED = (
    "ring_flash_attn_varlen",
    "zigzag_ring_flash_attn_varlen",
    "llama3_flash_attn_varlen",
)
SIGNATURES = RING_FLASH_ATTENTION.signatures()
CASES = {
    "full": {"causal": False},
    "causal": {"heads_k": 4},
    "causal-mqa": {"heads_k": 1},
    "window": {"window_size": (17, -1)},
    "wide": {"window_size": (40, 21), "causal": False},
    "signs": {"window_size": (-7, 5), "causal": False},
    "huge": {"window_size": (2**40, 0), "causal": False},
    "alibi": {"has_alibi": True},
    "dropout": {"dropout_p": 0.3},
    "dropout-full": {"dropout_p": 0.3, "causal": False},
}


def case_of(stem: str, option: str, ranks: int) -> Case:
    """Documents of llama3 end within shards, as those of no other."""
    has_dropout = option.startswith("dropout")
    if stem in BATCH:
        lengths, batch = (32 * ranks if has_dropout else 16 * ranks,), 2
    elif stem.startswith("llama3"):
        lengths, batch = (3, 37, 0, 57, 15) if not has_dropout else (16, 48, 80, 16), None
        lengths = (*lengths, -sum(lengths) % (16 * ranks))
    else:
        part = (32 if has_dropout else 2) * ranks
        lengths, batch = (part, 3 * part, 0, 5 * part), None
    options = {"heads_k": 2, "lengths": lengths, "batch": batch, **CASES[option]}
    return Case("", ranks, **options)


@pytest.mark.parametrize("name", SIGNATURES)
def test_named_and_described(name: str) -> None:
    """Signatures are in test_public_names."""
    function = getattr(ring, name)
    assert function.__name__ == function.__qualname__ == name and function.__doc__


def test_names() -> None:
    assert set(ring.__all__) == set(SIGNATURES)
    compat.install()
    try:
        module = importlib.import_module("ring_flash_attn")
        for name in SIGNATURES:
            assert getattr(module, name) is getattr(ring, name)
    finally:
        compat.uninstall()


# Of all functions, and what of two is of all that are packed.
OF_ALL = ("full", "causal", "window", "alibi", "dropout")
OF_SOME = [(stem, x) for stem in PACKED[::2] for x in CASES if x not in OF_ALL]


@pytest.mark.parametrize(("stem", "option"), [*itertools.product(BATCH + PACKED, OF_ALL), *OF_SOME])
def test_equals_the_whole(four: Ranks, stem: str, option: str) -> None:
    four.run(cases.equals_the_whole, Call(stem, case_of(stem, option, 4)))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_stripes_of_any_length(four: Ranks, dropout_p: float) -> None:
    """Also where the plan between them pads."""
    for length, batch in ((3, 3), (7, 1), (1, 2), (13, 5)):
        case = Case("", 4, (4 * length,), batch, heads_k=2, dropout_p=dropout_p)
        four.run(cases.equals_the_whole, Call("stripe_flash_attn", case))


@pytest.mark.parametrize("form", ["kvpacked_", "qkvpacked_"])
@pytest.mark.parametrize("stem", BATCH + PACKED)
def test_packed_forms(two: Ranks, stem: str, form: str) -> None:
    for option in ("full", "causal"):
        case = case_of(stem, option, 2)
        if form == "qkvpacked_":
            case = Case("", 2, case.lengths, case.batch, causal=case.causal)
        two.run(cases.equals_the_whole, Call(stem, case, form, heads_k_stride=2))


def test_results_and_questions(two: Ranks) -> None:
    two.run(cases.out_alone)


def test_plans_do_not_pile_up(two: Ranks) -> None:
    two.run(cases.keeps_no_more, 6)


def test_under_inference_mode(two: Ranks) -> None:
    two.run(cases.under_inference_mode)


def test_bad_arguments(two: Ranks) -> None:
    two.run(cases.refuses)


def test_prepared_slices() -> None:
    """Rows and keys of each rank, by a mask over documents."""
    for lengths in ((7, 7, 2), (16,), (1, 0, 14, 1), (4, 4, 4, 4), (0, 3, 13, 0)):
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for ranks, causal in itertools.product((1, 2, 4, 8), (True, False)):
            rows = 16 // ranks
            for rank in range(ranks):
                cu_q, cu_k, max_q, max_k, keys = ring.llama3_flash_attn_prepare_cu_seqlens(
                    bounds, causal, rank, ranks
                )
                mine = document[rank * rows : (rank + 1) * rows]
                assert cu_q.dtype == cu_k.dtype == torch.int32
                assert without_empty(cu_q) == mine.unique(return_counts=True)[1].tolist()
                seen = torch.isin(document, mine)
                if causal:
                    seen &= torch.arange(16) < (rank + 1) * rows
                assert seen.nonzero()[:, 0].tolist() == list(range(16))[keys]
                counts = document[keys].unique(return_counts=True)[1]
                assert without_empty(cu_k) == counts.tolist()
                assert cu_q.shape == cu_k.shape
                assert (max_q, max_k) == (int(cu_q.diff().max()), int(counts.max()))


def without_empty(bounds: torch.Tensor) -> list[int]:
    return [length for length in bounds.diff().tolist() if length > 0]


@pytest.mark.parametrize("name", ["substitute_hf_flash_attn", "update_ring_flash_attn_params"])
def test_without_transformers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in [x for x in sys.modules if x.startswith("flash_attn_cuda.integrations.transf")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=rf"{name}: needs .* `pip install -U transformers`"):
        getattr(ring, name)(None, None)
