"""Inverters decompose the damped factors of layers, from which inverses are made.

submit    takes the factors of some layers
collect   returns the layers that are finished, with the decomposition of each factor

:class:`SynchronousInverter` decomposes in the step itself. The threads of
:class:`second_order.kfac.async_inversion.ThreadedInverter` do so while training
continues. A refresh of K-FAC submits the layers that are due, and collects layers in
the same step or a later one. These are the settings of an inverter:

| inverter                                           | staleness | deterministic |
|----------------------------------------------------|-----------|---------------|
| synchronous: a refresh collects what it submits    | 0         | True          |
| threads; a refresh collects what is finished       | None      | False         |
| threads; it also waits for layers n steps old      | n         | False         |
| threads; it collects layers exactly n steps old    | n         | True          |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from second_order.kfac.plan import FactorKey
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.solvers import (
    Attempts,
    Decomposition,
    Problem,
    Solver,
    attempt_all,
)
from second_order.kronecker.storage import DeviceRead
from second_order.optimizers.config import KFACOptions
from second_order.training.context import Training

__all__ = ["Inverter", "Job", "Result", "SynchronousInverter", "describe_error"]


class Job(NamedTuple):
    """The factors of a layer that this rank decomposes.

    Attributes:
        block: The layer.
        problems: The damped factors, by name; at least one.
        cost: Operations of the decompositions, up to a constant.
        weight: The sum of the weights of all statistics in the running averages, a
            scalar. It is 0 without statistics. None if the layer is known to
            have some.
    """

    block: KroneckerBlock
    problems: Mapping[str, Problem]
    cost: float
    weight: Tensor | None = None


class Result(NamedTuple):
    """The result of a job.

    Attributes:
        block: The layer.
        decompositions: Those of its factors, by name. A factor without an accurate
            decomposition is missing, unless the layer has no statistics.
        error: The exception that was raised, as text; "" if there is none.
        has_statistics: Whether the running averages had statistics.
        was_retried: Whether a factor was decomposed again, because its first
            decomposition was inaccurate.
    """

    block: KroneckerBlock
    decompositions: Mapping[str, Decomposition] = MappingProxyType({})
    error: str = ""
    has_statistics: bool = True
    was_retried: bool = False


class Inverter(Protocol):
    """Decomposes the factors of layers.

    Attributes:
        staleness: Steps after which a refresh waits for a layer; None for no bound.
        deterministic: Whether a refresh collects layers exactly ``staleness`` steps
            after they were submitted, even if they are finished before.
    """

    staleness: int | None
    deterministic: bool

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start to decompose the factors of layers, none of which may be pending."""

    def unchecked_decompositions(
        self,
    ) -> Mapping[KroneckerBlock, Mapping[str, Decomposition]]:
        """Return submitted layers' decompositions, whose accuracy is not known yet.

        A refresh preconditions with them early, so that one read of the device gives
        both its results and the accuracy. Layers of which a routine raised are missing.
        """

    def collect(
        self, must_wait: Callable[[KroneckerBlock], bool], read: DeviceRead
    ) -> list[Result]:
        """Return the layers that are finished.

        Args:
            must_wait: Whether to wait for a layer. It compares ages with ``staleness``.
            read: Collects tensors, which one copy to the host reads together.
        """

    def forget(self, block: KroneckerBlock) -> None:
        """Drop the job of a layer, whether or not it is finished."""

    def clear(self) -> None:
        """Drop all jobs."""

    def finish(self) -> None:
        """Wait until all jobs are finished."""

    def close(self) -> None:
        """End the threads, if there are any."""

    def post(self, tensors: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Pass CPU copies of tensors to ``send`` once the device has computed them.

        This sends parameters to stats workers. It is a method of inverters because
        their threads can wait for the device while training continues.
        """


class Submitted(NamedTuple):
    """The last submitted jobs, and the attempts to decompose their factors."""

    jobs: Sequence[Job]
    keys: list[FactorKey]  # of the factors, in the order of attempts.problems
    attempts: Attempts


class SynchronousInverter:
    """Decomposes all submitted factors together, and reads the device once.

    ``submit`` attempts the decompositions on the device. ``collect`` reads their
    relative errors, and retries those that are inaccurate. Only a retry reads the
    device again. The argument ``training`` is not used. All inverters have it.
    """

    staleness: int | None = 0
    deterministic = True

    def __init__(
        self, training: Training, options: KFACOptions, solver: Solver
    ) -> None:
        self._solver = solver
        self._dtype = options.inv_dtype
        self._submitted: Submitted | None = None

    def clear(self) -> None:
        """Drop all jobs."""
        self._submitted = None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Attempt to decompose layers' factors, those of equal size together."""
        self._submitted = None  # left over if the last refresh raised
        if not jobs:
            return

        # Order factors by shape and name. The decompositions of layers of equal shape
        # then are consecutive in memory, and the refresh stacks them without a copy.
        by_shape: dict[object, dict[FactorKey, Problem]] = {}
        for job in jobs:
            for factor_name, problem in job.problems.items():
                same_shape = by_shape.setdefault((job.block.shape, factor_name), {})
                same_shape[job.block, factor_name] = problem
        problems: dict[FactorKey, Problem] = {}
        for same_shape in by_shape.values():
            problems |= same_shape

        attempts = attempt_all(
            list(problems.values()), self._solver.routine, self._dtype
        )
        self._submitted = Submitted(jobs, list(problems), attempts)

    def unchecked_decompositions(
        self,
    ) -> Mapping[KroneckerBlock, Mapping[str, Decomposition]]:
        """Return submitted layers' decompositions, whose accuracy is not known yet."""
        if self._submitted is None:
            return {}
        jobs, keys, attempts = self._submitted
        by_layer = _by_layer(keys, attempts.parts)
        complete: dict[KroneckerBlock, Mapping[str, Decomposition]] = {}
        for job in jobs:
            if len(by_layer[job.block]) == len(job.problems):
                complete[job.block] = by_layer[job.block]
        return complete

    def collect(
        self, must_wait: Callable[[KroneckerBlock], bool], read: DeviceRead
    ) -> list[Result]:
        """Return all submitted layers, after retries of inaccurate decompositions.

        Args:
            must_wait: Not used, because every layer is finished.
            read: Collects the relative errors, to read them in one copy.
        """
        if self._submitted is None:
            return []
        jobs, keys, attempts = self._submitted
        self._submitted = None

        # Add the relative errors, and the weights that are 0 without statistics.
        errors = read.add(attempts.errors)
        uncertain: list[KroneckerBlock] = []
        weight_tensors: list[Tensor] = []
        for job in jobs:
            if job.weight is not None:
                uncertain.append(job.block)
                weight_tensors.append(job.weight)
        weights = read.add(weight_tensors)

        # Read the device, in one copy, and retry.
        empty: set[KroneckerBlock] = set()
        retried: set[KroneckerBlock] = set()
        inaccurate: list[int] = []
        try:
            for block, weight in zip(uncertain, read.numbers(weights), strict=True):
                if not weight > 0:  # 0, or NaN
                    empty.add(block)
            for i in attempts.find_inaccurate(read.numbers(errors)):
                block = keys[i][0]
                if block not in empty:
                    inaccurate.append(i)
                    retried.add(block)
            # retry() returns all decompositions, also those that were accurate.
            by_layer = _by_layer(keys, attempts.retry(inaccurate))
        except Exception as error:
            # If this rank raised, the others would wait for it in the next collective.
            return [Result(job.block, error=describe_error(error)) for job in jobs]

        results: list[Result] = []
        for job in jobs:
            result = Result(
                job.block,
                by_layer[job.block],
                has_statistics=job.block not in empty,
                was_retried=job.block in retried,
            )
            results.append(result)
        return results

    def forget(self, block: KroneckerBlock) -> None:
        """Do nothing, because a refresh collects everything that it submits."""

    def finish(self) -> None:
        """Do nothing, because a refresh collects everything that it submits."""

    def close(self) -> None:
        """Do nothing, because this class has no threads."""

    def post(self, tensors: list[Tensor], send: Callable[[list[Tensor]], None]) -> None:
        """Copy tensors to the CPU, and send them. Synchronizes with the device."""
        send([tensor.cpu() for tensor in tensors])


def _by_layer(
    keys: Sequence[FactorKey], decompositions: Sequence[Decomposition | None]
) -> dict[KroneckerBlock, dict[str, Decomposition]]:
    """Group decompositions by layer and factor name, without those that are None."""
    by_layer: dict[KroneckerBlock, dict[str, Decomposition]] = {}
    for (block, factor_name), decomposition in zip(keys, decompositions, strict=True):
        by_name = by_layer.setdefault(block, {})
        if decomposition is not None:
            by_name[factor_name] = decomposition
    return by_layer


def describe_error(error: BaseException) -> str:
    """Describe an exception by its class and text, for the warning on a layer."""
    return f"{type(error).__name__}: {error}"
