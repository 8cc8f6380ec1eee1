"""The step of FOSI ([F]) that DHO2 and MRDHO2 share.

    every curvature_interval   û, V̂ <- extreme eigenpairs of the curvature batch's Hessian
    every step                 g₁ = V̂V̂ᵀg,  g₂ = g − g₁
                               d₁ = −α V̂ diag(|û|⁻¹) V̂ᵀ mom(g₁),  d₂ = Base(g₂)
                               w <- w + d₁ + s (d₂ − V̂V̂ᵀd₂)

mom is the base's momentum, applied to g₁; s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip). d₂ is what the
base has moved the parameters by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from second_order.contract.saved import SavedPart
from second_order.distributed.checkpointing import is_checkpointing, is_sharded_checkpoint
from second_order.fosi.checkpoint import (
    OTHERS_TRAINED,
    READ_BY_ALL,
    check_saved_pairs,
    counts_of,
    eigenpair_parts,
    gather_eigenpairs,
    has_pairs,
    load_eigenpairs,
)
from second_order.fosi.options import (
    FOSIOptions,
    check_one_vector,
    newton_scale_at,
    refuse_no_closure,
)
from second_order.fosi.subspace import (
    Basis,
    ColumnBasis,
    RowBasis,
    Subspace,
    differs_in_momentum,
    momentum_rule,
    newton_rates,
    rest_scale,
    share_inside,
)
from second_order.fosi.summary import eigenpair_notes, parameter_rows
from second_order.lanczos.hvp import LossFn, check_closure
from second_order.lanczos.spectrum import Measured, Pairs, extreme_pairs
from second_order.lanczos.vector_space import RowSpace
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.flat_optimizer import FlatOptimizer
from second_order.options import (
    check_interval,
    follow_learning_rates,
    scheduled,
    value_at,
)
from second_order.report import CurvatureReport, Summary

__all__ = ["FOSIOptimizer"]

# The guard of s, at a refresh: how it grows or shrinks, and what rise of the loss is chance.
GROWTH, SHRINK, TOLERATED_RISE = 1.5, 0.5, 0.1

BLOWN_UP = 10.0  # times the loss at the first refresh

FRESH = 0.1  # the random share of the vector that a refresh starts from


class FOSIOptimizer(FlatOptimizer):
    """The split step, its refreshes, and its state in either layout."""

    _read_by_all = READ_BY_ALL

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None,
        base: type[torch.optim.Optimizer],
        base_kwargs: dict[str, Any],
        own_keywords: Iterable[str],
        options: FOSIOptions,
        curvature_closure: LossFn | Sequence[LossFn] | None,
        gradient_averaging: str | bool,
        grad_scaler: Any,
        process_group: Any,
    ) -> None:
        self._options = options
        self.curvature_closure = curvature_closure
        self._given: LossFn | Sequence[LossFn] | None = None  # to this step
        self._subspace: Subspace | None = None
        self._newton: Tensor | None = None
        self._before: list[Tensor] = []
        self._closed = False
        self._products = self._total_products = self._refreshes = self._failures = 0
        self._refreshed_at = -1
        self._batch_loss = math.inf
        self._first_loss: float | None = None  # at a refresh
        self._bound = 1.0  # on s, by the guard
        self._share: Tensor | None = None
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs=base_kwargs,
            own_keywords=own_keywords,
            split_rows=options.layout == "row",
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
        )
        self._knows_modules = isinstance(params_or_model, nn.Module) or model is not None
        self._check_params()
        self._finish_construction([f"options: {self._described_options()}"])

    def _described_options(self) -> str:
        shown = {k: v for k, v in vars(self._options).items() if not callable(v)}
        return f"{type(self._base).__name__} {shown}"

    @property
    def curvature_closure(self) -> LossFn | Sequence[LossFn] | None:
        """What evaluates the loss on the curvature batch; may be assigned."""
        return self._curvature_closure

    @curvature_closure.setter
    def curvature_closure(self, closure: LossFn | Sequence[LossFn] | None) -> None:
        """Take another, if it is a function, or a sequence of some."""
        if closure is not None:
            check_closure(closure)
        self._curvature_closure = closure

    # ------------------------------------------------------------------------------- the vector

    def _check_params(self) -> None:
        check_one_vector(self.param_groups)

    def _replan(self) -> None:
        self._check_params()

    def _vector_changed(self) -> None:
        self._before = []
        if self._subspace is not None:
            self._subspace = None
            if self.state:
                self._share_state()  # which lets go of them
            self._warn(
                "the parameters that train have changed: the eigenpairs are dropped, and "
                f"{type(self._base).__name__} goes on alone until the next refresh"
            )

    @property
    def _plain(self) -> torch.autocast:
        """Without autocast, should step() be called under it."""
        return torch.autocast(self._device().type, enabled=False)

    @property
    def _dtype(self) -> torch.dtype:
        assert self._layout is not None
        return self._options.lanczos_dtype or self._layout.dtype

    # -------------------------------------------------------------------------------- stepping

    def _facts(self) -> list[tuple[str, Any]]:
        pairs = ("eigenpairs", self._subspace is not None), ("of step", self._refreshed_at)
        values = scheduled(self._options, ("curvature_interval", "newton_scale"), self._steps)
        return [("closed", self._closed), *super()._facts(), *pairs, *values]

    def _nothing_captured(self) -> bool:
        # Gradients of one rank alone may all be zero, and the others would wait for it.
        return self._given is None and (not self._averages or is_checkpointing())

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature_closure: LossFn | Sequence[LossFn] | None = None,
    ) -> Any:
        """Take one step: refresh the eigenpairs if they are due, split the gradient, step the base.

        Args:
            closure: Evaluates the model, calls ``backward`` and returns the loss. Called once.
            curvature_closure: Evaluates the loss on the curvature batch, and does not call
                ``backward``; asked if this step refreshes, in place of the optimizer's own.

        Returns:
            What the closure returned, or None.

        Raises:
            CurvatureError: On every process, if a refresh is due and there is no curvature
                closure, or its loss cannot be evaluated or differentiated twice. Nothing has
                changed then, but that eigenpairs of other parameters than train now are dropped.
        """
        if curvature_closure is not None and self._world.size == 1:
            check_closure(curvature_closure)  # several processes hear of it together, once due
        self._given = curvature_closure
        try:
            return super().step(closure)
        finally:
            self._given = None

    def _start_averaging(self) -> Callable[[], None]:
        self._follow_layout()
        if self._due():
            self._refresh()
        return super()._start_averaging()

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        super()._transform_gradients(average)
        follow_learning_rates(self.param_groups)
        if self._subspace is not None:
            with record_function("second_order.split"), self._plain:
                self._split(self._subspace)

    def _split(self, subspace: Subspace) -> None:
        """``p.grad`` <- g₂, and mom takes in V̂ᵀg."""
        gradients = [chunk.gradients(self._dtype) for chunk in self._chunks]
        c = subspace.basis.coefficients(gradients, witness=subspace.momentum * subspace.rates)
        if self._refreshed_at == self._steps:
            self._share = share_inside(
                c, gradients, self._world, rows=self._options.layout == "row"
            )
        sound = subspace.basis.add(gradients, [-c])
        for chunk, gradient in zip(self._chunks, gradients, strict=True):
            chunk.put_gradients(gradient)
        self._newton = subspace.accumulate(c, *self._momentum_rule(), sound)
        values = [chunk.values(self._dtype) for chunk in self._chunks]
        if not self._before:
            self._before = [torch.empty_like(value) for value in values]
        if values:  # a process may have no rows
            torch._foreach_copy_(self._before, values)

    def _momentum_rule(self) -> tuple[float, float, bool]:
        """(β, gain, nesterov) of mom <- β mom + gain · V̂ᵀg."""
        chosen = isinstance(self._options.subspace_momentum, float | int)
        if not chosen and differs_in_momentum(self.param_groups) and self._first_time("momentum"):
            self._warn(
                "momentum differs between the groups; in the eigenvectors' span that of the first "
                "is used: subspace_momentum= sets another"
            )
        return momentum_rule(self.param_groups[0], self._options.subspace_momentum)

    def _base_step(self) -> None:
        super()._base_step()
        if self._newton is not None and self._subspace is not None:
            with record_function("second_order.newton"), self._plain:
                self._correct(self._subspace, self._newton)
        self._newton = None
        self._share_parameters()

    def _correct(self, subspace: Subspace, newton: Tensor) -> None:
        """Take the base's step out of the subspace, stretch it, and add the Newton step."""
        values = [chunk.values(self._dtype) for chunk in self._chunks]
        moved = self._before
        for value, before in zip(values, moved, strict=True):
            torch.sub(value, before, out=before)
        scales = [self._newton_scale(group) for group in self.param_groups]
        sound = subspace.correct(values, moved, newton, scales, [c.group for c in self._chunks])
        for chunk, value in zip(self._chunks, values, strict=True):
            chunk.put_values(value)
        unsound = ~sound if subspace.unsound is None else subspace.unsound | ~sound
        subspace.unsound = unsound
        if unsound.device.type == "cpu":  # a device is asked at the next refresh
            self._drop_unsound(subspace)

    def _drop_unsound(self, subspace: Subspace) -> None:
        """Go on as the base alone if a Newton step has not been finite; the same everywhere."""
        if subspace.unsound is None or not bool(subspace.unsound):
            return
        self._subspace = None
        if self.state:
            self._share_state()
        self._warn(
            f"a Newton step at step {self._steps} or before is not finite, by the gradient, the "
            f"eigenvectors or their momentum: it is left out, and {type(self._base).__name__} goes "
            f"on alone until the next refresh"
        )

    def _newton_scale(self, group: dict[str, Any]) -> float | Tensor:
        """α of a group at this step, downhill or uphill."""
        return newton_scale_at(self._options.newton_scale, self._steps, group)

    # --------------------------------------------------------------------------------- curvature

    def _computes_pairs(self) -> bool:
        """Whether eigenpairs are this process's to renew; if not, none are taken over either."""
        return not self._closed

    def _due(self) -> bool:
        if (
            not self._computes_pairs()
            or self._options.wanted == 0
            or self._steps < self._options.first_refresh
        ):
            return False
        if self._refreshed_at < 0:
            return True
        every = value_at(self._options.curvature_interval, self._steps)
        check_interval(f"curvature_interval at step {self._steps}: curvature_interval", every)
        return self._steps - self._refreshed_at >= int(every)

    def _refresh(self) -> None:
        """û, V̂ <- the eigenpairs of the curvature batch, if they are finite."""
        assert self._layout is not None
        options, layout = self._options, self._layout
        if not layout.params:
            return
        if self._subspace is not None:
            self._drop_unsound(self._subspace)
        loss_fn = self._given if self._given is not None else self.curvature_closure
        measured = Measured(
            self._no_closure if loss_fn is None else loss_fn,
            layout.params,
            self._world,
            self._dtype,
            options.hvp,
            self._model if self._knows_modules else None,
            sign=-1.0 if self.param_groups[0].get("maximize") else 1.0,
        )
        with record_function("second_order.lanczos"), measured as space:
            start = self._start(space)
            pairs = extreme_pairs(
                space,
                start,
                options.largest,
                options.smallest,
                iterations=options.lanczos_iterations,
                tol=options.lanczos_tol,
                seed=options.seed,
            )
            space.raise_together()
            loss = space.loss()
        self._refreshed_at = self._steps
        self._refreshes += 1
        self._products = pairs.iterations
        self._total_products += pairs.iterations
        kept = "no eigenpairs yet" if self._subspace is None else "the last eigenpairs are let go"
        if pairs.finite and math.isfinite(loss):
            self._guard(loss)
            with self._plain:
                if self._adopt_pairs(pairs):
                    return
        self._failures += 1
        kept = kept if self._subspace is None else "the last eigenpairs are kept"
        self._warn(
            f"the curvature at step {self._steps} is not finite: {kept} (failure "
            f"{self._failures} of {self._refreshes} refreshes)"
        )

    def _start(self, space: RowSpace) -> Tensor:
        """The sum of the last vectors, and a little of all others: what is new may be there."""
        fresh = space.random(self._options.seed + self._steps, 1.0 / math.sqrt(space.size))
        if self._subspace is None or not self._options.warm_start:
            return fresh
        old = self._subspace.basis.rows_of_sum(space.rows) / math.sqrt(len(self._subspace.values))
        old.add_(fresh, alpha=FRESH)
        # From vectors that are not finite no others would ever come.
        return old if math.isfinite(float(space.total(old.sum().double()))) else fresh

    def _guard(self, loss: float) -> None:
        """Let s grow while the loss of the curvature batch does not rise."""
        if math.isfinite(self._batch_loss):
            risen = loss - self._batch_loss > TOLERATED_RISE * abs(self._batch_loss)
            self._bound = max(1.0, self._bound * (SHRINK if risen else GROWTH))
        self._batch_loss = loss
        self._first_loss = loss if self._first_loss is None else self._first_loss
        if loss > BLOWN_UP * abs(self._first_loss) and self._first_time("blown up"):
            self._warn(
                f"the loss of the curvature batch has grown from {self._first_loss:.3g} at the "
                f"first refresh to {loss:.3g} at step {self._steps}: lower newton_scale or lr"
            )

    def _no_closure(self) -> Any:
        refuse_no_closure(type(self).__name__, self._steps)

    def _adopt_pairs(self, pairs: Pairs) -> bool:
        """Put them to use if their vectors are finite everywhere; whether they are."""
        old = self._subspace
        vector = None
        if old is not None and self._momentum_rule()[0] > 0.0:
            vector = old.momentum_vector(self._chunks)
        del old
        self._subspace = None
        if self.state:
            self._share_state()  # which lets go of the old vectors before there are new ones
        rows = pairs.vectors()
        if not self._world.all_agree(bool(rows.sum().isfinite()), rows.device):
            return False
        basis = self._basis_of_rows(rows)
        self._subspace = self._subspace_of(basis, pairs.values, pairs.bounds(), pairs.largest)
        if vector is not None:
            self._subspace.carry(vector, self._chunks)
        if self.state:
            self._share_state()
        return True

    def _basis_of_rows(self, rows: Tensor) -> Basis:
        assert self._layout is not None
        if self._options.layout == "row" or self._world.size == 1:
            return RowBasis(rows, self._chunks, self._world)
        return ColumnBasis.of_rows(rows, self._chunks, self._layout.size, self._world)

    def _subspace_of(
        self, basis: Basis, values: Tensor, residuals: Tensor, largest: int
    ) -> Subspace:
        rates = newton_rates(values, self._options.eigenvalue_floor)[basis.mine]
        clip = self._options.rest_clip(type(self._base))
        self._bound = min(self._bound, clip)
        if self._options.lr_scale_guard:
            clip = self._bound
        return Subspace(
            basis,
            values,
            residuals,
            largest,
            rates.to(basis.vectors.device, basis.vectors.dtype),
            rest_scale(values, largest, clip),
            basis.vectors.new_zeros(len(rates)),
        )

    @property
    def curvature(self) -> CurvatureReport:
        """The eigenvalues of the last refresh, and what refreshes took. Waits for the device."""
        subspace, nothing = self._subspace, torch.empty(0, dtype=torch.float64)
        return CurvatureReport(
            nothing if subspace is None else subspace.values.clone(),
            nothing if subspace is None else subspace.residuals.clone(),
            None if self._share is None else float(self._share),
            self._refreshed_at,
            self._products,
            self._total_products,
            self._refreshes,
            self._failures,
            1.0 if subspace is None else subspace.rest_scale,
        )

    def close(self) -> None:
        """Drop the eigenpairs and refresh no more; the optimizer goes on as its base alone."""
        self._closed, self._subspace = True, None
        if self.state:
            self._share_state()

    # ------------------------------------------------------------------------ state and summary

    def _counts(self) -> dict[str, float]:
        return {
            "steps": self._steps,
            "refreshed_at": self._refreshed_at,
            "batch_loss": self._batch_loss,
            "rest_scale_bound": self._bound,
        }

    def _curvature_state(self) -> dict[Tensor, dict[str, Any]]:
        if self._layout is None:
            self._follow_layout()
        assert self._layout is not None
        counts = self._counts()
        if self._world.size > 1 and self._subspace is not None:
            return {p: dict(counts) for p in self._layout.params}
        # A checkpoint that is read in place needs room for pairs, found or not.
        room = self._options.wanted if is_sharded_checkpoint() else 0
        parts = eigenpair_parts(self._subspace, self._layout, self._dtype, room)
        return {p: {**counts, **parts.get(p, {})} for p in self._layout.params}

    def _check_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        check_saved_pairs(saved)

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        self._subspace = self._share = None
        super()._adopt_curvature(saved)
        assert self._layout is not None
        counts = counts_of(saved)
        self._refreshed_at = counts.get("refreshed_at", -1)
        self._batch_loss = counts.get("batch_loss", math.inf)
        self._bound = counts.get("rest_scale_bound", 1.0)
        wanted = self._computes_pairs()
        loaded = load_eigenpairs(saved, self._layout.params, self._dtype) if wanted else None
        if loaded is None:
            if wanted and has_pairs(saved):
                self._warn(OTHERS_TRAINED)
            return
        mine = slice(0, self._layout.size)
        if self._split_rows:
            offset = sum(p.size for p in self._layout.pieces if p.rank < self._world.rank)
            mine = slice(offset, offset + sum(p.size for p in self._pieces))
        basis: Basis
        if self._options.layout == "row" or self._world.size == 1:
            basis = RowBasis(loaded.vectors[:, mine].contiguous(), self._chunks, self._world)
        else:
            basis = ColumnBasis.of_all(loaded.vectors, self._chunks, self._world)
        subspace = self._subspace_of(basis, loaded.values, loaded.residuals, loaded.largest)
        subspace.momentum = loaded.momentum[basis.mine].clone()
        subspace.carried = None if loaded.carried is None else loaded.carried[mine].clone()
        subspace.decayed = loaded.decayed
        self._subspace = subspace

    def _is_spread(self) -> bool:
        return super()._is_spread() or (self._world.size > 1 and self._subspace is not None)

    def _gather_curvature(self, ranks: Sequence[int]) -> dict[Tensor, dict[str, Any]]:
        if self._subspace is None or self._layout is None:
            return {}
        return gather_eigenpairs(self._subspace, self._layout, self._world, ranks)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Closures belong to the model that they were made for, and cannot be pickled.
        return state | {"_curvature_closure": None, "_given": None, "_before": []}

    def summary(self) -> Summary:
        """A table of every parameter: whether the eigenvectors span it, and the bytes here."""
        group, subspace = self.param_groups[0], self._subspace
        title = (
            f"{type(self).__name__} over {type(self._base).__name__}, lr {group['lr']}, "
            f"{self._options.largest} largest and {self._options.smallest} smallest eigenpairs, "
            f"layout {self._options.layout}, {self._world.size} process"
            f"{'es' if self._world.size > 1 else ''}, step {self._steps}"
        )
        notes = eigenpair_notes(self.curvature)
        names = {id(p): name for name, p in self._model.named_parameters()}
        vectors = None if subspace is None else subspace.basis.vectors
        return Summary(
            title, parameter_rows(self.param_groups, names, self._pieces, vectors), notes=notes
        )
