"""The layers' entries in a checkpoint: how they are saved, checked, loaded and sent.

The ``"curvature"`` part of a layer's weight has these entries:

A, G, L                     the running averages that this rank stores
average_weight, mean_eigenvalues, examples
                            the weight of the averages, their mean eigenvalues, and the
                            number of examples
pass_history, no_statistics, statistics_due, failures
                            what is known of the layer's statistics and refreshes
                            (:mod:`second_order.kronecker.block`)
inverse_step                the step of the factors that the inverse was computed from;
                            -1 if the layer has no inverse
inverse_delay               the number of steps from inverse_step until the inverse was
                            installed
inverse_requested           1 if the layer is refreshed at the next step even if it is
                            not due
inverse_A, inverse_G, ...   the tensors of the inverse, named by the solver; only
                            gradient workers save them
inverse_damping             four numbers, saved with these tensors: the layer's γ, the
                            mean eigenvalue of A ⊗ G + γ, the option ``damping``, and 1
                            if the inverse is multiplied by that mean eigenvalue
snapshot_step               the step of the factors of a pending inverse; -1 if none is
                            pending
snapshot_damping, snapshot_mean_curvature
                            its option ``damping``, and the mean curvature of all layers
snapshot_A, snapshot_average_weight, ...
                            its running averages
drift_interval, ...         the drift (:mod:`second_order.kfac.schedule`)
stopped                     1 if THOR's rule has stopped the layer

A frozen layer has only the running averages and some of the numbers. If a layer has no
inverse, or no pending one, the tensors are missing, or zeros where
torch.distributed.checkpoint needs tensors to load into. Each parameter of a layer also
has last_step and last_step_known, for the step scale.

Shared numbers describe the whole model and not one layer, for example the step scale. A
checkpoint has entries only for parameters, so the entries of each layer repeat the
shared numbers.

:data:`INTEGERS`, :data:`NUMBERS` and :data:`TENSORS` say what each entry is, and
:func:`layer_shapes` gives the shapes of tensors. Checks and loading use these.
:func:`factor_entries` and :func:`inverse_entries` list a layer's tensors, their dtypes
when they are saved, and the ranks that have them. Saving and sending use these lists.
The functions that send are collectives: every rank calls them with the same layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.saved import HEADER, SavedPart
from second_order.distributed.world import World
from second_order.kfac.inversion import (
    Inverses,
    InverseState,
    LoadedInverse,
    LoadedInverses,
    PendingInverse,
)
from second_order.kfac.plan import LayerPlan
from second_order.kfac.precondition import USUAL_CHANGE
from second_order.kfac.schedule import DRIFT_ENTRIES
from second_order.kfac.step_scale import LAST_STEP, LAST_STEP_KNOWN, SCALE_ENTRIES
from second_order.kfac.thor import STOPPED
from second_order.kronecker.block import (
    AGREED_STATE,
    PASS_HISTORY,
    KroneckerBlock,
    LayerStatus,
)
from second_order.kronecker.factors import ALL_FACTORS
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.solvers import INVERSE_ENTRIES, Solver
from second_order.training.throttle import THROTTLE_ENTRIES

__all__ = [
    "DAMPING",
    "EXAMPLES",
    "MEANS",
    "WEIGHT",
    "Entry",
    "SharedNumbers",
    "check_saved",
    "factor_entries",
    "inverse_entries",
    "inverse_state",
    "load_inverses",
    "move_factors",
    "read_shared_numbers",
    "send_entries",
]

# The entries of a layer.
FACTOR_NAMES = ("A", "G", "L")
WEIGHT = "average_weight"
MEANS = "mean_eigenvalues"
EXAMPLES = "examples"
AVERAGE_ENTRIES = (WEIGHT, MEANS, EXAMPLES)
STEP = "inverse_step"
DELAY = "inverse_delay"
REQUESTED = "inverse_requested"
INVERSE_DAMPING = "inverse_damping"
STATISTICS_DUE = AGREED_STATE[1]
SNAPSHOT = "snapshot_"
SNAPSHOT_STEP = "snapshot_step"
SNAPSHOT_NUMBERS = ("snapshot_damping", "snapshot_mean_curvature")

# Shared numbers.
CHOSEN_WORKERS = ("gradient_workers", "gradient_workers_of")
MEAN_CURVATURE = "mean_curvature"
UPDATED_AT = "updated_at"  # the step of the last update of the running averages
NEWLY_TRAINABLE_AT = "newly_trainable_at"
DAMPING = "damping"
"""The option γ at the last refresh, or -1 before the first."""

MAX_INTEGER = 2**53

INTEGERS: dict[str, tuple[int, int]] = {
    # Captured passes.
    AGREED_STATE[0]: (0, 1),
    STATISTICS_DUE: (0, 1),
    AGREED_STATE[2]: (0, MAX_INTEGER),
    # Inverses, and pending ones.
    STEP: (-1, MAX_INTEGER),
    DELAY: (0, MAX_INTEGER),
    REQUESTED: (0, 1),
    STOPPED: (0, 1),
    SNAPSHOT_STEP: (-1, MAX_INTEGER),
    # Shared numbers.
    UPDATED_AT: (0, MAX_INTEGER),
    NEWLY_TRAINABLE_AT: (-1, MAX_INTEGER),
    **dict.fromkeys(CHOSEN_WORKERS, (0, MAX_INTEGER)),
    **dict.fromkeys(THROTTLE_ENTRIES[:2], (0, MAX_INTEGER)),
    # The drift of a layer, and the last step of a parameter.
    **dict.fromkeys(DRIFT_ENTRIES, (0, MAX_INTEGER)),
    LAST_STEP_KNOWN: (0, 1),
}
"""Entries that are integers, with their smallest and largest value."""

NUMBERS = (
    *SNAPSHOT_NUMBERS,
    MEAN_CURVATURE,
    DAMPING,
    *SCALE_ENTRIES,
    *USUAL_CHANGE,
    THROTTLE_ENTRIES[2],
)
"""Entries that are finite numbers, or tensors with one element."""

TENSORS = (
    *FACTOR_NAMES,
    *AVERAGE_ENTRIES,
    PASS_HISTORY,
    *INVERSE_ENTRIES,
    INVERSE_DAMPING,
    *(SNAPSHOT + name for name in (*FACTOR_NAMES, *AVERAGE_ENTRIES)),
    LAST_STEP,
)
"""Entries that are finite tensors."""

REQUIRED: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    ((*FACTOR_NAMES, *AVERAGE_ENTRIES), AVERAGE_ENTRIES),
    ((STEP,), (DELAY, REQUESTED)),
    ((SNAPSHOT_STEP,), SNAPSHOT_NUMBERS),
)
"""If a part has an entry of the first names, it must have all of the second."""


def averages_shapes(shape: FactorShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the running averages of a layer, by entry name."""
    shapes: dict[str, tuple[int, ...]] = {
        WEIGHT: (),
        MEANS: (shape.record_size, shape.groups),
        EXAMPLES: (),
    }
    for name in shape.factor_names:
        shapes[name] = shape.stored_shape(name)
    return shapes


def layer_shapes(shape: FactorShape, solver: Solver) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a layer, by entry name."""
    averages = averages_shapes(shape)
    shapes = {**averages, INVERSE_DAMPING: (4,), **solver.saved_shapes(shape)}
    for name, size in averages.items():
        shapes[SNAPSHOT + name] = size
    return shapes


@dataclass(frozen=True)
class Entry:
    """A tensor of a layer in a checkpoint.

    Attributes:
        name: Name of the entry.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        ranks: The ranks that have the tensor; None if all have it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: Sequence[int] | None = None


def factor_entries(block: KroneckerBlock, layer: LayerPlan | None) -> list[Entry]:
    """List the running averages of a layer.

    ``layer`` is its plan, or None if it has never trained: any rank may then have it.
    """
    # The ranks that have each factor.
    owners: dict[str, Sequence[int] | None] = {}
    for name in block.shape.factor_names:
        owners[name] = None
        if layer is not None and not layer.factors_everywhere:
            owners[name] = [layer.inverse_rank(name)]

    # The owner of A also has the numbers.
    number_dtype = torch.promote_types(block.factor_dtype, torch.float32)
    entries: list[Entry] = []
    for name, shape in averages_shapes(block.shape).items():
        dtype = block.factor_dtype if name in owners else number_dtype
        entries.append(Entry(name, shape, dtype, owners.get(name, owners["A"])))
    return entries


def inverse_entries(
    block: KroneckerBlock, layer: LayerPlan | None, inverses: Inverses
) -> list[Entry]:
    """List the tensors of a layer's inverse, pending inverse and history of passes."""
    # The ranks that have the inverse, and those that have a history of passes.
    workers: Sequence[int] | None = None
    contributors: Sequence[int] | None = None
    if layer is not None:
        workers = layer.workers
        if layer.batch_rank is not None:
            contributors = [layer.batch_rank]

    # The entries. Only inverters with threads leave inverses pending.
    number_dtype = block.to_checkpoint_tensor(()).dtype
    entries = [
        Entry(INVERSE_DAMPING, (4,), number_dtype, workers),
        Entry(PASS_HISTORY, (4,), number_dtype, contributors),
    ]
    for name, shape in inverses.solver.saved_shapes(block.shape).items():
        entries.append(Entry(name, shape, inverses.options.inv_dtype, workers))
    if not inverses.waits_for_all and (layer is None or layer.factors_everywhere):
        factors = factor_entries(block, None)
        entries += [replace(entry, name=SNAPSHOT + entry.name) for entry in factors]
    return entries


# ------------------------------------------------------------------------------- saving


def inverse_state(
    block: KroneckerBlock, layer: LayerPlan, inverses: Inverses, fill: bool
) -> dict[str, Any]:
    """Return the checkpoint entries of a layer's inverse.

    Tensors are shared, not copied.

    Args:
        block: The layer.
        layer: The layer's plan.
        inverses: The inverses of all layers.
        fill: Whether to return zeros instead of tensors that this rank should have and
            lacks. torch.distributed.checkpoint loads into existing tensors, so it needs
            them.
    """
    world = inverses.training.world
    state = InverseState(step=-1, installed_at=-1)
    if block.solved:
        state = inverses.states[block]
    entries: dict[str, Any] = {
        STEP: state.step,
        DELAY: state.installed_at - state.step,
        REQUESTED: int(block in inverses.requested),
    }

    # The inverse in use.
    tensors = {PASS_HISTORY: block.pass_history(layer.contributors(world.size))}
    if block.inverse is not None:
        numbers = [
            state.damping,
            state.mean_eigenvalue,
            state.damping_option,
            inverses.scaled,
        ]
        tensors |= block.inverse.entries
        tensors[INVERSE_DAMPING] = block.to_checkpoint_tensor(
            [float(number) for number in numbers]
        )

    # The pending inverse. If only the owner has its factors, resumed runs recompute it.
    if not layer.factors_everywhere:
        entries[REQUESTED] = int(entries[REQUESTED] or block in inverses.pending)
    elif not inverses.waits_for_all:
        inverses.snapshot_factors([block])
        none_pending = PendingInverse(step=-1, damping_option=0.0, mean_curvature=0.0)
        pending = inverses.pending.get(block, none_pending)
        snapshot_numbers = (float(pending.damping_option), pending.mean_curvature)
        entries[SNAPSHOT_STEP] = pending.step
        entries |= zip(SNAPSHOT_NUMBERS, snapshot_numbers, strict=True)
        if pending.factors is not None:
            for name, tensor in pending.factors.entries.items():
                tensors[SNAPSHOT + name] = tensor

    # The tensors that this rank has to save.
    for entry in inverse_entries(block, layer, inverses):
        if entry.ranks is not None and world.rank not in entry.ranks:
            continue
        if entry.name in tensors:
            entries[entry.name] = tensors[entry.name]
        elif fill:
            device = block.weight.device
            zeros = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
            entries[entry.name] = zeros
    return entries


@dataclass(frozen=True)
class SharedNumbers:
    """The shared numbers of the curvature itself, without those of its parts.

    These parts are the inverses, the throttle, the step scale and the clip.

    Attributes:
        mean_curvature: The mean curvature of all layers at the last refresh.
        averaged_at: The step of the last update of the running averages.
        newly_trainable_at: The step at which all layers are due, as in
            :class:`second_order.kfac.layers.Layers`; -1 if there is none.
        num_workers: Gradient workers per layer, by the cost model. None if it does not
            choose them, or if it chose them for another number of ranks; 0 before it
            has chosen them.
    """

    mean_curvature: float
    averaged_at: int
    newly_trainable_at: int
    num_workers: int | None

    def entries(self, world_size: int) -> dict[str, float]:
        """Return the checkpoint entries.

        ``world_size`` goes with the number of workers.
        """
        entries: dict[str, float] = {
            MEAN_CURVATURE: self.mean_curvature,
            UPDATED_AT: self.averaged_at,
            NEWLY_TRAINABLE_AT: self.newly_trainable_at,
        }
        if self.num_workers is not None:
            entries |= zip(CHOSEN_WORKERS, (self.num_workers, world_size), strict=True)
        return entries


# ------------------------------------------------------------------------------ sending


def send_entries(
    world: World,
    block: KroneckerBlock,
    entries: Iterable[Entry],
    saved: Mapping[str, Tensor],
    ranks: Sequence[int],
) -> dict[str, Tensor]:
    """Send entries of a layer to ranks that lack them. Collective.

    Args:
        world: The ranks.
        block: The layer.
        entries: The entries, with the ranks that have them. The first of them sends.
        saved: The tensors of this rank, by entry name.
        ranks: The ranks that receive the entries.

    Returns:
        The entries that this rank has now, without those that their sender lacks.
    """
    device = block.weight.device
    local: dict[str, Tensor] = {}
    for entry in entries:
        has = entry.ranks is None or world.rank in entry.ranks
        value = saved.get(entry.name) if has else None
        # Broadcast the entry if a receiver lacks it, with a flag: the sender may too.
        if entry.ranks is not None and not {*ranks} <= {*entry.ranks}:
            source = entry.ranks[0]
            sent = value
            if sent is None or world.rank != source:
                sent = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
            present = sent.new_full((), float(value is not None))
            world.broadcast([present, sent], [source, source])
            if world.rank in ranks and not has and bool(present):
                value = sent
        if value is not None:
            local[entry.name] = value
    return local


def move_factors(
    world: World,
    plan: Mapping[KroneckerBlock, LayerPlan],
    prev_plan: Mapping[KroneckerBlock, LayerPlan],
) -> None:
    """Send factors to their new owners, if the plan has changed. Collective."""
    for block in prev_plan.keys() - plan.keys():  # layers that no longer train
        block.set_owned_factors(block.owned_factors)
    for block, layer in plan.items():
        prev_layer = prev_plan.get(block, layer)
        received: dict[str, Tensor | None] = {}
        is_moved = prev_layer.inverse_ranks != layer.inverse_ranks
        if is_moved and not layer.factors_everywhere:
            saved: dict[str, Tensor] = {}
            if block.factors is not None:
                saved = block.saved_factors()
            for entry in factor_entries(block, prev_layer):
                # A factor goes to its owner, other entries to the owners of A and G.
                is_factor = entry.name in block.shape.factor_names
                receivers: Sequence[int] = layer.inverse_ranks
                if is_factor:
                    receivers = [layer.inverse_rank(entry.name)]
                local = send_entries(world, block, [entry], saved, receivers)
                if world.rank in receivers and (is_factor or entry.name in local):
                    # None if the factor is lost.
                    received[entry.name] = local.get(entry.name)
        owners = (None, world.rank)  # None: every rank owns the factor
        block.set_owned_factors(
            [name for name in ALL_FACTORS if layer.factor_owner(name) in owners]
        )
        if received and block.factors is not None:
            block.receive_factors(received)


# ------------------------------------------------------------------------------- checks


def check_saved(
    saved: Mapping[Tensor, SavedPart],
    blocks: Sequence[KroneckerBlock],
    inverses: Inverses,
) -> None:
    """Check the entries of a checkpoint before any of them is loaded.

    A layer's tensors may also have the shapes that they would have if its bias were
    frozen or unfrozen. The shapes of a parameter without a block are not checked.

    Raises:
        ValueError: If an entry is unknown, missing, non-finite or out of bounds, or
            does not fit its layer.
    """
    block_of: dict[Tensor, KroneckerBlock] = {block.weight: block for block in blocks}
    for p, part in saved.items():
        part.check_known((*HEADER, *INTEGERS, *NUMBERS, *TENSORS))
        for names, required in REQUIRED:
            if part.keys() & set(names):
                part.require(required)

        # The shapes that are known.
        shapes: dict[str, tuple[int, ...]] = {
            LAST_STEP: tuple(p.shape),
            PASS_HISTORY: (4,),
        }
        block = block_of.get(p)
        if block is not None:
            shapes |= layer_shapes(block.shape, inverses.solver)
            for possible in block.possible_shapes():
                for key, size in layer_shapes(possible, inverses.solver).items():
                    if getattr(part.get(key), "shape", None) == size:
                        shapes[key] = size

        # The values.
        for key in part:
            if key in INTEGERS:
                part.whole(key, *INTEGERS[key])
            elif key in NUMBERS:
                part.number(key)
            elif key in TENSORS:
                part.tensor(key, shapes.get(key))
        if PASS_HISTORY in part:
            status = float(part[PASS_HISTORY][0])
            if status not in [known.value for known in LayerStatus]:
                raise part.wrong(
                    PASS_HISTORY, f"begins with {status:g}, which is no layer status"
                )


# ------------------------------------------------------------------------------ loading


def _read_shared_number(
    saved: Mapping[Tensor, SavedPart], key: str, default: float
) -> float:
    """Return a shared number, or ``default`` if the checkpoint lacks it."""
    for part in saved.values():
        if key in part:
            return part.number(key)
    return default


def read_shared_numbers(
    saved: Mapping[Tensor, SavedPart], world_size: int, step: int
) -> SharedNumbers:
    """Return the shared numbers of a checkpoint.

    The number of workers is None if the checkpoint has none, or was written with
    another number of ranks than ``world_size``. Without a step of the last averages,
    ``step`` is assumed.
    """
    saved_workers = int(_read_shared_number(saved, CHOSEN_WORKERS[0], 0.0))
    saved_world_size = int(_read_shared_number(saved, CHOSEN_WORKERS[1], 0.0))
    num_workers: int | None = None
    same_size = saved_world_size == world_size
    if same_size and saved_workers and world_size % saved_workers == 0:
        num_workers = saved_workers
    return SharedNumbers(
        mean_curvature=_read_shared_number(saved, MEAN_CURVATURE, 0.0),
        averaged_at=int(_read_shared_number(saved, UPDATED_AT, step)),
        newly_trainable_at=int(_read_shared_number(saved, NEWLY_TRAINABLE_AT, -1)),
        num_workers=num_workers,
    )


def load_inverses(
    saved: Mapping[Tensor, SavedPart],
    plan: Mapping[KroneckerBlock, LayerPlan],
    inverses: Inverses,
) -> LoadedInverses:
    """Read the inverses of the trainable layers, and those that were pending.

    If the size of a layer's factors has changed, that of its inverse may have changed
    as well. Both are dropped later.
    """
    rank = inverses.training.world.rank
    damping = _read_shared_number(saved, DAMPING, -1.0)
    if damping < 0:  # there has been no refresh
        damping = math.nan
    loaded = LoadedInverses(damping)
    for block, layer in plan.items():
        part = saved.get(block.weight)
        if part is None or STEP not in part:  # the layer was frozen
            loaded.requested.add(block)
            continue
        if part[REQUESTED]:
            loaded.requested.add(block)

        # The inverse in use.
        if part[STEP] >= 0:
            step = int(part[STEP])
            inverse = LoadedInverse(InverseState(step, step + int(part[DELAY])))
            if rank in layer.workers:
                inverse = _read_inverse(part, block, inverses, inverse)
                if inverse.inverse is None:
                    loaded.missing.add(block)
            loaded.inverses[block] = inverse

        # The pending inverse.
        may_be_pending = layer.factors_everywhere and not inverses.waits_for_all
        if may_be_pending and part.get(SNAPSHOT_STEP, -1) >= 0:
            names = averages_shapes(block.shape)
            if any(SNAPSHOT + name not in part for name in names):
                loaded.missing.add(block)
                continue
            snapshot = {name: part[SNAPSHOT + name] for name in names}
            loaded.pending[block] = PendingInverse(
                step=int(part[SNAPSHOT_STEP]),
                damping_option=float(part[SNAPSHOT_NUMBERS[0]]),
                mean_curvature=float(part[SNAPSHOT_NUMBERS[1]]),
                factors=block.read_factors(snapshot),
            )
    return loaded


def _read_inverse(
    part: Mapping[str, Any],
    block: KroneckerBlock,
    inverses: Inverses,
    loaded: LoadedInverse,
) -> LoadedInverse:
    """Read the tensors of an inverse; return ``loaded`` if this run cannot use them.

    The saved run may have had another solver or ``grafting``, or the checkpoint may
    lack the tensors.
    """
    names = inverses.solver.saved_shapes(block.shape)
    if not part.keys() >= {INVERSE_DAMPING, *names}:
        return loaded
    damping, mean_eigenvalue, option, scaled = part[INVERSE_DAMPING].tolist()
    empty = not all(bool(part[name].any()) for name in names)  # zeros from ``fill``
    if empty or scaled != inverses.scaled:
        return loaded
    device = block.weight.device
    dtype = inverses.options.inv_dtype
    entries: dict[str, Tensor] = {}
    for name in names:
        entries[name] = part[name].to(device, dtype, copy=True)
    state = loaded.state._replace(
        damping=damping,
        mean_eigenvalue=mean_eigenvalue,
        damping_option=option,
    )
    return LoadedInverse(state, inverses.solver(entries))
