"""What a checkpoint has of the layers: its entries, their checks, and their transfer between ranks.

The entries of a layer, in the checkpoint part of its weight:

A, G, L                          the running averages that this process stores
average_weight, mean_eigenvalues, examples
                                 the weight of the averages, their mean eigenvalues, and the number
                                 of examples
inverse_step                     the step of the factors that the inverse was computed from; -1 if
                                 the layer has no inverse
inverse_delay                    the number of steps from inverse_step until the inverse was
                                 installed
inverse_wanted                   1 if the layer is refreshed at the next step even if it is not due
inverse_A, inverse_G, ...        the tensors of the inverse, named by the solver; only gradient
                                 workers save them
inverse_damping                  four numbers, saved with these tensors: γ, the mean eigenvalue of
                                 A ⊗ G + γ, the option γ, and 1 if the inverse is scaled by the
                                 second; all are 0 if there is no inverse
snapshot_step                    the step of an inverse that is computed on a thread; -1 if none is
snapshot_A, snapshot_G, ...      the factors that it is computed from

:func:`factor_entries` and :func:`inverse_entries` list the tensors, with the ranks that have them.
Saving, checks and transfers all follow these lists. Transfers are collectives: every rank calls
them with the same layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import HEADER, SavedPart
from second_order.distributed.world import World
from second_order.kfac.inversion import Inverses, InverseState, LoadedInverse, PendingInverse
from second_order.kfac.plan import LayerPlan
from second_order.kfac.precondition import USUAL_CHANGE
from second_order.kfac.schedule import DRIFT, UPDATED_AT
from second_order.kfac.step_scale import LAST_STEP, LAST_STEP_KNOWN, SCALE_ENTRIES
from second_order.kfac.thor import SETTLED
from second_order.kronecker.block import (
    AGREED_STATE,
    PASS_HISTORY,
    KroneckerBlock,
    LayerStatus,
)
from second_order.kronecker.factors import OwnedFactors
from second_order.kronecker.solvers import INVERSE_ENTRIES
from second_order.training.context import Training
from second_order.training.throttle import THROTTLE_ENTRIES

__all__ = [
    "CHOSEN",
    "DAMPING",
    "EXAMPLES",
    "MEANS",
    "MEAN_CURVATURE",
    "NEWLY_TRAINABLE_AT",
    "WEIGHT",
    "Entry",
    "Loaded",
    "check_saved",
    "factor_entries",
    "inverse_entries",
    "inverse_state",
    "load_factors",
    "load_inverses",
    "move_factors",
    "read_num_gradient_workers",
    "read_shared_number",
    "send_entries",
    "trainable_layers_changed",
]

LETTERS = ("A", "G", "L")
WEIGHT, MEANS, EXAMPLES = HEADS = ("average_weight", "mean_eigenvalues", "examples")
STEP, DELAY, WANTED = "inverse_step", "inverse_delay", "inverse_wanted"
INVERSE_DAMPING = "inverse_damping"
STATISTICS_DUE = AGREED_STATE[1]
SNAPSHOT = "snapshot_"
SNAPSHOT_STEP = "snapshot_step"
SNAPSHOT_NUMBERS = ("snapshot_damping", "snapshot_mean_curvature")

CHOSEN = ("gradient_workers", "gradient_workers_of")
MEAN_CURVATURE = "mean_curvature"
NEWLY_TRAINABLE_AT = "newly_trainable_at"
DAMPING = "damping"
"""The option γ at the last refresh, or -1 before the first; the same for all layers."""

WHOLE = (*DRIFT, *THROTTLE_ENTRIES[:2])
"""Whole numbers of at least 0."""

KNOWN = (
    *(*LETTERS, *HEADS, *INVERSE_ENTRIES, INVERSE_DAMPING, STEP, DELAY, WANTED, SNAPSHOT_STEP),
    *(*SNAPSHOT_NUMBERS, *(SNAPSHOT + name for name in (*LETTERS, *HEADS)), PASS_HISTORY),
    *(MEAN_CURVATURE, UPDATED_AT, NEWLY_TRAINABLE_AT, DAMPING, *CHOSEN, *SCALE_ENTRIES),
    *(*USUAL_CHANGE, *THROTTLE_ENTRIES, *DRIFT, SETTLED, *AGREED_STATE, LAST_STEP, LAST_STEP_KNOWN),
    *HEADER,
)
"""All entries."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a layer in a checkpoint.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype.
        ranks: The ranks that have it; None if all have it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: Sequence[int] | None = None


def factor_entries(block: KroneckerBlock, layer: LayerPlan | None) -> list[Entry]:
    """The running averages of a layer. A layer that has never trained has no plan."""
    wide = torch.promote_types(block.factor_dtype, torch.float32)
    owners: dict[str, Sequence[int] | None] = {}
    for letter in block.shape.factor_names:
        keeper = None if layer is None else layer.factor_owner(letter)
        owners[letter] = None if keeper is None else [keeper]
    means = (block.shape.record_size, block.shape.groups)
    found = [
        Entry(WEIGHT, (), wide, owners["A"]),
        Entry(MEANS, means, wide, owners["A"]),
        Entry(EXAMPLES, (), wide, owners["A"]),
    ]
    for letter, shape in block.stored_shapes.items():
        found.append(Entry(letter, shape, block.factor_dtype, owners[letter]))
    return found


def inverse_entries(
    block: KroneckerBlock, layer: LayerPlan | None, inverses: Inverses
) -> list[Entry]:
    """The inverse of a layer, what the next one is computed from, and the history of passes."""
    workers = None if layer is None else layer.workers
    source = None if layer is None or layer.source is None else [layer.source]
    numbers = block.to_checkpoint_tensor(()).dtype
    found = [
        Entry(INVERSE_DAMPING, (4,), numbers, workers),
        Entry(PASS_HISTORY, (4,), numbers, source),
    ]
    for name, shape in inverses.solver.saved_shapes(block.shape).items():
        found.append(Entry(name, shape, inverses.options.inv_dtype, workers))
    if not inverses.waits_for_all and (layer is None or layer.factors_everywhere):
        factors = factor_entries(block, None)
        found += [replace(entry, name=SNAPSHOT + entry.name) for entry in factors]
    return found


# --------------------------------------------------------------------------------------- saving


def inverse_state(
    block: KroneckerBlock, layer: LayerPlan, inverses: Inverses, room: bool
) -> dict[str, Any]:
    """What a checkpoint has of a layer between two refreshes. Tensors are shared, not copied.

    If ``room`` is true, tensors that this rank may have and does not have are zeros.
    torch.distributed.checkpoint needs them because it reads into existing tensors.
    """
    world = inverses.training.world
    state = inverses.states[block] if block.solved else InverseState(step=-1, installed_at=-1)
    found: dict[str, Any] = {
        STEP: state.step,
        DELAY: state.installed_at - state.step,
        WANTED: int(block in inverses.requested),
    }
    tensors = {PASS_HISTORY: block.pass_history(layer.contributors(world.size))}
    if block.inverse is not None:
        numbers = [state.damping, state.mean_eigenvalue, state.damping_option, inverses.scaled]
        tensors |= block.inverse.entries
        tensors[INVERSE_DAMPING] = block.to_checkpoint_tensor([float(number) for number in numbers])

    # The inverse that is being computed.
    if not layer.factors_everywhere:  # its owner alone has what it is computed from
        found[WANTED] = int(found[WANTED] or block in inverses.pending)
    elif not inverses.waits_for_all:
        inverses.snapshot_factors([block])
        solve = inverses.pending.get(
            block, PendingInverse(step=-1, damping_option=0.0, mean_curvature=0.0)
        )
        found[SNAPSHOT_STEP] = solve.step
        found |= zip(
            SNAPSHOT_NUMBERS, (float(solve.damping_option), solve.mean_curvature), strict=True
        )
        if solve.factors is not None:
            tensors |= {SNAPSHOT + name: x for name, x in solve.factors.entries.items()}

    for entry in inverse_entries(block, layer, inverses):
        if entry.ranks is None or world.rank in entry.ranks:
            if entry.name in tensors:
                found[entry.name] = tensors[entry.name]
            elif room:
                device = block.weight.device
                found[entry.name] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
    return found


# ------------------------------------------------------------------------------ transfer of entries


def send_entries(
    world: World,
    block: KroneckerBlock,
    entries: Iterable[Entry],
    saved: Mapping[str, Tensor],
    ranks: Sequence[int],
) -> dict[str, Tensor]:
    """Send entries of a layer to ranks that lack them; a collective.

    Returns the entries that this rank has now. Those that their first rank lacks are missing.
    """
    found: dict[str, Tensor] = {}
    for entry in entries:
        has = entry.ranks is None or world.rank in entry.ranks
        value = saved.get(entry.name) if has else None
        if entry.ranks is not None and not {*ranks} <= {*entry.ranks}:
            source = entry.ranks[0]
            sent = value
            if sent is None or world.rank != source:
                sent = torch.zeros(entry.shape, dtype=entry.dtype, device=block.weight.device)
            present = sent.new_full((), float(value is not None))
            world.broadcast([present, sent], [source, source])
            if world.rank in ranks and not has and bool(present):
                value = sent
        if value is not None:
            found[entry.name] = value
    return found


def move_factors(
    world: World,
    plan: Mapping[KroneckerBlock, LayerPlan],
    before: Mapping[KroneckerBlock, LayerPlan],
) -> None:
    """Send the factors of layers whose owners have changed to the new owners."""
    for block in before.keys() - plan.keys():  # they do not train
        block.set_owned_factors(block.owned_factors)
    for block, layer in plan.items():
        old = before.get(block, layer)
        received: dict[str, Tensor | None] = {}
        if not layer.factors_everywhere and old.inverse_ranks != layer.inverse_ranks:
            saved = {} if block.factors is None else block.saved_factors()
            for entry in factor_entries(block, old):
                letter = entry.name in block.shape.factor_names
                new = [layer.inverse_rank(entry.name)] if letter else layer.inverse_ranks
                found = send_entries(world, block, [entry], saved, new)
                if world.rank in new and (letter or entry.name in found):
                    received[entry.name] = found.get(entry.name)  # None if it is lost
        here = (None, world.rank)
        owned_factors = OwnedFactors(
            a=layer.factor_owner("A") in here, g=layer.factor_owner("G") in here
        )
        block.set_owned_factors(owned_factors)
        if received and block.factors is not None:
            block.receive_factors(received)


# -------------------------------------------------------------------------------------- checks


def check_saved(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock], inverses: Inverses
) -> None:
    """Raise ValueError unless all entries are known and finite, and tensors fit their layers.

    A layer that is frozen may have been saved with its bias, and one that has no block here with
    any sizes: of such layers, factors that do not fit are not loaded.
    """
    block_of: dict[Tensor, KroneckerBlock] = {block.weight: block for block in blocks}
    for p, part in saved.items():
        part.check_known(KNOWN)
        shapes: dict[str, tuple[int, ...]] = {LAST_STEP: tuple(p.shape)}
        block = block_of.get(p)
        if block is not None and (block.trainable or not block.size_mismatch(part)):
            if part.keys() & {*LETTERS, MEANS, EXAMPLES}:
                part.require([WEIGHT, MEANS])
            for entry in (*factor_entries(block, None), *inverse_entries(block, None, inverses)):
                shapes[entry.name] = entry.shape
        for key, value in part.items():
            if key in WHOLE:
                part.whole(key, 0)
            elif isinstance(value, Tensor):
                part.tensor(key, shapes.get(key))
            elif key not in HEADER:
                part.number(key)
        if PASS_HISTORY in part:
            status = float(part[PASS_HISTORY][0])
            if status not in [each.value for each in LayerStatus]:
                raise part.wrong(PASS_HISTORY, f"begins with {status:g}, which is no layer status")


# -------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint has of the layers of a plan, as far as this rank works on them.

    Attributes:
        inverses: The inverses of layers that had one.
        snapshots: The inverses that were being computed on threads.
        missing: Layers of which this rank lacks a part that it needs.
        wanted: Layers that are to be refreshed at the next step, because the run was about to.
    """

    inverses: dict[KroneckerBlock, LoadedInverse]
    snapshots: dict[KroneckerBlock, PendingInverse]
    missing: set[KroneckerBlock]
    wanted: set[KroneckerBlock]


def read_shared_number(saved: Mapping[Tensor, SavedPart], key: str, otherwise: float) -> float:
    """A number that all layers have; ``otherwise`` if the checkpoint lacks it."""
    for part in saved.values():
        if key in part:
            return part.number(key)
    return otherwise


def read_num_gradient_workers(saved: Mapping[Tensor, SavedPart], ranks: int) -> int:
    """The number of gradient workers that was chosen for so many ranks, or 0."""
    workers, of = (int(read_shared_number(saved, name, 0.0)) for name in CHOSEN)
    return workers if of == ranks and workers and ranks % workers == 0 else 0


def load_factors(
    saved: Mapping[Tensor, SavedPart], blocks: Sequence[KroneckerBlock], training: Training
) -> None:
    """Take over the factors of layers, in the dtypes they were saved in."""
    for block in blocks:
        part: Mapping[str, Any] = saved.get(block.weight, {})
        block.staged.clear()
        block.restart_averages()
        if training.steps == 0:
            continue
        if block.size_mismatch(part):
            training.warn(
                f"the factors of layer {block.name!r} are not taken over: it is frozen, and "
                f"saved with another size, with its bias perhaps; once it trains they are "
                f"taken anew"
            )
        elif WEIGHT in part or part.get(STATISTICS_DUE, 0):
            # A rank may have been given the factors of its own layers alone. Those of the others
            # count as known. If it lacks its own, they are lost, as the next refresh finds out.
            block.load_factors(part)


def trainable_layers_changed(
    saved: Mapping[Tensor, SavedPart], plan: Mapping[KroneckerBlock, LayerPlan]
) -> bool:
    """Whether other layers train now than when a checkpoint was written."""
    trained = {weight for weight, part in saved.items() if STEP in part}
    return trained != {block.weight for block in plan}


def load_inverses(
    saved: Mapping[Tensor, SavedPart],
    plan: Mapping[KroneckerBlock, LayerPlan],
    inverses: Inverses,
) -> Loaded:
    """Read the inverses of the layers that train, and what was being computed."""
    rank = inverses.training.world.rank
    loaded = Loaded({}, {}, set(), set())
    for block, layer in plan.items():
        part = saved.get(block.weight)
        if part is None or STEP not in part:  # it did not train
            loaded.wanted.add(block)
            continue
        if part[WANTED]:
            loaded.wanted.add(block)
        if part[STEP] >= 0:
            step = int(part[STEP])
            inverse = LoadedInverse(InverseState(step, step + int(part[DELAY])))
            if rank in layer.workers:
                inverse = _read_inverse(part, block, inverses, inverse)
                if inverse.inverse is None:
                    loaded.missing.add(block)
            loaded.inverses[block] = inverse
        if (
            part.get(SNAPSHOT_STEP, -1) >= 0
            and not inverses.waits_for_all
            and layer.factors_everywhere
        ):
            names = {SNAPSHOT + name: name for name in (*HEADS, *block.shape.factor_names)}
            if part.keys() >= names.keys():
                factors = block.read_factors({names[name]: part[name] for name in names})
                damping, curvature = (float(part[name]) for name in SNAPSHOT_NUMBERS)
                step = int(part[SNAPSHOT_STEP])
                loaded.snapshots[block] = PendingInverse(step, damping, curvature, factors=factors)
            else:
                loaded.missing.add(block)
    return loaded


def _read_inverse(
    part: Mapping[str, Any], block: KroneckerBlock, inverses: Inverses, loaded: LoadedInverse
) -> LoadedInverse:
    """Add the inverse itself, unless it has another solver or ``grafting``."""
    names = inverses.solver.saved_shapes(block.shape)
    if not part.keys() >= {INVERSE_DAMPING, *names}:
        return loaded
    damping, trace, option, scaled = part[INVERSE_DAMPING].tolist()
    empty = not all(bool(part[name].any()) for name in names)  # no inverse was read
    if empty or scaled != inverses.scaled:
        return loaded
    entries: dict[str, Tensor] = {}
    for name in names:
        entries[name] = part[name].to(block.weight.device, inverses.options.inv_dtype, copy=True)
    state = replace(loaded.state, damping=damping, mean_eigenvalue=trace, damping_option=option)
    return LoadedInverse(state, inverses.solver(entries))
