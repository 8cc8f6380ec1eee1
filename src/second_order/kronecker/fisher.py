"""Sample labels from the model's own predictions, for the sampled Fisher.

The Fisher is an expectation over labels from the model's predictive distribution. The
empirical Fisher uses the data's labels instead (Martens & Grosse 2015, section 2).

The losses here are sums and not means, so that the gradient with respect to one
example's output is the gradient of that example's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["LIKELIHOODS", "LabelSampler", "Likelihood", "logits_of", "sampled_loss"]

Likelihood: TypeAlias = (
    Literal["categorical", "bernoulli", "gaussian"] | Callable[[Any], Tensor]
)


def _categorical(output: Tensor, generator: torch.Generator) -> Tensor:
    logits = output.reshape(-1, output.shape[-1])
    with torch.no_grad():
        # The Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of
        # the softmax. Unlike torch.multinomial it does not synchronize with the device.
        # Non-finite logits give non-finite gradients, which the statistics drop.
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        labels = (logits - noise).argmax(-1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def _bernoulli(output: Tensor, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        uniform = torch.empty_like(output).uniform_(generator=generator)
        labels = (uniform < output.sigmoid()).to(output.dtype)
    return nn.functional.binary_cross_entropy_with_logits(
        output, labels, reduction="sum"
    )


def _gaussian(output: Tensor, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        noise = torch.empty_like(output).normal_(generator=generator)
        labels = output + noise
    return 0.5 * (output - labels).square().sum()


LIKELIHOODS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "categorical": _categorical,
    "bernoulli": _bernoulli,
    "gaussian": _gaussian,
}


def sampled_loss(output: Any, likelihood: Likelihood, seed: int) -> Tensor:
    """Sample labels from a model's output, and sum their negative log-likelihoods.

    Args:
        output: A tensor, a mapping or an object with ``logits``, or a tuple whose first
            entry is the tensor.
        likelihood: "categorical": the output has logits, with the classes on the last
            dimension. "bernoulli": logits of any shape. "gaussian": means, with unit
            variance. A callable ``output -> loss`` samples its own labels.
        seed: Determines the labels. A callable does not receive it.

    Returns:
        The loss, a scalar tensor with a graph.

    Raises:
        TypeError: If the output has no tensor of logits.
    """
    if callable(likelihood):
        return likelihood(output)
    logits = logits_of(output)
    # In float32 at least: probabilities from half-precision logits are too coarse.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    generator = torch.Generator(logits.device).manual_seed(seed)
    return LIKELIHOODS[likelihood](logits, generator)


def logits_of(output: Any) -> Tensor:
    """Find the tensor of logits in a model's output.

    Raises:
        TypeError: If there is none.
    """
    kind = type(output).__name__
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(
            f"labels cannot be sampled: no tensor of logits is in the model's output of type "
            f"{kind}; pass a callable: fisher=f of an optimizer, where f(output) samples labels "
            f"and returns their summed negative log-likelihood, or loss=f of measure, where "
            f"f(output, batch) returns the negative log-likelihood of each sample"
        )
    return output


class LabelSampler:
    """Samples labels with a seed that depends on the step, the pass and the rank."""

    def __init__(self, likelihood: Likelihood, rank: int) -> None:
        self._likelihood = likelihood
        self._rank = rank
        self._step = 0
        self._first_call: int | None = None  # the number of the step's first call

    def begin_step(self, step: int) -> None:
        """Set the step that the next passes belong to."""
        self._step = step
        self._first_call = None

    def __call__(self, output: Any, call: int) -> Tensor:
        """Return the loss on sampled labels. ``call`` counts the run's passes."""
        if self._first_call is None:
            self._first_call = call
        seed = hash((self._step, call - self._first_call, self._rank)) % 2**63
        return sampled_loss(output, self._likelihood, seed)
