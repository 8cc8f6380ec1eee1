"""What a loader gives: how a model is called with it, the rows that count, the losses' terms.

Padding counts nothing. Which rows of a layer's input are padding is told by a mask of the batch's
entries and positions: a tensor whose first dimensions are the mask's, or are those flattened, has
its rows. A mask is read on the host, before the batch goes to the model's device, so that nothing
there is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.fisher import LIKELIHOODS, Likelihood, logits_of, sampled_loss

__all__ = [
    "END",
    "Call",
    "Loss",
    "Mask",
    "Rows",
    "call_model",
    "drawn",
    "each_of",
    "entries_of",
    "goes_once",
    "length_of",
    "masks_of",
    "moved",
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


def entries_of(batch: Any) -> int:
    """The number of a batch's entries: the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, (Mapping, tuple, list)):
        return next((entries_of(value) for value in values if isinstance(value, Tensor)), 0)
    return 0


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


def masks_of(batch: Any, model: nn.Module) -> list[Tensor]:
    """The masks of a batch, ``(entries, ...)``, by its attention masks and its labels.

    Raises:
        ValueError: If those of an encoder and of its decoder differ, and have one shape, by which
            rows could not be told apart.
    """
    if not isinstance(batch, Mapping):
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        return _of_labels(labels)
    named = (batch.get(key) for key in ("decoder_attention_mask", "attention_mask"))
    found = [mask != 0 for mask in named if isinstance(mask, Tensor) and mask.dim() == 2]
    found += _of_labels(batch.get("labels"))
    if _has_decoder(model):
        tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
        read: Any = torch.ones_like(tokens) if mask is None and tokens is not None else mask
        alike = [each for each in found if read is not None and each.shape == read.shape]
        if any(bool((each != (read != 0)).any()) for each in alike):
            raise ValueError(
                f"the encoder's and the decoder's padding are both {tuple(read.shape)}, and not "
                f"the same, so nobody knows whose a row is; pad one of them by a position more"
            )
    return found


def _of_labels(labels: Any) -> list[Tensor]:
    whole = isinstance(labels, Tensor) and labels.dim() > 0
    if not whole or labels.is_floating_point() or labels.dtype is torch.bool:
        return []
    return [labels != IGNORED]


class Rows:
    """The rows that count in a batch's tensors, by the shape of these without their last dimension.

    The first mask that fits a shape decides. A shape that no mask fits has no rows left out.
    """

    def __init__(self, masks: Sequence[Any], device: torch.device) -> None:
        self._masks = [torch.as_tensor(mask, device="cpu").detach().bool() for mask in masks]
        self._device = device
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
        whole = self._whole(shape)
        return shape[0] if whole is None else int(whole.flatten(1).any(1).sum())

    def _look(self, shape: torch.Size) -> tuple[Tensor | None, int]:
        whole = self._whole(shape)
        if whole is None:
            if self._masks:
                self.unknown.add(shape)
            return None, shape.numel()
        (index,) = whole.flatten().nonzero(as_tuple=True)
        if len(index) == whole.numel():
            return None, len(index)
        return index.to(self._device, non_blocking=True), len(index)

    def _whole(self, shape: torch.Size) -> Tensor | None:
        """The first mask that fits a shape, in that shape; None if there is none."""
        for mask in self._masks:
            if shape == (mask.numel(),):
                return mask.flatten()
            for fits in (mask, mask.mT) if mask.dim() == 2 else (mask,):  # positions may be first
                if shape[: fits.dim()] == fits.shape:
                    rest = (1,) * (len(shape) - fits.dim())
                    return fits.reshape(*fits.shape, *rest).expand(shape)
            if shape == mask.shape[:1]:  # entries have been pooled
                return mask.flatten(1).any(1)
        return None

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


def terms_of(value: Any) -> tuple[Tensor, int | Tensor]:
    """The sum of a loss's terms, and their number; those that are exactly zero are none.

    Raises:
        TypeError: If the loss is a single number, which tells nobody of how many terms.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], Tensor):
        total, number = value
        return total.sum(), number
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.sum(), (value.detach() != 0).sum()
    what = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TypeError(f"the loss returned {what}, of which nobody knows the number: {UNREDUCED}")


def drawn(
    output: Any, likelihood: Likelihood, rows: Rows, seed: int
) -> tuple[Tensor, int | Tensor]:
    """The summed loss of labels that are drawn from the model's output, and its number of terms.

    A term is a row of logits with "categorical", an entry of the batch else. Rows of logits that
    do not count have no labels.
    """
    if callable(likelihood):
        return terms_of(likelihood(output))
    logits = logits_of(output)
    shape = logits.shape[:-1] if logits.dim() > 1 else logits.shape
    index, number = rows.of(shape)
    if likelihood != "categorical":
        number = rows.entries(shape)
    if index is not None:
        logits = logits.reshape(-1, *logits.shape[len(shape) :]).index_select(0, index)
    assert likelihood in LIKELIHOODS
    return sampled_loss(cast(Any, logits), likelihood, seed), number
