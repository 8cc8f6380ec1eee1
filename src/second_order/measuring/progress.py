"""What a measurement says: its plan beforehand, a bar meanwhile, a table at its end; and its saves.

A save is a folder with a file of each process and number of batches done. The last two numbers are
kept, so that processes that were killed between two files continue from the newest that all have,
and that is whole.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from second_order.distributed.world import World
from second_order.errors import CheckpointError, SecondOrderWarning
from second_order.files import load_checkpoint, save_checkpoint
from second_order.measuring.fingerprint import fingerprint
from second_order.report import aligned

__all__ = ["MeasuredLayer", "Report", "Saves", "bar_of"]


@dataclass(frozen=True)
class MeasuredLayer:
    """One line of the table.

    Attributes:
        name: The layer's name.
        kind: Its class.
        parameters: Number of its parameters that the factors are of.
        factors: Sizes of its factors, or why it has none.
        rows: Number of rows that A is a mean over.
        missing: Dimensions of A that so few rows cannot fill: its rank is at most their number.
        owner: The process that has it; None if none has.
    """

    name: str
    kind: str
    parameters: int
    factors: str
    rows: float = 0.0
    missing: int = 0
    owner: int | None = None


@dataclass(frozen=True)
class Report:
    """What a measurement covered and took; ``print`` it, or read its rows.

    Attributes:
        title: What was measured, by how many processes.
        rows: One for each layer, and for each module that has none.
        parameters: Number of the model's parameters.
        examples: Number of examples: rows with inputs alone, else terms of the loss.
        batches: Number of batches of a pass, over all processes.
        passes: Number of passes over the data.
        seconds: Seconds of them all.
        nbytes: Bytes of the factors on this process.
        notes: Closing lines.
    """

    title: str
    rows: Sequence[MeasuredLayer]
    parameters: int
    examples: float
    batches: int
    passes: int
    seconds: float
    nbytes: int
    notes: Sequence[str] = ()

    @property
    def covered(self) -> float:
        """Share of the model's parameters that have factors, 0 to 1."""
        ours = sum(row.parameters for row in self.rows if row.owner is not None)
        return ours / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        table = [("layer", "type", "parameters", "factors / why not", "rows", "rank deficiency")]
        for row in self.rows:
            found = row.owner is not None
            rows, missing = (f"{row.rows:,.0f}", f"{row.missing or ''}") if found else ("", "")
            table.append((row.name, row.kind, f"{row.parameters:,}", row.factors, rows, missing))
        closing = (
            f"{self.examples:,.0f} examples in {self.batches:,} batches, {self.passes} "
            f"pass{'es' if self.passes > 1 else ''}, {self.seconds:,.1f} s; factors on this "
            f"process: {self.nbytes / 2**20:,.2f} MiB"
        )
        share = f"{self.covered:.1%} of {self.parameters:,} parameters"
        return "\n".join([self.title, share, *aligned(table, {2, 4, 5}), closing, *self.notes])


class Bar(Protocol):
    """What a progress bar does."""

    def update(self) -> object:
        """Go on by one batch."""


class _NoBar:
    def update(self) -> None:
        pass


@contextmanager
def bar_of(batches: int | None, what: str, shown: bool) -> Iterator[Bar]:
    """A progress bar of tqdm's, where that is installed and one is to be ``shown``."""
    if not shown or importlib.util.find_spec("tqdm") is None:
        yield _NoBar()
        return
    tqdm = importlib.import_module("tqdm.auto").tqdm
    with tqdm(total=batches, desc=what, unit="batch", file=sys.stderr) as bar:
        yield bar


class Saves:
    """A measurement's saves in a folder; None for no saves.

    ``what`` identifies a measurement by named values: saves of another one are refused. A value of
    None is not known, and fits any other.
    """

    def __init__(
        self, folder: Path | None, every: int, world: World, what: Mapping[str, Any]
    ) -> None:
        self._folder, self._every, self._world, self._what = folder, every, world, what
        self._numbers: list[int] = []
        self._first_batch = ""  # its fingerprint, in the pass under way

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number:010d}.{self._world.rank}.pt"

    def last(self) -> dict[str, Any] | None:
        """The newest state that all processes have as a whole; a collective.

        Raises:
            CheckpointError: On all processes, if one has a save of another measurement, or none
                that is whole.
        """
        if self._folder is None:
            return None
        wrong = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            wrong = str(error)
        self._raise_together(wrong)
        mine = {int(path.name.split(".")[0]) for path in self._files()}
        common = set.intersection(*self._world.aside().all_gather_object(mine))

        # The newest first; one that only this process has is just compared with the arguments.
        candidates = sorted(common, reverse=True) or [max(mine, default=-1)]
        unreadable = ""
        for number in candidates:
            state, wrong = self._read(number) if number in mine else (None, "")
            wrong = self._first(wrong)
            if wrong:
                unreadable = unreadable or wrong
                continue
            self._raise_together("" if state is None else self._compared(state, number))
            if unreadable:
                warnings.warn(
                    f"measure continues from the save before, after {number} batches: {unreadable}",
                    SecondOrderWarning,
                    stacklevel=5,
                )
            self._numbers = sorted(n for n in mine if n <= number)
            if not common or state is None:
                return None
            self._first_batch = state["first batch"]
            return state
        raise CheckpointError(f"{unreadable}, or remove {self._folder} to measure anew")

    def _read(self, number: int) -> tuple[dict[str, Any] | None, str]:
        """This process's save, or why it cannot be read."""
        try:
            return load_checkpoint(self._path(number)), ""
        except (CheckpointError, OSError) as error:
            return None, str(error)

    def _first(self, wrong: str) -> str:
        """What is wrong on the first process that says so; a collective."""
        return next(filter(None, self._world.aside().all_gather_object(wrong)), "")

    def _raise_together(self, wrong: str) -> None:
        """Raise on all processes if something is wrong on one."""
        found = self._first(wrong)
        if found:
            raise CheckpointError(found)

    def _compared(self, state: Mapping[str, Any], number: int) -> str:
        """What is wrong with a save, if it is of another measurement."""
        other = []
        for name, value in self._what.items():
            saved = state["what"].get(name, "")
            if saved != value and value is not None and saved is not None:
                other.append(name)
        if not other:
            return ""
        return (
            f"{self._path(number)} was saved by another measurement: other {', '.join(other)}; "
            f"give the model, data and arguments of that one, or another checkpoint="
        )

    def begin_pass(self, batch: Any, *, resumed: bool) -> None:
        """Note the first batch of a pass; None if there is none.

        Raises:
            CheckpointError: If the pass is resumed, and its save is of another first batch.
        """
        if self._folder is None:
            return
        found = fingerprint(batch)
        if resumed and found != self._first_batch:
            raise CheckpointError(
                f"the saves in {self._folder} are of another measurement: other first batch; give "
                f"the data set and batch size of that one, unshuffled, or another checkpoint="
            )
        self._first_batch = found

    def is_due(self, number: int) -> bool:
        """Whether a save falls due after so many batches."""
        return self._folder is not None and number % self._every == 0

    def save(self, number: int, state: Mapping[str, Any]) -> None:
        """Save, and remove what is older than the last save but one."""
        whole = {"what": self._what, "first batch": self._first_batch, **state}
        save_checkpoint(whole, self._path(number))
        self._numbers = [n for n in self._numbers if n < number][-1:]
        kept = {self._path(n).name for n in (*self._numbers, number)}
        self._numbers.append(number)
        for path in self._files():
            if path.name not in kept:
                path.unlink()

    def clear(self) -> None:
        """Remove this process's saves: the measurement has ended."""
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        mine = f"{'[0-9]' * 10}.{self._world.rank}.pt"
        return [] if self._folder is None else list(self._folder.glob(mine))
