"""What has been found so far, and the curvature and the report that it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from second_order.distributed.world import World
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.model_blocks import LeftToBase
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.measuring.progress import MeasuredLayer, Report
from second_order.measuring.statistics import Layer
from second_order.measuring.sums import Key

__all__ = ["Found", "curvature_of", "report_of"]


@dataclass
class Found:
    """What the passes so far have found.

    Attributes:
        stored: Factors of layers that are owned here, averaged.
        corrected: EK-FAC's eigenvalues of layers that are owned here.
        bases: Eigenvalues and eigenvectors of these layers' factors.
        failed: Why a layer has none, by its name; on every process.
        terms: The number of the loss's terms, over all processes.
        batches: The number of this process's batches in a pass.
        unknown: Shapes of inputs that no mask fits.
        scattered: Layers whose rows have unknown entries.
    """

    stored: dict[Key, Tensor] = field(default_factory=dict)
    corrected: dict[str, Tensor] = field(default_factory=dict)
    bases: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    terms: float = 0.0
    batches: int = 0
    unknown: set[Any] = field(default_factory=set)
    scattered: set[str] = field(default_factory=set)

    def state(self) -> dict[str, Any]:
        """What a save has of it: lists for sets and for keys that are none of a save's."""
        lists = {
            "stored": [(*key, kept) for key, kept in self.stored.items()],
            "unknown": [tuple(shape) for shape in self.unknown],
            "scattered": sorted(self.scattered),
        }
        return {**vars(self), **lists}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], place: torch.device) -> Found:
        """What a save had, on a device."""
        moved = {id(t): t.to(place) for _, _, t in state["stored"]}  # a shared one stays one
        state = tree_map_only(Tensor, lambda t: moved.get(id(t), t.to(place)), dict(state))
        sets = {
            "stored": {(name, letter): kept for name, letter, kept in state["stored"]},
            "unknown": {tuple(shape) for shape in state["unknown"]},
            "scattered": set(state["scattered"]),
        }
        return cls(**{**state, **sets})


def curvature_of(
    model: nn.Module,
    layers: Sequence[Layer],
    left: Sequence[LeftToBase],
    found: Found,
    world: World,
    report: Report,
) -> KroneckerCurvature:
    """The curvature; why not, of parameters without one."""
    ours: dict[str, LayerCurvature] = {}
    uncovered: dict[str, str] = {}
    for layer in layers:
        if layer.name in found.failed:
            uncovered |= dict.fromkeys(layer.shapes, found.failed[layer.name])
            continue
        letters = [k for k in layer.shape.letters if (layer.name, k) in found.stored]
        ours[layer.name] = LayerCurvature(
            name=layer.name,
            modules=tuple(layer.block.names),
            kind=type(layer.block.modules[0]),
            shapes=layer.shapes,
            shape=layer.shape,
            stored={k: found.stored[layer.name, k] for k in letters},
            examples=found.terms or layer.rows,
            updates=1.0,
            corrected=found.corrected.get(layer.name),
            rows=layer.rows,
            basis=found.bases.get(layer.name),
        )
    names = [name for name, _ in model.named_parameters()]
    covered = {name for layer in ours.values() for name in layer.shapes}
    # The name of a layer of several modules is theirs, joined.
    reasons = {name: row.reason for row in left for name in row.name.split(" = ")}
    for name in names:
        if name not in covered and name not in uncovered:
            module = name.rpartition(".")[0]
            why = 'its layer has A of its inputs alone: measure it with factors="kfac" or "ekfac"'
            uncovered[name] = reasons.get(name, reasons.get(module, why))
    owners = {layer.name: layer.owner for layer in layers if layer.name in ours}
    apart = world.size > 1
    return KroneckerCurvature(
        ours,
        names,
        uncovered,
        owners=owners if apart else None,
        world=world if apart else None,
        report=report,
    )


def report_of(
    title: str,
    model: nn.Module,
    layers: Sequence[Layer],
    left: Sequence[LeftToBase],
    found: Found,
    passes: int,
    began: float,
    world: World,
) -> Report:
    """What the measurement covered and took; a collective. ``began``: by the clock of seconds."""
    rows = [_line(layer, found.failed.get(layer.name)) for layer in layers]
    rows += [MeasuredLayer(row.name, row.kind, row.parameters, row.reason) for row in left]
    said = world.all_gather_object((found.batches, found.unknown, found.scattered))
    batches, unknown, scattered = zip(*said, strict=True)
    notes = []
    if shapes := sorted(set().union(*unknown)):
        first = ", ".join(str(tuple(shape)) for shape in shapes[:3])
        notes.append(f"no mask fits rows of shape {first}: all of these count")
    if names := sorted(set().union(*scattered)):
        notes.append(
            f"rows of {', '.join(names[:3])} cannot be assigned to entries of a batch: their "
            f"corrected eigenvalues count some rows as entries"
        )
    unique = {id(t): t for t in (*found.stored.values(), *found.corrected.values())}
    return Report(
        title,
        rows,
        sum(p.numel() for p in model.parameters()),
        found.terms or _examples(layers),
        sum(batches),
        passes,
        time.perf_counter() - began,
        sum(t.nbytes for t in unique.values()),
        notes,
    )


def _examples(layers: Sequence[Layer]) -> float:
    """The number of rows; not of experts, who see a row more than once."""
    plain = [layer for layer in layers if not layer.shape.routed]
    return max(float(layer.rows) for layer in plain or layers)


def _line(layer: Layer, why: str | None) -> MeasuredLayer:
    """A layer's line of the table; why it has no factors, if it has none."""
    shape = layer.shape
    sizes = ", ".join(f"{k} {shape.dims[k]}" for k in layer.letters)
    groups = f"{shape.groups} x " if shape.groups > 1 else ""
    shared = "" if layer.leader is None else f" (A of {layer.leader.name})"
    return MeasuredLayer(
        layer.name,
        type(layer.block.modules[0]).__name__,
        sum(size.numel() for size in layer.shapes.values()),
        f"{groups}{sizes}{shared}" if why is None else why,
        float(layer.rows),
        0 if shape.diagonal_a else layer.missing,
        layer.owner if why is None else None,
    )
