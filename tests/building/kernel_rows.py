"""Rows of a kernel table for tests of what the build makes of one, and what they ask of a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from kernel_table.row import BackwardRow, Dtype, Family, Feature, ForwardRow, KernelRow, Kind, Mask

ROW = ForwardRow(
    family=Family.sm80,
    dtype=Dtype.bf16,
    mask=Mask.windowed,
    head_dim=128,
    block_m=128,
    block_n=64,
    num_warps=4,
)
FEATURES_ROW = replace(ROW, features=Feature.softcap | Feature.dropout, variant="features")
DECODE_ROW = replace(
    ROW,
    kind=Kind.decode,
    block_m=16,
    block_n=16,
    stages_kv=2,
    features=Feature.split_kv,
    variant="decode",
)
SM90_ROW = replace(
    ROW,
    family=Family.sm90,
    block_n=128,
    num_warps=8,
    stages_q=2,
    stages_kv=2,
    producer_registers=40,
    consumer_registers=232,
)
SHORT_ROW = replace(SM90_ROW, most_causal_seqlen=1000, variant="short")
DROPOUT_ROW = replace(SM90_ROW, features=Feature.dropout, variant="dropout")

# Of a backward row of the sm80 family alone.
SM80_FIELDS = ("warps_m_scores", "warps_n_dkdv", "warps_m_dq")

BACKWARD_CONFIG = {
    **{"block_m": 64, "block_n": 64, "num_warps": 8},
    **{"warps_m_scores": 4, "warps_n_dkdv": 2, "warps_m_dq": 2, "stages_q": 2, "stages_do": 1},
}
SM90_BACKWARD_ROW = BackwardRow(
    family=Family.sm90,
    dtype=Dtype.bf16,
    mask=Mask.windowed,
    head_dim=128,
    block_m=64,
    block_n=128,
    num_warps=8,
    stages_q=2,
    stages_do=2,
    stages_kv=1,
    producer_registers=32,
    key_registers=208,
    dq_registers=64,
    dq_columns=64,
    features=Feature.deterministic,
)
SM90_BACKWARD_DROPOUT_ROW = replace(
    SM90_BACKWARD_ROW, features=Feature.deterministic | Feature.dropout, variant="dropout"
)
TABLE = [
    *(
        replace(ROW, head_dim=head_dim, dtype=dtype)
        for head_dim, dtype in product((32, 64, 128), Dtype)
    ),
    *(
        BackwardRow(
            family=Family.sm80,
            mask=Mask.full,
            head_dim=head_dim,
            dtype=Dtype.bf16,
            **BACKWARD_CONFIG,
        )
        for head_dim in (64, 128)
    ),
]


def most_seqlen(row: KernelRow) -> tuple[int, int]:
    """Under a right bound and without; of a row that serves any call, more than there can be."""
    most = (row.most_causal_seqlen, row.most_full_seqlen) if isinstance(row, ForwardRow) else ()
    return most if any(most) else (1 << 31, 1 << 31)


def least_keys(row: KernelRow) -> tuple[int, int]:
    """That a query sees, on average, without a window and with one; of a row for any call 0."""
    assert isinstance(row, ForwardRow | BackwardRow)
    return row.least_keys_full, row.least_keys_windowed
