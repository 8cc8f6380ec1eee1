"""MRDHO2: what a rank does, by its role, and a worker's epochs.

    accelerators=0, or one process   Divided itself: DHO2 with an interval of an epoch
    the first P - A ranks            Worker: the base, and a final update at the end of each epoch
    the last A ranks                 Accelerating (`accelerator.py`): eigenpairs for the workers

    begin   c <- w, p <- 0; worker 0 sends c and what does not train; all listen for the pairs at c
    add     p <- p + g, every step
    end     w <- w − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w − c)]; "guarded" asks for a verdict first

The first `warmup_steps` are of no epoch. The workers agree on each of these, so that their weights
stay equal. All ranks keep the counts of a checkpoint about the epoch under way.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from second_order.contract.arguments import refuse_ddp_over_helpers
from second_order.contract.saved import SavedPart
from second_order.contract.training import PendingAverage, Training
from second_order.distributed.helper_link import (
    HelperLink,
    Message,
    Patience,
    connect,
    pack_by_dtype,
)
from second_order.distributed.roles import Role, assign_roles
from second_order.fosi.checkpoint import START, SUM, counts_of, load_vector, vector_parts
from second_order.fosi.curvature import FOSICurvature
from second_order.fosi.eigenpairs import Closures
from second_order.fosi.metrics import EPOCH_NAMES
from second_order.fosi.options import newton_scales
from second_order.fosi.subspace import Basis, newton_rates
from second_order.fosi.trust import Flag
from second_order.fosi.vector import Chunk
from second_order.lanczos.spectrum import lanczos_dtype
from second_order.optimizers.config import EpochOptions
from second_order.report import EpochReport
from second_order.sharded import is_checkpointing
from second_order.stages import stage

__all__ = ["LEAST_FALL", "Divided", "Team", "Worker", "answers", "correction", "refusal"]

# Share by which the loss of the accelerators' batch must fall for "guarded". Smaller
# falls on one batch at one moment tell little of where training ends.
LEAST_FALL = 0.5
REMEMBERED = 1000  # number of reports kept
GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"


class Divided(FOSICurvature):
    """MRDHO2 on one process; without accelerators each computes eigenpairs once an epoch."""

    options: EpochOptions
    role: Role = "worker"

    def __init__(self, training: Training, options: EpochOptions, closure: Closures | None) -> None:
        super().__init__(training, options, closure)
        self.epoch = self.epoch_step = 0  # the epoch under way, and how many of its steps are taken
        self.start: Tensor | None = None  # c, flat; None if there is to be no final update
        self.total: Tensor | None = None  # p, alike
        self.helped = False  # whether accelerators are at work for this worker
        # Workers wait until they agree on what has come: ``waited`` is long on all where one waits.
        self.reports: deque[EpochReport] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        """Assign roles, if some are left to train, and warn where no accelerators are at work."""
        training, options = self.training, self.options
        world, under_ddp = training.world, training.under_ddp
        self.roles = assign_roles(world.size, options.accelerators, "accelerator", under_ddp)
        super().begin()
        if not self.computes_pairs:
            return
        size = training.world.size
        if options.wanted:
            training.warn(
                f"MRDHO2 with {size} process{'es' * (size > 1)} and "
                f"accelerators={options.accelerators}: nobody computes eigenpairs on the side, so "
                f"each process stops for them every {options.epoch_steps} steps, as DHO2 does"
            )
        elif self.roles.helpers:
            training.warn(
                f"largest=0 and smallest=0: the {options.accelerators} accelerators have nothing "
                f"to do, so all {size} processes train"
            )

    def facts(self) -> list[tuple[str, Any]]:
        """The values, by name, that decide which collectives a step has."""
        place = self.epoch, self.epoch_step, self.helped
        return [*super().facts(), ("epoch, its steps, accelerators at work", place)]

    def counts(self) -> dict[str, float]:
        """The counts that are saved with each parameter."""
        sums = float(self.start is not None)  # whether c and p are saved
        place = {"epoch": self.epoch, "epoch_step": self.epoch_step, "epoch_sums": sums}
        return {**super().counts(), **place}

    def metrics(self) -> dict[str, float]:
        """Numbers to log, those of the epoch under way and of the last that ended among them."""
        last = [(each.waited, float(each.applied)) for each in [*self.reports][-1:]]
        values = float(self.epoch), *(last[0] if last else (math.nan, math.nan))
        return super().metrics() | dict(zip(EPOCH_NAMES, values, strict=True))

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Take over counts, eigenpairs, and the place in the epochs."""
        super().load(saved)
        counts = counts_of(saved)
        self.epoch, self.epoch_step = counts.get("epoch", 0), counts.get("epoch_step", 0)


class Team(Divided):
    """One of two kinds of processes, which talk to each other."""

    computes_pairs = False
    links: Sequence[HelperLink] = ()

    def begin(self) -> None:
        """Give every process its role, and link workers and accelerators."""
        super().begin()
        training, patience = self.training, self.options.helper_timeout
        everybody = training.world
        self.links = connect(everybody, self.roles, patience, training)
        training.work_with(self.roles.team(everybody, patience))
        if training.known:
            refuse_ddp_over_helpers(training, self.roles, everybody)

    def close_links(self, patience: float) -> None:
        """Shut down all links, and wait for all of them together."""
        for link in self.links:
            link.leave()
        for link in self.links:
            link.close(patience)

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's counts, and its part of c and p, or zeros in their place."""
        parts, here = super().state(), {START: self.start, SUM: self.total}
        kept = {name: vector for name, vector in here.items() if vector is not None}
        if parts and len(kept) < len(here) and is_checkpointing(part=True):  # read in place
            size, dtype, device = self.vector.size, self.vector.dtype, self.training.device
            room = {name: torch.zeros(size, dtype=dtype, device=device) for name in here}
            kept = room | kept
        vectors = vector_parts(kept, self.vector.params)
        return {p: {**part, **vectors[p]} for p, part in parts.items()}


class Worker(Team):
    """Trains by the base, and updates by others' eigenpairs at the end of each epoch."""

    def __init__(self, training: Training, options: EpochOptions, closure: Closures | None) -> None:
        super().__init__(training, options, closure)
        self._parts: list[Tensor] = []  # views of p with the shapes of parameters
        self._found: tuple[Tensor, Tensor] | None = None  # of the last eigenpairs that came
        self._asked = -1  # the epoch whose eigenpairs are under way
        self._request = -1  # number of the message with these
        self._taken = 0  # steps taken with this object

    def begin(self) -> None:
        """Begin to work with accelerators."""
        super().begin()
        self.helped = True

    steps_by_pairs = False  # not those of an epoch: its end is

    def parameters_changed(self) -> None:
        """Drop the final update: other parameters train now than at the epoch's start."""
        if self.start is not None:
            self.training.warn(
                "the parameters that train have changed: this epoch has no final update"
            )
            self._let_go()
            self.training.publish()
        super().parameters_changed()

    def found(self) -> tuple[Tensor, Tensor]:
        """û and the residuals of the last eigenpairs that came."""
        return super().found() if self._found is None else self._found

    def close(self) -> None:
        """Say goodbye to the accelerators, and go on as the base alone."""
        self._part(self.options.helper_timeout if self.helped else 0.1)
        super().close()

    def _part(self, patience: float) -> None:
        self.close_links(patience)
        self.helped = False
        self._let_go()

    def _let_go(self) -> None:
        """Drop c and p: this epoch gets no final update."""
        self.start = self.total = None
        self._parts = []

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Go on where a checkpoint was made, with its c and p, without pairs that are under way."""
        self._asked = -1
        self._let_go()
        super().load(saved)
        if self.helped and self.epoch_step and counts_of(saved).get("epoch_sums", 1.0):
            params = self.vector.params
            self.start = load_vector(saved, START, params, lanczos_dtype(params))
            self.total = load_vector(saved, SUM, params, self.vector.dtype)

    # ---------------------------------------------------------------------------------- an epoch

    @property
    def _warming_up(self) -> bool:
        """Whether the base steps alone, before the first epoch."""
        begun = self.epoch or self.epoch_step
        return not begun and self.training.steps < (self.options.warmup_steps or 0)

    def precondition(self, pending: PendingAverage) -> None:
        """Add the step's gradients to p."""
        super().precondition(pending)
        if not self.helped or self._warming_up:
            return
        if self._asked != self.epoch:
            self._begin()
        if self.total is None:
            return
        params = self.vector.params
        if not self._parts:  # views: packing small gradients first would cost more than adding them
            pieces = self.total.split([p.numel() for p in params])
            self._parts = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        pairs = zip(self._parts, params, strict=True)
        here = [(total, p.grad) for total, p in pairs if p.grad is not None]
        if here:  # a step may have been without backward
            torch._foreach_add_([t for t, _ in here], [gradient for _, gradient in here])

    def _begin(self) -> None:
        """Send c to the accelerators; an epoch from a checkpoint has c and p already."""
        elsewhere = []
        if self.start is None or self.epoch_step == 0:
            self.start, self._parts = self.vector.flat(), []
            self.total = torch.zeros_like(self.start, dtype=self.vector.dtype)
        else:
            elsewhere = [self.start]
        self._asked = self.epoch
        self._send_request(elsewhere, do="compute", epoch=self.epoch)

    def _send_request(self, elsewhere: Sequence[Tensor], **note: Any) -> None:
        """Number a request; send it as worker 0, with the model and another point than its own."""
        self._request += 1
        if self.training.world.rank == 0:
            tensors = self.training.whole_model()
            model = pack_by_dtype(tensors)
            note["request"] = self._request
            note["train"] = [tensor.requires_grad for tensor in tensors]
            note["size"] = self.vector.size
            note["model"] = len(model)
            for link in self.links:
                link.send([*model, *elsewhere], **note)

    def correct(self) -> None:
        """Count a step of the base; after the epoch's last, end it."""
        super().correct()
        if not self.helped:
            return
        self.epoch_step, self._taken = self.epoch_step + (not self._warming_up), self._taken + 1
        if self.epoch_step >= self.options.epoch_steps:
            tally = self.pairs.tally
            with stage("final_update"), self.vector.plain():
                report = self._end()
            self.reports.append(report)
            self._let_go()
            if report.reason == GONE:
                self._part(0.1)  # no accelerator is left to say goodbye to
            self.epoch, self.epoch_step = self.epoch + 1, 0
            tally.failures += report.reason == UNSOUND
            if report.products:
                tally.add(self.training.steps + 1 - self.options.epoch_steps, report.products)
            self.training.publish()  # frees c and p
        for link in self.links if self.training.world.rank == 0 and self.helped else ():
            link.send([], do="step", steps=self._taken)

    def _end(self) -> EpochReport:
        """End the epoch, and use its eigenpairs if every worker has sound ones."""
        training, options, vector = self.training, self.options, self.vector
        patience = options.helper_timeout
        found, waited = answers(training, self.links, self._request, patience)
        if not found:
            return EpochReport(self.epoch, waited, False, GONE)
        if self.start is None or self.total is None:
            return EpochReport(self.epoch, waited, False, "other parameters train now")
        if not all(note["finite"] for _, note in found):  # all workers are told the same
            if training.first_time("unsound"):
                training.warn(
                    f"the accelerators' eigenpairs of epoch {self.epoch} are not finite; the base "
                    f"goes on alone until sound ones come"
                )
            return EpochReport(self.epoch, waited, False, UNSOUND)
        (values, residuals, _), note = found[0]
        self._found, products = (values, residuals), int(note["products"])
        rows = torch.cat([tensors[2].to(training.device, vector.dtype) for tensors, _ in found], -1)
        before = vector.flat()
        change, sound_step = correction(
            before - self.start,
            self.total,
            Basis(rows, vector.chunks, training.world, len(values)),
            newton_rates(values, options.eigenvalue_floor),
            vector.chunks,
            newton_scales(options.newton_scale, training),
        )
        if not bool(sound_step):  # the same on all workers, as its sums are
            what = f"the final update of epoch {self.epoch}"
            training.warn(f"{what} is not finite: it is left out")
            return EpochReport(self.epoch, waited, False, UNSOUND, products=products)
        after, reason, losses = before + change, "", (None, None)
        if options.final_update == "guarded":  # asks whether the accelerators' loss halves with it
            self._send_request([after], do="judge")
            found, more = answers(training, self.links, self._request, patience)
            waited += more
            if not found:
                return EpochReport(self.epoch, waited, False, GONE)
            losses = found[0][1]["losses"]
            reason = refusal(*losses)
        if not reason:
            vector.overwrite(after)
        return EpochReport(self.epoch, waited, not reason, reason, *losses, products)


def answers(
    training: Training, links: Sequence[HelperLink], request: int, seconds: float
) -> tuple[list[Message], float]:
    """Every accelerator's answer to a request, and the seconds waited; a collective of workers.

    Returns no answers if one is missing on any worker: the accelerators are lost then, and the base
    trains alone.
    """
    begun = time.monotonic()
    patience = Patience(seconds)
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


def _answer(link: HelperLink, request: int, patience: Patience) -> Message | None:
    """Wait for the answer to a request, and drop those to earlier ones: a checkpoint was loaded."""
    message = link.wait(patience.ended)
    while message is not None and message.note["request"] < request:
        message = link.wait(patience.ended)
    return message


def refusal(before: float, after: float) -> str:
    """Why "guarded" does not make an update between these losses of batches; "" if it does."""
    what = "the loss of the accelerators' batches"
    if not math.isfinite(before):
        return f"{what} is not finite"
    if not math.isfinite(after):
        return f"{what} would not have been finite"
    if after > before:
        return f"{what} would have risen"
    enough = after < before and after <= before - LEAST_FALL * abs(before)
    return "" if enough else f"{what} would have fallen by less than {LEAST_FALL:.0%}"


def correction(
    moved: Tensor,
    gradient: Tensor,
    basis: Basis,
    rates: Tensor,
    chunks: Sequence[Chunk],
    scales: Sequence[float | Tensor],
) -> tuple[Tensor, Flag]:
    """−V̂ [α |û|⁻¹ ∘ V̂ᵀp + V̂ᵀ(w_E − c)], equation 17 of MR-DHO2: the final update.

    Of V̂, this worker's vectors are in the basis; p is ``gradient``, ``(n,)``, w_E − c is ``moved``;
    α of each group is in ``scales``. Returns the update, zeros if it is not finite, and whether it
    is.
    """

    def coefficients(x: Tensor) -> Tensor:
        return basis.coefficients([x[chunk.columns] for chunk in chunks])

    newton = coefficients(gradient) * rates[basis.mine].to(gradient)
    undone = coefficients(moved.to(gradient))
    steps = [-(scale * newton + undone) for scale in scales]
    result = torch.zeros_like(gradient)
    parts = [result[chunk.columns] for chunk in chunks]
    return result, basis.add(parts, steps)
