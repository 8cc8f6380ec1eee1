"""Factors in the files that packages for influence functions and Laplace's approximation read.

kronfluence     activation_covariance.safetensors, gradient_covariance.safetensors, and the
                numbers of examples that each is a sum over; by module name
laplace-torch   the state of a ``KronLaplace``: for each parameter [N G, A], for a bias [N G]

python examples/export_factors.py --folder factors
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from digits import CLASSES, PIXELS, load_split
from second_order import KAISA, KroneckerCurvature, LayerCurvature


def is_plain(layer: LayerCurvature) -> bool:
    """Whether F is A ⊗ G of a weight whose rows are outputs."""
    shape = layer.shape
    whole = "".join(layer.factors) == "AG" and layer.A.dim() == 3
    return whole and shape.groups == 1 and not (shape.exact or shape.transposed)


def write_kronfluence(
    curvature: KroneckerCurvature, folder: Path, examples: int | None = None
) -> list[str]:
    """Write kronfluence's covariance matrices; returns the layers of which it has no kind.

    It keeps sums over examples and divides them by their number: ``examples``, or the mean of an
    update. Its layers are Linear and Conv2d without groups.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - a package of its own

    names = ("activation_covariance", "gradient_covariance")
    files: dict[str, dict[str, Tensor]] = {}
    left = []
    for name, layer in curvature.items():
        if not (issubclass(layer.kind, (nn.Linear, nn.Conv2d)) and is_plain(layer)):
            left.append(name)
            continue
        count = max(round(layer.examples), 1) if examples is None else examples
        for file, factor in zip(names, (layer.A, layer.G), strict=True):
            for module in layer.modules:
                files.setdefault(file, {})[module] = (factor[0] * count).contiguous()
                files.setdefault(f"num_{file}_processed", {})[module] = torch.tensor([count])
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors")
    return left


def blocks_of(layer: LayerCurvature, examples: int) -> dict[str, list[Tensor]]:
    """Factors of N F by parameter, without what is between weight and bias; or none at all."""
    names = list(layer.shapes)
    if layer.shape.exact:  # a gain, a bias, or both
        whole = torch.diag(layer.G.flatten()) if layer.shape.groups > 1 else layer.G[0]
        sizes = list(map(math.prod, layer.shapes.values()))
        ends = torch.tensor(sizes).cumsum(0).tolist()
        spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        pieces = [[whole[span, span] * examples] for span in spans]
        return dict(zip(names, pieces, strict=True))
    if not is_plain(layer):
        return {}
    a, g = layer.A[0], layer.G[0] * examples
    if len(names) == 1:
        return {names[0]: [g, a]}
    return {names[0]: [g, a[:-1, :-1]], names[1]: [g * a[-1, -1]]}


def laplace_state(
    curvature: KroneckerCurvature,
    model: nn.Module,
    *,
    examples: int,
    outputs: int,
    prefix: str = "",
) -> dict[str, object]:
    """What ``KronLaplace.load_state_dict`` of laplace-torch reads.

    Args:
        curvature: The curvature of a whole model.
        model: The model, or a module of it; its parameters are the mean.
        examples: N of the data set.
        outputs: Number of outputs.
        prefix: The module's name in the whole model, with a dot behind it.
    """
    blocks: dict[str, list[Tensor]] = {}
    for layer in curvature.values():
        blocks |= blocks_of(layer, examples)
    params = {prefix + n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name in params:
        if name not in blocks:
            why = curvature.uncovered.get(name, "its layer has none of the form [G, A]")
            raise ValueError(f"{name!r} has no factors for KronLaplace: {why}; freeze it")
    return {
        "mean": torch.cat([p.reshape(-1).cpu() for p in params.values()]),
        "H": [[factor.cpu() for factor in blocks[name]] for name in params],
        "loss": 0.0,
        "prior_mean": 0.0,
        "prior_precision": torch.tensor([1.0]),
        "sigma_noise": torch.tensor(1.0),
        "n_data": examples,
        "n_outputs": outputs,
        "likelihood": "classification",
        "temperature": 1.0,
        "enable_backprop": False,
        "cls_name": "KronLaplace",
    }


def main() -> None:
    """Train on digits, and write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("factors"))
    folder = parser.parse_args().folder
    digits = load_split()
    model = nn.Sequential(nn.Linear(PIXELS, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = KAISA(model, lr=0.05, momentum=0.9, fisher="categorical")
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.train_images), digits.train_labels).backward()
        optimizer.step()
    curvature = optimizer.curvature()
    count = len(digits.train_labels)
    print("left out:", write_kronfluence(curvature, folder, count))
    state = laplace_state(curvature, model, examples=count, outputs=CLASSES)
    torch.save(state, folder / "laplace.pt")


if __name__ == "__main__":
    main()
