"""Factors in the files that packages for influence functions and Laplace's approximation read.

    kronfluence     activation_covariance.safetensors, gradient_covariance.safetensors, and the
                    numbers of examples that each is a sum over; by module name
    laplace-torch   the state of a ``KronLaplace``: for each parameter [N G, A], for a bias [N G]

Written with torch alone: a file of safetensors is a length, a JSON header, and the numbers.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from second_order.files import replacing
from second_order.kronecker.layer_curvature import LayerCurvature

__all__ = ["write_kronfluence", "write_laplace", "write_safetensors"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in the format of safetensors.

    Args:
        path: The file.
        tensors: float64, float32, bfloat16 or int64, by name.
    """
    contents = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in contents.items():
        end = start + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in contents.values():
            file.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def write_kronfluence(
    layers: Mapping[str, LayerCurvature], folder: Path, examples: int | None = None
) -> list[str]:
    """Write kronfluence's four files of covariance matrices.

    Kronfluence keeps sums over examples and divides them by their number: A and G are multiplied by
    it here. Its layers are Linear and Conv2d without groups.

    Args:
        layers: The layers' curvature, by name.
        folder: The directory of the factors; made if it is missing.
        examples: Number of examples to write; None for the mean of an update.

    Returns:
        Names of the layers that are left out.
    """
    names = ("activation_covariance", "gradient_covariance")
    files: dict[str, dict[str, Tensor]] = {}
    left = []
    for name, layer in layers.items():
        known = issubclass(layer.kind, (nn.Linear, nn.Conv2d))
        if not (known and _is_plain(layer)):
            left.append(name)
            continue
        count = max(round(layer.examples), 1) if examples is None else examples
        for file, factor in zip(names, (layer.A, layer.G), strict=True):
            for module in layer.modules:
                number = torch.tensor([count], dtype=torch.int64)
                files.setdefault(file, {})[module] = factor[0] * count
                files.setdefault(f"num_{file}_processed", {})[module] = number
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        write_safetensors(folder / f"{file}.safetensors", tensors)
    return left


def write_laplace(
    layers: Mapping[str, LayerCurvature],
    uncovered: Mapping[str, str],
    path: Path,
    model: nn.Module,
    *,
    known: Mapping[int, str],
    examples: int,
    outputs: int,
    likelihood: str,
    prior_precision: float,
    loss: float,
) -> None:
    """Write the state of laplace-torch's ``KronLaplace`` for a model, or for a module of it.

    It has no blocks of weight and bias together: what is between the two is left out.

    Args:
        layers: The layers' curvature, by name.
        uncovered: Why a parameter has no curvature, by its name.
        path: The file.
        model: The model, whose parameters are the mean; or a module of it, or around it.
        known: Names of the layers' parameters, by their ids; others go by what ``model`` calls
            them.
        examples: N, the number of examples of the data set.
        outputs: Number of outputs of the model.
        likelihood: "classification" or "regression".
        prior_precision: δ.
        loss: The loss of the data set.

    Raises:
        ValueError: If a parameter that trains has no curvature of a form that ``KronLaplace`` has.
    """
    blocks: dict[str, list[Tensor]] = {}
    for layer in layers.values():
        blocks |= _blocks_of(layer, examples)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wanted = {known.get(id(p), name): p.detach() for name, p in named}
    missing = [name for name in wanted if name not in blocks]
    if missing:
        name = missing[0]
        formless = any(name in layer.shapes for layer in layers.values())
        why = "it is no parameter of these layers, by itself or by its name"
        why = "its layer has no factors of the form [G, A]" if formless else why
        raise ValueError(
            f"{len(missing)} parameters have no Kronecker factors for KronLaplace, {name!r} "
            f"first: {uncovered.get(name, why)}; freeze them, or give a module of the model whose "
            f"parameters have"
        )
    state = {
        "mean": torch.cat([p.reshape(-1).cpu() for p in wanted.values()]),
        "H": [[factor.cpu() for factor in blocks[name]] for name in wanted],
        "loss": loss,
        "prior_mean": 0.0,
        "prior_precision": torch.tensor([prior_precision]),
        "sigma_noise": torch.tensor(1.0),
        "n_data": examples,
        "n_outputs": outputs,
        "likelihood": likelihood,
        "temperature": 1.0,
        "enable_backprop": False,
        "cls_name": "KronLaplace",
    }
    with replacing(path) as file:
        torch.save(state, file)


def _blocks_of(layer: LayerCurvature, examples: int) -> dict[str, list[Tensor]]:
    """Factors of N F for each parameter of a layer; none where they are of another form."""
    names = list(layer.shapes)
    if layer.shape.exact:  # a gain, a bias, or both
        whole = (torch.diag(layer.G.flatten()) if layer.shape.groups > 1 else layer.G[0]) * examples
        start, found = 0, {}
        for name, size in layer.shapes.items():
            end = start + math.prod(size)
            found[name] = [whole[start:end, start:end]]
            start = end
        return found
    if not _is_plain(layer):
        return {}
    a, g = layer.A[0], layer.G[0] * examples
    if len(names) == 1:
        return {names[0]: [g, a]}
    return {names[0]: [g, a[:-1, :-1]], names[1]: [g * a[-1, -1]]}


def _is_plain(layer: LayerCurvature) -> bool:
    """Whether F is G ⊗ A of a weight whose rows are outputs."""
    shape, letters = layer.shape, "".join(layer.factors)
    whole = letters == "AG" and layer.A.dim() == 3
    return whole and shape.groups == 1 and not (shape.exact or shape.transposed)
