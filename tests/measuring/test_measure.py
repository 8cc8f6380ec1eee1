"""`measure`: sums over a data set, against sums by hand over entries without padding."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from measure_cases import (
    CUTS,
    ENTRIES,
    F64,
    MODELS,
    ByHand,
    batches_of,
    close,
    data_of,
    model_of,
    terms,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding

from second_order import (
    KroneckerCurvature,
    LayerCurvature,
    SecondOrderError,
    SecondOrderWarning,
    measure,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


def measured(name: str, factors: Any, dtype: torch.dtype = F64, **options: Any) -> Any:
    model = model_of(name, dtype)
    data = data_of(name, dtype)
    if factors != "inputs":
        options.setdefault("loss", terms)
    loader = batches_of(data, options.pop("cuts", CUTS))
    return model, measure(model, loader, factors=factors, progress=False, **options)


def same(one: KroneckerCurvature, other: KroneckerCurvature, within: float = 1e-10) -> None:
    assert list(one) == list(other)
    for name in one:
        for letter, factor in other[name].factors.items():
            close(one[name].factors[letter], factor, within)
        if other[name].corrected is not None:
            close(one[name].corrected, other[name].corrected, within)


def corrected(found: LayerCurvature, group: int, gradients: list[Tensor]) -> Tensor:
    """Sums over entries of their squared gradients in the eigenbasis of the factors."""
    a = found.eigen["A"][1]
    g = found.eigen["G"][1]
    assert a is not None
    assert g is not None
    return torch.stack([(g[group].T @ each @ a[group]).square() for each in gradients]).sum(0)


# ------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("name", MODELS)
def test_factors_exclude_padding(name: str) -> None:
    for dtype, within in ((F64, 1e-12), (torch.float32, 1e-5)):
        model, curvature = measured(name, "inputs", dtype)
        by_hand = ByHand(model, data_of(name, dtype), gradients=False)
        tied = {"GPT-2": {"lm_head"}, "Whisper": {"proj_out"}}.get(name, set())
        experts = {layer for layer in by_hand.x if " " in layer}
        assert bool(experts) == (name == "Mixtral")
        for layer in experts:
            block, expert = layer.split()
            close(curvature[block].A[int(expert)], by_hand.a(layer), within)
        assert set(by_hand.x) - set(curvature) - experts == tied
        for layer in set(by_hand.x) - tied - experts:
            close(curvature[layer].A[0], by_hand.a(layer), within)
            assert curvature[layer].rows == by_hand.rows[layer]


@pytest.mark.parametrize("name", MODELS)
def test_corrected_eigenvalues_equal_a_dense_reference(name: str) -> None:
    model, curvature = measured(name, "ekfac")
    by_hand = ByHand(model, data_of(name), gradients=True)
    for layer in set(by_hand.x) & set(curvature):
        found = curvature[layer]
        size = by_hand.x[layer].shape[0]
        close(found.A[0, :size, :size], by_hand.a(layer))
        close(found.G[0], by_hand.g(layer))
        close(found.corrected[0], corrected(found, 0, by_hand.weights[layer]) / by_hand.terms, 1e-7)
        assert found.examples == by_hand.terms
    for layer in (each for each in by_hand.x if " " in each):
        block, expert = layer.split()
        found = curvature[block]
        i = int(expert)
        close(found.A[i], by_hand.a(layer))
        close(found.G[i], by_hand.g(layer))
        values = corrected(found, i, by_hand.weights[layer]) / by_hand.terms
        close(found.corrected[i], values, 1e-7)
    if name == "GPT-2":
        assert "an output layer's" in curvature.uncovered["transformer.wte.weight"]


@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_rows_of_experts_are_counted_exactly(factors: Any) -> None:
    """Also if the default dtype has few digits: 1 + 256 is 256 in bfloat16."""
    data = [data_of("Mixtral")] * 12
    model = model_of("Mixtral")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = measure(model, data, factors=factors, layers=["*experts*"], progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    number = 2 * 12 * int(data[0]["attention_mask"].sum())  # each token goes to two experts
    assert number > 512
    if factors == "inputs":
        assert all(found[name].rows == number for name in found)
    else:
        assert all(found[name].rows >= number for name in found)


def test_labels_are_sampled_from_the_model() -> None:
    model = nn.Linear(3, 4, bias=False).to(F64)
    x = torch.randn(4000, 3, dtype=F64)
    curvature = measure(model, x.split(64), factors="kfac", progress=False)
    p = model(x).softmax(-1)
    close(curvature["(model)"].G[0], torch.diag(p.mean(0)) - p.T @ p / len(x), 0.1)
    again = measure(model, x.split(64), factors="kfac", seed=1, progress=False)
    assert not torch.equal(again["(model)"].G, curvature["(model)"].G)


@pytest.mark.parametrize("factors", ["inputs", "kfac", "ekfac"])
def test_the_split_into_batches_changes_nothing(factors: str) -> None:
    whole = measured("Llama", factors)[1]
    for cuts in (((0, ENTRIES),), ((0, 1), (1, 9), (9, 10))):
        same(measured("Llama", factors, cuts=cuts)[1], whole)


@pytest.mark.parametrize("factors", ["inputs", "kfac", "ekfac"])
def test_keep_cpu_changes_nothing(factors: str) -> None:
    whole = measured("Llama", factors)[1]
    same(measured("Llama", factors, keep="cpu")[1], whole)


class Positions(nn.Module):
    """A transformer over ``(entries, positions, 3)``, whose layers may read positions first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 6, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.embedding(x if self.batch_first else x.T))
        return h if self.batch_first else h.transpose(0, 1)


@pytest.mark.parametrize("factors", ["inputs", "kfac"])
def test_positions_can_precede_examples(factors: Any) -> None:
    torch.manual_seed(0)
    first = Positions(True).to(F64)
    second = Positions(False).to(F64)
    second.load_state_dict(first.state_dict())
    x = torch.randint(5, (4, 6))
    batches = [(part, torch.where(part == 0, -100, part)) for part in x.split(3)]
    options: dict[str, Any] = {"factors": factors, "progress": False}
    if factors == "kfac":
        options["loss"] = lambda out, batch: out.logsumexp(-1)[batch[1] != -100]
    one, other = (measure(model, batches, **options) for model in (first, second))
    same(one, other)
    with pytest.raises(ValueError, match=r"positions before examples; make it with batch_first"):
        measure(second, batches, factors="ekfac", progress=False)


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().sum(-1)


def test_attention_keys_can_have_another_length() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.attention(x[:, :2], x, x.square())[0]
            return output

    model = Reads().to(F64)
    x = torch.randn(6, 5, 4, dtype=F64)
    curvature = measure(model, x.split(4), factors="kfac", loss=squares, progress=False)
    for found, rows in zip(
        curvature["attention"].A[:, :4, :4], (x[:, :2], x, x.square()), strict=True
    ):
        close(found, rows.flatten(0, 1).T @ rows.flatten(0, 1) / (rows.numel() / 4))


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_no_label_is_sampled_for_padding(likelihood: Any) -> None:
    model = nn.Linear(3, 2, bias=False).to(F64)
    x = torch.randn(5, 6, 3, dtype=F64)
    mask = torch.ones(5, 6)
    mask[1:, 3:] = 0
    mask[4] = 0
    options: dict[str, Any] = {"factors": "kfac", "likelihood": likelihood, "progress": False}
    batches = [{"input": x * (1 + 1000 * (1 - mask.unsqueeze(-1))), "attention_mask": mask}]
    found = measure(model, batches, call=lambda model, b: model(b["input"]), **options)
    expected = measure(model, [x[mask.bool()]], **options)
    terms = {"categorical": 15}.get(likelihood, 4)
    assert found.report.examples == terms
    close(found["(model)"].G, expected["(model)"].G * (15 / terms))


@pytest.mark.parametrize("factors", ["inputs", "kfac", "ekfac"])
def test_empty_batches_change_nothing(factors: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(F64)
    x = torch.randn(5, 3, dtype=F64)
    options: dict[str, Any] = {"factors": factors, "progress": False}
    if factors != "inputs":
        options["loss"] = lambda out, batch: out.logsumexp(-1).square()
    same(measure(model, [x[:0], x, x[:0]], **options), measure(model, [x], **options))


def test_autocast_rounds_inputs_but_not_their_products() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(64, 3)
    rounded = x.bfloat16().float()
    for factors in ("inputs", "kfac"):
        with torch.autocast("cpu", torch.bfloat16):
            curvature = measure(model, [x], factors=factors, progress=False)  # type: ignore[arg-type]
        close(curvature["(model)"].A[0, :3, :3], rounded.T @ rounded / 64, 1e-6)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.eye(3))


def test_torch_data_loaders_are_supported() -> None:
    model = nn.Linear(3, 2)
    curvature = measure(model, DataLoader(Stream(), batch_size=2), progress=False)
    close(curvature["(model)"].A[0], torch.eye(3) / 3, 1e-6)
    state = torch.get_rng_state()
    measure(model, DataLoader(cast("Any", torch.eye(3))), factors="ekfac", progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.inference_mode():
        assert "(model)" in measure(model, [torch.eye(3)], factors="kfac", progress=False)


class ReadOnce(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.examples = iter(torch.eye(3))

    def __iter__(self) -> Iterator[Tensor]:
        return self.examples


def test_ekfac_needs_the_same_data_twice() -> None:
    with pytest.raises(SecondOrderError, match=r"second pass .* gave 0 examples .* first gave 3"):
        measure(nn.Linear(3, 2), DataLoader(ReadOnce()), factors="ekfac", progress=False)

    class Masked:
        """Has other labels in its second pass."""

        labels = torch.tensor([0, 1, 0]), torch.tensor([0, 1, -100])

        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Iterator[Any]:
            yield torch.eye(3), self.labels[self.passes]
            self.passes += 1

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.logsumexp(-1)[batch[1] != -100]

    model = nn.Linear(3, 2)
    options: dict[str, Any] = {"factors": "ekfac", "loss": loss, "progress": False}
    found = measure(model, Masked(), **options)
    assert found.report.examples == 3
    expected = measure(model, [(torch.eye(3), Masked.labels[1])], **options)
    traces = [each["(model)"].corrected.sum() for each in (found, expected)]
    torch.testing.assert_close(*traces)


def test_ambiguous_and_unmatched_masks_are_reported() -> None:
    model = model_of("Whisper")
    data = data_of("Whisper")
    batch = {**data, "attention_mask": torch.ones_like(data["labels"])}
    with pytest.raises(ValueError, match="both"):
        measure(model, [batch], progress=False)

    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(3, 3)
            self.last = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.expert(x.flatten(0, 1)[:5])
            output: Tensor = self.last(x) + rows.sum()
            return output

    with pytest.warns(SecondOrderWarning, match="cannot be assigned to examples"):
        measure(Scattered(), [torch.randn(2, 4, 3)], factors="ekfac", progress=False)
    with pytest.warns(SecondOrderWarning, match=r"no mask of the batch fits rows of shape \(5,\)"):
        measure(Scattered(), [torch.randn(2, 4, 3)], mask=lambda b: b[..., 0] < 0, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(Scattered(), [torch.randn(2, 4, 3)], mask=lambda b: b[..., 0] < 9, progress=False)


# -------------------------------------------------------------------- what is left as it was


class Counting(nn.Module):
    """Counts its calls in a buffer, even in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("factors", ["inputs", "ekfac"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(factors: str, fails: bool) -> None:
    between = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(3, 4), *between, nn.Linear(4, 2), Counting())
    model[1].eval()
    model[4].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones(4, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    batches: list[Any] = [torch.randn(5, 3), torch.randn(2, 7 if fails else 3)]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="shapes"):
            measure(model, batches, factors=factors, progress=False)
    else:
        measure(model, batches, factors=factors, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [p.grad is not None for p in model.parameters()] == [True] + [False] * 5
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert [p.requires_grad for p in model.parameters()] == [True] * 4 + [False, True]
    for module in model.modules():
        assert not [*module._forward_hooks, *module._forward_pre_hooks]


def test_a_graph_from_before_can_still_run_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    loss = model(x).square().mean()
    measure(model, [x], progress=False)
    loss.backward()


def test_the_graph_of_the_inputs_can_still_run_backward() -> None:
    encoder = nn.Linear(5, 3)
    features = encoder(torch.randn(6, 5)).tanh()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    tensors = list(features.split(2))
    mappings = [BatchEncoding({"input": x}) for x in tensors]
    for batches in (tensors, mappings):
        found = measure(model, batches, factors="ekfac", progress=False)
        assert list(found) == ["0", "2"]
    features.sum().backward()
    assert encoder.weight.grad is not None


# ---------------------------------------------------------------------------------- bad input


def test_invalid_input_raises() -> None:
    model = nn.Linear(2, 2)
    x = [torch.randn(3, 2)]
    for options, text in (
        ({"factors": "A"}, "not one of"),
        ({"keep": "disk"}, "not one of"),
        ({"loss": terms}, "takes no loss"),
        ({"likelihood": "gaussian"}, "takes no likelihood"),
        (
            {"factors": "kfac", "loss": terms, "likelihood": "gaussian"},
            "likelihood='gaussian' is for sampled labels.*leave one of them out",
        ),
        ({"seed": -1}, "seed=-1 is below 0"),
        ({"layers": ["Conv*"]}, "neither the name of a module"),
        ({"likelihood": "poisson"}, "not one of"),
    ):
        with pytest.raises(ValueError, match=text):
            measure(model, x, progress=False, **options)
    with pytest.raises(ValueError, match="only once"):
        measure(model, iter(x), factors="ekfac", progress=False)
    with pytest.raises(SecondOrderError, match="no example"):
        measure(model, [], progress=False)
    with pytest.raises(TypeError, match="so its number of terms is not known"):
        measure(model, x, factors="kfac", loss=lambda out, batch: out.sum(), progress=False)
    with pytest.raises(SecondOrderError, match="no layer has factors"):
        measure(model, x, factors="kfac", loss=lambda out, batch: batch[:, 0], progress=False)
    with pytest.raises(ValueError, match="no layer"):
        measure(nn.BatchNorm1d(2), x, progress=False)


MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))
X = torch.ones(4, 2)
Y = torch.ones(4).long()
CRITERION = nn.CrossEntropyLoss(reduction="none")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"loss": CRITERION},
            r"loss=CrossEntropyLoss takes .*, target.*; write loss=lambda output",
        ),
        ({"loss": nn.functional.cross_entropy}, r"loss=cross_entropy takes .* write loss=lambda"),
        ({"loss": partial(nn.functional.mse_loss, reduction="none")}, "loss=mse_loss takes"),
        ({"loss": "mse"}, r"loss=str.* is not a function; write loss=lambda output, batch"),
        ({"mask": X}, r"mask=Tensor.* is not a function; write mask=lambda batch"),
        ({"call": 1}, r"call=int.* is not a function; write call=lambda model, batch"),
        ({"seed": "a"}, "seed='a' is not an integer"),
        ({"layers": MODEL[0]}, r"layers= takes names .*not Linear.*write layers=\[\"Linear\"\]"),
        ({"layers": [nn.Linear]}, r"write layers=\[\"Linear\"\]"),
        ({"model": [(X, Y)], "loader": MODEL}, r"model=list.* not a torch.*measure\(model, loader"),
        ({"loader": {"input": X, "labels": Y}}, r"looks like a single batch; write \[batch\]"),
        ({"loader": None}, "loader=NoneType.* cannot be iterated over; pass a DataLoader"),
        ({"loader": (X, Y)}, r"\(4, 2\) and \(4,\).*write \[\(x, y\)\], or DataLoader"),
        ({"loader": [X, X[:, :1]]}, r"\(4, 2\) and \(4, 1\) looks like inputs and targets"),
    ],
)
def test_invalid_arguments_raise_with_the_remedy(changed: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "loader": [(X, Y)], "factors": "kfac"}
    with pytest.raises(TypeError, match=text):
        measure(**{**arguments, "progress": False, **changed})


def test_two_batches_can_have_different_lengths() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    batches = [torch.randint(9, (8, length)) for length in (4, 6)]
    assert measure(model, batches, progress=False).report.batches == 2


def test_layer_names_can_be_any_iterable() -> None:
    for names in ("0", ["0"], ("0",), frozenset(["0"]), {"0": 1}.keys(), iter(["0"])):
        assert list(measure(MODEL, [X], layers=names, progress=False)) == ["0"]


def test_unsupported_requests_raise_with_the_remedy() -> None:
    curvature = measure(MODEL, X.split(2), factors="kfac", layers=["0"], progress=False)
    for name, text in (
        ("0.weight", r"'0\.weight' is a parameter of layer '0'; write curvature\['0'\]"),
        ("2", "'2' has no curvature: not among layers="),
        ("2.bias", "'2.bias' has no curvature: not among layers="),
        ("layer", "is the name of no layer; there are '0'"),
    ):
        assert name not in curvature
        assert curvature.get(name) is None
        with pytest.raises(KeyError, match=text):
            curvature[name]
    with pytest.raises(ValueError, match=r"not known.*; write damping=0\.1, relative=True"):
        curvature.solve({"0.bias": torch.ones(2)})


class Halved(nn.Linear):
    """A Linear that multiplies something else than the input."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() @ self.weight.T


def test_layers_that_fail_verification_are_left_out() -> None:
    curvature = measure(
        nn.Sequential(nn.Linear(3, 3), Halved()), [torch.randn(9, 3)], progress=False
    )
    assert list(curvature) == ["0"]
    assert curvature.uncovered["1.weight"].endswith("use register_layer")


def test_a_lost_call_is_reported_with_its_layer() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.b = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = x.clone()
            y = self.a(h)
            if len(x) == 2:
                h.add_(1)
            output: Tensor = y + self.b(h)
            return output

    x = [torch.randn(3, 3), torch.randn(2, 3)]
    with pytest.warns(UserWarning, match="'a': its input was changed in place"):
        curvature = measure(Changing(), x, factors="kfac", progress=False)
    assert list(curvature) == ["b"]
    assert list(measure(Changing(), x, progress=False)) == ["a", "b"]


def test_a_non_finite_factor_is_reported_with_its_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_forward_pre_hook(lambda m, args: (args[0] / 0,))
    with pytest.warns(UserWarning, match="'1': its A is not finite"):
        curvature = measure(model, [torch.randn(3, 2)], progress=False)
    assert list(curvature) == ["0"]
    assert curvature.uncovered["1.weight"] == "its A is not finite"
    assert "its A is not finite" in str(curvature.report)
    loss = {"loss": lambda out, batch: (1e12 * out).sum(1)}
    with pytest.raises(SecondOrderError, match="its F is not finite"):
        measure(
            nn.Linear(2, 2), [1e12 * torch.randn(4, 2)], factors="ekfac", progress=False, **loss
        )
