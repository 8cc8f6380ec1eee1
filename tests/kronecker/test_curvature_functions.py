"""The curvature of layers made at random, on one process and on several, against dense matrices."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_curvatures import dense, flat
from torch import Tensor, nn

from second_order import CheckpointError, KroneckerCurvature, LayerCurvature, SecondOrderError
from second_order.distributed.world import World as Processes
from second_order.kronecker.layer_curvature import FactorEigen
from second_order.kronecker.layers import FactorShape
from second_order.kronecker.storage import pack_upper_triangular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pool import World

KINDS = ("linear", "with bias", "grouped", "embedding", "doubly factored", "exact")


def positive(*size: int) -> Tensor:
    """Symmetric matrices, the last eigenvalue of each being zero."""
    *batch, n = size
    root = torch.randn(*batch, n, max(n - 1, 1), dtype=torch.float64)
    return root @ root.mT / n


def layer_of(
    kind: str, name: str, out: int, width: int, *, packed: bool, corrected: bool
) -> LayerCurvature:
    """A layer of a kind, its factors drawn from torch's generator."""
    groups = 3 if kind == "grouped" else 1
    bias = int(kind == "with bias")
    shape = FactorShape(groups, width + bias, out)
    size = (groups * out, width)
    if kind == "embedding":
        shape = FactorShape(1, width, out, diagonal_a=True, transposed=True)
        size = (width, out)
    elif kind == "doubly factored":
        shape = FactorShape(1, width * 2, out, locations=2)
        size = (out, width * 2)
    elif kind == "exact":
        shape = FactorShape(1, 1, out, exact=True)
        size = (out,)
    whole = {letter: positive(groups, shape.dims[letter]) for letter in shape.factor_names}
    if kind == "embedding":
        whole["A"] = torch.rand(1, width, dtype=torch.float64)
    if kind == "exact":
        whole["A"] = torch.ones(1, 1, 1, dtype=torch.float64)
    packing = [letter for letter, x in whole.items() if packed and x.dim() == 3]
    stored = whole | {letter: pack_upper_triangular(whole[letter]) for letter in packing}
    shapes = {f"{name}.weight": torch.Size(size)}
    if bias:
        shapes[f"{name}.bias"] = torch.Size((out,))
    values = torch.rand(shape.gradient_shape, dtype=torch.float64) if corrected else None
    return LayerCurvature(name, (name,), nn.Linear, shapes, shape, stored, 8.0, 1.0, None, values)


def powered(F: Tensor, f: Any) -> Tensor:
    values, vectors = torch.linalg.eigh(F)
    return vectors @ f(values.clamp_min(0)).diag() @ vectors.mT


def near(found: Tensor, expected: Tensor, to: float = 1e-7) -> None:
    torch.testing.assert_close(found, expected, rtol=to, atol=to)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    st.floats(0.01, 2.0),
)
def test_a_layers_functions_equal_those_of_the_dense_matrix(
    kind: str, out: int, width: int, packed: bool, corrected: bool, gamma: float
) -> None:
    layer = layer_of(kind, "x", out, width, packed=packed, corrected=corrected)
    curvature = KroneckerCurvature({"x": layer}, list(layer.shapes), {})
    F = dense(layer)
    near(layer.to_dense(), F)
    v = {n: torch.randn(s, dtype=torch.float64) for n, s in layer.shapes.items()}
    eye = torch.eye(len(F), dtype=F.dtype)
    mean = float(F.trace()) / len(F)
    # An eigenvalue that is zero is found as 1e-16, and its root as 1e-8.
    for found, expected, to in (
        (curvature.apply(v), F, 1e-9),
        (curvature.solve(v, gamma), torch.linalg.inv(F + gamma * eye), 1e-7),
        (curvature.solve(v, gamma, relative=True), torch.linalg.inv(F + gamma * mean * eye), 1e-6),
        (curvature.sqrt(v), powered(F, torch.sqrt), 1e-6),
        (
            curvature.function(v, lambda x: (x + gamma).rsqrt()),
            powered(F, lambda x: (x + gamma).rsqrt()),
            1e-7,
        ),
    ):
        assert found.keys() == v.keys()
        near(flat(layer, found), expected @ flat(layer, v), to)
    near(flat(layer, curvature.diagonal()), F.diagonal(), 1e-9)
    near(curvature.eigenvalues(), torch.linalg.eigvalsh(F).flip(0), 1e-9)
    near(layer.eigenvalues, curvature.eigenvalues())
    assert curvature.trace() == pytest.approx(float(F.trace()))
    assert curvature.logdet(gamma) == pytest.approx(float(torch.logdet(F + gamma * eye)))
    relative = torch.logdet(F + gamma * mean * eye)
    assert curvature.logdet(gamma, relative=True) == pytest.approx(float(relative))
    if corrected:  # it matters
        assert not torch.allclose(F, dense(replace(layer, corrected=None)), rtol=1e-3)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_inverse_curvature_as_covariance(kind: str, corrected: bool) -> None:
    """A sample is S z with z normal: S Sᵀ, from unit vectors instead of z."""
    layer = layer_of(kind, "x", 3, 2, packed=False, corrected=corrected)
    shape = layer.shape.gradient_shape
    columns = []
    for unit in torch.eye(math.prod(shape), dtype=torch.float64):
        with patch.object(torch, "randn", return_value=unit.view(shape)):
            columns.append(flat(layer, layer.to_vector(layer.sample(0.3))))
    S = torch.stack(columns, 1)
    F = dense(layer)
    inverse = torch.linalg.inv(F + 0.3 * torch.eye(len(F), dtype=F.dtype))
    torch.testing.assert_close(S @ S.mT, inverse, rtol=1e-9, atol=1e-11)


FUNCTIONS: dict[str, Any] = {
    "apply": lambda curvature, v: curvature.apply(v),
    "solve": lambda curvature, v: curvature.solve(v, 0.1),
    "solve, relative": lambda curvature, v: curvature.solve(v, 0.1, relative=True),
    "sqrt": lambda curvature, v: curvature.sqrt(v),
    "sample": lambda curvature, v: curvature.sample(0.1),
    "trace": lambda curvature, v: curvature.trace(),
    "logdet": lambda curvature, v: curvature.logdet(0.1),
    "diagonal": lambda curvature, v: curvature.diagonal(),
    "eigenvalues": lambda curvature, v: curvature.eigenvalues(),
    "to_dense": lambda curvature, v: curvature["x"].to_dense(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_curvature_of_inputs_alone_refuses_functions_of_f(name: str) -> None:
    layer = layer_of("linear", "x", 2, 3, packed=True, corrected=False)
    layer = replace(layer, stored={"A": layer.stored["A"]})
    curvature = KroneckerCurvature({"x": layer}, list(layer.shapes), {})
    with pytest.raises(ValueError, match='measure it with factors="kfac"'):
        FUNCTIONS[name](curvature, {"x.weight": torch.ones(2, 3)})
    assert curvature["x"].eigen["A"][0].shape == (1, 3)


# -------------------------------------------------------------------------------------- processes


def drawn(seed: int = 0) -> KroneckerCurvature:
    """A layer of each kind, some as triangles, some corrected."""
    torch.manual_seed(seed)
    layers = {}
    for i, kind in enumerate(KINDS):
        word: dict[str, Any] = {"packed": i % 2 == 0, "corrected": i % 3 == 1}
        name = ("a/b", "..", "ä b", "%", "", "x.1")[i]
        layers[name] = layer_of(kind, name, 2 + i % 3, 3, **word)
    names = [name for layer in layers.values() for name in layer.shapes]
    return KroneckerCurvature(layers, [*names, "none"], {"none": "it is none"}, report="measured")


def shared(rank: int, size: int) -> KroneckerCurvature:
    """The same, each layer on one process but the last, which all have."""
    whole = drawn()
    processes = Processes()
    owners = {name: i % size for i, name in enumerate(list(whole)[:-1])}
    layers = {
        name: layer if owners.get(name, rank) == rank else replace(layer, stored={}, corrected=None)
        for name, layer in whole.items()
    }
    names = whole.names
    why = whole.uncovered
    return KroneckerCurvature(
        layers, names, why, owners=owners, world=processes, report=whole.report
    )


def results(curvature: KroneckerCurvature) -> dict[str, Any]:
    """The results of all functions for whole vectors, and the tensors of each layer."""
    torch.manual_seed(1)
    sizes = {n: s for layer in drawn().values() for n, s in layer.shapes.items()}
    v = {n: torch.randn(s, dtype=torch.float64) for n, s in sizes.items()}
    gammas = {name: 0.1 + i for i, name in enumerate(curvature)}
    some = dict(list(v.items())[1:3])
    return {
        "apply": curvature.apply(some),
        "solve": curvature.solve(v, gammas),
        "relative": curvature.solve(v, 0.1, relative=True),
        "sqrt": curvature.sqrt(v),
        "many": curvature.solve({n: torch.stack([x, -x, x * 2]) for n, x in v.items()}, gammas),
        "diagonal": curvature.diagonal(),
        "numbers": {
            "trace": torch.tensor(curvature.trace()),
            "logdet": torch.tensor(curvature.logdet(gammas)),
            "eigenvalues": curvature.eigenvalues(),
        },
        "layers": {
            f"{name} {key}": tensor
            for name, layer in curvature.items()
            for key, tensor in {**layer.factors, "values": layer.values}.items()
        },
    }


def by_owner(rank: int, size: int, folder: str) -> Any:
    curvature = shared(rank, size)
    found = results(curvature)
    sample = curvature.sample(0.1)
    gathered = curvature.gather(to=size - 1)
    with pytest.raises(ValueError, match=f"to={size}.*there are ranks 0 to {size - 1}"):
        curvature.gather(to=size)
    if rank == size - 1:
        assert list(gathered.local_layers) == list(curvature)
        assert_same(results(gathered), found)
    else:
        assert (len(gathered), gathered.local_layers) == (0, {})
        assert (gathered.trace(), gathered.eigenvalues().numel()) == (0.0, 0)
        with pytest.raises(ValueError, match=f"it has been gathered on rank {size - 1}"):
            gathered.apply({next(iter(sample)): torch.ones(1)})
    assert_same(results(copy.deepcopy(curvature.gather())), found)
    if size > 1:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled; call gather\(\)"):
            copy.deepcopy(curvature)
        with pytest.raises(SecondOrderError, match=r"rank 0 uses layers \['a/b'\], but rank 1"):
            curvature[list(curvature)[rank]]
        for last, message in ((torch.ones(7, 7), "has shape"), (torch.ones(2, 9), "no such")):
            name = "no such" if message == "no such" else "a/b.weight"
            gradients = {name: last} if rank == size - 1 else {"a/b.weight": torch.ones(2, 3)}
            with pytest.raises((ValueError, SecondOrderError), match=message):
                curvature.apply(gradients)
        with pytest.raises((ValueError, SecondOrderError), match="must be positive"):
            curvature.logdet(float(rank > 0))
    curvature.save(folder)
    broken = next(iter(curvature))  # on rank 0
    layer = curvature._layers[broken]
    if layer.stored:
        curvature._layers[broken] = replace(
            layer, stored=layer.stored | {"A": layer.stored["A"] * math.nan}
        )
    with pytest.raises(SecondOrderError, match=r"factor A of layer 'a/b' cannot be decomposed: \d"):
        curvature.sqrt({f"{broken}.weight": torch.ones(next(iter(layer.shapes.values())))})
    return list(curvature.local_layers), found, sample


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], to: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].keys() == value.keys(), key
        for name, tensor in value.items():
            torch.testing.assert_close(found[key][name], tensor, rtol=to, atol=to)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_owners_together_equal_one_process(world: World, tmp_path: Path, size: int) -> None:
    expected = results(drawn())
    errors = world.run(by_owner, size, str(tmp_path))
    here = [name for each, _, _ in errors for name in each if name != "x.1"]
    assert sorted(here) == sorted(set(drawn()) - {"x.1"})
    assert all(("x.1" in each) for each, _, _ in errors)
    for _, found, sample in errors:
        assert_same(found, expected)
        owned = {n: x for n, x in sample.items() if not n.startswith("x.1.")}
        assert len(owned) == len(sample) - 1
        assert all(torch.equal(x, errors[0][2][name]) for name, x in owned.items())
    loaded = KroneckerCurvature.load(tmp_path)
    assert_same(results(loaded), expected)
    assert loaded.report == "measured"


def test_autocast_does_not_change_results() -> None:
    curvature = drawn()
    for layer in list(curvature.values()):
        stored = {name: tensor.float() for name, tensor in layer.stored.items()}
        curvature._layers[layer.name] = replace(layer, stored=stored, corrected=None, basis=None)
    expected = results(curvature)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(curvature)
    assert_same(found, expected)


def test_many_vectors_together_equal_one_after_another() -> None:
    curvature = drawn()
    sizes = {n: s for layer in curvature.values() for n, s in layer.shapes.items()}
    vectors = {n: torch.randn(3, *s, dtype=torch.float64) for n, s in sizes.items()}
    for some in (vectors, {"...weight": vectors["...weight"]}):  # whose bias is zero
        for function in (
            curvature.apply,
            curvature.sqrt,
            lambda v: curvature.solve(v, 0.1),
            lambda v: curvature.solve(v, 0.1, relative=True),
        ):
            each = [function({n: x[i] for n, x in some.items()}) for i in range(3)]
            expected = {n: torch.stack([x[n] for x in each]) for n in each[0]}
            assert_same({"": function(some)}, {"": expected})
    first, *_ = sizes
    with pytest.raises(ValueError, match=r"same number .* one for 'a/b.weight', \[3\] for"):
        curvature.apply(vectors | {first: vectors[first][0]})
    with pytest.raises(ValueError, match=r"shape \(1, 3, 2, 3\) for"):
        curvature.apply({first: vectors[first][None]})


# ------------------------------------------------------------------------------------------ files


def test_saved_curvature_loads_in_this_and_other_packages(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    curvature = drawn()
    curvature.save(tmp_path)
    index = json.loads((tmp_path / "curvature.json").read_text("utf-8"))
    files = {name: each["file"] for name, each in index["layers"].items()}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*files.values(), "curvature.json"])
    for name, layer in curvature.items():
        found = safetensors_torch.load_file(tmp_path / files[name])
        for letter, factor in layer.factors.items():
            assert torch.equal(found[letter], factor)
        assert ("corrected" in found) == (layer.corrected is not None)
    for device in (None, "cpu"):
        loaded = KroneckerCurvature.load(tmp_path, device)
        assert_same(results(loaded), results(curvature))
        assert (loaded.names, loaded.uncovered) == (curvature.names, curvature.uncovered)
        for name, layer in loaded.items():
            before = curvature[name]
            assert (layer.kind, layer.modules, layer.examples) == (nn.Linear, (name,), 8.0)
            assert (layer.shapes, layer.shape) == (before.shapes, before.shape)


def test_a_layer_of_many_tied_modules_can_be_saved(tmp_path: Path) -> None:
    name = " = ".join(f"layers.{i}.mlp" for i in range(32))
    layer = replace(layer_of("linear", "x", 2, 3, packed=False, corrected=False), name=name)
    KroneckerCurvature({name: layer}, [], {}).save(tmp_path)
    assert (tmp_path / "layers.0.mlp.safetensors").exists()
    near(KroneckerCurvature.load(tmp_path)[name].to_dense(), layer.to_dense())


def test_a_class_with_the_name_of_torchs_is_not_loaded_as_torchs(tmp_path: Path) -> None:
    own = type("Linear", (nn.Module,), {})
    layer = replace(layer_of("linear", "x", 2, 3, packed=False, corrected=False), kind=own)
    KroneckerCurvature({"x": layer}, [], {}).save(tmp_path)
    assert KroneckerCurvature.load(tmp_path)["x"].kind is nn.Module


def test_corrected_eigenvalues_keep_the_order_of_their_eigenvectors(tmp_path: Path) -> None:
    """Any vectors of equal eigenvalues are A's: those of another computer are not to be taken."""
    turned = torch.linalg.qr(torch.randn(1, 4, 4, dtype=torch.float64)).Q
    eye = torch.eye(4, dtype=torch.float64)[None]
    layer = layer_of("linear", "x", 4, 4, packed=False, corrected=True)
    ones = torch.ones(1, 4, dtype=torch.float64)
    basis = {name: FactorEigen(values=ones, vectors=turned) for name in "AG"}
    layer = replace(layer, stored={"A": eye, "G": eye}, basis=basis)
    KroneckerCurvature({"x": layer}, [], {}).save(tmp_path)
    loaded = KroneckerCurvature.load(tmp_path)["x"]
    near(loaded.to_dense(), layer.to_dense())
    assert not torch.allclose(layer.to_dense(), replace(layer, basis=None).to_dense(), atol=1e-3)


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    drawn().save(tmp_path)
    index = tmp_path / "curvature.json"
    contents = json.loads(index.read_text("utf-8"))
    (tmp_path / "x.1.safetensors").write_bytes((tmp_path / "a%2Fb.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"x.1.safetensors does not fit curvature.json"):
        KroneckerCurvature.load(tmp_path)
    (tmp_path / "x.1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"x.1.safetensors is not there.* for layer 'x.1'"):
        KroneckerCurvature.load(tmp_path)
    for wrong, message in (
        ({"format": "gguf"}, "gguf is not second_order.KroneckerCurvature"),
        ({"layers": {"x": {}}}, "cannot be read: KeyError"),
    ):
        index.write_text(json.dumps(contents | wrong), "utf-8")
        with pytest.raises(CheckpointError, match=message):
            KroneckerCurvature.load(tmp_path)
    (tmp_path / "x.1.safetensors").mkdir()  # so that it cannot be written
    with pytest.raises(IsADirectoryError):
        drawn().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no curvature.json: .* writing has not ended"):
        KroneckerCurvature.load(tmp_path)


def test_loading_accepts_only_module_classes(tmp_path: Path) -> None:
    drawn().save(tmp_path)
    index = tmp_path / "curvature.json"
    content = index.read_text("utf-8")
    for word in ("system", "Parameter", "functional"):
        index.write_text(content.replace('"kind": "Linear"', f'"kind": "{word}"'), "utf-8")
        assert {each.kind for each in KroneckerCurvature.load(tmp_path).values()} == {nn.Module}


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.logdet(0.0, relative=True), "damping=0.0 of layer 'a/b' must be positive"),
        (lambda c: c.logdet(relative=True), "relative=True needs damping= in units of the mean"),
        (lambda c: c.logdet(), "damping of layer 'a/b' is not known, .* write damping="),
        (
            lambda c: c.logdet({"a": 1.0}),
            r"has 'a', which is not a layer; use names from \['a/b'",
        ),
        (
            lambda c: replace(c["a/b"], stored={"A": c["a/b"].A}).G,
            "layer 'a/b' has no factor G here: it has A",
        ),
        (lambda c: replace(c["a/b"], stored={}).A, "no factor A here: another rank stores it"),
    ],
)
def test_unsupported_functions_raise(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(drawn())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.apply({"a/b.weight": None}), "has a NoneType for 'a/b.weight'; pass tensors"),
        (lambda c: c.logdet("0.1"), "damping='0.1' of layer 'a/b' is not a number"),
        (lambda c: c.gather(to=True), "to=True is not an integer"),
    ],
)
def test_arguments_of_wrong_types_raise(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(drawn())


def test_an_unknown_device_is_not_reported_as_a_damaged_file(tmp_path: Path) -> None:
    drawn().save(tmp_path)
    with pytest.raises(RuntimeError, match="device type at start of device string: nope"):
        KroneckerCurvature.load(tmp_path, device="nope")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("corrected", [False, True])
def test_half_precision_factors_compute_in_float32(dtype: Any, corrected: bool) -> None:
    layer = layer_of("with bias", "x", 3, 4, packed=False, corrected=corrected)
    half = replace(layer, stored={k: x.to(dtype) for k, x in layer.stored.items()}, basis=None)
    wide = replace(half, stored={k: x.float() for k, x in half.stored.items()})
    v = {n: torch.randn(s, dtype=dtype) for n, s in layer.shapes.items()}
    found, expected = (KroneckerCurvature({"x": each}, [], {}) for each in (half, wide))
    for name in ("apply", "sqrt", "solve"):
        word = (0.1,) if name == "solve" else ()
        results = (getattr(each, name)(v, *word)["x.weight"] for each in (found, expected))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert found.trace() == pytest.approx(expected.trace())
    torch.testing.assert_close(found.diagonal(), expected.diagonal())


def test_relative_damping_of_zero_curvature_is_absolute() -> None:
    layer = layer_of("linear", "x", 2, 3, packed=False, corrected=False)
    nothing = replace(layer, stored={k: torch.zeros_like(x) for k, x in layer.stored.items()})
    v = torch.randn(1, 2, 3, dtype=torch.float64)
    near(nothing.solve(v, 0.5, relative=True), v / 0.5)
