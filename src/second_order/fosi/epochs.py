"""MRDHO2 by role: what a rank does, and the epochs of a worker.

    helper_ranks=0, or one process   EpochCurvature: DHO2 with an interval of one epoch
    the first P - A ranks            WorkerCurvature: the base; a final update per epoch
    the last A ranks                 AcceleratorCurvature (`accelerator.py`): eigenpairs

    epoch's first step   c <- w, p <- 0; worker 0 sends the accelerators c and the model
    every step           p <- p + g
    epoch's last step    w <- w − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w − c)],
                         the final update; with "guarded", only if the loss of the
                         accelerators' batches halves

V̂ⱼ, ûⱼ are the eigenpairs at c that worker j received. The first ``warmup_steps``
belong to no epoch. The workers agree on whether an update is made, so that their
parameters stay equal. A checkpoint stores the running epoch's counts on all ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from second_order.distributed.world import unflatten_into
from second_order.fosi.flat_params import FlatParams
from second_order.fosi.state import (
    EPOCH_START,
    GRADIENT_SUM,
    counts_of,
    find_part,
    same_params,
)
from second_order.fosi.subspace import Basis, inverse_magnitudes
from second_order.fosi.update import FOSICurvature, group_alphas
from second_order.lanczos.closure import Closures
from second_order.lanczos.hvp import lanczos_dtype
from second_order.optimizers.config import EpochOptions
from second_order.reporting.summary import EpochReport
from second_order.training.context import Training
from second_order.training.curvature import PendingAverage
from second_order.training.helpers import split_into_roles
from second_order.utils.stages import stage

__all__ = [
    "MIN_LOSS_FALL",
    "EpochCurvature",
    "WorkerCurvature",
    "collect_answers",
    "compute_final_update",
    "rejection_reason",
]

# With "guarded", the fraction by which the loss of the accelerators' batches must fall.
# A smaller fall on one batch says little about the loss at the end of training.
MIN_LOSS_FALL = 0.5

MAX_REPORTS = 1000  # number of reports that are kept
LOST_CLOSE_SECONDS = 0.1  # no accelerator is left that messages could still reach

# Reasons for which an epoch has no final update.
LOST_CONTACT = "lost contact with the accelerators"
PAIRS_NOT_FINITE = "the eigenpairs are not finite"
UPDATE_NOT_FINITE = "the final update is not finite"
LOSS_NOT_FINITE = (
    "the loss of the accelerators' batches is not finite, without the update or with it"
)
NOT_FINITE = (PAIRS_NOT_FINITE, UPDATE_NOT_FINITE, LOSS_NOT_FINITE)
NO_SUMS = (
    "the gradients were not summed over the whole epoch: no parameter trained, the set of "
    "trainable parameters changed, or the epoch was resumed from a checkpoint without the sums"
)


@dataclass(frozen=True)
class EpochSums:
    """The flat vectors that an epoch's final update is computed from."""

    start: Tensor  # c, the parameters at the first step
    gradient_sum: Tensor  # p, which grows in place


def empty_sums(flat_params: FlatParams) -> EpochSums:
    """Return zeros of the shapes and dtypes of an epoch's sums."""
    n = flat_params.size
    start_dtype = lanczos_dtype(flat_params.params)
    # torch loads full state dicts only if all tensors are on one device.
    device = flat_params.params[0].device
    return EpochSums(
        start=torch.zeros(n, dtype=start_dtype, device=device),
        gradient_sum=torch.zeros(n, dtype=flat_params.dtype, device=device),
    )


class EpochCurvature(FOSICurvature):
    """MRDHO2 without accelerators: every process computes eigenpairs once per epoch."""

    options: EpochOptions
    roles: Roles
    role: Role = "worker"

    def __init__(
        self, training: Training, options: EpochOptions, closure: Closures | None
    ) -> None:
        super().__init__(training, options, closure)
        self.epoch = 0  # the running epoch
        self.epoch_step = 0  # number of its steps so far
        self.sums: EpochSums | None = None  # None: the epoch has no final update
        self.links: Sequence[HelperLink] = ()  # to the ranks of the other role
        self.reports: deque[EpochReport] = deque(maxlen=MAX_REPORTS)

    def begin(self) -> None:
        """Assign the roles, and link the workers with the accelerators. Collective."""
        training = self.training
        options = self.options
        size = training.world.size
        self.roles = assign_roles(
            size, options.helper_ranks, "accelerator", training.under_ddp
        )
        super().begin()
        if not self.computes_pairs:
            self.links = split_into_roles(training, self.roles, options.helper_timeout)
        elif options.num_pairs:
            processes = "1 process" if size == 1 else f"{size} processes"
            training.warn(
                f"MRDHO2 with {processes} and helper_ranks={options.helper_ranks} has no "
                f"accelerators, so every process interrupts training every {options.epoch_steps} "
                f"steps to compute eigenpairs, as DHO2 does"
            )

    def replan(self) -> None:
        """Check that changed parameters still make one vector.

        If there are accelerators, FSDP2 must not shard the parameters.
        """
        super().replan()
        if self.links and any(map(is_dtensor, self.training.trainable_params())):
            raise ValueError(sharding_error(self.training.name, "accelerator"))

    def fingerprint_values(self) -> list[tuple[str, Any]]:
        """The values that decide which collectives a step issues, by name."""
        return [
            *super().fingerprint_values(),
            ("epoch and its steps", (self.epoch, self.epoch_step)),
            ("sum of the epoch's gradients", self.sums is not None),
            ("accelerators at work", len(self.links)),
        ]

    def counts(self) -> dict[str, float]:
        """The counts saved with each parameter, and whether c and p are saved."""
        return {
            **super().counts(),
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "epoch_sums": float(self.sums is not None),
        }

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and c and p with the first parameter."""
        parts = super().state()
        sums = self.sums
        if parts and sums is None and is_checkpointing(part=True):
            # torch.distributed.checkpoint can only read into existing tensors.
            sums = empty_sums(self.flat_params)
        if parts and sums is not None:
            first = self.flat_params.params[0]
            parts[first] |= {EPOCH_START: sums.start, GRADIENT_SUM: sums.gradient_sum}
        return parts

    def metrics(self) -> dict[str, float]:
        """Numbers to log, also about the running epoch and the last one."""
        waited = math.nan
        applied = math.nan
        if self.reports:
            waited = self.reports[-1].waited
            applied = float(self.reports[-1].applied)
        return {
            **super().metrics(),
            "epoch/number": float(self.epoch),
            "epoch/waited": waited,
            "epoch/applied": applied,
        }

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the counts, the eigenpairs, and the position in the epoch."""
        super().load(saved)
        counts = counts_of(saved)
        self.epoch = counts.get("epoch", 0)
        self.epoch_step = counts.get("epoch_step", 0)


class WorkerCurvature(EpochCurvature):
    """A worker trains with the base, and updates with the accelerators' eigenpairs."""

    computes_pairs = False

    def __init__(
        self, training: Training, options: EpochOptions, closure: Closures | None
    ) -> None:
        super().__init__(training, options, closure)
        self._last_pairs: tuple[Tensor, Tensor] | None = None  # û and residuals
        # The last epoch that has started, with a request for eigenpairs or without one.
        self._started_epoch = -1
        self._last_request = -1  # its number
        self._num_steps = 0  # by this object; a checkpoint does not change it

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Return û and the residuals of the last eigenpairs that arrived."""
        return self._last_pairs or super().eigenvalues()

    def handle_changed_params(self) -> None:
        """Drop this epoch's final update, because c and p belong to the old vector."""
        if self.sums is not None:
            self.training.warn(
                "the parameters that train have changed, or their dtype, so this epoch has no "
                "final update"
            )
            self._drop_sums()

    def _drop_sums(self) -> None:
        """Free c and p. The epoch then has no final update."""
        if self.sums is not None:
            self.sums = None
            self.training.publish()

    def close(self) -> None:
        """Shut down the links to the accelerators.

        The base trains alone from now on. c and p stay until it takes a step, so that
        a checkpoint that is saved at the end of a script continues the epoch.
        """
        self._disconnect(self.options.helper_timeout)

    def _disconnect(self, timeout: float) -> None:
        close_links(self.links, timeout)
        self.links = ()

    # ---------------------------------------------------------------------------- state

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Load the counts, and c and p. The epoch's eigenpairs are requested again.

        Without c and p, an epoch that has begun has no final update.
        """
        self._started_epoch = -1
        self.sums = None
        super().load(saved)
        part = find_part(saved, EPOCH_START)
        if part is None or not (self.links and self.epoch_step and part["epoch_sums"]):
            return
        flat_params = self.flat_params
        if same_params(saved, flat_params.params):
            device = self.training.device
            start = part[EPOCH_START].to(device, lanczos_dtype(flat_params.params))
            gradient_sum = part[GRADIENT_SUM].to(device, flat_params.dtype)
            self.sums = EpochSums(start, gradient_sum.clone())

    # ------------------------------------------------------------------------- an epoch

    @property
    def _is_warming_up(self) -> bool:
        """Whether the base steps alone, before the first epoch."""
        is_first_step = self.epoch == 0 and self.epoch_step == 0
        return is_first_step and self.training.steps < (self.options.warmup_steps or 0)

    def precondition(self, pending: PendingAverage) -> None:
        """Begin an epoch if one is due, and add the mean gradient to p."""
        super().precondition(pending)
        if not self.links:
            self._drop_sums()  # p would lack the gradient of this step
        if not self.links or self._is_warming_up:
            return
        if self._started_epoch != self.epoch:
            self._begin_epoch()
        if self.sums is not None:
            gradients = [p.grad for p in self.flat_params.local_params]
            self.sums.gradient_sum.add_(self.flat_params.read(gradients))

    def _begin_epoch(self) -> None:
        """Request the eigenpairs at c.

        An epoch that a checkpoint continues has c and p already. If it lacks them, or
        if no parameter trains, the epoch has no final update.
        """
        self._started_epoch = self.epoch
        points = []
        if self.sums is not None:
            points = [self.sums.start]  # the parameters have moved away from c
        elif self.epoch_step == 0 and self.flat_params.params:
            start = flatten_params(self.flat_params.params)
            gradient_sum = torch.zeros_like(start, dtype=self.flat_params.dtype)
            self.sums = EpochSums(start, gradient_sum)
        else:
            return
        self._send_request(points, do="compute", epoch=self.epoch)

    def _send_request(self, points: Sequence[Tensor], **note: Any) -> None:
        """Number a request, and send it from worker 0 with the model.

        Args:
            points: Parameters, ``(n,)``, that replace the model's; empty to keep them.
            note: What to do.
        """
        self._last_request += 1
        if self.training.world.rank != 0:
            return
        tensors = self.training.model_tensors()
        packed_model = pack_by_dtype(tensors)
        note["request"] = self._last_request
        note["train"] = [tensor.requires_grad for tensor in tensors]
        note["size"] = self.flat_params.size
        note["model"] = len(packed_model)
        for link in self.links:
            link.send([*packed_model, *points], **note)

    def finish_step(self) -> None:
        """Count a step of the base, and end the epoch after its last step."""
        if not self.links:
            return
        if not self._is_warming_up:
            self.epoch_step += 1
        self._num_steps += 1
        if self.epoch_step >= self.options.epoch_steps:
            self._end_epoch()
        if self.training.world.rank == 0:
            for link in self.links:
                link.send([], do="step", steps=self._num_steps)

    def _end_epoch(self) -> None:
        """Make the final update and report it, and prepare for the next epoch."""
        training = self.training
        with stage("final_update"), self.flat_params.without_autocast():
            report = self._update_params()
        self.reports.append(report)
        not_finite = report.reason in NOT_FINITE
        if not_finite and training.is_first_warning("not finite"):
            training.warn(f"epoch {self.epoch} has no final update: {report.reason}")

        self.sums = None
        self.epoch += 1
        self.epoch_step = 0
        if report.reason == LOST_CONTACT:
            self._disconnect(LOST_CLOSE_SECONDS)
        training.publish()  # frees c and p

    def _update_params(self) -> EpochReport:
        """Make the final update, if all workers have finite eigenpairs. Collective."""
        training = self.training
        options = self.options
        flat_params = self.flat_params

        if self.sums is None:
            return EpochReport(self.epoch, waited=0.0, applied=False, reason=NO_SUMS)

        # Wait for the eigenpairs at c.
        timeout = options.helper_timeout
        answers = collect_answers(training, self.links, self._last_request, timeout)
        messages = answers.messages
        report = EpochReport(self.epoch, answers.waited, applied=False)
        if not messages:
            return replace(report, reason=LOST_CONTACT)
        # An accelerator sends all workers the same flag.
        finite = all(message.note["finite"] for message in messages)
        products = int(messages[0].note["products"])
        report = replace(report, products=products)
        first_step = training.steps + 1 - options.epoch_steps
        self.count_refresh(first_step, products, failed=not finite)
        if not finite:
            return replace(report, reason=PAIRS_NOT_FINITE)

        # Each accelerator has sent some rows of this worker's vectors.
        values, residuals, _ = messages[0].tensors
        self._last_pairs = values, residuals
        rows = []
        for message in messages:
            vectors = message.tensors[2]
            rows.append(vectors.to(training.device, flat_params.dtype))
        basis = Basis(
            vectors=torch.cat(rows, -1),
            count=len(values),
            by_rows=False,
            world=training.world,
            group_spans=flat_params.group_spans,
        )

        # The final update, equation 17.
        before = flatten_params(flat_params.params)
        update, is_finite = compute_final_update(
            basis,
            displacement=before - self.sums.start,
            gradient_sum=self.sums.gradient_sum,
            inverse_eigenvalues=inverse_magnitudes(values, options.eigenvalue_floor),
            alphas=group_alphas(options.newton_scale, training),
        )
        if not bool(is_finite):  # the same on all workers, because it is all-reduced
            return replace(report, reason=UPDATE_NOT_FINITE)

        # With "guarded", the loss decides.
        after = before + update
        if options.final_update == "guarded":
            report = self._judge_update(report, after)
        if report.reason:
            return report
        unflatten_into(after, flat_params.params)
        return replace(report, applied=True)

    def _judge_update(self, report: EpochReport, after: Tensor) -> EpochReport:
        """Add the accelerators' losses to a report, and the reason for a rejection."""
        self._send_request([after], do="judge")
        timeout = self.options.helper_timeout
        answers = collect_answers(
            self.training, self.links, self._last_request, timeout
        )
        report = replace(report, waited=report.waited + answers.waited)
        if not answers.messages:
            return replace(report, reason=LOST_CONTACT)
        loss_before, loss_after = answers.messages[0].note["losses"]
        return replace(
            report,
            reason=rejection_reason(loss_before, loss_after),
            loss_before=loss_before,
            loss_after=loss_after,
        )


def flatten_params(params: Sequence[Tensor]) -> Tensor:
    """Copy parameters to one vector, in a dtype that represents all of them exactly."""
    dtype = lanczos_dtype(params)
    parts = [p.detach().reshape(-1).to(dtype) for p in params]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device="cpu")


class Answers(NamedTuple):
    """The accelerators' answers to a request."""

    # One from each accelerator; empty if one is missing on any worker.
    messages: list[Message]
    waited: float  # seconds


def collect_answers(
    training: Training, links: Sequence[HelperLink], request: int, timeout: float
) -> Answers:
    """Wait for every accelerator's answer to a request. Collective of the workers.

    If an answer is missing on any worker, all workers warn and return no answers.
    """
    begin = time.monotonic()
    timer = WaitTimer(timeout)
    messages = []
    with stage("wait"):
        for link in links:
            message = link.wait(timer.is_expired)
            # Drop answers to requests from before a checkpoint was loaded.
            while message is not None and message.note["request"] < request:
                message = link.wait(timer.is_expired)
            if message is not None:
                messages.append(message)
    complete = training.world.all_agree(len(messages) == len(links), training.device)
    waited = time.monotonic() - begin
    if complete:
        return Answers(messages, waited)
    training.warn(
        f"Lost contact with the accelerators{links[0].reason}: one of them exited, raised, or did "
        f"not answer in {timeout:g} s. See their logs. {training.base_name} steps alone from now on"
    )
    return Answers([], waited)


def rejection_reason(before: float, after: float) -> str:
    """Return why "guarded" rejects an update between two losses; "" if it does not."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return LOSS_NOT_FINITE
    if after < before and after <= before - MIN_LOSS_FALL * abs(before):
        return ""
    fall = f"{MIN_LOSS_FALL:.0%}"
    return f"the loss of the accelerators' batches would not have fallen by {fall}"


def compute_final_update(
    basis: Basis,
    *,
    displacement: Tensor,
    gradient_sum: Tensor,
    inverse_eigenvalues: Tensor,
    alphas: Sequence[float | Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute −V̂ [α |û|⁻¹ ∘ V̂ᵀp + V̂ᵀ(w_E − c)], equation 17 of MR-DHO2. Collective.

    Args:
        basis: V̂.
        displacement: w_E − c, ``(n,)``.
        gradient_sum: p, ``(n,)``.
        inverse_eigenvalues: |û|⁻¹, ``(r,)``.
        alphas: α of each parameter group.

    Returns:
        The update, ``(n,)``, which is zero if it would not be finite,
        and whether it is finite.
    """
    rates = inverse_eigenvalues[basis.local_slice].to(gradient_sum)
    newton = basis.coefficients(gradient_sum) * rates
    inside = basis.coefficients(displacement.to(gradient_sum))
    steps = [-(alpha * newton + inside) for alpha in alphas]
    is_finite = basis.sum_over_vectors(torch.stack(steps).sum()).isfinite()
    steps = [torch.where(is_finite, step, 0.0) for step in steps]
    return basis.add_combination(torch.zeros_like(gradient_sum), steps), is_finite
