"""The curvature of a trained model, in one pass over its data, without an optimizer.

find the layers; plan who owns each, and in how many passes             find.py
for each pass: for each batch:
    the rows that count, by the masks                                    batches.py
    "inputs"   forward, stopped after the last layer:  A += xᵀ x         watch.py, statistics.py
    "kfac"     forward, labels drawn or given, backward:  A += xᵀ x, G += dᵀ d
    save, if due                                                         progress.py
sums of all processes to their owners, divided by their numbers
"ekfac": decompose, and a second time over the data:  Λ += (Q_Gᵀ ∇ Q_A)²
the curvature, and a report                                              results.py
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from second_order.distributed.groups import explained
from second_order.distributed.world import World
from second_order.errors import SecondOrderError, SecondOrderWarning
from second_order.kronecker.decompositions import eigh
from second_order.kronecker.experts import is_experts
from second_order.kronecker.fisher import Likelihood
from second_order.kronecker.model_curvature import KroneckerCurvature
from second_order.kronecker.triangles import unpack_upper_triangular
from second_order.measuring.batches import (
    END,
    Call,
    Loss,
    Mask,
    Rows,
    call_model,
    drawn,
    each_of,
    entries_of,
    goes_once,
    length_of,
    masks_of,
    moved,
    terms_in,
    terms_of,
)
from second_order.measuring.find import find_layers, shared_out
from second_order.measuring.options import Factors, Options, check_arguments, patterns_of
from second_order.measuring.progress import Saves, bar_of
from second_order.measuring.results import Found, curvature_of, report_of
from second_order.measuring.statistics import (
    Basis,
    Eigenvalues,
    Inputs,
    Layer,
    Pairs,
    Statistics,
    guessed,
    leaders_of,
    read,
)
from second_order.measuring.sums import Keep, Key, Sums
from second_order.measuring.watch import (
    Stop,
    Stopping,
    asking,
    compared,
    undisturbed,
    unwrapped,
    watching_inputs,
    watching_pairs,
)
from second_order.sharded import sharded_params

__all__ = ["measure"]

TOLERANCE = 1e-2  # of a decomposition's relative error

NOT_COMPARED = "(pairs are not compared with gradients)"
"""Among the names of layers that share nothing: a pass is to begin anew without comparing."""

NO_ROWS = (
    "it was not called with a row that counts; check that the model calls it, and that the mask "
    "leaves some of its rows"
)
NO_BATCH = "the loader of this process gave no batch, and the model is shared"
ONCE = (
    "the loader can be gone through once only, and {why} takes another pass: give a list of "
    "batches, or a DataLoader"
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
    memory: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    seed: int = 0,
    process_group: Any = None,
    progress: bool = True,
) -> KroneckerCurvature:
    """Measure the curvature of a trained model over a data set.

        curvature = second_order.measure(model, loader, factors="kfac")

    Every example weighs the same, whatever the batches and processes: sums over the data set are
    divided by its number of examples. Padding counts nothing. The model is run in evaluation mode,
    and is left as it was: hooks, ``.grad``, buffers, modes and the state of random numbers.

    A is the mean of x xᵀ over the rows x of a layer's inputs (of a convolution, over images, summed
    over locations). G is the sum of d dᵀ over all rows, divided by the number N of the loss's
    terms, d the gradient of the sum of these terms with respect to a row of the layer's output. F =
    A ⊗ G then approximates the mean over terms of g gᵀ (Martens & Grosse 2015; Eschenhagen et al.
    2023, "expand").

    Args:
        model: The model; one of FSDP2 or DistributedDataParallel, too.
        loader: Gives the batches of this process, each time it is iterated over: tensors, tuples
            that begin with the model's input, or mappings of its keywords, as collators of Hugging
            Face give them. Another pass must give the same batches in the same order.
        factors: "inputs": A of the weights alone, by forward passes. "kfac": A and G, a 1 appended
            to the inputs of layers with a bias. "ekfac": A and G, and by a second pass the
            eigenvalues of F in their eigenbasis (George et al. 2018), of the gradients of whole
            entries of a batch.
        loss: ``loss(output, batch)`` of the data's own labels: the terms, unreduced, or ``(sum,
            number)``. A term that is exactly 0 counts unless its label is -100 or the mask leaves
            it out. None: labels are drawn from the model's predictions, one for each row of logits
            that has a label in the batch, or for each row that counts.
        likelihood: Of what labels are drawn: "categorical", "bernoulli", "gaussian", or a function
            of the output that returns terms as ``loss`` does. None for "categorical" if the batch
            has labels of classes, or no targets. Targets in floating point need a choice.
        layers: A pattern or several, shell style, of names or classes of modules to measure, with
            all that is inside of them; None for all.
        mask: ``mask(batch)`` tells the entries and positions that count, ``(entries, ...)``; None:
            the batch's ``attention_mask``, or else labels other than -100. Its first dimension also
            decides how many entries the batch has; without it, that is the first dimension of most
            of the batch's tensors.
        call: ``call(model, batch)`` returns the model's output, if the batch alone does not tell
            how to call it.
        keep: Where sums live: "device": on the model's device, whole; "cpu": as triangles in the
            host's memory, each product moved there; "owner": as triangles, each layer's on one
            process alone, to which each batch's sum is sent.
        memory: Bytes of sums at once on a process; as many passes over the data as that takes, each
            of some layers, whose factors then move to the host's memory.
        checkpoint: A folder of saves, from which an interrupted measurement goes on: to the same
            numbers, if the loader gives the same batches. Another model, other functions, options
            or another first batch are refused. It is emptied at the end.
        checkpoint_every: Batches between two saves.
        seed: Of drawn labels.
        process_group: The processes that measure, each with batches of its own; None for all.
        progress: Show a bar (of tqdm, where it is installed), the plan and the closing table.

    Returns:
        The curvature, in float32 (float64 of a float64 model), each layer on one process, with a
        :class:`Report` as ``report``.

    Raises:
        ValueError: For options that are not valid, patterns of nothing, or a budget that one layer
            does not fit into.
        TypeError: For batches of an unknown kind without ``call=``, or a loss that is one number;
            for a model, loader, layers, loss or memory that is something else.
        SecondOrderError: If the loader gives no example, or another process has failed.
    """
    patterns = patterns_of(layers)
    check_arguments(model, loader, patterns)
    shown = progress
    world = World(process_group)
    call = call_model if call is None else call
    given = Options(factors, loss, likelihood, mask, call, keep, memory, seed, shown)
    given.check()
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1")
    model = unwrapped(model)
    run = _Measurement(model, loader, given, patterns, world)
    if checkpoint is not None:
        run.saves = Saves(
            Path(checkpoint),
            checkpoint_every,
            world,
            given.identity(run.layers, run.passes, world, run.dtype, length_of(loader)),
        )
    with explained(), undisturbed(model, run.device):
        run.all_passes()
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    title = f"Curvature of {type(model).__name__}: {factors}, {processes}"
    what = model, run.layers, run.left, run.found
    report = report_of(title, *what, run.number_of_passes, run.began, run.aside)
    curvature = curvature_of(*what, world, report)
    if not curvature:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(run.found.failed.items())[:3])
        raise SecondOrderError(f"measure: no layer has factors ({reasons})")
    run.saves.clear()
    run.say(str(curvature.report))
    return curvature


class _Again(Exception):  # noqa: N818 - no error
    """A pass is to begin anew, as layers share no longer."""


class _Measurement:
    """A measurement under way."""

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        options: Options,
        patterns: Sequence[str] | None,
        world: World,
    ) -> None:
        self.model, self.loader, self.options, self.world = model, loader, options, world
        self.layers, self.left = find_layers(model, patterns, options.factors == "inputs")
        weights = [layer.block.weight for layer in self.layers]
        self.device = weights[0].device
        self.dtype = torch.float32
        for weight in weights:
            self.dtype = torch.promote_types(self.dtype, weight.dtype)
        for layer in self.layers:
            layer.rows = layer.no_rows(self.device)
        self.sharded = bool(sharded_params(model))
        self.aside = world.aside()
        ekfac, itemsize = options.factors == "ekfac", self.dtype.itemsize
        plan = options.keep, ekfac, itemsize, world.size, options.memory
        self.passes = shared_out(self.layers, *plan)
        host = options.memory is not None or options.keep == "cpu"
        self.place = torch.device("cpu") if host else self.device  # of all that is found
        self.apart: set[str] = set()
        self.found = Found()
        self.terms: Any = 0  # of this pass
        self.done = 0  # batches
        self.resumed: dict[str, Any] | None = None
        self.saves = Saves(None, 1, world, {})
        self.began = time.perf_counter()
        self.number_of_passes = len(self.passes) * (2 if ekfac else 1)
        if self.number_of_passes > 1 and goes_once(loader):
            raise ValueError(ONCE.format(why='factors="ekfac"' if ekfac else "memory="))

    def say(self, text: str) -> None:
        """Print a text, if anything is to be shown."""
        if self.options.shown and self.world.rank == 0:
            sys.stderr.write(f"{text}\n")

    # ----------------------------------------------------------------------------- over the data

    def all_passes(self) -> None:
        """Go through the data as often as it takes."""
        if self.number_of_passes > 1:
            again = self.options.factors == "ekfac"
            self.say(
                f"{self.number_of_passes} passes over the data, for {len(self.passes)} groups of "
                f"{len(self.layers)} layers{', two for each group' if again else ''}"
            )
        self.resumed = self.saves.last()
        begin = 0
        if self.resumed is not None:
            begin = self._resume(self.resumed)
        for number in range(begin, self.number_of_passes):
            group = self.passes[number % len(self.passes)]
            if number < len(self.passes):
                self._average(number, group)
            else:
                self._correct(number, group)

    def _resume(self, state: Mapping[str, Any]) -> int:
        """Take over what a save has of ended passes; returns the pass that it was made in."""
        self.found, self.apart = Found.of_state(state["found"], self.place), set(state["apart"])
        self._follow(state["leaders"])
        for layer in self.layers:
            rows = state["rows"][layer.name]
            if layer.shape.routed:
                layer.rows = torch.tensor(rows, dtype=torch.int64, device=self.device)
            else:
                layer.rows = rows[0]
            layer.missing = state["missing"][layer.name]
        self.done = state["done"]
        return int(state["pass"])

    def _follow(self, leaders: Mapping[str, str]) -> None:
        named = {layer.name: layer for layer in self.layers}
        for name, leader in leaders.items():
            named[name].leader = named[leader]

    def _state(self, number: int, index: int, statistics: Statistics) -> dict[str, Any]:
        rows = read([layer.rows for layer in self.layers])
        return {
            "pass": number,
            "index": index,
            "sums": statistics.sums.state(),
            "wrong": statistics.wrong(),
            "terms": read([self.terms])[0][0],
            "rows": {layer.name: n for layer, n in zip(self.layers, rows, strict=True)},
            "missing": {layer.name: layer.missing for layer in self.layers},
            "leaders": leaders_of(self.layers),
            "led": statistics.leaders,  # in this pass; None before any
            "apart": sorted(self.apart),
            "found": self.found.state(),
            "done": self.done,
        }

    def _average(self, number: int, group: list[Layer]) -> None:
        """A pass for A, or for A and G, of some layers."""
        inputs = self.options.factors == "inputs"
        order = group if inputs else group[::-1]  # as a backward pass goes
        sizes = {
            (layer.name, letter): layer.size(letter) for layer in order for letter in layer.letters
        }
        while True:
            sums = self._sums(sizes)
            try:
                statistics: Inputs | Pairs
                if inputs:
                    statistics = Inputs(group, sums, self.apart)
                else:
                    by_entry = self.options.factors == "ekfac"
                    # FSDP2 would send the gradients of the weights.
                    comparable = not self.sharded and NOT_COMPARED not in self.apart
                    statistics = Pairs(group, sums, by_entry, comparable)
                with compared(guessed(group)) as statistics.differences:
                    self._over_data(number, statistics)
                self._note(statistics.wrong())
                break
            except _Again:
                if goes_once(self.loader):
                    raise SecondOrderError(ONCE.format(why="what its first batch shows")) from None
                for layer in group:
                    layer.rows, layer.leader = layer.no_rows(self.device), None
                self.found.batches = 0 if number == 0 else self.found.batches
        self._keep_averages(group, sums.finish())

    def _sums(self, sizes: Mapping[Key, torch.Size]) -> Sums:
        keep: Keep = self.options.keep
        keep = "device" if keep == "owner" and self.world.size == 1 else keep
        owner = {layer.name: layer.owner for layer in self.layers}
        owners = {key: owner[key[0]] for key in sizes}
        # FSDP2's messages come between, in an order that processes do not share.
        world = self.aside if self.sharded or keep == "cpu" else self.world
        return Sums(keep, sizes, owners, world, self.device, self.dtype, waits=not self.sharded)

    def _over_data(self, number: int, statistics: Inputs | Pairs) -> None:
        """Show the data to statistics, batch by batch; all processes as long as one has a batch."""
        options, saves, start = self.options, self.saves, 0
        self.terms = 0
        state, self.resumed = self.resumed, None
        resumed = state is not None and state["pass"] == number
        if state is not None and resumed:
            start = state["index"]
            statistics.sums.load(state["sums"])
            statistics.known_wrong = state["wrong"]
            self.terms = state["terms"]
            if state["led"] is not None:
                statistics.leaders = leaders_of(statistics.layers)
                statistics.sums.drop((name, "A") for name in statistics.leaders)
        what = f"pass {number + 1} of {self.number_of_passes}"
        shown = options.shown and self.world.rank == 0
        batches, batch = each_of(self.loader), None
        failure: Exception | None = None
        with (
            self._watching(statistics) as run,
            bar_of(length_of(self.loader), what, shown) as bar,
        ):
            for index in count():
                given = END
                if failure is None:
                    try:
                        given = next(batches, END)
                        if index == 0:
                            saves.begin_pass(None if given is END else given, resumed=resumed)
                        if given is END and batch is None and self.sharded:
                            raise SecondOrderError(NO_BATCH)
                    except Exception as raised:
                        failure = raised
                if not self._agree(given is not END, failure, statistics, index - start):
                    break
                bar.update()
                if index < start:
                    batch = batch if given is END else given
                    continue
                try:
                    batch = self._one_batch(index, given, batch, statistics, run)
                except Exception as raised:
                    if self.sharded:  # the others wait within FSDP2's pass, and hear of nothing
                        raise
                    failure = raised
                statistics.end()  # others wait for the sums of a process that has failed
                self.done += 1
                if number == 0 and given is not END:
                    self.found.batches += 1
                if failure is None and saves.is_due(index + 1):
                    try:
                        saves.save(self.done, self._state(number, index + 1, statistics))
                    except Exception as raised:
                        failure = raised

    def _agree(
        self, more: bool, failure: Exception | None, statistics: Inputs | Pairs, seen: int
    ) -> bool:
        """Whether any process has another batch; raise on all where one has failed.

        After its first batch, or before that of one that goes on, let all share the same inputs.
        """
        leaders, apart = statistics.leaders, statistics.apart
        why = "" if failure is None else f"{type(failure).__name__}: {failure}"
        said = self.aside.all_gather_object((more, why, leaders, sorted(apart)))
        if failure is not None:
            raise failure
        for rank, (_, why, _, _) in enumerate(said):
            if why:
                raise SecondOrderError(f"measure: process {rank} failed: {why}")
        every = set().union(*(each[3] for each in said))
        known = [each[2] for each in said if each[2] is not None]  # of those that had a batch
        for name in {name for of in known for name in of}:
            if len({of.get(name) for of in known}) > 1:
                every.add(name)
        if every - self.apart:
            self.apart |= every
            raise _Again
        if 0 <= seen <= 1 and known:
            self._follow(known[0])
            statistics.sums.drop((name, "A") for name in known[0])
        return any(each[0] for each in said)

    def _watching(self, statistics: Inputs | Pairs) -> AbstractContextManager[Any]:
        """A block in which statistics are told of calls; it gives what begins, or runs back."""
        modules = [m for layer in statistics.layers for m in layer.block.modules]
        if not isinstance(statistics, Inputs):
            return watching_pairs(self.model, modules, statistics)
        modules = list(dict.fromkeys(modules))
        early = [m for m in modules if is_experts(m) or statistics.of[m][0].linear(m)]
        late = [m for m in modules if m not in set(early)]
        # FSDP2 would be left in the middle of a pass.
        stopping = None if self.sharded else Stopping(modules, statistics.take)
        return watching_inputs(self.model, early, late, statistics.take, stopping)

    def _one_batch(
        self, index: int, given: Any, last: Any, statistics: Inputs | Pairs, run: Any
    ) -> Any:
        """Show one batch to statistics; of a process without one, FSDP2 wants a pass all the same.

        Returns the batch.
        """
        options = self.options
        idle = given is END
        if idle and not self.sharded:
            return last
        batch = last if idle else given
        mask = None if options.mask is None else options.mask(batch)
        if mask is not None:
            mask = torch.as_tensor(mask, device="cpu")
            if mask.dim() == 0:
                raise ValueError(
                    "mask= returned a single value; return a tensor of shape (entries, ...)"
                )
        masks = masks_of(batch, self.model) if options.mask is None else [mask]
        masks = [each for each in masks if each is not None]
        rows = Rows(masks, self.device)
        here = moved(batch, self.device)
        statistics.begin(rows, entries_of(batch, mask), idle)
        if isinstance(statistics, Inputs):
            run()
            with torch.no_grad(), suppress(Stop):
                options.call(self.model, here)
        else:
            terms = terms_in(batch, self.model, rows)
            with self._comparing(statistics) as weights:
                output = options.call(self.model, here)
                if options.loss is not None:
                    total, number = terms_of(options.loss(output, here), terms, output)
                else:
                    seed = hash((options.seed, index, self.world.rank)) % 2**63
                    entries = statistics.entries
                    total, number = drawn(output, options.likelihood, terms, entries, seed)
                try:
                    run(total, weights)
                except RuntimeError as error:
                    if not (weights and "inplace operation" in str(error)):
                        raise
                    # Without the weights' gradients autograd has no use for what was changed.
                    statistics.apart = {*self.apart, NOT_COMPARED}
            self.terms = self.terms + (0 if idle else number)
            self.found.unknown |= terms.drawn.unknown
        self.found.unknown |= rows.unknown
        return batch

    def _comparing(self, statistics: Pairs) -> AbstractContextManager[list[Tensor]]:
        """A block in which weights get gradients, if these are to be compared with pairs."""
        if not statistics.compares:
            return nullcontext([])
        return asking([layer.weight for layer in statistics.layers])

    # --------------------------------------------------------------------------------- averages

    def _keep_averages(self, group: Sequence[Layer], sums: Mapping[Key, Tensor]) -> None:
        """Divide sums by their numbers, and keep those of this process's layers."""
        counts = read([*(layer.rows for layer in group), self.terms])
        everybody = self.aside.all_gather_object(counts)
        *rows, (self.found.terms,) = (
            [math.fsum(n) for n in zip(*each, strict=True)] for each in zip(*everybody, strict=True)
        )
        inputs = self.options.factors == "inputs"
        if not (max(map(max, rows)) if inputs else self.found.terms):
            raise SecondOrderError("the loader gave no example: nothing can be measured")
        wrong: dict[str, str] = {}
        for layer, number in zip(group, rows, strict=True):
            layer.rows = math.fsum(number)
            layer.missing = int(sum(max(0.0, layer.shape.dims["A"] - n) for n in number))
            if layer.leader is not None:
                continue
            of = {"A": [max(n, 1.0) for n in number]}
            for letter in layer.shape.letters:
                total = sums.get((layer.name, letter))
                if total is None:
                    continue
                by = total.new_tensor(of.get(letter, [max(self.found.terms, 1.0)]))
                total = total.div_(by.view(-1, *[1] * (total.dim() - 1)))
                if not bool(total.isfinite().all()):
                    wrong[layer.name] = f"its {letter} is not finite"
                self.found.stored[layer.name, letter] = total.to(self.place)
        for layer in group:
            if layer.leader is None and not layer.rows and layer.name not in self.found.failed:
                wrong[layer.name] = NO_ROWS
        self._note(wrong)
        for layer in group:
            if layer.leader is not None:
                leader = layer.leader.name
                layer.rows, layer.missing = layer.leader.rows, layer.leader.missing
                if leader in self.found.failed:
                    self.found.failed[layer.name] = self.found.failed[leader]
                elif (leader, "A") in self.found.stored:
                    self.found.stored[layer.name, "A"] = self.found.stored[leader, "A"]

    def _note(self, wrong: Mapping[str, str]) -> None:
        """Note layers that have failed on some process, on all of them."""
        every: dict[str, str] = {}
        for each in self.aside.all_gather_object(dict(wrong)):
            every |= each
        for name, why in every.items():
            self.found.failed[name] = why
            warnings.warn(f"measure: layer {name!r}: {why}", SecondOrderWarning, stacklevel=6)

    # ------------------------------------------------------------------------------ eigenvalues

    def _correct(self, number: int, group: list[Layer]) -> None:
        """A pass for the eigenvalues of F in the eigenbasis of A and G of some layers."""
        mine = [layer for layer in group if layer.name not in self.found.failed]
        bases = {layer.name: self._basis(layer) for layer in mine}
        kept = {
            name: Basis(of["A"][1], cast(Tensor, of["G"][1]))
            for name, of in bases.items()
            if name not in self.found.failed
        }
        sizes = {
            (layer.name, "F"): torch.Size(layer.shape.gradient_size)
            for layer in mine[::-1]
            if layer.name in kept
        }
        sums = self._sums(sizes)
        statistics = Eigenvalues([x for x in mine if x.name in kept], sums, kept)
        if kept:
            self._over_data(number, statistics)
            self.found.scattered |= statistics.scattered
        for (name, _), total in sums.finish().items():
            self.found.corrected[name] = total.div_(max(self.found.terms, 1.0)).to(self.place)

    def _basis(self, layer: Layer) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The eigenvalues and eigenvectors of a layer's A and G, from its owner."""
        rank, owner, shape = self.world.rank, layer.owner, layer.shape
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        wrong: dict[str, str] = {}
        for letter in shape.letters:
            dim, diagonal = shape.dims[letter], letter in shape.diagonals
            sizes = [(shape.groups, dim), *([] if diagonal else [(shape.groups, dim, dim)])]
            parts = [torch.zeros(n, dtype=self.dtype, device=self.device) for n in sizes]
            if rank == owner:
                kept = self.found.stored[layer.name, letter].to(self.device)
                matrix = kept if diagonal else unpack_upper_triangular(kept, dim)
                pair, errors = eigh(matrix.double() if matrix.device.type == "cpu" else matrix)
                if not bool((errors < TOLERANCE).all()):
                    wrong[layer.name] = f"its {letter} could not be decomposed"
                for part, new in zip(parts, pair[::-1], strict=True):
                    part.copy_(new)
            self.world.broadcast(parts, [owner] * len(parts))
            found[letter] = parts[0], None if diagonal else parts[1]
        self._note(wrong)
        if rank == owner:
            self.found.bases[layer.name] = tree_map_only(Tensor, lambda t: t.to(self.place), found)
        return found
