"""Export K-FAC's factors to kronfluence and to laplace-torch.

    python export_factors.py --folder factors

kronfluence     activation_covariance.safetensors, gradient_covariance.safetensors
                (influence functions), with the number of examples in each sum, by
                module name
laplace-torch   the state of a ``KronLaplace`` (Laplace approximation): [N G, A] for
                each weight and [N G] for each bias
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from second_order import KAISA, KroneckerCurvature, LayerCurvature


def is_plain(layer: LayerCurvature) -> bool:
    """Return whether F is A ⊗ G, both dense, and the weight's rows are outputs."""
    shape = layer.shape
    is_dense = "".join(layer.factors) == "AG" and layer.A.dim() == 3
    return is_dense and shape.groups == 1 and not (shape.exact or shape.transposed)


def write_kronfluence(
    curvature: KroneckerCurvature, folder: Path, examples: int | None = None
) -> list[str]:
    """Write kronfluence's covariance matrices.

    kronfluence stores sums over examples, and divides them by the number of examples.
    That number is ``examples``, or by default the mean in an update of the factors.

    Returns:
        The names of the layers that kronfluence does not support. It supports Linear
        and Conv2d without groups.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - an optional package

    names = ("activation_covariance", "gradient_covariance")
    files: dict[str, dict[str, Tensor]] = {}
    unsupported = []
    for name, layer in curvature.items():
        if not (issubclass(layer.kind, (nn.Linear, nn.Conv2d)) and is_plain(layer)):
            unsupported.append(name)
            continue
        count = max(round(layer.examples), 1) if examples is None else examples
        for file, factor in zip(names, (layer.A, layer.G), strict=True):
            sums = files.setdefault(file, {})
            counts = files.setdefault(f"num_{file}_processed", {})
            for module in layer.modules:
                sums[module] = (factor[0] * count).contiguous()
                counts[module] = torch.tensor([count])
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors")
    return unsupported


def laplace_blocks(layer: LayerCurvature, examples: int) -> dict[str, list[Tensor]]:
    """Return the factors of N F by parameter; empty if ``KronLaplace`` lacks the layer.

    Entries of F between the weight and the bias are dropped, as ``KronLaplace`` does.
    """
    names = list(layer.shapes)
    if layer.shape.exact:
        # The gain and the bias of a norm: F is one matrix with a block for each.
        fisher = layer.G[0]
        if layer.shape.groups > 1:
            fisher = torch.diag(layer.G.flatten())
        blocks = {}
        start = 0
        for name, shape in layer.shapes.items():
            stop = start + math.prod(shape)
            blocks[name] = [fisher[start:stop, start:stop] * examples]
            start = stop
        return blocks
    if not is_plain(layer):
        return {}
    a = layer.A[0]
    g = layer.G[0] * examples
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
    """Return the state that ``KronLaplace.load_state_dict`` of laplace-torch loads.

    Args:
        curvature: The curvature of a model.
        model: The model, or a part of it. Its parameters are the mean of the posterior.
        examples: The number N of examples in the data set.
        outputs: The number of outputs.
        prefix: The module's name in the whole model, with a dot behind it.
    """
    blocks: dict[str, list[Tensor]] = {}
    for layer in curvature.values():
        blocks |= laplace_blocks(layer, examples)
    params = {
        prefix + n: p.detach() for n, p in model.named_parameters() if p.requires_grad
    }
    for name in params:
        if name not in blocks:
            why = curvature.uncovered.get(name, "its layer has none of the form [G, A]")
            raise ValueError(
                f"{name!r} has no factors for KronLaplace: {why}; freeze it"
            )
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
    """Train a network on scikit-learn's digits, and export its factors."""
    parser = argparse.ArgumentParser(description="Export K-FAC's factors.")
    parser.add_argument("--folder", type=Path, default=Path("factors"))
    folder = parser.parse_args().folder

    # Train.
    pixels, targets = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float() / 16
    labels = torch.from_numpy(targets)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = KAISA(model.parameters(), lr=0.05, momentum=0.9, fisher="categorical")
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    # Export.
    curvature = optimizer.curvature()
    unsupported = write_kronfluence(curvature, folder, len(labels))
    print("not supported by kronfluence:", unsupported)
    state = laplace_state(curvature, model, examples=len(labels), outputs=10)
    torch.save(state, folder / "laplace.pt")


if __name__ == "__main__":
    main()
