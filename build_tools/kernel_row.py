"""What a row of kernel_table.py is: its fields and the names of their values.

The fields are those of ``ForwardConfig`` and ``BackwardConfig`` in csrc/flash_attn/config.h, in
their order; the compiled kernel and the host code that chooses it both read the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum, Flag
from itertools import product
from typing import Any, ClassVar, TypeVar


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
    decode = "decode"  # each its own keys, for tiles of 16 rows


class Feature(Flag):
    """What a row supports beyond masks; the bits are those of namespace feature in config.h."""

    softcap = 1
    alibi = 2
    dropout = 4
    deterministic = 8
    paged_kv = 16
    split_kv = 32
    packed_gqa = 64
    block_sparse = 128
    bias = 256


NO_FEATURES = Feature(0)


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """What the rows of both passes share.

    ``head_dim_v`` is that of values and outputs, None for ``head_dim``. ``variant`` tells apart the
    rows of one head dim, by features or by the shared memory they need.
    """

    kernel_pass: ClassVar[Pass]
    config_struct: ClassVar[str]

    family: Family
    dtype: Dtype
    mask: Mask
    head_dim: int
    head_dim_v: int | None = None
    variant: str = field(default="", metadata={"compiled": False})

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
        """What CuTe's layouts are made of: rows that share it share most of their compile."""
        apart = ("dtype", "mask", "features", "most_causal_seqlen", "most_full_seqlen")
        return tuple(value for name, value in self.config().items() if name not in apart)

    def config(self) -> dict[str, Any]:
        """The compiled fields by name, in the order of the C++ struct."""
        compiled = [f.name for f in fields(self) if f.metadata.get("compiled", True)]
        config = {name: getattr(self, name) for name in compiled}
        config["head_dim_v"] = self.value_dim
        return config

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def launch_header(self) -> str:
        """The header of the kernel's make_..._instance, without its folder and ending."""
        return f"{self.kernel_pass.name}_launch"

    @property
    def make_instance(self) -> str:
        return f"make_{self.kernel_pass.name}_instance"


@dataclass(frozen=True, kw_only=True)
class ForwardRow(KernelRow):
    kernel_pass: ClassVar[Pass] = Pass.forward
    config_struct: ClassVar[str] = "ForwardConfig"

    kind: Kind = Kind.tiles
    block_m: int
    block_n: int
    num_warps: int
    most_causal_seqlen: int = 0
    most_full_seqlen: int = 0
    features: Feature = NO_FEATURES

    @property
    def launch_header(self) -> str:
        return "decode_launch" if self.kind is Kind.decode else super().launch_header

    @property
    def make_instance(self) -> str:
        return "make_decode_instance" if self.kind is Kind.decode else super().make_instance


@dataclass(frozen=True, kw_only=True)
class BackwardRow(KernelRow):
    kernel_pass: ClassVar[Pass] = Pass.backward
    config_struct: ClassVar[str] = "BackwardConfig"

    block_m: int
    block_n: int
    num_warps: int
    ctas_per_tile: int = 1
    warps_m_scores: int = 0
    warps_n_dkdv: int = 0
    warps_m_dq: int = 0
    stages_q: int = 0
    stages_do: int = 0
    features: Feature = NO_FEATURES


Row = TypeVar("Row", ForwardRow, BackwardRow)


def expand(
    row_type: type[Row],
    *,
    dtypes: tuple[Dtype, ...] = tuple(Dtype),
    masks: tuple[Mask, ...] = tuple(Mask),
    **config: Any,
) -> Iterator[Row]:
    """One row per dtype and mask that share a tile."""
    return (row_type(dtype=d, mask=m, **config) for d, m in product(dtypes, masks))
