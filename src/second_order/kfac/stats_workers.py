"""Stats workers, which compute statistics for the gradient workers.

They follow DistKFAC (Zhang et al. 2023).

    worker 0      ->  stats worker    a snapshot: the next step, the current parameters
                                      and buffers, which of them are trainable, and
                                      which are optimized
    stats worker  ->  every worker    statistics at that snapshot, for the layers that
                                      the worker owns, and the unverified layers

Worker 0 sends the next snapshot after the statistics of the last one have arrived.
So no worker waits, and at most one message of each kind is on its way.

Stats workers verify layers at the same steps as training ranks. If a stats worker finds
a layer unverified, the gradient workers treat the layer as if a comparison of their own
had failed.

:class:`StatsWorkers` is the gradient workers' end of the links,
:class:`StatsWorker` is the other end.
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
from second_order.distributed.roles import (
    Roles,
    assign_roles,
    cycle_batches,
    sharding_error,
)
from second_order.kfac.coverage import summarize_layers, warn_of_uncovered
from second_order.kfac.curvature import KFAC, LayeredCurvature
from second_order.kfac.layers import Layers
from second_order.kfac.metrics import METRIC_NAMES
from second_order.kfac.plan import System, distkfac_plan, layer_dims
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import StatisticsSums
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
    """Assign the last ``count`` ranks to be stats workers."""
    return assign_roles(training.world.size, count, "stats", training.under_ddp)


def _model_tensors(model: nn.Module) -> list[Tensor]:
    """List the tensors of a snapshot: the model's parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def _are_optimized(training: Training) -> list[bool]:
    """Return for each tensor of a snapshot whether it is in the parameter groups."""
    optimized = {id(p) for group in training.groups for p in group["params"]}
    return [id(tensor) in optimized for tensor in _model_tensors(training.model)]


def unpack_statistics(
    message: Message, owned: Mapping[str, KroneckerBlock]
) -> dict[str, StatisticsSums | None]:
    """Unpack the sums of a stats worker's message.

    Args:
        message: For each layer its head, then its factors.
        owned: The layers that this rank owns, by name.

    Returns:
        The sums by layer; None if they are non-finite or count no example. Empty if the
        message has a layer that this rank does not own.
    """
    names = message.note["layers"]
    if any(name not in owned for name in names):
        return {}
    unpacked: dict[str, StatisticsSums | None] = {}
    tensors = iter(message.tensors)
    for name in names:
        block = owned[name]
        head = next(tensors)
        factors = {key: next(tensors) for key in block.shape.factor_names}
        is_finite = all(
            bool(tensor.isfinite().all()) for tensor in (head, *factors.values())
        )
        if not is_finite or not bool(head[1] > 0):
            unpacked[name] = None
            continue
        device = block.weight.device
        for factor_name, factor in factors.items():
            factors[factor_name] = factor.to(device, non_blocking=True)
        unpacked[name] = StatisticsSums(factors, head.to(device, non_blocking=True))
    return unpacked


class StatsWorkers:
    """The stats workers, from the point of view of a gradient worker.

    Args:
        count: Number of stats workers.
        timeout: Seconds without a heartbeat until a stats worker counts as lost.

    Attributes:
        links: The links to the stats workers that are alive.
        own_passes: Whether statistics come from the training passes of the workers.
        needs_statistics: Whether no message has arrived since the last
            :meth:`restart`, or the last message had statistics of this rank's layers
            and all of them were invalid.
        plan_version: The number of calls of :meth:`restart`, on the worker with the
            most calls. Statistics of earlier versions are discarded.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self.count = count
        self._timeout = timeout
        self.links: list[HelperLink] = []
        self._num_sent: dict[HelperLink, int] = {}  # snapshots that worker 0 has sent
        # Those whose statistics have arrived.
        self._num_answered: dict[HelperLink, int] = {}
        # Residuals of the unverified layers, by name, in each link's last message.
        self._unverified: dict[HelperLink, dict[str, float]] = {}
        self.own_passes = True
        self.needs_statistics = True
        self.plan_version = 0

    def begin(self, training: Training) -> None:
        """Make this rank a gradient worker. Collective over all ranks."""
        self.links += split_into_roles(
            training, _roles(training, self.count), self._timeout
        )

    def send_snapshots(self, training: Training, send: Sender) -> None:
        """On worker 0, send snapshots to stats workers that have finished theirs."""
        if training.world.rank != 0:
            return
        for link in self.links:
            num_sent = self._num_sent.get(link, 0)
            if num_sent > self._num_answered.get(link, 0):
                continue
            self._num_sent[link] = num_sent + 1
            tensors = _model_tensors(training.model)
            note: dict[str, Any] = {
                "plan_version": self.plan_version,
                "step": training.steps + 1,
                "train": [tensor.requires_grad for tensor in tensors],
                "optimized": _are_optimized(training),
            }
            send(pack_by_dtype(tensors), partial(link.send, **note))

    def receive_statistics(
        self, owned: Mapping[str, KroneckerBlock], training: Training
    ) -> Iterator[Sums]:
        """Yield the sums of each message that has arrived, for this rank's layers."""
        for link in self.links:
            message = link.receive()
            if message is None:
                continue
            self._num_answered[link] = message.note["snapshots"]
            if message.note["plan_version"] < self.plan_version:
                continue
            self._unverified[link] = message.note["unverified"]
            unpacked = unpack_statistics(message, owned)
            self.needs_statistics = bool(unpacked) and not any(unpacked.values())
            if None in unpacked.values() and training.is_first_warning("nonfinite"):
                training.warn(
                    "a stats worker has sent non-finite statistics, or none of any example: they "
                    "are discarded"
                )
            yield {
                owned[name]: sums for name, sums in unpacked.items() if sums is not None
            }

    def update_verification(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Update which layers are unverified, after the messages of a step.

        A layer is unverified while the last message of any stats worker names it. If
        statistics come from this rank's own passes, its own comparisons must also pass.
        """
        residuals: dict[str, float] = {}
        for link in self.links:
            residuals |= self._unverified.get(link, {})
        for block in blocks:
            if block.name in residuals:
                if not block.unverified:
                    block.record_residual(residuals[block.name])
            elif block.unverified and not self.own_passes:
                # Stats workers have captured its pairs.
                block.record_capture(block.work)

    def restart(self) -> None:
        """Use the training passes until new statistics arrive.

        Call this after the layers change or a checkpoint is loaded.
        """
        if self.links:
            self.own_passes = True
            self.needs_statistics = True
            self.plan_version += 1
            self._unverified.clear()

    def agree(self, training: Training) -> None:
        """Agree with the other workers on lost links and on the source of statistics.

        Collective. One worker may have loaded a checkpoint more often than the others,
        so the workers also agree on the version of the plan.

        If one worker needs statistics, or no stats worker is left, all workers use
        their training passes.
        """
        if not self.links:
            return
        is_lost = [float(link.lost or link.peer_closed) for link in self.links]
        numbers = [float(self.needs_statistics), float(self.plan_version), *is_lost]
        flags = torch.tensor(numbers, device="cpu")
        with stage("wait"):
            training.world.on_cpu().all_reduce_max([flags]).wait()
        needs_statistics, version, *is_lost = flags.tolist()
        self.plan_version = int(version)

        lost = [link for link, flag in zip(self.links, is_lost, strict=True) if flag]
        if lost:
            self._close(lost, timeout=0.1)
            names = ", ".join(f"stats worker {link.peer}" for link in lost)
            consequence = "statistics come from the training passes again"
            if self.links:
                consequence = "the other stats workers continue"
            training.warn(f"lost contact with {names}: {consequence}")
        self.own_passes = not self.links or bool(needs_statistics)

    def close(self) -> None:
        """Shut down all links."""
        self._close(self.links, self._timeout)
        self.own_passes = True

    def _close(self, links: Sequence[HelperLink], timeout: float) -> None:
        close_links(links, timeout)
        self.links = [link for link in self.links if link not in links]


class StatsWorker(LayeredCurvature):
    """A rank that computes statistics for the gradient workers, and does not train.

    Args:
        training: The training run.
        options: Options of K-FAC.
        system: The rules of DistKFAC.
        count: Number of stats workers.
        timeout: Seconds without a heartbeat until the workers count as lost.
    """

    is_helper = True

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        system: System,
        count: int,
        timeout: float,
    ) -> None:
        super().__init__(training)
        self.layers = Layers(training, options, system.rules, system.conv_approximation)
        self._options = options
        self._system = system
        self._count = count
        self._timeout = timeout
        self._num_workers = training.world.size - count
        self.link: HelperLink | None = None  # to worker 0, until it is closed
        self._num_snapshots = 0
        self._plan_version = 0
        # For each tensor of a snapshot, if the workers optimize it.
        self.optimized: list[bool] = []
        self.layers.find()

    def begin(self) -> None:
        """Make this rank a stats worker. Collective over all ranks."""
        roles = _roles(self.training, self._count)
        (self.link,) = split_into_roles(self.training, roles, self._timeout)
        self.optimized = _are_optimized(self.training)
        self._observe_layers()
        warn_of_uncovered(self.training, self._options, self.layers)

    def _observe_layers(self) -> None:
        """Capture statistics of all layers in all passes."""
        self.layers.mark_changed()
        self.layers.start_capture()
        self.layers.update_active()
        self.layers.attach_hooks(lambda block: True)
        self.layers.begin_passes(capture=True)

    def replan(self) -> None:
        """Find the layers that the workers optimize, which may include a new group."""
        if self.link is None:
            return
        optimized: list[Tensor] = []
        tensors = _model_tensors(self.training.model)
        for tensor, is_optimized in zip(tensors, self.optimized, strict=False):
            if is_optimized:
                optimized.append(tensor)
        self.layers.find(optimized or None)
        self._observe_layers()

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Raise ValueError, because the model of a stats worker cannot be sharded."""
        raise ValueError(sharding_error(self.training.name, "stats"))

    def prepare(self) -> None:
        """Send the statistics of the last passes, and load the next snapshot."""
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
                self.layers.collector.expect_unscaled_losses()
                # If every parameter is frozen, send messages without statistics all the
                # same, because worker 0 sends the next snapshot only after one.
                if any(p.requires_grad for p in self.training.model.parameters()):
                    with torch.enable_grad():
                        loss = loss_fn(batch)
                        if isinstance(loss, tuple):
                            loss = loss[0]
                        loss.backward()
                self._send_statistics()
                # The user's class may override it.
                nn.Module.zero_grad(self.training.model)
                self.drop_pending()
                sent += 1
        except BaseException:
            self._close_link(timeout=1.0)
            raise
        if self.link is not None and not self.workers_closed:
            self.training.warn("lost contact with the workers: serve() returns")
        return sent

    def _load_snapshot(self) -> bool:
        """Wait for the next snapshot, and load it.

        Returns False if the workers are gone.

        Freezes the parameters that the workers have frozen, because the workers do not
        use their statistics.
        """
        message = None if self.link is None else self.link.wait()
        if message is None:
            return False
        note = message.note
        self._num_snapshots += 1
        self._plan_version = note["plan_version"]
        self.training.resume_at(note["step"])  # verifies layers when the workers do
        load_model(message.tensors, note["train"], _model_tensors(self.training.model))
        if self.optimized != note["optimized"]:
            self.optimized = note["optimized"]
            self.replan()
        return True

    def _send_statistics(self) -> None:
        """Send each layer's statistics since the last message to the layer's owner."""
        self.layers.update_active()
        active = self.layers.active
        self.layers.verify_pairs(active)
        unverified = {
            block.name: block.residual for block in active if block.unverified
        }
        sums = self.layers.pop_sums(
            [block for block in active if not block.staged.empty]
        )
        if self.layers.losses.current() == "step_mean":
            sums = self.layers.undo_step_mean(sums, share=1.0)

        # Group them by the worker that inverts the layer.
        plan = self._system.plan(
            [layer_dims(block) for block in active], self._num_workers
        )
        owned: list[list[KroneckerBlock]] = [[] for _ in range(self._num_workers)]
        for block, layer in zip(active, plan.layers, strict=True):
            if block in sums:
                owned[layer.inverse_rank("A")].append(block)
        if self.link is None:
            return
        # Send one message to each worker. Its layers have as many tensors as factors,
        # plus a head. All workers fall back for the unverified layers.
        for rank, blocks in enumerate(owned):
            tensors: list[Tensor] = []
            for block in blocks:
                tensors.append(sums[block].head)
                tensors += sums[block].factors.values()
            self.link.send(
                tensors,
                to=rank,
                layers=[block.name for block in blocks],
                plan_version=self._plan_version,
                snapshots=self._num_snapshots,
                unverified=unverified,
            )

    def metrics(self) -> dict[str, float]:
        """Return NaN for each metric, because this rank preconditions nothing."""
        return dict.fromkeys(METRIC_NAMES, math.nan)

    def summary(self) -> Summary:
        """Return a table of the observed layers."""
        table = summarize_layers(
            self.training, self._options, self.layers, assignment={}
        )
        return replace(table, lines=["no inverses here"])

    def close(self) -> None:
        """Shut down the link to the workers, and release the model."""
        self._close_link(self._timeout)
        self.layers.close()

    def _close_link(self, timeout: float) -> None:
        if self.link is not None:
            self.link.close(timeout)
            self.link = None


def with_stats_workers(
    training: Training, options: KFACOptions, system: System, own: DistKFACOptions
) -> Curvature:
    """Return this rank's curvature.

    The last ``stats_workers`` ranks become stats workers.
    """
    count = own.stats_workers
    timeout = float(own.helper_timeout)
    if own.inverse_device == "cuda":
        system = replace(
            system, description=f"{system.description} {training.device.type}"
        )
    if count and training.world.size == 1:
        training.warn(
            f"{training.name}(stats_workers={count}) has one process only: statistics come from "
            f"its training passes"
        )
        count = 0
    if not count:
        return KFAC(training, options, system)
    system = replace(system, plan=partial(distkfac_plan, factors_everywhere=False))
    if training.world.rank < training.world.size - count:
        return KFAC(training, options, system, StatsWorkers(count, timeout))
    return StatsWorker(training, options, system, count, timeout)
