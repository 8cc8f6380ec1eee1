"""What a loader gives: how a model is called with it, the rows that count, the losses' terms.

Padding counts nothing. A mask of the batch's entries and positions decides which rows of a layer's
input are padding: a tensor whose first dimensions are the mask's, or are those flattened, has
its rows. A mask is read on the host, before the batch goes to the model's device, so that nothing
there is waited for.

Which terms of the loss count is decided by the labels, or by the same masks, and not by the values
of the terms: the cross-entropy of a confident example is exactly 0 in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.fisher import LIKELIHOODS, Likelihood, logits_of, sampled_loss

__all__ = [
    "END",
    "Call",
    "Entries",
    "Loss",
    "Mask",
    "Rows",
    "Terms",
    "call_model",
    "drawn",
    "each_of",
    "entries_of",
    "goes_once",
    "length_of",
    "masks_of",
    "moved",
    "terms_in",
    "terms_of",
]

Call: TypeAlias = Callable[[nn.Module, Any], Any]
Loss: TypeAlias = Callable[[Any, Any], Any]
Mask: TypeAlias = Callable[[Any], Any]

IGNORED = -100
"""The label that losses ignore."""

UNREDUCED = (
    'return the losses of all terms, as cross_entropy(..., reduction="none") gives them, or their '
    "sum and number as (sum, number)"
)
MASK_OF_POSITIONS = (
    "the batch's attention_mask{additive} of shape {shape} does not say which positions are "
    "padding; pass mask=lambda batch: ..., of shape (entries, positions), True where a position "
    "counts"
)
FLOAT_TARGETS = (
    "the batch's targets are {dtype}, which are not labels of classes: choose what labels are "
    'drawn from the outputs. likelihood="gaussian" is for regression, "bernoulli" for targets of '
    '0 and 1, "categorical" if the outputs are logits of classes'
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
    '-2) if they are the last; or give likelihood="bernoulli", "gaussian" or a function'
)
NO_CLASS = (
    "the batch has the label {label}, which is not a class of the model's output of shape {shape}. "
    "If the loss ignores it, pass mask=lambda batch: ..., True where a label counts, or write -100 "
    "in its place. If it is not a label, leave it out of the batch"
)
NO_BATCH_DIMENSION = (
    "the model's output has the shape {shape}, without a dimension for the entries of the batch; "
    "let the loader give batches, as x.unsqueeze(0) is one of a single entry (for one output of "
    'each entry, keep its dimension: (entries, 1), with likelihood="gaussian" or "bernoulli")'
)


END: Any = object()
"""In the place of a batch of a loader that has no more."""


def goes_once(loader: Any) -> bool:
    """Whether a loader is an iterator."""
    return hasattr(loader, "__next__")


def each_of(loader: Any) -> Iterator[Any]:
    """What a loader gives, of which nothing is asked before the first batch is."""
    yield from loader


def length_of(loader: Any) -> int | None:
    """The number of batches, if a loader knows it; torch's may have a length that raises."""
    try:
        return len(loader)
    except TypeError:
        return None


def _tensors_of(batch: Any) -> list[Tensor]:
    """A batch's tensors that have a dimension, in their order."""
    values: Any = ()
    if isinstance(batch, Tensor):
        values = [batch]
    elif isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (tuple, list)):
        values = batch
    return [value for value in values if isinstance(value, Tensor) and value.dim() > 0]


@dataclass(frozen=True)
class Entries:
    """How many entries a batch has.

    Attributes:
        number: Their number, from ``mask=`` or the shapes of the batch's tensors.
        seconds: Second dimensions of these tensors: one of them is the number of entries if the
            model reads positions first. Empty if ``mask=`` decides the number.
        shapes: Shapes of the batch's tensors.
    """

    number: int
    seconds: frozenset[int]
    shapes: frozenset[torch.Size]


def entries_of(batch: Any, mask: Tensor | None = None) -> Entries:
    """The number of a batch's entries.

    It is the first dimension of a mask of entries and positions, or else that of most tensors.
    Tensors that all entries share do not count: a single number, or ``(1, positions)`` next to
    ``(entries, positions)``. If there are as many labels as the input's second dimension has
    entries, the input's positions come first.
    """
    tensors = _tensors_of(batch)
    shapes = frozenset(t.shape for t in tensors)
    if mask is not None:
        return Entries(len(mask), frozenset(), shapes)

    voting = [t for t in tensors if t.numel() != 1] or tensors
    tails = {t.shape[1:] for t in voting if len(t) > 1}
    voting = [t for t in voting if len(t) != 1 or t.dim() == 1 or t.shape[1:] not in tails]
    seconds = frozenset(t.shape[1] for t in voting if t.dim() > 1)
    if not voting:
        return Entries(0, seconds, shapes)
    ((number, _),) = Counter(map(len, voting)).most_common(1)
    first = next(t for t in voting if len(t) == number)
    labels = labels_of(batch)
    if labels is not None and first.dim() > 1 and first.shape[1] == len(labels) != number:
        number = len(labels)
    return Entries(number, seconds, shapes)


def labels_of(batch: Any) -> Tensor | None:
    """The targets in a batch: a mapping's "labels", the second entry of a tuple or list."""
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.dim() > 0 else None


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device; mappings become dictionaries."""
    if isinstance(batch, Tensor):
        batch = batch.clone() if batch.is_inference() else batch  # one has no version
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [moved(value, device) for value in batch]
    return batch


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch.

    A mapping gives keywords, but for the labels of a model that needs none to make its decoder's
    input; a tuple or list its first entry; a tensor itself.

    Raises:
        TypeError: For a batch of another kind.
    """
    if isinstance(batch, Mapping):
        decodes = _has_decoder(model)
        return model(**{k: v for k, v in batch.items() if decodes or k != "labels"})
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
    """Whether a model of Hugging Face's predicts at each position the label of the next one."""
    can_generate = getattr(model, "can_generate", None)
    return callable(can_generate) and bool(can_generate()) and not _has_decoder(model)


def masks_of(batch: Any, model: nn.Module) -> list[Tensor]:
    """The masks of a batch, ``(entries, ...)``, by its attention masks and its labels.

    Raises:
        ValueError: If those of an encoder and of its decoder differ, and have one shape, by which
            rows could not be distinguished; or if an attention mask is not of entries and
            positions, or is one that is added to scores.
    """
    labels = _labeled(labels_of(batch))
    of_labels = [] if labels is None else [labels]
    if not isinstance(batch, Mapping):
        return of_labels
    named = (batch.get(key) for key in ("decoder_attention_mask", "attention_mask"))
    given = [mask for mask in named if isinstance(mask, Tensor)]
    for mask in given:
        added = mask.is_floating_point() and not bool((mask > 0).any())
        if mask.dim() > 2 or added:
            additive = ", which is added to scores and is" if added else ""
            raise ValueError(MASK_OF_POSITIONS.format(additive=additive, shape=tuple(mask.shape)))
    found = [mask != 0 for mask in given if mask.dim() == 2] + of_labels
    if _has_decoder(model):
        tokens, padding = batch.get("input_ids"), batch.get("attention_mask")
        read: Any = torch.ones_like(tokens) if padding is None and tokens is not None else padding
        alike = [each for each in found if read is not None and each.shape == read.shape]
        if any(bool((each != (read != 0)).any()) for each in alike):
            raise ValueError(
                f"the encoder's and the decoder's padding are both {tuple(read.shape)}, and not "
                f"the same, so a row may be of either; pad one of them by one position more"
            )
    return found


def _labeled(labels: Tensor | None) -> Tensor | None:
    """Where there are labels of classes; None without any."""
    if labels is None or labels.is_floating_point() or labels.dtype is torch.bool:
        return None
    return labels != IGNORED


class Rows:
    """The rows that count in a batch's tensors, by the shape of these without their last dimension.

    A shape that no mask fits has no rows left out.
    """

    def __init__(self, masks: Sequence[Any], device: torch.device) -> None:
        self.masks = [torch.as_tensor(mask, device="cpu").detach().bool() for mask in masks]
        self.device = device
        self._found: dict[torch.Size, tuple[Tensor | None, int]] = {}
        self._homogeneous: dict[Any, Tensor] = {}
        self.unknown: set[torch.Size] = set()  # shapes that masks say nothing of

    def of(self, shape: Iterable[int]) -> tuple[Tensor | None, int]:
        """Positions of the counted rows among all rows of a shape, None for all; their number."""
        shape = torch.Size(shape)
        if shape not in self._found:
            self._found[shape] = self._look(shape)
        return self._found[shape]

    def entries(self, shape: torch.Size) -> int:
        """The number of a shape's entries, its first dimension, of which any row counts."""
        whole = _fitted(self.masks, shape)
        if whole is None:
            return shape[0]
        return int((whole.flatten(1).any(1) if whole.dim() > 1 else whole).sum())

    def _look(self, shape: torch.Size) -> tuple[Tensor | None, int]:
        whole = _fitted(self.masks, shape)
        if whole is None:
            if self.masks:
                self.unknown.add(shape)
            return None, shape.numel()
        (index,) = whole.flatten().nonzero(as_tuple=True)
        if len(index) == whole.numel():
            return None, len(index)
        return index.to(self.device, non_blocking=True), len(index)

    def pick(self, x: Tensor) -> tuple[Tensor, int]:
        """The counted rows of ``(..., n)`` as ``(rows, n)``, and their number."""
        index, number = self.of(x.shape[:-1])
        rows = x.reshape(-1, x.shape[-1])
        return rows if index is None else rows.index_select(0, index), number

    def pick_homogeneous(self, x: Tensor) -> tuple[Tensor, int]:
        """As :meth:`pick`, a 1 appended to each row; until the next rows of this size are."""
        index, number = self.of(x.shape[:-1])
        rows = x.reshape(-1, x.shape[-1])
        key = number, x.shape[-1], x.dtype, x.device
        if key not in self._homogeneous:
            self._homogeneous[key] = x.new_ones(number, x.shape[-1] + 1)
        place = self._homogeneous[key][:, :-1]
        if index is None:
            place.copy_(rows)
        else:
            torch.index_select(rows, 0, index, out=place)
        return self._homogeneous[key], number

    def ones(self, shape: torch.Size, like: Tensor) -> Tensor:
        """A tensor of a shape with ones in the counted rows, and zeros in the others."""
        index, _ = self.of(shape)
        if index is None:
            return torch.ones((), dtype=like.dtype, device=like.device).expand(shape)
        flat = torch.zeros(shape.numel(), dtype=like.dtype, device=like.device)
        return flat.index_fill_(0, index, 1.0).view(shape)


def _fitted(masks: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """The mask that fits a shape best, in that shape; None if none does.

    That is one of the same shape, or of its rows flattened; or of its first dimensions; or of
    positions that have been pooled.
    """
    for mask in masks:
        if (same := _exactly(mask, shape)) is not None:
            return same
    for mask in sorted(masks, key=Tensor.dim, reverse=True):
        for turned in _both_ways(mask):
            if shape[: turned.dim()] == turned.shape:
                rest = (1,) * (len(shape) - turned.dim())
                return turned.reshape(*turned.shape, *rest).expand(shape)
    for mask in masks:
        if shape == mask.shape[:1]:
            return mask.flatten(1).any(1)
    return None


def _exactly(mask: Tensor, shape: torch.Size) -> Tensor | None:
    """A mask in a shape that has its elements, in any of their layouts; None if it has not."""
    if shape == (mask.numel(),):
        return mask.flatten()
    return next((turned for turned in _both_ways(mask) if turned.shape == shape), None)


def _both_ways(mask: Tensor) -> Sequence[Tensor]:
    """A mask, and the same with positions before entries."""
    return (mask, mask.mT) if mask.dim() == 2 else (mask,)


# ------------------------------------------------------------------------------------------ terms


@dataclass(frozen=True)
class Terms:
    """The terms of the loss of a batch.

    Attributes:
        targets: The batch's targets; None if it has none.
        drawn: Which rows of the model's logits get a drawn label.
        labels: Labels of classes, on the host; None if there are none.
        labeled: Where labels count, one mask for each place that a loss may look for them.
        masks: Masks of entries and positions that count.
    """

    targets: Tensor | None
    drawn: Rows
    labels: Tensor | None
    labeled: Sequence[Tensor]
    masks: Sequence[Tensor]


def terms_in(batch: Any, model: nn.Module, rows: Rows) -> Terms:
    """The terms of a batch: its rows, or those of them that have a label, where there are labels.

    A language model that predicts the next token has at each position the label of the next one.
    """
    targets = labels_of(batch)
    masks = rows.masks
    labels = _labeled(targets)
    if targets is None or labels is None:
        shifted = [mask[:, 1:] for mask in masks if mask.dim() == 2]
        return Terms(targets, rows, None, [], [*masks, *shifted])

    counted = labels = labels.detach().cpu()
    fits = [fit for mask in masks if (fit := _fitted([mask], labels.shape)) is not None]
    for fit in fits:
        counted = counted & fit

    drawn = labels
    labeled = [counted]
    if labels.dim() == 2:
        labeled.append(counted[:, 1:])
        if isinstance(batch, Mapping) and _predicts_next(model):
            drawn = _of_next(labels)
            labeled.append(_of_next(counted))
    for fit in fits:
        if not torch.equal(fit, labels):
            drawn = drawn & fit
    numbers = targets.detach().cpu()
    return Terms(targets, Rows([drawn, *masks], rows.device), numbers, labeled, masks)


def _of_next(mask: Tensor) -> Tensor:
    """By position, what ``(entries, positions)`` has at the next one; False at the last."""
    return nn.functional.pad(mask[:, 1:], (0, 1))


def terms_of(value: Any, terms: Terms, output: Any) -> tuple[Tensor, int | Tensor]:
    """The sum of a loss's terms of a model's output, and their number.

    A term counts if it is not zero, or if a label or a mask says that it is one. Where a label may
    be that of a position or of the next one, the terms are as few as they can be.

    Raises:
        TypeError: If the loss is a single number, so that its number of terms is not known.
        ValueError: If some labels or positions do not count, and the terms' shape is not theirs;
            or if the loss may ignore a label that it does not know (:func:`_check_classes`).
    """
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], Tensor):
        total, number = value
        return total.sum(), number
    if not (isinstance(value, Tensor) and value.dim() > 0):
        what = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(
            f"the loss returned {what}, so its number of terms is not known: {UNREDUCED}"
        )

    _check_classes(output, terms, value.detach())
    known = [*terms.labeled, *terms.masks]
    partial = [mask for mask in known if not bool(mask.all())]
    if not partial:
        return value.sum(), value.numel()
    fitting = [fit for mask in terms.labeled if (fit := _exactly(mask, value.shape)) is not None]
    if not fitting and (fit := _fitted(terms.masks, value.shape)) is not None:
        fitting = [fit]
    if not fitting and value.numel() in {int(mask.sum()) for mask in known}:
        return value.sum(), value.numel()  # the loss has picked those that count
    if not fitting:
        raise ValueError(
            f"the loss returned terms of shape {tuple(value.shape)}, and the batch's labels or "
            f"mask, of shape {tuple(partial[0].shape)}, do not say which of them count: return "
            f"(sum, number)"
        )
    nonzero = value.detach() != 0
    numbers = [(fit.to(value.device, non_blocking=True) | nonzero).sum() for fit in fitting]
    return value.sum(), torch.stack(numbers).min()


def drawn(
    output: Any, likelihood: Likelihood | None, terms: Terms, entries: int, seed: int
) -> tuple[Tensor, int | Tensor]:
    """The summed loss of labels that are drawn from the model's output, and its number of terms.

    A term is a row of logits with "categorical", the default, and an entry of the batch else. Rows
    of logits that do not count get no labels.

    Raises:
        ValueError: If the output, or the batch's targets, do not fit the likelihood.
    """
    if callable(likelihood):
        return terms_of(likelihood(output), terms, output)
    logits, targets = logits_of(output), terms.targets
    if likelihood is None and targets is not None and _labeled(targets) is None:
        raise ValueError(FLOAT_TARGETS.format(dtype=targets.dtype))
    likelihood = likelihood or "categorical"
    assert likelihood in LIKELIHOODS
    if likelihood == "categorical":
        _check_classes(logits, terms)
        logits = _classes_last(logits, targets)
    elif logits.dim() < 2 and logits.numel() != entries:
        raise ValueError(NO_BATCH_DIMENSION.format(shape=tuple(logits.shape)))

    shape = logits.shape[:-1] if logits.dim() > 1 else logits.shape
    index, number = terms.drawn.of(shape)
    if likelihood != "categorical":
        number = terms.drawn.entries(shape)
        if len(shape) > 1 and shape[0] != entries == shape[1]:
            number = terms.drawn.entries(torch.Size((shape[1], shape[0], *shape[2:])))
    if index is not None:
        logits = logits.reshape(-1, *logits.shape[len(shape) :]).index_select(0, index)
    return sampled_loss(cast(Any, logits), likelihood, seed), number


def _check_classes(output: Any, terms: Terms, values: Tensor | None = None) -> None:
    """Raise if the loss may ignore a label other than -100, by ``ignore_index=``.

    That is the case if exactly one number among the labels that count is outside of the model's
    classes, such as 255 or -1. If several are, the numbers are something else than labels. If the
    ``values`` of its terms are known, and are not all 0, the loss does not ignore it.

    Raises:
        ValueError: If so.
    """
    if terms.labels is None:
        return
    try:
        shape = logits_of(output).shape
    except TypeError:  # of a model that the loss alone knows
        return
    of_labels = terms.labels.shape
    classes = set[int]()
    if len(shape) > 1 and of_labels == shape[:-1]:
        classes.add(shape[-1])
    if len(shape) > 1 and of_labels == (shape[0], *shape[2:]):
        classes.add(shape[1])
    if len(classes) != 1 or classes == {1}:
        return

    strays = (terms.labels < 0) | (terms.labels >= max(classes))
    strays &= terms.labeled[0]
    found = terms.labels[strays].unique()
    if len(found) != 1:
        return
    if values is not None:
        places = [strays, *([strays[:, 1:], _of_next(strays)] if strays.dim() == 2 else [])]
        fits = [fit for place in places if (fit := _exactly(place, values.shape)) is not None]
        zeros = [values[fit.to(values.device)] == 0 for fit in fits]
        if not any(bool(each.all()) for each in zeros):
            return
    raise ValueError(NO_CLASS.format(label=int(found), shape=tuple(shape)))


def _classes_last(logits: Tensor, targets: Tensor | None) -> Tensor:
    """Logits with the classes on the last dimension.

    Labels of classes decide which dimension that is, as torch's cross_entropy has it second. If
    they do not, it is the last one of up to three dimensions.
    """
    shape = logits.shape
    if logits.dim() < 2:
        raise ValueError(NO_BATCH_DIMENSION.format(shape=tuple(shape)))
    if logits.dim() > 2:
        labels = None if _labeled(targets) is None else targets
        last = labels is not None and labels.shape == shape[:-1]
        second = labels is not None and labels.shape == (shape[0], *shape[2:])
        if (last and second) or (logits.dim() > 3 and not (last or second)):
            raise ValueError(WHICH_CLASSES.format(shape=tuple(shape)))
        if second:
            logits = logits.movedim(1, -1)
    if logits.shape[-1] == 1:
        raise ValueError(ONE_CLASS.format(shape=tuple(shape)))
    return logits
