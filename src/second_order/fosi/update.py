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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import BASE, CURVATURE, SavedPart
from second_order.distributed.world import World
from second_order.errors import CurvatureError
from second_order.fosi.eigenpairs import Closures, RefreshedPairs
from second_order.fosi.flat_params import FlatParams
from second_order.fosi.metrics import pair_metrics, pair_summary
from second_order.fosi.options import check_one_vector, check_shards, newton_scales
from second_order.fosi.state import check_saved_pairs, room_for_pairs, saved_pairs
from second_order.fosi.subspace import Subspace
from second_order.fosi.trust import NewtonStep, largest_scale
from second_order.lanczos.closure import check_closure
from second_order.optimizers.config import FOSIOptions
from second_order.reporting.summary import CurvatureReport, Summary
from second_order.training.averaging import PendingAverage, Routed
from second_order.training.context import Training
from second_order.training.curvature import Curvature
from second_order.training.groups import members_of
from second_order.utils.checks import scheduled
from second_order.utils.stages import stage

__all__ = ["FOSICurvature"]


@dataclass(frozen=True)
class Split:
    """The split of a step's gradient, which the base's step is corrected by."""

    subspace: Subspace
    newton: NewtonStep
    scales: Sequence[float | Tensor]  # α of each group
    before: Tensor  # this process's elements of the parameters before the base's step


class FOSICurvature(Curvature):
    """The curvature of FOSI: eigenpairs, and the step that uses them."""

    computes_pairs = True  # whether eigenpairs are this process's to renew

    def __init__(self, training: Training, options: FOSIOptions, closure: Closures | None) -> None:
        super().__init__(training)
        check_one_vector(training)
        self.options = options
        spread = options.layout == "row"
        self.vector = FlatParams(training, spread=spread, dtype=options.lanczos_dtype)
        self.set_closure(closure)
        self._closure_of_step: Closures | None = None  # goes before the other, at this step
        self.pairs = RefreshedPairs(training, options, self.vector)
        self.closed = False  # whether the base trains alone from now on
        self._gradient_share: Tensor | None = None  # inside the span, at the last refresh
        self._split: Split | None = None  # of the step under way

    @property
    def subspace(self) -> Subspace | None:
        """The span of the eigenpairs in use."""
        return self.pairs.subspace

    def description(self) -> list[str]:
        """The options in lines, which must be equal on all ranks."""
        shown = {k: v for k, v in vars(self.options).items() if not callable(v)}
        return [f"options: {self.training.base_name} {shown}"]

    @property
    def scaler_matters(self) -> str:  # type: ignore[override]
        """Why the optimizer needs to know the GradScaler; "" if it does not."""
        averages = self.training.averages
        return "a step skipped on one process would leave the others waiting" if averages else ""

    # ----------------------------------------------------------------------------------- a step

    def prepare(self) -> None:
        """Follow the parameters that train, and renew the eigenpairs when they are due."""
        if self.vector.follow():
            self.parameters_changed()
        self.vector.check_gradients()
        if self.computes_pairs and not self.closed:
            if self.pairs.throttle is not None:
                self.pairs.throttle.begin_step()
            if self.pairs.due():
                self.pairs.renew(self.closure_now())
                self._gradient_share = None

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad`` by g₂; mom takes in V̂ᵀg, and w is kept to see d₂ by."""
        with stage("average_gradients"):
            pending.wait()
        self._split = None
        if self.subspace is not None:
            with stage("split"), self.vector.plain():
                self._split = self._split_gradient(self.subspace)

    def _split_gradient(self, subspace: Subspace) -> Split:
        scales = newton_scales(self.options.newton_scale, self.training)
        params = [piece.param for piece in self.vector.mine]
        gradients = [p.grad for p in params]
        gradient = self.vector.read(gradients)
        square = None
        if self._gradient_share is None:
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

        # Take g₁ out of the gradient, and bound the Newton step.
        newton, c = subspace.split(
            gradient,
            self.pairs.momentum_rule(),
            largest_scale(scales, subspace.rates),
            bounded=self.options.trust_region,
        )
        self.vector.write(gradients)

        if square is not None:
            rows = self.vector.spread
            self._gradient_share = share_inside(c, square, self.training.world, rows=rows)
        return Split(subspace, newton, scales, before=self.vector.read(params, "before"))

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step on the rows that are here."""
        self.vector.step_base(step)

    def correct(self) -> None:
        """Take the base's step out of the subspace, stretch it, and add the Newton step."""
        if self._split is not None:
            with stage("newton"), self.vector.plain():
                self._correct(self._split)
        self._split = None
        self.vector.share()
        if self.pairs.throttle is not None:
            refreshed = self.pairs.tally.step == self.training.steps
            self.pairs.throttle.end_step(refreshed=refreshed)

    def _correct(self, split: Split) -> None:
        params = [piece.param for piece in self.vector.mine]
        # One α for all groups takes one product, not one for each.
        first = split.scales[0]
        alike = not any(isinstance(a, Tensor) or a != first for a in split.scales)
        scales = [first] if alike else split.scales
        split.subspace.correct(self.vector.read(params), split.before, split.newton, scales)
        # Those without a gradient stay, as with any base.
        self.vector.write([None if p.grad is None else p for p in params])

    def set_closure(self, closure: Closures | None) -> None:
        """Set the curvature closure for all steps to come."""
        if closure is not None:
            check_closure(closure)
        self.closure = closure

    @contextmanager
    def closure_for_step(self, closure: Closures | None) -> Iterator[None]:
        """Take a step with another curvature closure than that for all steps."""
        self._closure_of_step = closure
        try:
            yield
        finally:
            self._closure_of_step = None

    def closure_now(self) -> Closures:
        """The closure to call; without any, a function that raises CurvatureError."""
        found = self.closure if self._closure_of_step is None else self._closure_of_step
        if found is None:
            return partial(_no_closure, self.training.name, self.training.steps)
        return found

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        return [
            ("closed", self.closed),
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

    def replan(self) -> None:
        """Check that changed parameters and groups still make one vector."""
        check_one_vector(self.training)
        params = members_of(self.training.groups)
        check_shards(self.training.name, params, self.options, helped=not self.computes_pairs)

    begin = replan

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Adopt the shards of parameters, or raise; the vector is cut again then."""
        if self.vector.in_parts:
            raise TypeError(
                f"{self.training.name} has stepped this model before fully_shard sharded it, and "
                f"each process has another part of the base's state; shard the model before the "
                f"first step"
            )
        self.replan()
        if self.vector.follow():
            self.parameters_changed()

    def parameters_changed(self) -> None:
        """Drop the eigenpairs: they are of other parameters than train now."""
        if self.pairs.throttle is not None:
            self.pairs.throttle.restart()
        if self.subspace is not None:
            self.pairs.drop(
                "the parameters that train have changed: the eigenpairs are dropped, and "
                f"{self.training.base_name} goes on alone until the next refresh"
            )

    def close(self) -> None:
        """Drop the eigenpairs and refresh no more: the base trains alone from now on."""
        self.closed = True
        self.pairs.close()

    # ------------------------------------------------------------------------------------ state

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {"steps": self.training.steps, **self.pairs.counts()}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and its part of the eigenpairs where they are whole here."""
        counts = self.counts()
        params = self.vector.params
        world = self.training.world
        parts: dict[Tensor, dict[str, Any]] = {}
        if self.subspace is None:
            # A checkpoint that is read in place needs room for pairs, found or not.
            if params and self.options.wanted > 0 and is_checkpointing(part=True):
                parts = room_for_pairs(self.options.wanted, self.vector)
        elif world.size == 1:
            parts = saved_pairs(self.subspace, self.vector, world, to=[0])
        return {p: {**counts, **parts.get(p, {})} for p in params}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError unless counts and eigenpairs are finite, and fit the parameters."""
        check_saved_pairs(saved)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, and eigenpairs if the same parameters trained."""
        self._gradient_share = None
        self.vector.restart()
        self.pairs.resume(saved, with_pairs=self.computes_pairs and not self.closed)

    @property
    def kept_elsewhere(self) -> str:
        """A name for state that only other processes keep; "" if there is none."""
        pairs = self.training.world.size > 1 and self.subspace is not None
        what = "what other processes keep of the eigenvectors and of the base's state"
        return what if pairs or self.vector.in_parts else ""

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """The base's state and the eigenpairs, whole, on the ranks that want them; a collective."""
        vector = self.vector
        world = self.training.world
        bases = vector.base_state(ranks)
        curvature: dict[Tensor, Any] = {}
        if self.subspace is not None:
            curvature = saved_pairs(self.subspace, vector, world, ranks)
        return {p: {BASE: bases.get(p, {}), CURVATURE: curvature.get(p, {})} for p in vector.params}

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
        """Numbers to log: the eigenpairs, their age and cost, and the trust region."""
        return pair_metrics(self.training, self.options, self.pairs, self.report())

    def preconditioned(self) -> list[Tensor]:
        """The parameters that eigenvectors span; none before the first refresh."""
        return [] if self.subspace is None else self.training.training_params()

    def summary(self) -> Summary:
        """A table of every parameter: whether the eigenvectors span it, and the bytes here."""
        return pair_summary(self.training, self.vector, self.options, self.pairs, self.report())


def share_inside(c: Tensor, square: Tensor, world: World, *, rows: bool) -> Tensor:
    """The share of the gradient in the subspace, ‖V̂ᵀg‖² / ‖g‖², on the device.

    From the coefficients that are here, and the squared norm of the elements that are. Every
    process has all coefficients if ``rows`` of V̂ are spread, and all elements otherwise.
    """
    sums = torch.stack([c.double().square().sum(), square])
    if world.size > 1:
        sums[0 if rows else 1] /= world.size
        world.all_reduce([sums]).wait()
    return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)


def _no_closure(name: str, step: int) -> Any:
    raise CurvatureError(
        f"the curvature is due at step {step}, and there is no curvature closure: give "
        f"{name}(..., curvature_closure=f), assign optimizer.curvature_closure = f, or call "
        f"step(curvature_closure=f), with f a function that evaluates the loss on the curvature "
        f"batch and returns it without calling backward()"
    )
