"""What the kernels ask of a row: the shapes that their instructions and copies allow.

The same as the static_asserts of csrc/sm80 and csrc/sm90, in whose traits the rules are at home;
here they are found before anything is compiled. A tile side need not be a power of two but where a
rule says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class RowError(ValueError):
    """A row with a field that its kernel has not, or that breaks a rule of the kernel."""


Rules = Iterator[tuple[bool, str]]  # whether a rule is kept, and the rule

# Columns of the wgmma instructions that CuTe knows unless asked for all (csrc/sm90/isa/gemm.h).
WGMMA_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)


def _loads(row: Any, rows: int) -> Rules:
    """All threads copy 16 bytes each, again and again, down `rows` of a tile (sm80/isa/copy.h)."""
    chunks_per_row = 8 if row.head_dim % 64 == 0 else 4
    at_a_time = 32 * row.num_warps // chunks_per_row
    threads = f"sm80/isa/copy.h: {32 * row.num_warps} threads copy {at_a_time} rows at a time"
    yield at_a_time % 8 == 0, f"{threads}, not whole swizzles of 8"
    yield rows % at_a_time == 0, f"{threads}, of which a tile of {rows} is no multiple"


def _columns_of_values(row: Any) -> Rules:
    yield row.value_dim == row.head_dim, "values have the head dim of keys"
    yield row.head_dim % 32 == 0, "a head dim is a multiple of 32"


def _sm80_forward(row: Any) -> Rules:
    yield from _columns_of_values(row)
    yield row.block_m % (16 * row.num_warps) == 0, "every warp multiplies whole 16 queries"
    yield row.block_n % 16 == 0, "products take 16 keys at a time"
    yield from _loads(row, row.block_m)
    yield from _loads(row, row.block_n)


def _sm80_decode(row: Any) -> Rules:
    warps = row.value_dim // (row.columns_per_warp or row.value_dim)
    yield warps in (1, 2) and row.num_warps % warps == 0, "one warp or two share a slice of keys"
    yield row.head_dim % (32 * warps) == 0, "a warp has whole 32 columns of keys"
    if row.is_latent:
        yield row.shares_queries, "registers hold no qv beside O"
        yield row.value_dim % row.head_dim == 0, "values have whole times the columns of keys"
    else:
        yield row.value_dim == row.head_dim, "values have the head dim of keys"
    yield row.block_m == 16, "a tile is the 16 rows of one product"
    yield row.block_n in (16, 32), "a warp takes 16 or 32 keys at a time, one to look up a lane"
    yield row.stages_kv >= 2, "one buffer fills while the other is read"
    yield 1 <= row.ctas_per_sm <= 3, "as many CTAs an SM as a plan may count on"


def _sm80_backward(row: Any) -> Rules:
    yield from _sm80_hvp(row)
    yield 1 <= row.stages_q <= 2 and 1 <= row.stages_do <= 2, "one or two buffers for Q and dO"


def _sm80_hvp(row: Any) -> Rules:
    yield from _columns_of_values(row)
    own_columns = row.columns_per_cta or row.head_dim
    yield row.head_dim % own_columns == 0, "columns_per_cta divide the head dim"
    for name, along, rows, columns in (
        ("warps_m_scores", row.warps_m_scores, row.block_m, row.block_n),
        ("warps_n_dkdv", row.warps_n_dkdv, row.block_n, own_columns),
        ("warps_m_dq", row.warps_m_dq, row.block_m, own_columns),
    ):
        yield row.num_warps % along == 0, f"{name} divides num_warps"
        across = row.num_warps // along
        yield (
            rows % (16 * along) == 0 and columns % (16 * across) == 0,
            f"{along} x {across} warps share {rows} x {columns} in whole 16 x 16 ({name})",
        )
    yield _is_power_of_two(row.block_m), _PREPROCESS
    yield row.num_warps * 32 >= row.block_m, "row statistics load in one step of 16 bytes a thread"
    yield from _loads(row, row.block_m)
    yield from _loads(row, row.block_n)


def _sm90_forward(row: Any) -> Rules:
    yield row.block_m % 64 == 0, "a warpgroup multiplies 64 queries: wgmma has no fewer rows"
    yield row.block_m == 16 * row.num_warps, "each of num_warps multiplies 16 queries"
    yield row.num_warps in (8, 12, 16), "two to four warpgroups multiply"
    yield row.block_n % 16 == 0 and row.block_n <= 256, "P V takes 16 keys at a time, S 256 at most"
    yield row.stages_kv >= 2, "one buffer fills while the other is read"
    yield row.ctas_per_sm in (1, 2), "one or two CTAs an SM"
    yield row.ctas_per_sm == 1 or not row.alternates_probabilities, "two CTAs leave room for one P"
    drawing = row.drawing_registers
    registers = {"producer_registers": (row.producer_registers, 1)}
    registers["consumer_registers"] = (row.consumer_registers, row.num_warps // 4)
    if drawing:
        registers["drawing_registers"] = (drawing, 1)
    yield from _registers(registers, row.ctas_per_sm)


def _sm90_backward(row: Any) -> Rules:
    yield row.block_m % 64 == 0, "a warpgroup multiplies dQ of 64 queries: wgmma has no fewer rows"
    yield _is_power_of_two(row.block_m), _PREPROCESS
    yield row.block_m in WGMMA_COLUMNS, f"the queries of a step are one of CuTe's {WGMMA_COLUMNS}"
    yield row.num_warps == 8, "two warpgroups hold dK and dV"
    yield row.ctas_per_tile in (1, 2), "a tile has one CTA or two"
    keys = 64 if row.separate_keys else 128
    yield row.block_n == keys * row.ctas_per_tile, "a warpgroup holds dK, dV or both of 64 keys"
    yield row.ctas_per_tile == 2 or not row.separate_keys, "a CTA alone holds dK and dV together"
    yield not (row.separate_keys and row.shares_tiles), "only sm90/backward/keys.h joins parts"
    yield row.ctas_per_tile == 1 or row.block_m == 64, "in pairs of CTAs a step has 64 queries"
    in_ds = row.ctas_per_tile == 2 and not row.separate_keys
    yield (
        not in_ds or row.head_dim == row.value_dim == 2 * row.block_m,
        "pairs of CTAs without separate_keys store dK and dV through two buffers of dS",
    )
    yield not (in_ds and row.stores_tiles), "dK and dV leave through dS's buffers, or their own"
    yield row.head_dim // row.ctas_per_tile % row.dq_columns == 0, "dq_columns divide a CTA's"
    registers = {"producer_registers": (row.producer_registers, 1)}
    registers["dq_registers"] = (row.dq_registers, 1)
    of_values = row.value_registers
    yield row.separate_keys or not of_values, "a warpgroup holds dV alone with separate_keys"
    yield row.separate_keys or not row.holds_keys, "dK and dV leave no registers for K"
    registers["key_registers"] = (row.key_registers, 1 if of_values else row.num_warps // 4)
    if of_values:
        registers["value_registers"] = (of_values, 1)
    yield from _registers(registers, ctas_per_sm=1)


def _registers(given: dict[str, tuple[int, int]], ctas_per_sm: int) -> Rules:
    """Of the threads of each kind of warpgroup, and how many warpgroups those are."""
    for name, (registers, _) in given.items():
        yield registers % 8 == 0 and 24 <= registers <= 240, f"{name}: a multiple of 8, 24 to 240"
    warpgroups = sum(count for _, count in given.values())
    launched = 65536 // (128 * warpgroups * ctas_per_sm) // 8 * 8 * warpgroups
    asked = sum(registers * count for registers, count in given.values())
    yield asked <= launched, f"{asked} registers are asked for where the launch gives {launched}"


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


_PREPROCESS = "queries a step are a power of two: auxiliary/backward/preprocess.cu shifts by it"


def _sm90_wide_forward(row: Any) -> Rules:
    yield (
        row.block_m == 64 and row.block_n == 64,
        "both warpgroups multiply S of the same 64 queries",
    )
    yield row.num_warps == 8, "two warpgroups share the columns of O"
    yield row.head_dim == row.value_dim == 512, "a warpgroup holds 256 columns of O"
    yield row.stages_kv >= 2, "one slot fills while the other is read"
    registers = {"producer_registers": (row.producer_registers, 1)}
    registers["consumer_registers"] = (row.consumer_registers, 2)
    yield from _registers(registers, ctas_per_sm=1)


def _sm90_latent(row: Any) -> Rules:
    yield row.block_m in (16, 32, 64), "rows are the columns of a product, 16, 32 or 64"
    yield row.block_n == 64, "keys are the rows of a product"
    yield row.head_dim == 64, "the rotary columns are one piece"
    yield row.is_latent, "scores have qv v^T"
    yield row.num_warps in (4, 8), "one or two warpgroups share the columns of O"
    pairs = row.value_dim // 128
    yield (
        row.value_dim % 128 == 0 and pairs % (row.num_warps // 4) == 0,
        "a warpgroup has pairs of pieces of 64 columns",
    )
    yield row.stages_kv > row.value_dim // 64, "a block is there as a whole when its P is made"
    if row.num_warps > 4:
        yield row.block_m == 64, "rows are those of a product of two warpgroups"
        yield row.stages_kv % (1 + row.value_dim // 64) == 0, "the pieces of a block lie in a row"
    if row.num_warps > 4 or row.is_e4m3:
        registers = {"producer_registers": (row.producer_registers, 3 if row.is_e4m3 else 1)}
        registers["consumer_registers"] = (row.consumer_registers, row.num_warps // 4)
        yield from _registers(registers, ctas_per_sm=1)


def _sm90_wide_backward(row: Any) -> Rules:
    yield row.block_m == row.block_n == 64, "both warpgroups multiply scores of the same 64 rows"
    yield row.num_warps == 8, "two warpgroups share the columns of a gradient"
    yield row.head_dim == row.value_dim == 512, "a warpgroup holds 256 columns"
    yield row.stages_kv >= 2, "one slot fills while the other is read"
    registers = {"producer_registers": (row.producer_registers, 1)}
    registers["key_registers"] = (row.key_registers, 2)
    yield from _registers(registers, ctas_per_sm=1)


def _sm90_jvp(row: Any) -> Rules:
    yield row.block_m == 16 * row.num_warps, "each of num_warps multiplies 16 queries"
    yield row.num_warps == 8, "two warpgroups multiply"
    yield row.features.name == "tangent", "scores that anything but a window changes are sm80's"
    yield row.block_n in WGMMA_COLUMNS, f"the keys of a step are one of CuTe's {WGMMA_COLUMNS}"
    yield row.head_dim == row.value_dim, "values have the head dim of keys"
    registers = {"producer_registers": (row.producer_registers, 1)}
    registers["consumer_registers"] = (row.consumer_registers, 2)
    yield from _registers(registers, ctas_per_sm=1)


RULES: dict[str, Callable[[Any], Rules]] = {
    "sm80 forward": _sm80_forward,
    "sm80 decode": _sm80_decode,
    "sm80 jvp": _sm80_forward,
    "sm80 backward": _sm80_backward,
    "sm80 hvp": _sm80_hvp,
    "sm80 listed_backward": _sm80_hvp,
    "sm90 forward": _sm90_forward,
    "sm90 wide_forward": _sm90_wide_forward,
    "sm90 latent": _sm90_latent,
    "sm90 jvp": _sm90_jvp,
    "sm90 backward": _sm90_backward,
    "sm90 wide_backward": _sm90_wide_backward,
}


def check(row: Any) -> None:
    """Raises RowError with the first rule that the row breaks."""
    for is_kept, rule in RULES[row.kernel.value](row):
        if not is_kept:
            raise RowError(
                f"{row.name}, {row.block_m} x {row.block_n}, {row.num_warps} warps: {rule}"
            )
