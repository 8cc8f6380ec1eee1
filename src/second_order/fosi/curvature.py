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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from second_order.contract.saved import BASE, CURVATURE, SavedPart
from second_order.contract.training import Curvature, PendingAverage, Routed, Training, members_of
from second_order.errors import CurvatureError
from second_order.fosi.checkpoint import check_saved_pairs, gather_eigenpairs, room_for_eigenpairs
from second_order.fosi.eigenpairs import Closures, RefreshedPairs
from second_order.fosi.metrics import pair_metrics, pair_summary
from second_order.fosi.options import check_one_vector, check_shards, newton_scales
from second_order.fosi.subspace import Subspace, share_inside
from second_order.fosi.trust import largest_scale, stability_limit, taken_in
from second_order.fosi.vector import ParameterVector
from second_order.lanczos.closure import check_closure
from second_order.optimizers.config import FOSIOptions
from second_order.options import scheduled
from second_order.report import CurvatureReport, Summary
from second_order.sharded import is_checkpointing
from second_order.stages import stage

__all__ = ["FOSICurvature"]


class FOSICurvature(Curvature):
    """The curvature of FOSI: eigenpairs, and the step that uses them."""

    computes_pairs = True  # whether eigenpairs are this process's to renew

    def __init__(self, training: Training, options: FOSIOptions, closure: Closures | None) -> None:
        super().__init__(training)
        check_one_vector(training)
        self.options = options
        spread = options.layout == "row"
        self.vector = ParameterVector(training, spread=spread, dtype=options.lanczos_dtype)
        if closure is not None:
            check_closure(closure)
        self.closure = closure
        self.closure_of_step: Closures | None = None  # in the place of it, at the present step
        self.pairs = RefreshedPairs(training, options, self.vector)
        self.closed = False  # whether the base goes on alone for good
        self._share: Tensor | None = None  # gradient's share inside, at the last refresh
        self._newton: tuple[Tensor, list[float | Tensor]] | None = None  # τ |û|⁻¹ n, and α
        self._before: list[Tensor] = []  # the parameters before the base's step

    @property
    def steps_by_pairs(self) -> bool:
        """Whether eigenpairs are of use here; if not, none are taken over from a checkpoint."""
        return self.computes_pairs and not self.closed

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
        """Why a GradScaler has to be announced; "" if it need not be."""
        averages = self.training.averages
        return "a step skipped on one process would leave the others waiting" * averages

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Go on with the shards of parameters, if they can be; the vector is cut anew then."""
        if self.vector.in_parts:
            raise TypeError(
                f"{self.training.name} has stepped this model before fully_shard sharded it, and "
                f"each process has another part of the base's state; shard the model before the "
                f"first step"
            )
        self.replan()
        if self.vector.follow():
            self.parameters_changed()

    def replan(self) -> None:
        """Check that changed parameters and groups still make one vector."""
        check_one_vector(self.training)
        params = members_of(self.training.groups)
        check_shards(self.training.name, params, self.options, helped=not self.computes_pairs)

    begin = replan

    # ----------------------------------------------------------------------------------- a step

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        return [
            ("closed", self.closed),
            ("the base's state in parts", self.vector.in_parts),
            ("eigenpairs", self.subspace is not None),
            ("of step", self.pairs.tally.step),
            *scheduled(self.options, ("curvature_interval", "newton_scale"), self.training.steps),
            *([("least interval", self.pairs.throttle.interval)] if self.pairs.throttle else []),
        ]

    def prepare(self) -> None:
        """Follow the parameters that train, and renew the eigenpairs when they are due."""
        if self.vector.follow():
            self.parameters_changed()
        self.vector.check_gradients()
        if self.computes_pairs and not self.closed:
            pairs = self.pairs
            if pairs.throttle is not None:
                pairs.throttle.begin_step()
            if pairs.due():
                pairs.renew(self.closure_now())

    def closure_now(self) -> Closures:
        """The closure to call; without any, a function that raises CurvatureError."""
        found = self.closure if self.closure_of_step is None else self.closure_of_step
        none = partial(_no_closure, self.training.name, self.training.steps)
        return none if found is None else found

    def parameters_changed(self) -> None:
        """Drop the eigenpairs: they are of other parameters than train now."""
        self._before = []
        if self.pairs.throttle is not None:
            self.pairs.throttle.restart()
        if self.subspace is not None:
            self.pairs.drop(
                "the parameters that train have changed: the eigenpairs are dropped, and "
                f"{self.training.base_name} goes on alone until the next refresh"
            )

    def route(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Routed:
        """Parts of the gradients, and the rank that steps each; None if all ranks step all."""
        return self.vector.route(params, gradients)

    def precondition(self, pending: PendingAverage) -> None:
        """Replace ``p.grad`` by g₂."""
        with stage("average_gradients"):
            pending.wait()
        if self.subspace is not None:
            with stage("split"), self.vector.plain():
                self._split(self.subspace)

    def step_base(self, step: Callable[[], None]) -> None:
        """Let the base step on the rows that are here."""
        self.vector.step_base(step)

    def correct(self) -> None:
        """Take the base's step out of the subspace, stretch it, and add the Newton step."""
        if self._newton is not None and self.subspace is not None:
            with stage("newton"), self.vector.plain():
                self._correct(self.subspace, *self._newton)
        self._newton = None
        self.vector.share()
        if self.pairs.throttle is not None and not self.closed:
            self.pairs.throttle.end_step(refreshed=self.pairs.first_used == self.training.steps)

    def _split(self, subspace: Subspace) -> None:
        """Set ``p.grad`` to g₂ = g − V̂V̂ᵀg; mom takes in V̂ᵀg, and w is kept to see d₂ by."""
        chunks, dtype, basis = self.vector.chunks, self.vector.dtype, subspace.basis
        gradients = [chunk.gradients(dtype) for chunk in chunks]
        witness = None if basis.alone else subspace.momentum * subspace.rates
        health: Tensor | None = None  # a sum that is finite where the gradients here are
        if witness is not None and self.options.trust_region and witness.device.type != "cpu":
            health = sum((0.0 * each.sum() for each in gradients), witness.new_zeros(()))
        c = basis.coefficients(gradients, witness=witness, along=health)
        if self.pairs.first_used == self.training.steps:
            rows = self.vector.spread
            self._share = share_inside(c, gradients, self.training.world, rows=rows)
        scales = newton_scales(self.options.newton_scale, self.training)
        subspace.fades, *_ = rule = self.pairs.momentum_rule()
        if basis.vectors.device.type == "cpu":
            step = self._settle(subspace, gradients, c, scales, rule)
        else:
            trust, bounds = self.pairs.trust, tuple[Any, ...]()
            if self.options.trust_region:
                limit = stability_limit(*rule)
                bounds = trust.numbers, trust.undone, largest_scale(scales), limit
            health = c if health is None else health
            step = subspace.settle_there(gradients, c, health, rule, bounds)
        for chunk, gradient in zip(chunks, gradients, strict=True):
            chunk.put(gradient, [p.grad for p in chunk.params])
        self._newton = step, scales
        self._before = [chunk.take(chunk.params, dtype, "before") for chunk in chunks]

    def _settle(
        self,
        subspace: Subspace,
        gradients: Sequence[Tensor],
        c: Tensor,
        scales: Sequence[float | Tensor],
        rule: tuple[float, float, bool],
    ) -> Tensor:
        """Take V̂c out of the gradients; returns the Newton step to make, NaN for none."""
        of = subspace.momentum, subspace.rates, subspace.last
        momentum, step, *terms = taken_in(c, *of, *rule, self.options.trust_region)
        sound = bool(subspace.basis.add(gradients, [-c], along=terms[0] if terms else None))
        if terms:
            finite = sound
            if not sound:
                here = all(bool(gradient.isfinite().all()) for gradient in gradients)
                finite = self.training.world.all_agree(here, self.training.device)
            alpha, limit = float(largest_scale(scales)), stability_limit(*rule)
            verdict = self.pairs.trust.judge(terms[0], alpha, limit, sound, finite)
            step, momentum, sound = subspace.bounded(step, momentum, sound, verdict)
            if verdict.undo:  # gradients are of where the step has led to that is undone
                for gradient in gradients:
                    gradient.zero_()
                self.pairs.tell_steps()
        if sound:
            subspace.momentum.copy_(momentum)
        return step if sound else torch.full_like(step, torch.nan)

    def _correct(self, subspace: Subspace, step: Tensor, scales: list[float | Tensor]) -> None:
        """Set w to w + d₁ + s (d₂ − V̂V̂ᵀd₂); the base has moved it by d₂."""
        moved, chunks, dtype = self._before, self.vector.chunks, self.vector.dtype
        values = [chunk.values(dtype) for chunk in chunks]
        for value, before in zip(values, moved, strict=True):
            torch.sub(value, before, out=before)
        alike = not any(isinstance(a, Tensor) or a != scales[0] for a in scales)
        sound = subspace.correct(values, moved, step, scales[:1] if alike else scales)
        for chunk, value in zip(chunks, values, strict=True):
            # Those without a gradient stay, as with any optimizer.
            chunk.put(value, [None if p.grad is None else p for p in chunk.params])
        if isinstance(sound, Tensor):  # a device is asked at the next refresh
            subspace.note(sound)
        elif not sound:
            subspace.unsound = True
            self.pairs.tell_steps()

    def watch(self) -> None:
        """Let the momentum fade, unless new pairs are used from the coming step on."""
        if self.subspace is not None and self.pairs.first_used < self.training.steps:
            self.subspace.fade()

    def close(self) -> None:
        """Drop the eigenpairs and refresh no more; the optimizer goes on as its base alone."""
        self.closed, self.pairs.subspace = True, None

    # ------------------------------------------------------------------------ state and summary

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {"steps": self.training.steps, **self.pairs.counts()}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and its part of the eigenpairs where they are whole here."""
        counts, params = self.counts(), self.vector.params
        if self.training.world.size > 1 and self.subspace is not None:
            return {p: dict(counts) for p in params}
        vector, trust, parts = self.vector, self.pairs.trust, dict[Tensor, Any]()
        # A checkpoint that is read in place needs room for pairs, found or not.
        room = is_checkpointing(part=True) and self.options.wanted > 0
        if self.subspace is not None and params:
            world = self.training.world
            parts = gather_eigenpairs(self.subspace, trust, vector, world, [world.rank], room)
        elif room:
            parts = room_for_eigenpairs(self.options.wanted, trust, vector)
        return {p: {**counts, **parts.get(p, {})} for p in params}

    def check(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Raise ValueError unless counts and eigenpairs are sound, and fit the parameters."""
        check_saved_pairs(saved)

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, and eigenpairs if the same parameters trained."""
        self._share = None
        self.vector.restart()
        self.pairs.resume(saved, taken=self.steps_by_pairs)

    @property
    def kept_elsewhere(self) -> str:
        """A name for state that only other processes keep; "" if there is none."""
        pairs = self.training.world.size > 1 and self.subspace is not None
        what = "what other processes keep of the eigenvectors and of the base's state"
        return what if pairs or self.vector.in_parts else ""

    @property
    def base_in_parts(self) -> bool:  # type: ignore[override]
        """Whether each rank has a part of the base's state."""
        return self.vector.in_parts

    def kept_by_all(self) -> Iterable[tuple[str, Tensor]]:
        """The eigenvalues; of the eigenvectors each rank has rows, or some."""
        return () if self.subspace is None else [("the eigenvalues", self.subspace.values)]

    def gather(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, dict[str, Any]]]:
        """The base's state and the eigenpairs, whole, on the ranks that want them; a collective."""
        vector, curvature = self.vector, dict[Tensor, Any]()
        bases = vector.base_state(ranks)
        if self.subspace is not None:
            trust, world = self.pairs.trust, self.training.world
            curvature = gather_eigenpairs(self.subspace, trust, vector, world, ranks)
        return {p: {BASE: bases.get(p, {}), CURVATURE: curvature.get(p, {})} for p in vector.params}

    def found(self) -> tuple[Tensor, Tensor]:
        """û and the residuals of the last refresh."""
        none, found = torch.empty(0, dtype=torch.float64, device="cpu"), self.subspace
        return (none, none) if found is None else (found.values.clone(), found.residuals.clone())

    def report(self) -> CurvatureReport:
        """A report of the last refresh and of all refreshes' cost. Waits for the device."""
        share = None if self._share is None else float(self._share)
        stretch = 1.0 if self.subspace is None else self.subspace.rest_scale
        return CurvatureReport(*self.found(), share, **vars(self.pairs.tally), rest_scale=stretch)

    def metrics(self) -> dict[str, float]:
        """Numbers to log: the eigenpairs, their age and cost, and the share of their step."""
        told = self.found()[0], self._share, self._before
        return pair_metrics(self.training, self.options, self.pairs, *told)

    def summary(self) -> Summary:
        """A table of every parameter: whether the eigenvectors span it, and the bytes here."""
        found = self.options, self.pairs, self.found()[0]
        return pair_summary(self.training, self.vector, *found)


def _no_closure(name: str, step: int) -> Any:
    raise CurvatureError(
        f"the curvature is due at step {step}, and there is no curvature closure: give "
        f"{name}(..., curvature_closure=f), assign optimizer.curvature_closure = f, or call "
        f"step(curvature_closure=f), with f a function that evaluates the loss on the curvature "
        f"batch and returns it without calling backward()"
    )
