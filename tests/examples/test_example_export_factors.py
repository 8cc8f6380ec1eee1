"""The files that other packages read have our factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from models import ZOO
from optimizer_cases import make, take
from torch import nn

import export_factors
from second_order import DistKFAC

if TYPE_CHECKING:
    from pathlib import Path

    from second_order import KroneckerCurvature

N = 77


def trained(name: str) -> tuple[nn.Module, KroneckerCurvature]:
    case = ZOO[name]
    model = case.model()
    optimizer = make(DistKFAC, model, precondition_norms=True)
    take(model, optimizer, case.batches(1)[0], case.loss)
    return model, optimizer.curvature(dtype=torch.float64)


def test_kronfluence_files_contain_the_factors_times_the_examples(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    _, curvature = trained("norms")
    left = export_factors.write_kronfluence(curvature, tmp_path, N)
    assert left == [name for name, layer in curvature.items() if layer.shape.exact] != []
    for name, letter in (("activation_covariance", "A"), ("gradient_covariance", "G")):
        factors = load_file(tmp_path / f"{name}.safetensors")
        counts = load_file(tmp_path / f"num_{name}_processed.safetensors")
        assert set(factors) == set(counts) == set(curvature) - set(left)
        for module, factor in factors.items():
            assert counts[module].tolist() == [N]
            torch.testing.assert_close(factor / N, curvature[module].factors[letter][0])


@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_laplace_receives_the_blocks_of_weights_and_of_biases(name: str) -> None:
    model, curvature = trained(name)
    state = export_factors.laplace_state(curvature, model, examples=N, outputs=3)
    assert torch.equal(state["mean"], nn.utils.parameters_to_vector(model.parameters()))
    starts: dict[int, int] = {}
    for (own, p), factors in zip(model.named_parameters(), state["H"], strict=True):
        layer = next(each for each in curvature.values() if own in each.shapes)
        start = starts.get(id(layer), 0)
        starts[id(layer)] = end = start + p.numel()
        whole = factors[0] if len(factors) == 1 else torch.kron(*factors)
        torch.testing.assert_close(whole, N * layer.to_dense()[start:end, start:end])
    last = list(model)[-1]
    prefix = f"{len(model) - 1}."
    part = export_factors.laplace_state(curvature, last, examples=N, outputs=3, prefix=prefix)
    assert all(map(torch.equal, part["H"][-1], state["H"][-1]))


def test_a_parameter_without_such_factors_is_named() -> None:
    model, curvature = trained("conv_grouped")
    with pytest.raises(ValueError, match=r"weight' has no factors for KronLaplace"):
        export_factors.laplace_state(curvature, model, examples=N, outputs=3)
