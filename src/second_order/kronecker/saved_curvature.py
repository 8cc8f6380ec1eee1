"""The curvature of a model in a folder: a safetensors file for each layer, and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import nn

from second_order.checkpoint.files import load_tensors, replacing, save_tensors
from second_order.errors import CheckpointError
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.layers import FactorShape

__all__ = ["Index", "read_index", "read_layer", "remove_index", "write_index", "write_layer"]

INDEX = "curvature.json"
FORMAT = "second_order.KroneckerCurvature"
NUMBERS = ("examples", "updates", "damping", "rows")
SIZES = [field.name for field in fields(FactorShape) if field.init]


@dataclass(frozen=True)
class Index:
    """What a folder has: layers without their tensors, and the rest of the curvature."""

    layers: list[LayerCurvature]
    names: list[str]
    uncovered: dict[str, str]
    report: str | None


def file_name(layer: str) -> str:
    """The file of a layer: one within the folder, and not hidden, whatever the layer's name."""
    name = quote(layer, safe="") or "%"
    return f"{'%2E' + name[1:] if name.startswith('.') else name}.safetensors"


def write_layer(folder: Path, layer: LayerCurvature) -> None:
    """Write a layer's tensors, factors as whole matrices."""
    save_tensors({**layer.tensors(), **layer.factors}, folder / file_name(layer.name))


def read_layer(
    folder: Path, layer: LayerCurvature, device: torch.device | str | None
) -> LayerCurvature:
    """A layer of an index with its tensors, of which factors and corrected eigenvalues fit."""
    path = folder / file_name(layer.name)
    try:
        tensors = load_tensors(path, device)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there, which {INDEX} has for the factors of layer {layer.name!r}; copy "
            f"the whole folder, or save the curvature again"
        ) from error
    expected = layer.shape.matrix_shapes()
    expected["corrected"] = layer.shape.gradient_shape
    found = {name: tuple(tensors[name].shape) for name in expected if name in tensors}
    wrong = {name: shape for name, shape in found.items() if shape != tuple(expected[name])}
    if wrong or "A" not in found:
        raise CheckpointError(
            f"{path} does not fit {INDEX}: its factors have the shapes {found}, and not "
            f"{expected}; it is of another run"
        )
    return layer.with_tensors(tensors)


def remove_index(folder: Path) -> None:
    """Mark a folder as being written."""
    (folder / INDEX).unlink(missing_ok=True)


def write_index(
    folder: Path,
    layers: Mapping[str, LayerCurvature],
    names: Sequence[str],
    uncovered: Mapping[str, str],
    report: Any,
) -> None:
    """Write the index, which says that all layers have been written."""
    content = {
        "format": FORMAT,
        "names": list(names),
        "uncovered": dict(uncovered),
        "report": None if report is None else str(report),
        "layers": {name: _described(layer) for name, layer in layers.items()},
    }
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(content, indent=1).encode())


def _described(layer: LayerCurvature) -> dict[str, Any]:
    return {
        "file": file_name(layer.name),
        "modules": list(layer.modules),
        "kind": layer.kind.__name__,
        "shapes": {name: list(size) for name, size in layer.shapes.items()},
        "shape": {name: getattr(layer.shape, name) for name in SIZES},
        **{name: getattr(layer, name) for name in NUMBERS},
    }


def read_index(folder: Path) -> Index:
    """Read the index of a folder; raise CheckpointError if it has none, or not a valid one."""
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {INDEX}: it is of something else, or writing has not ended; save the "
            f"curvature anew"
        )
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"{content['format']} is not {FORMAT}")
        return Index(
            layers=[_layer(name, entry) for name, entry in content["layers"].items()],
            names=list(content["names"]),
            uncovered=dict(content["uncovered"]),
            report=content["report"],
        )
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; save it again") from error


def _layer(name: str, entry: Mapping[str, Any]) -> LayerCurvature:
    return LayerCurvature(
        name=name,
        modules=tuple(entry["modules"]),
        kind=_class(entry["kind"]),
        shapes={each: torch.Size(size) for each, size in entry["shapes"].items()},
        shape=FactorShape(**entry["shape"]),
        stored={},
        **{each: entry[each] for each in NUMBERS},
    )


def _class(name: str) -> type[nn.Module]:
    """The class of torch of a name; that of any module if there is none."""
    found = getattr(nn, name, nn.Module)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else nn.Module
