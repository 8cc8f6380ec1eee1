"""Predict time, memory and bytes of every system and setting, and recommend one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from second_order.planning.cost import SIMILAR, Costs, Setting, predict, worker_counts
from second_order.planning.machine import (
    ASSUMED_NETWORKS,
    Interconnect,
    Machine,
    bytes_sent,
    calibrate,
)
from second_order.planning.passes import run_model
from second_order.reporting.summary import aligned
from second_order.utils.checks import check_count

__all__ = ["Choice", "Plan", "plan"]

SYSTEMS = ("KAISA", "DPKFAC", "DistKFAC")
SOLVERS = ("inverse", "eigen")


@dataclass(frozen=True)
class Choice:
    """A setting, and what it costs.

    Attributes:
        setting: The optimizer, and those of its keywords that decide its costs.
        costs: What the curvature costs.
        seconds: Seconds per step, with the model's passes and the average of gradients.
        memory: Bytes on the fullest rank: parameters, gradients, the base optimizer's state,
            activations, and the curvature.
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
        base: Seconds per step of the base optimizer alone, with its average of gradients.
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
        header = ["system", "setting", "solver", "ms per step", "over base", "statistics"]
        header += ["inverses", "precondition", "messages", "memory", "sent", ""]
        shown = self.choices[:rows]
        table = [header, *(self._row(choice) for choice in shown)]
        lines = [
            f"{self.world_size} ranks, {self.machine.name}; network {self.network.origin}; the "
            f"base optimizer alone takes {1000 * self.base:.3g} ms per step",
            *aligned(table, set(range(3, 11))),
        ]
        hidden = len(self.choices) - len(shown)
        if hidden:
            lines.append(f"and {hidden} slower settings")
        return "\n".join([*lines, self.reason])

    def _row(self, choice: Choice) -> list[str]:
        parts = choice.costs.parts
        columns = [parts[name] for name in ("statistics", "inverses", "precondition")]
        columns.append(choice.costs.seconds - sum(columns))
        note = "recommended" if choice is self.recommended else ""
        return [
            choice.setting.system,
            choice.setting.mode,
            choice.setting.solver,
            f"{1000 * choice.seconds:,.3g}",
            f"{choice.seconds / self.base - 1:+.0%}",
            *(f"{1000 * column:,.3g}" for column in columns),
            _in_words(choice.memory),
            _in_words(choice.sent),
            note if choice.fits else "does not fit",
        ]

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

    A copy of the model runs forward and backward on ``sample_batch``, the batch of one rank. All
    else follows from the sizes of its layers: see docs/planning.md. Nothing is sent, and the model
    stays as it is.

    Args:
        model: The model. It may be on the meta device if you pass ``machine``.
        sample_batch: One rank's batch, as the model's arguments: a tensor, a tuple or list of
            arguments, or a dictionary by name.
        world_size: Number of ranks.
        machine: The machine of each rank; the passes then take the time of their matrix products.
            None: the machine that the model is on is measured, and so are the passes.
        network: The links between the ranks. None: round numbers, which the documentation gives.
        memory: Bytes that a rank may use, as 80e9. None: the machine's memory, if it is known.
        systems: Names of the optimizers.
        factor_update_steps: Steps between two updates of the factors.
        inv_update_steps: Steps between two refreshes.
        skip_layers: As the optimizers' keyword.
        base_state: The base optimizer's state, as a multiple of the parameters: 1.0 for SGD with
            momentum, 2.0 for AdamW.

    Raises:
        TypeError: If the model is not a module, or the batch not a collection of arguments.
        ValueError: For values out of range, or a model that does not take the batch.
    """
    check_count("world_size", world_size, "ranks")
    check_count("factor_update_steps", factor_update_steps, "steps")
    check_count("inv_update_steps", inv_update_steps, "steps")
    if isinstance(systems, str) or not systems or not set(systems) <= set(SYSTEMS):
        raise ValueError(f"systems={systems!r}; pass a list of some of {', '.join(SYSTEMS)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        raise ValueError("no parameter of the model requires a gradient; set requires_grad")
    if device.type == "meta" and machine is None:
        raise ValueError("a model on the meta device cannot be timed; pass machine=")

    # Run the model once, for the sizes of its layers' batches and the time of its passes.
    found = run_model(model, sample_batch, device, skip_layers, is_timed=machine is None)
    if not found.layers:
        raise ValueError("no layer of the model has Kronecker factors; see docs/layers.md")
    if machine is None:
        machine, assumed = calibrate(device)
        network = network or assumed
    network = network or ASSUMED_NETWORKS[machine.device]
    allowed = machine.memory if memory is None else memory

    # The base optimizer alone: the passes, and the average of all gradients.
    passes = machine.product_seconds(found.flops) if found.seconds is None else found.seconds
    gather = network.gather_seconds(found.trained_bytes, world_size)
    base = passes + 2 * gather
    first_order_bytes = (
        found.parameter_bytes + found.activation_bytes + (1 + base_state) * found.trained_bytes
    )

    choices: list[Choice] = []
    for setting in _settings(systems, world_size, factor_update_steps, inv_update_steps):
        costs = predict(found.layers, setting, machine, network)
        # DPKFAC sums a layer's gradient at its owner alone, which is half an all-reduce.
        averages = 1 if setting.system == "DPKFAC" else 2
        seconds = passes + averages * gather + costs.seconds
        size = first_order_bytes + costs.curvature_bytes + costs.pending_bytes
        sent = costs.sent + averages * bytes_sent(found.trained_bytes, world_size)
        fits = allowed is None or size <= allowed
        choices.append(Choice(setting, costs, seconds, size, sent, fits=fits))
    choices.sort(key=lambda choice: choice.seconds)
    best, reason = _recommended(choices, allowed)
    return Plan(world_size, tuple(choices), best, reason, base, machine, network, allowed)


def _settings(
    systems: Sequence[str],
    ranks: int,
    factor_update_steps: int,
    inv_update_steps: int,
) -> Iterator[Setting]:
    """The settings to compare."""
    workers_by_system = {
        "KAISA": worker_counts(ranks),
        "DPKFAC": [1],
        "DistKFAC": [ranks],
    }
    for system in systems:
        for solver in SOLVERS:
            for workers in workers_by_system[system]:
                setting = Setting(
                    system, solver, ranks, workers, factor_update_steps, inv_update_steps
                )
                yield setting
                if system == "KAISA" and ranks > 1:
                    yield replace(setting, owned_factors=True)


def _recommended(choices: Sequence[Choice], memory: float | None) -> tuple[Choice | None, str]:
    """The fastest setting that fits, and why; of similar ones the one with the least memory."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = min(choices, key=lambda choice: choice.memory)
        return None, (
            f"no setting fits into {_in_words(memory or 0)}: {least.setting.name} needs the least, "
            f"{_in_words(least.memory)}; reduce the batch size, skip large layers with "
            f"skip_layers=[...], or use FSDP2"
        )

    bound = (1 + SIMILAR) * fitting[0].seconds
    best = min(
        (choice for choice in fitting if choice.seconds <= bound), key=lambda choice: choice.memory
    )
    return best, (
        f"recommended: {best.setting.name}: {1000 * best.seconds:.3g} ms per step. Of the settings "
        f"that fit and are within {SIMILAR:.0%} of the fastest, it needs the least memory"
    )


def _in_words(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
