"""MRDHO2: some processes compute eigenpairs while the others train ([D], MR-DHO2).

workers                                        accelerators, meanwhile
at the start of an epoch:  c = w, sent    ->   w = c; û, V̂ <- Lanczos on their own batches
E steps:  w <- w + Base(g),  p <- p + g   <-   worker j gets its vectors V̂ⱼ, and ûⱼ
at the end:  w <- w_E − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w_E − c)]      one all-reduce of n

The last line is the paper's equation 17. It replaces what the base has done in the span of V̂ by one
Newton step on the summed gradient, which is stable only while α (1 − (1 − ηu)^E) / (ηu) < 2 for
each eigenvalue u at a learning rate η. So "guarded" asks the accelerators for the loss without and
with it, and "additive" keeps w_E and adds a Newton step on the mean of the last gradients.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from second_order.distributed.courier import Courier, Message, await_goodbyes, open_store
from second_order.distributed.roles import Role, Roles, assign_roles
from second_order.errors import SecondOrderError
from second_order.lanczos.hvp import LossFn, ProductMode
from second_order.optimizers.accelerator import Accelerator, Subject, closures_of
from second_order.optimizers.base import ParamsOrModel
from second_order.optimizers.fosi import FOSIOptimizer
from second_order.optimizers.fosi_options import FOSIOptions, check_whole
from second_order.optimizers.fosi_state import load_vector, vector_parts
from second_order.optimizers.keepers import is_sharded_checkpoint
from second_order.optimizers.options import (
    Schedule,
    check_choice,
    check_count,
    check_number,
    own_keywords,
)
from second_order.optimizers.subspace import ColumnBasis, newton_rates, updated
from second_order.report import CurvatureReport, EpochReport

__all__ = ["MRDHO2", "FinalUpdate"]

FinalUpdate: TypeAlias = Literal["guarded", "paper", "additive"]

ADDED_STEPS = 10  # how many of an epoch's last gradients "additive" averages
FAREWELL_SECONDS = 5.0  # that the store outlives its host's own goodbye at most
SUM, CHECKPOINT = "gradient_sum", "epoch_start"


class MRDHO2(FOSIOptimizer):
    """DHO2 whose eigenpairs are computed by processes of their own, while the others train.

        optimizer = MRDHO2(model, lr=0.1, momentum=0.9, epoch_steps=len(loader))
        with optimizer:
            if optimizer.role == "accelerator":
                optimizer.serve(loader, lambda batch: criterion(model(batch[0]), batch[1]))
            else:
                ...  # the usual loop

    The last ``accelerators`` ranks help; the others average gradients among themselves. A worker
    waits for accelerators at the end of an epoch only, if they are late. If one dies, hangs or
    sends numbers that are not finite, workers go on with the base alone. A rank that runs the usual
    loop and is an accelerator computes eigenpairs in :meth:`step`, by ``curvature_closure``.

    With one process, or ``accelerators=0``, it is :class:`~second_order.DHO2` with an interval of
    ``epoch_steps``.

    Args:
        params_or_model: As for DHO2.
        model: As for DHO2.
        lr: Learning rate of the base.
        base: Class of the first-order optimizer.
        accelerators: A, how many ranks compute eigenpairs.
        epoch_steps: E, steps between two final updates.
        final_update: "paper" is equation 17. "guarded" does it where the loss on the accelerators'
            batches does not rise by it. "additive" adds a Newton step on the mean of the last
            gradients to what the base has done.
        helper_timeout: Seconds without a sign of life, or of waiting at the end of an epoch, after
            which accelerators are given up.
        largest: k, how many of the largest eigenpairs.
        smallest: l, how many of the smallest.
        newton_scale: α, as for DHO2.
        lanczos_iterations: As for DHO2.
        lanczos_tol: As for DHO2.
        lanczos_dtype: As for DHO2.
        eigenvalue_floor: As for DHO2.
        hvp: As for DHO2.
        seed: Of the start vectors.
        curvature_closure: As for DHO2; for accelerators that run the usual loop, and without any.
        grad_scaler: As for DHO2.
        gradient_averaging: As for DHO2, among the workers. For DistributedDataParallel, make the
            optimizer of the plain model with False, then wrap it with
            ``process_group=optimizer.worker_group``.
        process_group: All the processes; None for the default group, if there is one.
        **base_kwargs: Arguments of ``base``.

    Attributes:
        role: "worker" or "accelerator".
        worker_group: The process group of the workers, be it of one; of the accelerators, on one of
            them; without accelerators, the optimizer's own.
        epochs: An :class:`EpochReport` for each of the last 1,000 epochs.

    Raises:
        TypeError: For an unknown keyword (naming the closest known one).
        ValueError: For a value outside its bounds, with the bound and the remedy.
        RankMismatchError: If the processes built different models or options.
    """

    def __init__(
        self,
        params_or_model: ParamsOrModel,
        *,
        model: nn.Module | None = None,
        lr: float | Tensor,
        base: type[torch.optim.Optimizer] = torch.optim.SGD,
        accelerators: int = 1,
        epoch_steps: int = 100,
        final_update: FinalUpdate = "guarded",
        helper_timeout: float = 60.0,
        largest: int = 10,
        smallest: int = 0,
        newton_scale: Schedule = 0.1,
        lanczos_iterations: int | None = None,
        lanczos_tol: float = 1e-2,
        lanczos_dtype: torch.dtype | None = None,
        eigenvalue_floor: float = 1e-2,
        hvp: ProductMode = "auto",
        seed: int = 0,
        curvature_closure: LossFn | Sequence[LossFn] | None = None,
        grad_scaler: Any = None,
        gradient_averaging: str | bool = "auto",
        process_group: Any = None,
        **base_kwargs: Any,
    ) -> None:
        check_count("epoch_steps", epoch_steps, "steps")
        check_choice("final_update", final_update, ("guarded", "paper", "additive"))
        check_number("helper_timeout", helper_timeout, low=0.1, remedy="60.0 is the default")
        check_whole("accelerators", accelerators, 0, "0 for none")
        self._epoch_steps, self._final_update = epoch_steps, final_update
        self._patience = float(helper_timeout)
        self._courier: Courier | None = None
        self._role: Role = "worker"
        self._epoch = self._epoch_step = 0
        self._checkpoint: Tensor | None = None  # c, flat
        self._sum: Tensor | None = None  # p, flat
        self._asked = -1  # the epoch whose eigenpairs are under way
        self._request = -1  # which message that is
        self._accelerator: Accelerator | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        self.epochs: deque[EpochReport] = deque(maxlen=1000)
        alone = {
            "curvature_interval": epoch_steps,
            "warmup_steps": None,
            "lr_scale_clip": None,
            "lr_scale_guard": True,
            "subspace_momentum": "average",
            "warm_start": True,
            "layout": "column",
        }
        super().__init__(
            params_or_model,
            model=model,
            base=base,
            base_kwargs={"lr": lr, **base_kwargs},
            own_keywords=own_keywords(MRDHO2),
            options=FOSIOptions.of({**locals(), **alone}),
            curvature_closure=curvature_closure,
            gradient_averaging=gradient_averaging,
            grad_scaler=grad_scaler,
            process_group=process_group,
        )
        everybody = self._world
        everybody.require_equal(
            [f"options: {accelerators} {epoch_steps} {final_update} {helper_timeout}"], "options"
        )
        self._roles = assign_roles(everybody.size, accelerators, "accelerator", self._under_ddp)
        if self._roles.helpers and self._options.wanted:
            self._divide(everybody)
        elif self._options.wanted:
            self._warn(
                f"MRDHO2 with {everybody.size} process{'es' * (everybody.size > 1)} and "
                f"accelerators={accelerators}: nobody computes eigenpairs on the side, so each "
                f"process stops for them every {epoch_steps} steps, as DHO2 does"
            )

    def _divide(self, everybody: Any) -> None:
        """Give every process its role, and workers and accelerators a way to talk."""
        roles: Roles = self._roles
        self._role, self._divided = roles.of(everybody.rank), True
        self._store, address = open_store(everybody, roles.helpers[0], self._patience)
        self._everybody = [f"{roles.of(r)} {r}" for r in range(everybody.size)]
        self._world = roles.team(everybody)
        self._averages = self._averages and self._world.size > 1
        name = self._everybody[everybody.rank]
        peers = {"worker": f"accelerator {roles.helpers[0]}", "accelerator": "worker 0"}
        self._courier = Courier(address, name, peers[self._role], self._patience)
        if self._role == "worker":
            self._helped = True
        else:
            self._accelerator = Accelerator(
                self._courier,
                self._world,
                self._options,
                workers=len(roles.workers),
                judges=self._final_update == "guarded",
            )

    _helped = False  # whether accelerators are at work for this worker
    _divided = False  # whether there have been any

    @property
    def role(self) -> Role:
        """What this process does."""
        return self._role

    @property
    def worker_group(self) -> Any:
        """The process group of the workers; of the accelerators, on one of them."""
        return self._world.group

    # ------------------------------------------------------------------------------------ worker

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature_closure: LossFn | Sequence[LossFn] | None = None,
    ) -> Any:
        """Take one step; on an accelerator, do what the workers wait for until they have taken it.

        Args:
            closure: As for DHO2.
            curvature_closure: As for DHO2; for accelerators, and without any.

        Returns:
            What the closure returned, or None.
        """
        if self._role == "worker":
            return super().step(closure, curvature_closure=curvature_closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._steps += 1
        chosen = curvature_closure if curvature_closure is not None else self.curvature_closure
        with torch.no_grad():
            self._help(
                itertools.repeat(self._no_closure if chosen is None else chosen),
                lambda courier: (courier.heard("steps") or 0) >= self._steps,
            )
        return loss

    def _computes_pairs(self) -> bool:
        return self._courier is None and super()._computes_pairs()

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        super()._transform_gradients(average)
        if not self._helped:
            return
        if self._asked != self._epoch:
            self._begin_epoch()
        last = self._epoch_steps - min(ADDED_STEPS, self._epoch_steps)
        if self._sum is not None and (self._final_update != "additive" or self._epoch_step >= last):
            parts = [self._sum[chunk.columns] for chunk in self._chunks]
            torch._foreach_add_(parts, [chunk.gradients(self._dtype) for chunk in self._chunks])

    def _base_step(self) -> None:
        stepping = self._stepping
        super()._base_step()
        if not (stepping and self._helped):
            return
        assert self._courier is not None
        self._epoch_step += 1
        if self._epoch_step >= self._epoch_steps:
            with record_function("second_order.final_update"), self._plain:
                self._end_epoch(self._courier)
        self._courier.tell("steps", self._steps + 1)

    def _flat(self) -> Tensor:
        return torch.cat([chunk.values(self._dtype) for chunk in self._chunks])

    def _begin_epoch(self) -> None:
        """C = w, p = 0, and off with c; an epoch taken up from a checkpoint has both already."""
        assert self._courier is not None
        if self._checkpoint is None or self._epoch_step == 0:
            self._checkpoint = self._flat()
            self._sum = torch.zeros_like(self._checkpoint)
        self._asked, self._request = self._epoch, self._request + 1
        if self._world.rank == 0:
            for a in range(len(self._roles.helpers)):
                point = self._checkpoint.clone()
                self._courier.post(f"point/{self._request}/{a}", [point], epoch=self._epoch)
        for name in self._expected("pairs"):
            self._courier.expect(name)

    def _expected(self, what: str) -> list[str]:
        helpers = range(len(self._roles.helpers))
        return [f"{what}/{self._request}/{self._world.rank}/{a}" for a in helpers]

    def _end_epoch(self, courier: Courier) -> None:
        """The final update, if every worker has sound eigenpairs."""
        begun = time.monotonic()
        messages = [self._await(courier, name, begun) for name in self._expected("pairs")]
        waited = time.monotonic() - begun
        found = [message for message in messages if message is not None]
        here = len(found) == len(messages)
        sound = here and all(
            note["finite"] and all(bool(t.isfinite().all()) for t in tensors)
            for tensors, note in found
        )
        if not self._agreed(here):
            self._give_up(courier)
            report = EpochReport(self._epoch, waited, False, "the accelerators are gone")
        elif self._checkpoint is None:
            report = EpochReport(self._epoch, waited, False, "other parameters train now")
        elif not self._agreed(sound):
            if self._first_time("eigenpairs"):
                self._warn(
                    f"the accelerators' eigenpairs of epoch {self._epoch} are not finite; the base "
                    f"goes on alone until they are"
                )
            self._failures += 1
            report = EpochReport(self._epoch, waited, False, "the eigenpairs are not finite")
        else:
            report = self._finish(courier, found, waited)
        self.epochs.append(report)
        self._checkpoint = self._sum = None
        self._epoch, self._epoch_step = self._epoch + 1, 0

    def _await(self, courier: Courier, name: str, begun: float) -> Message | None:
        with record_function("second_order.wait"):
            return courier.wait(name, lambda: time.monotonic() - begun > self._patience)

    def _agreed(self, mine: bool) -> bool:
        return self._world.all_agree(mine, self.param_groups[0]["params"][0].device)

    def _give_up(self, courier: Courier) -> None:
        """Go on as the base alone."""
        self._warn(
            f"the accelerators have left, died, or not answered in {self._patience:g} s: "
            f"{type(self._base).__name__} goes on alone"
        )
        self._helped, self._patience = False, 0.1  # there is nobody to say goodbye to
        courier.close(self._patience)

    def _finish(self, courier: Courier, found: Sequence[Message], waited: float) -> EpochReport:
        assert self._checkpoint is not None
        assert self._sum is not None
        (values, residuals, _), note = found[0]
        self._found = values, residuals
        self._refreshes, self._products = self._refreshes + 1, int(note["products"])
        self._total_products += self._products
        self._refreshed_at = self._steps + 1 - self._epoch_steps
        rows = torch.cat([t[2] for t, _ in found], dim=1).to(self._checkpoint.device, self._dtype)
        before = self._flat()
        adds = self._final_update == "additive"
        after = updated(
            before,
            None if adds else self._checkpoint,
            self._sum / min(ADDED_STEPS, self._epoch_steps) if adds else self._sum,
            ColumnBasis(rows, self._chunks, self._world, len(values)),
            newton_rates(values, self._options.eigenvalue_floor),
            self._chunks,
            [self._newton_scale(group) for group in self.param_groups],
        )
        if self._final_update != "guarded":
            self._subject().write(after)
            return EpochReport(self._epoch, waited, True, products=self._products)
        return self._ask(courier, before, after, waited)

    def _ask(self, courier: Courier, before: Tensor, after: Tensor, waited: float) -> EpochReport:
        """Make the update if the loss of the accelerators' batches does not rise by it."""
        begun = time.monotonic()
        name = f"verdict/{self._request}/{self._world.rank}"
        courier.expect(name)
        if self._world.rank == 0:
            for a in range(len(self._roles.helpers)):
                courier.post(f"try/{self._request}/{a}", [before, after])
        message = self._await(courier, name, begun)
        waited += time.monotonic() - begun
        if not self._agreed(message is not None):
            self._give_up(courier)
            return EpochReport(self._epoch, waited, False, "the accelerators are gone")
        assert message is not None
        old, new = (math.nan if x is None else float(x) for x in message[1]["losses"])
        better = new <= old
        if better:
            self._subject().write(after)
        reason = "" if better else "the loss of the accelerators' batches would have risen"
        return EpochReport(self._epoch, waited, better, reason, old, new, self._products)

    @property
    def curvature(self) -> CurvatureReport:
        """The eigenvalues that came last, and what they took."""
        report = super().curvature
        if self._found is None:
            return report
        return replace(report, eigenvalues=self._found[0], residuals=self._found[1])

    # ------------------------------------------------------------------------------- accelerator

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; what an accelerator does instead of training.

        Args:
            batches: Taken one for each epoch's eigenpairs, from the start again when they end.
            loss_fn: The loss of a batch, or (loss, number of examples); no ``backward``.

        Returns:
            How many epochs' eigenpairs have been computed.

        Raises:
            SecondOrderError: On a worker.
            CurvatureError: If the loss cannot be evaluated or differentiated twice.
            ValueError: If there is no batch.
        """
        if self._role == "worker":
            raise SecondOrderError(
                f"rank {self._world.rank} is a worker: it trains, and serve() is for the ranks "
                f"whose optimizer.role is 'accelerator'"
            )
        if self._accelerator is None or self._courier is None:
            return 0
        before = self._accelerator.answered
        with torch.no_grad():
            self._help(closures_of(batches, loss_fn), lambda courier: False)
        if not (self._closed or self._courier.closed_there):
            self._warn("the workers have not been heard of any more: serve() returns")
        return self._accelerator.answered - before

    def _help(self, closures: Iterator[Any], enough: Callable[[Courier], bool]) -> None:
        if self._accelerator is None or self._closed:
            return
        self._follow_layout()
        self._accelerator.help(self._subject(), closures, enough)

    def _subject(self) -> Subject:
        assert self._layout is not None
        return Subject(
            self._layout.params,
            self._chunks,
            self._dtype,
            self._model if self._knows_modules else None,
            -1.0 if self.param_groups[0].get("maximize") else 1.0,
        )

    # --------------------------------------------------------------------------------- the rest

    def close(self) -> None:
        """Say goodbye: accelerators return from serve(), workers go on as the base alone."""
        if self._courier is not None:
            self._courier.close(self._patience)
            if self._store is not None and self._courier.closed_there:  # others still listen to it
                await_goodbyes(self._store, self._everybody, min(self._patience, FAREWELL_SECONDS))
        self._helped = False
        super().close()

    def __enter__(self) -> MRDHO2:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _vector_changed(self) -> None:
        super()._vector_changed()
        if self._checkpoint is not None:
            self._warn("the parameters that train have changed: this epoch has no final update")
            self._checkpoint = self._sum = None

    def _counts(self) -> dict[str, float]:
        return {**super()._counts(), "epoch": self._epoch, "epoch_step": self._epoch_step}

    def _curvature_state(self) -> dict[Tensor, dict[str, Any]]:
        parts = super()._curvature_state()
        if self._courier is None or self._layout is None or not self._layout.params:
            return parts
        start, total = self._checkpoint, self._sum
        if start is None or total is None:
            if not is_sharded_checkpoint():
                return parts
            start = total = torch.zeros(self._layout.size, dtype=self._dtype)
        vectors = vector_parts({CHECKPOINT: start, SUM: total}, self._layout.params)
        return {p: {**parts.get(p, {}), **vectors[p]} for p in self._layout.params}

    def _adopt_curvature(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        super()._adopt_curvature(saved)
        assert self._layout is not None
        for part in saved.values():
            self._epoch = part.get("epoch", 0)
            self._epoch_step = part.get("epoch_step", 0)
        self._asked, self._checkpoint, self._sum = -1, None, None
        if self._helped and self._courier is not None:  # of what is under way
            for name in self._expected("pairs"):
                self._courier.forget(name)
        if self._epoch_step:
            params, dtype = self._layout.params, self._dtype
            self._checkpoint = load_vector(saved, CHECKPOINT, params, dtype)
            self._sum = load_vector(saved, SUM, params, dtype)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_courier", "_store", "_accelerator", "_helped"):  # a copy talks to nobody
            state.pop(name, None)
        return state | {
            "_courier": None,
            "_accelerator": None,
            "_closed": state["_closed"] or self._courier is not None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._divided and self._world.unpickled and self._world.size == self._roles.size:
            self._world = self._roles.team(self._world)
