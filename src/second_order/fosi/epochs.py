"""MRDHO2: what a rank does, by its role, and a worker's epochs.

    helper_ranks=0, or one process   Divided itself: DHO2 with an interval of an epoch
    the first P - A ranks            Worker: the base, and a final update at the end of each epoch
    the last A ranks                 Accelerating (`accelerator.py`): eigenpairs for the workers

    begin   c <- w, p <- 0; worker 0 sends c and what does not train; all expect the pairs at c
    add     p <- p + g, every step
    end     w <- w − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w − c)]; "guarded" first asks for the losses

The first `warmup_steps` are of no epoch. The workers agree on each of these, so that their weights
stay equal. All ranks keep the counts of a checkpoint about the epoch under way.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from second_order.checkpoint.caller import is_checkpointing
from second_order.checkpoint.saved import SavedPart
from second_order.distributed.fsdp import is_dtensor
from second_order.distributed.helper_link import (
    HelperLink,
    Message,
    WaitTimer,
    close_links,
    pack_by_dtype,
)
from second_order.distributed.roles import Role, Roles, assign_roles, sharding_error
from second_order.fosi.eigenpairs import Closures
from second_order.fosi.state import EPOCH_START, GRADIENT_SUM, counts_of, find_part, same_params
from second_order.fosi.subspace import Basis, inverse_magnitudes
from second_order.fosi.update import FOSICurvature, group_alphas
from second_order.lanczos.spectrum import lanczos_dtype
from second_order.optimizers.config import EpochOptions
from second_order.reporting.summary import EpochReport
from second_order.training.context import Training
from second_order.training.curvature import PendingAverage
from second_order.training.helpers import split_into_roles
from second_order.utils.stages import stage

__all__ = ["LEAST_FALL", "Divided", "Worker", "answers", "final_update", "overwrite", "refusal"]

# Share by which the loss of the accelerators' batch must fall for "guarded". Smaller
# falls on one batch at one moment tell little of where training ends.
LEAST_FALL = 0.5
REMEMBERED = 1000  # number of reports kept
GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"


class Divided(FOSICurvature):
    """MRDHO2 on one process; without accelerators each computes eigenpairs once an epoch."""

    options: EpochOptions
    roles: Roles
    role: Role = "worker"
    refreshes = True  # whether this process computes eigenpairs for itself

    def __init__(self, training: Training, options: EpochOptions, closure: Closures | None) -> None:
        super().__init__(training, options, closure, refreshes=self.refreshes)
        self.epoch = 0  # the epoch under way
        self.epoch_step = 0  # how many of its steps are taken
        self.links: Sequence[HelperLink] = ()  # to the ranks of the other role
        # Workers wait until they agree on what has come: ``waited`` is long on all where one waits.
        self.reports: deque[EpochReport] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        """Assign roles, if some are left to train, and link workers and accelerators."""
        training, options = self.training, self.options
        size = training.world.size
        self.roles = assign_roles(size, options.helper_ranks, "accelerator", training.under_ddp)
        super().begin()
        if not self.refreshes:
            self.links = split_into_roles(training, self.roles, options.helper_timeout)
        elif options.wanted:
            training.warn(
                f"MRDHO2 with {size} process{'es' if size > 1 else ''} and "
                f"helper_ranks={options.helper_ranks}: nobody computes eigenpairs on the side, so "
                f"each process stops for them every {options.epoch_steps} steps, as DHO2 does"
            )

    def replan(self) -> None:
        """Check that changed parameters are still one vector, whole where there are helpers."""
        super().replan()
        if self.links and any(map(is_dtensor, self.training.trainable_params())):
            raise ValueError(sharding_error(self.training.name, "accelerator"))

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        return [
            *super().fingerprint_values(),
            ("epoch and its steps", (self.epoch, self.epoch_step)),
            ("accelerators at work", len(self.links)),
        ]

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        return {**super().counts(), "epoch": self.epoch, "epoch_step": self.epoch_step}

    def metrics(self) -> dict[str, float]:
        """Numbers to log, those of the epoch under way and of the last that ended among them."""
        last = self.reports[-1] if self.reports else None
        return {
            **super().metrics(),
            "epoch/number": float(self.epoch),
            "epoch/waited": math.nan if last is None else last.waited,
            "epoch/applied": math.nan if last is None else float(last.applied),
        }

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, eigenpairs, and the place in the epochs."""
        super().load(saved)
        counts = counts_of(saved)
        self.epoch = counts.get("epoch", 0)
        self.epoch_step = counts.get("epoch_step", 0)


@dataclass(frozen=True)
class EpochSums:
    """What an epoch's final update is made from, flat."""

    start: Tensor  # c
    total: Tensor  # p, which gradients are added to in place


class Worker(Divided):
    """Trains by the base, and updates by others' eigenpairs at the end of each epoch."""

    refreshes = False

    def __init__(self, training: Training, options: EpochOptions, closure: Closures | None) -> None:
        super().__init__(training, options, closure)
        self.sums: EpochSums | None = None  # None for no final update
        self._received: tuple[Tensor, Tensor] | None = None  # û and residuals of the last pairs
        self._asked = -1  # the epoch whose eigenpairs are under way
        self._request = -1  # number of the message with these
        self._taken = 0  # steps taken with this object

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """û and the residuals of the last eigenpairs that came."""
        return self._received or super().eigenvalues()

    def handle_changed_params(self) -> None:
        """Drop the final update: other parameters train now than at the epoch's start."""
        if self.sums is not None:
            self.training.warn(
                "the parameters that train have changed: this epoch has no final update"
            )
            self.sums = None
            self.training.publish()

    def close(self) -> None:
        """Shut down the links to the accelerators, and go on as the base alone."""
        self._part(self.options.helper_timeout)

    def _part(self, patience: float) -> None:
        close_links(self.links, patience)
        self.links = ()
        self.sums = None

    # ------------------------------------------------------------------------------------ state

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter, and whether c and p are."""
        return {**super().counts(), "epoch_sums": float(self.sums is not None)}

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts; with the first one's c and p, or room to read them into."""
        parts = super().state()
        vector = self.flat_params
        sums = self.sums
        if parts and sums is None and is_checkpointing(part=True):
            room = torch.zeros(vector.size, dtype=vector.dtype, device=self.training.device)
            sums = EpochSums(room, room.clone())
        if parts and sums is not None:
            parts[vector.params[0]] |= {EPOCH_START: sums.start, GRADIENT_SUM: sums.total}
        return parts

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Go on where a checkpoint was made, with its c and p, without pairs that are under way."""
        self._asked = -1
        self.sums = None
        super().load(saved)
        part = find_part(saved, EPOCH_START)
        if part is None or not (self.links and self.epoch_step and part["epoch_sums"]):
            return
        params = self.flat_params.params
        if same_params(saved, params):
            start = part[EPOCH_START].to(self.training.device, lanczos_dtype(params))
            total = part[GRADIENT_SUM].to(self.training.device, self.flat_params.dtype)
            self.sums = EpochSums(start, total.clone())

    # ---------------------------------------------------------------------------------- an epoch

    @property
    def _warming_up(self) -> bool:
        """Whether the base steps alone, before the first epoch."""
        begun = self.epoch or self.epoch_step
        return not begun and self.training.steps < (self.options.warmup_steps or 0)

    def precondition(self, pending: PendingAverage) -> None:
        """Add the step's gradients to p."""
        super().precondition(pending)
        if not self.links or self._warming_up:
            return
        if self._asked != self.epoch:
            self._begin()
        if self.sums is not None:
            self.sums.total.add_(self.flat_params.read([p.grad for p in self.flat_params.params]))

    def _begin(self) -> None:
        """Send c to the accelerators; an epoch from a checkpoint has c and p already."""
        elsewhere = []
        if self.sums is None or self.epoch_step == 0:
            start = flat_copy(self.flat_params.params)
            self.sums = EpochSums(start, torch.zeros_like(start, dtype=self.flat_params.dtype))
        else:
            elsewhere = [self.sums.start]
        self._asked = self.epoch
        self._send_request(elsewhere, do="compute", epoch=self.epoch)

    def _send_request(self, elsewhere: Sequence[Tensor], **note: Any) -> None:
        """Number a request; send it as worker 0, with the model and another point than its own."""
        self._request += 1
        if self.training.world.rank == 0:
            tensors = self.training.model_tensors()
            model = pack_by_dtype(tensors)
            note["request"] = self._request
            note["train"] = [tensor.requires_grad for tensor in tensors]
            note["size"] = self.flat_params.size
            note["model"] = len(model)
            for link in self.links:
                link.send([*model, *elsewhere], **note)

    def finish_step(self) -> None:
        """Count a step of the base; after the epoch's last, end it."""
        if not self.links:
            return
        self.epoch_step += not self._warming_up
        self._taken += 1
        if self.epoch_step >= self.options.epoch_steps:
            with stage("final_update"), self.flat_params.without_autocast():
                report = self._end()
            self.reports.append(report)
            if "not finite" in report.reason and self.training.is_first_warning("not finite"):
                self.training.warn(f"epoch {self.epoch} has no final update: {report.reason}")
            self.sums = None
            self.epoch += 1
            self.epoch_step = 0
            if report.reason == GONE:
                self._part(0.1)  # no accelerator is left that messages would reach
            self.training.publish()  # frees c and p
        if self.training.world.rank == 0:
            for link in self.links:
                link.send([], do="step", steps=self._taken)

    def _end(self) -> EpochReport:
        """End the epoch, and use its eigenpairs if every worker has finite ones."""
        training, options, vector = self.training, self.options, self.flat_params

        # Wait for the eigenpairs at c.
        messages, waited = answers(training, self.links, self._request, options.helper_timeout)
        report = EpochReport(self.epoch, waited, applied=False)
        if not messages:
            return replace(report, reason=GONE)
        if self.sums is None:
            return replace(report, reason="other parameters train now")
        note = messages[0].note
        finite = all(message.note["finite"] for message in messages)  # on all workers or on none
        products = int(note["products"]) if finite else 0
        first = training.steps + 1 - options.epoch_steps
        self.pairs.count_refresh(first, products, failed=not finite)
        if not finite:
            return replace(report, reason=UNSOUND)
        values, residuals, _ = messages[0].tensors
        self._received = values, residuals
        report = replace(report, products=products)

        # The final update, equation 17.
        parts = [message.tensors[2].to(training.device, vector.dtype) for message in messages]
        before = flat_copy(vector.params)
        change, sound = final_update(
            before - self.sums.start,
            self.sums.total,
            Basis(torch.cat(parts, -1), len(values), False, training.world, vector.group_spans),
            inverse_magnitudes(values, options.eigenvalue_floor),
            group_alphas(options.newton_scale, training),
        )
        if not bool(sound):  # the same on all workers, as its sums are
            return replace(report, reason="the final update is not finite")

        # "guarded": only if the loss of the accelerators' batches halves with it.
        after = before + change
        if options.final_update == "guarded":
            report = self._judged(report, after)
        if not report.reason:
            overwrite(vector.params, after)
        return replace(report, applied=not report.reason)

    def _judged(self, report: EpochReport, after: Tensor) -> EpochReport:
        """The report with the accelerators' losses, and the reason to leave the update out."""
        self._send_request([after], do="judge")
        timeout = self.options.helper_timeout
        messages, waited = answers(self.training, self.links, self._request, timeout)
        report = replace(report, waited=report.waited + waited)
        if not messages:
            return replace(report, reason=GONE)
        before, with_update = messages[0].note["losses"]
        return replace(
            report,
            reason=refusal(before, with_update),
            loss_before=before,
            loss_after=with_update,
        )


def flat_copy(params: Sequence[Tensor]) -> Tensor:
    """A copy of parameters as one vector, which loses nothing of them."""
    dtype = lanczos_dtype(params)
    parts = [p.detach().reshape(-1).to(dtype) for p in params]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device="cpu")


def overwrite(params: Sequence[Tensor], flat: Tensor) -> None:
    """Set parameters to those of a vector."""
    parts = flat.split([p.numel() for p in params])
    for p, part in zip(params, parts, strict=True):
        p.copy_(part.view(p.shape))


def answers(
    training: Training, links: Sequence[HelperLink], request: int, seconds: float
) -> tuple[list[Message], float]:
    """Every accelerator's answer to a request, and the seconds waited; a collective of workers.

    Returns no answers if one is missing on any worker: the accelerators are lost then, and the base
    trains alone.
    """
    begun = time.monotonic()
    patience = WaitTimer(seconds)
    with stage("wait"):
        messages = [_answer(link, request, patience) for link in links]
    found = [message for message in messages if message is not None]
    if training.world.all_agree(len(found) == len(links), training.device):
        return found, time.monotonic() - begun
    training.warn(
        f"the accelerators have left, died, or not answered in {seconds:g} s{links[0].reason}: "
        f"{training.base_name} goes on alone"
    )
    return [], time.monotonic() - begun


def _answer(link: HelperLink, request: int, patience: WaitTimer) -> Message | None:
    """Wait for the answer to a request, and drop those to earlier ones: a checkpoint was loaded."""
    message = link.wait(patience.is_expired)
    while message is not None and message.note["request"] < request:
        message = link.wait(patience.is_expired)
    return message


def refusal(before: float, after: float) -> str:
    """Why "guarded" does not make an update between these losses of batches; "" if it does."""
    what = "the loss of the accelerators' batches"
    if not (math.isfinite(before) and math.isfinite(after)):
        return f"{what} is not finite, without the update or with it"
    falls = after < before and after <= before - LEAST_FALL * abs(before)
    return "" if falls else f"{what} would not have fallen by {LEAST_FALL:.0%}"


def final_update(
    moved: Tensor,
    total: Tensor,
    basis: Basis,
    rates: Tensor,
    scales: Sequence[float | Tensor],
) -> tuple[Tensor, Tensor]:
    """−V̂ [α |û|⁻¹ ∘ V̂ᵀp + V̂ᵀ(w_E − c)], equation 17 of MR-DHO2.

    p is ``total``, ``(n,)``, and w_E − c is ``moved``; α of each group is in ``scales``. Returns
    the update, zeros if it is not finite, and whether it is.
    """
    newton = basis.coefficients(total) * rates[basis.local_slice].to(total)
    inside = basis.coefficients(moved.to(total))
    steps = [-(scale * newton + inside) for scale in scales]
    sound = basis.sum_over_vectors(torch.stack(steps).sum()).isfinite()
    steps = [torch.where(sound, step, 0.0) for step in steps]
    return basis.add_combination(torch.zeros_like(total), steps), sound
