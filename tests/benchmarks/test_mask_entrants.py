"""What masks.py compares and how results are taken, on the CPU."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from benchmarks.core.metrics import Pass
from benchmarks.peers.backends import TensorOrder, Unsupported
from benchmarks.suites import mask_entrants, mask_tables
from benchmarks.suites import masks as mask_speed
from benchmarks.suites.mask_blocks import BLOCK, random_blocks
from benchmarks.suites.mask_entrants import PARTS, RANDOM, WINDOW, MaskGroup, one_sequence
from tests.benchmarks.tiny_masks import dense_in_blocks, make_tiny, replace_flex


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Calls of microseconds on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch):
    make_tiny(monkeypatch)


@pytest.fixture
def flex(monkeypatch):
    replace_flex(monkeypatch, dense_in_blocks)


# Groups: what is to be measured


def groups_of(*arguments: str) -> list[MaskGroup]:
    return mask_speed.groups(mask_speed.parse_arguments(["--device", "cuda", *arguments]))


def test_density_groups():
    groups = groups_of("--parts", "density")
    assert [(group.density, group.mask) for group in groups] == [
        (1.0, "all"),
        *((density, mask) for density in (0.5, 0.25, 0.1, 0.05) for mask in (RANDOM, WINDOW)),
    ]
    for group in groups:
        assert group.case == one_sequence(16_384, 128, "cuda")
        assert (group.case.num_heads_q, group.case.num_heads_k, group.case.causal) == (
            16,
            16,
            False,
        )
    quick = groups_of("--quick", "--parts", "density")
    assert {(g.density, g.mask) for g in quick} == {
        (density, mask) for density in (0.25, 0.05) for mask in (RANDOM, WINDOW)
    }


def test_other_groups():
    (document,) = groups_of("--parts", "document")
    assert document.case.batch == 32 and document.case.total_q == document.seqlen == 32_768
    assert (document.case.num_heads_q, document.case.head_dim) == (16, 128)
    assert document.case.causal

    biases = groups_of("--parts", "bias")
    assert [group.case for group in biases] == [one_sequence(4096, d, "cuda") for d in (64, 128)]

    sinks = groups_of("--parts", "sink")
    assert {(group.case.seqlen_q, group.case.head_dim) for group in sinks} == {
        (seqlen, head_dim) for seqlen in (1024, 4096, 16_384) for head_dim in (64, 128)
    }
    assert all(group.case.causal and group.case.batch * group.seqlen == 16_384 for group in sinks)


def test_parts_and_head_dims_can_be_chosen():
    groups = groups_of("--parts", "sink,density", "--head-dims", "64", "128")
    assert list(dict.fromkeys(group.part for group in groups)) == ["sink", "density"]
    assert {g.case.head_dim for g in groups if g.part == "density"} == {64, 128}
    assert {group.part for group in groups_of()} == set(PARTS)
    assert len({str(group) for group in groups_of()}) == len(groups_of())


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        mask_speed.parse_arguments(["--parts", "density,densities"])
    assert "must be some of density,document,bias,sink, got 'densities'" in capsys.readouterr().err


@pytest.mark.parametrize("part", PARTS)
def test_twins_compute_the_same(part, tiny, flex, monkeypatch):
    monkeypatch.setattr(mask_entrants, "require_cuda", lambda case: None)
    make_groups, make_entrants = PARTS[part]
    for group in make_groups("cpu", False, None):
        entrants = {e.name: replace(e, scope=nullcontext) for e in make_entrants(group)}
        for entrant in entrants.values():
            assert {entrant.reference, entrant.peer, entrant.twin} <= {None, *entrants}
            if entrant.twin is None:
                continue
            checks = mask_tables.compare(entrant, entrants[entrant.twin])
            assert all(check["passes"] for check in checks.values()), checks
            names = [name for check in checks.values() for name in check["errors"]]
            assert names == ["out", "dq", "dk", "dv", *(["dbias"] if part == "bias" else [])]
            # Not the same thing twice.
            assert part != "density" or max(checks[Pass.backward]["errors"].values()) > 0


def test_inputs_of_a_group_are_the_same_memory_in_each_order(tiny):
    for make_groups, make_entrants in PARTS.values():
        entrants = make_entrants(make_groups("cpu", False, None)[0])
        for entrant in entrants:
            for x, first in zip(entrant.inputs[:3], entrants[0].inputs[:3], strict=True):
                assert x.data_ptr() == first.data_ptr() and x.is_leaf and x.requires_grad
            assert not entrant.dout.requires_grad


def test_the_sink_is_in_the_call(tiny):
    group = PARTS["sink"][0]("cpu", False, None)[0]
    entrants = {e.name: e for e in PARTS["sink"][1](group)}
    out = {name: e.prepare()(*e.inputs) for name, e in entrants.items()}
    assert torch.equal(out["sink"], out["sink with gradient"])
    assert not torch.allclose(out["sink"], out["plain"])
    learned = entrants["sink with gradient"]
    (dsink,) = torch.autograd.grad(out[learned.name], learned.inputs[3], learned.dout)
    assert dsink.shape == (group.case.num_heads_q,) and dsink.any()


def test_flex_takes_the_block_mask(monkeypatch):
    monkeypatch.setattr(mask_entrants, "require_cuda", lambda case: None)
    monkeypatch.setattr(mask_entrants, "compiled_flex_attention", lambda: dict)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    blocks = random_blocks(4, 2, 0.5)
    arguments = mask_entrants.flex_in_blocks(one_sequence(4 * BLOCK, 16, "cpu"), blocks)()
    assert list(arguments) == ["block_mask"]
    assert torch.equal(arguments["block_mask"].to_dense().bool(), blocks)
    assert arguments["block_mask"].seq_lengths == (4 * BLOCK, 4 * BLOCK)


def test_without_triton_flex_is_unsupported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    case = one_sequence(2 * BLOCK, 16, "cuda")
    with pytest.raises(Unsupported, match=r"^triton is not importable"):
        mask_entrants.flex_in_blocks(case, random_blocks(2, 16, 1.0))


# Errors of results


def test_the_worst_tile_counts():
    expected = torch.randn(300, 2, 16, generator=torch.Generator().manual_seed(0))
    assert mask_tables.worst_tile(expected, expected) == 0.0
    assert mask_tables.worst_tile(torch.zeros(300, 2, 16), torch.zeros(300, 2, 16)) == 0.0
    actual = expected.clone()
    actual[256:, 1] *= 1.5
    assert mask_tables.worst_tile(actual, expected) == pytest.approx(0.5)
    actual[0, 0, 0] = math.nan
    assert mask_tables.worst_tile(actual, expected) == math.inf


def test_tensors_are_compared_by_token():
    x = torch.randn(2, 3, 5, 7)
    by_token = mask_tables.by_token(x, TensorOrder.seqlen_first)
    assert torch.equal(by_token, x.view(6, 5, 7))
    assert torch.equal(mask_tables.by_token(x.transpose(1, 2), TensorOrder.heads_first), by_token)
    assert mask_tables.by_token(by_token, TensorOrder.seqlen_first) is by_token
