"""Eigenpairs in checkpoints: whole, a parameter at a time, whatever the layout.

They are state, not something to compute again: the batch they were computed from is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.contract.checkpoint import HEADER
from second_order.contract.saved import SavedPart
from second_order.contract.throttle import THROTTLE
from second_order.distributed.world import World
from second_order.fosi.sharded_base import gather_parts
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import TrustRegion
from second_order.fosi.vector import ParameterVector
from second_order.lanczos.vector_space import row_bounds

__all__ = [
    "OTHERS_TRAINED",
    "START",
    "SUM",
    "check_saved_pairs",
    "counts_of",
    "gather_eigenpairs",
    "load_eigenpairs",
    "load_vector",
    "room_for_eigenpairs",
    "vector_parts",
]

VECTORS, CARRIED = "eigenvectors", "carried_momentum"
SUM, START = "gradient_sum", "epoch_start"
EPOCH = ("epoch", "epoch_step", "epoch_sums")
COUNTS = ("refreshed_at", "batch_loss", "rest_scale_bound", *THROTTLE, *EPOCH)
HEADS = ("eigenvalues", "residuals", "subspace_momentum", "largest", "carried_decay")
TRUST = ("trust_region", "last_step")  # not in checkpoints of versions before they were
KNOWN = (*HEADER, *COUNTS, *HEADS, *TRUST, VECTORS, CARRIED, SUM, START)
ORTHONORMAL = 1e-2
"""How far products of saved eigenvectors may be from 0 and 1; those in float32 are by 1e-6."""

OTHERS_TRAINED = (
    "the eigenpairs of the checkpoint are not taken over: other parameters trained then than now; "
    "the base goes on alone until the next refresh"
)


def gather_eigenpairs(
    subspace: Subspace,
    trust: TrustRegion,
    vector: ParameterVector,
    world: World,
    to: Sequence[int],
    room: bool = False,
) -> dict[Tensor, dict[str, Any]]:
    """Collect each parameter's part of the eigenpairs on the ranks ``to``; a collective.

    They are views where all is here. With ``room``, there are zeros for momentum that is not.
    """
    of, numbers = subspace, _packed(trust)
    entries = of.values, of.residuals, of.momentum, of.largest, of.decayed, numbers, of.last
    head: dict[str, Any] = dict(zip((*HEADS, *TRUST), entries, strict=True))
    vectors, carried, by_rows = subspace.basis.vectors, subspace.carried, subspace.basis.by_rows
    if world.size > 1:
        bounds = vector.bounds if by_rows else row_bounds(len(subspace.values), world.size)
        vectors = gather_parts(world, vectors, bounds, int(by_rows), to)
        for name in () if by_rows else ("subspace_momentum", "last_step"):
            head[name] = gather_parts(world, head[name], bounds, 0, to)
        if by_rows and carried is not None:
            carried = gather_parts(world, carried, bounds, 0, to)
        if world.rank not in to:
            return {}
        if by_rows:
            vectors = vector.in_order(vectors)
            carried = None if carried is None else vector.in_order(carried)
        room = room or len(to) == world.size  # as for a checkpoint read in place
    return _cut(head, vectors, carried, vector.params, room)


def room_for_eigenpairs(
    count: int, trust: TrustRegion, vector: ParameterVector
) -> dict[Tensor, dict[str, Any]]:
    """Each parameter's part of zeros in the place of so many eigenpairs."""
    if not vector.params:
        return {}
    r, device = min(count, vector.size), vector.params[0].device
    vectors = torch.zeros((r, vector.size), dtype=vector.dtype, device=device)
    none, momentum = torch.zeros(r, dtype=torch.float64, device="cpu"), vectors.new_zeros((2, r))
    entries = none, none.clone(), momentum[0], -1, 1.0, _packed(trust), momentum[1]
    head = dict(zip((*HEADS, *TRUST), entries, strict=True))
    return _cut(head, vectors, None, vector.params, room=True)


def _packed(trust: TrustRegion) -> Tensor:
    """The numbers of the trust region in float64, where they are: nobody waits for a device."""
    found = trust.numbers
    here = (
        found
        if isinstance(found, Tensor)
        else torch.tensor(found, dtype=torch.float64, device="cpu")
    )
    return here.double()


def _cut(
    head: Mapping[str, Any],
    vectors: Tensor,
    carried: Tensor | None,
    params: Sequence[Tensor],
    room: bool,
) -> dict[Tensor, dict[str, Any]]:
    if carried is None and room:
        carried = vectors.new_zeros(vectors.shape[1])
    parts = vector_parts({} if carried is None else {CARRIED: carried}, params)
    for p, part in zip(params, vectors.split([p.numel() for p in params], dim=1), strict=True):
        parts[p][VECTORS] = part.view(len(part), *p.shape)
    for name, value in head.items():  # torch loads whole states only if tensors share a device
        parts[params[0]][name] = value.to(vectors.device) if isinstance(value, Tensor) else value
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
    """Assemble a flat vector from the parameters' parts; None if one part is missing."""
    parts = [saved.get(p, {}).get(name) for p in params]
    if not parts or any(part is None for part in parts):
        return None
    flat = [part.to(params[0].device, dtype).reshape(-1) for part in parts if part is not None]
    return torch.cat(flat)


def counts_of(saved: Mapping[Tensor, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The counts of a checkpoint: parameters that did not train have none."""
    return next((part for part in saved.values() if "refreshed_at" in part), {})


def check_saved_pairs(saved: Mapping[Tensor, SavedPart]) -> None:
    """Raise ValueError unless counts and eigenpairs are finite, and fit the parameters."""
    counts = counts_of(saved)
    parts = {p: part for p, part in saved.items() if "refreshed_at" in part}
    for part in saved.values():
        part.check_known(KNOWN)
    for part in parts.values():
        part.whole("refreshed_at", -1, part["steps"])
        part.require(["batch_loss", "rest_scale_bound"])
        for key in part.keys() & set(COUNTS):
            if part[key] != counts.get(key):
                raise part.wrong(key, f"is {part[key]}, and {counts.get(key)} elsewhere")
            if key not in ("refreshed_at", "batch_loss"):  # infinite where there has been none
                part.number(key, 0.0)
    for name in (CARRIED, START, SUM):
        if any(name in part for part in parts.values()):
            for p, part in parts.items():
                part.require([name])
                part.tensor(name, tuple(p.shape))
    head = next((part for part in parts.values() if part.keys() & {*HEADS, *TRUST}), None)
    if head is None:
        return
    head.require(HEADS)
    count = head.tensor("eigenvalues").numel()
    for key in ("eigenvalues", "residuals", "subspace_momentum"):
        head.tensor(key, (count,))
    for p, part in parts.items():
        part.require([VECTORS])
        vectors = part.tensor(VECTORS)
        if vectors.shape != (count, *p.shape):
            raise part.wrong(
                VECTORS,
                f"has {len(vectors)} eigenvectors of shape {tuple(vectors.shape[1:])}, where there "
                f"are {count} eigenvalues and a parameter of shape {tuple(p.shape)}: load it into "
                f"the model that it was saved with",
            )
    if head.whole("largest", -1, count) >= 0:  # below 0, there is but room for pairs
        _check_orthonormal(parts.values(), count)
    if any(key in head for key in TRUST):
        head.require(TRUST)
        head.tensor("last_step", (count,))
        numbers = head.tensor("trust_region", (6,)).tolist()
        if min(numbers[:2] + numbers[3:]) < 0.0 or numbers[1] > 1.0:
            bounds = "numbers of at least 0 but for the third, and a scale of at most 1"
            raise head.wrong("trust_region", f"is {numbers}, where {bounds} are needed")
    head.number("carried_decay", 0.0, 1.0)


def _check_orthonormal(parts: Iterable[SavedPart], count: int) -> None:
    """Raise ValueError unless the eigenvectors, in parts by parameter, are orthonormal.

    Along others a Newton step would go too far, by any factor.
    """
    products = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    last: SavedPart | None = None
    for last in parts:
        flat = last[VECTORS].reshape(count, -1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        products += (flat @ flat.mT).cpu()
    error = (products - torch.eye(count, dtype=torch.float64, device="cpu")).abs()
    largest = float(error.max()) if count else 0.0
    if last is not None and not largest <= ORTHONORMAL:
        raise last.wrong(
            VECTORS,
            f"and those of the other parameters are not orthonormal: their products are off by "
            f"{largest:.3g}, where {ORTHONORMAL} is allowed; take an older checkpoint, or leave "
            f"the eigenpairs out, which the next refresh computes anew",
        )


def load_eigenpairs(
    saved: Mapping[Tensor, Mapping[str, Any]], params: Sequence[Tensor], dtype: torch.dtype
) -> tuple[dict[str, Any], Tensor, Tensor | None] | None:
    """The eigenpairs of a checkpoint: entries, vectors ``(r, n)``, and carried momentum ``(n,)``.

    None if it has none, or none for some parameter.
    """
    parts = [saved.get(p, {}) for p in params]
    head: dict[str, Any] = next((dict(part) for part in parts if "eigenvalues" in part), {})
    # Below 0, there is but room for pairs that were not found.
    if int(head.get("largest", -1)) < 0 or not all(VECTORS in part for part in parts):
        return None
    device = params[0].device
    for name in ("eigenvalues", "residuals"):
        head[name] = head[name].to("cpu", torch.float64)
    for name in {"subspace_momentum", "last_step"} & head.keys():
        head[name] = head[name].to(device, dtype)
    vectors = [part[VECTORS].to(device, dtype) for part in parts]
    flat = [each.reshape(len(each), p.numel()) for each, p in zip(vectors, params, strict=True)]
    return head, torch.cat(flat, dim=1), load_vector(saved, CARRIED, params, dtype)
