"""What other packages write of small models, for the exporters of `second_order.export`.

`data/exports.pt` has what kronfluence 1.0.1, Bergson 2.5.1, laplace-torch 0.3 and llm-compressor
0.14.0.1 have computed and written of the cases below. They do not install next to our torch, since
they need a torchvision, so tests compare with these files. To recreate them, with the packages:

    PYTHONPATH=src:tests python tests/helpers/other_packages.py
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from second_order import measure
from second_order.checkpoint.files import load_tensors

if TYPE_CHECKING:
    from second_order import KroneckerCurvature

DATA = Path(__file__).parents[1] / "data" / "exports.pt"
ENTRIES = 12
TOKENS = 3
WIDTH = 4
CLASSES = 3


class Case:
    """A model and its data; each entry of a batch has a label, or each token."""

    def __init__(self, tokens: bool) -> None:
        torch.manual_seed(0)
        size = (ENTRIES, TOKENS, WIDTH) if tokens else (ENTRIES, 2, 4, 4)
        self.x = torch.randn(size, dtype=torch.float64)
        first: nn.Module = nn.Linear(WIDTH, 5) if tokens else nn.Conv2d(2, 3, 3, bias=False)
        between = nn.Tanh() if tokens else nn.Sequential(nn.Flatten(), nn.Tanh())
        last = nn.Linear(5 if tokens else 12, CLASSES, bias=not tokens)
        self.model = nn.Sequential(first, between, last).double()
        self.y = torch.randint(CLASSES, (ENTRIES, TOKENS) if tokens else (ENTRIES,))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return terms(self.model(x), (x, y)).sum()

    def curvature(self, factors: Any = "ekfac", prefix: str = "") -> KroneckerCurvature:
        model = nn.ModuleDict({prefix: self.model}) if prefix else self.model
        return measured(model, self.x, self.y, factors, lambda m, batch: self.model(batch[0]))


def terms(out: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), batch[1].flatten(), reduction="none")


def measured(model: nn.Module, x: Tensor, y: Tensor, factors: Any, call: Any = None) -> Any:
    """F over the data in batches of 5, of the data's own labels."""
    batches = [*zip(x.split(5), y.split(5), strict=True)]
    loss = None if factors == "inputs" else terms
    return measure(model, batches, factors=factors, loss=loss, call=call, progress=False)


def files_in(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of all safetensors files below a folder, by path and name."""
    paths = sorted(folder.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): load_tensors(path) for path in paths}


# ---------------------------------------------------------------------------------- kronfluence


def analyzer_of(case: Case, folder: Path) -> Any:
    """An analyzer of kronfluence's, of a case."""
    import kronfluence

    class Task(kronfluence.Task):  # type: ignore[misc, name-defined]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            assert not sample
            return terms(model(batch[0]), batch).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return terms(model(batch[0]), batch).sum()

    task = Task()
    model = kronfluence.prepare_model(copy.deepcopy(case.model), task)
    options: dict[str, Any] = {"cpu": True, "disable_tqdm": True, "log_level": 40}
    return kronfluence.Analyzer("a", model, task, output_dir=str(folder), **options)


def fit_options(strategy: str) -> dict[str, Any]:
    from kronfluence.utils.common.factor_arguments import pytest_factor_arguments

    return {"per_device_batch_size": 5, "factor_args": pytest_factor_arguments(strategy)}


def by_kronfluence(tokens: bool, strategy: str, folder: Path) -> dict[str, Any]:
    case = Case(tokens)
    data = torch.utils.data.TensorDataset(case.x, case.y)
    analyzer_of(case, folder).fit_all_factors("theirs", data, **fit_options(strategy))
    return files_in(folder / "a" / "factors_theirs")


# -------------------------------------------------------------------------------------- Bergson


def by_bergson(include_bias: bool, corrected: bool, folder: Path) -> dict[str, Any]:
    """What Bergson writes for text, optionally with corrected eigenvalues."""
    from bergson.gradients import GradientProcessor
    from bergson.hessians import eigenvectors, kfac

    case = Case(tokens=True)
    shared = {
        "model": case.model,
        "path": str(folder),
        "dtype": torch.float64,
        "processor": GradientProcessor(include_bias=include_bias),
    }
    mask = torch.ones(case.y.shape, dtype=torch.bool)

    def run(collector: Any) -> None:
        with collector.with_batch(mask):
            case.loss(case.x.clone().requires_grad_(), case.y).backward()
        collector.teardown()

    run(kfac.CovarianceCollector(**shared))
    count = torch.tensor(case.y.numel())
    found = [
        eigenvectors.compute_eigendecomposition(str(folder / f"{side}_sharded"), count)
        for side in ("activation", "gradient")
    ]
    eigenvectors.save_uncorrected_eigenvalues(folder, *found, count, 0, 1, num_documents=ENTRIES)
    if corrected:
        run(eigenvectors.LambdaCollector(**shared, num_documents=ENTRIES))
    return files_in(folder)


# -------------------------------------------------------------------------------- laplace-torch


class Classified:
    """A small network, its data and a loader of them."""

    def __init__(self, damping: bool) -> None:
        torch.manual_seed(0)
        first = [nn.Linear(WIDTH, 5)] if damping else [nn.Conv2d(1, 5, 3), nn.Flatten()]
        self.model = nn.Sequential(*first, nn.Tanh(), nn.LazyLinear(CLASSES)).double()
        size = [WIDTH] if damping else [1, 4, 4]
        self.x = torch.randn(ENTRIES, *size, dtype=torch.float64)
        self.model(self.x)
        self.head = str(len(self.model) - 1)
        self.y = torch.randint(CLASSES, (ENTRIES,))
        data = torch.utils.data.TensorDataset(self.x, self.y)
        self.loader = torch.utils.data.DataLoader(data, ENTRIES)


def laplace_of(case: Classified, last: bool, damping: bool) -> Any:
    """A posterior of laplace-torch's, not fitted."""
    import laplace
    from laplace.curvature.curvlinops import CurvlinopsEF

    options: dict[str, Any] = {"last_layer_name": case.head} if last else {}
    kind = laplace.KronLLLaplace if last else laplace.KronLaplace
    options |= {"backend": CurvlinopsEF, "damping": damping, "prior_precision": 0.3}
    return kind(case.model, "classification", **options)


def by_laplace(last: bool, damping: bool) -> dict[str, Any]:
    case = Classified(damping)
    posterior = laplace_of(case, last, damping)
    posterior.fit(case.loader)
    return {
        "hessian": posterior.H_facs.to_matrix(),
        "mean": posterior.mean,
        "loss": torch.as_tensor(posterior.loss).detach(),
        "n_data": posterior.n_data,
        "n_outputs": posterior.n_outputs,
    }


# ------------------------------------------------------------------------------- llm-compressor


def by_llm_compressor() -> Tensor:
    """Its Hessian of a Linear's inputs, by sequences."""
    from llmcompressor.modifiers.gptq import helpers

    case = Case(tokens=True)
    first = case.model[0]
    count = torch.zeros(())
    found, count = helpers.accumulate_hessian(
        case.x, first, helpers.make_empty_hessian(first), count
    )
    hessian: Tensor = (found / count).double()
    return hessian


def main() -> None:
    found: dict[str, Any] = {}
    booleans = (True, False)
    with tempfile.TemporaryDirectory() as folder:
        for tokens in booleans:
            for strategy in ("kfac", "ekfac"):
                path = Path(folder) / f"kronfluence {tokens} {strategy}"
                found["kronfluence", tokens, strategy] = by_kronfluence(tokens, strategy, path)
        for include_bias in booleans:
            path = Path(folder) / f"bergson {include_bias}"
            found["bergson", include_bias] = by_bergson(include_bias, include_bias, path)
    for last in booleans:
        for damping in booleans:
            found["laplace", last, damping] = by_laplace(last, damping)
    found["llm-compressor",] = by_llm_compressor()
    torch.save(found, DATA)


if __name__ == "__main__":
    main()
