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

__all__ = ["LIKELIHOODS", "LabelSampler", "Likelihood", "sampled_loss"]

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


def _logits(output: Any) -> Tensor | None:
    """The tensor of an output that the named likelihoods read, None if there is none."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def sampled_loss(output: Any, likelihood: Likelihood, seed: int) -> Tensor:
    """Summed negative log-likelihood of labels drawn from the model's output.

    Args:
        output: The model's output. For the named likelihoods a tensor, a mapping or object with
            ``logits``, or a tuple whose first entry is the tensor. "categorical": logits, classes
            on the last dimension; "bernoulli": logits of any shape; "gaussian": means, with unit
            variance.
        likelihood: A name, or a callable ``output -> loss`` that does its own drawing.
        seed: Labels depend on this alone; the global random state is left as it is.

    Raises:
        TypeError: If no tensor can be found in the output.
    """
    if callable(likelihood):
        return likelihood(output)
    tensor = _logits(output)
    if tensor is None:
        raise TypeError(
            f"fisher='sampled' found no tensor of logits in the model's output of type "
            f"{type(output).__name__}; pass likelihood= a callable that takes the output, draws "
            f"labels from it and returns their summed negative log-likelihood"
        )
    # Half precision logits make poor distributions, and float32 costs nothing here.
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return LIKELIHOODS[likelihood](tensor, generator)


class LabelSampler:
    """Draws labels whose seed is a function of the step, the pass and the rank alone.

    The optimizer sets ``step``, the number of the step, before the step's passes.
    """

    def __init__(self, likelihood: Likelihood, rank: int) -> None:
        self.step = 0
        self._likelihood, self._rank = likelihood, rank
        self._last = (0, 0)  # the last step, and its first call

    def __call__(self, output: Any, call: int) -> Tensor:
        """The loss on labels drawn for the ``call``-th pass since the beginning."""
        if self._last[0] != self.step:
            self._last = (self.step, call)
        first_call = self._last[1]
        seed = hash((self.step, call - first_call, self._rank)) % 2**63
        return sampled_loss(output, self._likelihood, seed)
