"""What a row of the kernel table is: its fields, the names of their values and who has which.

The fields are those of structs in csrc/flash_attn/config.h, in their order: first those of
``ForwardConfig`` or ``BackwardConfig``, with its defaults, which the compiled kernel and the host
code that chooses it both read, then those of the kernel's own struct. A row that gives a field of
other kernels, or breaks a rule of its own (rules.py), raises RowError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum, EnumMeta, Flag
from functools import reduce
from itertools import product
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_table import rules
from kernel_table.rules import RowError

INTERFACE = Path(__file__).resolve().parent.parent / "csrc/flash_attn"
FEATURE_LIST = INTERFACE / "feature_list.h"


class Pass(Enum):
    forward = "fwd"
    backward = "bwd"


class Family(Enum):
    """Which instructions a kernel is written for, and so which folder of csrc/ it lives in."""

    sm80 = "sm80"  # mma.sync and cp.async: any GPU from compute capability 8.0 on
    sm90 = "sm90"  # wgmma and TMA: compute capability 9.0 alone


class Dtype(Enum):
    fp16 = "fp16"
    bf16 = "bf16"


class Mask(Enum):
    full = "full"
    windowed = "windowed"


class Kind(Enum):
    """How the warps of a forward CTA share the work."""

    tiles = "tiles"  # each its own queries
    tall = "tall"  # likewise, for lengths that tiles of more queries fill better
    decode = "decode"  # each its own keys, for tiles of 16 rows
    latent = "latent"  # absorbed latent attention, of few rows


class _FeatureNames(EnumMeta):
    if TYPE_CHECKING:  # the members come from a file

        def __getattr__(cls, name: str) -> Feature: ...


class Feature(Flag, metaclass=_FeatureNames):
    """What a row supports beyond masks: the bits of csrc/flash_attn/feature_list.h."""

    _ignore_ = "members listed bit"
    members = vars()
    for listed, bit in re.findall(r"(?m)^FEATURE\((\w+), (\d+)\)", FEATURE_LIST.read_text()):
        members[listed] = 1 << int(bit)


NO_FEATURES = Feature(0)


def _without_fp32_results() -> Feature:
    """The constant of config.h."""
    text = (INTERFACE / "config.h").read_text()
    (value,) = re.findall(r"FeatureSet without_fp32_results =([^;]+);", text)
    return reduce(or_, (Feature[name] for name in re.findall(r"feature::(\w+)", value)))


WITHOUT_FP32_RESULTS = _without_fp32_results()


class Kernel(Enum):
    """The kernels that rows are made of: one for each launch header of csrc/sm80 and csrc/sm90."""

    sm80_forward = "sm80 forward"
    sm80_decode = "sm80 decode"
    sm80_jvp = "sm80 jvp"
    sm80_backward = "sm80 backward"
    sm80_hvp = "sm80 hvp"
    sm80_listed_backward = "sm80 listed_backward"
    sm90_forward = "sm90 forward"
    sm90_wide_forward = "sm90 wide_forward"
    sm90_latent = "sm90 latent"
    sm90_jvp = "sm90 jvp"
    sm90_backward = "sm90 backward"
    sm90_wide_backward = "sm90 wide_backward"

    @property
    def own_struct(self) -> str:
        """Of the fields that the kernel alone reads."""
        return f"{self.value.title().replace(' ', '').replace('_', '')}Config"


def of(*kernels: Kernel, default: Any = None, planned: bool = False) -> Any:
    """A field that only these kernels have, and in whose rows it must be given if it has no
    default; in others it has to keep that. ``planned``: planning reads it too, so it is a field of
    the pass's struct and not of the kernels' own.
    """
    return field(default=default, metadata={"kernels": kernels, "planned": planned})


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """What the rows of both passes share.

    ``head_dim_v`` is that of values and outputs, None for ``head_dim``. ``variant`` tells apart the
    rows of one head dim, by features or by the shared memory they need.
    """

    kernel_pass: ClassVar[Pass]
    config_struct: ClassVar[str]  # of the fields that planning reads
    # What CuTe's layouts are made of: rows that share it share most of their compile.
    tile_fields: ClassVar[tuple[str, ...]]

    family: Family
    dtype: Dtype
    mask: Mask
    head_dim: int
    head_dim_v: int | None = None
    variant: str = field(default="", metadata={"compiled": False})

    if TYPE_CHECKING:  # both passes have them
        block_m: int
        block_n: int
        num_warps: int
        features: Feature

    def __post_init__(self) -> None:
        for f in fields(self):
            kernels, value = f.metadata.get("kernels"), getattr(self, f.name)
            if kernels is None:
                continue
            if self.kernel in kernels and value is None:
                raise RowError(f"{self.name}: a row of {self.kernel.value} must give {f.name}")
            if self.kernel not in kernels and value != f.default:
                owners = " and ".join(kernel.value for kernel in kernels)
                raise RowError(
                    f"{self.name}: {f.name} is of {owners}, a row of {self.kernel.value} has none"
                )
        rules.check(self)

    @property
    def kernel(self) -> Kernel:
        return Kernel(f"{self.family.value} {self.kernel_pass.name}")

    @property
    def name(self) -> str:
        """The tag type that a profiler shows, ``fwd_sm80_bf16_hd128_windowed``."""
        prefix = self.kernel_pass.value
        kind = f"{self.family.value}_{self.dtype.value}"
        variant = f"_{self.variant}" if self.variant else ""
        return f"{prefix}_{kind}_{self.head_dims}_{self.mask.value}{variant}"

    @property
    def head_dims(self) -> str:
        """``hd128``, or ``hd192_dv128`` where values have another one."""
        of_values = "" if self.head_dim_v is None else f"_dv{self.head_dim_v}"
        return f"hd{self.head_dim}{of_values}"

    @property
    def tile(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in ("kernel", "head_dim", *self.tile_fields))

    def config(self) -> dict[str, Any]:
        """The compiled fields that its kernel has, by name, in the order of the C++ structs."""
        return {**self.planned_config(), **self.own_config()}

    def planned_config(self) -> dict[str, Any]:
        """Those of ``config_struct``."""
        return {**self._values(own=False), "head_dim_v": self.value_dim}

    def own_config(self) -> dict[str, Any]:
        """Those of the kernel's own struct."""
        return self._values(own=True)

    def _values(self, own: bool) -> dict[str, Any]:
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.metadata.get("compiled", True)
            and self.kernel in f.metadata.get("kernels", Kernel)
            and f.metadata.get("planned", "kernels" not in f.metadata) is not own
        }

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def writes_fp32(self) -> bool:
        """can_write_fp32 of config.h."""
        decodes = Feature.packed_gqa in self.features
        without = WITHOUT_FP32_RESULTS & ~(Feature.bias if decodes else NO_FEATURES)
        return not self.features & without

    @property
    def is_latent(self) -> bool:
        """has_latent of config.h."""
        return Feature.latent in self.features

    @property
    def is_e4m3(self) -> bool:
        """reads_e4m3 of config.h."""
        return Feature.e4m3_kv in self.features

    @property
    def launch_header(self) -> str:
        """The header of the kernel's make_..._instance, within csrc/."""
        return f"{self.kernel.value.replace(' ', '/')}/launch.h"

    @property
    def make_instance(self) -> str:
        return f"make_{self.kernel.value.split()[1]}_instance"


@dataclass(frozen=True, kw_only=True)
class ForwardRow(KernelRow):
    kernel_pass: ClassVar[Pass] = Pass.forward
    config_struct: ClassVar[str] = "ForwardConfig"
    tile_fields: ClassVar[tuple[str, ...]] = (
        *("value_dim", "kind", "block_m", "block_n", "num_warps"),
    )

    kind: Kind = Kind.tiles
    block_m: int
    block_n: int
    num_warps: int
    ctas_per_sm: int = of(Kernel.sm90_forward, Kernel.sm80_decode, default=1, planned=True)
    most_causal_seqlen: int = 0
    most_full_seqlen: int = 0
    least_keys_full: int = of(Kernel.sm90_forward, default=0, planned=True)
    least_keys_windowed: int = of(Kernel.sm90_forward, default=0, planned=True)
    columns_per_cta: int = of(Kernel.sm80_forward, Kernel.sm80_jvp, default=0, planned=True)
    columns_per_warp: int = of(Kernel.sm80_decode, default=0, planned=True)
    is_wide: bool = of(Kernel.sm90_wide_forward, default=False, planned=True)
    features: Feature = NO_FEATURES

    keeps_pointers: bool = of(Kernel.sm80_forward, default=False)
    stages_q: int | None = of(Kernel.sm90_forward)
    stages_kv: int | None = of(
        *(Kernel.sm90_forward, Kernel.sm90_wide_forward, Kernel.sm90_latent, Kernel.sm90_jvp),
        Kernel.sm80_decode,
    )
    shares_queries: bool = of(Kernel.sm80_decode, default=False)
    producer_registers: int | None = of(
        Kernel.sm90_forward, Kernel.sm90_wide_forward, Kernel.sm90_latent, Kernel.sm90_jvp
    )
    consumer_registers: int | None = of(
        Kernel.sm90_forward, Kernel.sm90_wide_forward, Kernel.sm90_latent, Kernel.sm90_jvp
    )
    drawing_registers: int = of(Kernel.sm90_forward, default=0)
    drops_turns: bool = of(Kernel.sm90_forward, default=False)
    curves_in_softmax: bool = of(Kernel.sm90_forward, default=False)
    alternates_probabilities: bool = of(Kernel.sm90_forward, default=False)

    @property
    def kernel(self) -> Kernel:
        if self.kind in (Kind.decode, Kind.latent):
            return Kernel(f"{self.family.value} {self.kind.value}")
        if Feature.tangent in self.features:
            return Kernel(f"{self.family.value} jvp")
        return Kernel.sm90_wide_forward if self.is_wide else super().kernel


_WITH_WARP_GRIDS = (Kernel.sm80_backward, Kernel.sm80_hvp, Kernel.sm80_listed_backward)


@dataclass(frozen=True, kw_only=True)
class BackwardRow(KernelRow):
    kernel_pass: ClassVar[Pass] = Pass.backward
    config_struct: ClassVar[str] = "BackwardConfig"
    tile_fields: ClassVar[tuple[str, ...]] = (
        *("value_dim", "block_m", "block_n", "num_warps", "ctas_per_tile"),
        *("warps_m_scores", "warps_n_dkdv", "warps_m_dq"),
    )

    block_m: int
    block_n: int
    num_warps: int
    ctas_per_tile: int = of(Kernel.sm90_backward, default=1, planned=True)
    shares_tiles: bool = of(Kernel.sm90_backward, default=False, planned=True)
    finishes_dq: bool = of(Kernel.sm90_backward, default=False, planned=True)
    finish_keys_full: int = of(Kernel.sm90_backward, default=0, planned=True)
    finish_keys_windowed: int = of(Kernel.sm90_backward, default=0, planned=True)
    least_keys_full: int = of(Kernel.sm90_backward, default=0, planned=True)
    least_keys_windowed: int = of(Kernel.sm90_backward, default=0, planned=True)
    columns_per_cta: int = of(Kernel.sm80_backward, Kernel.sm80_hvp, default=0, planned=True)
    is_wide: bool = of(Kernel.sm90_wide_backward, default=False, planned=True)
    features: Feature = NO_FEATURES

    warps_m_scores: int | None = of(*_WITH_WARP_GRIDS)
    warps_n_dkdv: int | None = of(*_WITH_WARP_GRIDS)
    warps_m_dq: int | None = of(*_WITH_WARP_GRIDS)
    stages_q: int | None = of(Kernel.sm80_backward, Kernel.sm90_backward)
    stages_do: int | None = of(Kernel.sm80_backward, Kernel.sm90_backward)
    stages_kv: int | None = of(Kernel.sm90_backward, Kernel.sm90_wide_backward)
    producer_registers: int | None = of(Kernel.sm90_backward, Kernel.sm90_wide_backward)
    key_registers: int | None = of(Kernel.sm90_backward, Kernel.sm90_wide_backward)
    value_registers: int = of(Kernel.sm90_backward, default=0)
    dq_registers: int | None = of(Kernel.sm90_backward)
    dq_columns: int | None = of(Kernel.sm90_backward)
    separate_keys: bool = of(Kernel.sm90_backward, default=False)
    holds_keys: bool = of(Kernel.sm90_backward, default=False)
    keeps_probabilities: bool = of(Kernel.sm90_backward, default=False)
    rounds_differences: bool = of(Kernel.sm90_backward, default=False)
    stores_tiles: bool = of(Kernel.sm90_backward, default=False)

    @property
    def kernel(self) -> Kernel:
        if Feature.tangent in self.features:
            return Kernel(f"{self.family.value} hvp")
        if Feature.key_lists in self.features:
            return Kernel(f"{self.family.value} listed_backward")
        return Kernel.sm90_wide_backward if self.is_wide else super().kernel


@dataclass(frozen=True)
class Tile:
    """The variants of an entry that share a tile, each with its features, and the fields in which
    they differ from what the entry says.
    """

    variants: dict[str, Feature]
    fields: dict[str, Any]


def tile(variants: dict[str, Feature], **fields: Any) -> Tile:
    return Tile(variants, fields)


@dataclass(frozen=True)
class Entry:
    """All kernels of one family, pass and head dim: what most of them have, and what they come in.
    ``head_dim`` may be a pair, of queries and keys and of values; decode kernels have an entry of
    their own.
    """

    kernel: Kernel
    head_dim: int | tuple[int, int]
    fields: dict[str, Any]
    tiles: tuple[Tile, ...]

    def rows(self) -> Iterator[KernelRow]:
        """Every variant in every dtype. One mask for the whole: kernels compiled for the full mask
        were within 2 % of the windowed ones run on full attention
        (benchmarks/results/experiments.md).
        """
        family, name = self.kernel.value.split()
        is_backward = name.endswith(Pass.backward.name) or name == "hvp"
        row_type = BackwardRow if is_backward else ForwardRow
        is_kind = name in (Kind.decode.value, Kind.latent.value)
        of_kind: dict[str, Any] = {"kind": Kind(name)} if is_kind else {}
        if name.startswith("wide_"):
            of_kind = {"is_wide": True}
        pair = self.head_dim if isinstance(self.head_dim, tuple) else (self.head_dim, None)
        for each in self.tiles:
            for (variant, features), dtype in product(each.variants.items(), Dtype):
                yield row_type(
                    family=Family(family),
                    dtype=dtype,
                    mask=Mask.windowed,
                    head_dim=pair[0],
                    head_dim_v=pair[1],
                    variant=variant,
                    features=features,
                    **{**of_kind, **self.fields, **each.fields},
                )


def entry(
    kernel: Kernel, head_dim: int | tuple[int, int], *, tiles: tuple[Tile, ...], **fields: Any
) -> Entry:
    return Entry(kernel, head_dim, fields, tiles)
