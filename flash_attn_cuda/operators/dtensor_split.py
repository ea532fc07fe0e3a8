"""How the tensors of one call lie on a mesh of ranks (dtensor.py): what its dimensions cut, where
arguments have to be for that, and which part of them is this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..call.fields import TANGENTS, TARGETS

# What the dimensions of a tensor are. A mesh dimension that cuts HEADS cuts KEY_HEADS likewise.
BATCH, ROWS, HEADS, KEY_HEADS, WHOLE = "batch", "rows", "heads", "key heads", "whole"
Layout = tuple[str, ...]

_KEYS = ("k", "v", "k_new", "v_new")
SCALES = ("q_descale", "k_descale", "v_descale")  # of heads of keys, which may be cut as they are
# What the caller decides about: replicated ones are not cut here where others are.
_AS_GIVEN = frozenset(("q", *_KEYS, *TARGETS, "out_partial", "lse_partial"))
# Of which callers do not choose where they are.
_FROM_AUTOGRAD = frozenset(("dout", "dlse", *TANGENTS))


class Split:
    """What each dimension of a mesh cuts of a call's tensors, and where they have to be for that.

    `layouts` are those of `tensors`, which are checked; `lead` decides, and `titles` are what
    errors call them. TypeError: a tensor is no DTensor. ValueError: it is not where it should be.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        lead: str,
        titles: Mapping[str, str],
    ) -> None:
        self.lead = lead
        self._titles = titles
        first = tensors[lead]
        if not isinstance(first, DTensor):
            raise self._no_dtensor(lead)
        self.mesh: DeviceMesh = first.device_mesh
        self._sizes = dict(zip(layouts[lead], first.shape, strict=True))
        self._layouts = {name: self._cut_layout(x, layouts[name]) for name, x in tensors.items()}
        self.cuts = tuple(
            self._cut_of_lead(placement, dim) for dim, placement in enumerate(first.placements)
        )
        self._sharded_keys = self._cuts_of_keys(tensors.get("k"))
        for name, x in tensors.items():
            self._check(name, x)
        self._check_heads(tensors)

    # What the dimensions of the mesh cut.

    def _cut_layout(self, x: Tensor, layout: Layout) -> Layout:
        """The layout without what a tensor has once for all."""
        return tuple(
            WHOLE if size == 1 != self._sizes.get(role, 1) else role
            for role, size in zip(layout, x.shape, strict=True)
        )

    def _cut_of_lead(self, placement: Placement, mesh_dim: int) -> str | None:
        layout = self._layouts[self.lead]
        if placement.is_replicate():
            return None
        if type(placement) is Shard and layout[placement.dim] != WHOLE:
            return layout[placement.dim]
        allowed = [f"{role} (Shard({dim}))" for dim, role in enumerate(layout) if role != WHOLE]
        hint = "; flash_attn_cuda.context_parallel takes sharded sequences"
        is_sequence = type(placement) is Shard and self.lead == "q"
        raise ValueError(
            f"{self._title(self.lead)}: must be sharded over {' or '.join(allowed)} or replicated "
            f"on {self._mesh_dim(mesh_dim)}, got {placement!r}: redistribute it"
            f"{hint if is_sequence else ''}"
        )

    def _cuts_of_keys(self, k: Tensor | None) -> tuple[bool, ...]:
        """Where heads of queries are cut, whether those of keys are."""
        if not isinstance(k, DTensor):
            return tuple(cut == HEADS for cut in self.cuts)
        return tuple(
            cut == HEADS and not placement.is_replicate()
            for cut, placement in zip(self.cuts, k.placements, strict=False)
        )

    # Where tensors have to be.

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Of an argument as a rank's shard of the call reads it."""
        wanted = self.placements_of(self._layouts[name])
        if name not in (*_KEYS, *SCALES, "key_lists", "dk", "dv", "tk", "tv"):
            return wanted
        return tuple(
            Replicate() if cut == HEADS and not is_cut else placement
            for cut, is_cut, placement in zip(self.cuts, self._sharded_keys, wanted, strict=True)
        )

    def placements_of(
        self, layout: Layout, otherwise: Placement | None = None
    ) -> tuple[Placement, ...]:
        """Of a tensor with this layout; `otherwise` where it has no dimension that is cut."""
        dims = (_dim_of(layout, cut) for cut in self.cuts)
        without = Replicate() if otherwise is None else otherwise
        return tuple(
            Replicate() if cut is None else without if dim is None else Shard(dim)
            for cut, dim in zip(self.cuts, dims, strict=True)
        )

    def placements_of_gradient(self, name: str) -> tuple[Placement, ...]:
        """Of an argument's gradient: a sum over ranks where they share the argument."""
        found = self.placements_of(self._layouts[name], Partial())
        if name not in _KEYS:
            return found
        return tuple(
            Partial() if cut == HEADS and not is_cut else placement
            for cut, is_cut, placement in zip(self.cuts, self._sharded_keys, found, strict=True)
        )

    # Checks.

    def _check(self, name: str, x: Tensor) -> None:
        if not isinstance(x, DTensor):
            if name in _AS_GIVEN or name in _FROM_AUTOGRAD or x.requires_grad:
                raise self._no_dtensor(name)
            return
        if x.device_mesh != self.mesh:
            raise ValueError(
                f"{self._title(name)}: must be on the mesh of {self._title(self.lead)} "
                f"({self.mesh}), got {x.device_mesh}"
            )
        if name in _FROM_AUTOGRAD:
            return
        wanted = self.placements_of_gradient(name[1:]) if name in TARGETS else self.placements(name)
        for dim, (placement, fitting) in enumerate(zip(x.placements, wanted, strict=True)):
            if placement == fitting or (name not in _AS_GIVEN and placement.is_replicate()):
                continue
            cut = self.cuts[dim]
            what = "replicated" if cut is None else f"sharded over {cut}"
            raise ValueError(
                f"{self._title(name)}: must be {fitting!r} on {self._mesh_dim(dim)}, where "
                f"{self._title(self.lead)} is {what}, got {placement!r}: redistribute it"
            )

    def _check_heads(self, tensors: Mapping[str, Tensor]) -> None:
        """Every rank has as many heads, and those of queries read whole heads of keys."""
        for name in (self.lead, "k"):
            if name in tensors:
                self._check_even(name, tensors[name])
        if HEADS not in self.cuts or "k" not in tensors:
            return
        cut = [
            sharded
            for sharded, by in zip(self._sharded_keys, self.cuts, strict=True)
            if by == HEADS
        ]
        heads_q, heads_k = self._sizes[HEADS], tensors["k"].shape[-2]
        group, mine = heads_q // heads_k, heads_q // self._ranks(HEADS)
        if cut == sorted(cut, reverse=True) and (group % mine == 0 or mine % group == 0):
            return
        q, k, v = (self._title(name) for name in "qkv")
        raise ValueError(
            f"{k}: must be sharded over heads as {q} is, whose {heads_q} heads over "
            f"{self._ranks(HEADS)} ranks would not read whole groups of the {heads_k} heads of "
            f"replicated keys, got {tensors['k'].placements!r}: redistribute {k} and {v}"  # type: ignore[attr-defined]
        )

    def _check_even(self, name: str, x: Tensor) -> None:
        is_key = name == "k"
        layout = self._layouts[name]
        for role in (HEADS, KEY_HEADS):
            if role not in layout:
                continue
            heads = x.shape[layout.index(role)]
            ranks = self._ranks(HEADS, self._sharded_keys if is_key else None)
            if heads % ranks != 0:
                raise ValueError(
                    f"{self._title(name)}: must have a multiple of {ranks} heads to be sharded "
                    f"over as many ranks, got {heads}: redistribute it"
                )

    def _ranks(self, role: str, among: Sequence[bool] | None = None) -> int:
        """How many ranks share a role."""
        count = 1
        for dim, cut in enumerate(self.cuts):
            if cut == role and (among is None or among[dim]):
                count *= self.mesh.size(dim)
        return count

    # A rank's part.

    def extent(self, role: str, size: int, among: Sequence[bool] | None = None) -> tuple[int, int]:
        """(first, count) of this rank's part of a dimension, cut as torch.chunk does."""
        first, count = 0, size
        for dim, cut in enumerate(self.cuts):
            if cut != role or (among is not None and not among[dim]):
                continue
            step = -(-count // self.mesh.size(dim))
            skipped = min(step * self.mesh.get_local_rank(dim), count)
            first, count = first + skipped, min(step, count - skipped)
        return first, count

    def key_heads(self, heads_k: int) -> tuple[int, int, int]:
        """(first, count, held): this rank's query heads read `count` key heads from `first` on of
        the `held` ones that it has.
        """
        group = self._sizes[HEADS] // heads_k
        first, count = self.extent(HEADS, self._sizes[HEADS])
        begin, end = first // group, (first + count - 1) // group + 1
        skipped, held = self.extent(HEADS, heads_k, self._sharded_keys)
        return begin - skipped, end - begin, held

    def local(self, name: str, x: Tensor) -> Tensor:
        """This rank's shard of an argument."""
        if not isinstance(x, DTensor):
            x = self.whole(x, (Replicate(),) * self.mesh.ndim, x.shape)
        wanted = self.placements(name)
        if name not in TARGETS and x.placements != wanted:
            x = x.redistribute(placements=wanted)
        if name in TARGETS:  # to be written
            return x.to_local()
        local = x.to_local(grad_placements=self.placements_of_gradient(name))
        return local if name in ("x", *_KEYS) else local.contiguous()

    def whole(
        self, local: Tensor, placements: Sequence[Placement], shape: Sequence[int]
    ) -> DTensor:
        """The DTensor whose shard here is `local`."""
        shape = torch.Size(shape)
        stride = _strides_like(local, shape)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def result(self, local: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
        return self.whole(local, self.placements_of(layout), shape)

    # Words.

    def _title(self, name: str) -> str:
        return self._titles.get(name, name)

    def _mesh_dim(self, dim: int) -> str:
        names = self.mesh.mesh_dim_names
        return f"mesh dimension {dim}" if names is None else f"mesh dimension {names[dim]!r}"

    def _no_dtensor(self, name: str) -> TypeError:
        return TypeError(
            f"{self._title(name)}: must be a DTensor where another argument is one, got a "
            "torch.Tensor (distribute_tensor makes one)"
        )


def _dim_of(layout: Layout, cut: str | None) -> int | None:
    roles = (HEADS, KEY_HEADS) if cut == HEADS else (cut,)
    return next((dim for dim, role in enumerate(layout) if role in roles), None)


def _strides_like(local: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Of a tensor without gaps whose dimensions lie in the order of those of `local`."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
