"""The curvature of a trained model, in one or two passes over its data, without an optimizer.

find the layers, and an owner of each                                       layers.py
first pass, for each batch:                                                 accumulators.py
    the rows that count, by the masks                                       batches.py
    "inputs"           forward:  A += xᵀ x
    "kfac", "ekfac"    forward, sampled or given labels, backward:  A += xᵀ x, G += dᵀ d
sums of all ranks to their owners, divided by their numbers                 sums.py
"ekfac": eigenvectors of A and G, and a second pass:  Λ += (Q_Gᵀ ∇ Q_A)²
the curvature, and a report                                                 report.py
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import sharded_params
from second_order.distributed.world import World, translate_backend_errors
from second_order.errors import SecondOrderError, SecondOrderWarning
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.measuring.accumulators import Eigenvalues, Inputs, Pairs
from second_order.measuring.arguments import Factors, check_arguments, patterns_of
from second_order.measuring.batches import (
    Call,
    Likelihood,
    Loss,
    Mask,
    call_model,
    loss_terms,
    move,
    read_batch,
    sampled_terms,
)
from second_order.measuring.hooks import undisturbed, unwrapped
from second_order.measuring.layers import Layer, find_layers
from second_order.measuring.report import Measurement, build_curvature, report_of
from second_order.measuring.sums import Keep, Sums

__all__ = ["measure"]

END: Any = object()
"""Instead of a batch, of a loader that has no more."""

NO_ROWS = (
    "it was not called with a row that counts; check that the model calls it, that gradients are "
    "on there (use checkpoint(..., use_reentrant=False)), and that the mask leaves some of its rows"
)
NO_BATCH = "the loader of this rank gave no batch, and FSDP2 needs every rank in each pass"


def measure(
    model: nn.Module,
    loader: Any,
    *,
    factors: Factors = "inputs",
    loss: Loss | None = None,
    likelihood: Likelihood | None = None,
    layers: Iterable[str] | str | None = None,
    mask: Mask | None = None,
    call: Call | None = None,
    keep: Keep = "device",
    seed: int = 0,
    process_group: Any = None,
    progress: bool = True,
) -> KroneckerCurvature:
    """Measure the curvature of a trained model over a data set.

        curvature = second_order.measure(model, loader, factors="kfac")

    Every example has the same weight, however the data are divided into batches and among ranks:
    sums over the data set are divided by its number of examples. Padding does not count. The model
    runs in evaluation mode and is left as it was: hooks, ``.grad``, buffers, modes and the states
    of random number generators.

    A is the mean of x xᵀ over the rows x of a layer's inputs (for a convolution, over images,
    summed over locations). G is the sum of d dᵀ over all rows, divided by the number N of loss
    terms, d the gradient of the sum of these terms with respect to a row of the layer's output.
    F = A ⊗ G then approximates the mean over terms of g gᵀ (Martens & Grosse 2015; Eschenhagen et
    al. 2023, "expand").

    Args:
        model: The model. FSDP2 or DistributedDataParallel may wrap it.
        loader: Gives the batches of this rank, each time it is iterated over: tensors, tuples that
            begin with the model's input, or mappings of its keywords, as collators of
            ``transformers`` return them.
        factors: "inputs": A of the weights alone, by forward passes. "kfac": A and G, with a 1
            appended to the inputs of layers with a bias. "ekfac": A and G, and by a second pass the
            eigenvalues of F in their eigenbasis (George et al. 2018), from the gradients of whole
            examples of a batch.
        loss: ``loss(output, batch)`` with the data's own labels: the terms that count, unreduced,
            or ``(sum, number)``. None: labels are sampled from the model's predictions, one for
            each row of logits that has a label in the batch, or for each row that counts.
        likelihood: What labels are sampled from: "categorical", "bernoulli" or "gaussian". None for
            "categorical" if the batch has labels of classes, or no targets. Targets in floating
            point need a choice. To sample from another distribution, give a ``loss`` that does.
        layers: One or more patterns, shell style, of names or classes of modules to measure, with
            everything inside them; None for all.
        mask: ``mask(batch)`` returns which examples and positions count, ``(examples, ...)``; None:
            the batch's ``attention_mask``, or else labels other than -100. Its first dimension is
            also the number of examples in the batch; without it, that is the first dimension of
            most of the batch's tensors.
        call: ``call(model, batch)`` returns the model's output, if the batch alone does not say
            how to call it.
        keep: Where sums are stored: "device": on the model's device, whole; "cpu": as triangles in
            the host's memory; "owner": as triangles, each layer's on one rank alone, to which the
            sum of each batch is sent.
        seed: Seed of sampled labels.
        process_group: The ranks that measure, each with batches of its own; None for all.
        progress: Show a progress bar, if ``tqdm`` is installed, and the closing table.

    Returns:
        The curvature, in float32 (float64 of a float64 model), each layer on one rank, with a
        :class:`Report` as ``report``.

    Raises:
        ValueError: For options that are not valid, or patterns that match nothing.
        TypeError: For batches of an unknown kind without ``call=``, or a loss that is one number;
            for a model, loader, layers or loss that is something else.
        SecondOrderError: If the loader gives no example, or if another rank has failed.
    """
    # Check the arguments, and find the layers and their owners.
    check_arguments(model, loader, factors, loss, likelihood, keep)
    model = unwrapped(model)
    world = World(process_group)
    found, left = find_layers(model, patterns_of(layers), factors == "inputs", world.size)
    weights = [layer.block.weight for layer in found]
    dtype = torch.float32
    for weight in weights:
        dtype = torch.promote_types(dtype, weight.dtype)
    run = Run(
        model=model,
        loader=loader,
        loss=loss,
        likelihood=likelihood,
        mask=mask,
        call=call_model if call is None else call,
        keep=keep,
        seed=seed,
        shows_progress=progress and world.rank == 0,
        world=world,
        control=world.control_world(),
        device=weights[0].device,
        dtype=dtype,
        is_sharded=bool(sharded_params(model)),
    )

    start = time.perf_counter()
    with translate_backend_errors(), undisturbed(model, run.device):
        # Accumulate A, or A and G, and divide the sums by their numbers.
        accumulator: Inputs | Pairs
        if factors == "inputs":
            accumulator = Inputs(found, sums_of(run, found, Layer.stored_shapes))
        else:
            backward_order = found[::-1]
            accumulator = Pairs(found, sums_of(run, backward_order, Layer.stored_shapes))
        terms, batches = accumulate(run, accumulator)
        measured = average(run, accumulator, terms, batches)

        # Accumulate the eigenvalues of F in the eigenbasis of A and G.
        if factors == "ekfac":
            curvature = build_curvature(model, found, left, measured, world)
            measured = correct_eigenvalues(run, curvature, found, measured)

    # Report what the curvature covers.
    for name, reason in measured.failed.items():
        warnings.warn(f"measure: layer {name!r}: {reason}", SecondOrderWarning, stacklevel=2)
    if len(measured.failed) == len(found):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(measured.failed.items())[:3])
        raise SecondOrderError(f"measure: no layer has factors ({reasons})")
    title = f"Curvature of {type(model).__name__}: {factors}, {world.size} rank(s)"
    passes = 2 if factors == "ekfac" else 1
    seconds = time.perf_counter() - start
    report = report_of(title, model, found, left, measured, passes, seconds)
    if run.shows_progress:
        sys.stderr.write(f"{report}\n")
    return build_curvature(model, found, left, measured, world, report)


@dataclass(frozen=True)
class Run:
    """What all passes over the data have in common."""

    model: nn.Module
    loader: Any
    loss: Loss | None
    likelihood: Likelihood | None
    mask: Mask | None
    call: Call
    keep: Keep
    seed: int
    shows_progress: bool
    world: World
    control: World  # the same ranks, for small messages
    device: torch.device
    dtype: torch.dtype  # of the sums
    is_sharded: bool  # by FSDP2


# ------------------------------------------------------------------------------------- one pass


def accumulate(run: Run, accumulator: Inputs | Pairs) -> tuple[int | Tensor, int]:
    """Go through the data once; returns this rank's numbers of terms and of batches.

    Collective: every rank continues while any rank has a batch.
    """
    terms: int | Tensor = 0
    batches = 0
    loader = batches_of(run)
    last = END
    failure: Exception | None = None
    with accumulator.capturing(run.model, run.is_sharded) as backward:
        for index in itertools.count():
            # Get this rank's next batch.
            batch = END
            if failure is None:
                try:
                    batch = next(loader, END)
                    if run.is_sharded and batch is END and last is END:
                        raise SecondOrderError(NO_BATCH)
                except Exception as error:
                    failure = error
            if not any_rank_has_batch(run, batch is not END, failure):
                return terms, batches

            # Run the model. FSDP2 needs every rank in each pass: a rank without a batch repeats
            # its last one, which does not count.
            counts = batch is not END
            last = batch if counts else last
            if counts or run.is_sharded:
                try:
                    number = run_batch(run, accumulator, last, counts, index, backward)
                    terms = terms + (number if counts else 0)
                    batches += counts
                except Exception as error:
                    if run.is_sharded:  # the other ranks are inside FSDP2's collectives
                        raise
                    failure = error

            # Send the batch's sums. A rank that has failed sends zeros, for which the others wait.
            accumulator.end()
    raise AssertionError("the loop has no other end")


def batches_of(run: Run) -> Iterator[Any]:
    """The batches of this rank, with a progress bar of ``tqdm`` if it is installed."""
    loader = run.loader
    if run.shows_progress and importlib.util.find_spec("tqdm") is not None:
        loader = importlib.import_module("tqdm.auto").tqdm(loader, unit="batch")
    yield from loader


def any_rank_has_batch(run: Run, has_batch: bool, failure: Exception | None) -> bool:
    """Whether any rank has another batch; raises on all ranks if one has failed. Collective."""
    if failure is None and run.world.size == 1:
        return has_batch
    message = "" if failure is None else f"{type(failure).__name__}: {failure}"
    everywhere = run.control.all_gather_object((has_batch, message))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(everywhere):
        if message:
            raise SecondOrderError(f"measure: rank {rank} failed: {message}")
    return (True, "") in everywhere


def run_batch(
    run: Run,
    accumulator: Inputs | Pairs,
    batch: Any,
    counts: bool,
    index: int,
    backward: Callable[[Tensor], None] | None,
) -> int | Tensor:
    """Run the model on a batch; returns its number of terms, 0 without a backward pass."""
    info = read_batch(batch, run.model, run.mask, run.device)
    batch = move(batch, run.device)
    accumulator.begin(info, counts)
    output = run.call(run.model, batch)
    if backward is None:
        return 0
    if run.loss is not None:
        total, number = loss_terms(run.loss(output, batch), info)
    else:
        seed = hash((run.seed, index, run.world.rank)) % 2**63
        total, number = sampled_terms(output, run.likelihood, info, seed)
    backward(total)
    return number


# ------------------------------------------------------------------------------------- averages


def sums_of(
    run: Run, layers: Sequence[Layer], shapes_of: Callable[[Layer], Mapping[str, torch.Size]]
) -> Sums:
    """Sums of the matrices of layers that have these shapes, sent in the order of layers."""
    return Sums(
        layers,
        shapes_of,
        keep=run.keep,
        # FSDP2's collectives come between, in an order that ranks do not share.
        world=run.control if run.is_sharded or run.keep == "cpu" else run.world,
        device=run.device,
        dtype=run.dtype,
        at_once=not run.is_sharded,
    )


@dataclass(frozen=True)
class Numbers:
    """What a rank tells the others at the end of a pass."""

    rows: Mapping[str, list[float]]  # by layer; of experts each one's own
    terms: float
    batches: int
    failed: Mapping[str, str]  # by layer


def average(
    run: Run, accumulator: Inputs | Pairs, terms: int | Tensor, batches: int
) -> Measurement:
    """Divide the sums that this rank owns by the numbers of all ranks. Collective."""
    # Reduce the sums to their owners, and add up the numbers of rows and terms.
    sums = accumulator.sums.finish()
    not_finite = {
        name: f"its {factor} is not finite"
        for (name, factor), total in sums.items()
        if not bool(total.isfinite().all())
    }
    rows = {name: numbers_of(count) for name, count in accumulator.rows.items()}
    local = Numbers(rows, numbers_of(terms)[0], batches, accumulator.failed | not_finite)
    everywhere: list[Numbers] = run.control.all_gather_object(local)
    all_terms = math.fsum(each.terms for each in everywhere)
    all_rows = {
        name: [math.fsum(n) for n in zip(*(each.rows[name] for each in everywhere), strict=True)]
        for name in rows
    }
    failed = {name: NO_ROWS for name, numbers in all_rows.items() if not any(numbers)}
    for each in everywhere:
        failed |= each.failed
    has_terms = isinstance(accumulator, Pairs)
    if not (all_terms if has_terms else any(map(any, all_rows.values()))):
        raise SecondOrderError("the loader gave no example: nothing can be measured")

    # Divide A by its rows, and all other factors by the number of terms.
    for (name, factor), total in sums.items():
        counts = all_rows[name] if factor == "A" else [all_terms]
        divisors = total.new_tensor(counts).clamp_min(1.0)
        total.div_(divisors.view(-1, *[1] * (total.dim() - 1)))
    return Measurement(
        factors={key: mean for key, mean in sums.items() if key[0] not in failed},
        rows={name: math.fsum(numbers) for name, numbers in all_rows.items()},
        terms=all_terms,
        batches=sum(each.batches for each in everywhere),
        failed=failed,
    )


def numbers_of(count: int | Tensor) -> list[float]:
    """A number, or those of a tensor on a device."""
    return count.reshape(-1).double().tolist() if isinstance(count, Tensor) else [float(count)]


# ----------------------------------------------------------------------------- eigenvalues of F


def correct_eigenvalues(
    run: Run, curvature: KroneckerCurvature, layers: Sequence[Layer], measured: Measurement
) -> Measurement:
    """Measure the eigenvalues of F in the eigenbasis of A and G. Collective."""
    # Compute the eigenvectors on each layer's owner, and give them to every rank.
    bases = curvature.eigen()

    # Accumulate the squares of the rotated gradients, and divide them by the number of terms.
    kept = [layer for layer in layers if layer.name in bases]
    sums = sums_of(run, kept[::-1], lambda layer: {"F": torch.Size(layer.shape.gradient_size)})
    if kept:
        accumulate(run, Eigenvalues(kept, sums, bases))
    return replace(
        measured,
        corrected={name: total.div_(measured.terms) for (name, _), total in sums.finish().items()},
        bases={name: layer.eigen for name, layer in curvature.here.items()},
    )
