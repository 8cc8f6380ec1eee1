"""The layers of a model that K-FAC preconditions: found, watched, and followed as they change.

A parameter group may set options for its own layers:

    groups = [{"params": body, "damping": 0.3}, {"params": head, "precondition": False}]

damping        replaces the optimizer's number in the γ of the group's layers
factor_decay   replaces the optimizer's number in the updates of the layers' running averages
precondition   False: the base optimizer alone trains the group

The first two are read from ``param_groups`` when they are used. So checkpoints contain them, ranks
compare them at each step, and a new damping acts at the next refresh, a new decay at the next
update. ``precondition`` is read when layers are found: at construction, and when a group is added.
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
from second_order.kfac.losses import (
    SAID,
    ItemsHook,
    reduction_of,
    watch_items,
)
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.capture import Capture
from second_order.kronecker.factors import (
    Reduction,
    StagedStatistics,
    StatisticsSums,
    collect_sums,
    scale_to_one_term,
    update_running_averages,
)
from second_order.kronecker.fisher import LabelSampler
from second_order.kronecker.gradient import GradientBlock, gradient_sums
from second_order.kronecker.layers import Approximation, FactorShape
from second_order.kronecker.model_blocks import BlockRules, LeftToBase, find_blocks
from second_order.kronecker.rows import Terms
from second_order.kronecker.statistics import GradientScale, StatisticsCollector
from second_order.kronecker.verification import Verification, residuals
from second_order.optimizers.config import KFACOptions
from second_order.reporting.summary import LayerRow, Summary
from second_order.training.context import Training, warn
from second_order.training.groups import group_params, group_settings
from second_order.utils.checks import AUTO, LAYER_OPTIONS
from second_order.utils.modules import plain_type, unmatched_patterns

__all__ = [
    "SILENT",
    "Layers",
    "describe_group_options",
    "gradient_blocks",
    "gradient_statistics",
    "values_by_layer",
]

Groups: TypeAlias = Sequence[Mapping[str, Any]]
Look: TypeAlias = tuple[bool, torch.device, torch.Size, FactorShape]

USUAL_BATCH = 64.0  # examples, where nothing tells their number

UNREACHED = (
    "the forward does not call these modules, or their outputs do not reach the loss; see to it "
    "that they do"
)

MOST_NAMES = 10  # in a warning
NONE_AT_ALL = (
    "train the very model that the optimizer was given, not a copy or an export of it; a model "
    "that had run under torch.compile before the optimizer was made, or another of its class, has "
    "left graphs without hooks: call torch.compiler.reset() once"
)
REMEDY = (
    "precondition_norms=True, a larger max_factor_dim or a shorter skip_layers, and where "
    "register_layer() tells what a class computes"
)
UNEXPLAINED = (
    "the inputs and output gradients of its calls do not make its weight's gradient, so that its "
    "factors would not be its curvature: its forward scales or masks, or is replaced on the "
    "instance, its weight is used outside of its module too, or the loss contains derivatives; "
    "tell how its class computes by register_layer(), or name it in skip_layers"
)
SILENT = "no statistics have arrived: its forward is not called, or does not reach the loss"


class Layers:
    """The blocks of a model, and the statistics that its passes leave in them."""

    def __init__(
        self,
        training: Training,
        options: KFACOptions,
        rules: BlockRules,
        conv_approximation: Approximation | None = None,
    ) -> None:
        self._training, self._options, self._rules = training, options, rules
        self._conv_approximation = conv_approximation
        self.blocks: list[KroneckerBlock] = []  # of all layers, frozen ones too
        self.active: list[KroneckerBlock] = []  # those that train now
        self.left: list[LeftToBase] = []  # the parameters left to the base, and why
        # The first step whose passes are sure to have been captured for layers that began to train
        # in mid-run, or lost their factors.
        self.newcomers_at = -1
        # What decides the plan, as it was when it was last looked at.
        self._looks: list[Look] | None = None
        self.expecting = True
        self._items: ItemsHook | None = None

    def find(self, optimized: Iterable[Tensor] | None = None) -> None:
        """Find the layers of the parameters in the groups that have blocks, or of others'."""
        options, rules = self._options, self._rules
        params = list(group_params(self._training.groups) if optimized is None else optimized)
        reshard(self._training.model)
        groups = self._training.groups
        known = {id(block.weight): block for block in self.blocks}
        left_alone = [group["params"] for group in groups if group.get("precondition") is False]
        excluded = {id(p) for each in left_alone for p in each}
        if rules.unsupported_layers == AUTO and any(map(is_dtensor, params)):
            # No rank has the whole gradients of sharded parameters.
            rules = replace(rules, unsupported_layers="base_optimizer")
        blocks, left = find_blocks(
            self._training.model,
            {id(p): p.numel() for p in params},
            options.skip_layers,
            known,
            options.factor_dtype,
            rules,
            excluded=excluded,
        )
        _check_groups(groups, blocks)
        self.blocks, self.left = blocks, left

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has sharded any parameter of a layer."""
        return any(is_dtensor(p) for b in self.blocks for p in (b.weight, *b.params))

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Put other parameters in the place of some, of which they are shards."""
        for block in self.blocks:
            block.replace_params(others)
        self.forget_plan()

    def description(self, said: str) -> list[str]:
        """What must be equal on all ranks: options, and layers, as equal parameters can differ."""
        shown = {k: v for k, v in group_settings(vars(self._options)).items() if not callable(v)}
        options = f"options: {self._training.base_name} {shown} {self._rules} {said}"
        kinds = [(block, plain_type(block.modules[0]).__name__) for block in self.blocks]
        layers = [f"layer {block.name}: {kind} {block.shape}" for block, kind in kinds]
        left = [f"left to the base: {row.name} ({row.kind}): {row.reason}" for row in self.left]
        outer = f"module around the model: {self._training.outer_class or None}"
        outputs = [outer] if self._options.samples else []
        return [options, *layers, *left, *outputs]

    def name_those_left(self) -> None:
        """Warn, once each, of the modules that are trained without curvature."""
        training = self._training
        for pattern in unmatched_patterns(training.model, self._options.skip_layers):
            if training.is_first_warning(f"pattern:{pattern}"):
                training.warn(
                    f"skip_layers: the pattern {pattern!r} matches no module of the model"
                )
        new = [row for row in self._left_training() if training.is_first_warning(f"left:{row}")]
        if not new:
            return
        heard = [block for block in self.blocks if block.trainable and not block.no_statistics]
        total = sum(p.numel() for p in training.trainable_params())
        share = sum(block.size for block in heard) / max(total, 1)
        # With FSDP2 no rank has whole gradients, which 'gradient_factors' needs.
        options = "" if self.sharded else "unsupported_layers='gradient_factors', "
        training.warn(
            f"{share:.1%} of the parameters preconditioned; trained by {training.base_name} "
            f"alone, without curvature: {_listed(new)}; summary() tells why"
            + ("" if share >= 0.5 else f"; more are with {options}{REMEDY}")
        )

    def _left_training(self) -> list[LeftToBase]:
        """The modules and parameters that the base alone trains now."""
        covered = {id(p) for block in self.blocks for p in block.params}
        params = {id(p) for p in self._training.trainable_params()} - covered
        names: set[str] = set()
        inside: set[int] = set()
        reshard(self._training.model)
        for name, p in self._training.model.named_parameters(remove_duplicate=False):
            if id(p) in params:
                names |= {name, name.rpartition(".")[0] or "(model)"}
                inside.add(id(p))
        if inside != params:
            names.add("(no module)")
        return [row for row in self.left if row.name in names]

    def follow(self) -> bool:
        """Look at which layers train now; returns whether others than before."""
        if self._look_around() == self._looks:
            return False
        for block in self.blocks:
            block.reset_if_changed()
        self._looks = self._look_around()
        self.active = [block for block in self.blocks if block.trainable]
        return True

    def _look_around(self) -> list[Look]:
        looks: list[Look] = []
        for block in self.blocks:  # a pass may have changed a block's shape
            looks += [(p.requires_grad, p.device, p.shape, block.shape) for p in block.owned]
        return looks

    def take_all_at(self, step: int) -> None:
        """Take statistics and refresh all layers at a step; -1 for none."""
        self.newcomers_at = step

    def forget_plan(self) -> None:
        """Let the next :meth:`follow` take all layers that train for new ones."""
        self._looks = None

    # -------------------------------------------------------------------------------- statistics

    def connect(self, on_new_statistics: Callable[[], None] | None = None) -> None:
        """Make the capture that turns the model's passes into statistics.

        ``on_new_statistics`` is called in a backward pass when statistics of layers have grown.

        Raises:
            ValueError: If labels are to be sampled from a model that may not be the whole one.
        """
        options, training = self._options, self._training
        if options.samples and training.outer_class:
            raise ValueError(
                f"fisher={options.fisher!r} samples labels from the model's outputs, and the "
                f"parameters belong to a {plain_type(training.model).__name__} inside a "
                f"{training.outer_class}, which may have other outputs; give the module that makes "
                f"the predictions, as in {training.name}(params, model=model, lr=...)"
            )
        likelihood = options.likelihood
        sampled = likelihood is not None
        scaler = None if sampled else self._training.scaler
        fsdp = FSDPParams(self._training.model)
        if self._items is None:
            self._items = watch_items(self._training.model, options, self)
        self.collector = StatisticsCollector(
            options.kfac_approx,
            options.factor_dtype,
            reduction=partial(reduction_of, options, self._items),
            gradient_scale=GradientScale(scaler),
            conv_approximation=self._conv_approximation,
            warn=warn,
            fsdp=fsdp,
            always_verify=self._training.debug,
            sampled=sampled,
            label_per_row=sampled and not callable(likelihood),
            on_new_statistics=on_new_statistics,
        )
        self.collector.set_blocks(self.blocks)
        rank = self._training.world.rank
        self._sampler = None if likelihood is None else LabelSampler(likelihood, rank)
        self.expecting = True
        self.capture = Capture(self.collector, self._sampler, fsdp)

    def watch(self, taken: Callable[[KroneckerBlock], bool]) -> None:
        """Hook the layers whose statistics this process takes.

        The last layer shows the terms of a pass's loss. If another process takes its statistics, it
        is hooked for its rows alone, so that all processes count the same terms.
        """
        watched = [block for block in self.blocks if taken(block)]
        rows_only: KroneckerBlock | None = None
        last = [block for block in self.active if block.hooked_modules][-1:]
        if last and last[0] not in watched:
            rows_only = last[0]
            watched += last
        self.collector.set_blocks(watched, rows_only)
        self.capture.attach(self._training.model, [m for b in watched for m in b.hooked_modules])

    def expect(self, due: bool) -> None:
        """Capture during the coming passes only if the coming step wants statistics."""
        self.expecting = due
        self.capture.gate.set(due)
        if self._sampler is not None:
            self._sampler.begin_step(self._training.steps)

    @property
    def reduction(self) -> Reduction:
        """What the losses are taken to be whose gradients are captured."""
        return reduction_of(self._options, self._items)

    @contextmanager
    def hooks_removed(self) -> Iterator[None]:
        """Take all hooks off the model for a block, and put them back."""
        if self._items is not None:
            self._items.remove()
        try:
            with self.capture.unhooked():
                yield
        finally:
            if self._items is not None:
                self._items.hang(self._training.model)

    def drop_pending(self) -> None:
        """Drop the statistics of backward passes already completed."""
        for block in self.blocks:
            block.staged.clear()
        self.collector.step_passes.passes.clear()

    def look(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Judge whether the pairs of layers explain their gradients, where these were compared."""
        found: dict[KroneckerBlock, Verification] = {}
        for block in blocks:
            verification = block.staged.verification
            if verification is not None and verification.is_complete:
                found[block] = verification
            elif verification is not None:
                block.record_residual(None)
        for block, residual in zip(found, residuals(list(found.values())), strict=True):
            if math.isfinite(residual):
                block.record_residual(residual)

    def sums(
        self, blocks: Sequence[KroneckerBlock], micro_batches: int | None = None
    ) -> dict[KroneckerBlock, StatisticsSums]:
        """The statistics of some layers since the last step; those of all layers are cleared."""
        if micro_batches is None:
            micro_batches = self.micro_batches(blocks)
        staged = [block.staged for block in blocks]
        terms = [each.number for each in self.collector.count_terms(staged)]
        found = collect_sums(staged, micro_batches, terms)
        self.drop_pending()
        return dict(zip(blocks, found, strict=True))

    def terms_so_far(self, staged: StagedStatistics) -> Terms:
        """The terms of a layer's passes since the last step; a pass may still be running."""
        return self.collector.count_terms([staged])[0]

    def whole_steps(
        self, sums: Mapping[KroneckerBlock, StatisticsSums], share: float
    ) -> dict[KroneckerBlock, StatisticsSums]:
        """The sums over all processes, with G that of one term whatever the losses' reduction.

        Of losses divided by the N terms of the whole step a gradient d is 1 / N of a term's,
        times the number of processes, over which the sums of gradients are averaged. The ``share``
        of N in the numbers of ``sums``, over that number of processes.
        """
        found = scale_to_one_term(list(sums.values()), [block.shape for block in sums], share)
        return dict(zip(sums, found, strict=True))

    def take_in(self, sums: dict[KroneckerBlock, StatisticsSums], decay: float) -> None:
        """Update the running averages by sums over all processes, weighted by their examples.

        ``decay`` is the weight of the past of layers whose groups have none of their own.
        """
        averages = {block: block.ensure_factors(statistics_due=True) for block in sums}
        before = [id(x) for each in averages.values() for x in each.stored.values()]
        own_decays = values_by_layer(self._training.groups, sums, "factor_decay")
        for past in {decay, *own_decays.values()}:
            blocks = [block for block in sums if own_decays.get(block, decay) == past]
            update_running_averages([averages[b] for b in blocks], [sums[b] for b in blocks], past)
        if before != [id(x) for each in averages.values() for x in each.stored.values()]:
            self._training.publish()  # frees those that have become slices of a stack

    def micro_batches(self, blocks: Sequence[KroneckerBlock]) -> int:
        """The number that each pass's loss was divided by: the passes with "auto", else 1."""
        options, training, reduction = self._options, self._training, self.reduction
        if options.loss_reduction in ("pass_mean", "step_mean") or reduction == "sum":
            return 1
        found = max([1, *(block.staged.micro_batches for block in blocks)])
        if found > 1 and training.is_first_warning("micro-batches"):
            training.warn(f"{found} backward passes in a step: {SAID[reduction]}")
        return found if reduction == "mean" else 1

    # ------------------------------------------------------------------------- what goes wrong

    def tell_of_silence(self, agreed: Sequence[KroneckerBlock]) -> None:
        """Warn, once each, of those of some layers of which no statistic has ever come."""
        silent = [block for block in agreed if block.no_statistics]
        training = self._training
        if silent and len(silent) == len(self.active):
            if training.is_first_warning("no statistics"):
                cause = next(filter(None, map(self._why_silent, silent)), NONE_AT_ALL)
                if self._options.samples:
                    fisher = f"fisher={self._options.fisher!r}"
                    cause += f"; {fisher} also needs the model itself to be called"
                training.warn(
                    f"no layer gave statistics: {training.name} now does no more than "
                    f"{training.base_name}; {cause}"
                )
            return
        names: dict[str, list[str]] = {}
        for block in silent:
            if training.is_first_warning(f"no:{block.name}"):
                names.setdefault(self._why_silent(block), []).append(repr(block.name))
        for reason, absent in names.items():
            said = "" if reason == UNEXPLAINED else "no statistics arrived for "
            training.warn(
                f"{said}{', '.join(absent)}: {reason or UNREACHED}; the base optimizer trains them "
                f"until then"
            )

    def _why_silent(self, block: KroneckerBlock) -> str:
        """Why no pair of a layer has come, or is of any use; "" if that is not known."""
        if block.unverified:
            return UNEXPLAINED
        reasons = (self.capture.missed.get(module, "") for module in block.modules)
        return next(filter(None, reasons), "")

    def unexplained_elsewhere(self, block: KroneckerBlock) -> None:
        """Note that a process, perhaps another one, has found a layer's gradient unexplained."""
        self.capture.missed.update(dict.fromkeys(block.modules, UNEXPLAINED))

    # --------------------------------------------------------------------------------- the rest

    def summary(self, said: Mapping[str, str]) -> Summary:
        """A table of every layer, and of the parameters left to the base."""
        rows: list[LayerRow] = []
        for block in self.blocks:
            status = "preconditioned" if block.trainable else "frozen"
            detail = _factors(block.shape)
            if block.no_statistics:
                status = "base" if block.trainable else "frozen"
                detail = self._why_silent(block) or SILENT
            if block.no_statistics and block.unverified:
                detail = f"{block.residual:.0%} of its gradient unexplained: {detail}"
            row = LayerRow(
                name=block.name,
                kind=plain_type(block.modules[0]).__name__,
                parameters=block.size,
                status=status,
                detail=detail,
                computed_by=said.get(block.name, ""),
                factor_bytes=block.factor_bytes,
                inverse_bytes=block.inverse_bytes,
            )
            rows.append(row)
        trains = self._left_training()
        for left in self.left:
            status = "base" if left in trains else "frozen"
            rows.append(LayerRow(left.name, left.kind, left.parameters, status, left.reason))
        return Summary(
            self._training.summary_title(self._options.solver),
            rows,
            dropped=sum(int(block.staged.dropped) for block in self.blocks),
            failed=sum(block.failures > 0 for block in self.blocks),
        )

    def close(self) -> None:
        """Remove every hook from the model, and forget its layers."""
        self.capture.detach()
        if self._items is not None:
            self._items.remove()
        self.collector.set_blocks(())
        self.blocks, self.active, self.left, self._looks = [], [], [], []


def _factors(shape: FactorShape) -> str:
    """The sizes of a layer's factors, in words."""
    if shape.exact:
        size = shape.groups * shape.out_dim
        return f"exact, diagonal {size}" if shape.groups > 1 else f"exact {size}²"
    groups = "of gradients: " if shape.gradient_factored else ""
    groups = f"{shape.groups} x " if shape.groups > 1 and not groups else groups
    squares = {k: "" if k in shape.diagonals else "²" for k in shape.factor_names}
    return groups + ", ".join(f"{k} {shape.dims[k]}{square}" for k, square in squares.items())


def _listed(left: Sequence[LeftToBase]) -> str:
    """What is left to the base, the largest first, and norm layers as one."""
    norms = sum(row.norm and not row.unexpected for row in left)
    others = [row for row in left if not row.norm or row.unexpected]
    others.sort(key=lambda row: -row.parameters)
    names = [str(row) for row in others[:MOST_NAMES]]
    if len(others) > MOST_NAMES:
        names.append(f"{len(others) - MOST_NAMES} more")
    if norms:
        names.append(f"{norms} norm layer{'s' if norms > 1 else ''}")
    return ", ".join(names)


def gradient_blocks(blocks: Iterable[KroneckerBlock]) -> list[GradientBlock]:
    """The blocks whose factors are made of gradients."""
    return [block for block in blocks if isinstance(block, GradientBlock)]


def gradient_statistics(
    training: Training,
    terms: Tensor | None,
    mine: Sequence[GradientBlock],
    *,
    counts_own: bool,
    mean_loss: bool,
) -> dict[KroneckerBlock, StatisticsSums]:
    """The sums of the blocks whose mean gradients are here; a collective if ``counts_own``.

    Statistics are taken of ``mine``. ``terms`` is the number of the step's loss terms, of this rank
    alone if it ``counts_own``; None, or 0, counts as 64. ``mean_loss``: the gradient is a mean over
    the step's terms, not a sum.
    """
    size = training.world.size
    examples = torch.zeros((), dtype=torch.float32, device=training.device)
    if terms is not None:
        examples = terms.to(torch.float32)
    if counts_own:
        training.world.all_reduce_max([examples]).wait()
    ranks = size if counts_own else 1
    examples = torch.where(examples > 0, examples, USUAL_BATCH / ranks)
    everywhere = examples * ranks
    # A sum over examples is divided by the processes where gradients are averaged over these.
    scale = everywhere if mean_loss else size**2 / everywhere
    return gradient_sums(mine, examples, scale)


# ------------------------------------------------------------------------- options of groups


def values_by_layer(
    groups: Groups, blocks: Iterable[KroneckerBlock], option: str
) -> dict[KroneckerBlock, float]:
    """The number that each layer's group sets for an option; layers without one are left out."""
    numbers: dict[int, float] = {}
    for i, group in enumerate(groups):
        if option in group:
            number: Any = group[option]
            LAYER_OPTIONS[option](f"{option!r} of parameter group {i}: {option}", number)
            numbers |= dict.fromkeys(map(id, group["params"]), number)
    if not numbers:
        return {}
    return {block: numbers[id(block.weight)] for block in blocks if id(block.weight) in numbers}


def _check_groups(groups: Groups, blocks: Iterable[KroneckerBlock]) -> None:
    """Raise ValueError if the parameters of a layer have different values of an option."""
    settings: dict[int, dict[str, Any]] = {}
    for group in groups:
        options = {option: group.get(option) for option in LAYER_OPTIONS}
        options["precondition"] = group.get("precondition", True)
        settings |= dict.fromkeys(map(id, group["params"]), options)
    for block in blocks:
        known = [settings[id(p)] for p in block.owned if id(p) in settings]
        for option in LAYER_OPTIONS:
            values = [each[option] for each in known]
            # A module with precondition=False for all of its parameters has no block.
            divided = option == "precondition" and False in values
            if divided or any(value != values[0] for value in values):
                raise ValueError(
                    f"layer {block.name!r} has its weight and its bias in parameter groups with "
                    f"different {option!r}: a layer has one curvature, so give its groups the same"
                )


def describe_group_options(groups: Groups) -> str:
    """The options of all groups as the summary shows them; "" if there are none."""
    found = []
    for i, group in enumerate(groups):
        own = [f"{option} {group[option]}" for option in LAYER_OPTIONS if option in group]
        if own:
            found.append(f"group {i}: {', '.join(own)}")
    return "; ".join(found)
