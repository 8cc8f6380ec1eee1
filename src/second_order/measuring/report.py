"""Build the results of ``measure``: the curvature, and a report of what it covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from second_order.distributed.world import World
from second_order.kronecker.layer_curvature import Eigen, LayerCurvature
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.measuring.layers import Layer, Selection
from second_order.measuring.sums import Key
from second_order.reporting.summary import aligned
from second_order.utils.modules import plain_type

__all__ = ["Measurement", "Report", "ReportRow", "build_curvature", "build_report"]

INPUTS_ONLY = (
    "only A of its layer's inputs was measured, which leaves it out; measure with "
    'factors="kfac" or "ekfac"'
)


@dataclass(frozen=True)
class Measurement:
    """The results of the passes over the data.

    Attributes:
        factors: Mean factors of the layers that this rank owns.
        num_rows: By layer, the number of rows that A is the mean of, over all ranks.
        num_terms: The number of loss terms over all ranks; 0 for inputs only.
        num_examples: The number of examples of a pass, over all ranks. A batch of
            unknown size counts as one.
        num_batches: The number of batches of a pass, over all ranks.
        failed: By layer, why it has no factors. The same on all ranks.
        corrected: EK-FAC's eigenvalues of the layers that this rank owns.
        bases: The eigenvalues and eigenvectors of the factors of these layers.
    """

    factors: Mapping[Key, Tensor]
    num_rows: Mapping[str, float]
    num_terms: float
    num_examples: int
    num_batches: int
    failed: Mapping[str, str]
    corrected: Mapping[str, Tensor] = field(default_factory=dict)
    bases: Mapping[str, Eigen] = field(default_factory=dict)


def build_curvature(
    model: nn.Module,
    selection: Selection,
    measurement: Measurement,
    world: World,
    report: Report | None = None,
) -> KroneckerCurvature:
    """Build the curvature from a measurement; note why other parameters have none."""
    layers: dict[str, LayerCurvature] = {}
    owners: dict[str, int] = {}
    uncovered: dict[str, str] = {}
    for layer in selection.layers:
        name = layer.name
        if name in measurement.failed:
            uncovered |= dict.fromkeys(layer.shapes, measurement.failed[name])
            continue
        owners[name] = layer.owner
        stored: dict[str, Tensor] = {}
        for factor in layer.shape.factor_names:
            if (name, factor) in measurement.factors:
                stored[factor] = measurement.factors[name, factor]
        layers[name] = LayerCurvature(
            name=name,
            modules=tuple(layer.block.names),
            kind=plain_type(layer.block.modules[0]),
            shapes=layer.shapes,
            shape=layer.shape,
            stored=stored,
            examples=measurement.num_terms or measurement.num_rows[name],
            updates=1.0,
            corrected=measurement.corrected.get(name),
            rows=measurement.num_rows[name],
            basis=measurement.bases.get(name),
        )

    # Reasons for modules that were not measured. Modules that share a weight are one
    # row, "a = b".
    reasons: dict[str, str] = {}
    for row in selection.skipped:
        reasons |= dict.fromkeys(row.name.split(" = "), row.reason)
    covered = {name for layer in layers.values() for name in layer.shapes}

    # A reason may be given for a parameter or for its module.
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        if name not in covered and name not in uncovered:
            module = name.rpartition(".")[0]
            uncovered[name] = reasons.get(name, reasons.get(module, INPUTS_ONLY))
    return KroneckerCurvature(
        layers, names, uncovered, owners=owners, world=world, report=report
    )


# ------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class ReportRow:
    """A line of the report, for a layer or for a module without factors.

    Attributes:
        name: Name of the layer.
        kind: Name of its class.
        parameters: Number of its parameters that have curvature.
        factors: Sizes of its factors, or why it has none.
        rows: Number of rows that A is the mean of, which bounds the rank of A.
        owner: The rank that stores the factors; None if the layer has none.
    """

    name: str
    kind: str
    parameters: int
    factors: str
    rows: float = 0.0
    owner: int | None = None


@dataclass(frozen=True)
class Report:
    """What a measurement covers and what it cost. ``print`` shows it as a table.

    Attributes:
        title: What was measured, and on how many ranks.
        rows: A line for each layer, and for each module without factors.
        parameters: Number of the model's parameters.
        examples: Number of loss terms; if only inputs are measured, number of rows.
        batches: Number of batches of a pass, over all ranks.
        passes: Number of passes over the data.
        seconds: Wall-clock time of all passes.
        nbytes: Size in bytes of the factors on this rank.
    """

    title: str
    rows: list[ReportRow]
    parameters: int
    examples: float
    batches: int
    passes: int
    seconds: float
    nbytes: int

    @property
    def covered(self) -> float:
        """Share of the model's parameters that have factors, between 0 and 1."""
        covered = sum(row.parameters for row in self.rows if row.owner is not None)
        return covered / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        table = [("layer", "type", "parameters", "factors / why not", "rows")]
        for row in self.rows:
            parameters = f"{row.parameters:,}"
            num_rows = "" if row.owner is None else f"{row.rows:,.0f}"
            table.append((row.name, row.kind, parameters, row.factors, num_rows))
        lines = [
            self.title,
            f"{self.covered:.1%} of {self.parameters:,} parameters",
            *aligned(table, {2, 4}),
            f"{self.examples:,.0f} examples in {self.batches:,} batches, {self.passes} "
            f"pass(es), {self.seconds:,.1f} s; factors on this rank: "
            f"{self.nbytes / 2**20:,.2f} MiB",
        ]
        return "\n".join(lines)


def build_report(
    title: str,
    model: nn.Module,
    selection: Selection,
    measurement: Measurement,
    passes: int,
    seconds: float,
) -> Report:
    """Build the report of a measurement."""
    rows = [_report_row(layer, measurement) for layer in selection.layers]
    for skipped in selection.skipped:
        row = ReportRow(skipped.name, skipped.kind, skipped.parameters, skipped.reason)
        rows.append(row)

    # If only inputs are measured, examples are rows. The rows of experts do not show
    # the number of examples, because each token is a row of several experts.
    examples = measurement.num_terms
    if not examples:
        unrouted = [layer for layer in selection.layers if not layer.shape.routed]
        layers = unrouted or selection.layers
        examples = max(measurement.num_rows[layer.name] for layer in layers)

    stored = [*measurement.factors.values(), *measurement.corrected.values()]
    return Report(
        title=title,
        rows=rows,
        parameters=sum(p.numel() for p in model.parameters()),
        examples=examples,
        batches=measurement.num_batches,
        passes=passes,
        seconds=seconds,
        nbytes=sum(tensor.nbytes for tensor in stored),
    )


def _report_row(layer: Layer, measurement: Measurement) -> ReportRow:
    shape = layer.shape
    factors = ", ".join(f"{factor} {shape.dims[factor]}" for factor in layer.factors)
    if shape.groups > 1:
        factors = f"{shape.groups} x {factors}"
    owner: int | None = layer.owner
    if layer.name in measurement.failed:
        factors = measurement.failed[layer.name]
        owner = None
    return ReportRow(
        name=layer.name,
        kind=plain_type(layer.block.modules[0]).__name__,
        parameters=sum(size.numel() for size in layer.shapes.values()),
        factors=factors,
        rows=measurement.num_rows[layer.name],
        owner=owner,
    )
