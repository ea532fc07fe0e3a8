"""The process groups that sequences lie on: a ring, and ulysses between neighbours of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def groups_of(
    group: ProcessGroup | DeviceMesh | None, scheme: str, ulysses_size: int | None
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """(ring, ulysses): the second of two dimensions alone."""
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"group: a mesh must have one or two dimensions, got {group.ndim}")
        if group.ndim == 2:
            if scheme not in ("auto", "ulysses+ring"):
                raise ValueError(
                    "scheme: must be 'auto' or 'ulysses+ring' over a mesh of two dimensions, "
                    f"got {scheme!r}"
                )
            check_order(group)
            return group.get_group(0), group.get_group(1)
        group = group.get_group()
    whole = dist.group.WORLD if group is None else group
    if whole is None:
        raise RuntimeError("group: torch.distributed must be initialised first")
    if scheme != "ulysses+ring":
        return whole, None
    size = whole.size()
    if ulysses_size is None or ulysses_size < 1 or size % ulysses_size:
        raise ValueError(
            f"ulysses_size: must divide the {size} ranks of the group, got {ulysses_size}"
        )
    ranks = dist.get_process_group_ranks(whole)
    if ranks != sorted(ranks):  # as groups of theirs would be
        raise ValueError(f"group: ranks must ascend for scheme {scheme!r}, got {ranks}")
    first = whole.rank() // ulysses_size * ulysses_size
    across = dist.new_group(ranks[first : first + ulysses_size], use_local_synchronization=True)
    ring = dist.new_group(
        ranks[whole.rank() % ulysses_size :: ulysses_size], use_local_synchronization=True
    )
    assert isinstance(across, ProcessGroup) and isinstance(ring, ProcessGroup)
    return ring, across


def check_order(mesh: DeviceMesh) -> None:
    """Torch sorts the ranks of each group: a rank's place in one would differ from that of others
    of its row or column, and two ranks would have the same shard, unless all are in one order.
    """
    orders = [(dim, mesh.mesh.argsort(dim)) for dim in (0, 1)]
    if not all(bool((order == order.narrow(1 - dim, 0, 1)).all()) for dim, order in orders):
        raise ValueError(
            "group: a mesh of two dimensions must have the ranks of all its rows in one order, and "
            f"those of all columns, got {mesh.mesh.tolist()}"
        )


def size_of(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def rank_of(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def compare_facts(
    facts: dict[str, str], ring: ProcessGroup | None, ulysses: ProcessGroup | None
) -> None:
    """Raises on every rank of both groups, after all have told theirs."""
    every: list[Any] = [facts]
    for group in (ulysses, ring):
        if group is not None:
            told: list[Any] = [None] * group.size()
            dist.all_gather_object(told, every, group)
            every = [x for of_rank in told for x in of_rank]
    for name in facts:
        values = [other[name] for other in every]
        if len(set(values)) > 1:
            by_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name}: must be the same on every rank, got {by_rank}")
