"""Eigenpairs in checkpoints: whole, a parameter at a time, whatever the layout.

They are state, not something to compute again: the batch they were computed from is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from second_order.distributed.collectives import World
from second_order.lanczos.rows import row_bounds
from second_order.optimizers.flat import FlatLayout
from second_order.optimizers.shards import gather_rows
from second_order.optimizers.subspace import ColumnBasis, Subspace

__all__ = [
    "Loaded",
    "check_saved",
    "eigenpair_parts",
    "gather_eigenpairs",
    "load_eigenpairs",
    "load_vector",
    "vector_parts",
]

VECTORS, CARRIED = "eigenvectors", "carried_momentum"


@dataclass
class Loaded:
    """The eigenpairs of a checkpoint, whole."""

    values: Tensor
    vectors: Tensor  # (r, n)
    residuals: Tensor
    largest: int
    momentum: Tensor  # (r,)
    carried: Tensor | None  # (n,)
    decayed: float


def eigenpair_parts(
    subspace: Subspace | None, layout: FlatLayout, dtype: torch.dtype, room: int
) -> dict[Tensor, dict[str, Any]]:
    """Each parameter's part of eigenpairs that are all here, as views.

    Args:
        subspace: The eigenpairs, or None.
        layout: Of the parameters.
        dtype: Of the vectors.
        room: Where there are none, zeros for so many pairs.
    """
    if not layout.params:
        return {}
    if subspace is not None:
        here = Loaded(
            subspace.values,
            subspace.basis.vectors,
            subspace.residuals,
            subspace.largest,
            subspace.momentum,
            subspace.carried,
            subspace.decayed,
        )
    elif room:
        r, device = min(room, layout.size), layout.params[0].device
        values, residuals = (torch.zeros(r, dtype=torch.float64) for _ in range(2))
        vectors = torch.zeros((r, layout.size), dtype=dtype, device=device)
        here = Loaded(values, vectors, residuals, -1, vectors.new_zeros(r), None, 1.0)
    else:
        return {}
    if here.carried is None and room:
        here.carried = here.vectors.new_zeros(layout.size)
    return _cut(here, layout.params)


def gather_eigenpairs(
    subspace: Subspace, layout: FlatLayout, world: World, to: Sequence[int]
) -> dict[Tensor, dict[str, Any]]:
    """Each parameter's part, on the ranks that want them, from everybody's; a collective."""
    basis, count, size, rank = subspace.basis, len(subspace.values), layout.size, world.rank
    carried: Tensor | None = subspace.carried
    momentum = subspace.momentum
    if isinstance(basis, ColumnBasis):
        cuts = row_bounds(count, world.size)
        heights = [b - a for a, b in pairwise(cuts)]
        parts = gather_rows(world, basis.vectors, heights, [size] * world.size, to)
        ones = [1] * world.size
        coefficients = gather_rows(world, momentum[None], ones, heights, to)
        if parts is None or coefficients is None:
            return {}
        vectors, momentum = torch.cat(parts), torch.cat(coefficients, 1)[0]
    else:
        bounds = row_bounds(size, world.size)
        widths = [b - a for a, b in pairwise(bounds)]
        parts = gather_rows(world, basis.vectors, [count] * world.size, widths, to)
        if carried is not None:
            rest = gather_rows(world, carried[None], [1] * world.size, widths, to)
            carried = None if rest is None else torch.cat(rest, 1)[0]
        if parts is None:
            return {}
        vectors = torch.cat(parts, 1)
    assert rank in to
    if carried is None and len(to) == world.size:  # room, as for a checkpoint read in place
        carried = vectors.new_zeros(size)
    values, residuals = subspace.values, subspace.residuals
    whole = Loaded(
        values, vectors, residuals, subspace.largest, momentum, carried, subspace.decayed
    )
    return _cut(whole, layout.params)


def _cut(whole: Loaded, params: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
    sizes = [p.numel() for p in params]
    parts: dict[Tensor, dict[str, Any]] = {}
    for p, vectors in zip(params, whole.vectors.split(sizes, dim=1), strict=True):
        parts[p] = {VECTORS: vectors.view(len(vectors), *p.shape)}
    if whole.carried is not None:
        for p, part in vector_parts({CARRIED: whole.carried}, params).items():
            parts[p] |= part
    parts[params[0]] |= {
        "eigenvalues": whole.values,
        "residuals": whole.residuals,
        "subspace_momentum": whole.momentum,
        "largest": whole.largest,
        "carried_decay": whole.decayed,
    }
    return parts


def vector_parts(
    vectors: Mapping[str, Tensor], params: Sequence[Tensor]
) -> dict[Tensor, dict[str, Any]]:
    """Each parameter's part of flat vectors, by their names, as views."""
    parts: dict[Tensor, dict[str, Any]] = {p: {} for p in params}
    for name, vector in vectors.items():
        for p, part in zip(params, vector.split([p.numel() for p in params]), strict=True):
            parts[p][name] = part.view(p.shape)
    return parts


def load_vector(
    saved: Mapping[Tensor, Mapping[str, Any]],
    name: str,
    params: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor | None:
    """A flat vector from each parameter's part; None if one has none."""
    parts = [saved.get(p, {}).get(name) for p in params]
    if not parts or any(part is None for part in parts):
        return None
    flat = [part.to(params[0].device, dtype).reshape(-1) for part in parts if part is not None]
    return torch.cat(flat)


def check_saved(saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Raise ValueError unless eigenvectors fit the parameters and are equally many."""
    counts = set()
    for p, part in saved.items():
        vectors = part.get(VECTORS)
        if vectors is None:
            continue
        if vectors.shape[1:] != p.shape:
            raise ValueError(
                f"the checkpoint has eigenvectors of shape {tuple(vectors.shape[1:])} for a "
                f"parameter of shape {tuple(p.shape)}; load it into the model that it was saved "
                f"with"
            )
        counts.add(len(vectors))
    if len(counts) > 1:
        raise ValueError(f"the checkpoint has {sorted(counts)} eigenvectors for one model")


def load_eigenpairs(
    saved: Mapping[Tensor, Mapping[str, Any]], params: Sequence[Tensor], dtype: torch.dtype
) -> Loaded | None:
    """The eigenpairs of a checkpoint; None if it has none, or none for some parameter."""
    parts = [saved.get(p, {}) for p in params]
    heads = [part for part in parts if "eigenvalues" in part]
    if not heads or not all(VECTORS in part for part in parts):
        return None
    head = heads[0]
    if int(head["largest"]) < 0:  # room for pairs that were not found
        return None
    device = params[0].device
    vectors = torch.cat(
        [
            part[VECTORS].to(device, dtype).reshape(len(part[VECTORS]), p.numel())
            for p, part in zip(params, parts, strict=True)
        ],
        dim=1,
    )
    return Loaded(
        head["eigenvalues"].to("cpu", torch.float64),
        vectors,
        head["residuals"].to("cpu", torch.float64),
        int(head["largest"]),
        head["subspace_momentum"].to(device, dtype),
        load_vector(saved, CARRIED, params, dtype),
        float(head["carried_decay"]),
    )
