"""Read a batch: call the model, find the rows that count, and sum the loss terms.

Padding does not count. A mask of shape ``(examples, ...)`` says which positions of a
batch are padding. It applies to every layer input whose leading dimensions are those of
the mask, flattened or not. Masks are read on the host, before the batch moves to the
model's device, so that the host never synchronizes with the device.

All terms that a loss returns count, even if they are zero, because the cross-entropy of
a confident prediction is exactly 0 in float32. If labels or masks say that fewer terms
count, the loss is refused. Only A of embeddings and fused experts is a mean over rows
with a nonzero gradient.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from second_order.errors import warn
from second_order.kronecker.fisher import logits_of, sampled_loss

__all__ = [
    "Batch",
    "Call",
    "Likelihood",
    "Loss",
    "LossTerms",
    "Mask",
    "Rows",
    "batch_tensors",
    "call_model",
    "find_batch_size",
    "move_to_device",
    "read_batch",
    "sample_loss_terms",
    "sum_loss_terms",
]

Call: TypeAlias = Callable[[nn.Module, Any], Any]
Loss: TypeAlias = Callable[[Any, Any], Any]
Mask: TypeAlias = Callable[[Any], Any]
Likelihood: TypeAlias = Literal["categorical", "bernoulli", "gaussian"]

IGNORE_INDEX = -100
"""The label that torch's losses ignore."""

NO_MASK_FITS = (
    "measure: no mask of the batch fits rows of shape {shape}, so all of them count"
)
UNREDUCED = (
    'return the losses of all terms, as cross_entropy(..., reduction="none") does, or their sum '
    "and number as (sum, number)"
)
NOT_A_POSITION_MASK = (
    "the batch's attention_mask of shape {shape} is not a mask of shape (examples, positions) that "
    "is 1 where a position counts; pass mask=lambda batch: ..., which returns one"
)
FLOAT_TARGETS = (
    "the batch's targets are {dtype}, so they are not class labels; choose the distribution of "
    'sampled labels: likelihood="gaussian" for regression, "bernoulli" for targets of 0 and 1, '
    '"categorical" if the outputs are logits of classes'
)
ONE_CLASS = (
    "the model's output has shape {shape}, which is one class per row, so that labels are certain "
    'and F is zero; for regression write likelihood="gaussian", for a binary logit '
    'likelihood="bernoulli"'
)
UNKNOWN_CLASS_DIMENSION = (
    "the model's output has shape {shape}, and the batch's labels do not say which dimension the "
    "classes are; return rows of logits from call=lambda model, batch: ..., which are "
    "output.movedim(1, -1).flatten(0, -2) if dimension 1 has the classes, or output.flatten(0, -2) "
    'if the last one has; or pass likelihood="bernoulli" or "gaussian"'
)
UNKNOWN_LABEL = (
    "the batch has the label {label}, which is not a class of the model's output of shape {shape}. "
    "If the loss ignores this label, pass mask=lambda batch: ..., which is True where a label "
    "counts, or write -100 instead. If it is not a label, leave it out of the batch"
)
NO_BATCH_DIMENSION = (
    "the model's output has shape {shape}, without a dimension for the examples of the batch; let "
    "the loader return batches, such as x.unsqueeze(0) for a single example. If the model has one "
    'output per example, keep its dimension, (examples, 1), with likelihood="gaussian" or '
    '"bernoulli"'
)


# ---------------------------------------------------------------------------- the model


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device, with mappings as dictionaries.

    Objects with a method ``to(device)``, such as a ``PackedSequence`` or the batches of
    ``transformers``, keep their type. Objects of other types are not moved.
    """
    if isinstance(batch, Tensor):
        if batch.is_inference():
            # Autograd cannot save an inference tensor, but it can save a copy.
            batch = batch.clone()
        if batch.grad_fn is not None:
            # The user may still need the graph that computed the batch.
            batch = batch.detach().requires_grad_()
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        copied = copy.copy(batch)
        moved = copied.to(device)
        if moved is None:  # the object has moved itself
            moved = copied
        if isinstance(moved, MutableMapping):
            for key, value in list(moved.items()):
                if not isinstance(value, Tensor):
                    continue
                changed = move_to_device(value, device)
                if changed is not value:  # the mapping may be locked
                    moved[key] = changed
        return moved
    if isinstance(batch, Mapping):
        return {key: move_to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [move_to_device(value, device) for value in batch]
        if isinstance(batch, tuple):
            make_tuple = getattr(batch, "_make", tuple)  # of a named tuple
            return make_tuple(values)
        return values
    return batch


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, as ``measure`` does without ``call``.

    A mapping is passed as keywords. Its labels are left out, unless an encoder-decoder
    model computes the decoder's input from them. If the batch is a tuple or list, its
    first entry is passed.

    Raises:
        TypeError: If the batch has another type.
    """
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        if not _is_encoder_decoder(model):
            kwargs.pop("labels", None)
        return model(**kwargs)
    if isinstance(batch, (tuple, list)) and batch:
        return model(batch[0])
    if isinstance(batch, Tensor):
        return model(batch)
    raise TypeError(
        f"the loader gave a {type(batch).__name__}; give tensors, tuples that begin with the "
        f"model's input, or mappings of its keywords, or pass call=lambda model, batch: ..."
    )


def _is_encoder_decoder(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def _predicts_next_token(model: nn.Module) -> bool:
    """Return whether a ``transformers`` model predicts the next position's label."""
    can_generate = getattr(model, "can_generate", None)
    if not callable(can_generate) or _is_encoder_decoder(model):
        return False
    return bool(can_generate())


# ---------------------------------------------------------------------------- the batch


@dataclass(frozen=True)
class Batch:
    """What a batch says about rows and loss terms.

    Attributes:
        size: The number of examples, such as images or sequences; 0 if unknown.
        shapes: Shapes of the tensors of the batch.
        rows: The rows of layer inputs that count.
        targets: The targets of the batch; None if it has none.
        label_mask: Where class labels count, on the host; None without class labels.
        logit_rows: The rows of logits for which a label is sampled.
        term_counts: The numbers of terms that a loss may return; empty if any is valid.
    """

    size: int
    shapes: frozenset[torch.Size]
    rows: Rows
    targets: Tensor | None
    label_mask: Tensor | None
    logit_rows: Rows
    term_counts: frozenset[int]


def read_batch(
    batch: Any, model: nn.Module, mask: Mask | None, device: torch.device
) -> Batch:
    """Read the size, masks and labels of a batch that is still on the host."""
    # Find the masks and the number of examples.
    tensors = batch_tensors(batch)
    targets_key = "labels" if isinstance(batch, Mapping) else 1
    targets = tensors.get(targets_key)
    label_mask = _label_mask(targets)
    if mask is None:
        masks = _batch_masks(tensors, label_mask, model)
        size = find_batch_size(tensors)
    else:
        user_mask = torch.as_tensor(mask(batch), device="cpu").detach().bool()
        if user_mask.dim() == 0:
            raise ValueError(
                "mask= returned a single value; return a tensor of shape (examples, ...)"
            )
        masks = [user_mask]
        size = len(user_mask)
    rows = Rows(masks, device)

    # A row of logits is a term if it has a label and the masks include both. A causal
    # language model has the label of the next position, and none at the last one.
    logit_rows = rows
    if label_mask is not None:
        included = torch.ones_like(label_mask)
        for each_mask in masks:
            fitted_mask = _fit_mask([each_mask], label_mask.shape)
            if each_mask is not label_mask and fitted_mask is not None:
                included &= fitted_mask
        label_mask = label_mask & included
        logit_mask = label_mask
        if isinstance(batch, Mapping) and _predicts_next_token(model):
            logit_mask = nn.functional.pad(label_mask[:, 1:], (0, 1)) & included
        logit_rows = Rows([logit_mask, *masks], device)

    term_masks = masks if label_mask is None else [label_mask, *masks]
    return Batch(
        size=size,
        shapes=frozenset(tensor.shape for tensor in tensors.values()),
        rows=rows,
        targets=targets,
        label_mask=label_mask,
        logit_rows=logit_rows,
        term_counts=_valid_term_counts(term_masks),
    )


def _valid_term_counts(masks: Sequence[Tensor]) -> frozenset[int]:
    """Return the numbers of terms that a loss may have; empty if any is valid."""
    if all(map(torch.all, masks)):
        return frozenset()
    counts: set[int] = set()
    for mask in masks:
        counts.add(int(mask.sum()))
        if mask.dim() == 2:
            # A language model may predict the labels of next positions, so the first
            # has no term. A classifier of sequences has one term per example.
            counts.add(int(mask[:, 1:].sum()))
            counts.add(int(mask.any(1).sum()))
    return frozenset(counts)


def batch_tensors(batch: Any) -> dict[Any, Tensor]:
    """Return the tensors of a batch by key or position, without scalars.

    If a batch has an unknown type, there are none.
    """
    items: dict[Any, Any] = {}
    if isinstance(batch, Tensor):
        items = {0: batch}
    elif isinstance(batch, Mapping):
        items = dict(batch)
    elif isinstance(batch, (tuple, list)):
        items = dict(enumerate(batch))
    tensors = {key: value for key, value in items.items() if isinstance(value, Tensor)}
    return {key: tensor for key, tensor in tensors.items() if tensor.dim() > 0}


def find_batch_size(tensors: Mapping[Any, Tensor]) -> int:
    """Return the number of examples, the first dimension of most tensors of a batch.

    If two sizes are equally frequent, the larger one counts, because tensors such as
    positions of shape ``(1, positions)`` may be shared by all examples.
    """
    if not tensors:
        return 0
    # If several sizes are the most frequent ones, mode() returns the first of them.
    largest_first = sorted(map(len, tensors.values()), reverse=True)
    return statistics.mode(largest_first)


def _label_mask(targets: Tensor | None) -> Tensor | None:
    """Return where class labels count, on the host; None for other targets."""
    if targets is None or targets.is_floating_point() or targets.dtype is torch.bool:
        return None
    # As int64, because in uint8 the label 156 equals -100.
    return (targets.detach().long() != IGNORE_INDEX).cpu()


def _batch_masks(
    tensors: Mapping[Any, Tensor], label_mask: Tensor | None, model: nn.Module
) -> list[Tensor]:
    """Return the masks ``(examples, ...)`` of a batch, from attention masks and labels.

    Raises:
        ValueError: If an attention mask does not have the shape (examples, positions),
            or if the masks of an encoder and its decoder have the same shape but
            differ, so that a row of this shape could belong to either.
    """
    # Labels belong to the outputs, which are those of the decoder.
    encoder_masks = []
    decoder_masks = []
    if "attention_mask" in tensors:
        encoder_masks.append(_attention_mask(tensors["attention_mask"]))
    if "decoder_attention_mask" in tensors:
        decoder_masks.append(_attention_mask(tensors["decoder_attention_mask"]))
    if label_mask is not None:
        decoder_masks.append(label_mask)
    if not _is_encoder_decoder(model):
        return encoder_masks + decoder_masks

    # A row is found by the shape of its mask, so equal shapes need equal masks.
    for encoder_mask in encoder_masks:
        for decoder_mask in decoder_masks:
            same_shape = encoder_mask.shape == decoder_mask.shape
            if same_shape and not torch.equal(encoder_mask, decoder_mask):
                raise ValueError(
                    f"the padding masks of the encoder and the decoder both have shape "
                    f"{tuple(encoder_mask.shape)} and differ, so a row could belong to either; pad "
                    f"one of them by one more position"
                )
    return decoder_masks + encoder_masks


def _attention_mask(mask: Tensor) -> Tensor:
    """Return an attention mask as booleans on the host."""
    is_added_to_scores = mask.is_floating_point() and not bool((mask > 0).any())
    if mask.dim() != 2 or is_added_to_scores:
        raise ValueError(NOT_A_POSITION_MASK.format(shape=tuple(mask.shape)))
    return (mask.detach() != 0).cpu()


# ----------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class RowSelection:
    """The rows of a tensor that count.

    Attributes:
        index: Their positions among all rows, on the model's device; None if all count.
        count: Their number.
    """

    index: Tensor | None
    count: int


@dataclass
class Rows:
    """The rows that count in tensors of a batch, given the masks of the batch.

    The shape of a tensor without its last dimension decides which mask applies. If no
    mask fits, all rows count, with a warning unless the masks are all True.
    """

    masks: Sequence[Tensor]
    device: torch.device
    _selections: dict[torch.Size, RowSelection] = field(default_factory=dict)

    def select(self, shape: torch.Size) -> RowSelection:
        """Return the rows that count, of tensors with these leading dimensions."""
        if shape in self._selections:
            return self._selections[shape]
        mask = _fit_mask(self.masks, shape)
        if mask is None and not all(map(torch.all, self.masks)):
            warn(NO_MASK_FITS.format(shape=tuple(shape)))
        selection = RowSelection(None, shape.numel())
        if mask is not None and not bool(mask.all()):
            (index,) = mask.flatten().nonzero(as_tuple=True)
            index = index.to(self.device, non_blocking=True)
            selection = RowSelection(index, len(index))
        self._selections[shape] = selection
        return selection

    def count_examples(self, shape: torch.Size) -> int:
        """Return how many of the ``shape[0]`` examples have a row that counts."""
        mask = _fit_mask(self.masks, shape)
        if mask is None:
            return shape[0]
        return int(mask.reshape(len(mask), -1).any(1).sum())

    def gather(self, x: Tensor, homogeneous: bool = False) -> Tensor:
        """Return the rows of ``(..., n)`` that count as ``(rows, n)``.

        ``homogeneous`` appends a 1 to each row, for the bias: ``(rows, n + 1)``.
        """
        index = self.select(x.shape[:-1]).index
        rows = x.reshape(-1, x.shape[-1])
        if index is not None:
            rows = rows.index_select(0, index)
        if homogeneous:
            rows = nn.functional.pad(rows, (0, 1), value=1.0)
        return rows

    def token_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask ``(tokens,)`` of the rows of ``(tokens, n)`` that count."""
        index = self.select(tokens.shape[:1]).index
        mask = torch.full((len(tokens),), index is None, device=tokens.device)
        if index is not None:
            mask.index_fill_(0, index, True)
        return mask


def _fit_mask(masks: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """Return the mask that fits a shape best, expanded to it; None if none fits."""
    # Positions may be the first dimension.
    transposed_masks = [mask.mT for mask in masks if mask.dim() == 2]
    candidates = [*masks, *transposed_masks]

    # The best mask has the same number of elements.
    for mask in candidates:
        if shape in (mask.shape, (mask.numel(),)):
            return mask.reshape(shape)

    # The next best covers the leading dimensions.
    for mask in sorted(candidates, key=Tensor.dim, reverse=True):
        if shape[: mask.dim()] == mask.shape:
            trailing_dims = (1,) * (len(shape) - mask.dim())
            return mask.reshape(*mask.shape, *trailing_dims).expand(shape)

    # If positions have been pooled, an example counts if any of its positions does.
    for mask in masks:
        if shape == mask.shape[:1]:
            return mask.flatten(1).any(1)
    return None


# ---------------------------------------------------------------------------- the terms


@dataclass(frozen=True)
class LossTerms:
    """The sum of the loss terms of a batch, and their number."""

    total: Tensor
    count: int | Tensor


def sum_loss_terms(value: Any, batch: Batch) -> LossTerms:
    """Sum the loss terms that the user's loss returned.

    Raises:
        TypeError: If the loss returned a single number, whose number of terms is
            unknown.
        ValueError: If some labels or positions do not count, and the number of terms
            differs from those that count.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if is_pair and isinstance(value[0], Tensor):
        total, count = value
        return LossTerms(total.sum(), count)
    if not isinstance(value, Tensor) or value.dim() == 0:
        returned = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            returned = "a scalar"
        raise TypeError(
            f"the loss returned {returned}, so its number of terms is not known; {UNREDUCED}"
        )
    if batch.term_counts and value.numel() not in batch.term_counts:
        counts = " or ".join(str(count) for count in sorted(batch.term_counts))
        raise ValueError(
            f"the loss returned {value.numel()} terms, but {counts} labels or positions of the "
            f"batch count; return only the terms that count, as losses[labels != -100] does, or "
            f"return (sum, number)"
        )
    return LossTerms(value.sum(), value.numel())


def sample_loss_terms(
    output: Any, likelihood: Likelihood | None, batch: Batch, seed: int
) -> LossTerms:
    """Sample labels from the model's output, and sum the loss terms with these labels.

    With "categorical", the default, a term is a row of logits. With other likelihoods
    it is an example of the batch. No label is sampled for a row of logits that does not
    count.

    Raises:
        ValueError: If the output or the targets of the batch do not fit the likelihood.
    """
    # Check the output, and move the classes to its last dimension.
    logits = logits_of(output)
    if likelihood is None:
        if batch.targets is not None and batch.label_mask is None:
            raise ValueError(FLOAT_TARGETS.format(dtype=batch.targets.dtype))
        likelihood = "categorical"
    if likelihood == "categorical":
        logits = _move_classes_last(logits, batch)
    elif logits.dim() < 2 and logits.numel() != batch.size:
        raise ValueError(NO_BATCH_DIMENSION.format(shape=tuple(logits.shape)))

    # Sample labels for the rows that count.
    shape = logits.shape
    if logits.dim() > 1:
        shape = shape[:-1]
    rows = batch.logit_rows.select(shape)
    count = rows.count
    if likelihood != "categorical":
        count = batch.logit_rows.count_examples(shape)
    if rows.index is not None:
        logits = logits.reshape(-1, *logits.shape[len(shape) :])
        logits = logits.index_select(0, rows.index)
    return LossTerms(sampled_loss(logits, likelihood, seed), count)


def _move_classes_last(logits: Tensor, batch: Batch) -> Tensor:
    """Return logits with the classes in the last dimension.

    The shape of the class labels decides which dimension has the classes: it may be the
    last one, or the second one, as in ``torch.nn.functional.cross_entropy``. If the
    labels do not decide, it is the last one of up to three dimensions.

    Raises:
        ValueError: If the dimension of the classes is unknown, if there is only one
            class, or if a label that counts is not one of the classes.
    """
    shape = logits.shape
    if logits.dim() < 2:
        raise ValueError(NO_BATCH_DIMENSION.format(shape=tuple(shape)))

    # Compare the shape with that of the labels, if there are any.
    labels = None if batch.label_mask is None else batch.targets
    fits_last = labels is not None and labels.shape == shape[:-1]
    fits_second = labels is not None and labels.shape == (shape[0], *shape[2:])
    if logits.dim() > 2:
        # With two dimensions the classes are last; with more, the labels decide.
        is_ambiguous = fits_last and fits_second
        is_unknown = logits.dim() > 3 and not fits_last and not fits_second
        if is_ambiguous or is_unknown:
            raise ValueError(UNKNOWN_CLASS_DIMENSION.format(shape=tuple(shape)))
        if fits_second:
            logits = logits.movedim(1, -1)
    num_classes = logits.shape[-1]
    if num_classes == 1:
        raise ValueError(ONE_CLASS.format(shape=tuple(shape)))

    if labels is not None and (fits_last or fits_second):
        labels = labels.detach().long().cpu()[batch.label_mask]
        invalid_labels = labels[(labels < 0) | (labels >= num_classes)]
        if len(invalid_labels):
            label = int(invalid_labels[0])
            raise ValueError(UNKNOWN_LABEL.format(label=label, shape=tuple(shape)))
    return logits
