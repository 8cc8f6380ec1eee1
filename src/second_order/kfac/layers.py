"""The layers of a model that K-FAC preconditions, and their statistics.

    find               modules and parameters -> blocks, one for each layer
    update_active      which layers train now; a change leads to a new assignment
    start_capture      hooks -> Capture -> StatisticsCollector -> ``block.staged``
    pop_sums           the statistics since the last step, as sums that ranks add up
    update_averages    A, G <- running averages

A parameter group may set options for its own layers:

    groups = [{"params": body, "damping": 0.3}, {"params": head, "precondition": False}]

    damping         replaces the optimizer's number in γ of the group's layers
    factor_decay    replaces the optimizer's number in updates of the running averages
    precondition    False: only the base optimizer trains the group

The first two are read from ``param_groups`` whenever they are used. So checkpoints
contain them, ranks compare them at each step, and changes have an effect: a new
damping at the next refresh, a new decay at the next update. ``precondition`` is
read when layers are searched: at construction, when a group is added, and after
FSDP2 has sharded the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.fsdp import FSDPParams, is_dtensor, reshard
from second_order.kfac.losses import ASSUMPTIONS, LossReduction
from second_order.kronecker.block import KroneckerBlock, LayerStatus
from second_order.kronecker.capture import Capture
from second_order.kronecker.factors import (
    StagedStatistics,
    StatisticsSums,
    collect_sums,
    scale_to_one_term,
    update_running_averages,
)
from second_order.kronecker.fisher import LabelSampler
from second_order.kronecker.gradient import GradientBlock, gradient_sums
from second_order.kronecker.layers import Approximation
from second_order.kronecker.model_blocks import (
    PARAMETER,
    BlockRules,
    LeftToBase,
    find_blocks,
)
from second_order.kronecker.rows import Terms
from second_order.kronecker.statistics import GradientScale, StatisticsCollector
from second_order.kronecker.verification import Verification, comparisons_due, residuals
from second_order.optimizers.config import KFACOptions
from second_order.training.context import Training
from second_order.training.groups import group_params, group_settings
from second_order.utils.checks import AUTO, LAYER_OPTIONS, list_names
from second_order.utils.modules import plain_type

__all__ = [
    "NO_STATISTICS",
    "Layers",
    "describe_group_options",
    "gradient_statistics",
    "values_by_layer",
]

Groups: TypeAlias = Sequence[Mapping[str, Any]]

DEFAULT_EXAMPLES = 64.0  # per step, if no layer has counted the examples

# Reasons in warnings and in the summary.
NO_STATISTICS = (
    "no statistics arrived: its forward was not called, or did not reach the loss"
)
NOT_CALLED = (
    "at two refreshes, the forward did not call these modules, or their outputs did not reach the "
    "loss; if the model never uses them, name them in skip_layers"
)
NO_LAYER_CALLED = (
    "train the model that you passed to the optimizer, not a copy or an export of it; if that "
    "model, or another of its class, ran under torch.compile before you made the optimizer, call "
    "torch.compiler.reset() once, because the compiled graphs have no hooks"
)
UNVERIFIED = (
    "the inputs and output gradients of its calls do not reproduce its weight's gradient, so its "
    "factors would not be its curvature. If its forward scales or masks, or is replaced on the "
    "instance, or if its weight is used outside of the module, describe its class with "
    "register_layer(), or name it in skip_layers. If the loss has a weight penalty other than L2, "
    "use the base's weight decay instead. If the loss contains derivatives, compute them in the "
    "forward pass, as docs/how-to/pinns.md shows, or use DHO2"
)


class Layers:
    """The layers of a model, and the capture of their statistics.

    Attributes:
        blocks: All layers, including frozen ones.
        active: The layers that train now.
        collector: Turns captured pairs into statistics. :meth:`start_capture` makes it.
        capture: The hooks on the model. :meth:`start_capture` makes it.
        losses: How the losses of the passes are reduced.
        left_to_base: The modules and parameters that only the base trains, and why.
        newly_trainable_at: The step at which all layers are due because some became
            trainable, or lost their factors. It is the first step whose passes have
            been captured for sure. -1 if there is none.
        sharded: Whether FSDP2 has sharded a parameter of any layer.
    """

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        rules: BlockRules,
        conv_approximation: Approximation | None = None,
    ) -> None:
        self._training = training
        self._options = options
        self._rules = rules
        self._conv_approximation = conv_approximation
        self.blocks: list[KroneckerBlock] = []
        self.active: list[KroneckerBlock] = []
        self.left_to_base: list[LeftToBase] = []
        self.newly_trainable_at = -1
        self.sharded = False
        self.collector: StatisticsCollector
        self.capture: Capture
        self.losses = LossReduction(training.model, options)
        self._sampler: LabelSampler | None = None
        # At the last update_active().
        self._param_states: list[tuple[Any, ...]] | None = None
        # Layers that had no statistics at a refresh, for an unknown reason.
        self._once_without: set[str] = set()
        # Layers that some rank found unverified at their last refresh.
        self._unverified: set[str] = set()

    # --------------------------------------------------------------------- which layers

    def find(self, optimized: Iterable[Tensor] | None = None) -> None:
        """Find the layers of the parameters that are optimized.

        Args:
            optimized: These parameters; None for those of the parameter groups.

        Raises:
            ValueError: If the parameters of a layer are in groups
                with different options.
        """
        groups = self._training.groups
        if optimized is None:
            optimized = group_params(groups)
        params = list(optimized)
        reshard(self._training.model)

        # Groups that only the base trains.
        excluded: set[int] = set()
        for group in groups:
            if group.get("precondition") is False:
                excluded.update(id(p) for p in group["params"])

        rules = self._rules
        if rules.unsupported_layers == AUTO and any(map(is_dtensor, params)):
            # No rank has the whole gradients of sharded parameters.
            rules = replace(rules, unsupported_layers="base_optimizer")
        blocks, left_to_base = find_blocks(
            self._training.model,
            {id(p): p.numel() for p in params},
            self._options.skip_layers,
            {id(block.weight): block for block in self.blocks},
            self._options.factor_dtype,
            rules,
            excluded=excluded,
        )
        # Check the new layers before they replace the old ones: if a group that the
        # user adds is refused, training continues without it.
        _check_groups(groups, blocks)
        self._check_sharding(blocks)
        self.blocks = blocks
        self.left_to_base = [_name_exact_option(row) for row in left_to_base]
        self.sharded = _any_sharded(blocks)

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Replace parameters by their shards."""
        for block in self.blocks:
            block.replace_params(others)
        self.sharded = _any_sharded(self.blocks)
        self.mark_changed()
        self._check_sharding(self.blocks)

    def _check_sharding(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Raise ValueError if FSDP2 shards layers and the options forbid it."""
        if self._options.unsupported_layers == "gradient_factors" and _any_sharded(
            blocks
        ):
            raise ValueError(
                f"{self._training.name}: unsupported_layers='gradient_factors' computes factors "
                f"from whole gradients, but FSDP2 gives each rank only some of their rows; use "
                f"unsupported_layers='base_optimizer'"
            )

    def update_active(self) -> bool:
        """Update which layers train now.

        Returns whether the assignment must be made again.
        """
        if self._read_param_states() == self._param_states:
            return False
        self.active = [block for block in self.blocks if block.trainable]
        for block in self.active:
            block.reset_if_changed()
        # A reset may change the layer's shape.
        self._param_states = self._read_param_states()
        return True

    def _read_param_states(self) -> list[tuple[Any, ...]]:
        """Return what the assignment of layers to ranks depends on, for each parameter.

        A pass may have changed the shape of a layer.
        """
        states: list[tuple[Any, ...]] = []
        for block in self.blocks:
            for p in block.all_params:
                state = (p.requires_grad, p.device, p.shape, block.shape)
                states.append(state)
        return states

    def mark_changed(self) -> None:
        """Let the next :meth:`update_active` report a change."""
        self._param_states = None

    def schedule_all_at(self, step: int) -> None:
        """Set the step at which all layers are due; -1 for none."""
        self.newly_trainable_at = step

    # ----------------------------------------------------------------------- statistics

    def start_capture(
        self, on_new_statistics: Callable[[], None] | None = None
    ) -> None:
        """Make the capture that turns the model's passes into statistics.

        A later call, after the layers were searched again, replaces the collector and
        the capture. The old capture's hooks leave the model with the last reference to
        it. The hook that observes the loss stays.

        Args:
            on_new_statistics: Is called in a backward pass when statistics have grown.

        Raises:
            ValueError: If labels are sampled from the outputs of a model that may be
                only a part of the one that makes the predictions.
        """
        options = self._options
        training = self._training
        # Sampled labels need the outputs of the model that makes the predictions.
        if options.samples and training.outer_class:
            raise ValueError(
                f"fisher={options.fisher!r} samples labels from the model's outputs, but the "
                f"parameters belong to a {plain_type(training.model).__name__} inside a "
                f"{training.outer_class}, which may have other outputs; pass the module that makes "
                f"the predictions, as in {training.name}(params, model=model, lr=...)"
            )

        # Prepare the sampler, and the hook that observes how losses are reduced.
        likelihood = options.likelihood
        is_sampled = likelihood is not None
        self._sampler = None
        if likelihood is not None:
            self._sampler = LabelSampler(likelihood, training.world.rank)
        self.losses.attach(training.model)

        # Collect pairs of inputs and gradients from the passes.
        fsdp = FSDPParams(training.model)
        self.collector = StatisticsCollector(
            options.kfac_approx,
            reduction=self.losses.current,
            # The loss of sampled labels is not scaled.
            gradient_scale=GradientScale(None if is_sampled else training.scaler),
            conv_approximation=self._conv_approximation,
            fsdp=fsdp,
            comparisons_due=partial(_comparisons_due, training),
            sampled=is_sampled,
            label_per_row=is_sampled and not callable(likelihood),
            on_new_statistics=on_new_statistics,
        )
        self.collector.set_blocks(self.blocks)
        self.capture = Capture(self.collector, self._sampler, fsdp)

    def attach_hooks(self, contributes: Callable[[KroneckerBlock], bool]) -> None:
        """Hook the layers whose statistics this rank contributes to.

        The last layer counts the terms of a pass's loss. If this rank does not
        contribute to it, the layer is hooked to count its rows only, so that all ranks
        count the same terms.
        """
        hooked = [block for block in self.blocks if contributes(block)]
        rows_only: KroneckerBlock | None = None
        candidates = [block for block in self.active if block.hooked_modules]
        if candidates and candidates[-1] not in hooked:
            rows_only = candidates[-1]
            hooked.append(rows_only)
        self.collector.set_blocks(hooked, rows_only)
        modules = [module for block in hooked for module in block.hooked_modules]
        self.capture.attach(self._training.model, modules)

    def begin_passes(self, capture: bool) -> None:
        """Prepare for the passes of a step.

        Statistics are captured in them only if ``capture``. Sampled labels are those of
        this step from now on.
        """
        self.capture.gate.set(capture)
        if self._sampler is not None:
            self._sampler.begin_step(self._training.steps)

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Remove all hooks from the model inside a ``with`` block."""
        self.losses.remove()
        try:
            with self.capture.unhooked():
                yield
        finally:
            self.losses.attach(self._training.model)

    def drop_pending(self) -> None:
        """Drop the statistics of the backward passes since the last step."""
        for block in self.blocks:
            block.staged.clear()
        self.collector.step_passes.passes.clear()

    def verify_pairs(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Record how well the captured pairs reproduce the weight gradients.

        Layers whose pairs were not compared at this step do not change.
        """
        complete: dict[KroneckerBlock, Verification] = {}
        for block in blocks:
            verification = block.staged.verification
            if verification is None:
                continue
            if verification.is_complete:
                complete[block] = verification
            else:
                block.record_residual(None)
        measured = residuals(list(complete.values()))
        for block, residual in zip(complete, measured, strict=True):
            if math.isfinite(residual):
                block.record_residual(residual)

    def pop_sums(
        self, blocks: Sequence[KroneckerBlock], micro_batches: int | None = None
    ) -> dict[KroneckerBlock, StatisticsSums]:
        """Return the statistics of layers since the last step.

        This clears the statistics of all layers.

        Args:
            blocks: The layers.
            micro_batches: As :meth:`count_micro_batches` returned it, if
                it was called already.
        """
        if micro_batches is None:
            micro_batches = self.count_micro_batches(blocks)
        staged = [block.staged for block in blocks]
        terms = [counted.number for counted in self.collector.count_terms(staged)]
        sums = collect_sums(staged, micro_batches, terms)
        self.drop_pending()
        return dict(zip(blocks, sums, strict=True))

    def count_terms(self, staged: StagedStatistics) -> Terms:
        """Return the loss terms of a layer's passes since the last step."""
        return self.collector.count_terms([staged])[0]

    def undo_step_mean(
        self, sums: Mapping[KroneckerBlock, StatisticsSums], share: float
    ) -> dict[KroneckerBlock, StatisticsSums]:
        """Return sums whose G is that of single loss terms, if losses are step means.

        Each pass then divides its loss by N, the number of loss terms of the whole
        step. Where ranks average gradients, the user multiplies the loss by their
        number P as well. So the output gradients of a pass are P / N times those of
        single terms, and their products are (P / N)² times too large.

        Example: Each of 2 ranks has 8 terms, so N = 16 and P = 2. If the sums are those
        of both ranks, they count n = 16 terms, and ``share`` is N / (P n) =
        16 / (2 · 16) = 1/2. If they are those of one rank, n = 8 and ``share`` is
        16 / (2 · 8) = 1.

        Args:
            sums: The statistics, which count n of the N terms.
            share: N / (P n) for P ranks over which gradients are averaged.
        """
        shapes = [block.shape for block in sums]
        scaled = scale_to_one_term(list(sums.values()), shapes, share)
        return dict(zip(sums, scaled, strict=True))

    def update_averages(
        self, sums: dict[KroneckerBlock, StatisticsSums], decay: float
    ) -> None:
        """Update the running averages by sums over all ranks.

        A sum has the weight of its examples.

        Args:
            sums: The statistics of each layer.
            decay: Weight of earlier statistics, for layers whose groups do not set
                ``factor_decay``.
        """
        own_decays = values_by_layer(self._training.groups, sums, "factor_decay")
        blocks_by_decay: dict[float, list[KroneckerBlock]] = {}
        for block in sums:
            value = own_decays.get(block, decay)
            blocks_by_decay.setdefault(value, []).append(block)

        # Update all layers of one decay together.
        has_new_stack = False
        for value, blocks in blocks_by_decay.items():
            averages = [block.ensure_factors(statistics_due=True) for block in blocks]
            has_new_stack |= update_running_averages(
                averages, [sums[block] for block in blocks], value
            )
        if has_new_stack:
            # ``state`` has the old factors, which nothing else uses any more.
            self._training.publish()

    def count_micro_batches(self, blocks: Sequence[KroneckerBlock]) -> int:
        """Return the number of backward passes over which the user averages the loss.

        The losses of a step's passes are then divided by this number, and G is
        multiplied by its square. Otherwise the result is 1: the losses are sums, the
        user has divided them by the terms of all passes, or
        ``loss_reduction="pass_mean"`` says that nothing was divided. The first time
        that ``loss_reduction="auto"`` decides, a warning says what it assumes.
        """
        reduction = self.losses.current()
        by_option = self._options.loss_reduction in ("pass_mean", "step_mean")
        if by_option or reduction == "sum":
            return 1
        passes = 1
        for block in blocks:
            passes = max(passes, block.staged.micro_batches)
        by_default = self._options.loss_reduction == AUTO
        if (
            by_default
            and passes > 1
            and self._training.is_first_warning("micro-batches")
        ):
            self._training.warn(
                f"{passes} backward passes in a step: {ASSUMPTIONS[reduction]}"
            )
        if reduction == "step_mean":
            return 1
        return passes

    # --------------------------------------------------------------- missing statistics

    def warn_of_no_statistics(self, agreed: Mapping[KroneckerBlock, bool]) -> None:
        """Warn of each layer without valid statistics.

        There is one warning if no statistics arrived, and one if they are unverified.
        If the reason is not known, the warning waits for the layer's second refresh
        without statistics, because models with stochastic depth do not call all layers
        at each step.

        Args:
            agreed: Has the layers that were due at a refresh and whose outcome all
                ranks know. The value is whether any rank found the layer unverified.
        """
        without_statistics: list[KroneckerBlock] = []
        for block, is_unverified in agreed.items():
            if is_unverified:
                self._unverified.add(block.name)
            else:
                self._unverified.discard(block.name)
            if block.no_statistics:
                without_statistics.append(block)
        if self._training.steps < self.newly_trainable_at:
            # Layers became trainable after the forward passes, which had no hooks for
            # them.
            return
        if without_statistics and len(without_statistics) == len(self.active):
            self._warn_of_no_layer(without_statistics)
            return
        names: dict[str, list[str]] = {}  # by reason
        for block in without_statistics:
            reason = self.missing_reason(block)
            if reason:
                self._once_without.discard(block.name)
            elif block.name not in self._once_without:
                self._once_without.add(block.name)
                continue
            key = (
                f"unverified:{block.name}"
                if reason == UNVERIFIED
                else f"no:{block.name}"
            )
            if self._training.is_first_warning(key):
                names.setdefault(reason, []).append(repr(block.name))
        for reason, listed in names.items():
            subject = ", ".join(listed)
            if reason != UNVERIFIED:
                subject = f"no statistics arrived for {subject}"
            self._training.warn(
                f"{subject}: {reason or NOT_CALLED}; only the base optimizer trains them until "
                f"this changes"
            )

    def _warn_of_no_layer(self, blocks: Sequence[KroneckerBlock]) -> None:
        """Warn once that no layer has statistics."""
        training = self._training
        if not training.is_first_warning("no statistics"):
            return
        names = list_names([repr(block.name) for block in blocks])
        reason = NO_LAYER_CALLED
        for block in blocks:
            if self.missing_reason(block):
                reason = f"for example, {block.name!r}: {self.missing_reason(block)}"
                break
        if self._options.samples:
            reason += f"; fisher={self._options.fisher!r} also requires that you call the model"
        training.warn(
            f"no layer gave statistics ({names}): {training.name} now trains like "
            f"{training.base_name}; {reason}"
        )

    def warn_of_dropped_statistics(self) -> None:
        """Warn once of each layer without an inverse whose pairs this rank dropped.

        Call this after the last collective of a step, because a user may turn warnings
        into errors.
        """
        training = self._training
        for block in self.active:
            key = f"dropped:{block.name}"
            if (
                block.solved
                or block.status is not LayerStatus.CAPTURED
                or key in training.warned
            ):
                continue
            num_dropped = int(block.staged.dropped)
            if num_dropped and training.is_first_warning(key):
                training.warn(
                    f"layer {block.name!r} has no usable statistics at step {training.steps}, and "
                    f"{num_dropped} of its captured pairs were dropped, because they were "
                    f"non-finite or too large; it falls back to the base optimizer until a refresh "
                    f"has usable statistics"
                )

    def missing_reason(self, block: KroneckerBlock) -> str:
        """Return why a layer has no usable statistics; "" if it is not known."""
        if block.unverified or block.name in self._unverified:
            return UNVERIFIED
        for module in block.modules:
            reason = self.capture.missed.get(module, "")
            if reason:
                return reason
        return ""

    # ------------------------------------------------------------------------ reporting

    def description(self, system: str) -> list[str]:
        """Return the options and the layers as text, which must be equal on all ranks.

        Equal parameters do not imply equal layers.

        Args:
            system: The system's own options, as text.
        """
        settings = group_settings(vars(self._options))
        options = {
            name: value for name, value in settings.items() if not callable(value)
        }
        lines = [
            f"options: {self._training.base_name} {options} {self._rules} {system}"
        ]
        for block in self.blocks:
            kind = plain_type(block.modules[0]).__name__
            lines.append(f"layer {block.name}: {kind} {block.shape}")
        for row in self.left_to_base:
            line = f"left to the base: {row.name} ({row.kind}): {row.reason}"
            lines.append(line)
        if self._options.samples:
            lines.append(
                f"module around the model: {self._training.outer_class or None}"
            )
        return lines

    def close(self) -> None:
        """Remove all hooks from the model, and release its layers."""
        self.capture.detach()
        self.losses.remove()
        self.collector.set_blocks(())
        self.blocks = []
        self.active = []
        self.left_to_base = []
        # Those of no layers, so that update_active() reports no change.
        self._param_states = []


def _comparisons_due(training: Training) -> float:
    """Return how many comparisons a layer should have had by the current step."""
    if training.debug:
        return math.inf
    return comparisons_due(training.steps)


def _any_sharded(blocks: Iterable[KroneckerBlock]) -> bool:
    """Return whether FSDP2 has sharded a parameter of any layer."""
    return any(is_dtensor(p) for block in blocks for p in (block.weight, *block.params))


def _name_exact_option(row: LeftToBase) -> LeftToBase:
    """Name ``precondition_norms`` as the reason, if a row only lacks this option.

    With the option, the parameters of a norm layer get an exact block: a matrix of all
    their second moments instead of two Kronecker factors.
    """
    if not row.exact_if_allowed:
        return row
    subject = "it" if row.kind == PARAMETER else row.kind
    return replace(row, reason=f"{subject} needs precondition_norms=True")


# ------------------------------------------------------------- gradient-factored layers


def gradient_statistics(
    training: Training,
    terms: Tensor | None,
    blocks: Sequence[GradientBlock],
    *,
    counts_own: bool,
    mean_loss: bool,
) -> dict[KroneckerBlock, StatisticsSums]:
    """Return the statistics of gradient-factored layers. Collective if ``counts_own``.

    Args:
        training: The ranks.
        terms: Number of loss terms of the step. None, or 0, counts as 64.
        blocks: The layers. Their mean gradients must be on this rank.
        counts_own: Whether ``terms`` counts only this rank's terms.
        mean_loss: Whether the gradient is a mean over the step's
            terms, and not their sum.
    """
    # The number of the step's loss terms on all ranks.
    num_ranks = training.world.size
    own_terms = torch.zeros((), dtype=torch.float32, device=training.device)
    if terms is not None:
        own_terms = terms.to(torch.float32)
    counting_ranks = 1
    if counts_own:
        counting_ranks = num_ranks
        training.world.all_reduce_max([own_terms]).wait()
    own_terms = torch.where(own_terms > 0, own_terms, DEFAULT_EXAMPLES / counting_ranks)
    total = own_terms * counting_ranks

    # The sum over N terms of their gradients' products is about N times the product of
    # the mean gradient. If the loss is a sum instead, the ranks' average d is the sum
    # of all gradients divided by the number of ranks R, so the mean is (R / N) d, and N
    # (R / N)² = R² / N.
    scale = total if mean_loss else num_ranks**2 / total
    return gradient_sums(blocks, own_terms, scale)


# -------------------------------------------------------------------- options of groups


def values_by_layer(
    groups: Groups, blocks: Iterable[KroneckerBlock], option: str
) -> dict[KroneckerBlock, float]:
    """Return the value that each layer's group sets for an option.

    Layers without one are left out.

    Raises:
        ValueError: If a value is out of bounds.
    """
    values: dict[int, float] = {}
    for i, group in enumerate(groups):
        if option in group:
            value: Any = group[option]
            check_option = LAYER_OPTIONS[option]
            check_option(f"{option!r} of parameter group {i}: {option}", value)
            values |= dict.fromkeys(map(id, group["params"]), value)
    if not values:
        return {}
    return {
        block: values[id(block.weight)]
        for block in blocks
        if id(block.weight) in values
    }


def _check_groups(groups: Groups, blocks: Iterable[KroneckerBlock]) -> None:
    """Raise ValueError if a layer's parameters have different values of an option."""
    settings: dict[int, dict[str, Any]] = {}
    for group in groups:
        options = {option: group.get(option) for option in LAYER_OPTIONS}
        options["precondition"] = group.get("precondition", True)
        settings |= dict.fromkeys(map(id, group["params"]), options)
    for block in blocks:
        of_layer = [settings[id(p)] for p in block.all_params if id(p) in settings]
        for option in LAYER_OPTIONS:
            values = [options[option] for options in of_layer]
            # A module with several layers, such as an attention or fused experts, is
            # left to the base only as a whole. If one of its layers has
            # precondition=False, another has not.
            differs = any(value != values[0] for value in values)
            is_divided = option == "precondition" and False in values
            if differs or is_divided:
                parts = "the parameters of its module"
                if differs:
                    parts = "its weight and its bias"
                raise ValueError(
                    f"layer {block.name!r} has {parts} in parameter groups with different "
                    f"{option!r}, but they have one curvature; set {option!r} to the same value "
                    f"in all of these groups"
                )


def describe_group_options(groups: Groups) -> str:
    """Return the options of all groups as text; "" if there are none."""
    described = []
    for i, group in enumerate(groups):
        options = [
            f"{option} {group[option]}" for option in LAYER_OPTIONS if option in group
        ]
        if options:
            described.append(f"group {i}: {', '.join(options)}")
    return "; ".join(described)
