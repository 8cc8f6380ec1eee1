"""Curvature of a layer as a dense matrix, from its factors alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from second_order import LayerCurvature


def dense(layer: LayerCurvature) -> Tensor:
    """F in the order of the parameters flattened, by Kronecker products of factors or vectors."""
    groups, out, width = layer.shape.gradient_shape
    a = torch.diag_embed(layer.A) if layer.shape.diagonal_a else layer.A
    g = layer.G
    if layer.corrected is None:
        if "L" in layer.stored:
            a = torch.kron(a[0], layer.factor("L")[0])[None]
        blocks = [torch.kron(gi, ai) for gi, ai in zip(g, a, strict=True)]
    else:
        q = a if layer.shape.diagonal_a else torch.linalg.eigh(a).eigenvectors
        if layer.shape.diagonal_a:
            q = torch.eye(width, dtype=a.dtype)[None]
        if "L" in layer.stored:
            q = torch.kron(q[0], torch.linalg.eigh(layer.factor("L")[0]).eigenvectors)[None]
        p = torch.linalg.eigh(g).eigenvectors
        basis = [torch.kron(pi, qi) for pi, qi in zip(p.contiguous(), q.contiguous(), strict=True)]
        pairs = zip(basis, layer.corrected.flatten(1), strict=True)
        blocks = [b @ v.diag() @ b.mT for b, v in pairs]
    index = torch.arange(groups * out * width).view(groups, out, width)
    order = index.reshape(-1)
    if layer.shape.transposed:
        order = index[0].mT.reshape(-1)
    elif len(layer.shapes) == 2:
        order = torch.cat([index[..., :-1].reshape(-1), index[..., -1].reshape(-1)])
    return torch.block_diag(*blocks)[order][:, order]


def flat(layer: LayerCurvature, vector: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([vector[name].reshape(-1) for name in layer.shapes])
