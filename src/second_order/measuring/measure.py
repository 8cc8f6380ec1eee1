"""Measure the curvature of a trained model over a data set, without an optimizer.

1. Find the layers, and assign each to the rank that stores its factors (layers.py).
2. Pass over the data. For each batch:
   - find the rows that are not padding (batches.py);
   - "inputs": run the forward pass, and add A += xᵀ x (accumulators.py);
   - "kfac", "ekfac": run forward and backward passes, and add A += xᵀ x, G += dᵀ d.
3. Reduce the sums to their owners, and divide them by the number of rows or terms
   (sums.py).
4. "ekfac": decompose A and G, and pass over the data again: Λ += (Q_Gᵀ ∇ Q_A)².
5. Return the curvature with a report (report.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from second_order.distributed.fsdp import sharded_params
from second_order.distributed.world import World, translate_backend_errors
from second_order.errors import SecondOrderError, warn
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.measuring.accumulators import (
    EigenvalueAccumulator,
    InputAccumulator,
    PairAccumulator,
)
from second_order.measuring.arguments import Factors, check_arguments, parse_patterns
from second_order.measuring.batches import (
    Call,
    Likelihood,
    Loss,
    Mask,
    call_model,
    move_to_device,
    read_batch,
    sample_loss_terms,
    sum_loss_terms,
)
from second_order.measuring.hooks import evaluation_mode
from second_order.measuring.layers import Layer, find_layers
from second_order.measuring.report import Measurement, build_curvature, build_report
from second_order.measuring.sums import Keep, Key, Sums
from second_order.utils.modules import unwrapping_chain

__all__ = ["measure"]

END: Any = object()
"""Stands for the batch of a loader that has no more batches."""

NO_ROWS = (
    "it was not called with a row that counts; check that the model calls it, that gradients are "
    "on there (use checkpoint(..., use_reentrant=False)), and that the mask keeps some of its rows"
)
NO_BATCH = (
    "the loader of this rank has no batch, but FSDP2 needs every rank in each pass; give each rank "
    "at least one batch"
)
OTHER_DATA = (
    "the second pass over the loader gave {second} examples on all ranks, but the first gave "
    '{first}; factors="ekfac" needs the same data twice, so pass a loader whose iterator starts '
    "again, such as a list of batches or a DataLoader over a map-style dataset"
)


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
        curvature["model.layers.0.mlp.down_proj"].A  # (1, in, in)
        curvature.solve(gradients, damping=0.1, relative=True)  # (F + γ)⁻¹ g, by name

    For each layer, F = A ⊗ G approximates the mean of g gᵀ over the loss terms, where g
    is the gradient of a term with respect to the layer's parameters (Martens & Grosse
    2015; Eschenhagen et al. 2023, "expand").

    A is the mean of x xᵀ over the rows x of the layer's inputs. For a convolution, it
    is a mean over images of sums over locations. For embeddings and, except with
    "inputs", for fused experts, only rows with a nonzero gradient d count. G is the sum
    of d dᵀ over all rows, divided by the number of loss terms N. Here d is the gradient
    of the sum of all terms with respect to a row of the layer's output.

    Each term has the same weight, however you divide the data into batches and among
    ranks. Padding does not count. The model runs in evaluation mode. Afterwards its
    hooks, ``.grad``, buffers, modes and the states of the random number generators are
    what they were.

    Collective: every rank of ``process_group`` calls it, each with its own batches.

    Args:
        model: The model. It may be wrapped by FSDP2 or DistributedDataParallel.
        loader: An iterable over the batches of this rank. A batch is a tensor, a tuple
            that begins with the model's input, or a mapping of the model's keywords, as
            the collators of ``transformers`` return it. With ``call`` it may be any
            object. It is moved to the model's device if its type is one of these or has
            a method ``to``. "ekfac" iterates over the loader twice.
        factors: "inputs" measures A of the weights, with forward passes only. "kfac"
            measures A and G, where layers with a bias have a 1 appended to their
            inputs. "ekfac" also measures, in a second pass, the eigenvalues of F in the
            eigenbasis of A ⊗ G (George et al. 2018), from the gradients of the examples
            of a batch.
        loss: ``loss(output, batch)`` returns the unreduced loss terms that count, or
            ``(sum, number)``. Use it to measure with the data's own labels. None
            samples labels from the model's predictions: one for each row of logits that
            has a label in the batch, or for each row that counts.
        likelihood: The distribution of sampled labels: "categorical", "bernoulli" or
            "gaussian". None means "categorical" if the batch has class labels or no
            targets; for floating-point targets you have to choose. To sample from
            another distribution, pass only a ``loss`` that does so.
        layers: One or more shell-style patterns for the names or classes of modules.
            Everything inside of a matching module is measured. None measures all
            layers.
        mask: ``mask(batch)`` returns a tensor of shape ``(examples, ...)`` that is True
            where an example or position counts. None uses the batch's
            ``attention_mask``, or else the labels other than -100. The first dimension
            of the mask is the number of examples in the batch. Without ``mask`` that is
            the first dimension of most of the batch's tensors, or unknown if the batch
            has another type.
        call: ``call(model, batch)`` returns the model's output. Use it if the batch
            alone does not say how to call the model.
        keep: Where the sums are stored during the pass. "device" stores whole matrices
            on the model's device, "cpu" stores triangles in host memory. "owner" stores
            each layer's triangles on one rank only, to which the other ranks send their
            sums of each batch.
        seed: Seed of the sampled labels.
        process_group: The ranks that measure. None means all ranks.
        progress: Whether rank 0 shows the report, and a progress bar if ``tqdm`` is
            installed.

    Returns:
        The curvature, with a :class:`~second_order.measuring.report.Report` as
        ``report``. Factors are float32, or float64 if a measured weight is. Each layer
        is stored on one rank.

    Raises:
        ValueError: If an option is invalid, if two options exclude each other, or if a
            pattern matches no module.
        TypeError: If an argument has the wrong type, if a batch has an unknown type and
            ``call`` is not set, or if the loss is a single number.
        SecondOrderError: If the loader has no example, or another number of examples in
            the second pass, or if another rank has failed.
    """
    # Check the arguments, and find the layers and their owners.
    check_arguments(
        model,
        loader,
        factors=factors,
        loss=loss,
        likelihood=likelihood,
        mask=mask,
        call=call,
        keep=keep,
        seed=seed,
    )
    model = unwrapping_chain(model)[-1]
    world = World(process_group)
    selection = find_layers(
        model,
        patterns=parse_patterns(layers),
        inputs_only=factors == "inputs",
        num_ranks=world.size,
    )
    selected = selection.layers
    dtype = torch.float32
    for layer in selected:
        dtype = torch.promote_types(dtype, layer.block.weight.dtype)
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
        device=selected[0].block.weight.device,
        dtype=dtype,
        is_sharded=bool(sharded_params(model)),
    )

    start = time.perf_counter()
    with translate_backend_errors(), evaluation_mode(model, run.device):
        # Accumulate A, or A and G, and divide the sums.
        accumulator: InputAccumulator | PairAccumulator
        if factors == "inputs":
            sums = make_sums(run, selected, Layer.stored_shapes)
            accumulator = InputAccumulator(selected, sums)
        else:
            backward_order = selected[::-1]
            sums = make_sums(run, backward_order, Layer.stored_shapes)
            accumulator = PairAccumulator(selected, sums)
        accumulate(run, accumulator)
        measurement = average(run, accumulator)

        # Accumulate the eigenvalues of F in the eigenbasis of A and G.
        if factors == "ekfac":
            curvature = build_curvature(model, selection, measurement, world)
            measurement = correct_eigenvalues(run, curvature, selected, measurement)

    # Report what the curvature covers.
    failed = measurement.failed
    for name, reason in failed.items():
        warn(f"measure: layer {name!r}: {reason}")
    if len(failed) == len(selected):
        first_failed = list(failed.items())[:3]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in first_failed)
        raise SecondOrderError(f"measure: no layer has factors ({reasons})")
    report = build_report(
        title=f"Curvature of {type(model).__name__}: {factors}, {world.size} rank(s)",
        model=model,
        selection=selection,
        measurement=measurement,
        passes=2 if factors == "ekfac" else 1,
        seconds=time.perf_counter() - start,
    )
    if run.shows_progress:
        sys.stderr.write(f"{report}\n")
    return build_curvature(model, selection, measurement, world, report)


@dataclass(frozen=True)
class Run:
    """The arguments of ``measure`` for every pass, and what follows from them.

    Attributes:
        control: The ranks of ``world`` in a group for messages that do not synchronize
            the device.
        device: The device of the model.
        dtype: The dtype of the sums.
        is_sharded: Whether FSDP2 shards the model.
    """

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
    control: World
    device: torch.device
    dtype: torch.dtype
    is_sharded: bool


# ----------------------------------------------------------------------------- one pass


def accumulate(run: Run, accumulator: InputAccumulator | PairAccumulator) -> None:
    """Run the model on all batches of this rank once, and accumulate the sums.

    Collective: every rank continues while any rank has a batch.
    """
    loader = iterate_batches(run)
    last_batch = END
    failure: Exception | None = None
    with accumulator.capture(run.model, run.is_sharded) as backward:
        index = 0
        while True:
            # Get this rank's next batch.
            batch = END
            if failure is None:
                try:
                    batch = next(loader, END)
                    if run.is_sharded and batch is END and last_batch is END:
                        raise SecondOrderError(NO_BATCH)
                except Exception as error:
                    failure = error
            has_batch = batch is not END
            if not any_rank_has_batch(run, has_batch, failure):
                break

            # Run the model. FSDP2 needs every rank in each pass, so a rank without a
            # batch repeats its last one, which does not count.
            if has_batch:
                last_batch = batch
            if has_batch or run.is_sharded:
                try:
                    terms = run_batch(
                        run,
                        accumulator,
                        last_batch,
                        counts=has_batch,
                        index=index,
                        backward=backward,
                    )
                    if has_batch:
                        accumulator.count_batch(terms)
                except Exception as error:
                    # The other ranks are inside of FSDP2's collectives.
                    if run.is_sharded:
                        raise
                    failure = error

            # Send the sums of the batch. A rank that has failed sends zeros, because
            # the other ranks wait for it, and raises in the next round.
            accumulator.end_batch()
            index += 1


def iterate_batches(run: Run) -> Iterator[Any]:
    """Yield the batches of this rank, with a progress bar if ``tqdm`` is installed."""
    loader = run.loader
    if run.shows_progress and importlib.util.find_spec("tqdm") is not None:
        loader = importlib.import_module("tqdm.auto").tqdm(loader, unit="batch")
    yield from loader


def any_rank_has_batch(run: Run, has_batch: bool, failure: Exception | None) -> bool:
    """Return whether any rank has another batch. Collective.

    Raises:
        Exception: The ``failure`` of this rank.
        SecondOrderError: If another rank has failed.
    """
    if failure is None and run.world.size == 1:
        return has_batch
    message = ""
    if failure is not None:
        message = f"{type(failure).__name__}: {failure}"
    all_ranks = run.control.all_gather_object((has_batch, message))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(all_ranks):
        if message:
            raise SecondOrderError(f"measure: rank {rank} failed: {message}")
    return any(rank_has_batch for rank_has_batch, _ in all_ranks)


def run_batch(
    run: Run,
    accumulator: InputAccumulator | PairAccumulator,
    batch: Any,
    counts: bool,
    index: int,
    backward: Callable[[Tensor], None] | None,
) -> int | Tensor:
    """Run the model on a batch, and return its number of loss terms.

    Without a ``backward`` function, only the forward pass runs, and there are no terms.
    """
    info = read_batch(batch, run.model, run.mask, run.device)
    batch = move_to_device(batch, run.device)
    accumulator.begin_batch(info, counts)
    output = run.call(run.model, batch)
    if backward is None:
        return 0
    if run.loss is not None:
        terms = sum_loss_terms(run.loss(output, batch), info)
    else:
        # Each batch of each rank has its own seed, which must be a non-negative int64.
        seed = hash((run.seed, index, run.world.rank)) % 2**63
        terms = sample_loss_terms(output, run.likelihood, info, seed)
    backward(terms.total)
    return terms.count


# ----------------------------------------------------------------------------- averages


def make_sums(
    run: Run,
    layers: Sequence[Layer],
    shapes_of: Callable[[Layer], Mapping[str, torch.Size]],
) -> Sums:
    """Make the sums of matrices of these shapes, sent in the order of the layers."""
    world = run.world
    if run.is_sharded or run.keep == "cpu":
        # FSDP2's own collectives run between ours, in an order that differs from rank
        # to rank.
        world = run.control
    return Sums(
        layers,
        shapes_of,
        keep=run.keep,
        world=world,
        device=run.device,
        dtype=run.dtype,
        sends_immediately=not run.is_sharded,
    )


@dataclass(frozen=True)
class Counts:
    """The counts of a pass, of one rank or of all ranks together.

    Attributes:
        rows: By layer, the number of rows in the sum of A; for experts, one for each.
        terms: The number of loss terms.
        examples: The number of examples.
        batches: The number of batches.
        failed: By layer, why it has no factors.
    """

    rows: Mapping[str, list[float]]
    terms: float
    examples: int
    batches: int
    failed: Mapping[str, str]


@dataclass(frozen=True)
class Totals:
    """The sums of a pass that this rank owns, and the counts of all ranks."""

    sums: dict[Key, Tensor]
    counts: Counts


def add_up_ranks(run: Run, accumulator: InputAccumulator | PairAccumulator) -> Totals:
    """Add up the sums and counts of all ranks at the end of a pass. Collective."""
    # Reduce the sums to their owners.
    sums = accumulator.sums.finish()
    local_failed = dict(accumulator.failed)
    for (name, factor), total in sums.items():
        if not bool(total.isfinite().all()):
            local_failed[name] = f"its {factor} is not finite"

    # Exchange the counts of all ranks, and add them up. fsum does not depend on the
    # order of ranks.
    local_counts = Counts(
        rows={name: to_floats(count) for name, count in accumulator.rows.items()},
        terms=float(accumulator.num_terms),
        examples=accumulator.num_examples,
        batches=accumulator.num_batches,
        failed=local_failed,
    )
    all_ranks: list[Counts] = run.control.all_gather_object(local_counts)
    rows: dict[str, list[float]] = {}
    for name in local_counts.rows:
        by_rank = [rank.rows[name] for rank in all_ranks]
        rows[name] = [math.fsum(column) for column in zip(*by_rank, strict=True)]
    failed: dict[str, str] = {}
    for rank in all_ranks:
        failed |= rank.failed
    counts = Counts(
        rows=rows,
        terms=math.fsum(rank.terms for rank in all_ranks),
        examples=sum(rank.examples for rank in all_ranks),
        batches=sum(rank.batches for rank in all_ranks),
        failed=failed,
    )
    return Totals(sums, counts)


def average(run: Run, accumulator: InputAccumulator | PairAccumulator) -> Measurement:
    """Divide the sums that this rank owns by the counts of all ranks. Collective."""
    totals = add_up_ranks(run, accumulator)
    counts = totals.counts
    if isinstance(accumulator, PairAccumulator):
        has_examples = counts.terms != 0
    else:
        has_examples = any(any(layer_rows) for layer_rows in counts.rows.values())
    if not has_examples:
        raise SecondOrderError(
            "the loader gave no example on any rank, so there is nothing to measure"
        )
    failed = {name: NO_ROWS for name, rows in counts.rows.items() if not any(rows)}
    failed |= counts.failed

    # Divide A by its number of rows, and all other factors by the number of terms. The
    # sum of an expert without rows is zero, and so is its mean.
    for (name, factor), total in totals.sums.items():
        divisors = [counts.terms]
        if factor == "A":
            divisors = [max(count, 1.0) for count in counts.rows[name]]
        by_group = total.new_tensor(divisors)
        total.div_(by_group.view(-1, *[1] * (total.dim() - 1)))
    return Measurement(
        factors={
            key: mean for key, mean in totals.sums.items() if key[0] not in failed
        },
        num_rows={name: math.fsum(rows) for name, rows in counts.rows.items()},
        num_terms=counts.terms,
        num_examples=counts.examples,
        num_batches=counts.batches,
        failed=failed,
    )


def to_floats(count: int | Tensor) -> list[float]:
    """Return a count, or the counts of a tensor, as a list."""
    if isinstance(count, Tensor):
        return count.reshape(-1).double().tolist()
    return [float(count)]


# --------------------------------------------------------------------- eigenvalues of F


def correct_eigenvalues(
    run: Run,
    curvature: KroneckerCurvature,
    layers: Sequence[Layer],
    measurement: Measurement,
) -> Measurement:
    """Add EK-FAC's eigenvalues of F to a measurement of A and G. Collective.

    They are the diagonal of F in the eigenbasis of A ⊗ G (George et al. 2018).
    """
    # The owner of each layer decomposes its factors. Every rank needs the eigenvectors.
    bases = curvature.eigen()

    # Accumulate the squares of the rotated gradients.
    layers = [layer for layer in layers if layer.name in bases]
    if not layers:
        return measurement
    backward_order = layers[::-1]
    sums = make_sums(run, backward_order, Layer.eigenvalue_shapes)
    accumulator = EigenvalueAccumulator(layers, sums, bases)
    accumulate(run, accumulator)
    totals = add_up_ranks(run, accumulator)
    num_examples = totals.counts.examples
    if num_examples != measurement.num_examples:
        raise SecondOrderError(
            OTHER_DATA.format(second=num_examples, first=measurement.num_examples)
        )

    # Divide them by the number of terms. Random masks of labels may give another number
    # in each pass.
    failed = {**measurement.failed, **totals.counts.failed}
    eigenvalues: dict[str, Tensor] = {}
    for (name, _), total in totals.sums.items():
        if name not in failed:
            eigenvalues[name] = total.div_(totals.counts.terms)
    factors = measurement.factors
    return replace(
        measurement,
        factors={key: mean for key, mean in factors.items() if key[0] not in failed},
        failed=failed,
        corrected=eigenvalues,
        bases={name: layer.eigen for name, layer in curvature.local_layers.items()},
    )
