"""Predict time, memory and bytes of every system and setting, and recommend one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from second_order.distributed.world import World
from second_order.kronecker.autograd import attention_by_out_proj, is_attention
from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.kinds import TIED_OUTPUT
from second_order.kronecker.model_blocks import BlockRules, find_blocks
from second_order.optimizers.config import KFACOptions
from second_order.planning.cost import (
    SIMILAR,
    Costs,
    Layer,
    Setting,
    predict,
    worker_counts,
)
from second_order.planning.machine import (
    ASSUMED_NETWORKS,
    Interconnect,
    Machine,
    bytes_sent,
    measure_ranks,
    seconds_of,
)
from second_order.reporting.summary import aligned
from second_order.utils.checks import check_count, check_number

__all__ = ["Choice", "Passes", "Plan", "plan", "run_model"]

SYSTEMS = ("KAISA", "DPKFAC", "DistKFAC")
SOLVERS = ("inverse", "eigen")


@dataclass(frozen=True)
class Choice:
    """A setting, and what it costs.

    Attributes:
        setting: The optimizer, and those of its keywords that decide its costs.
        costs: What the curvature costs.
        seconds: Seconds per step, with the model's passes and the average of gradients.
        memory: Bytes on the fullest rank: parameters, gradients, the base optimizer's
            state, activations, and the curvature.
        sent: Bytes per step that one rank sends.
        fits: Whether the allowed memory is enough.
    """

    setting: Setting
    costs: Costs
    seconds: float
    memory: float
    sent: float
    fits: bool = True

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the optimizer that select this setting."""
        return self.setting.keywords


@dataclass(frozen=True)
class Plan:
    """The settings for a number of ranks, and the one that is recommended.

    Attributes:
        world_size: Number of ranks.
        choices: The settings, the fastest first.
        recommended: The setting to take. None: no setting fits into memory.
        reason: Why, in words.
        base: Seconds per step of the base optimizer alone, with averaged gradients.
        machine: The machine of every rank.
        network: The links between the ranks.
        memory: Bytes that a rank may use. None: no limit.
    """

    world_size: int
    choices: tuple[Choice, ...]
    recommended: Choice | None
    reason: str
    base: float
    machine: Machine
    network: Interconnect
    memory: float | None = None

    def summary(self, rows: int | None = 12) -> str:
        """The settings as a table, and the recommendation.

        Args:
            rows: The largest number of rows. None: all rows.
        """
        # One row per setting, with its time by part.
        columns = ("statistics", "inverses", "precondition")
        header = ["system", "setting", "solver", "ms per step", "over base", *columns]
        table = [[*header, "messages", "memory", "sent", ""]]
        for choice in self.choices[:rows]:
            setting = choice.setting
            seconds = [choice.costs.parts[name] for name in columns]
            seconds.append(choice.costs.seconds - sum(seconds))
            note = ""
            if choice is self.recommended:
                note = "recommended"
            elif not choice.fits:
                note = "does not fit"
            row = [setting.system, setting.mode, setting.solver]
            row += [_in_ms(choice.seconds), f"{choice.seconds / self.base - 1:+.0%}"]
            row += map(_in_ms, seconds)
            row += [_in_words(choice.memory), _in_words(choice.sent), note]
            table.append(row)

        # The base's own time comes first, the reason of the recommendation last.
        lines = [
            f"{self.world_size} ranks, {self.machine.name}; network {self.network.origin}; the "
            f"base optimizer alone takes {_in_ms(self.base)} ms per step",
            *aligned(table, set(range(3, 11))),
        ]
        hidden = len(self.choices) + 1 - len(table)
        if hidden:
            lines.append(f"and {hidden} slower settings")
        return "\n".join([*lines, self.reason])

    def __str__(self) -> str:
        return self.summary()


def plan(
    model: nn.Module,
    sample_batch: Any,
    world_size: int = 1,
    *,
    machine: Machine | None = None,
    network: Interconnect | None = None,
    memory: float | None = None,
    systems: Sequence[str] = SYSTEMS,
    factor_update_steps: int = 10,
    inv_update_steps: int = 10,
    skip_layers: Sequence[str] = (),
    base_state: float = 1.0,
) -> Plan:
    """Predict time, memory and bytes of every system's settings, and recommend one.

    A copy of the model runs forward and backward on ``sample_batch``, the batch of one
    rank. All else follows from the sizes of its layers: see docs/evidence/planning.md.
    One process is enough: nothing is sent. The model stays as it is.

    Args:
        model: The model. It may be on the meta device if you pass ``machine``.
        sample_batch: One rank's batch, as the model's arguments: a tensor, a tuple or
            list of arguments, or a dictionary by name.
        world_size: Number of ranks.
        machine: The machine of each rank; the passes then take the time of their matrix
            products. None: the machine that the model is on is measured, and so are the
            passes.
        network: The links between the ranks, as :func:`calibrate` measures them. None:
            round numbers, which the documentation gives.
        memory: Bytes that a rank may use, as 80e9. None: the machine's, if known.
        systems: Names of the optimizers.
        factor_update_steps: Steps between two updates of the factors.
        inv_update_steps: Steps between two refreshes.
        skip_layers: As the optimizers' keyword.
        base_state: The base optimizer's state, as a multiple of the parameters: 1.0 for
            SGD with momentum, 2.0 for AdamW.

    Raises:
        TypeError: If the model is not a module, or an argument has another type.
        ValueError: For values out of range, a model that cannot be copied, or one that
            does not take the batch.
    """
    # Check the arguments.
    check_count("world_size", world_size, "ranks")
    check_count("factor_update_steps", factor_update_steps, "steps")
    check_count("inv_update_steps", inv_update_steps, "steps")
    remedy = "1.0 for SGD with momentum, 2.0 for AdamW"
    check_number("base_state", base_state, low=0.0, open_high=True, remedy=remedy)
    if memory is not None:
        remedy = "bytes, as 80e9, or None for the machine's"
        check_number("memory", memory, low=0.0, open_low=True, remedy=remedy)
    if isinstance(systems, str) or not systems or not set(systems) <= set(SYSTEMS):
        raise ValueError(
            f"systems={systems!r}; pass a list of some of {', '.join(SYSTEMS)}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if not isinstance(sample_batch, (Tensor, Mapping, list, tuple)):
        raise TypeError(
            f"sample_batch is a {type(sample_batch).__name__}; pass the model's arguments: a "
            f"tensor, a tuple or list of them, or a dictionary by name"
        )
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        raise ValueError(
            "no parameter of the model requires a gradient; set requires_grad"
        )
    if device.type == "meta" and machine is None:
        raise ValueError("a model on the meta device cannot be timed; pass machine=")

    # Run the model once, for the sizes of layers' batches and the time of passes.
    found = run_model(
        model, sample_batch, device, skip_layers, is_timed=machine is None
    )
    if not found.layers:
        raise ValueError(
            "no layer of the model has Kronecker factors; see docs/reference/layers.md"
        )
    if machine is None:
        # This rank measures alone, because the others need not call this.
        machine, _ = measure_ranks(device, World.alone())
    network = network or ASSUMED_NETWORKS[machine.device]
    allowed = memory
    if allowed is None:
        allowed = machine.memory

    # The base optimizer alone: the passes, and the average of all gradients.
    passes = found.seconds
    if passes is None:
        passes = machine.product_seconds(found.flops)
    gather = network.gather_seconds(found.trained_bytes, world_size)
    base = passes + 2 * gather
    first_order_bytes: float = found.parameter_bytes + found.activation_bytes
    first_order_bytes += (1 + base_state) * found.trained_bytes

    # Predict the costs of each setting.
    choices: list[Choice] = []
    settings = _settings(systems, world_size, factor_update_steps, inv_update_steps)
    for setting in settings:
        costs = predict(found.layers, setting, machine, network)
        # DPKFAC sums a gradient only at its owner, which is half an all-reduce.
        averages = 1 if setting.system == "DPKFAC" else 2
        seconds = passes + averages * gather + costs.seconds
        size = first_order_bytes + costs.curvature_bytes + costs.pending_bytes
        sent = costs.sent + averages * bytes_sent(found.trained_bytes, world_size)
        fits = allowed is None or size <= allowed
        choices.append(Choice(setting, costs, seconds, size, sent, fits=fits))
    choices.sort(key=lambda choice: choice.seconds)
    best, reason = _recommended(choices, allowed)
    return Plan(
        world_size=world_size,
        choices=tuple(choices),
        recommended=best,
        reason=reason,
        base=base,
        machine=machine,
        network=network,
        memory=allowed,
    )


@dataclass(frozen=True)
class Passes:
    """What a forward and a backward pass of the model show.

    Attributes:
        layers: The layers with factors.
        flops: Floating point operations of both passes.
        seconds: Measured seconds of both passes. None: not measured.
        activation_bytes: Bytes that the forward pass saves for the backward pass.
        parameter_bytes: Bytes of all parameters.
        trained_bytes: Bytes of those that require a gradient.
    """

    layers: list[Layer]
    flops: int
    seconds: float | None
    activation_bytes: int
    parameter_bytes: int
    trained_bytes: int


def run_model(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    skip_layers: Sequence[str],
    *,
    is_timed: bool,
) -> Passes:
    """Run a copy of the model forward and backward, and keep generators' states."""
    try:
        twin = copy.deepcopy(model).train()
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied: {type(error).__name__}: {error}; delete what a forward "
            f"pass has stored in its modules, such as cached activations"
        ) from error
    trained = [p for p in twin.parameters() if p.requires_grad]
    sizes = {id(p): p.numel() for p in trained}
    rules = BlockRules(max_factor_dim=KFACOptions.max_factor_dim)
    blocks, _ = find_blocks(twin, sizes, skip_layers, {}, torch.float32, rules)

    # Count the rows of each layer's output, examples times positions, the bytes that
    # the graph keeps, and the operations.
    rows = Counter[KroneckerBlock]()
    saved: dict[int, int] = {}
    owned = {p.untyped_storage()._cdata for p in twin.parameters()}
    block_of = {module: block for block in blocks for module in block.modules}

    def count_rows(
        layer: nn.Module, called: nn.Module, inputs: Any, output: Any
    ) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        rows[block_of[layer]] += first.numel() // row_size(block_of[layer], called)

    def note_saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    # Run both passes once with these hooks, then time them without.
    attention_of = attention_by_out_proj(twin)
    handles = []
    for layer in block_of:
        # An attention computes the product of its out_proj.
        called = attention_of.get(layer, layer)
        hook = partial(count_rows, layer)
        handles.append(called.register_forward_hook(hook))
    counter = FlopCounterMode(display=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor)
    cuda_devices = []
    if device.type == "cuda":
        cuda_devices = [device]
    with torch.random.fork_rng(cuda_devices), torch.enable_grad():
        with counter, hooks:
            try:
                output = _forward(twin, batch)
            except Exception as error:
                raise ValueError(
                    f"the model does not take sample_batch: {type(error).__name__}: {error}; pass "
                    f"the arguments of its forward, without targets that it does not take"
                ) from error
            _mean_square(output).backward()
        for handle in handles:
            handle.remove()
        seconds = None
        if is_timed:
            seconds = seconds_of(
                lambda: _mean_square(_forward(twin, batch)).backward(), device
            )

    most = max(rows.values(), default=1)  # for layers whose own forward is not called
    return Passes(
        layers=[Layer(block.shape, rows.get(block, most)) for block in blocks],
        flops=counter.get_total_flops(),
        seconds=seconds,
        activation_bytes=sum(saved.values()),
        parameter_bytes=sum(p.nbytes for p in twin.parameters()),
        trained_bytes=sum(p.nbytes for p in trained),
    )


def row_size(block: KroneckerBlock, module: nn.Module) -> int:
    """Return how many elements of a module's output belong to one row of a layer."""
    shape = block.shape
    if is_attention(module):  # its output has the width of one of q, k and v
        return shape.out_dim
    if block.kinds.get(module) is TIED_OUTPUT:  # A has the entries of the embedding
        return shape.in_dim
    return shape.groups * shape.out_dim


def _forward(model: nn.Module, batch: Any) -> Any:
    """Run a model on the batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def _mean_square(output: Any) -> Tensor:
    """Return the mean square of a model's outputs, a cheap replacement of a loss."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs:
        raise ValueError(
            f"no tensor in the model's output, a {type(output).__name__}, depends on a parameter "
            f"that requires a gradient; return a tensor, or a tuple, list or dictionary of tensors"
        )
    return torch.stack([t.float().square().mean() for t in outputs]).sum()


def _settings(
    systems: Sequence[str], ranks: int, factor_update_steps: int, inv_update_steps: int
) -> Iterator[Setting]:
    """The settings to compare."""
    workers = {"KAISA": worker_counts(ranks), "DPKFAC": [1], "DistKFAC": [ranks]}
    for system in systems:
        for solver in SOLVERS:
            for count in workers[system]:
                setting = Setting(
                    system, solver, ranks, count, factor_update_steps, inv_update_steps
                )
                yield setting
                if system == "KAISA" and ranks > 1:
                    yield replace(setting, owned_factors=True)


def _recommended(
    choices: Sequence[Choice], memory: float | None
) -> tuple[Choice | None, str]:
    """Return the fastest setting that fits, of similar ones the smallest, and why."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = min(choices, key=lambda choice: choice.memory)
        return None, (
            f"no setting fits into {_in_words(memory or 0)}: {least.setting.name} needs the least, "
            f"{_in_words(least.memory)}; reduce the batch size, skip large layers with "
            f"skip_layers=[...], or use FSDP2"
        )

    # Settings are sorted by time, so the first one is the fastest.
    bound = (1 + SIMILAR) * fitting[0].seconds
    similar = [choice for choice in fitting if choice.seconds <= bound]
    best = min(similar, key=lambda choice: choice.memory)
    return best, (
        f"recommended: {best.setting.name}: {_in_ms(best.seconds)} ms per step. Of the settings "
        f"that fit and are within {SIMILAR:.0%} of the fastest, it needs the least memory"
    )


def _in_ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}"


def _in_words(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
