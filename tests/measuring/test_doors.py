"""Doors to other packages: what they load of ours is what they would have computed themselves."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from second_order import KroneckerCurvature, LayerCurvature, doors, measure
from second_order.kronecker.layers import FactorShape
from second_order.safetensors import load_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

ENTRIES, TOKENS, WIDTH, CLASSES = 12, 3, 4, 3
WITHIN: Any = {"rtol": 1e-9, "atol": 1e-11}


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


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, **WITHIN)


# -------------------------------------------------------------------------------------- kronfluence


# Of a convolution A is a sum over the locations, here 4, and a mean over images.
TIMES = {
    "activation_eigenvalues": 4,
    "gradient_covariance": 0.25,
    "num_activation_covariance_processed": 0.25,
    "num_gradient_covariance_processed": 0.25,
}


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("strategy", ["kfac", "ekfac"])
def test_kronfluence_loads_what_it_would_have_fitted(
    tmp_path: Path, tokens: bool, strategy: str
) -> None:
    kronfluence = pytest.importorskip("kronfluence")
    arguments = pytest.importorskip("kronfluence.utils.common.factor_arguments")
    case = Case(tokens)

    class Task(kronfluence.Task):  # type: ignore[misc, name-defined]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            assert not sample
            return terms(model(batch[0]), batch).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return terms(model(batch[0]), batch).sum()

    task = Task()
    model = kronfluence.prepare_model(copy.deepcopy(case.model), task)
    options: dict[str, Any] = {
        "cpu": True,
        "disable_tqdm": True,
        "output_dir": str(tmp_path),
        "log_level": 40,
    }
    analyzer = kronfluence.Analyzer("a", model, task, **options)
    data = torch.utils.data.TensorDataset(case.x, case.y)
    fit = {"per_device_batch_size": 5, "factor_args": arguments.pytest_factor_arguments(strategy)}
    analyzer.fit_all_factors("theirs", data, **fit)
    folder = tmp_path / "a" / "factors_ours"
    assert doors.to_kronfluence(case.curvature(strategy), folder, documents=ENTRIES) == {}
    kinds = ["covariance_matrices", "eigendecomposition"] + ["lambda_matrices"] * (
        strategy == "ekfac"
    )
    for kind in kinds:
        load = getattr(analyzer, f"load_{kind}")
        ours, theirs = load("ours"), load("theirs")
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"activation_eigenvectors", "gradient_eigenvectors"}:
            times = 1.0 if tokens else TIMES.get(key, 1.0)
            theirs[key]["0"] = theirs[key]["0"] * times
            torch.testing.assert_close(ours[key], theirs[key], check_dtype=False, **WITHIN)
    if strategy == "ekfac":
        analyzer.fit_all_factors("ours", data, **fit)  # finds all of them there
    else:
        fit["factor_args"] = arguments.pytest_factor_arguments("ekfac")
        for name in ("ours", "theirs"):  # goes on from them
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
def test_files_for_influence_functions_say_what_the_factors_are(
    tmp_path: Path, documents: int | None
) -> None:
    """Kronfluence's and Bergson's, by their own scales: of sums, of means and of documents."""
    curvature = Case(tokens=True).curvature()
    doors.to_kronfluence(curvature, tmp_path / "k", documents=documents)
    doors.to_bergson(curvature, tmp_path / "b", include_bias=True, documents=documents)
    layer, rows = curvature["0"], ENTRIES * TOKENS
    a, g, entries = layer.A[0], layer.G[0], documents or rows
    k = {path.stem: load_tensors(path)[0]["0"] for path in (tmp_path / "k").glob("*.safetensors")}
    b = {path.parent.stem: load_tensors(path)[0]["0"] for path in tmp_path.glob("b/*/shard_0.*")}
    assert k["num_lambda_processed"].tolist() == [entries]
    close(k["lambda_matrix"] / entries, b["eigenvalue_correction_sharded"])
    close(b["eigenvalue_correction_sharded"], layer.corrected[0] * rows / entries)
    for side, factor, short in (("activation", a, "a"), ("gradient", g, "g")):
        assert k[f"num_{side}_covariance_processed"].tolist() == [rows]
        close(k[f"{side}_covariance"], factor * rows)
        close(b[f"{side}_sharded"], factor * rows)
        q, values = k[f"{side}_eigenvectors"], k[f"{side}_eigenvalues"]
        close(q * values @ q.mT, factor)
        close(b[f"eigen_{side}_sharded"], q)
        close(b[f"factor_eig_{short}"], values * (rows / entries) ** 0.5)
    close(b["eigenvalue_sharded"], torch.outer(b["factor_eig_g"], b["factor_eig_a"]))


# ------------------------------------------------------------------------------------------ Bergson


@pytest.mark.parametrize("include_bias", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_bergson_applies_what_it_would_have_computed(tmp_path: Path, include_bias: bool) -> None:
    kfac = pytest.importorskip("bergson.hessians.kfac")
    from bergson.config import InversionConfig
    from bergson.gradients import GradientProcessor
    from bergson.hessians import eigenvectors, preconditioner

    case, theirs, ours = Case(tokens=True), tmp_path / "theirs", tmp_path / "ours"
    curvature = case.curvature("ekfac", "model")
    corrected = include_bias
    if not corrected:
        with pytest.raises(ValueError, match=r"'model\.0' has a bias.*include_bias=True"):
            doors.to_bergson(curvature, ours, prefix="model.")
        curvature = case.curvature("kfac", "model")
    options = {"prefix": "model.", "include_bias": include_bias, "documents": ENTRIES}
    assert doors.to_bergson(curvature, ours, **options) == {}

    shared = {
        "model": case.model,
        "path": str(theirs),
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
        eigenvectors.compute_eigendecomposition(str(theirs / f"{side}_sharded"), count)
        for side in ("activation", "gradient")
    ]
    eigenvectors.save_uncorrected_eigenvalues(theirs, *found, count, 0, 1, num_documents=ENTRIES)
    if corrected:
        run(eigenvectors.LambdaCollector(**shared, num_documents=ENTRIES))
    for path in theirs.rglob("*.safetensors"):
        if "eigen_" not in str(path):
            close(*(load_tensors(root / path.relative_to(theirs))[0] for root in (ours, theirs)))
    assert torch.load(ours / "total_processed.pt") == case.y.numel()

    torch.manual_seed(3)
    sizes = {name: size.numel() for name, size in curvature["model.0"].shapes.items()}
    width = sum(sizes.values()) if include_bias else sizes["model.0.weight"]
    gradients = {"0": torch.randn(2, width)}
    for inversion in ("damped_inverse", "factored_tikhonov"):
        made = [
            preconditioner.FactoredPreconditioner.from_path(
                path, inversion_cfg=InversionConfig(inversion=inversion, damping_factor=0.1)
            ).apply(gradients)["0"]
            for path in (ours, theirs)
        ]
        torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)


def test_names_below_a_prefix_are_written_without_it(tmp_path: Path) -> None:
    left_out = doors.to_bergson(Case(tokens=True).curvature("kfac"), tmp_path, prefix="2")
    assert left_out == {"0": "its name does not begin with '2'"}
    with pytest.raises(ValueError, match="no layer has anything for Bergson; of '0'"):
        doors.to_bergson(Case(tokens=True).curvature("kfac"), tmp_path, prefix="model.")


# ------------------------------------------------------------------------------------ laplace-torch


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("damping", [False, True])
def test_laplace_predicts_as_if_it_had_fitted(last: bool, damping: bool) -> None:
    laplace = pytest.importorskip("laplace")
    curvlinops = pytest.importorskip("laplace.curvature.curvlinops")
    torch.manual_seed(0)
    first = [nn.Linear(WIDTH, 5)] if damping else [nn.Conv2d(1, 5, 3), nn.Flatten()]
    model = nn.Sequential(*first, nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    x = torch.randn(ENTRIES, *([WIDTH] if damping else [1, 4, 4]), dtype=torch.float64)
    model(x)
    head = str(len(model) - 1)
    y = torch.randint(CLASSES, (ENTRIES,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), ENTRIES)

    def new() -> Any:
        options = {"last_layer_name": head} if last else {}
        kind = laplace.KronLLLaplace if last else laplace.KronLaplace
        options |= {"backend": curvlinops.CurvlinopsEF, "damping": damping, "prior_precision": 0.3}
        return kind(model, "classification", **options)

    ours, theirs = new(), new()
    theirs.fit(loader)
    curvature = measured(model, x, y, "ekfac")
    doors.to_laplace(curvature, ours, loader)
    close(ours(x), theirs(x))
    assert not torch.allclose(ours(x), model(x).softmax(-1), atol=1e-3)
    close(ours.H_facs.to_matrix(), theirs.H_facs.to_matrix())
    close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    doors.to_laplace(curvature, half := new(), loader, examples=ENTRIES / 2)
    close(half.H_facs.to_matrix() * 2, ours.H_facs.to_matrix())
    only, other = KroneckerCurvature({"0": curvature["0"]}, curvature.names, {}), new()
    with pytest.raises(ValueError, match=rf"'{head}\.weight' and .* have no curvature.*freeze"):
        doors.to_laplace(only, other, loader)
    diagonal = laplace.DiagLaplace(model, "classification")
    with pytest.raises(TypeError, match="DiagLaplace has no Kronecker factors"):
        doors.to_laplace(curvature, diagonal, loader)
    unknown = laplace.KronLLLaplace(model, "classification")
    with pytest.raises(ValueError, match="give last_layer_name="):
        doors.to_laplace(curvature, unknown, loader)


@pytest.mark.parametrize("groups", [1, 10])
def test_laplaces_hessian_of_other_layers_has_the_blocks_of_their_parameters(groups: int) -> None:
    """Of an embedding, of a weight that is (in, out), and of a normalisation."""
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
    x, y = torch.randint(7, (8,)), torch.randint(CLASSES, (8,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    doors.to_laplace(KroneckerCurvature(layers, [], {}), posterior, loader)
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
        doors.to_laplace(KroneckerCurvature(layers, [], {}), posterior, loader)


# --------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_gptqs_hessian_is_that_of_the_rows_without_the_bias(
    tmp_path: Path, tokens: bool, factors: str
) -> None:
    case = Case(tokens)
    first, curvature = case.model[0], case.curvature(factors)
    hessians = doors.to_gptq(curvature, tmp_path)
    x = case.x.flatten(0, 1) if tokens else nn.functional.unfold(case.x, 3).mT.flatten(0, 1)
    rows = len(x) if tokens else ENTRIES  # images, and a sum over their locations
    close(hessians["0"], 2 / rows * x.mT @ x)
    assert hessians.keys() == {"0", "2"}
    assert hessians["0"].shape[0] == first.weight[0].numel()
    tensors, _ = load_tensors(tmp_path / "0.safetensors")
    close(tensors["H"], hessians["0"])
    assert tensors["nsamples"].item() == rows


@pytest.mark.filterwarnings("ignore")
def test_llm_compressor_keeps_the_same_hessian_but_for_a_number() -> None:
    helpers = pytest.importorskip("llmcompressor.modifiers.gptq.helpers")
    case = Case(tokens=True)
    first, count = case.model[0], torch.zeros(())
    theirs, count = helpers.accumulate_hessian(
        case.x, first, helpers.make_empty_hessian(first), count
    )
    ours = doors.to_gptq(case.curvature("inputs"))["0"]
    torch.testing.assert_close(ours * TOKENS, (theirs / count).double(), rtol=1e-5, atol=1e-6)


def test_gptqs_hessian_of_a_convolutions_groups_is_their_mean() -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 4, 4)
    shape = FactorShape(2, 4, 3)
    shapes = {"0.weight": torch.Size((6, 2, 2))}
    layer = LayerCurvature("0", ("0",), nn.Conv1d, shapes, shape, {"A": a}, 8, 1)
    close(doors.to_gptq(KroneckerCurvature({"0": layer}, [], {}))["0"], 2 * a.mean(0))
    experts = replace(layer, kind=nn.Module)
    close(doors.to_gptq(KroneckerCurvature({"0": experts}, [], {}))["0"], 2 * a)
    with pytest.raises(ValueError, match="of '0': it has 2 groups"):
        doors.to_quip(KroneckerCurvature({"0": layer}, [], {}), "nowhere")


def llama(factors: str) -> KroneckerCurvature:
    """Two blocks with the names of a Llama's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.ModuleDict({f"{k}_proj": nn.Linear(4, 4) for k in "qkvo"})
            sizes = {"gate": (4, 6), "up": (4, 6), "down": (6, 4)}
            self.mlp = nn.ModuleDict({f"{k}_proj": nn.Linear(*n) for k, n in sizes.items()})

        def forward(self, x: Tensor) -> Tensor:
            x = self.self_attn.o_proj(sum(self.self_attn[f"{k}_proj"](x) for k in "qkv").tanh())
            return self.mlp.down_proj(self.mlp.gate_proj(x).sigmoid() * self.mlp.up_proj(x))

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, CLASSES)).double()
    model = nn.ModuleDict({"layers": model[:2], "head": model[2]})
    x, y = torch.randn(ENTRIES, TOKENS, 4, dtype=torch.float64), torch.zeros(ENTRIES, TOKENS).long()

    return measured(model, x, y, factors, lambda m, batch: m["head"](m["layers"](batch[0])))


def symmetric(flat: Tensor, n: int) -> Tensor:
    """A matrix from its lower triangle, element by element."""
    matrix, elements = torch.zeros(n, n, dtype=flat.dtype), iter(flat)
    for i in range(n):
        for j in range(i + 1):
            matrix[i, j] = matrix[j, i] = next(elements)
    assert next(elements, None) is None
    return matrix


def test_yaqas_pair_is_the_lower_triangles_of_both_sides(tmp_path: Path) -> None:
    curvature = llama("kfac")
    assert doors.to_yaqa(curvature, tmp_path) == {"head": "names= has none for 'head'"}
    names = ("q", "k", "v", "o", "up", "gate", "down")
    files = {f"{i}_{k}_{end}.pt" for i in range(2) for k in names for end in ("hin", "hout")}
    assert {path.name for path in tmp_path.iterdir()} == files
    layer = curvature["layers.1.mlp.down_proj"]
    close(symmetric(torch.load(tmp_path / "1_down_hin.pt"), 6), layer.A[0, :6, :6])
    close(symmetric(torch.load(tmp_path / "1_down_hout.pt"), 4), layer.G[0])
    with pytest.raises(ValueError, match=r"'layers\.0.*' and 'layers\.0.*' .* '0'; give names="):
        doors.to_yaqa(curvature, tmp_path / "b", names=lambda module: module.split(".")[1:2][0])


def test_quips_files_are_one_for_each_input(tmp_path: Path) -> None:
    curvature = llama("inputs")
    assert "layers.0.self_attn.k_proj" in doors.to_quip(curvature, tmp_path)
    names = {f"{i}_{k}.pt" for i in range(2) for k in ("qkv", "o", "up", "down")}
    assert {path.name for path in tmp_path.iterdir()} == names
    content = torch.load(tmp_path / "0_qkv.pt")
    assert (content["n"], content["ct"], content["mu"].abs().max()) == (4, ENTRIES * TOKENS, 0)
    close(symmetric(content["flatH"], 4), curvature["layers.0.self_attn.v_proj"].A[0])


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("door", [doors.to_kronfluence, doors.to_bergson, doors.to_yaqa])
def test_a_curvature_of_inputs_alone_is_refused_where_gradients_are_needed(
    tmp_path: Path, door: Any
) -> None:
    curvature = Case(tokens=True).curvature("inputs")
    with pytest.raises(ValueError, match=r"'0' has no G, which .* needs; measure with factors='kf"):
        door(curvature, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def written(rank: int, ranks: int, folder: Path) -> list[Any]:
    """What a process gets, of layers that two share."""
    case = Case(tokens=True)
    share = slice(rank, None, ranks)
    batches = [(case.x[share], case.y[share])]
    options: dict[str, Any] = {"factors": "ekfac", "loss": terms, "progress": False}
    curvature = measure(case.model, batches, keep="owner", **options)
    folder = folder / f"{rank} of {ranks}"
    left_out = doors.to_kronfluence(curvature, folder / "factors_a")
    doors.to_yaqa(curvature, folder / "yaqa", names=lambda module: module)
    return [len(curvature.here), left_out, {*doors.to_gptq(curvature, folder / "gptq")}]


def test_the_first_layers_owner_writes_what_one_process_would(tmp_path: Path, world: World) -> None:
    for result in world.run(written, 2, tmp_path):
        assert result == [1, {}, {"0", "2"}]
    assert written(0, 1, tmp_path)[0] == 2
    alone, one = tmp_path / "0 of 1", [*tmp_path.glob("* of 2")]
    assert len(one) == 1
    names = {path.relative_to(alone) for path in alone.rglob("*.*")}
    assert names == {path.relative_to(one[0]) for path in one[0].rglob("*.*")}
    assert len(names) == 11 + 4 + 2
    for name in names:
        if name.suffix == ".safetensors" and "eigenvectors" not in name.stem:
            close(load_tensors(one[0] / name)[0], load_tensors(alone / name)[0])
        elif name.suffix == ".pt":
            close(torch.load(one[0] / name), torch.load(alone / name))
    said = json.loads((one[0] / "factors_a" / "factor_arguments.json").read_text())
    assert said == {"strategy": "ekfac"}
