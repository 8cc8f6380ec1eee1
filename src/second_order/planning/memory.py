"""Memory of a step: what the backward pass needs, and the largest batch that a budget leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from second_order.planning.network import examples_of
from second_order.planning.work import RankWork

__all__ = ["activation_bytes", "largest_batch", "message_bytes"]


def activation_bytes(model: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> float:
    """Bytes that a forward pass keeps for the backward pass, for each example.

    Those are the tensors that autograd saves, each storage once, without parameters and buffers.
    The loss's own, cuDNN's work space and what the allocator rounds up are not among them.

    Args:
        model: The model; on the meta device, too.
        example: Arguments of the model, a batch on the model's device.

    Raises:
        ValueError: If an example has no tensor, whose first dimension would be the batch.
    """
    batch = examples_of(example)
    known = [*model.parameters(), *model.buffers()]
    ours = {id(t.untyped_storage()): t.untyped_storage() for t in known}
    saved: dict[int, torch.UntypedStorage] = {}  # held here, so that no other gets their id

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in ours:
            saved[id(storage)] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        _ = model(**example) if isinstance(example, Mapping) else model(*example)
    return sum(storage.nbytes() for storage in saved.values()) / batch


def message_bytes(work: RankWork) -> int:
    """Bytes of the messages of a step that are under way at once, at most.

    Gradients travel while statistics and inverses do; these follow one another.
    """
    stages: Counter[str] = Counter()
    for transfer in work.transfers:
        if not transfer.host:
            stages[transfer.stage] += transfer.buffers
    gradients = stages.pop("average_gradients", 0)
    return gradients + max(stages.values(), default=0)


def largest_batch(budget: float, works: Iterable[RankWork], per_example: float) -> int:
    """The most examples to a rank's batch for which every rank keeps to a budget of memory.

    During the passes a rank has all that it keeps, and the activations; during the step, when these
    are gone, the messages.

    Args:
        budget: Bytes of a rank.
        works: The work of all ranks at the step that takes most; equal ones once.
        per_example: Bytes of activations, as from :func:`activation_bytes`.

    Returns:
        The number of examples; 0 if a rank exceeds the budget without any.

    Raises:
        ValueError: If an example takes no memory.
    """
    if not per_example > 0:
        raise ValueError(
            f"per_example={per_example} bytes leave room for any number of examples; give what "
            f"activation_bytes() finds"
        )
    works = list(works)
    if any(work.nbytes() + message_bytes(work) > budget for work in works):
        return 0
    most = max((work.nbytes() for work in works), default=0)
    return int((budget - most) // per_example)
