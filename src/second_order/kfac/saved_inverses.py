"""Save and load the inverses of the layers, and solves in progress, in a checkpoint.

A resumed run needs both to take the same steps until the next refresh. Each layer has these
entries, in the checkpoint part of its weight:

inverse_step                     the step of the factors that the inverse was computed from; -1 if
                                 the layer has no inverse
inverse_delay                    the number of steps from inverse_step until the inverse was
                                 installed
inverse_wanted                   1 if the layer is refreshed at the next step even if it is not due
inverse_A, inverse_G, ...        the tensors of the inverse, named by the solver; only gradient
                                 workers save them
inverse_damping                  two numbers, saved with these tensors: γ and the scale of the
                                 inverse; both are 0 if there is no inverse
snapshot_step                    the step of a solve that runs on a thread; -1 if none runs
snapshot_A, snapshot_G, ...      the factors that this solve reads

The layer's gradient workers load the inverse. They cannot compute it from the saved factors, which
have been updated since. If any gradient worker lacks a layer's inverse, all ranks refresh the layer
at the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.distributed.world import Shapes, World, deliver_parts
from second_order.kfac.plan import LayerPlan
from second_order.kfac.solve import LoadedInverse, Snapshot, Solves
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import KroneckerFactors
from second_order.kronecker.solvers import (
    SOLVERS,
    EigenSolver,
    InverseSolver,
)

__all__ = [
    "DAMPING",
    "INVERSE_DAMPING",
    "INVERSE_NUMBERS",
    "SNAPSHOT_TENSORS",
    "WHOLE_NUMBERS",
    "check_saved_inverse",
    "gather_inverses",
    "has_inverse_entries",
    "inverse_bytes",
    "loaded_inverse",
    "loaded_snapshot",
    "saved_inverse",
    "saved_snapshot",
]

STEP, DELAY, WANTED = "inverse_step", "inverse_delay", "inverse_wanted"
INVERSE_DAMPING = "inverse_damping"
DAMPING = "damping"
"""Entry for the value of the option γ at the last refresh, or -1 before the first refresh.

The value is the same for all layers.
"""

SNAPSHOT_STEP, SNAPSHOT_MEANS = "snapshot_step", "snapshot_mean_eigenvalues"
SNAPSHOT_NUMBERS = ("snapshot_damping", "snapshot_mean_curvature")
SNAPSHOT_TENSORS = ("snapshot_A", "snapshot_G", "snapshot_L", SNAPSHOT_MEANS)
WHOLE_NUMBERS = {STEP: (-1,), DELAY: (0,), WANTED: (0, 1), SNAPSHOT_STEP: (-1,)}
"""The entries that are whole numbers: a lower bound, and an upper bound if there is one."""

INVERSE_NUMBERS = (*WHOLE_NUMBERS, DAMPING, *SNAPSHOT_NUMBERS)
"""The entries that are numbers, not tensors."""

Solver = EigenSolver | InverseSolver


# --------------------------------------------------------------------------------------- saving


def saved_inverse(block: KroneckerBlock, solves: Solves, works: bool, room: bool) -> dict[str, Any]:
    """The entries of a layer's inverse. The tensors are shared, not copied.

    Gradient workers (``works``) have all entries. Other ranks have only the whole numbers. If
    ``room`` is true, a gradient worker without an inverse has tensors of zeros.
    torch.distributed.checkpoint needs them because it reads into existing tensors.
    """
    step = solves.taken_at.get(block, -1) if block.solved else -1
    delay = solves.installed_at.get(block, step) - step
    found: dict[str, Any] = {STEP: step, DELAY: delay, WANTED: int(block in solves.wanted)}
    if not works:
        return found

    if block.inverse is not None:
        found |= block.inverse.entries
        found[INVERSE_DAMPING] = block.numbers(_dampings(block, solves))
    elif room:
        shapes = solves.solver.saved_shapes(block.shape)
        for name, shape in shapes.items():
            dtype, device = solves.options.inv_dtype, block.weight.device
            found[name] = torch.zeros(shape, dtype=dtype, device=device)
        found[INVERSE_DAMPING] = block.numbers([0.0, 0.0])
    return found


def _dampings(block: KroneckerBlock, solves: Solves) -> list[float]:
    """γ of a layer's inverse, and the inverse's scale."""
    return [float(each.get(block, 0.0)) for each in (solves.dampings, solves.scales)]


def saved_snapshot(block: KroneckerBlock, solves: Solves, room: bool) -> dict[str, Any]:
    """The entries of a layer's solve in progress; for ``room`` see :func:`saved_inverse`."""
    solve = solves.under_way.get(block)
    if solve is None:
        found: dict[str, Any] = {SNAPSHOT_STEP: -1}
        if room:
            factors = KroneckerFactors(block.shape, block.weight.device, block.factor_dtype)
            found |= dict.fromkeys(SNAPSHOT_NUMBERS, 0.0)
            found |= _snapshot_tensors(factors.stored, factors.means)
        return found

    factors = block.ensure_factors()
    stored: Mapping[str, Tensor | None] = factors.stored  # unchanged since the snapshot
    means = factors.means
    if solve.snapshot is not None:
        means = solve.snapshot.means
        stored = solve.snapshot.stored if solve.copies is None else solve.copies()
    numbers = float(solve.option), solve.mean_curvature
    found = {SNAPSHOT_STEP: solve.step, **dict(zip(SNAPSHOT_NUMBERS, numbers, strict=True))}
    return found | _snapshot_tensors(stored, means)


def _snapshot_tensors(stored: Mapping[str, Tensor | None], means: Tensor) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {SNAPSHOT_MEANS: means}
    for letter, factor in stored.items():
        if factor is not None:
            tensors[f"snapshot_{letter}"] = factor.to(means.device)
    return tensors


def inverse_bytes(blocks: Sequence[KroneckerBlock], solver: Solver, dtype: torch.dtype) -> int:
    """Bytes that the inverses of all layers add to a complete checkpoint."""
    total = 0
    for block in blocks:
        for shape in solver.saved_shapes(block.shape).values():
            total += dtype.itemsize * torch.Size(shape).numel()
    return total


def gather_inverses(
    world: World, plan: Mapping[KroneckerBlock, LayerPlan], solves: Solves, to: Sequence[int]
) -> dict[KroneckerBlock, dict[str, Any]]:
    """Send the inverses to the ranks in ``to`` that lack them. All ranks must call this.

    Returns the entries that this rank received, by layer.
    """
    routes: dict[KroneckerBlock, tuple[int, Sequence[int]]] = {}
    for block, layer in plan.items():
        if block.solved and not {*to} <= {*layer.workers}:
            routes[block] = layer.workers[0], to
    numbers: dict[str, list[float]] = {}
    tensors: dict[KroneckerBlock, tuple[Tensor, ...]] = {}
    for block, (source, _) in routes.items():
        if source == world.rank and block.inverse is not None:
            tensors[block] = tuple(block.inverse.entries.values())
            numbers[block.name] = _dampings(block, solves)
    known: dict[str, list[float]] = {}
    for each in world.all_gather_object(numbers):
        known |= each

    found: dict[KroneckerBlock, dict[str, Any]] = {}
    dtype = solves.options.inv_dtype
    for device in sorted({block.weight.device for block in routes}, key=str):
        here = {b: r for b, r in routes.items() if b.weight.device == device and b.name in known}
        named = {b: solves.solver.saved_shapes(b.shape) for b in here}
        shapes: dict[KroneckerBlock, Shapes] = {b: tuple(n.values()) for b, n in named.items()}
        arrived = deliver_parts(world, shapes, here, tensors, dtype, device)
        for block, (source, destinations) in here.items():
            if source != world.rank and world.rank in destinations:
                copies = [part.clone() for part in arrived[block]]
                found[block] = dict(zip(named[block], copies, strict=True))
                found[block][INVERSE_DAMPING] = block.numbers(known[block.name])
    return found


# -------------------------------------------------------------------------------------- loading


def has_inverse_entries(part: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has inverse entries for the layer.

    It has them if the layer was trained and inverses were saved.
    """
    return STEP in part and WANTED in part


def loaded_inverse(
    part: Mapping[str, Any],
    block: KroneckerBlock,
    solver: Solver,
    dtype: torch.dtype,
    works: bool,
    *,
    scaled: bool,
) -> LoadedInverse | None:
    """A layer's inverse from a checkpoint, or None if the layer had no inverse.

    The field ``inverse`` is set only on gradient workers (``works``). It is None if the checkpoint
    lacks tensors that fit this solver and this layer, or if its inverse has another
    ``preconditioner_scale`` (``scaled``: the gradient's).
    """
    step = int(part.get(STEP, -1))
    if step < 0:
        return None
    here = LoadedInverse(step, int(part.get(DELAY, 0)))
    if not works:
        return here
    entries: dict[str, Tensor] = {}
    for name, shape in solver.saved_shapes(block.shape).items():
        saved = part.get(name)
        fits = saved is not None and tuple(saved.shape) == shape
        if not fits or not bool(saved.any()):  # all zeros: no inverse was read
            return here
        entries[name] = saved.to(block.weight.device, dtype)
    damping, scale = part[INVERSE_DAMPING].tolist() if INVERSE_DAMPING in part else (0.0, 0.0)
    if (scale > 0) != scaled:  # Newton's scale is saved as 0
        return here
    return LoadedInverse(here.step, here.delay, damping, scale, solver.inverse(entries))


def loaded_snapshot(part: Mapping[str, Any], block: KroneckerBlock) -> Snapshot | None:
    """The solve that was in progress for a layer, or None if there was none.

    Its factors are None if the checkpoint lacks factors that fit the layer.
    """
    step = int(part.get(SNAPSHOT_STEP, -1))
    if step < 0:
        return None
    entries: dict[str, Any] = {}
    for name in SNAPSHOT_TENSORS:
        if name in part:
            entries[name.removeprefix("snapshot_")] = part[name]
    whole = all(name in entries for name in (*block.shape.letters, "mean_eigenvalues"))
    factors = None
    if whole and "average_weight" in part and not block.misfit(entries):
        factors = block.read_factors({**entries, "average_weight": part["average_weight"]})
    damping, mean_curvature = (float(part.get(name, 0.0)) for name in SNAPSHOT_NUMBERS)
    return Snapshot(step, damping, mean_curvature, factors)


def check_saved_inverse(part: SavedPart, block: KroneckerBlock) -> None:
    """Raise CheckpointError unless a layer's inverse and snapshot are valid and fit the layer."""
    for solver in SOLVERS.values():
        for name, shape in solver.saved_shapes(block.shape).items():
            if name not in part:
                continue
            if tuple(part[name].shape) != shape:
                raise part.wrong(
                    name,
                    f"has the shape {tuple(part[name].shape)}, where layer {block.name!r} needs "
                    f"{shape}",
                )
    for name in part.keys() & {*SNAPSHOT_TENSORS}:
        letter = name.removeprefix("snapshot_")
        if letter in block.shape.letters and (misfit := block.misfit({letter: part[name]})):
            raise part.wrong(name, f"does not fit: {misfit}")
    if SNAPSHOT_MEANS in part:
        part.tensor(SNAPSHOT_MEANS, (block.shape.numbers, block.shape.groups))
