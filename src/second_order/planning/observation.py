"""A model seen once: what its passes take, and what its layers' statistics take.

The model is left as it was: parameters, gradients, buffers and random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.layers import is_convolution
from second_order.kronecker.model_blocks import find_blocks
from second_order.planning.machine import Machine
from second_order.planning.memory import activation_bytes
from second_order.planning.network import examples_of
from second_order.planning.systems import Planned

__all__ = ["Observation", "arguments_of", "observe", "undisturbed"]

Clock = Callable[[], float]


@dataclass(frozen=True)
class Observation:
    """What passes of a batch take.

    Attributes:
        examples: Examples in the batch.
        activations: Bytes that the forward pass keeps for the backward pass.
        operations: Floating point operations of both passes.
        seconds: Measured seconds of both passes; None where they were not run on this machine.
        captured: Measured seconds of the statistics of each layer, by name.
    """

    examples: int
    activations: int
    operations: float
    seconds: float | None = None
    captured: Mapping[str, float] = field(default_factory=dict)

    def passes(self, machine: Machine) -> float:
        """Seconds of both passes: measured, or by operations and kept activations.

        Activations are written in the forward pass, read in the backward pass, and their gradients
        as well.
        """
        if self.seconds is not None:
            return self.seconds
        rate = 2 * 1024**3 / machine.products.at(1024)
        return self.operations / rate + machine.touched(4 * self.activations)


def arguments_of(sample_batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as a model's positional and named arguments: a tensor, a sequence or a mapping.

    Raises:
        TypeError: For anything else.
        ValueError: For a batch without a tensor that has a first dimension.
    """
    if isinstance(sample_batch, Tensor):
        found: tuple[tuple[Any, ...], dict[str, Any]] = ((sample_batch,), {})
    elif isinstance(sample_batch, Mapping):
        found = (), {str(name): value for name, value in sample_batch.items()}
    elif isinstance(sample_batch, Sequence) and not isinstance(sample_batch, str):
        found = tuple(sample_batch), {}
    else:
        raise TypeError(
            f"sample_batch is a {type(sample_batch).__name__}; give the model's arguments: a "
            f"tensor, a tuple or a list of them, or a dictionary by name"
        )
    examples_of(found[1] or found[0])
    return found


def observe(
    model: nn.Module,
    sample_batch: Any,
    planned: Planned | None,
    *,
    measure: bool = True,
    clock: Clock = time.perf_counter,
    passes: Observation | None = None,
) -> Observation:
    """Run a model's passes on a batch, and measure them; on the meta device only count.

    Where nobody has given a loss, the mean square of the outputs takes its place, whose own cost is
    next to nothing.

    Args:
        model: The model.
        sample_batch: The model's arguments, a rank's batch.
        planned: A system, for which modules are layers; None for one without.
        measure: Whether times are measured; False counts operations alone.
        clock: Returns the time in seconds.
        passes: What is known of the passes, seen with another system; None to run them.

    Raises:
        ValueError: If the model does not take the batch, or no output depends on a parameter.
    """
    arguments = arguments_of(sample_batch)
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise ValueError("no parameter of the model trains; set requires_grad")
    device = params[0].device
    run = partial(_passes, model, arguments, params)
    measure = measure and device.type != "meta"
    with undisturbed(model, device), torch.enable_grad():
        if passes is None:
            with FlopCounterMode(display=False) as counter:
                run()
            operations = float(counter.get_total_flops())
            example = arguments[1] or arguments[0]
            examples = examples_of(example)
            activations = round(examples * activation_bytes(model, example))
            seconds = _fastest(run, device, clock) if measure else None
            passes = Observation(examples, activations, operations, seconds)
        if not measure or planned is None:
            return passes
        captured = _captured(model, arguments, params, planned, device, clock)
    return replace(passes, captured=captured)


def _passes(
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    wanted: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients with regard to some tensors, in a forward and a backward pass."""
    try:
        output = model(*arguments[0], **arguments[1])
    except Exception as error:
        raise ValueError(
            f"the model does not take sample_batch: {type(error).__name__}: {error}; give the "
            f"arguments of the model alone, without targets that its forward does not take"
        ) from error
    return _gradients(output, wanted)


def _gradients(output: Any, wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    outputs = [t for t in _tensors(output) if t.requires_grad]
    if not outputs:
        raise ValueError("no output of the model depends on a parameter that trains")
    loss = torch.stack([t.float().square().mean() for t in outputs]).sum()
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)


def _fastest(
    run: Callable[[], Any], device: torch.device, clock: Clock, least: float = 0.2
) -> float:
    """Seconds of the fastest of some runs."""
    times: list[float] = []
    while len(times) < 4 or (sum(times) < least and len(times) < 50):
        start = clock()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(clock() - start)
    return min(times[1:])


def _captured(
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    params: Sequence[Tensor],
    planned: Planned,
    device: torch.device,
    clock: Clock,
) -> dict[str, float]:
    """Seconds of the statistics of each layer that can be measured by itself."""
    options = planned.options
    blocks, _ = find_blocks(
        model,
        {id(p): p.numel() for p in params},
        options.skip_layers,
        {},
        options.factor_dtype,
        options.symmetry_aware,
        planned.rules,
    )
    of = {module: block for block in blocks for module in block.watched}
    pairs: list[tuple[KroneckerBlock, nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            pairs.append((of[module], module, inputs[0].detach(), output))

    hooks = [module.register_forward_hook(note) for module in of]
    try:
        output = model(*arguments[0], **arguments[1])
        gradients = _gradients(output, [y for *_, y in pairs]) if pairs else ()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[str, float] = {}
    for (block, module, x, _), d in zip(pairs, gradients, strict=True):
        if d is None:
            continue
        approximation = options.kfac_approx
        if planned.conv_approximation is not None and is_convolution(module):
            approximation = planned.conv_approximation  # type: ignore[assignment]
        take = partial(block.statistics, module, x, d, approximation, options.factor_dtype)
        with torch.no_grad():
            seconds = _fastest(take, device, clock, least=0.0)
        found[block.name] = found.get(block.name, 0.0) + seconds
    return found


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore a model's buffers and the random numbers at the end of the block."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                setattr(module, name, buffer)  # a forward may have put another in its place
                expanded = zip(buffer.stride(), buffer.shape, strict=True)
                if not any(stride == 0 and size > 1 for stride, size in expanded):
                    buffer.copy_(value)  # nobody writes to an expanded one
