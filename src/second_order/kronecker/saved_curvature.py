"""Save a model's curvature in a folder: a safetensors file per layer, and an index.

The index, ``curvature.json``, is written last. A folder without it is incomplete.
"""

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

__all__ = [
    "Index",
    "read_index",
    "read_layer",
    "remove_index",
    "write_index",
    "write_layer",
]

INDEX = "curvature.json"
FORMAT = "second_order.KroneckerCurvature"

# Fields of `LayerCurvature` and of `FactorShape` that the index stores as they are.
NUMBER_FIELDS = ("examples", "updates", "damping", "rows")
SHAPE_FIELDS = [field.name for field in fields(FactorShape) if field.init]


@dataclass(frozen=True)
class Index:
    """The contents of an index.

    Attributes:
        layers: The layers without their tensors.
        files: Names of the layers' files, by layer name.
        names: Names of the parameters.
        uncovered: By parameter name, why the parameter has no curvature.
        report: What was measured, if known.
    """

    layers: list[LayerCurvature]
    files: dict[str, str]
    names: list[str]
    uncovered: dict[str, str]
    report: str | None


# ------------------------------------------------------------------------------- layers


def file_name(layer: str) -> str:
    """Return the name of a layer's file, in the folder itself and not hidden.

    A layer of tied modules, "a = b", has the file of "a". Longer names could exceed the
    255 characters of a file name.
    """
    first_module = layer.partition(" = ")[0]
    name = quote(first_module, safe="") or "%"
    if name.startswith("."):
        name = "%2E" + name[1:]
    return f"{name}.safetensors"


def write_layer(folder: Path, layer: LayerCurvature) -> None:
    """Write the tensors of a layer, with the factors as matrices."""
    tensors = layer.tensors() | layer.factors
    save_tensors(tensors, folder / file_name(layer.name))


def read_layer(
    path: Path, layer: LayerCurvature, device: torch.device | str | None
) -> LayerCurvature:
    """Return a layer of an index with the tensors of its file.

    Raises:
        CheckpointError: If its file is missing, or if factors or corrected eigenvalues
            do not have the shapes that the index gives.
    """
    try:
        tensors = load_tensors(path, device)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there, but {INDEX} lists it for layer {layer.name!r}; copy the whole "
            f"folder, or save the curvature again"
        ) from error

    # Compare the shapes with those in the index.
    expected = layer.shape.matrix_shapes()
    expected["corrected"] = layer.shape.gradient_shape
    shapes = {name: tuple(tensors[name].shape) for name in expected if name in tensors}
    fits = all(shape == tuple(expected[name]) for name, shape in shapes.items())
    if not fits or "A" not in shapes:
        raise CheckpointError(
            f"{path} does not fit {INDEX}: its tensors have the shapes {shapes}, not {expected}; "
            f"the files are from different runs, so save the curvature again"
        )
    return layer.with_tensors(tensors)


# -------------------------------------------------------------------------------- index


def remove_index(folder: Path) -> None:
    """Mark a folder as incomplete before it is written: remove its index."""
    (folder / INDEX).unlink(missing_ok=True)


def write_index(
    folder: Path,
    layers: Mapping[str, LayerCurvature],
    names: Sequence[str],
    uncovered: Mapping[str, str],
    report: Any,
) -> None:
    """Write the index, once the files of all layers are written."""
    content = {
        "format": FORMAT,
        "names": list(names),
        "uncovered": dict(uncovered),
        "report": None if report is None else str(report),
        "layers": {name: _to_json(layer) for name, layer in layers.items()},
    }
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(content, indent=1).encode())


def read_index(folder: Path) -> Index:
    """Read the index of a folder.

    Raises:
        CheckpointError: If the folder has no index, or if the index is not valid.
    """
    # The index is written last, so a folder without it is incomplete.
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {INDEX}: it contains something else, or writing has not ended; save "
            f"the curvature again"
        )
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"{content['format']} is not {FORMAT}")
        entries = content["layers"]
        return Index(
            layers=[_from_json(name, entry) for name, entry in entries.items()],
            files={name: entry["file"] for name, entry in entries.items()},
            names=list(content["names"]),
            uncovered=dict(content["uncovered"]),
            report=content["report"],
        )
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error!r}; save the curvature again"
        ) from error


def _to_json(layer: LayerCurvature) -> dict[str, Any]:
    """Return the entry of a layer in the index."""
    # A class of your own may have the name of one of torch's.
    kind = layer.kind.__name__
    if _find_class(kind) is not layer.kind:
        kind = nn.Module.__name__
    entry: dict[str, Any] = {
        "file": file_name(layer.name),
        "modules": list(layer.modules),
        "kind": kind,
        "shapes": {name: list(size) for name, size in layer.shapes.items()},
        "shape": {name: getattr(layer.shape, name) for name in SHAPE_FIELDS},
    }
    for name in NUMBER_FIELDS:
        entry[name] = getattr(layer, name)
    return entry


def _from_json(name: str, entry: Mapping[str, Any]) -> LayerCurvature:
    """Return the layer of an entry in the index, without its tensors."""
    numbers = {field: entry[field] for field in NUMBER_FIELDS}
    return LayerCurvature(
        name=name,
        modules=tuple(entry["modules"]),
        kind=_find_class(entry["kind"]),
        shapes={param: torch.Size(size) for param, size in entry["shapes"].items()},
        shape=FactorShape(**entry["shape"]),
        stored={},
        **numbers,
    )


def _find_class(name: str) -> type[nn.Module]:
    """Return the class of ``torch.nn`` with a name, or else ``nn.Module``."""
    kind = getattr(nn, name, None)
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        return kind
    return nn.Module
