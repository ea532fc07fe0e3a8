"""The kernel table: what the C++ side reads of it, and that every call finds a row."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest

from build_tools.generate import kernel_units
from build_tools.report.print_table import table_text
from flash_attn_cuda.call.rules import MAX_HEAD_DIM
from kernel_table.all_rows import ALL_ROWS, BACKWARD_ROWS, ENTRIES, FORWARD_ROWS
from kernel_table.row import (
    BackwardRow,
    Dtype,
    Family,
    Feature,
    ForwardRow,
    Kernel,
    KernelRow,
    Kind,
    Mask,
    Pass,
    RowError,
)
from tests.building.kernel_rows import least_keys, most_seqlen

REPO = Path(__file__).resolve().parents[2]
CONFIG = (REPO / "csrc/flash_attn/config.h").read_text()
of_each_pass = pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
MASKS = Feature.block_sparse | Feature.bias
MODIFIERS = Feature.softcap | Feature.alibi
TRAINING = MODIFIERS | Feature.dropout


def _kind(row: KernelRow) -> Kind | None:
    return row.kind if isinstance(row, ForwardRow) else None


def _has_tangents(row: KernelRow) -> bool:
    """Whether it serves derivatives in a direction, and so no other call."""
    return Feature.tangent in row.features


TANGENT_ROWS = [row for row in ALL_ROWS if _has_tangents(row)]
MASKED_ROWS = [row for row in ALL_ROWS if row.features & MASKS and row not in TANGENT_ROWS]


# What the C++ side reads


def _cpp_fields(struct: str) -> dict[str, str | None]:
    """Those of the struct in config.h in its order, with their defaults."""
    body = re.search(rf"struct {struct} {{(|\n.*?\n)}};", CONFIG, flags=re.DOTALL)
    assert body is not None
    found = re.findall(r"^\s+\w+ (\w+)(?: = (\w+))?;", body[1], flags=re.MULTILINE)
    return {name: default or None for name, default in found}


@pytest.mark.parametrize("row_type", [ForwardRow, BackwardRow])
def test_fields_of_rows_are_those_of_the_structs(row_type: type[KernelRow]) -> None:
    """What planning reads in the order of the pass's struct, with the default that rows of other
    kernels keep; every other field is of the own struct of some kernel of the pass.
    """
    of_rows = {f.name: f for f in fields(row_type) if f.metadata.get("compiled", True)}
    planned = {name: f for name, f in of_rows.items() if f.metadata.get("planned", True)}
    of_struct = _cpp_fields(row_type.config_struct)
    assert list(of_struct) == list(planned)
    for name, default in of_struct.items():
        kept = planned[name].default if "kernels" in planned[name].metadata else None
        assert default == (None if kept is None else str(kept).lower()), name
    rows = [row for row in ALL_ROWS if isinstance(row, row_type)]
    kernels = {row.kernel for row in rows}
    own = {name for kernel in kernels for name in _cpp_fields(kernel.own_struct)}
    assert own | of_struct.keys() == of_rows.keys() and not own & of_struct.keys()
    for f in of_rows.values():
        assert set(f.metadata.get("kernels", kernels)) <= kernels
    for row in rows:
        of_kernel = _cpp_fields(row.kernel.own_struct)
        assert list(row.own_config()) == list(of_kernel) and set(of_kernel.values()) <= {None}
        assert row.planned_config().keys() <= of_struct.keys()
        assert all(of_struct[x] is not None for x in of_struct.keys() - row.planned_config().keys())
        assert row.config() == {**row.planned_config(), **row.own_config()}
        assert None not in row.config().values()


def test_rows_are_made_of_their_launch_headers() -> None:
    for row in ALL_ROWS:
        instance = f"{row.config_struct.removesuffix('Config')}Instance {row.make_instance}("
        assert f"constexpr {instance}" in (REPO / f"csrc/{row.launch_header}").read_text(), row.name


@pytest.mark.parametrize("enum", [Dtype, Mask, Family, Kind])
def test_enumerators_are_those_of_the_header(enum) -> None:
    name = kernel_units.CPP_ENUMS[enum]
    body = re.search(rf"enum class {name} : std::uint8_t {{ (.*?) }};", CONFIG)
    assert body is not None
    of_tensors = ["e4m3"] if enum is Dtype else []  # which no row writes
    assert body[1].split(", ") == [*(member.value for member in enum), *of_tensors]


def test_features_are_those_of_the_list() -> None:
    """Which config.h and host/names.h include; tests/host has the names that errors print."""
    text = (REPO / "csrc/flash_attn/feature_list.h").read_text()
    bits = re.findall(r"^FEATURE\((\w+), (\d+)\)", text, flags=re.MULTILINE)
    assert {name: 1 << int(bit) for name, bit in bits} == {f.name: f.value for f in Feature}
    assert [int(bit) for _, bit in bits] == list(range(len(Feature)))
    kinds = {kind.value for kind in Kind}  # one of which shares a feature's name
    for text in (CONFIG, (REPO / "csrc/host/names.h").read_text()):
        assert '#include "flash_attn/feature_list.h"' in text
        for feature in (feature for feature in Feature if feature.name not in kinds):
            assert f"{feature.name} =" not in text and f'"{feature.name}"' not in text


def test_no_head_dim_decides_outside_the_table() -> None:
    """Comparisons with a number: what is decided for a head dim is a field of its row."""
    for folder in ("sm80", "sm90", "shared", "host", "auxiliary"):
        for path in (REPO / "csrc" / folder).rglob("*.*"):
            number = r"\b(?:head_dim(?:_v)?|cta_columns)\s*(?:[<>!=]=|[<>])\s*\d+"
            assert not re.findall(f".*{number}.*", path.read_text()), path.name


# Rows and their order


def test_names_and_entries_are_unique() -> None:
    """No family, pass and head dim has two entries, and a variant stands in one place."""
    names = [row.name for row in ALL_ROWS]
    assert len(set(names)) == len(names)
    places = [(each.kernel, each.head_dim) for each in ENTRIES]
    assert len(set(places)) == len(places)
    for each in ENTRIES:
        variants = [variant for one in each.tiles for variant in one.variants]
        assert len(set(variants)) == len(variants)
    assert sorted(row.name for each in ENTRIES for row in each.rows()) == sorted(names)


@pytest.mark.parametrize("has_tangents", [False, True])
@of_each_pass
def test_the_widest_rows_are_as_wide_as_checks_allow(rows, has_tangents) -> None:
    rows = [row for row in rows if _has_tangents(row) is has_tangents]
    assert max(row.head_dim for row in rows) == MAX_HEAD_DIM
    assert max(row.value_dim for row in rows) == MAX_HEAD_DIM


@of_each_pass
def test_every_dtype_has_the_same_rows(rows) -> None:
    for row in rows:
        assert all(replace(row, dtype=dtype) in rows for dtype in Dtype), row.name


def _group(row: KernelRow) -> tuple:
    """What a request and the device fix: rows of other groups never compete with this one, or, as
    those for lists and a bias, only where no other runs.
    """
    fixed = row.features & (MASKS | Feature.tangent | Feature.latent | Feature.key_lists)
    return row.kernel_pass, row.family, row.dtype, _kind(row), fixed


@of_each_pass
def test_smaller_head_dims_and_full_masks_come_first(rows) -> None:
    order = list(Mask)
    for group in {_group(row) for row in rows}:
        of_group = [row for row in rows if _group(row) == group]
        keys = [(row.head_dim, row.value_dim, order.index(row.mask)) for row in of_group]
        assert keys == sorted(keys)


@of_each_pass
def test_every_row_with_features_has_a_plain_twin_before_it(rows) -> None:
    """So that a call without features never runs the slower kernel. In the sm80 backward of the
    same tile, as tiles differ in the shared memory that they need; all others fit the GPUs that
    their family runs on, and masked rows come behind plain ones that need less. A derivative in a
    direction without features has no other kernel: one for all of them is compiled. So it is with
    latent attention and lists of blocks.
    """
    free = Feature.deterministic  # costs some kernels nothing: their plain rows have it
    served = (
        *("family", "dtype", "mask", "head_dim", "head_dim_v", "kind"),
        *("most_causal_seqlen", "most_full_seqlen"),
    )

    def tile(row: KernelRow) -> dict:
        is_masked = bool(row.features & MASKS)
        is_any = is_masked or row.family is Family.sm90 or row.kernel_pass is Pass.forward
        config = {name: value for name, value in row.config().items() if name != "features"}
        return {name: config[name] for name in served if name in config} if is_any else config

    for position, row in enumerate(rows):
        if _kind(row) in (Kind.decode, Kind.latent):
            continue
        if not row.features & ~free or _has_tangents(row) or Feature.key_lists in row.features:
            continue
        if row.family is Family.sm80 and row.columns_per_cta > 0:
            continue  # of wide heads one row serves plain calls and others, to compile less
        twins = [
            other
            for other in rows[:position]
            if other.head_dim == row.head_dim
            and tile(other).items() >= tile(row).items()
            and not other.features & ~free
        ]
        assert twins, row.name


def test_every_row_can_run_something_of_its_own() -> None:
    """A row that an earlier one covers whatever the request would never be chosen.

    Shared memory is not in the table: rows that differ in it have a variant that says so. Rows of
    another family are there for GPUs and tensors that it does not suit. A latent row is for so many
    rows of a sequence, or fewer.
    """
    for position, row in enumerate(ALL_ROWS):
        if "smem" in row.variant:
            continue
        for earlier in ALL_ROWS[:position]:
            covers = (
                _group(earlier) == _group(row)
                and earlier.head_dim >= row.head_dim
                and earlier.value_dim >= row.value_dim
                and all(map(operator.le, most_seqlen(row), most_seqlen(earlier)))
                and all(map(operator.ge, least_keys(row), least_keys(earlier)))
                and (earlier.mask is Mask.windowed or row.mask is Mask.full)
                and row.features in earlier.features
                and (_kind(row) is not Kind.latent or earlier.block_m >= row.block_m)
            )
            assert not covers, (earlier.name, row.name)


SM80_FORWARD_ROW, DECODE_ROW, SM90_FORWARD_ROW, SM80_BACKWARD_ROW, SM90_BACKWARD_ROW = (
    next(row for row in ALL_ROWS if row.kernel is kernel and row.head_dim == 128)
    for kernel in (
        *(Kernel.sm80_forward, Kernel.sm80_decode, Kernel.sm90_forward),
        *(Kernel.sm80_backward, Kernel.sm90_backward),
    )
)
LATENT_ROW, DECODE_LATENT_ROW = (
    next(row for row in FORWARD_ROWS if row.is_latent and row.kernel is kernel)
    for kernel in (Kernel.sm90_latent, Kernel.sm80_decode)
)
SEPARATE_ROW = next(row for row in BACKWARD_ROWS if row.value_registers == 224)
SM80_JVP_ROW, SM80_HVP_ROW, SM90_JVP_ROW = (
    next(row for row in ALL_ROWS if row.kernel is kernel and row.head_dim == 128)
    for kernel in (Kernel.sm80_jvp, Kernel.sm80_hvp, Kernel.sm90_jvp)
)


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (SM80_FORWARD_ROW, {"head_dim": 96, "block_m": 80, "block_n": 160, "num_warps": 5}),
        (SM80_FORWARD_ROW, {"head_dim": 32, "block_m": 80, "block_n": 128, "num_warps": 1}),
        (SM80_FORWARD_ROW, {"block_m": 96, "block_n": 48, "num_warps": 2}),
        (SM90_FORWARD_ROW, {"block_m": 192, "block_n": 96, "num_warps": 12}
         | {"producer_registers": 32, "consumer_registers": 160}),
        (SM80_BACKWARD_ROW, {"block_n": 96, "warps_m_scores": 4, "warps_n_dkdv": 2}),
    ],
)  # fmt: skip
def test_sides_of_a_tile_need_not_be_powers_of_two(row, changes) -> None:
    changed = replace(row, **changes, variant="changed", features=Feature(0))
    assert changed.config().items() >= changes.items()
    assert row.tile != changed.tile


@pytest.mark.parametrize(
    ("row", "changes", "rule"),
    [
        (SM80_FORWARD_ROW, {"num_warps": 4}, "every warp multiplies whole 16 queries"),
        (SM80_FORWARD_ROW, {"num_warps": 5}, "160 threads copy 20 rows at a time, not whole"),
        (DECODE_ROW, {}, "a tile is the 16 rows of one product"),
        (SM90_FORWARD_ROW, {"num_warps": 5}, "a warpgroup multiplies 64 queries"),
        (SM90_BACKWARD_ROW, {}, "a warpgroup multiplies dQ of 64 queries"),
        (SM80_BACKWARD_ROW, {}, "warps share 80 x 128 in whole 16 x 16 (warps_m_scores)"),
        (SM80_BACKWARD_ROW, {"num_warps": 4, "warps_m_scores": 1, "warps_n_dkdv": 2,
         "warps_m_dq": 1},
         "queries a step are a power of two: auxiliary/backward/preprocess.cu shifts by it"),
        (SM80_JVP_ROW, {}, "every warp multiplies whole 16 queries"),
        (SM90_JVP_ROW, {}, "each of num_warps multiplies 16 queries"),
        (SM80_HVP_ROW, {}, "warps share 80 x 128 in whole 16 x 16 (warps_m_scores)"),
        (SM80_HVP_ROW, {"warps_m_scores": 1, "warps_m_dq": 1},
         "queries a step are a power of two: auxiliary/backward/preprocess.cu shifts by it"),
    ],
)  # fmt: skip
def test_a_tile_of_80_x_128_is_refused_by_a_rule_of_the_kernel(row, changes, rule) -> None:
    with pytest.raises(RowError, match=re.escape(rule)) as error:
        replace(row, **{"block_m": 80, "block_n": 128, **changes})
    assert row.name in str(error.value) and "80 x 128" in str(error.value)


@pytest.mark.parametrize(
    ("row", "changes", "complaint"),
    [
        (SM90_FORWARD_ROW, {"block_n": 72}, "P V takes 16 keys at a time"),
        (SM90_FORWARD_ROW, {"stages_kv": 1}, "one buffer fills while the other is read"),
        (SM90_FORWARD_ROW, {"consumer_registers": 240}, "520 registers are asked for where"),
        (SM90_FORWARD_ROW, {"consumer_registers": 236}, "consumer_registers: a multiple of 8"),
        (SM90_BACKWARD_ROW, {"ctas_per_tile": 1}, "a warpgroup holds dK, dV or both"),
        (SM90_BACKWARD_ROW, {"head_dim": 64}, "store dK and dV through two buffers of dS"),
        (SM90_BACKWARD_ROW, {"stores_tiles": True}, "dS's buffers, or their own"),
        (SM90_BACKWARD_ROW, {"dq_columns": 96}, "dq_columns divide"),
        (SM90_BACKWARD_ROW, {"value_registers": 208}, "holds dV alone with separate_keys"),
        (SM90_BACKWARD_ROW, {"holds_keys": True}, "dK and dV leave no registers for K"),
        (SEPARATE_ROW, {"value_registers": 232}, "520 registers are asked for where"),
        (SM80_BACKWARD_ROW, {"warps_m_dq": 3}, "warps_m_dq divides num_warps"),
        (SM80_FORWARD_ROW, {"stages_q": 2}, "stages_q is of sm90 forward, a row of sm80 forward"),
        (
            SM80_FORWARD_ROW,
            {"stages_kv": 2},
            "stages_kv is of sm90 forward and sm90 wide_forward and sm90 latent and sm90 jvp and "
            "sm80 decode",
        ),
        (DECODE_ROW, {"head_dim_v": 64}, "values have the head dim of keys"),
        (DECODE_ROW, {"columns_per_warp": 32}, "one warp or two share a slice of keys"),
        (DECODE_LATENT_ROW, {"head_dim": 32}, "a warp has whole 32 columns of keys"),
        (DECODE_LATENT_ROW, {"shares_queries": False}, "registers hold no qv beside O"),
        (DECODE_LATENT_ROW, {"features": DECODE_ROW.features}, "values have the head dim of keys"),
        (LATENT_ROW, {"features": Feature.softcap}, "scores have qv v^T"),
        (LATENT_ROW, {"block_m": 24}, "rows are the columns of a product"),
        (DECODE_ROW, {"keeps_pointers": True}, "keeps_pointers is of sm80 forward"),
        (SM90_FORWARD_ROW, {"shares_queries": True}, "shares_queries is of sm80 decode"),
        (SM90_FORWARD_ROW, {"producer_registers": None}, "must give producer_registers"),
        (SM80_BACKWARD_ROW, {"finishes_dq": True}, "finishes_dq is of sm90 backward"),
        (SM80_BACKWARD_ROW, {"ctas_per_tile": 2}, "ctas_per_tile is of sm90 backward"),
        (SM90_BACKWARD_ROW, {"warps_m_dq": 2}, "warps_m_dq is of sm80 backward"),
        (SM80_JVP_ROW, {"keeps_pointers": True}, "keeps_pointers is of sm80 forward"),
        (SM80_JVP_ROW, {"stages_kv": 2}, "a row of sm80 jvp has none"),
        (SM80_HVP_ROW, {"warps_m_dq": 3}, "warps_m_dq divides num_warps"),
        (SM80_HVP_ROW, {"warps_m_dq": None}, "a row of sm80 hvp must give warps_m_dq"),
        (SM80_HVP_ROW, {"stages_q": 1}, "stages_q is of sm80 backward and sm90 backward"),
        (SM90_JVP_ROW, {"stages_q": 1}, "stages_q is of sm90 forward, a row of sm90 jvp"),
        (SM90_JVP_ROW, {"block_n": 80}, "the keys of a step are one of CuTe's"),
        (SM90_JVP_ROW, {"block_m": 192, "num_warps": 12}, "two warpgroups multiply"),
        (SM90_JVP_ROW, {"head_dim_v": 64}, "values have the head dim of keys"),
        (SM90_JVP_ROW, {"producer_registers": 40}, "520 registers are asked for where"),
    ],
)
def test_what_a_kernel_cannot_be_is_refused(row, changes, complaint) -> None:
    with pytest.raises(RowError, match=re.escape(complaint)):
        replace(row, **changes)


def test_the_whole_table_can_be_printed() -> None:
    """A part for each entry; derivatives in a direction and a backward with lists of blocks are
    variants of their pass.
    """
    lines = table_text().splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    parts = [
        each
        for each in ENTRIES
        if each.kernel is not Kernel.sm80_listed_backward
        and not any(map(_has_tangents, each.rows()))
    ]
    assert len(set(titles)) == len(titles) == len(parts)
    for row in ALL_ROWS:
        of_values = "" if row.head_dim_v is None else f", of values {row.head_dim_v}"
        title = f"{row.family.value} {row.kernel_pass.name}, head dim {row.head_dim}{of_values}"
        if _kind(row) is Kind.decode:
            title = title.replace("forward", "decode")
        rest = lines[lines.index(title) + 2 :]
        line = next(line for line in rest if line.split()[0] == (row.variant or "plain"))
        assert f" {row.block_m} x {row.block_n} " in line and " fp16 bf16" in line
        assert all(f.name in line for f in Feature if f in row.features)
    (plain,) = (line for line in lines if "windowed never" in line)
    for text in ("128 x 128", "producer 32, key 208, dq 64", "q 2, do 2, kv 2", "finishes_dq"):
        assert text in plain


def test_every_sm80_forward_tile_fits_every_gpu() -> None:
    """Q, K and V of a step in the 99 KiB that GPUs of compute capability 8.6 give a block; of wide
    heads those of the variants that are named after it. Derivatives in a direction, which have the
    tangents of all three as well, have none that is: of wide heads they need an A100's 163 KiB.
    """
    for row in FORWARD_ROWS:
        if row.family is not Family.sm80 or row.kind is not Kind.tiles:
            continue
        columns = row.columns_per_cta or row.head_dim
        smem_bytes = 2 * (row.head_dim * (row.block_m + row.block_n) + columns * row.block_n)
        if _has_tangents(row):
            smem_bytes *= 2
            assert smem_bytes <= 162 * 1024, row.name
        fits = smem_bytes <= 98 * 1024  # 1 KiB for what else it keeps there
        assert fits if columns == row.head_dim else fits == ("smem99k" in row.variant), row.name


def test_the_second_backward_of_wider_heads_needs_more_shared_memory() -> None:
    """K, V, their tangents, Q, its tangent and dO of a step, and three matrices of scores: up to
    head dim 128 for every GPU, up to 256 for an A100, above for Hopper GPUs alone.
    """
    kib_of_gpus = (99, 163, 227)
    needed: dict[int, int] = {}
    for row in filter(_has_tangents, BACKWARD_ROWS):
        operands = row.head_dim * (4 * row.block_n + 3 * row.block_m)
        smem_bytes = 2 * (operands + 3 * row.block_m * row.block_n)
        # 1.5 KiB for row statistics and what else it keeps there.
        fitting = [kib for kib in kib_of_gpus if smem_bytes + 1536 <= 1024 * kib]
        assert fitting, row.name
        needed[row.head_dim] = min(fitting[0], needed.get(row.head_dim, fitting[0]))
    assert needed == {128: 99, 256: 163, 512: 227}


# Every call has a row


def _serves(rows: Sequence[KernelRow], head_dim: int, dtype: Dtype, features: Feature) -> bool:
    return any(
        row.head_dim >= head_dim
        and row.dtype is dtype
        and row.mask is Mask.windowed
        and features in row.features
        for row in rows
    )


FORWARD_CALLS = [
    *(Feature(0), Feature.softcap, Feature.alibi, Feature.dropout, Feature.paged_kv, TRAINING),
    MODIFIERS | Feature.paged_kv,
]
BACKWARD_CALLS = [Feature.deterministic, TRAINING | Feature.deterministic]
LISTS_OR_BIAS = [Feature.block_sparse, Feature.bias]
MASKED_CALLS = [
    *(*LISTS_OR_BIAS, MASKS, MASKS | TRAINING),
    *(Feature.block_sparse | f for f in (Feature.softcap, Feature.alibi, Feature.dropout)),
]


@pytest.mark.parametrize(
    ("kernel_pass", "calls"), [(Pass.forward, FORWARD_CALLS), (Pass.backward, BACKWARD_CALLS)]
)
def test_every_call_has_a_row_of_its_head_dim(kernel_pass: Pass, calls: list[Feature]) -> None:
    """On every GPU: of the family that runs on all of them, with any number of queries."""
    rows = [
        row
        for row in ALL_ROWS
        if (row.kernel_pass, row.family) == (kernel_pass, Family.sm80)
        and not _has_tangents(row)
        and most_seqlen(row) >= (1 << 31, 1 << 31)
        and _kind(row) is not Kind.decode
    ]
    for head_dim, dtype, features in product((32, 64, 96, 128, 192, 256), Dtype, calls):
        of_head_dim = [row for row in rows if row.head_dim == head_dim]
        assert _serves(of_head_dim, head_dim, dtype, features), (head_dim, dtype, features)


@pytest.mark.parametrize("kernel_pass", list(Pass))
@pytest.mark.parametrize(
    ("family", "widest", "calls"),
    [(Family.sm80, 256, MASKED_CALLS), (Family.sm90, 128, LISTS_OR_BIAS)],
)
def test_every_masked_call_has_a_row(family, widest, calls, kernel_pass) -> None:
    """sm80 has one for whatever comes with a mask, up to the widest heads; sm90 for lists alone and
    for a bias alone, up to 128.
    """
    rows = [row for row in MASKED_ROWS if (row.kernel_pass, row.family) == (kernel_pass, family)]
    for head_dim, dtype, features in product(range(8, widest + 1, 8), Dtype, calls):
        assert _serves(rows, head_dim, dtype, features), (head_dim, dtype, features)


def test_rows_with_lists_or_a_bias() -> None:
    """Their tiles divide those of the lists and hold whole pieces, or lie in one: a step looks at
    the states of one, two or four. What else they have is for the family to say. Those that decode
    have a bias beside all else, and no lists.
    """
    tile, piece = 128, 64  # of lists
    for row in (row for row in ALL_ROWS if row.features & MASKS):
        if _kind(row) is Kind.decode:
            assert row.features & MASKS is Feature.bias and row.variant.startswith("decode")
            continue
        for side in (row.block_m, row.block_n):
            assert tile % side == 0 and (side >= piece or piece % side == 0), row.name
        if _has_tangents(row):
            continue
        if row.family is Family.sm80:
            is_backward = row.kernel_pass is Pass.backward
            of_pages = Feature.paged_kv if row.head_dim <= 256 else Feature(0)
            of_pass = Feature.deterministic if is_backward else of_pages
            assert row.features == MASKS | TRAINING | of_pass
            assert row.variant.startswith("masked")
            continue
        assert row.features in LISTS_OR_BIAS, row.name
        assert row.variant == ("bias" if row.features is Feature.bias else "sparse")
        # The tile of a list and one of a CTA are the same.
        assert row.block_m == tile or row.kernel_pass is Pass.backward
        assert row.block_n == tile


def test_rows_for_masks_come_behind_all_others_of_their_family() -> None:
    """So that no other call runs their code, which costs it speed. Where rows for derivatives in a
    direction stand is of no matter to other calls, which never run them.
    """
    for rows, family in product((FORWARD_ROWS, BACKWARD_ROWS), Family):
        of_family = [row for row in rows if row.family is family and not _has_tangents(row)]
        masked = [bool(row.features & MASKS) for row in of_family]
        assert masked == sorted(masked) and any(masked)


def test_decode_rows_serve_what_only_they_can() -> None:
    """Tiles of 16 rows that hold several heads, every head dim, splits and pages."""
    rows = [row for row in FORWARD_ROWS if row.kind is Kind.decode]
    assert {row.head_dim for row in rows} == {32, 64, 96, 128, 192, 256, 512}
    for row in rows:
        assert row.block_m == 16
        assert Feature.packed_gqa | Feature.split_kv in row.features
        assert (Feature.paged_kv in row.features) is (Feature.key_lists not in row.features)


def test_rows_for_lists_of_blocks() -> None:
    """Few, of which both passes have the same, and which every GPU has the memory of."""
    for rows in (FORWARD_ROWS, BACKWARD_ROWS):
        found = [row for row in rows if Feature.key_lists in row.features]
        assert list(dict.fromkeys(row.head_dim for row in found)) == [64, 128, 256]
        assert all(Feature.softcap in row.features for row in found)
    # A tile of the backward is of one block, and holds the heads of a key head.
    assert all(64 % row.block_n == 0 and row.block_m >= 32 for row in found)


def test_rows_for_derivatives_in_a_direction() -> None:
    """sm80 rows have whatever a call is differentiated with and serve all head dims up to their
    own, so there are few. sm90 rows, which load no box without a column, have windows alone and the
    head dims of plain calls but for the widest.
    """
    head_dims: dict[Kernel, list[int]] = {
        Kernel.sm80_jvp: [128, MAX_HEAD_DIM],
        Kernel.sm80_hvp: [128, 256, MAX_HEAD_DIM],
        Kernel.sm90_jvp: [64, 96, 128, 192, 256],
    }
    for row in ALL_ROWS:
        of_tangents = row.kernel in head_dims
        assert of_tangents is _has_tangents(row) is row.variant.startswith("tangent"), row.name
    for kernel, wanted in head_dims.items():
        rows = [row for row in TANGENT_ROWS if row.kernel is kernel]
        assert list(dict.fromkeys(row.head_dim for row in rows)) == wanted
        features = Feature.tangent
        if kernel is not Kernel.sm90_jvp:
            features |= MASKS | TRAINING
        if kernel is Kernel.sm80_hvp:
            features |= Feature.deterministic
        for row in rows:
            assert row.features == features and row.mask is Mask.windowed
            assert row.value_dim == row.head_dim and _kind(row) in (None, Kind.tiles)
            assert most_seqlen(row) >= (1 << 31, 1 << 31)
