"""Reports of an optimizer: tables of its layers and parameters, and numbers to log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["CurvatureReport", "EpochReport", "LayerRow", "Summary", "describe_share"]


def describe_share(share: float) -> str:
    """Return the preconditioned share as text, with 100.0% only for all parameters."""
    if share < 1.0:
        share = min(share, 0.999)
    return f"{share:.1%} of the parameters preconditioned"


@dataclass(frozen=True)
class LayerRow:
    """One line of the table: a layer, or with DHO2 and MRDHO2 a parameter.

    Attributes:
        name: The name of the module, or of the parameter.
        kind: The module's class, or the parameter's shape.
        parameters: Number of parameters that the line stands for.
        status: "preconditioned", "base", or "frozen".
        detail: Sizes of the factors, or why the base trains the module.
        computed_by: Ranks that decompose and that precondition.
        factor_bytes: Bytes of the factors on this process.
        inverse_bytes: Bytes of the inverse on this process.
    """

    name: str
    kind: str
    parameters: int
    status: str
    detail: str
    computed_by: str = ""
    factor_bytes: int = 0
    inverse_bytes: int = 0


@dataclass(frozen=True)
class Summary:
    """A table of every layer or parameter; ``print`` it, or read its rows.

    Attributes:
        title: The optimizer, its base and its world.
        rows: One row for each layer, or with DHO2 and MRDHO2 for each parameter.
        dropped: Statistics dropped so far on this process because they were not finite.
        failed: Layers whose last refresh gave no valid decomposition.
        lines: Closing lines: options, intervals, ages, and groups if several.
        steps: Steps taken. Before the first one, the memory of factors is unknown.
    """

    title: str
    rows: Sequence[LayerRow]
    dropped: int = 0
    failed: int = 0
    lines: Sequence[str] = ()
    steps: int = 0

    @property
    def factor_bytes(self) -> int:
        """Bytes of running averages on this process."""
        return sum(row.factor_bytes for row in self.rows)

    @property
    def inverse_bytes(self) -> int:
        """Bytes of inverses on this process."""
        return sum(row.inverse_bytes for row in self.rows)

    @property
    def total_bytes(self) -> int:
        """Bytes of second-order state on this process."""
        return self.factor_bytes + self.inverse_bytes

    @property
    def preconditioned_share(self) -> float:
        """Share of the parameters that train that are preconditioned, 0 to 1."""
        trained = [row for row in self.rows if row.status != "frozen"]
        total = sum(row.parameters for row in trained)
        covered = [row for row in trained if row.status == "preconditioned"]
        preconditioned = sum(row.parameters for row in covered)
        return preconditioned / total if total else 0.0

    def __str__(self) -> str:
        table = [["name", "type", "parameters", "status", "detail", "ranks", "KiB"]]
        for row in self.rows:
            nbytes = row.factor_bytes + row.inverse_bytes
            size = f"{nbytes / 1024:,.1f}" if nbytes else ""
            table.append(
                [
                    row.name,
                    row.kind,
                    f"{row.parameters:,}",
                    row.status,
                    row.detail,
                    row.computed_by,
                    size,
                ]
            )

        # The share and the memory come before the table.
        memory = (
            f"factors {self.factor_bytes / 2**20:.2f} MiB, inverses "
            f"{self.inverse_bytes / 2**20:.2f} MiB"
        )
        if self.steps == 0 and self.total_bytes == 0:
            memory = "not known before the first step"
        share = (
            f"{describe_share(self.preconditioned_share)}; second-order state of this process: "
            f"{memory}"
        )
        return "\n".join([self.title, share, *aligned(table, {2, 6}), *self.lines])


def aligned(table: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Return a table as lines; the columns in ``right`` are right-aligned."""
    columns = []
    for i, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        pad = str.rjust if i in right else str.ljust
        columns.append([pad(cell, width) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


@dataclass(frozen=True)
class CurvatureReport:
    """Numbers to log: the results of the last refresh, and the cost of all refreshes.

    Attributes:
        eigenvalues: ``(k + l,)`` the k largest in descending order, then the l smallest
            in ascending order; float64 on the CPU. Empty before the first refresh.
        residuals: ``(k + l,)`` ‖Hv − θv‖ of each eigenpair, at least its rounding.
        gradient_share: The share of the gradient that was in the subspace at the step
            of the last refresh, ‖V̂ᵀg‖² / ‖g‖², 0 to 1; None before.
        step: The step of the last refresh, -1 before the first.
        products: Number of Hessian-vector products of the last refresh.
        total_products: Number of products of all refreshes since this optimizer was
            made. Accelerators make those of MRDHO2's workers.
        refreshes: Number of refreshes.
        failures: Number of failed refreshes, whose eigenpairs are not used: the
            curvature is not finite, has vanished, or was decomposed wrongly.
        base_scale: s, by which the base's step is stretched.
    """

    eigenvalues: Tensor
    residuals: Tensor
    gradient_share: float | None
    step: int
    products: int
    total_products: int
    refreshes: int
    failures: int
    base_scale: float


@dataclass(frozen=True)
class EpochReport:
    """The result of an epoch's eigenpairs on a worker.

    Attributes:
        epoch: Number of the epoch.
        waited: Seconds that this worker waited for accelerators at the epoch's end.
        applied: Whether the final update was made.
        reason: Why not, or "".
        loss_before: Loss of the accelerators' batch before the update; only if guarded.
        loss_after: Loss of that batch with the update; only if guarded.
        products: Number of Hessian-vector products that the accelerators made; 0 if no
            eigenpairs arrived.
    """

    epoch: int
    waited: float
    applied: bool
    reason: str = ""
    loss_before: float | None = None
    loss_after: float | None = None
    products: int = 0
