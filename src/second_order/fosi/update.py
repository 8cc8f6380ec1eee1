"""The step of FOSI (Sivan et al., FOSI, ICLR 2024) that DHO2 and MRDHO2 take.

    prepare        û, V̂ <- extreme eigenpairs of the curvature batch's Hessian, when they are due
    precondition   g₁ = V̂V̂ᵀg,  g₂ = g − g₁;  mom takes in V̂ᵀg
    step_base      d₂ = Base(g₂)
    correct        d₁ = −α V̂ diag(|û|⁻¹) V̂ᵀ mom(g₁)
                   w <- w + d₁ + s (d₂ − V̂V̂ᵀd₂)

mom is the base's momentum, applied to g₁; s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip). d₂ is what the
base has moved the parameters by. Without eigenpairs, the base steps alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, SavedPart
from second_order.errors import CurvatureError
from second_order.fosi.eigenpairs import Closures, RefreshedPairs, momentum_rule
from second_order.fosi.flat_params import FlatParams, check_one_vector
from second_order.fosi.state import check_saved_pairs, room_for_pairs, whole_pairs
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import TrustState, larger
from second_order.lanczos.closure import check_closure
from second_order.optimizers.config import FOSIOptions, check_newton_scale
from second_order.reporting.summary import CurvatureReport, LayerRow, Summary
from second_order.training.context import Training
from second_order.training.curvature import Curvature, PendingAverage, Routed
from second_order.utils.checks import PEAK_LR, Schedule, as_scalar, scheduled, value_at
from second_order.utils.stages import stage

__all__ = ["FOSICurvature", "newton_scales"]


@dataclass(frozen=True)
class Split:
    """A gradient that has been split: what its step is corrected by."""

    scales: Sequence[float | Tensor]  # α of each group
    before: Tensor  # this process's elements of the parameters before the base's step


class FOSICurvature(Curvature):
    """The curvature of FOSI: eigenpairs, and the step that uses them."""

    def __init__(
        self,
        training: Training,
        options: FOSIOptions,
        closure: Closures | None,
        *,
        refreshes: bool = True,
    ) -> None:
        super().__init__(training)
        self.options = options
        self.vector = FlatParams(training, options)
        self.pairs = RefreshedPairs(training, options, self.vector, refreshes=refreshes)
        self.set_closure(closure)
        self._gradient_share: Tensor | None = None  # inside the span, at the last refresh
        self._split: Split | None = None  # of the step under way

    @property
    def subspace(self) -> Subspace | None:
        """The span of the eigenpairs in use."""
        return self.pairs.subspace

    def set_closure(self, closure: Closures | None) -> None:
        """Set the curvature closure for all steps to come."""
        if closure is not None:
            check_closure(closure)
        self.closure = closure

    def closure_now(self) -> Closures:
        """The curvature closure; without any, a function that raises CurvatureError."""
        if self.closure is None:
            return partial(_no_closure, self.training.name, self.training.steps)
        return self.closure

    def description(self) -> list[str]:
        """The options in lines, which must be equal on all ranks."""
        shown = {k: v for k, v in vars(self.options).items() if not callable(v)}
        return [f"options: {self.training.base_name} {shown}"]

    @property
    def scaler_reason(self) -> str:  # type: ignore[override]
        """Why the optimizer needs to know the GradScaler; "" if it does not."""
        averages = self.training.averages_gradients
        return "a step skipped on one process would leave the others waiting" if averages else ""

    # ----------------------------------------------------------------------------------- a step

    def prepare(self) -> None:
        """Follow the parameters that train, and renew the eigenpairs when they are due."""
        self.follow()
        if self.pairs.throttle is not None:
            self.pairs.throttle.begin_step()
        if self.pairs.due():
            self.pairs.renew(self.closure_now())
            self._gradient_share = None

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad`` by g₂; mom takes in V̂ᵀg, and w is kept to see d₂ by."""
        with stage("average_gradients"):
            pending.wait()
        if self.subspace is None:
            return
        with stage("split"), self.vector.plain():
            params = self.vector.params_here
            gradients = [p.grad for p in params]
            gradient = self.vector.read(gradients)
            if self._gradient_share is None:
                square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

            # Take g₁ out of the gradient, and bound the Newton step.
            scales = newton_scales(self.options.newton_scale, self.training)
            alpha: Any = reduce(larger, map(abs, scales))
            c = self.subspace.split(
                gradient,
                momentum_rule(self.options, self.training.groups[0]),
                alpha,
                bounded=self.options.trust_region,
            )
            self.vector.write(gradients)

            if self._gradient_share is None:
                self._gradient_share = self.subspace.basis.share_inside(c, square)
            self._split = Split(scales, self.vector.read(params, "before"))

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step on the rows that are here."""
        self.vector.step_base(step)

    def finish_step(self) -> None:
        """Take the base's step out of the subspace, stretch it, and add the Newton step."""
        split = self._split
        self._split = None
        if split is not None and self.subspace is not None:
            with stage("newton"), self.vector.plain():
                params = self.vector.params_here
                values = self.vector.read(params)
                self.subspace.correct(values, split.before, split.scales)
                # Those without a gradient stay, as with any base.
                self.vector.write([None if p.grad is None else p for p in params])
        if self.vector.steps_rows:
            with stage("exchange"):
                self.vector.share()
        if self.pairs.throttle is not None:
            refreshed = self.pairs.tally.step == self.training.steps
            self.pairs.throttle.end_step(refreshed=refreshed)

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        return [
            ("closed", self.pairs.closed),
            ("the base's state in parts", self.vector.in_parts),
            ("eigenpairs", self.subspace is not None),
            ("of step", self.pairs.tally.step),
            *scheduled(self.options, ("curvature_interval", "newton_scale"), self.training.steps),
            ("least interval", self.pairs.throttle.interval if self.pairs.throttle else 0),
        ]

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that steps each; None if all ranks step all."""
        return self.vector.route(params, gradients)

    # ------------------------------------------------------------------------------- changes

    def follow(self) -> None:
        """Drop the eigenpairs if other parameters train than before."""
        if self.vector.follow():
            self.parameters_changed()
        self.vector.check_gradients()

    def replan(self) -> None:
        """Check that changed parameters and groups still make one vector."""
        check_one_vector(self.training, self.options)

    def begin(self) -> None:
        """Check that the parameters make one vector."""
        self.replan()

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the shards of parameters, or raise; the vector is cut again then."""
        if self.vector.in_parts:
            raise TypeError(
                f"{self.training.name} has stepped this model before fully_shard sharded it, and "
                f"each process has another part of the base's state; shard the model before the "
                f"first step"
            )
        self.replan()
        self.follow()

    def parameters_changed(self) -> None:
        """Drop the eigenpairs: they are of other parameters than train now."""
        self.pairs.drop()

    def close(self) -> None:
        """Drop the eigenpairs and refresh no more: the base trains alone from now on."""
        self.pairs.close()

    # ------------------------------------------------------------------------------------ state

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {"steps": self.training.steps, **self.pairs.counts()}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts; and the eigenpairs where they are whole here."""
        parts: dict[Tensor, dict[str, Any]] = {p: {**self.counts()} for p in self.vector.params}
        pairs = None
        if self.subspace is not None and self.training.world.size == 1:
            pairs = whole_pairs(self.subspace, self.vector)
        elif self.subspace is None and self.options.wanted > 0 and is_checkpointing(part=True):
            # A checkpoint that is read in place needs room for pairs, found or not.
            pairs = room_for_pairs(self.options.wanted, self.vector)
        if parts and pairs is not None:
            first = self.vector.params[0]
            parts[first] |= pairs.entries(first.device)
        return parts

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError unless counts and eigenpairs are finite, and fit the parameters."""
        check_saved_pairs(saved)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, and eigenpairs if the same parameters trained."""
        self._gradient_share = None
        self.vector.restart()
        self.pairs.load(saved)

    @property
    def remote_state(self) -> str:
        """A name for state that only other processes keep; "" if there is none."""
        pairs = self.training.world.size > 1 and self.subspace is not None
        what = "what other processes keep of the eigenvectors and of the base's state"
        return what if pairs or self.vector.in_parts else ""

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """The base's state and the eigenpairs, whole, on the ranks that want them; a collective."""
        bases = self.vector.base_state(ranks)
        found: dict[Tensor, dict[str, Any]] = {p: {BASE: part} for p, part in bases.items()}
        if self.subspace is not None:
            pairs = whole_pairs(self.subspace, self.vector)
            if self.training.world.rank in ranks:
                first = self.vector.params[0]
                found.setdefault(first, {})[CURVATURE] = pairs.entries(first.device)
        return found

    # ---------------------------------------------------------------------------------- reports

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """û and the residuals of the last refresh."""
        if self.subspace is None:
            none = torch.empty(0, dtype=torch.float64, device="cpu")
            return none, none
        return self.subspace.values.clone(), self.subspace.residuals.clone()

    def report(self) -> CurvatureReport:
        """A report of the last refresh and of all refreshes' cost. Synchronizes with the device."""
        values, residuals = self.eigenvalues()
        return CurvatureReport(
            eigenvalues=values,
            residuals=residuals,
            gradient_share=None if self._gradient_share is None else float(self._gradient_share),
            rest_scale=1.0 if self.subspace is None else self.subspace.rest_scale,
            **vars(self.pairs.tally),
        )

    def metrics(self) -> dict[str, float]:
        """Numbers to log: the eigenpairs, their age and cost, and the trust region.

        One that is not known here is NaN, so that every process has the same names.
        """
        report = self.report()
        values = report.eigenvalues
        last = self.training.steps - 1
        trust = TrustState(scale=math.nan, undone=math.nan)
        if self.options.trust_region and self.subspace is not None:
            trust = TrustState(*self.subspace.newton.trust.tolist())
        share = report.gradient_share
        numbers = {
            "pairs": len(values),
            "eigenvalue/largest": values.max() if len(values) else math.nan,
            "eigenvalue/smallest": values.min() if len(values) else math.nan,
            "age/pairs": last - report.step if len(values) else math.nan,
            "lanczos/products": report.products,
            "lanczos/total_products": report.total_products,
            "refreshes": report.refreshes,
            "curvature_interval": self.pairs.interval(max(last, 0)),
            "failed": report.failures,
            "rest_scale": report.rest_scale,
            "gradient_share": math.nan if share is None else share,
            "trust_scale": trust.scale,
            "undone": trust.undone,
        }
        return {name: float(number) for name, number in numbers.items()}

    def summary(self) -> Summary:
        """A table of every parameter: whether the eigenvectors span it, and the bytes here."""
        training, options = self.training, self.options
        names = training.param_names()
        vectors = None if self.subspace is None else self.subspace.basis.vectors
        here = {piece.param: piece.size for piece in self.vector.mine}
        rows = []
        for p in (p for group in training.groups for p in group["params"]):
            spanned = p.requires_grad and vectors is not None
            base = "base" if p.requires_grad else "frozen"
            row = LayerRow(
                name=names.get(id(p), "(not in the model)"),
                kind="x".join(map(str, p.shape)) or "scalar",
                parameters=p.numel(),
                status="preconditioned" if spanned else base,
                detail="spanned by the eigenvectors" if spanned else "",
                factor_bytes=0 if vectors is None else vectors[:, :1].nbytes * here.get(p, 0),
            )
            rows.append(row)

        report = self.report()
        lines = ["no eigenpairs yet: the base steps alone"]
        if len(report.eigenvalues):
            listed = ", ".join(f"{value:.3g}" for value in report.eigenvalues.tolist())
            lines = [f"eigenvalues at step {report.step}: {listed}"]
        lines.append(
            f"refreshes: {report.refreshes}, not finite: {report.failures}; Hessian-vector "
            f"products: {report.total_products}"
        )
        if self.pairs.throttle is not None:
            lines.append(self.pairs.throttle.summary_line)
        title = f"{options.num_largest} largest and {options.num_smallest} smallest eigenpairs"
        layout = "row" if self.vector.sharded else options.layout
        return Summary(training.summary_title(title, f"layout {layout}"), rows, lines=lines)


def newton_scales(option: Schedule, training: Training) -> list[float | Tensor]:
    """α of each group of parameters at a step, negative where the loss is maximized."""
    alpha = value_at(option, training.steps)
    if callable(option):  # a number has been checked
        check_newton_scale(alpha)
    alpha = float(alpha)
    scales = []
    for group in training.groups:
        scale: float | Tensor = -alpha if group.get("maximize") else alpha
        if not callable(option):
            # A number is α at the largest lr: a schedule that ends at 0 ends these steps.
            peak = as_scalar(group[PEAK_LR])
            scale = scale * (as_scalar(group["lr"]) / larger(peak, 1e-30))
        scales.append(scale)
    return scales


def _no_closure(name: str, step: int) -> Any:
    raise CurvatureError(
        f"the curvature is due at step {step}, and there is no curvature closure: give "
        f"{name}(..., curvature_closure=f), assign optimizer.curvature_closure = f, or call "
        f"step(curvature_closure=f), with f a function that evaluates the loss on the curvature "
        f"batch and returns it without calling backward()"
    )
