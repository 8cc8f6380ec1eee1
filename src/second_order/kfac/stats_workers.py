"""Gradient workers, and stats workers that compute statistics for them (Zhang et al. 2023).

    worker 0      ->  stats worker    a snapshot: the newest parameters and buffers, which of them
                                      train, and which are optimized
    stats worker  ->  every worker    the statistics at that snapshot, of the worker's layers

A stats worker gets the next snapshot when its statistics have arrived: no rank waits, and at most
one message of a kind travels. :class:`StatsWorkers` is the gradient workers' end of the links,
:class:`StatsWorker` the other one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from second_order.distributed.helper_link import (
    HelperLink,
    Message,
    close_links,
    load_model,
    pack_by_dtype,
)
from second_order.distributed.roles import Roles, assign_roles, cycle_batches, sharding_error
from second_order.kfac.curvature import KFAC, LayeredCurvature
from second_order.kfac.layers import Layers
from second_order.kfac.metrics import METRIC_NAMES
from second_order.kfac.plan import System, distkfac_plan, layer_dims
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
from second_order.kronecker.statistics import GradientScale
from second_order.optimizers.config import DistKFACOptions, KFACOptions
from second_order.reporting.summary import Summary
from second_order.training.context import Training
from second_order.training.curvature import Curvature
from second_order.training.helpers import split_into_roles
from second_order.utils.stages import stage

__all__ = ["StatsWorker", "StatsWorkers", "with_stats_workers"]

Sender: TypeAlias = Callable[[list[Tensor], Callable[[list[Tensor]], None]], None]
Sums: TypeAlias = dict[KroneckerBlock, StatisticsSums]


def _roles(training: Training, count: int) -> Roles:
    return assign_roles(training.world.size, count, "stats", training.under_ddp)


def _model_tensors(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a model, which snapshots contain."""
    return [*model.parameters(), *model.buffers()]


def _optimized(training: Training) -> list[bool]:
    """Which of the model's tensors are in the parameter groups."""
    members = {id(p) for group in training.groups for p in group["params"]}
    return [id(tensor) in members for tensor in _model_tensors(training.model)]


def unpack_statistics(
    message: Message, mine: Mapping[str, KroneckerBlock]
) -> dict[str, StatisticsSums | None]:
    """The sums of a message by layer, or None where they are not finite or of no example.

    Returns an empty dictionary if the message's layers are not this process's.
    """
    names = message.note["layers"]
    if any(name not in mine for name in names):
        return {}
    found: dict[str, StatisticsSums | None] = {}
    tensors = iter(message.tensors)
    for name in names:
        device = mine[name].weight.device
        head = next(tensors)
        factors = {letter: next(tensors) for letter in mine[name].stored_shapes}
        finite = all(bool(each.isfinite().all()) for each in (head, *factors.values()))
        moved = {k: factor.to(device, non_blocking=True) for k, factor in factors.items()}
        sums = StatisticsSums(moved, head.to(device, non_blocking=True))
        found[name] = sums if finite and bool(head[1] > 0) else None
    return found


class StatsWorkers:
    """The stats workers, as a gradient worker knows them."""

    def __init__(self, count: int, patience: float) -> None:
        self.count = count
        self._patience = patience
        self.active: list[HelperLink] = []  # the links to stats workers that are alive
        self._offered: dict[HelperLink, int] = {}  # number of snapshots sent, by worker 0
        self._answered: dict[HelperLink, int] = {}  # number of those whose statistics have come
        self.own_passes = True  # statistics come from the training passes
        self.needs_statistics = (
            True  # no valid statistics have come last, or since a change of the layers
        )
        self.plan_version = 0  # number of such changes: earlier statistics are dropped

    def begin(self, training: Training) -> None:
        """Be one of the gradient workers from now on; a collective of all processes."""
        self.active += split_into_roles(training, _roles(training, self.count), self._patience)

    def offer(self, training: Training, send: Sender) -> None:
        """Send the newest parameters to stats workers without a snapshot; worker 0 does."""
        for link in self.active if training.world.rank == 0 else ():
            offered = self._offered.get(link, 0)
            if offered > self._answered.get(link, 0):
                continue
            self._offered[link] = offered + 1
            newest = _model_tensors(training.model)
            note: dict[str, Any] = {
                "plan_version": self.plan_version,
                "train": [tensor.requires_grad for tensor in newest],
                "optimized": _optimized(training),
            }
            send(pack_by_dtype(newest), partial(link.send, **note))

    def statistics(self, mine: Mapping[str, KroneckerBlock], training: Training) -> Iterator[Sums]:
        """The sums of each message that has come since the last step."""
        for link in self.active:
            message = link.receive()
            if message is None:
                continue
            self._answered[link] = message.note["snapshots"]
            if message.note["plan_version"] < self.plan_version:  # before layers changed
                continue
            found = unpack_statistics(message, mine)
            self.needs_statistics = bool(found) and not any(found.values())
            if None in found.values() and training.is_first_warning("nonfinite"):
                training.warn(
                    "a stats worker has sent statistics that are not finite: they are dropped"
                )
            yield {mine[layer]: sums for layer, sums in found.items() if sums is not None}

    def restart(self) -> None:
        """After a change of layers or owners, take statistics here until others come."""
        if self.active:
            self.own_passes = True
            self.needs_statistics = True
            self.plan_version += 1

    def agree(self, training: Training) -> None:
        """Agree with the other workers: does one need statistics; which links are lost."""
        if not self.active:
            return
        gone = [float(link.lost or link.peer_closed) for link in self.active]
        flags = torch.tensor([float(self.needs_statistics), *gone], device="cpu")
        with stage("wait"):
            training.world.on_cpu().all_reduce_max([flags]).wait()
        needs_statistics, *gone = flags.tolist()
        lost = [link for link, flag in zip(self.active, gone, strict=True) if flag]
        if lost:
            names = ", ".join(f"stats worker {link.peer}" for link in lost)
            self._close(lost, 0.1)
            rest = "statistics are taken from the training passes again"
            if self.active:
                rest = "the others go on"
            training.warn(f"{names} has left, died, or not been heard of: {rest}")
        self.own_passes = not self.active or bool(needs_statistics)

    def close(self) -> None:
        """Shut down all links, and wait for all of them together."""
        self._close(self.active, self._patience)
        self.own_passes = True

    def _close(self, links: Sequence[HelperLink], patience: float) -> None:
        close_links(links, patience)
        self.active = [link for link in self.active if link not in links]


class StatsWorker(LayeredCurvature):
    """A process that computes statistics for the others' training, and does not train."""

    is_helper = True

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        system: System,
        count: int,
        patience: float,
    ) -> None:
        super().__init__(training)
        self.layers = Layers(training, options, system.rules, system.conv_approximation)
        self._system = system
        self._count = count
        self._patience = patience
        self._workers = training.world.size - count
        self.link: HelperLink | None = None  # to the workers, until it is closed
        self._snapshots = 0  # number received
        self._plan_version = 0
        self.optimized: list[bool] = []  # which parameters and buffers the workers optimize
        self.layers.find()

    def begin(self) -> None:
        """Be one of the stats workers from now on; a collective of all processes."""
        roles = _roles(self.training, self._count)
        (self.link,) = split_into_roles(self.training, roles, self._patience)
        self.optimized = _optimized(self.training)
        self._look()
        self.layers.warn_of_uncovered()

    def _look(self) -> None:
        self.layers.mark_changed()
        self.layers.start_capture()
        self.layers.update_active()
        self.layers.attach_hooks(lambda block: True)
        self.layers.set_capturing(True)

    def replan(self) -> None:
        """Look for the layers that the workers optimize: they may have added a group."""
        if self.link is None:
            return
        tensors = _model_tensors(self.training.model)
        theirs = [t for t, optimized in zip(tensors, self.optimized, strict=False) if optimized]
        self.layers.find(theirs or None)
        self._look()

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Raise ValueError: a stats worker's model stays whole."""
        raise ValueError(sharding_error(self.training.name, "stats"))

    def prepare(self) -> None:
        """Send the statistics of the last passes, and get the newest parameters."""
        self._send_statistics()
        self._load_snapshot()

    @property
    def workers_closed(self) -> bool:
        """Whether the workers have shut down."""
        return self.link is not None and self.link.peer_closed

    def serve(self, batches: Iterable[Any], loss_fn: Callable[[Any], Any]) -> int:
        """Compute statistics until the workers close; see :meth:`DistKFAC.serve`."""
        sent = 0
        try:
            for batch in cycle_batches(batches):
                if not self._load_snapshot():
                    break
                self.layers.collector.gradient_scale = GradientScale(None)
                # While everything is frozen, messages without statistics keep both sides in step.
                if any(p.requires_grad for p in self.training.model.parameters()):
                    with torch.enable_grad():
                        found = loss_fn(batch)
                        loss = found[0] if isinstance(found, tuple) else found
                        loss.backward()
                self._send_statistics()
                for p in self.training.model.parameters():
                    p.grad = None
                self.drop_pending()
                sent += 1
        except BaseException:
            self._close_link(1.0)
            raise
        if self.link is not None and not self.workers_closed:
            self.training.warn("the workers have not been heard of any more: serve() returns")
        return sent

    def _load_snapshot(self) -> bool:
        """Wait for the newest parameters, and load them; False if none will come.

        Parameters frozen there are frozen here, because their statistics would be of no use.
        """
        message = None if self.link is None else self.link.wait()
        if message is None:
            return False
        note = message.note
        self._snapshots += 1
        self._plan_version = note["plan_version"]
        load_model(message.tensors, note["train"], _model_tensors(self.training.model))
        if self.optimized != note["optimized"]:
            self.optimized = note["optimized"]
            self.replan()
        return True

    def _send_statistics(self) -> None:
        """Send the statistics captured since the last message to the layers' owners."""
        self.layers.update_active()
        active = self.layers.active
        self.layers.verify_pairs(active)
        sums = self.layers.pop_sums([block for block in active if not block.staged.empty])
        if self.layers.reduction == "step_mean":
            sums = self.layers.undo_step_mean(sums, share=1.0)
        plan = self._system.plan(list(map(layer_dims, active)), self._workers)
        owned: list[list[KroneckerBlock]] = [[] for _ in range(self._workers)]
        for block, layer in zip(active, plan.layers, strict=True):
            if block in sums:
                owned[layer.inverse_rank("A")].append(block)
        if self.link is None:
            return
        for rank, blocks in enumerate(owned):
            tensors = [t for b in blocks for t in (sums[b].head, *sums[b].factors.values())]
            self.link.send(
                tensors,
                to=rank,
                layers=[block.name for block in blocks],
                plan_version=self._plan_version,
                snapshots=self._snapshots,
            )

    def metrics(self) -> dict[str, float]:
        """The workers' names, with NaN: this process preconditions nothing."""
        return dict.fromkeys(METRIC_NAMES, math.nan)

    def summary(self) -> Summary:
        """A table of every layer that this process watches."""
        return replace(self.layers.summary({}), lines=["no inverses here"])

    def close(self) -> None:
        """Shut down the link to the workers, and release the model."""
        self._close_link(self._patience)
        self.layers.close()

    def _close_link(self, patience: float) -> None:
        if self.link is not None:
            self.link.close(patience)
            self.link = None


def with_stats_workers(
    training: Training, options: KFACOptions, system: System, own: DistKFACOptions
) -> Curvature:
    """Make this rank's curvature where the last ranks compute statistics for the others."""
    count, patience = own.stats_workers, float(own.helper_timeout)
    if own.inverse_device == "cuda":
        system = replace(system, description=f"{system.description} {training.device.type}")
    if count and training.world.size == 1:
        training.warn(
            f"{training.name}(stats_workers={count}) with one process: nobody computes "
            f"statistics on the side, so they are taken from this process's own passes"
        )
        count = 0
    if not count:
        return KFAC(training, options, system)
    system = replace(system, plan=partial(distkfac_plan, factors_everywhere=False))
    if training.world.rank < training.world.size - count:
        return KFAC(training, options, system, StatsWorkers(count, patience))
    return StatsWorker(training, options, system, count, patience)
