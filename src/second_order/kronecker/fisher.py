"""Labels drawn from the model's own predictive distribution, for the sampled Fisher.

The Fisher takes its expectation over the model's labels, the empirical Fisher over the data's
(Martens & Grosse 2015, section 2). The losses here are summed, not averaged, so that the gradient
with respect to one example's output is that of the example's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["LIKELIHOODS", "LabelSampler", "Likelihood", "logits_of", "sampled_loss"]

Likelihood: TypeAlias = Literal["categorical", "bernoulli", "gaussian"] | Callable[[Any], Tensor]


def _categorical(output: Tensor, generator: torch.Generator) -> Tensor:
    logits = output.reshape(-1, output.shape[-1])
    with torch.no_grad():
        # The largest of logit + Gumbel noise is a draw from the softmax. Unlike multinomial it asks
        # nothing of the host, and passes on what is not finite for the statistics to drop.
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        labels = (logits - noise).argmax(-1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def _bernoulli(output: Tensor, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        uniform = torch.empty_like(output).uniform_(generator=generator)
        labels = (uniform < output.sigmoid()).to(output.dtype)
    return nn.functional.binary_cross_entropy_with_logits(output, labels, reduction="sum")


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
    """Summed negative log-likelihood of labels drawn from the model's output, by a seed alone.

    The named likelihoods read a tensor, a mapping or object with ``logits``, or a tuple whose first
    entry is the tensor. "categorical": logits, classes on the last dimension; "bernoulli": logits
    of any shape; "gaussian": means, with unit variance. A callable ``output -> loss`` draws itself.

    Raises:
        TypeError: If no tensor can be found in the output.
    """
    if callable(likelihood):
        return likelihood(output)
    logits = logits_of(output)
    # Half precision logits make poor distributions, and float32 costs nothing here.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return LIKELIHOODS[likelihood](logits, torch.Generator(logits.device).manual_seed(seed))


def logits_of(output: Any) -> Tensor:
    """The tensor of logits in a model's output; raise TypeError if there is none."""
    kind = type(output).__name__
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(
            f"labels cannot be drawn: no tensor of logits is in the model's output of type {kind}; "
            f"pass a callable that takes the output, draws labels from it and returns "
            f"their summed negative log-likelihood: fisher= of an optimizer, loss= of measure"
        )
    return output


class LabelSampler:
    """Draws labels by a seed of the rank, the pass and the step."""

    def __init__(self, likelihood: Likelihood, rank: int) -> None:
        self._step = 0
        self._likelihood, self._rank = likelihood, rank
        self._last = (0, 0)  # the last step, and its first call

    def begin_step(self, step: int) -> None:
        """Set the step whose passes come next."""
        self._step = step

    def __call__(self, output: Any, call: int) -> Tensor:
        """The loss on labels drawn for the ``call``-th pass since the beginning."""
        if self._last[0] != self._step:
            self._last = (self._step, call)
        seed = hash((self._step, call - self._last[1], self._rank)) % 2**63
        return sampled_loss(output, self._likelihood, seed)
