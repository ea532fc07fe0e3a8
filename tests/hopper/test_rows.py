"""Which calls the Hopper kernels take, and that the sm80 kernels agree with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import families
from tests.cases.attention import Alibi, Layout
from tests.cases.harness import (
    DEVICE,
    DTYPE_NAMES,
    Case,
    built_row,
    drawn_rng_state,
    expected_keep_mask,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward,
    run_forward_backward,
    run_reference,
    skip_without_row,
)
from tests.cases.matrix import inputs_of
from tests.gpu.limits import run_limited
from tests.hopper.sm90 import (
    DTYPES,
    EVERY_HEAD_DIM,
    HEAD_DIMS,
    check_launches,
    kernels_run,
    most_short_seqlen,
    row_name,
    runs_sm90_kernels,
)
from tests.reference import AttentionResult, visible_keys
from tests.reference.tolerance import assert_close

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


# -- which kernel ----------------------------------------------------------------------------------


OF_NARROW_VALUES = (
    # (head_dim, head_dim_v), features, the rows of forward and backward
    ((192, 128), {}, "sm90_bf16_hd192_dv128_windowed", "sm90_bf16_hd192_dv128_windowed"),
    ((136, 72), {}, "sm90_bf16_hd192_dv128_windowed", "sm90_bf16_hd192_dv128_windowed"),
    ((192, 136), {}, "sm90_bf16_hd192_windowed", "sm90_bf16_hd192_windowed"),
    ((64, 40), {}, "sm90_bf16_hd64_windowed_short", "sm90_bf16_hd64_windowed"),
    ((96, 72), {}, "sm90_bf16_hd96_windowed", "sm90_bf16_hd96_windowed"),
    # A backward's dP is a sum over boxes of values, of which each must have a column.
    ((192, 64), {}, "sm90_bf16_hd192_dv128_windowed", "sm80_bf16_hd192_windowed"),
    ((128, 64), {}, "sm90_bf16_hd128_windowed_few_steps", "sm80_bf16_hd128_windowed"),
    ((96, 64), {}, "sm90_bf16_hd96_windowed", "sm80_bf16_hd96_windowed"),
    (
        *((192, 128), {"dropout_p": 0.1}),
        *("sm90_bf16_hd192_windowed_dropout", "sm80_bf16_hd192_windowed_dropout"),
    ),
    ((64, 128), {}, "sm80_bf16_hd128_windowed", "sm80_bf16_hd128_windowed"),
)


@pytest.mark.cuda_only
@pytest.mark.parametrize(("head_dims", "features", "forward", "backward"), OF_NARROW_VALUES)
def test_values_of_another_head_dim(
    head_dims: tuple[int, int], features: dict[str, Any], forward: str, backward: str
) -> None:
    case = make_case(seqlen_q=256, seqlen_k=256, head_dim=head_dims[0], **features)
    case = replace(case, head_dim_v=head_dims[1])
    inputs = inputs_of(case)
    ran = kernels_run(lambda: run_forward(case, inputs), "forward")
    assert ran == [built_row(f"fwd_{forward}")]
    ran = kernels_run(lambda: run_forward_backward(case, inputs), "backward")
    assert set(ran) == {built_row(f"bwd_{backward}")}


@pytest.mark.cuda_only
@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "bucket"),
    [*((d, d) for d in HEAD_DIMS), (8, 64), (72, 96), (104, 128), (136, 192), (200, 256)],
)
def test_every_head_dim_has_a_row(head_dim: int, bucket: int, dtype: torch.dtype) -> None:
    short_name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    alibi = "alibi" if bucket <= 128 else "dropout"
    plain = "few_steps" if bucket == 128 else ""
    for variant, features in (
        (plain, {}),
        (plain, {"window": (7, -1)}),
        ("dropout", {"dropout_p": 0.1}),
        ("dropout", {"dropout_p": 0.1, "softcap": 3.0}),
        ("dropout", {"softcap": 3.0, "causal": True}),
        (alibi, {"alibi": Alibi.per_head}),
        ("dropout", {"softcap": 3.0, "alibi": Alibi.per_head}),
    ):
        case = make_case(seqlen_q=300, seqlen_k=200, head_dim=head_dim, dtype=dtype, **features)
        plan = families.planned(case)
        assert plan["instance"] == row_name(bucket, variant, dtype=short_name), str(case)
        assert plan["config"]["family"] == "sm90"


@pytest.mark.cuda_only
def test_short_sequences_have_a_row() -> None:
    most, most_full = most_short_seqlen(causal=True), most_short_seqlen(causal=False)
    for seqlen, features, variant in (
        (most_full, {}, "short"),
        (most_full + 128, {}, ""),
        (most_full, {"window": (20, -1)}, "short"),
        (most_full, {"dropout_p": 0.1}, "dropout"),
        (min(1024, most), {"causal": True}, "short"),
        (most, {"causal": True}, "short"),
        (most, {"window": (20, 3)}, "short"),
        (most + 1, {"causal": True}, ""),
        (most, {}, ""),
        (most, {"window": (20, -1)}, ""),
        (most, {"causal": True, "dropout_p": 0.1}, "dropout"),
    ):
        # Enough heads that lower tiles would need another round.
        dense = make_case(seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=64, **features)
        assert families.planned(dense)["instance"] == row_name(64, variant), str(dense)
        packed = make_varlen_case(lengths_q=(seqlen, 90, 0, 90), **features)
        assert families.planned(packed)["instance"] == row_name(64, variant), str(packed)
    # Longer ones too, if they have enough tiles and would fill little of the last ones.
    for seqlen, heads, variant in (
        (257, 64, "short"),
        (384, 64, ""),
        (577, 64, "short"),
        (640, 64, "tall"),
        (800, 64, ""),
        (577, 4, ""),
    ):
        dense = make_case(seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads)
        assert families.planned(dense)["instance"] == row_name(64, variant), str(dense)
    wider = make_case(seqlen_q=1024, seqlen_k=1024, head_dim=72, causal=True)
    assert families.planned(wider)["instance"] == row_name(96)


@pytest.mark.cuda_only
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tiles_of_few_steps_have_a_row(causal: bool) -> None:
    most = most_short_seqlen(128, "few_steps", causal=causal)
    for seqlens, variant in (
        ((most, most), "few_steps"),
        ((most, most + 1), ""),
        ((most + 1, 70), ""),
        ((577, 577), ""),  # the ends of which are no reason here
    ):
        case = make_case(
            seqlen_q=seqlens[0], seqlen_k=seqlens[1], num_heads_q=64, head_dim=128, causal=causal
        )
        assert families.planned(case)["instance"] == row_name(128, variant), str(case)


def launches() -> list[tuple[Case, str]]:
    """Calls, and the rows that they are to run."""
    sm80 = {"family": "sm80"}
    base = make_case(seqlen_q=200, seqlen_k=300)
    packed = make_varlen_case(lengths_q=(200, 0, 33))
    cache = make_cache_case(seqlens_q=70)
    long = most_short_seqlen(causal=True) + 1
    short = row_name(64, "short")
    return [
        (base, row_name(64)),
        (replace(base, seqlen_k=200), short),
        (replace(base, causal=True, seqlen_k=long), row_name(64, "cache")),
        (replace(base, causal=True), short),
        (replace(base, seqlen_q=long, causal=True), row_name(64)),
        (
            replace(base, head_dim=128, dtype=torch.float16),
            row_name(128, "few_steps", dtype="fp16"),
        ),
        (replace(base, head_dim=128, seqlen_k=600), row_name(128)),
        (replace(base, softcap=3.0), row_name(64, "dropout")),
        (replace(base, alibi=Alibi.per_head), row_name(64, "alibi")),
        (replace(base, alibi=Alibi.per_batch, head_dim=192), row_name(192, "dropout")),
        (replace(base, dropout_p=0.5, head_dim=256), row_name(256, "dropout")),
        (replace(base, softmax_scale=0.0), row_name(64)),
        (replace(base, softmax_scale=-0.5), row_name(64, **sm80)),
        (replace(base, softmax_scale=-0.5, softcap=3.0), row_name(64, "modifiers", **sm80)),
        (replace(base, layout=Layout.expanded_batch), row_name(64, **sm80)),
        (replace(base, layout=Layout.expanded_batch, batch=1), row_name(64)),
        (replace(base, layout=Layout.heads_first), row_name(64)),
        (replace(base, layout=Layout.surrounded), row_name(64)),
        (replace(base, layout=Layout.odd_stride), row_name(64)),  # of a copy
        (replace(base, seqlen_q=4), row_name(64, "decode", **sm80)),
        (packed, short),
        (replace(packed, causal=True), short),
        (replace(packed, lengths_q=(long, 0, 33)), row_name(64)),
        (replace(packed, lengths_q=(long, 0, 33), causal=True), row_name(64)),
        (replace(cache, seqlens_q=long), row_name(64)),
        (cache, short),
        (replace(cache, leftpad=(3, 0, 1), head_dim=128), row_name(128, "few_steps")),
        (replace(cache, page_size=16), row_name(64, "cache")),
        (replace(cache, page_size=24, head_dim=72), row_name(128, "cache")),
        (replace(cache, page_size=16, head_dim=192), row_name(192, "modifiers", **sm80)),
        (replace(cache, page_size=12), row_name(64, "modifiers", **sm80)),
        (replace(cache, page_size=16, leftpad=(3, 0, 1)), row_name(64, "modifiers", **sm80)),
        (replace(cache, page_size=16, softcap=3.0), row_name(64, "cache_modifiers")),
        (replace(cache, page_size=16, alibi=Alibi.per_head), row_name(64, "cache_modifiers")),
        (replace(cache, seqlens_q=1), row_name(64, "decode", **sm80)),
    ]


@pytest.mark.cuda_only
def test_which_kernels_run() -> None:
    check_launches(
        [(case, partial(run_forward, case, case.make_inputs()), row) for case, row in launches()],
        "forward",
    )


# -- which kernel of the backward ------------------------------------------------------------------


@pytest.mark.cuda_only
@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "bucket"),
    [*((d, d) for d in HEAD_DIMS), (8, 64), (32, 64), (72, 96), (104, 128), (136, 192), (200, 256)],
)
def test_every_head_dim_has_a_backward_row(head_dim: int, bucket: int, dtype: torch.dtype) -> None:
    alone = bucket <= 128
    alibi, softcap = ("alibi", "softcap") if alone else ("dropout", "dropout")
    for variant, features in (
        ("", {}),
        ("", {"window": (7, -1), "deterministic": True}),
        ("dropout", {"dropout_p": 0.1}),
        ("dropout", {"dropout_p": 0.1, "alibi": Alibi.per_head}),
        (alibi, {"alibi": Alibi.per_head, "deterministic": True}),
        (softcap, {"softcap": 3.0, "causal": True}),
        (softcap, {"softcap": 3.0, "alibi": Alibi.per_head}),
        ("softcap_dropout" if alone else "dropout", {"softcap": 3.0, "dropout_p": 0.1}),
    ):
        case = make_case(seqlen_q=300, seqlen_k=200, head_dim=head_dim, dtype=dtype, **features)
        plan = families.planned(case, "backward")
        name = row_name(bucket, variant, dtype=DTYPE_NAMES[dtype], kernel_pass="bwd")
        assert plan["instance"] == name, str(case)
        assert plan["config"]["family"] == "sm90"


def backward_launches() -> list[tuple[Case, str]]:
    """Calls, and the rows that their backward is to run."""

    def sm90(head_dim: int, variant: str = "") -> str:
        return row_name(head_dim, variant, kernel_pass="bwd")

    def sm80(variant: str = "") -> str:
        return row_name(64, variant, family="sm80", kernel_pass="bwd")

    base = make_case(seqlen_q=200, seqlen_k=300, causal=True)
    negative = replace(base, softmax_scale=-0.5)
    packed = make_varlen_case(lengths_q=(200, 0, 33))
    return [
        (base, sm90(64)),
        (replace(base, causal=False), sm90(64)),
        (replace(base, head_dim=128, deterministic=True), sm90(128)),
        (replace(base, softcap=3.0), sm90(64, "softcap")),
        (replace(base, softcap=3.0, dropout_p=0.5), sm90(64, "softcap_dropout")),
        (replace(base, alibi=Alibi.per_head), sm90(64, "alibi")),
        (replace(base, dropout_p=0.5), sm90(64, "dropout")),
        (replace(base, alibi=Alibi.per_batch, head_dim=192), sm90(192, "dropout")),
        (replace(base, dropout_p=0.5, head_dim=256), sm90(256, "dropout")),
        (replace(base, softmax_scale=0.0), sm90(64)),
        (negative, sm80()),
        (replace(negative, deterministic=True), sm80("ordered")),
        (replace(negative, softcap=3.0), sm80("modifiers")),
        (replace(negative, dropout_p=0.5), sm80("dropout")),
        (replace(base, layout=Layout.expanded_batch), sm80()),
        (replace(base, layout=Layout.expanded_batch, batch=1), sm90(64)),
        (replace(base, layout=Layout.heads_first), sm90(64)),
        (replace(base, layout=Layout.surrounded), sm90(64)),
        (replace(base, layout=Layout.odd_stride), sm90(64)),  # of a copy
        (replace(base, seqlen_q=4), sm90(64)),  # of which the forward is another family's
        (packed, sm90(64)),
        (replace(packed, head_dim=96, causal=True), sm90(96)),
    ]


@pytest.mark.cuda_only
def test_which_backward_kernels_run() -> None:
    check_launches(
        [
            (case, partial(run_forward_backward, case, case.make_inputs()), row)
            for case, row in backward_launches()
        ],
        "backward",
    )


# -- the sm80 kernels on the same GPU --------------------------------------------------------------


@DTYPES
@EVERY_HEAD_DIM
def test_dropout_drops_what_seed_and_offset_say(head_dim: int, dtype: torch.dtype) -> None:
    """Pair by pair, as the kernel multiplied it."""
    case = make_case(
        seqlen_q=200, seqlen_k=301, head_dim=head_dim, num_heads_k=2, dropout_p=0.3, dtype=dtype
    )
    skip_without_row(case, backward=False)
    kept = expected_keep_mask(case, drawn_rng_state(case, case.make_inputs()))
    assert torch.equal(families.kept_pairs(case), kept)


@pytest.mark.cuda_only
def test_both_families_agree(tmp_path: Path) -> None:
    """With the reference, with each other, and on what is dropped, bit for bit."""
    for case in (*families.CASES, *families.DROPOUT_CASES):
        skip_without_row(case)
    file = tmp_path / "sm80.pt"
    finished = run_limited("-m", "tests.cases.families", str(file), capability=80)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    there, here = torch.load(file, map_location=DEVICE), families.results()
    for case in (*families.CASES, *families.DROPOUT_CASES):
        sm90, sm80 = here[str(case)], there[str(case)]
        for name, record in (("sm90", sm90), ("sm80", sm80)):
            assert record["family"] == {"forward": name, "backward": name}, str(case)
        expected = run_reference(case, case.make_inputs())
        result, other = (AttentionResult(**record["tensors"]) for record in (sm90, sm80))
        for each in (result, other):
            assert_close(each, *expected)
        exact = {name: x.double() for name, x in other.tensors().items()}
        assert_close(result, replace(expected[0], **exact), expected[1])
    for case in families.DROPOUT_CASES:
        kept = here[str(case)]["kept"]
        assert torch.equal(kept, there[str(case)]["kept"]), str(case)
        mask = expected_keep_mask(case, drawn_rng_state(case, case.make_inputs()))
        visible = visible_keys(case.seqlen_q, case.seqlen_k, causal=case.causal, device=DEVICE)
        assert torch.equal(kept, mask & visible), str(case)
