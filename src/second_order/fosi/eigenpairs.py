"""Refreshes of the eigenpairs: Lanczos on the Hessian of a curvature batch, when due.

    start from V̂1, and FRESH of everything else; half as many products then
    û, V̂ <- the k largest and l smallest Ritz pairs          lanczos/
    the bound of s grows while the loss of the batch does not rise

Accelerators (`accelerator.py`) compute their eigenpairs by the same :func:`wanted_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.throttle import Throttle
from second_order.contract.training import Training
from second_order.fosi.checkpoint import OTHERS_TRAINED, counts_of, load_eigenpairs
from second_order.fosi.options import most_products
from second_order.fosi.subspace import Basis, Subspace, newton_rates
from second_order.fosi.trust import Flag, Number, TrustRegion
from second_order.fosi.vector import ParameterVector
from second_order.lanczos.closure import LossFn
from second_order.lanczos.spectrum import Pairs, extreme_pairs
from second_order.lanczos.vector_space import RowSpace, row_bounds
from second_order.optimizers.config import FOSIOptions
from second_order.options import AUTO, check_interval, value_at
from second_order.stages import stage

__all__ = ["FRESH", "Closures", "RefreshedPairs", "Tally", "wanted_pairs"]

Closures: TypeAlias = LossFn | Sequence[LossFn]

# The guard of s, at a refresh: how it grows or shrinks, and what rise of the loss is chance.
GROWTH, SHRINK, TOLERATED_RISE = 1.5, 0.5, 0.1

REST_CLIP = 3.0  # FOSI's bound on s for SGD; adaptive bases, which scale their steps, have 1

BLOWN_UP = 10.0  # times the loss at the first refresh

VANISHED = 1e-6  # of the last pairs' largest |û|: Newton steps would be a million times as long

HALFWAY = 20  # rows of a matrix that a refresh of usual size decomposes on its way

FRESH = 0.1
"""The random share of the vector that a refresh starts from."""


def wanted_pairs(
    space: RowSpace, start: Tensor, options: FOSIOptions, *, warm: bool = False, expected: int = 0
) -> Pairs:
    """The k largest and l smallest eigenpairs; fewer products will do from a ``warm`` start.

    About as many as are ``expected``, where that is known.
    """
    most, tol = most_products(options, space.size, warm=warm), options.lanczos_tol
    wanted, known = (options.largest, options.smallest), {"seed": options.seed}
    known["expected"] = expected
    pairs = extreme_pairs(space, start, *wanted, iterations=most, tol=tol, **known)
    space.raise_together()
    return pairs


@dataclass
class Tally:
    """Counts of refreshes and products so far, for :class:`CurvatureReport`."""

    step: int = -1
    products: int = 0
    total_products: int = 0
    refreshes: int = 0
    failures: int = 0

    def add(self, step: int, products: int) -> None:
        """Count a refresh."""
        self.step, self.products = step, products
        self.total_products += products
        self.refreshes += 1


class RefreshedPairs:
    """The eigenpairs in use, refreshed on the curvature batch every ``curvature_interval``."""

    def __init__(self, training: Training, options: FOSIOptions, vector: ParameterVector) -> None:
        self._training, self._options, self._vector = training, options, vector
        self.subspace: Subspace | None = None  # None without eigenpairs
        self.tally, self.trust = Tally(), TrustRegion()
        self.batch_loss = math.inf  # of the curvature batch at the last refresh
        self.bound = 1.0  # on s, that the guard allows
        self.first_used = -1  # the first step that uses the newest eigenpairs
        self._first_loss: float | None = None
        self._expected = 0  # iterations, as many as the last refresh needed
        active = options.curvature_interval == AUTO and options.wanted > 0
        self.throttle = Throttle(training, options.overhead, fewest=1) if active else None

    def due(self) -> bool:
        """Whether the eigenpairs are to be refreshed at this step."""
        options, step, every = self._options, self._training.steps, self._options.curvature_interval
        if options.wanted == 0 or not self._vector.params:
            return False
        first = options.warmup_steps
        if every == AUTO:
            last = self.tally.step
            if last < 0:
                return step >= (self.least_interval() if first is None else first)
            return step >= last + self.least_interval()
        if self.tally.step < 0:
            return step >= (int(value_at(every, 0)) if first is None else first)
        every = value_at(every, step)
        check_interval(f"curvature_interval at step {step}: curvature_interval", every)
        return step - self.tally.step >= int(every)

    def least_interval(self) -> int:
        """Steps between refreshes at least; until it is known, a product counts as one step."""
        assert self.throttle is not None
        options = self._options
        products = most_products(options, self._vector.size, warm=False)
        return self.throttle.interval or math.ceil(products / options.overhead)

    def renew(self, loss_fn: Closures) -> None:
        """û, V̂ <- the eigenpairs of the curvature batch, if they are finite. A collective.

        Raises CurvatureError on all if the loss of one cannot be evaluated or differentiated twice.
        """
        training, options, tally = self._training, self._options, self.tally
        vector = self._vector
        with stage("lanczos"):
            measured = vector.hessian(loss_fn, options.hvp, options.curvature)
            with closing(measured), measured as space:
                pairs, loss = self._found(space), space.loss()
            had = self.subspace is not None
            tally.add(training.steps, pairs.iterations)
            self.first_used = training.steps

            def basis() -> Basis | None:
                rows, world, device = pairs.vectors(), training.world, training.device
                # Nobody waits for a device: a step along vectors that are not finite is left out.
                sound = device.type != "cpu" or bool(rows.sum().isfinite())
                if device.type == "cpu" and not world.all_agree(sound, device):
                    return None
                if self._by_rows:
                    return Basis(rows, vector.chunks, world)
                return Basis.whole_vectors(rows, vector.chunks, vector.size, world)

            finite = not pairs.trouble and math.isfinite(loss)
            if finite and not self._vanished(pairs.values):
                finite = self.use(basis, pairs.values, pairs.bounds(), pairs.largest, loss)
            if not finite:
                tally.failures += 1
                kept = "kept" if self.subspace is not None else "let go"
                kept = f"the last eigenpairs are {kept}" if had else "no eigenpairs yet"
                training.warn(
                    f"the curvature at step {training.steps} is not finite, or was decomposed "
                    f"wrongly: {kept} (failure "
                    f"{tally.failures} of {tally.refreshes} refreshes)"
                )

    def _found(self, space: RowSpace) -> Pairs:
        """The eigenpairs, from the last ones if they are sound; tells of the last steps, too."""
        late = [flag for flag in self._flags() if isinstance(flag, Tensor)]
        if not late:
            self.tell_steps()
        space.asked = late
        seed = self._options.seed + self._training.steps
        fresh = space.random(seed, 1.0 / math.sqrt(space.size))
        start, warm = self._start(space, fresh)
        options, expected = self._options, self._expected
        pairs = wanted_pairs(space, start, options, warm=warm, expected=expected)
        if late:
            self.tell_steps(space.told)
            if warm and (self.subspace is None or not len(pairs.basis)):  # not a sound start
                pairs = wanted_pairs(space, fresh, options)
        self._expected = 0 if pairs.trouble else len(pairs.basis)
        return pairs

    def _start(self, space: RowSpace, fresh: Tensor) -> tuple[Tensor, bool]:
        """The sum of the last vectors, with a little of a fresh one, or that alone; which."""
        last = self.subspace
        if last is None or not self._options.warm_start:
            return fresh, False
        old = last.basis.rows_of_sum(space.rows) / math.sqrt(len(last.values))
        old.add_(fresh, alpha=FRESH)
        if old.device.type != "cpu":  # the first product tells
            return old, True
        # From vectors that are not finite no others would ever come.
        sound = math.isfinite(float(space.total(old.sum().double())))
        return (old, True) if sound else (fresh, False)

    def _vanished(self, values: Tensor) -> bool:
        """Whether next to nothing is left of the curvature; the last pairs are kept then.

        As where a softmax is saturated on the curvature batch: gradients of other batches do not
        vanish with it, and no unit of the loss bounds their Newton steps.
        """
        last = values[:0] if self.subspace is None else self.subspace.values
        before, now = (max(map(abs, each.tolist()), default=0.0) for each in (last, values))
        if not now < VANISHED * before:
            return False
        if self._training.first_time("vanished"):
            self._training.warn(
                f"the curvature at step {self._training.steps} has vanished: eigenvalues of "
                f"{now:.3g} at most, after {before:.3g}; the last eigenpairs are kept as long as "
                f"that is so"
            )
        return True

    def use(
        self,
        make: Callable[[], Basis | None],
        values: Tensor,
        residuals: Tensor,
        largest: int,
        loss: float,
    ) -> bool:
        """Go on with new eigenpairs, in which the momentum goes on, too. A collective.

        Of û, residuals, and the basis that ``make`` makes once the old one is let go, None if it is
        not finite: then there are none, and it returns False. ``loss`` is that of the batch that
        they were computed on, at the same point: while it does not rise s grows, and Newton steps
        may, too.
        """
        training, chunks, momentum = self._training, self._vector.chunks, None
        if math.isfinite(self.batch_loss):
            risen = loss - self.batch_loss > TOLERATED_RISE * abs(self.batch_loss)
            self.bound = max(1.0, self.bound * (SHRINK if risen else GROWTH))
            self.trust.renewed(risen=risen)
        self.batch_loss = loss
        self._first_loss = first = loss if self._first_loss is None else self._first_loss
        if loss > BLOWN_UP * abs(first) and training.first_time("blown up"):
            training.warn(
                f"the loss of the curvature batch has grown from {first:.3g} at the first refresh "
                f"to {loss:.3g} at step {training.steps}: lower newton_scale or lr"
            )
        with self._vector.plain():
            if self.subspace is not None and self.momentum_rule()[0] > 0.0:
                if self.first_used > training.steps:  # the step before is not over
                    self.subspace.fade()
                momentum = self.subspace.momentum_vector(chunks)
            self.drop()  # the old vectors, before there are new ones
            basis = make()
            if basis is None:
                return False
            subspace = self._take(basis, values, residuals, largest)
            if momentum is not None:
                subspace.carry(momentum, chunks)
        training.publish()
        return True

    def basis_of(self, vectors: Tensor, count: int) -> Basis:
        """The basis of this process's part of so many vectors."""
        whole = None if self._by_rows else count
        return Basis(vectors, self._vector.chunks, self._training.world, whole)

    @property
    def _by_rows(self) -> bool:
        return self._vector.spread or self._training.world.size == 1

    def _take(self, basis: Basis, values: Tensor, residuals: Tensor, largest: int) -> Subspace:
        options, clip = self._options, self._options.lr_scale_clip
        if clip is None:
            clip = REST_CLIP if type(self._training.base) is torch.optim.SGD else 1.0
        self.bound, scale = min(self.bound, clip), 1.0
        first, last = (abs(float(values[i])) if largest else 0.0 for i in (0, largest - 1))
        if last > 0.0:  # s = clip(|λ₁| / |λ_k|, 1, lr_scale_clip) (FOSI)
            scale = min(max(first / last, 1.0), self.bound if options.lr_scale_guard else clip)
        rates = newton_rates(values, options.eigenvalue_floor)[basis.mine].to(basis.vectors)
        self.trust.follow(rates)
        nothing = torch.zeros_like(rates)
        of = values, residuals, largest, rates, scale, nothing, nothing.clone()
        self.subspace = subspace = Subspace(basis, *of)
        return subspace

    def momentum_rule(self) -> tuple[float, float, bool]:
        """The numbers (β, gain, nesterov) of mom <- β mom + gain · V̂ᵀg."""
        training, chosen = self._training, self._options.subspace_momentum
        if not isinstance(chosen, str):
            return float(chosen), 1.0 - chosen, False
        group, groups = training.groups[0], training.groups
        unlike = len(groups) > 1 and len({str(g.get("betas", g.get("momentum"))) for g in groups})
        if unlike > 1 and training.first_time("momentum"):
            training.warn(
                "momentum differs between the groups; in the eigenvectors' span that of the first "
                "is used: subspace_momentum= sets another"
            )
        if "betas" in group:
            beta = float(group["betas"][0])
            return beta, 1.0 - beta, False
        momentum, nesterov = float(group.get("momentum") or 0.0), bool(group.get("nesterov"))
        if chosen == "average":
            return momentum, 1.0 - momentum, nesterov
        gain = 1.0 - float(group.get("dampening") or 0.0) if momentum else 1.0
        return momentum, gain, nesterov

    def drop(self, why: str = "") -> None:
        """Drop the eigenpairs, and warn of the reason if one is given."""
        self.subspace = None
        self._training.publish()
        if why:
            self._training.warn(why)

    def _flags(self) -> tuple[Flag, Number]:
        """Whether a Newton step was not finite, and how many have been taken back."""
        return self.subspace is not None and self.subspace.unsound, self.trust.undone

    def tell_steps(self, told: Sequence[float] = ()) -> None:
        """Drop the eigenpairs if a Newton step was not finite; warn of those taken back.

        By flags as they are here, or what a device has ``told`` of those that it has.
        """
        training, answers = self._training, iter(told)
        unsound, undone = (
            next(answers, flag) if isinstance(flag, Tensor) else flag for flag in self._flags()
        )
        if bool(unsound):
            self.drop(
                f"a Newton step at step {training.steps} or before is not finite, by the "
                f"gradient, the eigenvectors or their momentum: it is left out, and "
                f"{training.base_name} goes on alone until the next refresh"
            )
        if bool(undone) and training.first_time("undone"):
            training.warn(
                f"the gradient after a Newton step, at step {training.steps} or before, was not "
                f"finite, or has grown far more than the eigenpairs tell: that step is taken back, "
                f"and later ones are shorter; lower newton_scale if statistics() shows many"
            )

    def counts(self) -> dict[str, float]:
        """The counts of refreshes and the guard that a checkpoint keeps."""
        return {
            "refreshed_at": self.tally.step,
            "batch_loss": self.batch_loss,
            "rest_scale_bound": self.bound,
            **({} if self.throttle is None else self.throttle.saved()),
        }

    def resume(self, saved: Mapping[Tensor, SavedPart], *, taken: bool) -> None:
        """Go on from a checkpoint, with its eigenpairs if these are ``taken``.

        They are of no use if other parameters trained.
        """
        counts, vector, world = counts_of(saved), self._vector, self._training.world
        self.subspace, self.trust = None, TrustRegion()
        self.tally.step = counts.get("refreshed_at", -1)
        self.batch_loss = counts.get("batch_loss", math.inf)
        self.bound = counts.get("rest_scale_bound", 1.0)
        if self.throttle is not None:
            self.throttle.load(saved)
        loaded = load_eigenpairs(saved, vector.params, vector.dtype) if taken else None
        if loaded is None:
            # A count below 0 is of mere room for pairs.
            if taken and any(part.get("largest", -1) >= 0 for part in saved.values()):
                self._training.warn(OTHERS_TRAINED)
            return
        head, vectors, carried = loaded
        if self._by_rows:
            mine = vector.here(vectors).contiguous()
        else:
            start, stop = row_bounds(len(vectors), world.size)[world.rank : world.rank + 2]
            mine = vectors[start:stop].clone()
        basis = self.basis_of(mine, len(vectors))
        subspace = self._take(basis, head["eigenvalues"], head["residuals"], int(head["largest"]))
        subspace.momentum = head["subspace_momentum"][basis.mine].clone()
        subspace.carried = None if carried is None else vector.here(carried).clone()
        subspace.decayed = float(head["carried_decay"])
        if "trust_region" in head:  # checkpoints of older versions have none
            self.trust.numbers = head["trust_region"].tolist()
            self.trust.follow(subspace.rates)
            subspace.last = head["last_step"][basis.mine].clone()
