"""Eigenpairs in checkpoints: whole, a parameter at a time, whatever the layout.

They are state, not something to compute again: the batch they were computed from is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import HEADER, SavedPart
from second_order.distributed.world import World
from second_order.fosi.flat_params import FlatParams, ParamPiece, gathered
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import TrustState
from second_order.training.throttle import THROTTLE

__all__ = [
    "CARRIED",
    "START",
    "SUM",
    "TENSORS",
    "VECTORS",
    "check_saved_pairs",
    "counts_of",
    "pairs_of",
    "room_for_pairs",
    "saved_pairs",
]

VECTORS, CARRIED = "eigenvectors", "carried_momentum"
SUM, START = "gradient_sum", "epoch_start"
EPOCH = ("epoch", "epoch_step", "epoch_sums")
COUNTS = ("refreshed_at", "batch_loss", "rest_scale_bound", *THROTTLE, *EPOCH)
TENSORS = ("eigenvalues", "residuals", "subspace_momentum", "last_step")  # (r,) each
FIRST = (*TENSORS, "largest", "carried_decay", "trust_region")  # with the first parameter alone
KNOWN = (*HEADER, *COUNTS, *FIRST, VECTORS, CARRIED, SUM, START)

Parts = dict[Tensor, dict[str, Any]]


def saved_pairs(subspace: Subspace, vector: FlatParams, world: World, to: Sequence[int]) -> Parts:
    """Each parameter's part of the eigenpairs, on the ranks ``to``; a collective.

    Tensors are shared where all is here.
    """
    vectors = subspace.basis.vectors
    momentum = subspace.momentum
    last = subspace.last
    carried = subspace.carried
    if subspace.basis.by_rows:

        def here(piece: ParamPiece) -> dict[str, Any]:
            return {VECTORS: vectors[:, piece.rows], CARRIED: carried[piece.rows]}

        parts = vector.whole_state(here, to)
    else:
        everybody = gathered(world, [vectors, momentum, last])
        parts_of = zip(*everybody, strict=True)
        vectors, momentum, last = (torch.cat(each).to(vectors) for each in parts_of)
        parts = _by_param(vector, vectors, carried)
    if world.rank not in to:
        return {}
    return _with_first(
        parts,
        vector,
        eigenvalues=subspace.values,
        residuals=subspace.residuals,
        subspace_momentum=momentum,
        last_step=last,
        trust_region=subspace.trust,
        largest=subspace.largest,
        carried_decay=subspace.decayed,
    )


def room_for_pairs(count: int, vector: FlatParams) -> Parts:
    """Zeros of the shape of so many eigenpairs: some checkpoints are read into existing tensors.

    "largest" is below 0.
    """
    r = min(count, vector.size)
    vectors = torch.zeros((r, vector.size), dtype=vector.dtype, device=vector.params[0].device)
    none = torch.zeros(r, dtype=torch.float64, device="cpu")
    return _with_first(
        _by_param(vector, vectors, vectors.new_zeros(vector.size)),
        vector,
        eigenvalues=none,
        residuals=none.clone(),
        subspace_momentum=vectors.new_zeros(r),
        last_step=vectors.new_zeros(r),
        trust_region=vectors.new_zeros(len(TrustState._fields)),
        largest=-1,
        carried_decay=1.0,
    )


def _by_param(vector: FlatParams, vectors: Tensor, carried: Tensor) -> Parts:
    rows = vector.by_param(vectors)
    momentum = vector.by_param(carried)
    return {p: {VECTORS: rows[p], CARRIED: momentum[p]} for p in vector.params}


def _with_first(parts: Parts, vector: FlatParams, **entries: Any) -> Parts:
    """The parts with the entries that all parameters share, in the first one's.

    On its device: torch loads whole states only if their tensors share one.
    """
    first = vector.params[0]
    for name, value in entries.items():
        parts[first][name] = value.to(first.device) if isinstance(value, Tensor) else value
    return parts


def counts_of(saved: Mapping[Tensor, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The counts of a checkpoint: parameters that did not train have none."""
    return next((part for part in saved.values() if "refreshed_at" in part), {})


def pairs_of(
    saved: Mapping[Tensor, Mapping[str, Any]], params: Sequence[Tensor]
) -> Mapping[str, Any] | None:
    """The entries that the parameters of a checkpoint's eigenpairs share; None without pairs."""
    first = saved.get(params[0], {}) if params else {}
    return first if first.get("largest", -1) >= 0 else None


def check_saved_pairs(saved: Mapping[Tensor, SavedPart]) -> None:
    """Raise ValueError unless counts and eigenpairs are finite, and fit the parameters."""
    parts = {p: part for p, part in saved.items() if "refreshed_at" in part}
    for part in saved.values():
        part.check_known(KNOWN)
    for p, part in parts.items():
        part.require(["batch_loss", "rest_scale_bound"])
        part.whole("refreshed_at", -1, part["steps"])
        if not isinstance(part["batch_loss"], float):  # infinite before the first refresh
            raise part.wrong("batch_loss", "is no number")
        for key in part.keys() & set(COUNTS) - {"refreshed_at", "batch_loss"}:
            part.number(key, 0.0)
        for key in part.keys() & {CARRIED, START, SUM}:
            part.tensor(key, tuple(p.shape))
    first = next((part for part in parts.values() if "eigenvalues" in part), None)
    if first is None:
        return
    first.require(FIRST)
    count = first.tensor("eigenvalues").numel()
    for key in TENSORS:
        first.tensor(key, (count,))
    first.tensor("trust_region", (len(TrustState._fields),))
    first.whole("largest", -1, count)
    first.number("carried_decay", 0.0, 1.0)
    for p, part in parts.items():
        part.require([VECTORS, CARRIED])
        part.tensor(VECTORS, (count, *p.shape))
