"""A worker's half of MRDHO2: an epoch, from the point it starts at to its final update.

begin   c <- w, p <- 0; worker 0 sends c and what does not train; all listen for the eigenpairs at c
add     p <- p + g, every step
end     w <- w − Σⱼ V̂ⱼ [α |ûⱼ|⁻¹ ∘ (V̂ⱼᵀp) + V̂ⱼᵀ(w − c)]; "guarded" asks for a verdict first

With "within" there is no p, and no update at the end: the next epoch's steps use û and V̂, those of
:class:`~second_order.fosi.curvature.FOSICurvature`. The first `warmup_steps` are of no epoch.

The workers agree on each of these, so that their weights stay equal. Where FSDP2 has sharded the
parameters a worker has its rows of c, p and V̂, and sends its rows of c.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from second_order.contract.saved import SavedPart
from second_order.distributed.mailbox import Mailbox, Patience
from second_order.distributed.messages import MalformedError, Message, require_form
from second_order.distributed.world import World
from second_order.fosi.checkpoint import START, SUM, UNIT, counts_of, load_vector
from second_order.fosi.eigenpairs import Found
from second_order.fosi.options import EpochOptions
from second_order.fosi.pair_routes import PairRoutes
from second_order.fosi.pieces import Chunk
from second_order.fosi.subject import Subject
from second_order.fosi.subspace import Basis, ColumnBasis, RowBasis, newton_rates
from second_order.fosi.trust import Flag
from second_order.report import EpochReport
from second_order.sharded import local

__all__ = ["LEAST_FALL", "Epochs", "correction", "refusal"]

ADDED_STEPS = 10  # how many of an epoch's last gradients "additive" averages
# Share by which the loss of the accelerators' batch must fall for "guarded". Smaller
# falls on one batch at one moment tell little of where training ends.
LEAST_FALL = 0.5
REMEMBERED = 1000  # number of reports kept
GONE, UNSOUND = "the accelerators are gone", "the eigenpairs are not finite"
REFUSED = "what the accelerators have sent was refused"


class Epochs:
    """The epochs of one worker.

    Args:
        subject: The model and the parameters that train, among the workers.
        options: The options of eigenpairs and epochs.

    Attributes:
        number: Number of the epoch under way.
        step: Number of the epoch's steps that have been taken.
        start: c, the epoch's first point, flat, the rows that are here; None if there is to be no
            final update.
        total: p, the sum of gradients, as ``start``; None if there is to be no final update.
        helped: Whether accelerators are at work for this worker.
        found: û and the residuals of the last eigenpairs that came.
        fresh: The eigenpairs for the next epoch's steps; None but at the end of an epoch that has
            found some, with "within".
        reports: Reports of the last epochs. Workers wait until they agree on what has come, so
            ``waited`` is long on all where one waits.
    """

    def __init__(self, subject: Subject, options: EpochOptions) -> None:
        self._subject, self._options = subject, options
        self._mailbox: Mailbox | None = None
        self._warn, self._patience = subject.training.warn, options.helper_timeout
        self._added = min(ADDED_STEPS, options.epoch_steps)
        self.number = self.step = 0
        self.start: Tensor | None = None
        self.total: Tensor | None = None
        self._parts: list[Tensor] = []  # views of p with the shapes of what is here of parameters
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
        return self._subject.training.world

    @property
    def _warming_up(self) -> bool:
        """Whether the base steps alone, before the first epoch."""
        begun = self.number or self.step
        return not begun and self._subject.training.steps < self._options.first_epoch

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
        params = self._subject.vector.params
        if not self._parts:  # views: packing small gradients first would cost more than adding them
            shapes = [local(p).shape for p in params]
            pieces = self.total.split([shape.numel() for shape in shapes])
            self._parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        pairs = zip(self._parts, params, strict=True)
        here = [(total, local(p.grad)) for total, p in pairs if p.grad is not None]
        if here:  # a step may have been without backward
            torch._foreach_add_([t for t, _ in here], [gradient for _, gradient in here])

    def _begin(self) -> None:
        """Send c to the accelerators; an epoch from a checkpoint has c and p already."""
        assert self._mailbox is not None
        vector = self._subject.vector
        if self.start is None or self.step == 0:
            self.start, self._parts = vector.flat(), []
            if not self._options.within:
                self.total = torch.zeros_like(self.start, dtype=vector.dtype)
        self._asked, self._request = self.number, self._request + 1
        self._post(self._mailbox, f"point/{self._request}", [self.start], epoch=self.number)
        for name in self._expected():
            self._mailbox.expect(name)

    def _post(self, mailbox: Mailbox, name: str, vectors: Sequence[Tensor], **note: int) -> None:
        """Send vectors and the rest of the model: the first worker, or each what it has."""
        rank, subject = self._team.rank, self._subject
        if rank == 0:
            mailbox.post(name, [*vectors, *subject.rest()], **note, **subject.forms)
        elif subject.in_parts:  # frozen parameters alone may be
            mine = vectors if subject.vector.sharded else [vector[:0] for vector in vectors]
            mailbox.post(f"{name}/{rank}", [*mine, *subject.rest()])

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
            with self._subject.training.meter.stage("final_update"), self._subject.vector.plain():
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
        refused = mailbox.refused
        if not self._agreed(self._sound(mailbox, found)):
            return self._unusable(waited, UNSOUND if mailbox.refused == refused else REFUSED)
        (values, residuals, _), note = found[0]
        self.found, products = (values, residuals), int(note["products"])
        vector, adds = self._subject.vector, self._options.final_update == "additive"
        parts = [tensors[2].to(self.start.device, vector.dtype) for tensors, _ in found]
        rows = self._routes(sharded=found[0][1]["sharded"]).joined(parts, self._team.rank)
        if self.total is None:
            if not self._agreed(self._have_unit_length(rows)):
                return self._unusable(waited, REFUSED)
            self.fresh = self._alike(values, residuals, rows, note["loss"])
            return EpochReport(self.number, waited, True, products=products)
        before = vector.flat()
        change, sound_step = correction(
            None if adds else before - self.start,
            self.total / self._added if adds else self.total,
            self._basis(rows, len(values)),
            newton_rates(values, self._options.eigenvalue_floor),
            vector.chunks,
            scales,
        )
        if not bool(sound_step):  # the same on all workers, as its sums are
            self._warn(f"the final update of epoch {self.number} is not finite: it is left out")
            return EpochReport(self.number, waited, False, UNSOUND, products=products)
        after = before + change
        if self._options.final_update != "guarded":
            vector.overwrite(after)
            return EpochReport(self.number, waited, True, products=products)
        return self._ask(mailbox, before, after, waited, products)

    def _unusable(self, waited: float, reason: str) -> EpochReport:
        """Use no eigenpairs at the end of this epoch; the first time with a warning."""
        if not self._unsound:
            self._warn(
                f"the accelerators' eigenpairs of epoch {self.number} are not finite, or were "
                f"refused; the base goes on alone until sound ones come"
            )
        self._unsound = True
        return EpochReport(self.number, waited, False, reason)

    def _alike(self, values: Tensor, residuals: Tensor, rows: Tensor, loss: float) -> Found:
        """Eigenpairs for the next steps, whose numbers are worker 0's: all step by the same."""
        last = torch.tensor([loss], dtype=torch.float64)
        numbers = torch.cat([values.double(), residuals.double(), last]).to(rows.device)
        self._team.broadcast_from_first([numbers])
        count, numbers = len(values), numbers.cpu()
        return Found(numbers[:count], numbers[count:-1], rows, float(numbers[-1]))

    def _ask(
        self, mailbox: Mailbox, before: Tensor, after: Tensor, waited: float, products: int
    ) -> EpochReport:
        """Make the update if the loss of the accelerators' batches halves with it."""
        begun = time.monotonic()
        name = f"verdict/{self._request}/{self._team.rank}"
        mailbox.expect(name)
        self._post(mailbox, f"try/{self._request}", [before, after])
        message = self._await(mailbox, name, Patience(self._patience))
        agreed = self._agreed(message is not None)
        waited += time.monotonic() - begun
        if not agreed:
            self._give_up(mailbox)
            return EpochReport(self.number, waited, False, GONE)
        assert message is not None
        try:
            old, new = _losses_in(message)
            reason = refusal(old, new)
        except MalformedError as why:
            mailbox.refuse(name, why)
            old, new, reason = math.nan, math.nan, REFUSED
        if not self._agreed(not reason):  # all write, or none does
            reason = reason or REFUSED
        else:
            self._subject.vector.overwrite(after)
        return EpochReport(self.number, waited, not reason, reason, old, new, products)

    def _routes(self, *, sharded: bool) -> PairRoutes:
        """Which rows of which eigenvectors come from whom, if accelerators are ``sharded``."""
        vector, options = self._subject.vector, self._options
        wanted = min(options.wanted, vector.layout.size)
        shapes, teams = [p.shape for p in vector.params], (self._team.size, options.accelerators)
        return PairRoutes(shapes, wanted, *teams, vector.sharded, sharded)

    def _basis(self, rows: Tensor, count: int) -> Basis:
        """V̂ from this worker's part of it."""
        chunks = self._subject.vector.chunks
        if self._subject.vector.sharded:
            return RowBasis(rows, chunks, self._team)
        return ColumnBasis(rows, chunks, self._team, count)

    def _have_unit_length(self, rows: Tensor) -> bool:
        """Whether vectors are of length 1, up to a rounding of narrow numbers; a row each."""
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        if self._subject.vector.sharded:
            self._team.all_reduce([squares]).wait()
        return bool(((squares - 1.0).abs() <= UNIT).all())

    def _sound(self, mailbox: Mailbox, found: Sequence[Message]) -> bool:
        """Whether all eigenpairs that came are finite; malformed ones are refused."""
        sound, rank, kinds = True, self._team.rank, set[bool]()
        for a, (name, message) in enumerate(zip(self._expected(), found, strict=True)):
            try:
                require_form(message[1], sharded=bool)
                kinds.add(message[1]["sharded"])
                routes = self._routes(sharded=message[1]["sharded"])
                finite = _pairs_in(message, routes.pairs, routes.shape(a, rank))
                if self._options.within and not math.isfinite(_loss_in(message)):
                    finite = False
            except MalformedError as why:
                mailbox.refuse(name, why)
                finite = False
            sound = sound and finite and all(bool(t.isfinite().all()) for t in message[0])
        return sound and len(kinds) == 1

    def _await(self, mailbox: Mailbox, name: str, patience: Patience) -> Message | None:
        with self._subject.training.meter.stage("wait"):
            return mailbox.wait(name, patience.ended)

    def _agreed(self, mine: bool) -> bool:
        return self._team.all_agree(mine, self._subject.vector.device)

    def _give_up(self, mailbox: Mailbox) -> None:
        """Give up lost accelerators, and go on as the base alone."""
        why = f" ({mailbox.failure})" if mailbox.failure else ""
        self._warn(
            f"the accelerators have left, died, or not answered in {self._patience:g} s{why}: "
            f"{self._subject.training.base_name} goes on alone"
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
                self._mailbox.decline(name)

    def counts(self) -> dict[str, float]:
        """The counts for a checkpoint: epoch, its steps taken, whether c and p are saved."""
        sums = float(self.start is not None)
        return {"epoch": self.number, "epoch_step": self.step, "epoch_sums": sums}

    def load(self, saved: Mapping[Tensor, SavedPart]) -> None:
        """Go on where a checkpoint was made, with its c and p if it has them."""
        counts, vector = counts_of(saved), self._subject.vector
        self.resume(counts.get("epoch", 0), counts.get("epoch_step", 0))
        if self.step and counts.get("epoch_sums", 1.0) and self.helped:
            self.start = self._loaded(saved, START, vector.layout.dtype)
            if not self._options.within:
                self.total = self._loaded(saved, SUM, vector.dtype)
                self.start = None if self.total is None else self.start  # of "within"

    def _loaded(
        self, saved: Mapping[Tensor, SavedPart], name: str, dtype: torch.dtype
    ) -> Tensor | None:
        """The rows that are here of a saved vector."""
        vector = self._subject.vector
        whole = load_vector(saved, name, vector.params, dtype)
        return None if whole is None else vector.here(whole)


def _pairs_in(message: Message, wanted: int, rows: tuple[int, int]) -> bool:
    """Check a message of eigenpairs; returns whether it has any.

    Raises:
        MalformedError: If the message is not of eigenpairs, or of others than wanted.
    """
    tensors, note = message
    require_form(note, finite=bool, products=int)
    shapes = [tuple(t.shape) for t in tensors]
    if note["finite"] and shapes != [(wanted,), (wanted,), rows]:
        raise MalformedError(f"its tensors are {shapes}, not {[(wanted,), (wanted,), rows]}")
    if not all(t.is_floating_point() for t in tensors):
        raise MalformedError("its tensors are no real numbers")
    return bool(note["finite"])


def _loss_in(message: Message) -> float:
    """The loss that comes with eigenpairs; NaN where there is none.

    Raises:
        MalformedError: If the message has no such entry.
    """
    require_form(message[1], loss=float | int | None)
    loss = message[1]["loss"]
    return math.nan if loss is None else float(loss)


def _losses_in(message: Message) -> tuple[float, float]:
    """The losses of a verdict; NaN where none could be evaluated.

    Raises:
        MalformedError: If the message is no verdict.
    """
    require_form(message[1], losses=[float | int | None])
    losses = [math.nan if x is None else float(x) for x in message[1]["losses"]]
    if len(losses) != 2:
        raise MalformedError(f"it has {len(losses)} losses, not 2")
    return losses[0], losses[1]


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
        moved: w_E − c, ``(n,)``, or the rows that are here; None to leave out the last term.
        gradient: p, as ``moved``.
        basis: V̂, this worker's vectors, or its rows of all.
        rates: |û|⁻¹, ``(r,)``.
        chunks: The chunks of these elements.
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
