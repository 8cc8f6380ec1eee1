"""MRDHO2: some processes compute eigenpairs while the others train ([D], MR-DHO2).

workers                                        accelerators, meanwhile
at the start of an epoch:  c = w, sent    ->   w = c; û, V̂ <- Lanczos on their own batches
E steps:  w <- w + Base(g),  p <- p + g   <-   worker j gets its vectors V̂ⱼ, and ûⱼ
at the end:  w <- w_E − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w_E − c)]      one all-reduce of n

The last line is the paper's equation 17. It replaces what the base has done in the span of V̂ by one
Newton step on the summed gradient, which is stable only while α (1 − (1 − ηu)^E) / (ηu) < 2 for
each eigenvalue u at a learning rate η. So "guarded" asks the accelerators for the loss without and
with it, and makes it where that falls by half; "additive" keeps w_E and adds a Newton step on the
mean of the last gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from second_order.contract.saved import SavedPart
from second_order.distributed.checkpointing import is_sharded_checkpoint
from second_order.distributed.mailbox import Courier, await_connections, await_goodbyes
from second_order.distributed.messages import refused_line
from second_order.distributed.roles import Role, Roles, assign_roles
from second_order.distributed.store import Store, open_store
from second_order.errors import SecondOrderError
from second_order.fosi.accelerator import Accelerator, Batches, Subject
from second_order.fosi.checkpoint import START, SUM, counts_of, load_vector, vector_parts
from second_order.fosi.options import FOSIOptions
from second_order.fosi.worker_epochs import UNSOUND, Epochs, FinalUpdate
from second_order.lanczos.hvp import LossFn, ProductMode
from second_order.optimizers.base import ParamsOrModel, SecondOrderOptimizer
from second_order.optimizers.fosi import FOSIOptimizer
from second_order.options import (
    Schedule,
    check_base,
    check_choice,
    check_count,
    check_timeout,
    check_whole,
    own_keywords,
)
from second_order.report import CurvatureReport, EpochReport, Summary

__all__ = ["MRDHO2", "FinalUpdate"]

FAREWELL_SECONDS = 5.0  # that the store outlives its host's own goodbye at most


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
            batches falls by at least half with it. "additive" adds a Newton step on the mean of
            the last gradients to what the base has done.
        helper_timeout: Seconds without a sign of life, or of waiting at the end of an epoch (for
            eigenpairs, and again for the verdict of "guarded"), after which accelerators are given
            up.
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
        check_timeout("helper_timeout", helper_timeout)
        check_whole("accelerators", accelerators, 0, "0 for none")
        check_base(base, SecondOrderOptimizer)
        self._asked_helpers, self._final_update = accelerators, final_update
        self._epoch_steps, self._judged = epoch_steps, final_update == "guarded"
        self._patience = float(helper_timeout)
        self._role: Role = "worker"
        self._accelerator: Accelerator | None = None
        self._epochs = Epochs(
            epoch_steps, final_update, eigenvalue_floor, self._patience, base.__name__, self._warn
        )
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
        if self._roles.helpers and not self._options.wanted:
            self._warn(
                f"largest=0 and smallest=0: the {accelerators} accelerators have nothing to do, so "
                f"all {everybody.size} processes train"
            )
        if self._roles.helpers and self._options.wanted:
            self._divide(everybody)
        elif self._options.wanted:
            self._warn(
                f"MRDHO2 with {everybody.size} process{'es' * (everybody.size > 1)} and "
                f"accelerators={accelerators}: nobody computes eigenpairs on the side, so each "
                f"process stops for them every {epoch_steps} steps, as DHO2 does"
            )

    def _check_processes(self) -> None:
        super()._check_processes()
        count, asked = self._world.size, self._asked_helpers
        self._roles = assign_roles(count, asked, "accelerator", self._under_ddp)

    def _described_options(self) -> str:
        mine = f"{self._asked_helpers} {self._epoch_steps} {self._final_update}"
        return f"{super()._described_options()} {mine} {self._patience}"

    def _divide(self, everybody: Any) -> None:
        """Give every process its role, and workers and accelerators a way to talk."""
        roles = self._roles
        self._role, self._divided = roles.of(everybody.rank), True
        first = roles.helpers[0]
        store, address = open_store(everybody, first, self._patience)
        self._everybody = [f"{roles.of(r)} {r}" for r in range(everybody.size)]
        self._world = roles.team(everybody, self._patience)
        self._averages = self._averages and self._world.size > 1
        name = self._everybody[everybody.rank]
        peer = self._everybody[0 if everybody.rank == first else first]
        courier = Courier(address, name, peer, self._patience)
        await_connections(everybody, [courier], [store])
        self._courier, self._store = courier, store
        self._tell_of_refused()
        if self._role == "worker":
            wanted = self._options.largest + self._options.smallest
            self._epochs.connect(courier, self._world, len(roles.helpers), wanted)
        else:
            self._outline.compared = False
            self._accelerator = Accelerator(
                courier,
                self._world,
                self._options,
                workers=len(roles.workers),
                judges=self._judged,
            )

    _divided = False  # whether there have been any
    _roles: Roles
    _courier: Courier | None = None
    _store: Store | None = None

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
        if self._role == "worker" or self._initialises_state():
            return super().step(closure, curvature_closure=curvature_closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._steps += 1
        chosen = curvature_closure if curvature_closure is not None else self.curvature_closure
        if self._accelerator is not None:
            closure_at = partial(self._chosen, self._no_closure if chosen is None else chosen)
            device = self._whole_model()[0].device
            with torch.no_grad():
                self._accelerator.help_for_a_step(self._subject_at, closure_at, device)
            self._tell_whom_it_has_lost(self._accelerator)
        return loss

    @staticmethod
    def _chosen(closure: Any, epoch: int) -> Any:
        return closure

    def _facts(self) -> list[tuple[str, Any]]:
        epochs = self._epochs
        place = epochs.number, epochs.step, epochs.helped
        return [*super()._facts(), ("epoch, its steps, accelerators at work", place)]

    def _computes_pairs(self) -> bool:
        return not self._divided and super()._computes_pairs()

    def _transform_gradients(self, average: Callable[[], None]) -> None:
        super()._transform_gradients(average)
        if self._epochs.helped and self._layout is not None:
            self._epochs.add(self._layout.params, self._subject)

    def _base_step(self) -> None:
        stepping = self._stepping
        super()._base_step()
        if not (stepping and self._epochs.helped):
            return
        report = self._epochs.stepped(self._subject, self._scales)
        if report is not None:
            self._count(report)
            self._let_state_go()
            self._tell_of_refused()

    def _scales(self) -> list[float | Tensor]:
        return [self._newton_scale(group) for group in self.param_groups]

    def _count(self, report: EpochReport) -> None:
        """What :attr:`curvature` tells."""
        self._failures += report.reason == UNSOUND
        if report.products:
            self._refreshes, self._products = self._refreshes + 1, report.products
            self._total_products += report.products
            self._refreshed_at = self._steps + 1 - self._epoch_steps

    @property
    def curvature(self) -> CurvatureReport:
        """The eigenvalues that came last, and what they took."""
        report, found = super().curvature, self._epochs.found
        if found is None:
            return report
        return replace(report, eigenvalues=found[0], residuals=found[1])

    @property
    def refused_messages(self) -> int:
        """Messages of this process's that were malformed, and connections without the key."""
        messages = 0 if self._courier is None else self._courier.refused
        return messages + (0 if self._store is None else self._store.refused)

    def _tell_of_refused(self) -> None:
        if self.refused_messages and self._first_time("refused"):
            assert self._courier is not None
            self._warn(refused_line(self._courier.complaint))

    def summary(self) -> Summary:
        """As DHO2's, with how many messages have been refused."""
        return replace(super().summary(), refused=self.refused_messages)

    @property
    def epochs(self) -> Sequence[EpochReport]:
        """What the last 1,000 epochs have come to, on a worker."""
        return self._epochs.reports

    # ------------------------------------------------------------------------------- accelerator

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute eigenpairs until the workers close; what an accelerator does instead of training.

        Args:
            batches: Taken one for each epoch's eigenpairs, from the start again when they end; if
                they have a length, an epoch's is its number modulo that, after a resume too.
            loss_fn: The loss of a batch, or (loss, number of examples); no ``backward``.

        Returns:
            How many epochs' eigenpairs have been computed.

        Raises:
            SecondOrderError: On a worker; and if another accelerator has failed.
            CurvatureError: If the loss cannot be evaluated or differentiated twice.
            ValueError: If there is no batch.
        """
        if self._role == "worker":
            raise SecondOrderError(
                f"rank {self._world.rank} is a worker: it trains, and serve() is for the ranks "
                f"whose optimizer.role is 'accelerator'"
            )
        if self._accelerator is None:
            return 0
        before = self._accelerator.answered
        closure_at, device = Batches(batches, loss_fn).closure, self._whole_model()[0].device
        with torch.no_grad():
            self._accelerator.help(self._subject_at, closure_at, device)
        self._tell_whom_it_has_lost(self._accelerator)
        return self._accelerator.answered - before

    def _tell_whom_it_has_lost(self, accelerator: Accelerator) -> None:
        self._tell_of_refused()
        if accelerator.lost and self._first_time("lost"):
            self._warn(f"{accelerator.lost}: this accelerator has nothing more to do")

    def _subject(self) -> Subject:
        assert self._layout is not None
        return Subject(
            self._layout.params,
            self._chunks,
            self._dtype,
            self._model if self._knows_modules else None,
            -1.0 if self.param_groups[0].get("maximize") else 1.0,
            self._whole_model(),
        )

    def _subject_at(self, train: Sequence[bool]) -> Subject:
        """What trains on the workers, and from now on here."""
        whole = self._whole_model()
        if len(train) != len(whole):
            raise SecondOrderError(
                f"the workers have {len(train)} parameters and buffers, this accelerator "
                f"{len(whole)}: build and change the same model on every rank"
            )
        for tensor, trains in zip(whole, train, strict=True):
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)
        self._follow_layout()
        return self._subject()

    def _whole_model(self) -> list[Tensor]:
        params = [p for group in self.param_groups for p in group["params"]]
        return list(dict.fromkeys([*self._model.parameters(), *params, *self._model.buffers()]))

    # --------------------------------------------------------------------------------- the rest

    def close(self) -> None:
        """Say goodbye: accelerators return from serve(), workers go on as the base alone.

        It takes 5 seconds at most, or ``helper_timeout``, where an accelerator has been stopped.
        """
        self._epochs.close()
        if self._accelerator is not None:
            self._accelerator.close(self._patience)
            if self._store is not None and self._accelerator.dismissed:  # others still listen to it
                await_goodbyes(self._store, self._everybody, min(self._patience, FAREWELL_SECONDS))
        super().close()

    def _vector_changed(self) -> None:
        super()._vector_changed()
        if self._epochs.start is not None:
            self._warn("the parameters that train have changed: this epoch has no final update")
            self._epochs.let_go()
            self._let_state_go()

    def _let_state_go(self) -> None:
        """Of c and p, when the epochs have."""
        if self.state:
            self._share_state()

    def _counts(self) -> dict[str, float]:
        epochs = self._epochs
        here = {"epoch": epochs.number, "epoch_step": epochs.step}
        return {**super()._counts(), **here, "epoch_sums": float(epochs.start is not None)}

    def _curvature_state(self) -> dict[Tensor, dict[str, Any]]:
        parts = super()._curvature_state()
        if not self._divided or self._layout is None or not self._layout.params:
            return parts
        start, total = self._epochs.start, self._epochs.total
        if start is None or total is None:
            if not is_sharded_checkpoint():
                return parts
            start = total = torch.zeros(self._layout.size, dtype=self._dtype)
        vectors = vector_parts({START: start, SUM: total}, self._layout.params)
        return {p: {**parts.get(p, {}), **vectors[p]} for p in self._layout.params}

    def _adopt_curvature(self, saved: Mapping[Tensor, SavedPart]) -> None:
        super()._adopt_curvature(saved)
        assert self._layout is not None
        counts = counts_of(saved)
        step = counts.get("epoch_step", 0)
        self._epochs.resume(counts.get("epoch", 0), step)
        if step and counts.get("epoch_sums", 1.0) and self._epochs.helped:
            params = self._layout.params
            self._epochs.start = load_vector(saved, START, params, self._layout.dtype)
            self._epochs.total = load_vector(saved, SUM, params, self._dtype)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_store", "_courier"):  # a copy talks to nobody
            state.pop(name, None)
        return state | {"_accelerator": None, "_closed": state["_closed"] or self._divided}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._divided and self._world.unpickled and self._world.size == self._roles.size:
            self._world = self._roles.team(self._world, self._patience)
