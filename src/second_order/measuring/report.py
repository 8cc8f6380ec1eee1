"""What a measurement returns: the curvature, and a table of what it covers and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from second_order.distributed.world import World
from second_order.kronecker.layer_curvature import Eigen, LayerCurvature
from second_order.kronecker.model_blocks import LeftToBase
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.measuring.layers import Layer
from second_order.measuring.sums import Key
from second_order.reporting.summary import aligned

__all__ = ["MeasuredLayer", "Measurement", "Report", "build_curvature", "report_of"]

INPUTS_ALONE = 'its layer has A of its inputs alone: measure it with factors="kfac" or "ekfac"'


@dataclass(frozen=True)
class Measurement:
    """The results of the passes over the data.

    Attributes:
        factors: Means of the layers that this rank owns.
        rows: By layer, the number of rows that A is a mean over, of all ranks.
        terms: The number of loss terms of all ranks; 0 with inputs alone.
        batches: The number of batches in a pass, of all ranks.
        failed: By layer, why it has no factors; on every rank.
        corrected: EK-FAC's eigenvalues of the layers that this rank owns.
        bases: The eigenvalues and eigenvectors of these layers' factors.
    """

    factors: Mapping[Key, Tensor]
    rows: Mapping[str, float]
    terms: float
    batches: int
    failed: Mapping[str, str]
    corrected: Mapping[str, Tensor] = field(default_factory=dict)
    bases: Mapping[str, Eigen] = field(default_factory=dict)


def build_curvature(
    model: nn.Module,
    layers: Sequence[Layer],
    left: Sequence[LeftToBase],
    measured: Measurement,
    world: World,
    report: Report | None = None,
) -> KroneckerCurvature:
    """The curvature, and why parameters have none."""
    found: dict[str, LayerCurvature] = {}
    uncovered: dict[str, str] = {}
    for layer in layers:
        name = layer.name
        if name in measured.failed:
            uncovered |= dict.fromkeys(layer.shapes, measured.failed[name])
            continue
        found[name] = LayerCurvature(
            name=name,
            modules=tuple(layer.block.names),
            kind=type(layer.block.modules[0]),
            shapes=layer.shapes,
            shape=layer.shape,
            stored={
                factor: measured.factors[name, factor]
                for factor in layer.shape.factor_names
                if (name, factor) in measured.factors
            },
            examples=measured.terms or measured.rows[name],
            updates=1.0,
            corrected=measured.corrected.get(name),
            rows=measured.rows[name],
            basis=measured.bases.get(name),
        )

    # Modules that share a weight are one row, "a = b".
    reasons = {name: row.reason for row in left for name in row.name.split(" = ")}
    names = [name for name, _ in model.named_parameters()]
    for name in set(names).difference(uncovered, *(layer.shapes for layer in found.values())):
        of_module = reasons.get(name.rpartition(".")[0], INPUTS_ALONE)
        uncovered[name] = reasons.get(name, of_module)
    return KroneckerCurvature(
        found,
        names,
        uncovered,
        owners={layer.name: layer.owner for layer in layers if layer.name in found},
        world=world,
        report=report,
    )


# ---------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class MeasuredLayer:
    """One line of the table.

    Attributes:
        name: The layer's name.
        kind: Its class.
        parameters: Number of its parameters that have curvature.
        factors: Sizes of its factors, or why it has none.
        rows: Number of rows that A is a mean over; its rank is at most this.
        owner: The rank that stores its factors; None if none does.
    """

    name: str
    kind: str
    parameters: int
    factors: str
    rows: float = 0.0
    owner: int | None = None


@dataclass(frozen=True)
class Report:
    """What a measurement covers and cost; ``print`` it, or read its rows.

    Attributes:
        title: What was measured, on how many ranks.
        rows: One for each layer, and for each module that has none.
        parameters: Number of the model's parameters.
        examples: Number of examples: rows with inputs alone, else terms of the loss.
        batches: Number of batches in a pass, of all ranks.
        passes: Number of passes over the data.
        seconds: Wall-clock time of all passes.
        nbytes: Bytes of the factors on this rank.
    """

    title: str
    rows: Sequence[MeasuredLayer]
    parameters: int
    examples: float
    batches: int
    passes: int
    seconds: float
    nbytes: int

    @property
    def covered(self) -> float:
        """Share of the model's parameters that have factors, 0 to 1."""
        covered = sum(row.parameters for row in self.rows if row.owner is not None)
        return covered / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        table = [("layer", "type", "parameters", "factors / why not", "rows")]
        for row in self.rows:
            number = "" if row.owner is None else f"{row.rows:,.0f}"
            table.append((row.name, row.kind, f"{row.parameters:,}", row.factors, number))
        return "\n".join(
            [
                self.title,
                f"{self.covered:.1%} of {self.parameters:,} parameters",
                *aligned(table, {2, 4}),
                f"{self.examples:,.0f} examples in {self.batches:,} batches, {self.passes} "
                f"pass(es), {self.seconds:,.1f} s; factors on this rank: "
                f"{self.nbytes / 2**20:,.2f} MiB",
            ]
        )


def report_of(
    title: str,
    model: nn.Module,
    layers: Sequence[Layer],
    left: Sequence[LeftToBase],
    measured: Measurement,
    passes: int,
    seconds: float,
) -> Report:
    """The table of a measurement."""
    # A token is a row of several experts, and no measure of the number of examples.
    plain = [layer for layer in layers if not layer.shape.routed] or layers
    stored = (*measured.factors.values(), *measured.corrected.values())
    return Report(
        title=title,
        rows=[
            *(_row(layer, measured) for layer in layers),
            *(MeasuredLayer(row.name, row.kind, row.parameters, row.reason) for row in left),
        ],
        parameters=sum(p.numel() for p in model.parameters()),
        examples=measured.terms or max(measured.rows[layer.name] for layer in plain),
        batches=measured.batches,
        passes=passes,
        seconds=seconds,
        nbytes=sum(tensor.nbytes for tensor in stored),
    )


def _row(layer: Layer, measured: Measurement) -> MeasuredLayer:
    shape = layer.shape
    sizes = ", ".join(f"{factor} {shape.dims[factor]}" for factor in layer.factors)
    if shape.groups > 1:
        sizes = f"{shape.groups} x {sizes}"
    reason = measured.failed.get(layer.name)
    return MeasuredLayer(
        name=layer.name,
        kind=type(layer.block.modules[0]).__name__,
        parameters=sum(size.numel() for size in layer.shapes.values()),
        factors=sizes if reason is None else reason,
        rows=measured.rows[layer.name],
        owner=layer.owner if reason is None else None,
    )
