"""The step of FOSI (Sivan et al., FOSI, ICLR 2024) that DHO2 and MRDHO2 take.

    prepare        û, V̂ <- extreme eigenpairs of the curvature batch's Hessian, if a refresh is due
    precondition   g₁ = V̂V̂ᵀg,  g₂ = g − g₁,  mom <- β mom + gain · V̂ᵀg
    step_base      d₂ = Base(g₂)
    finish_step    d₁ = −α V̂ diag(|û|⁻¹) mom
                   w <- w + d₁ + s (d₂ − V̂V̂ᵀd₂)

mom is the base's momentum, applied to g₁ in the coordinates of V̂. The factor on the base's step is
s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip). d₂ is the change that the base made to the parameters.
Without eigenpairs, the base steps alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, SavedPart
from second_order.errors import CurvatureError
from second_order.fosi.eigenpairs import Closures, RefreshedPairs, momentum_rule
from second_order.fosi.flat_params import FlatParams, check_one_vector
from second_order.fosi.state import check_saved_pairs, empty_pairs, gather_pairs
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import TrustState, larger
from second_order.lanczos.closure import check_closure
from second_order.optimizers.config import FOSIOptions, check_newton_scale
from second_order.reporting.summary import CurvatureReport, LayerRow, Summary
from second_order.training.context import Training
from second_order.training.curvature import Curvature, PendingAverage, Routed
from second_order.utils.checks import PEAK_LR, Schedule, as_scalar, scheduled, value_at
from second_order.utils.stages import stage

__all__ = ["FOSICurvature", "group_alphas"]


@dataclass(frozen=True)
class PendingCorrection:
    """What :meth:`FOSICurvature.finish_step` needs from before the base's step."""

    alphas: Sequence[float | Tensor]  # α of each parameter group
    params_before: Tensor  # the local elements of w


class FOSICurvature(Curvature):
    """The curvature of DHO2: eigenpairs of the Hessian, and the step of FOSI with them."""

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
        self.flat_params = FlatParams(training, options)
        self.pairs = RefreshedPairs(training, options, self.flat_params, refreshes=refreshes)
        self.set_closure(closure)
        self._gradient_share: Tensor | None = None  # at the last refresh; None: not yet computed
        self._pending: PendingCorrection | None = None  # from precondition() to finish_step()

    @property
    def subspace(self) -> Subspace | None:
        """The eigenpairs in use; None before the first refresh."""
        return self.pairs.subspace

    def set_closure(self, closure: Closures | None) -> None:
        """Set the curvature closure."""
        if closure is not None:
            check_closure(closure)
        self.closure = closure

    def required_closure(self) -> Closures:
        """Return the curvature closure, or a function that raises CurvatureError if there is none.

        The refresh calls it, so that the error is raised on all processes together.
        """
        if self.closure is None:
            return partial(_raise_no_closure, self.training.name, self.training.steps)
        return self.closure

    def description(self) -> list[str]:
        """The options that must be equal on all ranks, one per line."""
        options = vars(self.options).items()
        shown = {name: value for name, value in options if not callable(value)}
        return [f"options: {self.training.base_name} {shown}"]

    @property
    def scaler_reason(self) -> str:  # type: ignore[override]
        """Why the optimizer needs to know a GradScaler; "" if it does not."""
        if self.training.averages_gradients:
            return "a step skipped on one process would leave the others waiting"
        return ""

    # ----------------------------------------------------------------------------------- a step

    def prepare(self) -> None:
        """Adopt newly trainable parameters, and refresh the eigenpairs if they are due."""
        self.adopt_params()
        if self.pairs.throttle is not None:
            self.pairs.throttle.begin_step()
        if self.pairs.is_due():
            self.pairs.refresh(self.required_closure())
            self._gradient_share = None

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad`` by g₂, make the Newton step from g₁, and copy w."""
        with stage("average_gradients"):
            pending.wait()
        if self.subspace is None:
            return
        with stage("split"), self.flat_params.without_autocast():
            params = self.flat_params.local_params
            gradients = [p.grad for p in params]
            gradient = self.flat_params.read(gradients)
            if self._gradient_share is None:
                squared_norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

            # Split the gradient. The trust region bounds the step of the group with the largest α.
            alphas = group_alphas(self.options.newton_scale, self.training)
            largest_alpha: Any = abs(alphas[0])
            for alpha in alphas[1:]:
                largest_alpha = larger(largest_alpha, abs(alpha))
            c = self.subspace.split_gradient(
                gradient,
                momentum_rule(self.options, self.training.groups[0]),
                largest_alpha,
                bounded=self.options.trust_region,
            )
            self.flat_params.write(gradients)

            if self._gradient_share is None:
                self._gradient_share = self.subspace.basis.fraction_inside(c, squared_norm)
            params_before = self.flat_params.read(params, "before")
            self._pending = PendingCorrection(alphas, params_before)

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step the local rows of the parameters."""
        self.flat_params.step_base(step)

    def finish_step(self) -> None:
        """Project the base's step onto the complement, scale it, and add the Newton step."""
        pending = self._pending
        self._pending = None
        if pending is not None and self.subspace is not None:
            with stage("newton"), self.flat_params.without_autocast():
                params = self.flat_params.local_params
                values = self.flat_params.read(params)
                self.subspace.correct_step(values, pending.params_before, pending.alphas)
                # Parameters without a gradient do not move, as with any base.
                self.flat_params.write([None if p.grad is None else p for p in params])
        if self.flat_params.base_steps_rows:
            with stage("exchange"):
                self.flat_params.broadcast_rows()
        if self.pairs.throttle is not None:
            refreshed = self.pairs.refresh_counts.step == self.training.steps
            self.pairs.throttle.end_step(refreshed=refreshed)

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """The values that decide which collectives a step issues, by name."""
        least_interval = 0
        if self.pairs.throttle is not None:
            least_interval = self.pairs.throttle.interval
        return [
            ("closed", self.pairs.closed),
            ("the base's state in parts", self.flat_params.base_state_in_rows),
            ("eigenpairs", self.subspace is not None),
            ("of step", self.pairs.refresh_counts.step),
            *scheduled(self.options, ("curvature_interval", "newton_scale"), self.training.steps),
            ("least interval", least_interval),
        ]

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that receives each mean; None: every rank does."""
        return self.flat_params.route(params, gradients)

    # ------------------------------------------------------------------------------- changes

    def adopt_params(self) -> None:
        """Lay out the vector again if other parameters train than at the last step."""
        if self.flat_params.update_layout():
            self.handle_changed_params()
        self.flat_params.check_gradients()

    def replan(self) -> None:
        """Check that changed parameters and groups still make one vector."""
        check_one_vector(self.training, self.options)

    def begin(self) -> None:
        """Check that the parameters make one vector."""
        self.replan()

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the shards that have replaced parameters in the groups."""
        if self.flat_params.base_state_in_rows:
            raise TypeError(
                f"{self.training.name} has stepped this model before fully_shard sharded it, and "
                f"each process has another part of the base's state; shard the model before the "
                f"first step"
            )
        self.replan()
        self.adopt_params()

    def handle_changed_params(self) -> None:
        """Drop the eigenpairs, because they belong to other parameters than train now."""
        self.pairs.drop()

    def close(self) -> None:
        """Drop the eigenpairs for good. The base trains alone from now on."""
        self.pairs.close()

    # ------------------------------------------------------------------------------------ state

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {"steps": self.training.steps, **self.pairs.counts()}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and the eigenpairs if this process has all of them."""
        parts: dict[Tensor, dict[str, Any]] = {}
        for p in self.flat_params.params:
            parts[p] = dict(self.counts())

        pairs = None
        if self.subspace is not None:
            if self.training.world.size == 1:
                pairs = gather_pairs(self.subspace, self.flat_params)
        elif self.options.num_pairs > 0 and is_checkpointing(part=True):
            # torch.distributed.checkpoint reads into existing tensors, so these must exist.
            pairs = empty_pairs(self.options.num_pairs, self.flat_params)
        if parts and pairs is not None:
            first = self.flat_params.params[0]
            parts[first] |= pairs.entries(first.device)
        return parts

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError unless counts and eigenpairs are finite, and fit the parameters."""
        check_saved_pairs(saved)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the counts, and the eigenpairs if the same parameters trained."""
        self._gradient_share = None
        self.flat_params.lay_out()
        self.pairs.load(saved)

    @property
    def remote_state(self) -> str:
        """A name for state that only other processes store; "" if there is none."""
        pairs_are_distributed = self.training.world.size > 1 and self.subspace is not None
        if pairs_are_distributed or self.flat_params.base_state_in_rows:
            return "what other processes keep of the eigenvectors and of the base's state"
        return ""

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """Send the complete state of the base and the eigenpairs to some ranks. Collective."""
        parts: dict[Tensor, dict[str, Any]] = {}
        for p, base_part in self.flat_params.gather_base_state(ranks).items():
            parts[p] = {BASE: base_part}
        if self.subspace is not None:
            pairs = gather_pairs(self.subspace, self.flat_params)
            if self.training.world.rank in ranks:
                first = self.flat_params.params[0]
                parts.setdefault(first, {})[CURVATURE] = pairs.entries(first.device)
        return parts

    # ---------------------------------------------------------------------------------- reports

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Return û and the residuals of the last refresh."""
        if self.subspace is None:
            empty = torch.empty(0, dtype=torch.float64, device="cpu")
            return empty, empty
        return self.subspace.values.clone(), self.subspace.residuals.clone()

    def report(self) -> CurvatureReport:
        """Report the last refresh and the cost of all refreshes. Synchronizes with the device."""
        values, residuals = self.eigenvalues()
        gradient_share = None
        if self._gradient_share is not None:
            gradient_share = float(self._gradient_share)
        base_scale = 1.0
        if self.subspace is not None:
            base_scale = self.subspace.base_scale
        return CurvatureReport(
            eigenvalues=values,
            residuals=residuals,
            gradient_share=gradient_share,
            base_scale=base_scale,
            **vars(self.pairs.refresh_counts),
        )

    def metrics(self) -> dict[str, float]:
        """Numbers to log: the eigenpairs, their age and cost, and the trust region.

        Numbers that this process does not have are NaN, so that every process has the same names.
        """
        report = self.report()
        last_step = self.training.steps - 1
        trust = TrustState(scale=math.nan, rejected=math.nan)
        if self.options.trust_region and self.subspace is not None:
            trust = TrustState(*self.subspace.newton.trust.tolist())

        # Without eigenpairs, their numbers are NaN.
        values = report.eigenvalues
        largest = smallest = age = math.nan
        if len(values):
            largest = float(values.max())
            smallest = float(values.min())
            age = last_step - report.step
        gradient_share = math.nan
        if report.gradient_share is not None:
            gradient_share = report.gradient_share

        numbers = {
            "pairs": len(values),
            "eigenvalue/largest": largest,
            "eigenvalue/smallest": smallest,
            "age/pairs": age,
            "lanczos/products": report.products,
            "lanczos/total_products": report.total_products,
            "refreshes": report.refreshes,
            "curvature_interval": self.pairs.interval(max(last_step, 0)),
            "failed": report.failures,
            "base_scale": report.base_scale,
            "gradient_share": gradient_share,
            "trust_scale": trust.scale,
            "rejected": trust.rejected,
        }
        return {name: float(number) for name, number in numbers.items()}

    def summary(self) -> Summary:
        """A table of all parameters: whether eigenvectors span them, and the bytes stored here."""
        training = self.training
        options = self.options
        local_sizes = {piece.param: piece.size for piece in self.flat_params.local_pieces}
        names = training.param_names()
        bytes_per_element = 0
        if self.subspace is not None:
            bytes_per_element = self.subspace.basis.vectors[:, :1].nbytes

        # One row for each parameter.
        rows = []
        for group in training.groups:
            for p in group["params"]:
                status = "base" if p.requires_grad else "frozen"
                detail = ""
                if p.requires_grad and self.subspace is not None:
                    status = "preconditioned"
                    detail = "spanned by the eigenvectors"
                row = LayerRow(
                    name=names.get(id(p), "(not in the model)"),
                    kind="x".join(map(str, p.shape)) or "scalar",
                    parameters=p.numel(),
                    status=status,
                    detail=detail,
                    factor_bytes=bytes_per_element * local_sizes.get(p, 0),
                )
                rows.append(row)

        # The lines below the table.
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
        layout = "row" if self.flat_params.fsdp_sharded else options.layout
        return Summary(training.summary_title(title, f"layout {layout}"), rows, lines=lines)


def group_alphas(option: Schedule, training: Training) -> list[float | Tensor]:
    """Return α of each parameter group at this step, negative if the loss is maximized.

    Args:
        option: ``newton_scale``. A number is α at the group's largest learning rate, and α falls
            with the learning rate. A callable's value is α.
        training: The context of the optimizer.
    """
    value = value_at(option, training.steps)
    if callable(option):  # the constructor has checked numbers
        check_newton_scale(value)
    alpha_at_peak = float(value)

    alphas = []
    for group in training.groups:
        alpha: float | Tensor = -alpha_at_peak if group.get("maximize") else alpha_at_peak
        if not callable(option):
            peak = as_scalar(group[PEAK_LR])
            alpha = alpha * (as_scalar(group["lr"]) / larger(peak, 1e-30))
        alphas.append(alpha)
    return alphas


def _raise_no_closure(name: str, step: int) -> Any:
    raise CurvatureError(
        f"a refresh of the eigenpairs is due at step {step}, but there is no curvature closure; "
        f"pass {name}(..., curvature_closure=f), assign optimizer.curvature_closure = f, or call "
        f"step(curvature_closure=f), where f returns the loss on the curvature batch without "
        f"calling backward()"
    )
