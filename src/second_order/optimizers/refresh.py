"""The refresh of a K-FAC step: damped inverses of this rank's share, agreed on and exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from second_order.distributed.collectives import World
from second_order.errors import DecompositionError
from second_order.kfac.options import KFACOptions, check_damping
from second_order.kfac.placement import Placement
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.capture import Capture
from second_order.kronecker.decompositions import Decomposition, Problem
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.overflow import drop_overflow
from second_order.kronecker.solvers import Damping, EigenInverse, Solver, factored_damping
from second_order.options import value_at

__all__ = ["Refresh"]

PART_BYTES = 64 * 2**20  # of full matrices that are refreshed together on one process
UNREACHED = (
    "the forward does not call these modules, or their outputs do not reach the loss; see to it "
    "that they do"
)
FAILED, UNSEEN, LOST = 1.0, 2.0**10, 2.0**20  # summed over the ranks, and told apart in the sum


class Refresh(Placement):
    """What a :class:`KFACOptimizer` does every ``inv_update_steps``.

    Attributes:
        _active: The layers that train now.
        _solve_needed: A refresh is due out of turn.
    """

    _active: list[KroneckerBlock]
    _base: torch.optim.Optimizer
    _capture: Capture
    _closed: bool
    _options: KFACOptions
    _newcomers_at: int
    _overflown: dict[KroneckerBlock, Tensor]
    _solve_needed: bool
    _solver: Solver
    _steps: int
    _world: World

    if TYPE_CHECKING:  # what the class that this is mixed into brings along

        def _first_time(self, key: str) -> bool: ...

        def _warn(self, message: str) -> None: ...

        def _device(self) -> torch.device: ...

        def _share_state(self) -> None: ...

    def _facts(self) -> list[tuple[str, Any]]:
        """What decides which collectives a step has, by name; primitives."""
        wanted = ("inverses wanted at once", self._solve_needed), ("anew at", self._newcomers_at)
        return [("closed", self._closed), *wanted, *self._options.scheduled(self._steps)]

    def _refresh_inverses(self, average: Callable[[], None]) -> None:
        """Decompose this rank's share, agree on what failed, and exchange."""
        self._tell_of_overflow()
        seen = self._layers_with_factors()
        damping = self._damping(seen)
        ready = self._ready(seen)
        hopeless = [
            name for part in self._in_parts(ready) for name in self._refresh(part, damping, average)
        ]
        self._solve_needed = False
        if ready and all(self._active[i].silent for i in ready):
            self._warn_of_silence()
        self._raise_if_hopeless(hopeless)

    def _in_parts(self, ready: Sequence[int]) -> list[list[int]]:
        """Layers that are refreshed together: with others, all, so that few messages do.

        Alone, a few: an old inverse can go before the next layers' new ones come.
        """
        if self._world.size > 1 or not ready:
            return [list(ready)]
        parts: list[list[int]] = []
        filled = PART_BYTES
        for i in ready:
            stored = (self._active[i].stored_shape(which) for which in "AG")
            size = self._options.inv_dtype.itemsize * 2 * sum(map(math.prod, stored))
            if filled + size > PART_BYTES:
                parts.append([])
                filled = 0
            parts[-1].append(i)
            filled += size
        return parts

    def _refresh(
        self, ready: Sequence[int], damping: Mapping[int, Damping], average: Callable[[], None]
    ) -> list[str]:
        """Refresh some layers; the names of those that have failed too often."""
        mine, reason = self._decompose_mine(ready, damping)
        failed = self._failures(ready, damping, mine)
        agreement = self._world.start_sum([failed])
        # Nothing may be under way in the world while a part of it communicates: NCCL's
        # communicators are not to be used at the same time.
        with record_function("second_order.average_gradients"):
            average()
        with record_function("second_order.exchange"):
            agreement.wait()
            received = self._exchange_decompositions(mine, ready)
        del mine
        hopeless = []
        for i, bad in zip(ready, failed[ready].tolist(), strict=True):
            block = self._active[i]
            a, g = received.pop((i, "A"), None), received.pop((i, "G"), None)
            if bad:
                hopeless += self._note_failure(block, bad, reason)
            else:
                block.failures, block.silent, block.solved = 0, False, True
                if self._preconditions(i):
                    assert a is not None
                    assert g is not None
                    block.inverse = self._solver.combine(a, g, damping[i])
        return hopeless

    def _note_failure(self, block: KroneckerBlock, bad: float, reason: str) -> list[str]:
        """What becomes of a layer without an inverse; its name, if it has failed too often."""
        block.silent = block.asked and not block.heard and UNSEEN <= bad < LOST
        if bad >= LOST:
            self._warn_loss(block)
            block.forget()
            self._newcomers_at = self._steps + 1
            self._share_state()  # without what is lost
        elif bad >= UNSEEN:
            block.drop_inverse()
        else:
            block.failures += 1
            self._warn_failure(block, reason)
            if block.failures >= self._options.max_consecutive_failures:
                return [block.name]
        return []

    def _raise_if_hopeless(self, names: Sequence[str]) -> None:
        if names:
            raise DecompositionError(
                f"the factors of {', '.join(map(repr, names))} could not be decomposed "
                f"{self._options.max_consecutive_failures} refreshes in a row, in float32 or in "
                f"float64; raise damping, lower lr, or name them in skip_layers"
            )

    def _failures(
        self,
        ready: Sequence[int],
        damping: Mapping[int, Damping],
        mine: Mapping[tuple[int, str], Decomposition],
    ) -> Tensor:
        """For each active layer whether this rank could not do its part."""
        failed = torch.zeros(len(self._active), device=self._device())
        for i in ready:
            solves = self._solves(i)
            if self._active[i].lost:
                failed[i] = LOST
            elif any(solves) and i not in damping:
                failed[i] = UNSEEN
            elif any(o and (i, w) not in mine for w, o in zip("AG", solves, strict=True)):
                failed[i] = FAILED
        return failed

    def _decompose_mine(
        self, ready: Sequence[int], damping: Mapping[int, Damping]
    ) -> tuple[dict[tuple[int, str], Decomposition], str]:
        """This rank's decompositions; an exception here must not part it from the others."""
        options = self._options
        try:
            problems = {
                (i, which): self._problem(i, which, damping[i])
                for i in ready
                for which, ours in zip("AG", self._solves(i), strict=True)
                if ours and i in damping and not self._active[i].lost
            }
            results = self._solver.decompose(
                list(problems.values()), options.inv_dtype, options.symmetry_aware
            )
        except Exception as error:
            return {}, f" ({type(error).__name__}: {error})"
        found = zip(problems, results, strict=True)
        return {key: result for key, result in found if result is not None}, ""

    def _problem(self, index: int, which: str, damping: Damping) -> Problem:
        block = self._active[index]
        dtype = self._options.solve_dtype
        build = partial(block.ensure_factors().matrix, which, dtype)
        return self._problem_of(block, which, damping, build, block.weight.device)

    def _problem_of(
        self,
        block: KroneckerBlock,
        which: str,
        damping: Damping,
        build: Callable[[], Tensor],
        device: torch.device,
    ) -> Problem:
        """A factor to decompose.

        Args:
            block: Whose it is.
            which: Its letter.
            damping: γ.
            build: Makes it, in the solves' dtype.
            device: Where.
        """
        options, shape, inverse = self._options, block.shape, block.inverse
        means, position = block.ensure_factors().means, shape.letters.index(which)
        added = self._solver.dampings(means, damping, shape.exact)[position]
        guess, scale = None, None
        if options.eigen_refresh == "warm" and isinstance(inverse, EigenInverse):
            guess = inverse.q_a if which == "A" else inverse.q_g
            scale = factored_damping(*means.unbind(), damping=damping)[position]
        return Problem(
            shape.groups,
            shape.dim(which),
            options.solve_dtype,
            device,
            build,
            added=added,
            guess=guess,
            scale=scale,
            is_diagonal=shape.is_diagonal(which),
        )

    def _layers_with_factors(self) -> list[int]:
        """Active layers known here to have seen a statistic; those without are named once."""
        taken = {i: b for i, b in enumerate(self._active) if self._takes_statistics(b)}
        if not taken:
            return []
        device = self._device()
        weights = torch.stack([b.ensure_factors().weight.to(device) for b in taken.values()])
        present = dict(zip(taken, (weights > 0).tolist(), strict=True))
        for i, block in taken.items():
            never = block.asked and not block.heard  # a dead layer's pairs have no example
            block.silent = never and not present[i] and not block.lost
        if len(taken) == len(self._active) and all(b.silent for b in taken.values()):
            self._warn_of_silence()
            return []
        self._warn_of_absence([b for b in taken.values() if b.silent])
        return [i for i, seen in present.items() if seen]

    def _drop_overflow(
        self, blocks: Sequence[KroneckerBlock], sums: Sequence[StatisticsSums]
    ) -> None:
        """Drop sums that do not fit their dtype, and remember whose; no device is waited for."""
        for block, each in zip(blocks, sums, strict=True):
            over = drop_overflow(each, block.shape)
            if over.device.type != "cpu" or bool(over):
                block.staged.dropped += over
                self._overflown[block] = over | self._overflown.get(block, over)

    def _tell_of_overflow(self) -> None:
        """Name the layers whose sums have been dropped since the last refresh."""
        noted, self._overflown = self._overflown, {}
        over = torch.stack(list(noted.values())).tolist() if noted else []
        names = [block.name for block, dropped in zip(noted, over, strict=True) if dropped]
        for name in names:
            self._first_time(f"no:{name}")  # it is not that none have arrived
        if len(names) == len(self._active) > 0:
            self._first_time("no statistics")
        new = [repr(name) for name in names if self._first_time(f"overflow:{name}")]
        if new:
            self._warn(
                f"the statistics of {', '.join(new)} overflow {self._options.factor_dtype} when "
                f"they are added up over examples and processes: such sums are dropped; scale the "
                f"layers' inputs or the loss down, or use factor_dtype=torch.float64"
            )

    def _warn_of_absence(self, silent: Sequence[KroneckerBlock]) -> None:
        new = [b for b in silent if self._first_time(f"no:{b.name}")]
        names: dict[str, list[str]] = {}
        for block in new:
            names.setdefault(self._why_silent(block) or UNREACHED, []).append(repr(block.name))
        for reason, absent in names.items():
            self._warn(
                f"no statistics arrived for {', '.join(absent)}: {reason}; the base optimizer "
                f"trains them until then"
            )

    def _why_silent(self, block: KroneckerBlock) -> str:
        """Why no pair of a layer has come, if that is known."""
        reasons = (self._capture.missed.get(module, "") for module in block.modules)
        return next(filter(None, reasons), "")

    def _warn_of_silence(self) -> None:
        if not self._first_time("no statistics"):
            return
        known = filter(None, map(self._why_silent, self._active))
        cause = next(
            known,
            "make the optimizer before torch.compile's first run: hooks added later never fire",
        )
        if self._options.fisher == "sampled":
            cause += "; fisher='sampled' also needs the model itself to be called, not its parts"
        self._warn(
            f"no layer gave statistics: {type(self).__name__} now does no more than "
            f"{type(self._base).__name__}; {cause}"
        )

    def _warn_failure(self, block: KroneckerBlock, reason: str) -> None:
        kept = "its last inverse is kept" if block.solved else "the base optimizer trains it alone"
        if self._first_time(f"failed:{block.name}"):
            self._warn(
                f"the factors of layer {block.name!r} could not be decomposed at step "
                f"{self._steps}{reason}; {kept} until a refresh succeeds"
            )

    def _damping(self, ready: Sequence[int]) -> dict[int, Damping]:
        """γ of each layer that is to be solved: a number, or that many times its mean curvature."""
        damping = value_at(self._options.damping, self._steps)
        check_damping(damping)
        if not self._options.relative_damping:
            return dict.fromkeys(ready, float(damping))
        curvatures = {i: self._active[i].ensure_factors().mean_curvature() for i in ready}
        # A layer whose gradients vanish has no curvature to be relative to.
        return {i: damping * torch.where(c > 0, c, 1.0) for i, c in curvatures.items()}

    def _warn_loss(self, block: KroneckerBlock) -> None:
        self._warn(
            f"a factor of layer {block.name!r} is lost: the process that should keep it has not "
            f"got it, from a checkpoint written without consolidate(), perhaps; the base "
            f"optimizer trains the layer alone until its statistics have been taken anew"
        )
