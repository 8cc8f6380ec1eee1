"""Checkpoints store complete eigenvectors with the first parameter that trains.

A checkpoint stores the eigenpairs instead of computing them again, because their
curvature batch is gone. Every parameter that trains has the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import HEADER, SavedPart
from second_order.fosi.flat_params import FlatParams, all_gather_on_cpu
from second_order.fosi.subspace import Subspace, TrustState
from second_order.training.throttle import THROTTLE_ENTRIES

__all__ = [
    "EPOCH_START",
    "GRADIENT_SUM",
    "SavedPairs",
    "check_saved_pairs",
    "counts_of",
    "empty_pairs",
    "find_part",
    "gather_pairs",
    "read_pairs",
    "same_params",
]

# MRDHO2's sums of the running epoch, (n,) each, stored with the first parameter.
GRADIENT_SUM = "gradient_sum"
EPOCH_START = "epoch_start"

EPOCH_COUNTS = ("epoch", "epoch_step", "epoch_sums")
COUNTS = (
    "refreshed_at",
    "batch_loss",
    "base_scale_bound",
    *THROTTLE_ENTRIES,
    *EPOCH_COUNTS,
)


@dataclass(frozen=True)
class SavedPairs:
    """The eigenpairs, momentum and trust region of all processes, for a checkpoint.

    Without eigenpairs, ``num_largest`` is below 0. torch.distributed.checkpoint needs
    such entries, because it reads into existing tensors.
    """

    eigenvectors: Tensor  # (r, n)
    outside_momentum: Tensor  # (n,)
    eigenvalues: Tensor  # (r,)
    residuals: Tensor  # (r,)
    subspace_momentum: Tensor  # (r,)
    last_step: Tensor  # (r,) the last full Newton step
    trust_region: Tensor  # the TrustState
    num_largest: int
    outside_decay: float

    def entries(self, device: torch.device) -> dict[str, Any]:
        """Return entries on one device: torch needs that to load complete states."""
        entries = {}
        for name, value in vars(self).items():
            entries[name] = value.to(device) if isinstance(value, Tensor) else value
        return entries


PAIRS = tuple(field.name for field in fields(SavedPairs))


def gather_pairs(subspace: Subspace, flat_params: FlatParams) -> SavedPairs:
    """Gather the eigenpairs of all processes. Collective.

    On one process the tensors are not copied.
    """
    basis = subspace.basis
    vectors = basis.vectors
    outside_momentum = subspace.outside_momentum
    momentum = subspace.newton.momentum
    full_step = subspace.newton.full_step
    # By rows, a process has a part of every vector. Otherwise it has some vectors.
    if basis.by_rows:
        vectors = flat_params.gather(vectors)
        outside_momentum = flat_params.gather(outside_momentum)
    else:
        by_rank = all_gather_on_cpu(basis.world, [vectors, momentum, full_step])
        vectors = torch.cat([tensors[0] for tensors in by_rank])
        momentum = torch.cat([tensors[1] for tensors in by_rank])
        full_step = torch.cat([tensors[2] for tensors in by_rank])
    return SavedPairs(
        eigenvectors=vectors,
        outside_momentum=outside_momentum,
        eigenvalues=subspace.values,
        residuals=subspace.residuals,
        subspace_momentum=momentum,
        last_step=full_step,
        trust_region=subspace.newton.trust,
        num_largest=subspace.num_largest,
        outside_decay=subspace.outside_decay,
    )


def empty_pairs(count: int, flat_params: FlatParams) -> SavedPairs:
    """Return zeros of the shapes of ``count`` eigenpairs, on the parameters' device."""
    n = flat_params.size
    r = min(count, n)
    device = flat_params.params[0].device
    vectors = torch.zeros((r, n), dtype=flat_params.dtype, device=device)
    return SavedPairs(
        eigenvectors=vectors,
        outside_momentum=vectors.new_zeros(n),
        eigenvalues=vectors.new_zeros(r, dtype=torch.float64),
        residuals=vectors.new_zeros(r, dtype=torch.float64),
        subspace_momentum=vectors.new_zeros(r),
        last_step=vectors.new_zeros(r),
        trust_region=vectors.new_zeros(len(TrustState._fields)),
        num_largest=-1,
        outside_decay=1.0,
    )


def find_part(saved: Mapping[Tensor, SavedPart], key: str) -> SavedPart | None:
    """Return the part of a checkpoint that has an entry; None if no part has it."""
    for part in saved.values():
        if key in part:
            return part
    return None


def counts_of(saved: Mapping[Tensor, SavedPart]) -> Mapping[str, Any]:
    """Return a checkpoint's part with the counts; empty if no parameter trained."""
    part = find_part(saved, "refreshed_at")
    return {} if part is None else part


def same_params(saved: Mapping[Tensor, SavedPart], params: Sequence[Tensor]) -> bool:
    """Whether these parameters, and no others, trained when the checkpoint was made."""
    trained = {p for p, part in saved.items() if "refreshed_at" in part}
    return trained == set(params)


def read_pairs(saved: Mapping[Tensor, SavedPart]) -> SavedPairs | None:
    """Read the eigenpairs of a checkpoint; None if it has none."""
    part = find_part(saved, "eigenvectors")
    if part is None or part["num_largest"] < 0:
        return None
    return SavedPairs(**{name: part[name] for name in PAIRS})


def check_saved_pairs(saved: Mapping[Tensor, SavedPart]) -> None:
    """Raise ValueError unless counts and pairs are finite and fit the parameters."""
    for part in saved.values():
        part.check_known((*HEADER, *COUNTS, *PAIRS, EPOCH_START, GRADIENT_SUM))
    trained = {p: part for p, part in saved.items() if "refreshed_at" in part}
    for part in trained.values():
        _check_counts(part)
    n = sum(p.numel() for p in trained)
    for part in trained.values():
        _check_vectors(part, n)


def _check_counts(part: SavedPart) -> None:
    part.require(["batch_loss", "base_scale_bound"])
    part.whole("refreshed_at", -1, part["steps"])
    # The loss is infinite before the first refresh.
    if not isinstance(part["batch_loss"], float):
        raise part.wrong("batch_loss", "is not a number")
    for key in part.keys() & set(COUNTS) - {"refreshed_at", "batch_loss"}:
        part.number(key, 0.0)


def _check_vectors(part: SavedPart, n: int) -> None:
    """Check the tensors of a part.

    Vectors span the n elements of all parameters that trained.
    """
    shapes: dict[str, tuple[int, ...]] = {EPOCH_START: (n,), GRADIENT_SUM: (n,)}
    if not part.keys().isdisjoint(PAIRS):
        part.require(PAIRS)

        # The eigenvalues say how many pairs there are, so they are checked first.
        r = tuple(part.tensor("eigenvalues").shape[:1])
        part.tensor("eigenvalues", r or (1,))
        part.whole("num_largest", -1, *r)
        part.number("outside_decay", 0.0, 1.0)
        for name in ("residuals", "subspace_momentum", "last_step"):
            shapes[name] = r
        shapes["eigenvectors"] = (*r, n)
        shapes["outside_momentum"] = (n,)
        shapes["trust_region"] = (len(TrustState._fields),)
    for key in part.keys() & shapes.keys():
        part.tensor(key, shapes[key])
