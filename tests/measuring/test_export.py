"""Exporters to other packages: they load the factors that they would have computed themselves."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from other_packages import (
    CLASSES,
    DATA,
    ENTRIES,
    TOKENS,
    WIDTH,
    Case,
    Classified,
    analyzer_of,
    by_bergson,
    files_in,
    fit_options,
    laplace_of,
    measured,
    terms,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from second_order import KAISA, KroneckerCurvature, LayerCurvature, export, measure
from second_order.checkpoint.files import load_tensors
from second_order.kronecker.layers import FactorShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

WITHIN: Any = {"rtol": 1e-9, "atol": 1e-11}
STORED: dict[Any, Any] = torch.load(DATA, weights_only=True)


def close(actual: Any, reference: Any) -> None:
    torch.testing.assert_close(actual, reference, **WITHIN)


def assert_same_spaces(actual: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Whether columns are the same vectors, but for their signs."""
    assert actual.keys() == reference.keys()
    for module, vectors in reference.items():
        found = (actual[module].to(vectors).mT @ vectors).abs()
        torch.testing.assert_close(found, torch.eye(len(vectors)).to(found), rtol=1e-6, atol=1e-6)


# -------------------------------------------------------------------------------------- kronfluence


# A of a convolution is a sum over its locations, here 4, and a mean over images.
TIMES = {
    "activation_eigenvalues": 4,
    "gradient_covariance": 0.25,
    "num_activation_covariance_processed": 0.25,
    "num_gradient_covariance_processed": 0.25,
}


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("strategy", ["kfac", "ekfac"])
def test_kronfluence_files_equal_its_own(tmp_path: Path, tokens: bool, strategy: str) -> None:
    curvature = Case(tokens).curvature(strategy)
    assert export.to_kronfluence(curvature, tmp_path, documents=ENTRIES) == {}
    actual = files_in(tmp_path)
    reference = STORED["kronfluence", tokens, strategy]
    assert actual.keys() == reference.keys()
    for path, tensors in reference.items():
        if path.endswith("eigenvectors.safetensors"):
            assert_same_spaces(actual[path], tensors)
            continue
        assert actual[path].keys() == tensors.keys()
        for module, tensor in tensors.items():
            times = 1.0 if tokens or module != "0" else TIMES.get(Path(path).stem, 1.0)
            expected = tensor * times
            torch.testing.assert_close(actual[path][module], expected, check_dtype=False, **WITHIN)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("strategy", ["kfac", "ekfac"])
def test_kronfluence_loads_factors_equal_to_its_own(
    tmp_path: Path, tokens: bool, strategy: str
) -> None:
    kronfluence = pytest.importorskip("kronfluence")
    case = Case(tokens)
    analyzer = analyzer_of(case, tmp_path)
    fit = fit_options(strategy)
    data = torch.utils.data.TensorDataset(case.x, case.y)
    analyzer.fit_all_factors("theirs", data, **fit)
    folder = tmp_path / "a" / "factors_ours"
    assert export.to_kronfluence(case.curvature(strategy), folder, documents=ENTRIES) == {}
    kinds = ["covariance_matrices", "eigendecomposition"] + ["lambda_matrices"] * (
        strategy == "ekfac"
    )
    for kind in kinds:
        load = getattr(analyzer, f"load_{kind}")
        actual = load("ours")
        reference = load("theirs")
        assert actual.keys() == reference.keys()
        for key in actual.keys() - {"activation_eigenvectors", "gradient_eigenvectors"}:
            times = 1.0 if tokens else TIMES.get(key, 1.0)
            reference[key]["0"] = reference[key]["0"] * times
            torch.testing.assert_close(actual[key], reference[key], check_dtype=False, **WITHIN)
    if strategy == "ekfac":
        analyzer.fit_all_factors("ours", data, **fit)  # finds all of them there
    else:
        fit = fit_options("ekfac")
        for name in ("ours", "theirs"):  # continues from them
            more = f"more of {name}"
            analyzer.fit_lambda_matrices(more, data, load_from_factors_name=name, **fit)
        close(*(analyzer.load_lambda_matrices(f"more of {k}") for k in ("ours", "theirs")))
    args = kronfluence.arguments.ScoreArguments(damping_factor=1e-3)
    for name in ("precondition_dtype", "per_sample_gradient_dtype", "score_dtype"):
        setattr(args, name, torch.float64)
    scores = []
    for name in ("ours", "theirs"):
        options = {"per_device_query_batch_size": 6, "score_args": args}
        analyzer.compute_pairwise_scores(name, name, data, data, **options)
        scores.append(analyzer.load_pairwise_scores(name)["all_modules"])
    if not tokens and strategy == "kfac":
        return
    torch.testing.assert_close(*scores, rtol=1e-7, atol=1e-9)
    assert scores[0].abs().max() > 1e-3


@pytest.mark.parametrize("documents", [None, ENTRIES])
def test_files_for_influence_functions_record_the_kind_of_factors(
    tmp_path: Path, documents: int | None
) -> None:
    """Kronfluence's and Bergson's, by their own scales: of sums, of means and of documents."""
    curvature = Case(tokens=True).curvature()
    export.to_kronfluence(curvature, tmp_path / "k", documents=documents)
    export.to_bergson(curvature, tmp_path / "b", include_bias=True, documents=documents)
    layer = curvature["0"]
    rows = ENTRIES * TOKENS
    a = layer.A[0]
    g = layer.G[0]
    entries = documents or rows
    k = {path.stem: load_tensors(path)["0"] for path in (tmp_path / "k").glob("*.safetensors")}
    b = {path.parent.stem: load_tensors(path)["0"] for path in tmp_path.glob("b/*/shard_0.*")}
    assert k["num_lambda_processed"].tolist() == [entries]
    close(k["lambda_matrix"] / entries, b["eigenvalue_correction_sharded"])
    close(b["eigenvalue_correction_sharded"], layer.corrected[0] * rows / entries)
    for side, factor, short in (("activation", a, "a"), ("gradient", g, "g")):
        assert k[f"num_{side}_covariance_processed"].tolist() == [rows]
        close(k[f"{side}_covariance"], factor * rows)
        close(b[f"{side}_sharded"], factor * rows)
        q = k[f"{side}_eigenvectors"]
        values = k[f"{side}_eigenvalues"]
        close(q * values @ q.mT, factor)
        close(b[f"eigen_{side}_sharded"], q)
        close(b[f"factor_eig_{short}"], values * (rows / entries) ** 0.5)
    close(b["eigenvalue_sharded"], torch.outer(b["factor_eig_g"], b["factor_eig_a"]))


@pytest.mark.parametrize("exporter", [export.to_kronfluence, export.to_bergson])
def test_a_later_export_leaves_no_corrected_eigenvalues_of_an_earlier_one(
    tmp_path: Path, exporter: Any
) -> None:
    case = Case(tokens=False)
    layers = {"0": case.curvature("ekfac")["0"]}
    exporter(KroneckerCurvature(layers, [], {}), tmp_path / "again")
    for folder in ("again", "fresh"):
        exporter(case.curvature("kfac"), tmp_path / folder)
    assert files_in(tmp_path / "again").keys() == files_in(tmp_path / "fresh").keys()


# ------------------------------------------------------------------------------------------ Bergson


def for_bergson(folder: Path, include_bias: bool) -> KroneckerCurvature:
    """Write what Bergson is to read; with corrected eigenvalues if biases are included."""
    curvature = Case(tokens=True).curvature("ekfac" if include_bias else "kfac", "model")
    options: dict[str, Any] = {"prefix": "model.", "include_bias": include_bias}
    assert export.to_bergson(curvature, folder, documents=ENTRIES, **options) == {}
    return curvature


@pytest.mark.parametrize("include_bias", [False, True])
def test_bergson_files_equal_its_own(tmp_path: Path, include_bias: bool) -> None:
    for_bergson(tmp_path, include_bias)
    actual = files_in(tmp_path)
    reference = STORED["bergson", include_bias]
    assert actual.keys() == reference.keys()
    for path, tensors in reference.items():
        if path.startswith("eigen_"):  # vectors, whose signs are anybody's
            assert_same_spaces(actual[path], tensors)
        else:
            close(actual[path], tensors)
    assert torch.load(tmp_path / "total_processed.pt") == ENTRIES * TOKENS


def test_bergsons_biases_are_dropped_only_without_corrected_eigenvalues(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'model\.0' has a bias.*include_bias=True"):
        export.to_bergson(Case(tokens=True).curvature("ekfac", "model"), tmp_path, prefix="model.")


@pytest.mark.parametrize("include_bias", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_bergson_applies_factors_equal_to_its_own(tmp_path: Path, include_bias: bool) -> None:
    pytest.importorskip("bergson.hessians.kfac")
    from bergson.config import InversionConfig
    from bergson.hessians import preconditioner

    actual = tmp_path / "ours"
    reference = tmp_path / "theirs"
    curvature = for_bergson(actual, include_bias)
    by_bergson(include_bias, include_bias, reference)

    torch.manual_seed(3)
    sizes = {name: size.numel() for name, size in curvature["model.0"].shapes.items()}
    width = sum(sizes.values()) if include_bias else sizes["model.0.weight"]
    gradients = {"0": torch.randn(2, width)}
    for inversion in ("damped_inverse", "factored_tikhonov"):
        made = [
            preconditioner.FactoredPreconditioner.from_path(
                path, inversion_cfg=InversionConfig(inversion=inversion, damping_factor=0.1)
            ).apply(gradients)["0"]
            for path in (actual, reference)
        ]
        torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)


def test_bergsons_count_is_that_of_the_layer_with_the_most_rows(tmp_path: Path) -> None:
    curvature = Case(tokens=True).curvature("kfac")
    layers = dict(curvature)
    layers["2"] = replace(layers["2"], rows=ENTRIES)  # a head on the last token
    for names in ("02", "20"):
        ordered = {name: layers[name] for name in names}
        export.to_bergson(KroneckerCurvature(ordered, [], {}), tmp_path)
        assert torch.load(tmp_path / "total_processed.pt") == ENTRIES * TOKENS


def test_names_below_a_prefix_are_written_without_it(tmp_path: Path) -> None:
    left_out = export.to_bergson(Case(tokens=True).curvature("kfac"), tmp_path, prefix="2")
    assert left_out == {"0": "its name does not begin with '2'"}
    with pytest.raises(ValueError, match="no layer can be exported to Bergson; '0'"):
        export.to_bergson(Case(tokens=True).curvature("kfac"), tmp_path, prefix="model.")


# ------------------------------------------------------------------------------------ laplace-torch


class Posterior:
    """The attributes of a KronLaplace that `to_laplace` reads and sets."""

    class Kron:
        def __init__(self, kfacs: list[list[Tensor]]) -> None:
            self.kfacs = kfacs

        def decompose(self, damping: bool) -> None:
            pass

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = [*model.parameters()]
        lossfunc = nn.CrossEntropyLoss(reduction="sum")
        self.backend = SimpleNamespace(lossfunc=lossfunc, factor=1.0)
        self.damping = False


@pytest.fixture
def posterior_class(monkeypatch: pytest.MonkeyPatch) -> type[Posterior]:
    """The class that stands for laplace-torch's KronLaplace."""
    laplace = ModuleType("laplace")
    # type: ignore[attr-defined]
    laplace.KronLaplace = Posterior
    laplace.KronLLLaplace = type("KronLLLaplace", (), {})
    matrix = ModuleType("laplace.utils.matrix")
    matrix.Kron = Posterior.Kron  # type: ignore[attr-defined]
    for name, module in (("laplace", laplace), ("laplace.utils.matrix", matrix)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "laplace.utils", ModuleType("laplace.utils"))
    return Posterior


@pytest.mark.parametrize("damping", [False, True])
def test_the_laplace_hessian_equals_its_own(
    damping: bool, posterior_class: type[Posterior]
) -> None:
    case = Classified(damping)
    posterior: Any = posterior_class(case.model)
    export.to_laplace(measured(case.model, case.x, case.y, "ekfac"), posterior, case.loader)
    stored = STORED["laplace", False, damping]
    blocks = [torch.kron(*b) if len(b) > 1 else b[0] for b in posterior.H_facs.kfacs]
    close(torch.block_diag(*blocks), stored["hessian"])
    for name in ("mean", "loss", "n_data", "n_outputs"):
        close(torch.as_tensor(getattr(posterior, name)), torch.as_tensor(stored[name]))
    last = sum(p.numel() for p in case.model[-1].parameters())
    close(stored["hessian"][-last:, -last:], STORED["laplace", True, damping]["hessian"])


class TiedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


LAPLACE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "a bias with its own layer": lambda: nn.Sequential(
        nn.Unflatten(1, (WIDTH, 1)),
        nn.ConvTranspose1d(WIDTH, 2, 2),
        nn.Flatten(),
        nn.Linear(4, CLASSES, bias=False),
    ),
    "tied layers": TiedLinears,
    "the model is the layer": lambda: nn.Linear(WIDTH, CLASSES, bias=False),
}


@pytest.mark.parametrize("name", LAPLACE_MODELS)
def test_the_laplace_hessian_finds_layers_that_have_other_names_than_their_modules(
    name: str, posterior_class: type[Posterior]
) -> None:
    torch.manual_seed(0)
    model = LAPLACE_MODELS[name]().double()
    x = torch.randn(ENTRIES, WIDTH, dtype=torch.float64)
    y = torch.randint(CLASSES, (ENTRIES,))
    optimizer = KAISA(model, lr=0.0, precondition_norms=True)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    curvature = optimizer.curvature()
    posterior: Any = posterior_class(model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y))
    export.to_laplace(curvature, posterior, loader, examples=1)
    blocks = [torch.kron(*b) if len(b) > 1 else b[0] for b in posterior.H_facs.kfacs]
    expected = [curvature[curvature.parameter_layers[n]] for n, _ in model.named_parameters()]
    assert len(blocks) == len(expected)
    for block, layer in zip(blocks, expected, strict=True):
        torch.testing.assert_close(block.float(), layer.to_dense().float())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("damping", [False, True])
def test_laplace_predicts_as_with_its_own_fit(last: bool, damping: bool) -> None:
    laplace = pytest.importorskip("laplace")
    pytest.importorskip("laplace.curvature.curvlinops")
    case = Classified(damping)
    model = case.model
    x = case.x
    head = case.head
    loader = case.loader
    actual, reference = (laplace_of(case, last, damping) for _ in range(2))
    reference.fit(loader)
    curvature = measured(model, x, case.y, "ekfac")
    export.to_laplace(curvature, actual, loader)
    close(actual(x), reference(x))
    assert not torch.allclose(actual(x), model(x).softmax(-1), atol=1e-3)
    close(actual.H_facs.to_matrix(), reference.H_facs.to_matrix())
    close(actual.log_marginal_likelihood(), reference.log_marginal_likelihood())
    half, other = (laplace_of(case, last, damping) for _ in range(2))
    export.to_laplace(curvature, half, loader, examples=ENTRIES / 2)
    close(half.H_facs.to_matrix() * 2, actual.H_facs.to_matrix())
    only = KroneckerCurvature({"0": curvature["0"]}, curvature.names, {})
    with pytest.raises(ValueError, match=rf"'{head}\.weight' and .* have no curvature.*freeze"):
        export.to_laplace(only, other, loader)
    diagonal = laplace.DiagLaplace(model, "classification")
    with pytest.raises(TypeError, match="DiagLaplace has no Kronecker factors"):
        export.to_laplace(curvature, diagonal, loader)
    unknown = laplace.KronLLLaplace(model, "classification")
    with pytest.raises(ValueError, match="give last_layer_name="):
        export.to_laplace(curvature, unknown, loader)


@pytest.mark.parametrize("groups", [1, 10])
def test_the_laplace_hessian_has_blocks_for_other_layers(groups: int) -> None:
    """The layers are an embedding, a weight of shape (in, out), and a normalization."""
    laplace = pytest.importorskip("laplace")
    torch.manual_seed(0)
    head = nn.Linear(5, CLASSES, bias=False)
    model = nn.Sequential(nn.Embedding(7, 4), Conv1D(5, 4), nn.LayerNorm(5), head).double()
    sizes = {
        "0": FactorShape(1, 7, 4, diagonal_a=True, transposed=True),
        "1": FactorShape(1, 5, 5, transposed=True),
        "2": FactorShape(groups, 1, 10 // groups, diagonal_a=True, exact=True),
        "3": FactorShape(1, 5, CLASSES),
    }
    layers = {}
    for name, shape in sizes.items():
        roots = {k: torch.randn(shape.groups, n, n).double() for k, n in shape.dims.items()}
        stored = {k: root @ root.mT for k, root in roots.items()}
        if shape.diagonal_a:
            a = stored["A"].diagonal(dim1=-2, dim2=-1)
            stored["A"] = torch.ones_like(a) if shape.exact else a
        module = model.get_submodule(name)
        shapes = {f"{name}.{n}": p.shape for n, p in module.named_parameters()}
        layers[name] = LayerCurvature(name, (name,), type(module), shapes, shape, stored, 20, 1)
    posterior = laplace.KronLaplace(model, "classification")
    x = torch.randint(7, (8,))
    y = torch.randint(CLASSES, (8,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    export.to_laplace(KroneckerCurvature(layers, [], {}), posterior, loader)
    whole = torch.block_diag(*(layer.to_dense() for layer in layers.values())) * 20
    hessian = posterior.H_facs.to_matrix()
    ends = [0, *accumulate(p.numel() for p in model.parameters())]
    for start, end in pairwise(ends):
        close(hessian[start:end, start:end], whole[start:end, start:end])
    expected = nn.functional.cross_entropy(model(x), y, reduction="sum")
    close(posterior.loss, expected.detach())
    assert (posterior.n_data, posterior.n_outputs) == (8, CLASSES)
    layers["3"] = replace(layers["3"], shape=FactorShape(2, 5, CLASSES))
    with pytest.raises(ValueError, match="'3' has no pair of factors; freeze it"):
        export.to_laplace(KroneckerCurvature(layers, [], {}), posterior, loader)


# --------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize(("factors", "tokens"), [("inputs", True), ("kfac", True), ("kfac", False)])
def test_the_gptq_hessian_omits_the_bias(tmp_path: Path, tokens: bool, factors: str) -> None:
    case = Case(tokens)
    first = case.model[0]
    curvature = case.curvature(factors)
    hessians = export.to_gptq(curvature, tmp_path)
    x = case.x.flatten(0, 1) if tokens else nn.functional.unfold(case.x, 3).mT.flatten(0, 1)
    rows = len(x) if tokens else ENTRIES  # images, and a sum over their locations
    close(hessians["0"], 2 / rows * x.mT @ x)
    assert hessians.keys() == {"0", "2"}
    assert hessians["0"].shape[0] == first.weight[0].numel()
    tensors = load_tensors(tmp_path / "0.safetensors")
    close(tensors["H"], hessians["0"])
    assert tensors["nsamples"].item() == rows


def test_llm_compressors_hessian_is_equal_up_to_a_factor() -> None:
    actual = export.to_gptq(Case(tokens=True).curvature("inputs"))["0"]
    torch.testing.assert_close(actual * TOKENS, STORED["llm-compressor",], rtol=1e-5, atol=1e-6)


def test_the_gptq_hessian_of_a_grouped_convolution_is_the_mean_over_groups() -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 4, 4)
    shape = FactorShape(2, 4, 3)
    shapes = {"0.weight": torch.Size((6, 2, 2))}
    layer = LayerCurvature("0", ("0",), nn.Conv1d, shapes, shape, {"A": a}, 8, 1)
    close(export.to_gptq(KroneckerCurvature({"0": layer}, [], {}))["0"], 2 * a.mean(0))
    loaded = replace(layer, kind=nn.Module)
    close(export.to_gptq(KroneckerCurvature({"0": loaded}, [], {}))["0"], 2 * a.mean(0))
    experts = replace(layer, shape=replace(shape, routed=True))
    close(export.to_gptq(KroneckerCurvature({"0": experts}, [], {}))["0"], 2 * a)
    with pytest.raises(ValueError, match="'0': it has 2 groups"):
        export.to_kronfluence(KroneckerCurvature({"0": layer}, [], {}), "nowhere")


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("exporter", [export.to_kronfluence, export.to_bergson])
def test_curvature_of_inputs_alone_raises_if_gradients_are_needed(
    tmp_path: Path, exporter: Any
) -> None:
    curvature = Case(tokens=True).curvature("inputs")
    with pytest.raises(ValueError, match=r"'0' has no G, which .* needs; measure with factors='kf"):
        exporter(curvature, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def written(rank: int, ranks: int, folder: Path) -> list[Any]:
    """Return what a process stores and writes of layers that two processes share."""
    case = Case(tokens=True)
    share = slice(rank, None, ranks)
    batches = [(case.x[share], case.y[share])]
    options: dict[str, Any] = {"factors": "ekfac", "loss": terms, "progress": False}
    curvature = measure(case.model, batches, keep="owner", **options)
    folder = folder / f"{rank} of {ranks}"
    left_out = export.to_kronfluence(curvature, folder / "factors_a")
    return [len(curvature.local_layers), left_out, {*export.to_gptq(curvature, folder / "gptq")}]


def test_many_processes_write_the_files_of_one(tmp_path: Path, world: World) -> None:
    for result in world.run(written, 2, tmp_path):
        assert result == [1, {}, {"0", "2"}]
    assert written(0, 1, tmp_path)[0] == 2
    alone = tmp_path / "0 of 1"
    one = [*tmp_path.glob("* of 2")]
    assert len(one) == 1
    names = {path.relative_to(alone) for path in alone.rglob("*.*")}
    assert names == {path.relative_to(one[0]) for path in one[0].rglob("*.*")}
    assert len(names) == 11 + 2
    for name in names:
        if name.suffix == ".safetensors" and "eigenvectors" not in name.stem:
            close(load_tensors(one[0] / name), load_tensors(alone / name))
        elif name.suffix == ".pt":
            close(torch.load(one[0] / name), torch.load(alone / name))
    stored_arguments = json.loads((one[0] / "factors_a" / "factor_arguments.json").read_text())
    assert stored_arguments == {"strategy": "ekfac"}
