"""What the tests of the factors' invariants share: networks, factors and blocks, and tolerances."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import reference as ref
import torch
from hypothesis import strategies as st
from optimizer_cases import make, matrices, take
from reference import cross_entropy
from torch import Tensor, nn

from second_order import KAISA
from second_order.kronecker import rows as pass_rows
from second_order.kronecker.factors import (
    KroneckerFactors,
    PairSums,
    PassSums,
    StagedStatistics,
    add_pairs,
)
from second_order.kronecker.kinds import match
from second_order.kronecker.layers import (
    FactorShape,
    LayerKind,
    PairOptions,
    PairStatistics,
    RowMask,
    full_row_mask,
    nonzero_row_mask,
)
from second_order.kronecker.storage import pack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reference import Batch, Likelihood, Loss


def close(actual: Any, expected: Any, rtol: float = 1e-10) -> None:
    """Equal up to rounding, elements measured by their tensor's largest."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=rtol * float(b.detach().abs().max()) + 1e-14
        )


def pair_statistics(
    module: nn.Module, x: Tensor, d: Tensor, *, dtype: torch.dtype, **form: Any
) -> PairStatistics:
    kind = kind_of(module)
    rows = kind.gradient_rows(module, x, d)
    live = full_row_mask(len(d)) if rows.examples else nonzero_row_mask(rows.gradient)
    x = x.to(dtype) if x.is_floating_point() else x
    return kind.statistics(module, x, d.to(dtype), PairOptions(**{"row_mask": live, **form}))


def kind_of(module: nn.Module) -> LayerKind:
    kind = match(module).kind
    assert kind is not None
    return kind


def bring(staged: StagedStatistics, pair: PairStatistics, scale: Any, pass_id: int) -> None:
    """Add a pair's sums, of matrices that are not packed, to a layer's statistics."""
    sums = dict(pair.factors)
    factor_names = "AG" if staged.shape.gradient_factored else "G"
    sums |= {letter: sums[letter] * scale**2 for letter in factor_names}
    means = [factor.diagonal(dim1=-2, dim2=-1).mean(-1) for factor in sums.values()]
    record = torch.cat([torch.as_tensor(pair.num_examples).view(1), *means]).to(staged.dtype)
    packed = {letter: pack_upper_triangular(factor) for letter, factor in sums.items()}
    if not bool(record.isfinite().all()):
        record = torch.zeros_like(record)
        packed = {letter: torch.zeros_like(factor) for letter, factor in packed.items()}
        staged.dropped.add_(1)
    add_pairs([PairSums(staged, pass_id, PassSums(packed, record))])


def factor_shape(module: nn.Module, bias: bool) -> FactorShape:
    return kind_of(module).shape(module, bias)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """By group."""
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def dense(factors: KroneckerFactors) -> Tensor:
    """G ⊗ A, ``(groups, out in, out in)``, which multiplies ``gradient.flatten(1)``."""
    a, *locations, g = matrices(factors, factors.dtype)
    a = torch.diag_embed(a) if factors.shape.diagonal_a else a
    if locations:
        a = torch.kron(a[0], locations[0][0]).unsqueeze(0)
    return torch.stack([torch.kron(gi, ai) for ai, gi in zip(a, g, strict=True)])


def block(kronecker: KroneckerFactors) -> Tensor:
    """A layer's whole block; that of a grouped convolution is zero between its groups."""
    return torch.block_diag(*dense(kronecker))


def empirical(
    model: nn.Module, batch: Batch, loss: Loss = cross_entropy, **options: Any
) -> dict[str, KroneckerFactors]:
    """By layer, what the package has after one batch with the data's labels."""
    optimizer = make(KAISA, model, lr=0.0, **options)
    take(model, optimizer, batch, loss)
    return {block.name: block.ensure_factors() for block in optimizer._curvature.layers.blocks}


def exact(
    model: nn.Module, x: Tensor, likelihood: Likelihood, **options: Any
) -> dict[str, KroneckerFactors]:
    """By layer, what the package has with the model's own labels, when they are enumerated.

    A pass for each loss term and label, with √p times that label's gradient. The sampled Fisher
    takes the mean over passes where the expectation is the sum. The rows of other terms have no
    gradient in a pass, and must also count as its examples.
    """
    with torch.no_grad():
        outputs = model(x)
    rows = outputs.reshape(-1, outputs.shape[-1])
    vectors = ref.label_gradients(rows, likelihood)
    todo = list(itertools.product(range(len(vectors)), range(len(rows))))
    remaining = iter(todo)

    def one_term(outputs: Tensor) -> Tensor:
        label, term = next(remaining)
        return outputs.reshape(rows.shape)[term] @ vectors[label, term]

    optimizer = make(KAISA, model, lr=0.0, fisher=one_term, **options)
    with patch.object(pass_rows, "nonzero_row_mask", lambda d: RowMask(None, len(d))):
        for _ in todo:
            model(x).sum().backward()  # the user's own, which the sampled gradients wait for
    optimizer.step()
    averages = {block.name: block.ensure_factors() for block in optimizer._curvature.layers.blocks}
    for found in averages.values():
        found.stored["G"].mul_(len(todo))
        found.means[1] *= len(todo)
    return averages


def network(
    widths: Sequence[int], activation: Callable[[], nn.Module], bias: bool, seed: int
) -> nn.Sequential:
    """Linear layers, named "0", "2", "4" and so on, with activations between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1]).double()


WIDTHS = st.lists(st.integers(1, 5), min_size=2, max_size=3).map(lambda inner: [*inner, 3])
