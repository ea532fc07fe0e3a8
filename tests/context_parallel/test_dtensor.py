"""DTensors over two processes, in fp64: batch entries or heads of everything on each rank give what
one process has, and what does not fit is refused by name.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.context_parallel import dtensor_cases as cases
from tests.context_parallel import dtensor_demo_cases
from tests.context_parallel.dtensor_cases import Case
from tests.context_parallel.ranks import Ranks

CUTS = ("heads", "batch", None)
HEADS = [Case(heads_k=heads, cut=cut) for heads in (4, 2) for cut in CUTS]
# Key heads that every rank has: one, as many as ranks, and more than ranks.
SHARED = [Case(heads_q=8, heads_k=heads, keys_are_replicated=True) for heads in (1, 2, 4)]
DENSE = (
    *(("causal",), ("window", "slopes"), ("slopes-of-batch", "sink"), ("dropout", "causal")),
    *(("bias", "sink"), ("shared-bias",), ("mask",), ("mask-of-heads",), ("chunks", "sink")),
    *(("chunks", "bias"), ("chunks", "mask-of-heads")),
    ("logits", "causal"),
)
PACKED = (
    ("causal",),
    ("sink", "slopes"),
    ("lengths", "window", "dropout"),
    ("dropout", "logits"),
    ("chunks", "logits"),
)


def test_dense(two: Ranks) -> None:
    two.run(cases.equals_one, [*HEADS, *SHARED, Case(8, 2, "batch")])


@pytest.mark.parametrize("options", DENSE, ids="-".join)
def test_options(two: Ranks, options: tuple[str, ...]) -> None:
    two.run(cases.equals_one, [Case(cut=cut, options=options) for cut in CUTS])


@pytest.mark.parametrize("options", PACKED, ids="-".join)
def test_packed(two: Ranks, options: tuple[str, ...]) -> None:
    shapes = (Case(), Case(heads_k=1, keys_are_replicated=True), Case(cut=None))
    packed = [
        Case(x.heads_q, x.heads_k, x.cut, x.keys_are_replicated, True, options) for x in shapes
    ]
    two.run(cases.equals_one, packed)


def test_shared_keys_with_options(two: Ranks) -> None:
    shared = {"keys_are_replicated": True, "options": ("dropout", "slopes", "causal")}
    two.run(cases.equals_one, [Case(heads_k=heads, **shared) for heads in (1, 2)])


@pytest.mark.parametrize(
    "options", [("causal",), ("slopes", "sink"), ("dropout",), ("bias",)], ids="-".join
)
def test_second_derivatives(two: Ranks, options: tuple[str, ...]) -> None:
    """Double backward, whose derivative by a gradient that comes in is one in a direction."""
    cases_of_cuts = [Case(cut=cut, options=options) for cut in CUTS]
    shared = [] if "bias" in options else [replace(SHARED[0], options=options)]
    packed = [] if "bias" in options else [Case(is_packed=True, options=options)]
    two.run(cases.second_derivatives_equal_one, [*cases_of_cuts, *shared, *packed])


def test_cache(two: Ranks) -> None:
    two.run(cases.over_a_cache)


def test_pages(two: Ranks) -> None:
    two.run(cases.over_pages)
    two.run(cases.over_lists)


def test_caches_of_e4m3(two: Ranks) -> None:
    two.run(cases.over_e4m3)


def test_other_operators(two: Ranks) -> None:
    two.run(cases.other_operators)


def test_refused(two: Ranks) -> None:
    two.run(cases.refused)


def test_compile(two: Ranks) -> None:
    two.run(cases.compiled)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="no view of this torch's sharded gradient")
def test_the_demo_trains_as_one_process(two: Ranks) -> None:
    two.run(dtensor_demo_cases.trains_as_one)


def test_importing_the_package_imports_no_dtensors() -> None:
    """Rules are registered when torch.distributed.tensor is imported, before or after, and formulas
    when torch.utils.flop_counter is.
    """
    program = (
        "import sys\n"
        "finders = list(sys.meta_path)\n"
        "import flash_attn_cuda\n"
        "from flash_attn_cuda.operators import dtensor_import\n"
        "assert 'torch.distributed.tensor' not in sys.modules and not dtensor_import._types\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "import torch.distributed.tensor.parallel, torch.utils.flop_counter\n"
        "from torch.distributed.tensor import DTensor\n"
        "assert dtensor_import._types == (DTensor,) and sys.meta_path == finders\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
