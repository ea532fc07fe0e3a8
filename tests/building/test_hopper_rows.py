"""Which rows a build for Hopper GPUs alone has: those that some call finds there, no more."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from build_tools import build_kernels
from build_tools.compile import toolchain, unused_headers
from build_tools.generate import kernel_units
from kernel_table import hopper_rows
from kernel_table.all_rows import ALL_ROWS
from kernel_table.row import BackwardRow, Dtype, Family, Feature, Kernel, KernelRow
from tests.building.kernel_rows import (
    DECODE_ROW,
    DROPOUT_ROW,
    FEATURES_ROW,
    ROW,
    SHORT_ROW,
    SM90_ROW,
)

REPO = Path(__file__).resolve().parents[2]
FOUND = hopper_rows.found(ALL_ROWS)
NEEDED = hopper_rows.needed(ALL_ROWS)

# In place of the launch headers: what only keeps a row. All fit the shared memory of a Hopper GPU.
LAUNCH_HEADER = """
#pragma once
#include "flash_attn/instance.h"
namespace flash_attn_cuda::{family} {{
template <class Tag>
constexpr {kind}Instance make_{name}_instance(const char* name) {{
  return {{.name = name, .config = Tag::config, .smem_bytes = 0}};
}}
}}
"""

# Every request that a Hopper GPU may get, as one and as what FLASH_ATTN_CUDA_CAPABILITY_LIMIT=80
# makes of it. Prints which sm80 rows are chosen, of all and of those of a build for Hopper alone.
# Fails where the latter choose another row though they have it, or one of other tiles.
PROGRAM = """
#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "host/select_instance.h"

using namespace flash_attn_cuda;

const std::set<std::string> needed{NEEDED};
const std::set<std::string> writing_fp32{WRITING_FP32};

[[noreturn]] void fail(const char* what, const char* row) {
  std::printf("error: %s: %s\\n", what, row);
  std::exit(1);
}

template <class Instance>
const Instance* chosen(const std::vector<const Instance*>& rows, const KernelRequest& request,
                       const DeviceInfo& device) {
  if constexpr (std::is_same_v<Instance, ForwardInstance>) {
    return find_instance(rows, request, device);
  } else {
    try {
      return &select_instance(rows, request, device);
    } catch (const Error&) {
      return nullptr;
    }
  }
}

template <class Config>
bool has_tiles_of(const Config& one, const Config& other) {
  return one.family == other.family && one.head_dim == other.head_dim &&
         one.head_dim_v == other.head_dim_v && one.block_m == other.block_m &&
         one.block_n == other.block_n && one.num_warps == other.num_warps;
}

template <class Instance>
void check(std::span<const Instance* const> table, const std::vector<KernelRequest>& requests) {
  std::vector<const Instance*> all(table.begin(), table.end()), built;
  for (const Instance* instance : all) {
    if (needed.contains(instance->name)) built.push_back(instance);
    if (can_write_fp32(instance->config.features) != writing_fp32.contains(instance->name))
      fail("not what it says of fp32 results", instance->name);
  }
  std::set<std::pair<std::string, std::string>> choices;
  for (const int capability : {90, 80}) {
    const DeviceInfo device{.compute_capability = capability,
                            .num_sms = 132,
                            .smem_per_block = 232448,
                            .l2_bytes = 50 << 20};
    for (const KernelRequest& request : requests) {
      const Instance* row = chosen(all, request, device);
      const Instance* own = chosen(built, request, device);
      if (row == nullptr && own == nullptr) continue;
      if (row == nullptr || own == nullptr) fail("no row without", row ? row->name : "any");
      if (row != own && needed.contains(row->name)) fail("not chosen", row->name);
      if (!has_tiles_of(row->config, own->config)) fail("other tiles without", row->name);
      if (row->config.family == KernelFamily::sm80) choices.emplace(row->name, own->name);
    }
  }
  for (const auto& [row, own] : choices) std::printf("%s %s\\n", row.c_str(), own.c_str());
}

// Lengths and masks decide about rows of sm90 alone: those of queries and of keys vary together, as
// do masks and right bounds. Features that no row has are not asked for.
template <class Instance>
std::vector<KernelRequest> requests(std::span<const Instance* const> table) {
  constexpr bool of_forward = std::is_same_v<Instance, ForwardInstance>;
  FeatureSet of_rows = 0;
  for (const Instance* instance : table) of_rows |= instance->config.features;
  std::vector kinds{ForwardKind::tiles};
  if (of_forward) kinds.insert(kinds.end(), {ForwardKind::tall, ForwardKind::decode});
  std::vector<KernelRequest> all;
  for (const int head_dim : {32, 40, 64, 96, 128, 192, 256, 512})
    for (const int head_dim_v : {head_dim, 256})
      for (const ForwardKind kind : kinds)
        for (FeatureSet features = 0; features <= of_rows; ++features)
          for (const bool is_causal : {false, true})
            for (const bool is_long : {false, true})
              for (const bool fp32_results : {false, true})
                for (const bool suits_sm90 : {false, true})
                  if ((features & ~of_rows) == 0)
                    all.push_back({.dtype = Dtype::bf16,
                                   .mask = is_causal ? MaskKind::windowed : MaskKind::full,
                                   .head_dim = head_dim,
                                   .head_dim_v = head_dim_v,
                                   .kind = kind,
                                   .features = features,
                                   .seqlen = is_long ? 1 << 20 : 1,
                                   .keys_per_query = is_long ? 1 << 20 : 0,
                                   .is_causal = is_causal,
                                   .fp32_results = fp32_results,
                                   .suits_sm90 = suits_sm90});
  return all;
}

int main() {
  check(forward_instances(), requests(forward_instances()));
  check(backward_instances(), requests(backward_instances()));
}
"""


def _write_headers(folder: Path) -> None:
    for header, pass_name in {(row.launch_header, row.kernel_pass.name) for row in ALL_ROWS}:
        family, name, _ = header.split("/")
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        text = LAUNCH_HEADER.format(family=family, name=name, kind=pass_name.title())
        (folder / header).write_text(text)


def _cpp_names(rows: Iterable[KernelRow]) -> str:
    return f"{{{', '.join(json.dumps(row.name) for row in rows)}}}"


def _choices(rows: Sequence[KernelRow], folder: Path) -> dict[str, str]:
    """What PROGRAM prints of the rows: of each sm80 row that some call finds first, the row that
    such calls find in a build for Hopper alone. Their units compile, and have what rows say.
    """
    _write_headers(folder)
    program = PROGRAM.replace("{NEEDED}", _cpp_names(row for row in rows if row in NEEDED))
    program = program.replace("{WRITING_FP32}", _cpp_names(row for row in rows if row.writes_fp32))
    units = kernel_units.units_of(rows)
    text = "".join(kernel_units.unit_text(unit) for unit in units)
    names = re.findall(r"^struct (\w+) {", text, flags=re.MULTILINE)
    assert names == [row.name for unit in units for row in unit.rows]
    checks = "".join(
        f"static_assert(flash_attn_cuda::{row.name}::config.{name} == {value});\n"
        for row in rows
        for name, value in row.planned_config().items()
        if isinstance(value, int) and not isinstance(value, bool)
    )
    source = folder / "choices.cpp"
    source.write_text(f"{text}{kernel_units.registry_text(rows)}{checks}{program}")
    includes = (f"-I{folder}", f"-I{REPO / 'csrc'}")
    sources = (source, REPO / "csrc/host/select_instance.cpp")
    command = [toolchain.host_compiler(), "-std=c++20", "-O1", *includes, *sources]
    subprocess.run([*command, "-o", folder / "choices"], check=True)
    result = subprocess.run([folder / "choices"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    pairs = [line.split() for line in result.stdout.splitlines()]
    assert len(dict(pairs)) == len(pairs), "calls of a row find one other"
    return dict(pairs)


def test_calls_find_a_row_of_the_same_tiles_in_a_build_for_hopper_alone(tmp_path: Path) -> None:
    """By the planner's own choice, over all requests; and of sm80 rows no other is built."""
    rows = [row for row in ALL_ROWS if row.dtype is Dtype.bf16]
    choices = _choices(rows, tmp_path)
    of_sm80 = [row for row in rows if row.family is Family.sm80]
    assert choices.keys() == {row.name for row in of_sm80 if row in FOUND}
    assert set(choices.values()) == {row.name for row in of_sm80 if row in NEEDED}
    by_name = {row.name: row for row in rows}
    for name, other in choices.items():
        assert name == other or hopper_rows.stands_for(by_name[other], by_name[name])


def test_what_no_call_finds_is_for_less_shared_memory() -> None:
    left_out = set(ALL_ROWS) - FOUND
    assert left_out and all("smem" in row.variant for row in left_out)


def test_a_build_for_hopper_alone_has_two_sm80_backwards_of_a_tile_without_masks() -> None:
    """The plain one, and that of all features. The fastest instructions are all there."""
    assert {row for row in ALL_ROWS if row.family is Family.sm90} <= NEEDED
    rows = [row for row in NEEDED if row.kernel is Kernel.sm80_backward and row.writes_fp32]
    head_dims = {row.head_dim for row in ALL_ROWS if row.kernel is Kernel.sm80_backward}
    assert {(row.head_dim, row.variant, row.dtype) for row in rows} == set(
        product(head_dims, ("", "dropout"), Dtype)
    )


def test_a_row_behind_one_that_serves_more_is_found_by_no_call() -> None:
    behind = replace(ROW, block_n=32, variant="behind")
    masked = replace(behind, features=Feature.bias)
    wider = replace(behind, head_dim=192)
    assert hopper_rows.found([ROW, behind, wider, FEATURES_ROW]) == {ROW, wider, FEATURES_ROW}
    assert hopper_rows.found([FEATURES_ROW, behind]) == {FEATURES_ROW}
    # fp32 results are for rows without masks and biases.
    assert hopper_rows.found([masked, behind]) == {masked, behind}
    # sm90 rows are for tensors that suit them, and others may be for some lengths.
    short = replace(SHORT_ROW, most_causal_seqlen=0)
    assert hopper_rows.found([short, SHORT_ROW]) == {short, SHORT_ROW}
    limited = replace(ROW, most_full_seqlen=100)
    assert hopper_rows.found([limited, behind]) == {limited, behind}


def test_a_row_of_the_same_tile_with_more_features_stands_for_one() -> None:
    assert hopper_rows.needed([ROW, FEATURES_ROW]) == {FEATURES_ROW}
    most = replace(FEATURES_ROW, features=FEATURES_ROW.features | Feature.alibi, variant="most")
    assert hopper_rows.needed([ROW, FEATURES_ROW, most]) == {most}
    for other in (
        replace(FEATURES_ROW, block_n=32),
        replace(FEATURES_ROW, dtype=Dtype.fp16),
        replace(FEATURES_ROW, head_dim=192),
        replace(FEATURES_ROW, features=Feature.bias),  # which writes no fp32 results
        replace(FEATURES_ROW, features=Feature.e4m3_kv),  # which reads no other keys
        replace(FEATURES_ROW, most_full_seqlen=100),
        replace(DECODE_ROW, features=DECODE_ROW.features | Feature.softcap),
    ):
        assert hopper_rows.needed([ROW, other]) == {ROW, other}, other
    assert hopper_rows.needed([SM90_ROW, DROPOUT_ROW]) == {SM90_ROW, DROPOUT_ROW}


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("text", "has_all"),
    [("90", False), ("90+PTX", True), ("80+PTX;90a", True)],
)
def test_naming_another_arch_asks_for_the_rows_of_other_gpus(text: str, has_all: bool) -> None:
    plan = build_kernels.make_plan(build_kernels.BuildOptions(archs=text, rows="", jobs=1))
    assert set(plan.rows) == (set(ALL_ROWS) if has_all else NEEDED)
    # What a Hopper GPU would find has code for it, as those that others stand for.
    assert plan.device is not None and plan.device.for_others == set(ALL_ROWS) - FOUND


def test_units_of_rows_of_other_gpus_are_told_apart() -> None:
    """They have no code for Hopper but where they share a unit with a tile that it runs. Beside
    those rows it finds all that a build for it alone is without, so they have code for it.
    """
    for_others = frozenset(ALL_ROWS) - FOUND
    units = kernel_units.units_of(ALL_ROWS, for_others)
    assert {unit.for_hopper for unit in units} == {False, True}
    for unit in units:
        assert unit.for_hopper == any(row in FOUND for row in unit.rows)
        if not unit.for_hopper:
            assert all(isinstance(row, BackwardRow) or "smem" in row.variant for row in unit.rows)


def test_headers_are_empty_only_where_no_kernel_asks_for_them(tmp_path: Path) -> None:
    """Written once: a newer one would have every unit compiled again."""
    folders = unused_headers.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.hpp")}
    assert unused_headers.write(tmp_path) == folders
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.hpp")} == before
    for family, folder in folders.items():
        included = {
            name
            for part in (family.value, "shared")
            for source in (REPO / "csrc" / part).rglob("*.h")
            for name in re.findall(r"#include <(cut\S+)>", source.read_text())
        }
        empty = {str(path.relative_to(folder)) for path in folder.rglob("*.hpp")}
        assert included and empty == set(unused_headers.UNUSED[family])
        assert not included & empty
