"""A batch of the loader: the call of the model, the rows that count, and the loss terms.

Padding does not count. A mask of the batch's examples and positions decides which rows of a
layer's input are padding. It applies to every tensor whose first dimensions are those of the mask,
flattened or not. Masks are read on the host, before the batch moves to the model's device, so that
the host never synchronizes with the device.

All terms that a loss returns count, also if they are zero: the cross-entropy of a confident example
is exactly 0 in float32. If labels or masks say that fewer count, the loss is refused.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderWarning
from second_order.kronecker.fisher import logits_of, sampled_loss

__all__ = [
    "Batch",
    "Call",
    "Likelihood",
    "Loss",
    "Mask",
    "Rows",
    "batch_size_of",
    "call_model",
    "entries_of",
    "loss_terms",
    "move",
    "read_batch",
    "sampled_terms",
]

Call: TypeAlias = Callable[[nn.Module, Any], Any]
Loss: TypeAlias = Callable[[Any, Any], Any]
Mask: TypeAlias = Callable[[Any], Any]
Likelihood: TypeAlias = Literal["categorical", "bernoulli", "gaussian"]

IGNORED = -100
"""The label that torch's losses ignore."""

NO_MASK = "measure: no mask of the batch fits rows of shape {shape}: all of these count"
UNREDUCED = (
    'return the losses of all terms, as cross_entropy(..., reduction="none") gives them, or their '
    "sum and number as (sum, number)"
)
MASK_OF_POSITIONS = (
    "the batch's attention_mask of shape {shape} is no mask of examples and positions that is 1 "
    "where a position counts; pass mask=lambda batch: ..., of shape (examples, positions)"
)
FLOAT_TARGETS = (
    "the batch's targets are {dtype}, which are not labels of classes: choose what labels are "
    'sampled from the outputs. likelihood="gaussian" is for regression, "bernoulli" for targets '
    'of 0 and 1, "categorical" if the outputs are logits of classes'
)
ONE_CLASS = (
    "the model's output has the shape {shape}, one class for each row: its labels are certain, and "
    'F is zero. For regression write likelihood="gaussian", for one binary logit '
    'likelihood="bernoulli"'
)
WHICH_CLASSES = (
    "the model's output has the shape {shape}, and the batch's labels do not say which dimension "
    "the classes are: return rows of logits from call=lambda model, batch: ..., which are "
    "output.movedim(1, -1).flatten(0, -2) if the classes are dimension 1, and output.flatten(0, "
    '-2) if they are the last; or give likelihood="bernoulli" or "gaussian"'
)
NO_CLASS = (
    "the batch has the label {label}, which is not a class of the model's output of shape {shape}. "
    "If the loss ignores it, pass mask=lambda batch: ..., True where a label counts, or write -100 "
    "instead. If it is not a label, leave it out of the batch"
)
NO_BATCH_DIMENSION = (
    "the model's output has the shape {shape}, without a dimension for the examples of the batch; "
    "let the loader give batches, as x.unsqueeze(0) is one of a single example (for one output of "
    'each example, keep its dimension: (examples, 1), with likelihood="gaussian" or "bernoulli")'
)


# -------------------------------------------------------------------------------------- the model


def move(batch: Any, device: torch.device) -> Any:
    """Move a batch to a device; mappings become dictionaries."""
    if isinstance(batch, Tensor):
        # A tensor of inference mode cannot be saved for a backward pass; a copy can.
        batch = batch.clone() if batch.is_inference() else batch
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [move(value, device) for value in batch]
    return batch


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, as ``measure`` does without ``call=``.

    A mapping gives keywords. Its labels are left out, unless an encoder-decoder model makes the
    decoder's input of them. A tuple or list gives its first entry, a tensor itself.

    Raises:
        TypeError: For a batch of another kind.
    """
    if isinstance(batch, Mapping):
        with_labels = _has_decoder(model)
        return model(**{k: v for k, v in batch.items() if with_labels or k != "labels"})
    if isinstance(batch, (tuple, list)) and batch:
        return model(batch[0])
    if isinstance(batch, Tensor):
        return model(batch)
    raise TypeError(
        f"the loader gave a {type(batch).__name__}; give tensors, tuples that begin with the "
        f"model's input, or mappings of its keywords, or pass call=lambda model, batch: ..."
    )


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _predicts_next(model: nn.Module) -> bool:
    """Whether a model of ``transformers`` predicts at each position the label of the next one."""
    can_generate = getattr(model, "can_generate", None)
    return callable(can_generate) and bool(can_generate()) and not _has_decoder(model)


# -------------------------------------------------------------------------------------- the batch


@dataclass(frozen=True)
class Batch:
    """What a batch says about rows and terms.

    Attributes:
        size: The number of examples, such as images or sequences.
        shapes: Shapes of the batch's tensors.
        rows: The rows of layers' inputs that count.
        targets: The batch's targets; None if it has none.
        counted: Where labels of classes count; None without any.
        logits: The rows of logits that get a sampled label.
        numbers: How many terms a loss may have, if some labels or positions do not count.
    """

    size: int
    shapes: frozenset[torch.Size]
    rows: Rows
    targets: Tensor | None
    counted: Tensor | None
    logits: Rows
    numbers: frozenset[int]


def read_batch(batch: Any, model: nn.Module, mask: Mask | None, device: torch.device) -> Batch:
    """Read the size, masks and labels of a batch that is still on the host."""
    entries = entries_of(batch)
    targets = entries.get("labels" if isinstance(batch, Mapping) else 1)
    counted = _label_mask(targets)
    if mask is None:
        masks = _masks_of(entries, counted, model)
        size = batch_size_of(entries)
    else:
        given = torch.as_tensor(mask(batch), device="cpu").detach().bool()
        if given.dim() == 0:
            raise ValueError(
                "mask= returned a single value; return a tensor of shape (examples, ...)"
            )
        masks = [given]
        size = len(given)
    rows = Rows(masks, device)
    logits = rows

    # A row of logits is a term if it has a label and the masks do not leave it out.
    if counted is not None:
        labeled = counted
        if isinstance(batch, Mapping) and _predicts_next(model):
            labeled = nn.functional.pad(labeled[:, 1:], (0, 1))
        for fit in [_fit([each], counted.shape) for each in masks]:
            if fit is not None and not torch.equal(fit, counted):
                counted = counted & fit
                labeled = labeled & fit
        logits = Rows([labeled, *masks], device)

    # The labels of a language model may be those of the next position, and the first is none then.
    # A classifier of sequences has a term for each example.
    term_masks = masks if counted is None else [counted, *masks]
    numbers: set[int] = set()
    for each in term_masks:
        numbers.add(int(each.sum()))
        if each.dim() == 2:
            numbers |= {int(each[:, 1:].sum()), int(each.any(1).sum())}
    if all(bool(each.all()) for each in term_masks):
        numbers = set()  # any
    return Batch(
        size=size,
        shapes=frozenset(tensor.shape for tensor in entries.values()),
        rows=rows,
        targets=targets,
        counted=counted,
        logits=logits,
        numbers=frozenset(numbers),
    )


def entries_of(batch: Any) -> dict[Any, Tensor]:
    """A batch's tensors that have a dimension, by their keys or positions."""
    if not isinstance(batch, Mapping):
        batch = dict(enumerate([batch] if isinstance(batch, Tensor) else batch))
    return {
        key: value for key, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0
    }


def batch_size_of(entries: Mapping[Any, Tensor]) -> int:
    """The number of a batch's examples: the first dimension of most of its tensors.

    If two are equally frequent, it is the larger one, as of ``(1, positions)`` next to
    ``(examples, positions)``.
    """
    votes = Counter(map(len, entries.values()))
    return max(votes, key=lambda size: (votes[size], size), default=0)


def _label_mask(targets: Tensor | None) -> Tensor | None:
    """Where targets are labels that count, on the host; None without labels of classes."""
    if targets is None or targets.is_floating_point() or targets.dtype is torch.bool:
        return None
    return (targets.detach() != IGNORED).cpu()


def _masks_of(
    entries: Mapping[Any, Tensor], has_label: Tensor | None, model: nn.Module
) -> list[Tensor]:
    """The masks of a batch, ``(examples, ...)``, by its attention masks and its labels.

    Raises:
        ValueError: If an attention mask is not of examples and positions, or if the masks of an
            encoder and of its decoder differ and have one shape, so that a row may belong to
            either.
    """
    of_labels = [] if has_label is None else [has_label]
    of_encoder = []
    of_decoder = of_labels
    if "attention_mask" in entries:
        of_encoder = [_attention_mask(entries["attention_mask"])]
    if "decoder_attention_mask" in entries:
        of_decoder = [_attention_mask(entries["decoder_attention_mask"]), *of_labels]
    if not _has_decoder(model):
        return of_encoder + of_decoder
    for one in of_encoder:
        for other in of_decoder:
            if one.shape == other.shape and not torch.equal(one, other):
                raise ValueError(
                    f"the encoder's and the decoder's padding are both {tuple(one.shape)}, and not "
                    f"the same, so a row may be of either; pad one of them by one position more"
                )
    return of_decoder + of_encoder


def _attention_mask(mask: Tensor) -> Tensor:
    """An attention mask as booleans on the host."""
    is_added_to_scores = mask.is_floating_point() and not bool((mask > 0).any())
    if mask.dim() != 2 or is_added_to_scores:
        raise ValueError(MASK_OF_POSITIONS.format(shape=tuple(mask.shape)))
    return (mask.detach() != 0).cpu()


# -------------------------------------------------------------------------------------- the rows


@dataclass
class Rows:
    """The rows that count in a batch's tensors, found by the shape without the last dimension.

    If no mask fits a shape, all its rows count, with a warning.
    """

    masks: Sequence[Tensor]
    device: torch.device
    _known: dict[torch.Size, tuple[Tensor | None, int]] = field(default_factory=dict)

    def of(self, shape: torch.Size) -> tuple[Tensor | None, int]:
        """Positions of the rows that count among all rows, None for all; and their number."""
        if shape not in self._known:
            self._known[shape] = self._find(shape)
        return self._known[shape]

    def _find(self, shape: torch.Size) -> tuple[Tensor | None, int]:
        if not self.masks:
            return None, shape.numel()
        mask = _fit(self.masks, shape)
        if mask is None:
            warnings.warn(NO_MASK.format(shape=tuple(shape)), SecondOrderWarning, stacklevel=2)
        if mask is None or bool(mask.all()):
            return None, shape.numel()
        (index,) = mask.flatten().nonzero(as_tuple=True)
        return index.to(self.device, non_blocking=True), len(index)

    def num_examples(self, shape: torch.Size) -> int:
        """The number of examples, the first dimension of a shape, of which any row counts."""
        mask = _fit(self.masks, shape)
        return shape[0] if mask is None else int(mask.reshape(len(mask), -1).any(1).sum())

    def pick(self, x: Tensor, homogeneous: bool = False) -> tuple[Tensor, int]:
        """The rows of ``(..., n)`` that count, as ``(rows, n)``, and their number.

        ``homogeneous`` appends a 1 to each row.
        """
        index, number = self.of(x.shape[:-1])
        rows = x.reshape(-1, x.shape[-1])
        if index is not None:
            rows = rows.index_select(0, index)
        if homogeneous:
            rows = nn.functional.pad(rows, (0, 1), value=1.0)
        return rows, number

    def mask_of(self, tokens: Tensor) -> Tensor:
        """A mask of the rows of ``(tokens, n)`` that count."""
        index, number = self.of(tokens.shape[:1])
        if index is None:
            return torch.ones(number, dtype=torch.bool, device=tokens.device)
        mask = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return mask.index_fill_(0, index, True)


def _fit(masks: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """The mask that fits a shape best, in that shape; None if none does.

    First comes one of the same elements, then one of the first dimensions, then one of examples
    and positions if the positions have been pooled.
    """
    layouts = [*masks, *(mask.mT for mask in masks if mask.dim() == 2)]  # positions may be first
    for mask in layouts:
        if shape in (mask.shape, (mask.numel(),)):
            return mask.reshape(shape)
    for mask in sorted(layouts, key=Tensor.dim, reverse=True):
        if shape[: mask.dim()] == mask.shape:
            rest = (1,) * (len(shape) - mask.dim())
            return mask.reshape(*mask.shape, *rest).expand(shape)
    for mask in masks:
        if shape == mask.shape[:1]:
            return mask.flatten(1).any(1)
    return None


# ------------------------------------------------------------------------------------- the terms


def loss_terms(value: Any, batch: Batch) -> tuple[Tensor, int | Tensor]:
    """The sum of the terms that a loss returned, and their number.

    Raises:
        TypeError: If the loss is a single number, so that its number of terms is not known.
        ValueError: If some labels or positions do not count, and the loss has other terms.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], Tensor):
        total, number = value
        return total.sum(), number
    if not (isinstance(value, Tensor) and value.dim() > 0):
        what = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(
            f"the loss returned {what}, so its number of terms is not known: {UNREDUCED}"
        )
    if batch.numbers and value.numel() not in batch.numbers:
        numbers = " or ".join(map(str, sorted(batch.numbers)))
        raise ValueError(
            f"the loss returned {value.numel()} terms, and {numbers} labels or positions of the "
            f"batch count: return the terms that count alone, as losses[labels != -100] are, or "
            f"(sum, number)"
        )
    return value.sum(), value.numel()


def sampled_terms(
    output: Any, likelihood: Likelihood | None, batch: Batch, seed: int
) -> tuple[Tensor, int | Tensor]:
    """The summed loss of labels that are sampled from the model's output, and its number of terms.

    A term is a row of logits with "categorical", the default, else an example of the batch. Rows
    of logits that do not count get no labels.

    Raises:
        ValueError: If the output, or the batch's targets, do not fit the likelihood.
    """
    logits = logits_of(output)
    if likelihood is None and batch.targets is not None and batch.counted is None:
        raise ValueError(FLOAT_TARGETS.format(dtype=batch.targets.dtype))
    likelihood = likelihood or "categorical"
    if likelihood == "categorical":
        logits = _classes_last(logits, batch)
    elif logits.dim() < 2 and logits.numel() != batch.size:
        raise ValueError(NO_BATCH_DIMENSION.format(shape=tuple(logits.shape)))

    shape = logits.shape[:-1] if logits.dim() > 1 else logits.shape
    index, number = batch.logits.of(shape)
    if likelihood != "categorical":
        number = batch.logits.num_examples(shape)
    if index is not None:
        logits = logits.reshape(-1, *logits.shape[len(shape) :]).index_select(0, index)
    return sampled_loss(logits, likelihood, seed), number


def _classes_last(logits: Tensor, batch: Batch) -> Tensor:
    """Logits with the classes on the last dimension.

    Labels of classes decide which dimension that is, as torch's cross_entropy has it second. If
    they do not, it is the last one of up to three dimensions.

    Raises:
        ValueError: If they do not decide, or if a label that counts is none of the classes.
    """
    shape = logits.shape
    if logits.dim() < 2:
        raise ValueError(NO_BATCH_DIMENSION.format(shape=tuple(shape)))
    labels = None if batch.counted is None else batch.targets
    last = labels is not None and labels.shape == shape[:-1]
    second = labels is not None and labels.shape == (shape[0], *shape[2:])
    if logits.dim() > 2:
        if (last and second) or (logits.dim() > 3 and not (last or second)):
            raise ValueError(WHICH_CLASSES.format(shape=tuple(shape)))
        if second:
            logits = logits.movedim(1, -1)
    classes = logits.shape[-1]
    if classes == 1:
        raise ValueError(ONE_CLASS.format(shape=tuple(shape)))

    if labels is not None and (last or second):
        counted = labels.detach().cpu()[batch.counted]
        outside = counted[(counted < 0) | (counted >= classes)]
        if len(outside):
            raise ValueError(NO_CLASS.format(label=int(outside[0]), shape=tuple(shape)))
    return logits
