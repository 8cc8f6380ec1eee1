"""A worker's half of MRDHO2: an epoch, from the point it starts at to its final update.

begin   c <- w, p <- 0; worker 0 sends c and what does not train; all listen for the eigenpairs at c
add     p <- p + g, every step
end     w <- w − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w − c)]; "guarded" asks for a verdict first

With "within" there is no p, and no update at the end: the next epoch's steps use û and V̂, those of
:class:`~second_order.fosi.curvature.FOSICurvature`. The first `warmup_steps` are of no epoch.

The workers agree on each of these, so that their weights stay equal.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.contract.training import Training
from second_order.distributed.collectives import World
from second_order.distributed.mailbox import Mailbox, Message, Patience
from second_order.distributed.parcels import pack_by_dtype
from second_order.fosi.checkpoint import START, SUM, counts_of, load_vector
from second_order.fosi.eigenpairs import Found
from second_order.fosi.options import EpochOptions
from second_order.fosi.pieces import Chunk
from second_order.fosi.subspace import Basis, ColumnBasis, newton_rates
from second_order.fosi.trust import Flag
from second_order.fosi.vector import ParameterVector
from second_order.report import EpochReport

__all__ = ["LEAST_FALL", "Epochs", "correction", "refusal"]

ADDED_STEPS = 10  # how many of an epoch's last gradients "additive" averages
# Share by which the loss of the accelerators' batch must fall for "guarded". Smaller
# falls on one batch at one moment tell little of where training ends.
LEAST_FALL = 0.5
REMEMBERED = 1000  # number of reports kept
GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"


class Epochs:
    """The epochs of one worker.

    Args:
        training: The training of the workers.
        vector: The parameters that train.
        options: The options of eigenpairs and epochs.

    Attributes:
        number: Number of the epoch under way.
        step: Number of the epoch's steps that have been taken.
        start: c, the epoch's first point, flat; None if there is to be no final update.
        total: p, the sum of gradients, as ``start``; None if there is to be no final update.
        helped: Whether accelerators are at work for this worker.
        found: û and the residuals of the last eigenpairs that came.
        fresh: The eigenpairs for the next epoch's steps; None but at the end of an epoch that has
            found some, with "within".
        reports: Reports of the last epochs. Workers wait until they agree on what has come, so
            ``waited`` is long on all where one waits.
    """

    def __init__(self, training: Training, vector: ParameterVector, options: EpochOptions) -> None:
        self._training, self._vector, self._options = training, vector, options
        self._mailbox: Mailbox | None = None
        self._patience = options.helper_timeout
        self._added = min(ADDED_STEPS, options.epoch_steps)
        self.number = self.step = 0
        self.start: Tensor | None = None
        self.total: Tensor | None = None
        self._parts: list[Tensor] = []  # views of p with the shapes of parameters
        self.helped = False
        self.found: tuple[Tensor, Tensor] | None = None
        self.fresh: Found | None = None
        self.reports: deque[EpochReport] = deque(maxlen=REMEMBERED)
        self._asked = -1  # the epoch whose eigenpairs are under way
        self._request = -1  # number of the message with these
        self._taken = 0  # steps taken with this object
        self._unsound = False  # whether eigenpairs ever were unsound

    def connect(self, mailbox: Mailbox) -> None:
        """Begin to work with accelerators, over a mailbox."""
        self._mailbox, self.helped = mailbox, True

    @property
    def _team(self) -> World:
        return self._training.world

    @property
    def _warming_up(self) -> bool:
        """Whether the base steps alone, before the first epoch."""
        begun = self.number or self.step
        return not begun and self._training.steps < self._options.first_epoch

    def add(self) -> None:
        """Take in a step's gradients, and begin an epoch with its first."""
        if not self.helped or self._warming_up:
            return
        if self._asked != self.number:
            self._begin()
        adds = self._options.final_update == "additive"
        last = self._options.epoch_steps - self._added
        if self.total is None or (adds and self.step < last):
            return
        params = self._vector.params
        if not self._parts:  # views: packing small gradients first would cost more than adding them
            pieces = self.total.split([p.numel() for p in params])
            self._parts = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        pairs = zip(self._parts, params, strict=True)
        here = [(total, p.grad) for total, p in pairs if p.grad is not None]
        if here:  # a step may have been without backward
            torch._foreach_add_([t for t, _ in here], [gradient for _, gradient in here])

    def _begin(self) -> None:
        """Send c to the accelerators; an epoch from a checkpoint has c and p already."""
        assert self._mailbox is not None
        vector, elsewhere = self._vector, []
        if self.start is None or self.step == 0:
            self.start, self._parts = vector.flat(), []
            if not self._options.within:
                self.total = torch.zeros_like(self.start, dtype=vector.dtype)
        else:
            elsewhere = [self.start]
        self._asked, self._request = self.number, self._request + 1
        self._post(self._mailbox, f"point/{self._request}", elsewhere, epoch=self.number)
        for name in self._expected():
            self._mailbox.expect(name)

    def _post(self, mailbox: Mailbox, name: str, elsewhere: Sequence[Tensor], **note: int) -> None:
        """Send the model, as worker 0, and another point than where it is."""
        if self._team.rank == 0:
            whole = self._training.whole_model()
            model, train = pack_by_dtype(whole), [t.requires_grad for t in whole]
            said = {"train": train, "size": self._vector.layout.size, "model": len(model), **note}
            mailbox.post(name, [*model, *elsewhere], **said)

    def _expected(self) -> list[str]:
        helpers = range(self._options.accelerators)
        return [f"pairs/{self._request}/{self._team.rank}/{a}" for a in helpers]

    def stepped(self, scales: Callable[[], Sequence[float | Tensor]]) -> EpochReport | None:
        """Count a step of the base; after the epoch's last, end it and return its report.

        Args:
            scales: Gives α of each group; called once an epoch.
        """
        if not self.helped:
            return None
        assert self._mailbox is not None
        self.fresh = None
        self.step, self._taken, report = self.step + (not self._warming_up), self._taken + 1, None
        if self.step >= self._options.epoch_steps:
            with self._training.meter.stage("final_update"), self._vector.plain():
                report = self._end(self._mailbox, scales())
            self.reports.append(report)
            self.let_go()
            self.number, self.step = self.number + 1, 0
        self._mailbox.tell("steps", self._taken)
        return report

    def _end(self, mailbox: Mailbox, scales: Sequence[float | Tensor]) -> EpochReport:
        """End the epoch, and use its eigenpairs if every worker has sound ones."""
        begun, patience = time.monotonic(), Patience(self._patience)
        messages = [self._await(mailbox, name, patience) for name in self._expected()]
        found = [message for message in messages if message is not None]
        here = len(found) == len(messages)
        agreed = self._agreed(here)
        waited = time.monotonic() - begun
        if not agreed:
            self._give_up(mailbox)
            return EpochReport(self.number, waited, False, GONE)
        if self.start is None or (self.total is None and not self._options.within):
            return EpochReport(self.number, waited, False, "other parameters train now")
        sound = all(note["finite"] for _, note in found)  # all workers are told the same
        if not sound or (self._options.within and not math.isfinite(found[0][1]["loss"])):
            if not self._unsound:
                self._training.warn(
                    f"the accelerators' eigenpairs of epoch {self.number} are not finite; the base "
                    f"goes on alone until sound ones come"
                )
            self._unsound = True
            return EpochReport(self.number, waited, False, UNSOUND)
        (values, residuals, _), note = found[0]
        self.found, products = (values, residuals), int(note["products"])
        vector, adds = self._vector, self._options.final_update == "additive"
        rows = torch.cat([tensors[2].to(vector.device, vector.dtype) for tensors, _ in found], -1)
        if self.total is None:
            self.fresh = Found(values.double(), residuals.double(), rows, note["loss"])
            return EpochReport(self.number, waited, True, products=products)
        before = vector.flat()
        change, sound_step = correction(
            None if adds else before - self.start,
            self.total / self._added if adds else self.total,
            ColumnBasis(rows, vector.chunks, self._team, len(values)),
            newton_rates(values, self._options.eigenvalue_floor),
            vector.chunks,
            scales,
        )
        if not bool(sound_step):  # the same on all workers, as its sums are
            what = f"the final update of epoch {self.number}"
            self._training.warn(f"{what} is not finite: it is left out")
            return EpochReport(self.number, waited, False, UNSOUND, products=products)
        after = before + change
        if self._options.final_update != "guarded":
            vector.overwrite(after)
            return EpochReport(self.number, waited, True, products=products)
        return self._ask(mailbox, after, waited, products)

    def _ask(self, mailbox: Mailbox, after: Tensor, waited: float, products: int) -> EpochReport:
        """Make the update if the loss of the accelerators' batches halves with it."""
        begun = time.monotonic()
        name = f"verdict/{self._request}/{self._team.rank}"
        mailbox.expect(name)
        self._post(mailbox, f"try/{self._request}", [after])
        message = self._await(mailbox, name, Patience(self._patience))
        agreed = self._agreed(message is not None)
        waited += time.monotonic() - begun
        if not agreed:
            self._give_up(mailbox)
            return EpochReport(self.number, waited, False, GONE)
        assert message is not None
        old, new = message[1]["losses"]
        reason = refusal(old, new)
        if not reason:
            self._vector.overwrite(after)
        return EpochReport(self.number, waited, not reason, reason, old, new, products)

    def _await(self, mailbox: Mailbox, name: str, patience: Patience) -> Message | None:
        with self._training.meter.stage("wait"):
            return mailbox.wait(name, patience.ended)

    def _agreed(self, mine: bool) -> bool:
        return self._team.all_agree(mine, self._vector.device)

    def _give_up(self, mailbox: Mailbox) -> None:
        """Give up lost accelerators, and go on as the base alone."""
        why = f" ({mailbox.failure})" if mailbox.failure else ""
        self._training.warn(
            f"the accelerators have left, died, or not answered in {self._patience:g} s{why}: "
            f"{self._training.base_name} goes on alone"
        )
        self._patience = 0.1  # no accelerator is left to say goodbye to
        self.close()

    def close(self) -> None:
        """Say goodbye to the accelerators, and go on as the base alone."""
        if self._mailbox is not None:
            self._mailbox.close(self._patience)
        self.helped = False
        self.let_go()

    def let_go(self) -> None:
        """Drop c and p: this epoch gets no final update."""
        self.start = self.total = None
        self._parts = []

    def resume(self, number: int, step: int) -> None:
        """Go on in the middle of an epoch, without c; eigenpairs under way are not used."""
        self.fresh = None
        under_way = self._asked == self.number
        self.number, self.step, self._asked = number, step, -1
        self.let_go()
        if under_way and self.helped and self._mailbox is not None:
            for name in self._expected():
                self._mailbox.forget(name)

    def counts(self) -> dict[str, float]:
        """The counts for a checkpoint: epoch, its steps taken, whether c and p are saved."""
        sums = float(self.start is not None)
        return {"epoch": self.number, "epoch_step": self.step, "epoch_sums": sums}

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Go on where a checkpoint was made, with its c and p if it has them."""
        counts, vector = counts_of(saved), self._vector
        self.resume(counts.get("epoch", 0), counts.get("epoch_step", 0))
        if self.step and counts.get("epoch_sums", 1.0) and self.helped:
            self.start = self._loaded(saved, START, vector.layout.dtype)
            if not self._options.within:
                self.total = self._loaded(saved, SUM, vector.dtype)
                self.start = None if self.total is None else self.start  # of "within"

    def _loaded(
        self, saved: Mapping[Tensor, SavedPart], name: str, dtype: torch.dtype
    ) -> Tensor | None:
        return load_vector(saved, name, self._vector.params, dtype)


def refusal(before: float, after: float) -> str:
    """Why "guarded" does not make an update; "" if it does.

    Args:
        before: The loss of the accelerators' batches without the update.
        after: The loss with the update.
    """
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
    moved: Tensor | None,
    gradient: Tensor,
    basis: Basis,
    rates: Tensor,
    chunks: Sequence[Chunk],
    scales: Sequence[float | Tensor],
) -> tuple[Tensor, Flag]:
    """−V̂ [α |û|⁻¹ ∘ V̂ᵀp + V̂ᵀ(w_E − c)], equation 17 of MR-DHO2: the final update.

    Args:
        moved: w_E − c, ``(n,)``; None to leave out the last term.
        gradient: p, as ``moved``.
        basis: V̂, this worker's vectors.
        rates: |û|⁻¹, ``(r,)``.
        chunks: The chunks of the elements.
        scales: α of each group.

    Returns:
        The update, zeros if it is not finite, and whether it is.
    """

    def coefficients(x: Tensor) -> Tensor:
        return basis.coefficients([x[chunk.columns] for chunk in chunks])

    newton = coefficients(gradient) * rates[basis.mine].to(gradient)
    undone = torch.zeros_like(newton) if moved is None else coefficients(moved.to(gradient))
    steps = [-(scale * newton + undone) for scale in scales]
    result = torch.zeros_like(gradient)
    parts = [result[chunk.columns] for chunk in chunks]
    return result, basis.add(parts, steps, [chunk.group for chunk in chunks])
