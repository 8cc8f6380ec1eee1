"""The curvature of a model in a folder: a safetensors file for each layer, and an index."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import nn

from second_order.errors import CheckpointError
from second_order.files import replacing
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.layers import FactorShape
from second_order.safetensors import load_tensors, save_tensors

__all__ = ["Index", "read_index", "read_layer", "remove_index", "write_index", "write_layer"]

LONGEST = 200  # bytes of a file's name, to which a partial file adds some; systems allow 255
INDEX, FORMAT, VERSION = "curvature.json", "second_order.KroneckerCurvature", 1
NUMBERS = ("examples", "updates", "damping", "rows")
SIZES = [field.name for field in fields(FactorShape) if field.init]


class Index(NamedTuple):
    """What a folder has: layers without their tensors, and the rest of the curvature."""

    layers: list[LayerCurvature]
    names: list[str]
    uncovered: dict[str, str]
    report: str | None


def file_name(layer: str) -> str:
    """The file of a layer: one within the folder, and not hidden, whatever the layer's name."""
    name = quote(layer, safe="") or "%"
    if len(name) > LONGEST:  # no other name is quoted with a +
        name = f"{name[: LONGEST // 2]}+{hashlib.sha256(layer.encode()).hexdigest()[:32]}"
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
        tensors, _ = load_tensors(path, device)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there, which {INDEX} has for the factors of layer {layer.name!r}; copy "
            f"the whole folder, or save the curvature anew"
        ) from error
    shapes = {k: layer.shape.stored_shape(k, False) for k in layer.shape.letters}
    shapes["corrected"] = layer.shape.gradient_size
    found = {key: tuple(tensors[key].shape) for key in shapes if key in tensors}
    wrong = [key for key, shape in found.items() if shape != shapes[key]]
    if wrong or "A" not in found:
        raise CheckpointError(
            f"{path} does not fit {INDEX}: {wrong or 'A'} of {found}, to be {shapes}; it is of "
            f"another run"
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
        "version": VERSION,
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
        "kind": f"{layer.kind.__module__}:{layer.kind.__qualname__}",
        "shapes": {name: list(size) for name, size in layer.shapes.items()},
        "shape": {name: getattr(layer.shape, name) for name in SIZES},
        **{name: getattr(layer, name) for name in NUMBERS},
    }


def read_index(folder: Path) -> Index:
    """Read the index of a folder; raise CheckpointError if it has none, or no sound one."""
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {INDEX}: it is of something else, or writing has not ended; save the "
            f"curvature anew"
        )
    try:
        content = json.loads(path.read_bytes())
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"{content['format']} of version {content['version']} is not known")
        layers = [_layer(name, entry) for name, entry in content["layers"].items()]
        names, uncovered = list(content["names"]), dict(content["uncovered"])
        return Index(layers, names, uncovered, content["report"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; save it anew") from error


def _layer(name: str, entry: Mapping[str, Any]) -> LayerCurvature:
    shapes = {each: torch.Size(size) for each, size in entry["shapes"].items()}
    numbers = {each: entry[each] for each in NUMBERS}
    shape, modules = FactorShape(**entry["shape"]), tuple(entry["modules"])
    return LayerCurvature(name, modules, _class(entry["kind"]), shapes, shape, {}, **numbers)


def _class(said: str) -> type[nn.Module]:
    """A class by its name, if its module has been imported; else that of any module."""
    module, _, name = said.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else nn.Module
