"""`measure`: what a term of the loss is, what an entry of a batch is, and which calls are seen.

The reference is dense: the gradients of all parameters, one entry of the data after the other.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from measure_cases import F64, close, data_of, model_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

from second_order import SecondOrderError, SecondOrderWarning, measure
from second_order.measuring.batches import batch_tensors, find_batch_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def quietly(model: nn.Module, loader: Any, **options: Any) -> Any:
    """The curvature of a measurement that does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return measure(model, loader, progress=False, **options)


def per_entry(
    model: nn.Module, entries: Sequence[Any], loss: Callable[[Any, Any], Tensor], call: Any = None
) -> dict[str, list[Tensor]]:
    """The gradient of each parameter, for each entry."""
    call = call or (lambda model, batch: model(batch))
    found: dict[str, list[Tensor]] = {}
    for entry in entries:
        model.zero_grad()
        loss(call(model, entry), entry).sum().backward()
        for name, p in model.named_parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            found.setdefault(name, []).append(gradient.clone())
    model.zero_grad()
    return found


def matrices(curvature: Any, layer: str, gradients: dict[str, list[Tensor]]) -> list[Tensor]:
    """The gradients of a layer as matrices ``(groups, out, in)``."""
    found = curvature[layer]
    by_entry = zip(*(gradients[name] for name in found.shapes), strict=True)
    return [found.to_matrix(dict(zip(found.shapes, each, strict=True))) for each in by_entry]


def eigenvalues_agree(
    curvature: Any, gradients: dict[str, list[Tensor]], terms: float, within: float = 1e-8
) -> None:
    """Each layer's eigenvalues are E[(Q_Gᵀ g Q_A)²], of whole gradients of entries."""
    assert curvature.report.examples == terms
    for layer, found in curvature.items():
        a = found.eigen["A"][1]
        g = found.eigen["G"][1]
        expected = torch.zeros_like(found.corrected)
        for each in matrices(curvature, layer, gradients):
            rotated = g.mT @ each
            expected += (rotated if a is None else rotated @ a).square()
        close(found.corrected, expected / terms, within)


def score(output: Any, batch: Any) -> Tensor:
    """A term for each row of an output."""
    found: Tensor = output.logsumexp(-1).square() + output[..., 0].sin()
    return found


# ------------------------------------------------------------------------- terms that are zero


class Sure(nn.Module):
    """Its logits are large, so that the cross-entropy of nearly all examples is exactly 0."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.size * self.layer(x)
        return output


def unreduced(output: Tensor, batch: Any) -> Tensor:
    """The cross-entropy of all rows that have a label."""
    labels = batch[1].to(output.device)
    return cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_term_of_zero_loss_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Sure(100.0).to(dtype)
    x = torch.randn(64, 4).to(dtype)
    y = model(x).argmax(-1)
    batches = list(zip(x.split(10), y.split(10), strict=True))
    zeros = int((unreduced(model(x), (x, y)) == 0).sum())
    assert zeros > 20, "the test has no such terms"
    assert quietly(model, batches, factors="kfac", loss=unreduced).report.examples == 64


def test_ignored_labels_are_not_terms() -> None:
    torch.manual_seed(0)
    model = Sure(100.0)
    x = torch.randn(8, 6, 4)
    y = model(x).argmax(-1)
    y[:, 3:] = -100
    y[0, 0] = -100

    def labeled(output: Tensor, batch: Any) -> Tensor:
        return unreduced(output, batch)[batch[1] != -100]

    zeros = (unreduced(model(x), (x, y)) == 0) & (y != -100)
    assert zeros.any(), "the test has no such terms"
    assert quietly(model, [(x, y)], factors="kfac", loss=labeled).report.examples == 23
    total = {"loss": lambda output, batch: (labeled(output, batch).sum(), 23)}
    assert quietly(model, [(x, y)], factors="kfac", **total).report.examples == 23
    with pytest.raises(ValueError, match=r"returned 48 terms, but 8 or .* or 23 labels"):
        measure(model, [(x, y)], factors="kfac", loss=unreduced, progress=False)


def test_weights_of_terms_can_have_any_sum() -> None:
    model = Sure(1.0).to(F64)
    batch = (torch.randn(8, 4, dtype=F64), torch.zeros(8).long())

    def weighted(weight: float) -> Any:
        loss = lambda output, batch: (weight * unreduced(output, batch).sum(), weight * 8)  # noqa: E731
        return quietly(model, [batch], factors="ekfac", loss=loss)["layer"]

    whole, small = weighted(1.0), weighted(0.01)
    close(small.G, 0.01 * whole.G)
    close(small.corrected, 0.01 * whole.corrected)


@pytest.mark.parametrize("ignored", [255, -1])
def test_sampled_labels_need_a_mask_for_ignored_positions(ignored: int) -> None:
    model = Sure(1.0).to(F64)
    x = torch.randn(8, 6, 4, dtype=F64)
    y = model(x).argmin(-1)
    y[:, 3:] = ignored

    def loss(output: Tensor, batch: Any) -> Tensor:
        counts = batch[1] != ignored
        return cross_entropy(output[counts], batch[1][counts], reduction="none")

    counts = {"mask": lambda batch: batch[1] != ignored}
    with pytest.raises(ValueError, match=rf"label {ignored}, which is not a class.*pass mask="):
        measure(model, [(x, y)], factors="kfac", progress=False)
    for options in ({}, {"loss": loss}):
        assert quietly(model, [(x, y)], factors="kfac", **options, **counts).report.examples == 24


def test_masked_examples_have_no_labels() -> None:
    model = Sure(1.0).to(F64)
    x = torch.randn(8, 6, 4, dtype=F64)
    y = model(x).argmin(-1)
    first = torch.arange(8) < 5
    for arguments in ({}, {"loss": lambda output, batch: unreduced(output, batch)[first]}):
        options: dict[str, Any] = {"factors": "kfac", "mask": lambda batch: first, **arguments}
        assert quietly(model, [(x, y)], **options).report.examples == 30


def test_next_token_labels_omit_the_first_position() -> None:
    model = model_of("Llama")
    data = data_of("Llama")
    data["labels"] = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    number = int((data["labels"][:, 1:] != -100).sum())

    def following(output: Any, batch: Any) -> Tensor:
        labels = batch["labels"][:, 1:]
        found = cross_entropy(output.logits[:, :-1].mT, labels, reduction="none")
        return found[labels != -100]

    assert quietly(model, [data], factors="kfac", loss=following).report.examples == number
    with pytest.raises(ValueError, match=r"returned 3 terms.*return .*number"):
        measure(model, [data], factors="kfac", loss=lambda out, b: out.logits[:3, 0, 0])


@pytest.mark.parametrize("options", [{}, {"loss": unreduced}])
def test_no_label_of_uint8_is_ignored(options: dict[str, Any]) -> None:
    batch = (torch.randn(16, 4), torch.arange(150, 166, dtype=torch.uint8))
    assert quietly(nn.Linear(4, 200), [batch], factors="kfac", **options).report.examples == 16


# --------------------------------------------------------------------------------- drawn labels


def test_prompt_tokens_have_no_sampled_label() -> None:
    """A row of logits is a term if the next token has a label; the prompt's rows are in A."""
    model = model_of("Llama")
    data = data_of("Llama")
    mask = data["attention_mask"]
    labels = data["input_ids"].masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    number = int((labels != -100).sum())
    assert 0 < number < int(mask.sum())
    gradients: list[Tensor] = []

    def call(model: nn.Module, batch: Any) -> Any:
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        output.logits.register_hook(gradients.append)
        return output

    options: dict[str, Any] = {"factors": "kfac", "call": call}
    found = quietly(model, [{**data, "labels": labels}], **options)
    assert found.report.examples == number
    assert found["lm_head"].rows == int(mask.sum())
    (gradient,) = gradients
    following = nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    assert torch.equal(gradient.any(-1), following)
    close(found["lm_head"].G[0], gradient.flatten(0, 1).mT @ gradient.flatten(0, 1) / number)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ignored", [False, True])
def test_padding_has_no_sampled_label(side: str, ignored: bool) -> None:
    """Whether labels at padding are -100 or not."""
    tokens = torch.randint(1, 20, (4, 6))
    mask = torch.ones(4, 6).long()
    padding = slice(0, 2) if side == "left" else slice(4, 6)
    mask[:, padding] = 0
    labels = tokens.masked_fill(mask == 0, -100) if ignored else tokens
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    # Four tokens predict three.
    assert quietly(model_of("Llama"), [batch], factors="kfac").report.examples == 4 * 3


class Pixels(nn.Module):
    """Logits ``(entries, classes, height, width)``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.features(x).tanh())
        return output


def test_the_labels_shape_determines_the_class_dimension() -> None:
    model = Pixels().to(F64)
    x = torch.randn(4, 2, 5, 6, dtype=F64)
    labels = torch.randint(3, (4, 5, 6))
    labels[0, :2] = -100
    batches = list(zip(x.split(3), labels.split(3), strict=True))
    number = int((labels != -100).sum())
    found = quietly(model, batches, factors="ekfac")
    assert found.report.examples == number

    def last(model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0]).movedim(1, -1).flatten(0, -2)
        return output

    flat = [(images, each.flatten()) for images, each in batches]
    mask = {"mask": lambda batch: torch.ones(len(batch[0]), dtype=torch.bool)}
    expected = measure(model, flat, factors="ekfac", call=last, progress=False, **mask)
    for layer in expected:
        close(found[layer].G * number, expected[layer].G * expected.report.examples)
    with pytest.raises(ValueError, match=r"do not say which dimension.*movedim\(1, -1\)"):
        measure(model, [x], factors="kfac", progress=False)


def test_an_ambiguous_likelihood_raises() -> None:
    one = nn.Linear(3, 1)
    several = nn.Linear(3, 2)
    x = torch.randn(5, 3)
    likely = 'likelihood="gaussian"'
    for model, batch, text in (
        (one, x, f"one class per row.*{likely}"),
        (one, (x, torch.randint(2, (5,))), f"one class per row.*{likely}"),
        (one, (x, torch.randn(5, 1)), f"targets are torch.float32.*{likely}"),
        (several, (x, torch.randn(5, 2)), f"targets are torch.float32.*{likely}"),
        (several, {"input": x, "labels": torch.ones(5, 2)}, f"targets are torch.float32.*{likely}"),
        (several, x[0], "without a dimension for the examples"),
        (nn.Sequential(one, nn.Flatten(0)), x, "without a dimension for the examples"),
    ):
        with pytest.raises(ValueError, match=text):
            measure(model, [batch], factors="kfac", progress=False)
    for likelihood in ("categorical", "bernoulli", "gaussian"):
        arguments: Any = {"factors": "kfac", "likelihood": likelihood}
        assert quietly(several, [(x, torch.randn(5, 2))], **arguments).report.examples == 5
    for model, labels in (one, torch.ones(5).long()), (several, torch.ones(5, 2).long()):
        arguments = {"factors": "kfac", "likelihood": "bernoulli"}
        assert quietly(model, [(x, labels)], **arguments).report.examples == 5


# ------------------------------------------------------------------------------ calls of layers


class Repeated(nn.Module):
    """Layers that are called several times for each entry, each with other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.shared = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.embedding(tokens.flip(-1)).sin()
        for _ in range(3):
            h = h + self.shared(h).tanh()
            h = h + self.convolution(h.mT).mT.tanh()
            h = h + self.attention(h, h, h)[0]
        left = self.shared(h[:, 0])
        right = self.shared(h[:, -1].sin())
        output: Tensor = self.head(left * right)
        return output


@pytest.mark.parametrize("repeats", ["plain", "checkpointed", "some without a gradient"])
def test_eigenvalues_cover_all_calls_of_a_layer(repeats: str) -> None:
    torch.manual_seed(0)
    model = Repeated().to(F64)
    if repeats == "checkpointed":
        inner = model.shared.forward
        model.shared.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    if repeats == "some without a gradient":
        model.register_forward_pre_hook(
            lambda m, args: (m.shared(torch.ones(2, 4, dtype=F64)), None)[1]
        )
    tokens = torch.randint(7, (6, 5))
    found = quietly(model, tokens.split(4), factors="ekfac", loss=score)
    assert set(found) >= {"embedding", "shared", "convolution", "attention", "head"}
    eigenvalues_agree(found, per_entry(model, tokens.split(1), score), 6)


def test_inputs_can_require_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)
    x = torch.randn(6, 3, dtype=F64)
    leaf = x.clone().requires_grad_()
    expected = quietly(model, [x], factors="kfac", loss=score)

    def attacked(model: nn.Module, x: Any) -> Any:
        """A gradient of the input, whose pairs do not count."""
        torch.autograd.grad(model(leaf).sum(), leaf)
        return model(x)

    for call in (lambda model, x: model(leaf), lambda model, x: model(3 * leaf / 3), attacked):
        found = quietly(model, [x], factors="kfac", loss=score, call=call)
        for name in ("0", "2"):
            close(found[name].A, expected[name].A)
            close(found[name].G, expected[name].G)
    assert leaf.grad is None

    # `transformers` lets the output of an embedding require a gradient.
    model[1].register_forward_hook(lambda module, args, output: output.requires_grad_())
    found = quietly(model, [x], factors="kfac", loss=score, layers="2")
    close(found["2"].G, expected["2"].G)


class Doubled(torch.autograd.Function):
    """A function whose node has the attribute of a leaf's node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = 2.0
        return x * ctx.variable

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.variable


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(x)
        return doubled


def test_custom_functions_can_have_an_attribute_variable() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Doubling(), nn.Linear(4, 2))
    found = quietly(model, [torch.randn(6, 3)], factors="kfac")
    assert list(found) == ["0", "2"]


def test_derivatives_in_a_loss_are_reported() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def derivative(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (result,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return result

    with pytest.warns(SecondOrderWarning, match="the factors miss the part .* at '0'"):
        measure(
            model,
            [torch.randn(6, 3)],
            factors="kfac",
            layers="0",
            loss=lambda output, batch: output.square().sum(1),
            call=derivative,
            progress=False,
        )


def test_a_layer_that_is_never_called_is_named_in_a_warning() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    x = torch.randn(4, 3)
    for factors in ("inputs", "kfac"):
        with pytest.warns(SecondOrderWarning, match="layer 'b': it was not called"):
            found = measure(
                model,
                [x],
                factors=factors,
                call=lambda m, x: m["a"](x),
                progress=False,  # type: ignore[arg-type]
            )
        assert list(found) == ["a"]


class Checkpointed(nn.Module):
    """A block in a checkpoint that runs a backward pass of its own."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.block = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(checkpoint(self.block, self.first(x), use_reentrant=True))
        return output


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpointing_raises_with_the_remedy() -> None:
    x = torch.randn(4, 3)
    remedy = r"use checkpoint\(..., use_reentrant=False\)"
    with pytest.warns(SecondOrderWarning, match=f"'block'.* gradients are on.*{remedy}"):
        found = measure(Checkpointed(nn.Identity()), [x], factors="kfac", progress=False)
    assert list(found) == ["head"]
    with pytest.raises(SecondOrderError, match=remedy):
        measure(Checkpointed(nn.Linear(3, 3)), [x], factors="kfac", progress=False)


# --------------------------------------------------------------------------- entries of a batch


def test_the_number_of_examples_of_a_batch_is_found() -> None:
    def zeros(*sizes: tuple[int, ...]) -> list[Tensor]:
        return [torch.zeros(size, dtype=torch.long) for size in sizes]

    for shapes, number in (
        ([(1,), (8, 3), (8,)], 8),
        ([(8, 3), (8,), (1,)], 8),
        ([(1, 5), (8, 5)], 8),
        ([(5, 8, 4), (8,)], 8),
        ([(1, 5), (1,)], 1),
        ([(1,), (1, 5), (1,)], 1),
        ([(4,)], 4),
        ([()], 0),
    ):
        assert find_batch_size(batch_tensors(zeros(*shapes))) == number, shapes
        named = dict(zip("abc", zeros(*shapes), strict=False))
        if shapes[0] != (5, 8, 4):
            assert find_batch_size(batch_tensors(named)) == number, shapes


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Item:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("kind", [Pair, Item, lambda x, y: BatchEncoding({"x": x, "labels": y})])
def test_batches_keep_their_type_for_call_and_loss(kind: Callable[..., Any]) -> None:
    batch = kind(torch.randn(8, 4), torch.randint(3, (8,)))
    types = set()

    def call(model: nn.Module, batch: Any) -> Any:
        types.add(type(batch))
        return model(batch.x)

    def loss(output: Tensor, batch: Any) -> Tensor:
        types.add(type(batch))
        return output[:, 0]

    for options in ({}, {"loss": loss}):
        found = quietly(nn.Linear(4, 3), [batch], factors="kfac", call=call, **options)
        assert found.report.examples == 8
    assert types == {type(batch)}


class MovesItself:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


def test_a_batch_can_move_itself() -> None:
    batch = MovesItself(torch.randn(8, 4))
    options: dict[str, Any] = {"factors": "kfac", "call": lambda model, batch: model(batch.x)}
    assert len(quietly(nn.Linear(4, 3), [batch], **options)) == 1


def test_mappings_can_have_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(8, 4)
    for batch in ({"input": x}, BatchEncoding({"input": x})):
        assert len(quietly(nn.Linear(4, 3), [batch], factors="kfac")) == 1
        assert batch["input"] is x


class Locked(UserDict[str, Tensor]):
    """A mapping that cannot be changed, as a locked TensorDict."""

    def to(self, device: torch.device) -> Locked:
        moved = Locked()
        moved.data = {key: value.to(device) for key, value in self.data.items()}
        return moved

    def __setitem__(self, key: str, value: Tensor) -> None:
        raise RuntimeError("cannot modify locked mapping")


def test_mappings_can_be_locked() -> None:
    batch = Locked()
    batch.data = {"input": torch.randn(8, 4)}
    assert len(quietly(nn.Linear(4, 3), [batch], factors="kfac")) == 1


def test_a_batch_of_unknown_type_needs_call() -> None:
    with pytest.raises(TypeError, match=r"the loader gave a Item.*or pass call=lambda"):
        measure(nn.Linear(4, 3), [Item(torch.ones(2, 4), torch.ones(2))], progress=False)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Any) -> Tensor:
        output: Tensor = self.head(self.lstm(x)[1][0][0])
        return output


def test_packed_sequences_reach_the_model() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    batch = (packed, torch.tensor([0, 1]))
    assert quietly(Reader(), [batch], factors="kfac").report.examples == 2


class Scaled(nn.Module):
    """Reads a number that all entries share before their features."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, scale: Tensor, x: Tensor) -> Tensor:
        output: Tensor = self.b((scale * self.a(x)).tanh())
        return output


def test_a_leading_scalar_is_not_an_example() -> None:
    torch.manual_seed(0)
    model = Scaled().to(F64)
    x = torch.randn(6, 5, 3, dtype=F64)
    scale = torch.full((1,), 0.7, dtype=F64)
    arguments: dict[str, Any] = {"factors": "ekfac", "loss": score}
    found = quietly(model, [{"scale": scale, "x": part} for part in x.split(3)], **arguments)
    entries = [{"scale": scale, "x": part} for part in x.split(1)]
    expected = per_entry(model, entries, score, lambda model, batch: model(**batch))
    eigenvalues_agree(found, expected, 30)


class Placed(nn.Module):
    """Embeddings of positions that all examples share, in four ways, or that each one has."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.positions = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 3)
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        if self.way == "one row":
            places = places.unsqueeze(0)
        if self.way == "each":
            places = places.expand_as(tokens)
        added = self.positions(places)
        if self.way == "scalar":
            added = self.positions(places[-1])
        if self.way == "bias":
            added = self.positions((places[:, None] - places).abs()).mean(0)
        output: Tensor = self.head((self.tokens(tokens) + added).tanh())
        return output


@pytest.mark.parametrize("way", ["one row", "flat", "scalar", "bias", "each"])
@pytest.mark.parametrize("factors", ["kfac", "ekfac"])
def test_shared_positions_have_no_per_example_gradients(way: str, factors: Any) -> None:
    torch.manual_seed(0)
    model = Placed(way).to(F64)
    tokens = torch.randint(6, (6, 8))
    options: dict[str, Any] = {"factors": factors, "loss": score}
    if way == "each":
        found = quietly(model, tokens.split(4), **options)
        assert list(found) == ["tokens", "positions", "head"]
        if factors == "ekfac":
            eigenvalues_agree(found, per_entry(model, tokens.split(1), score), 48)
        return
    with pytest.warns(SecondOrderWarning, match="'positions': all examples of a batch share"):
        found = measure(model, tokens.split(4), progress=False, **options)
    assert list(found) == ["tokens", "head"]
    assert "position_ids" in found.uncovered["positions.weight"]
    alone = quietly(model, tokens.split(1), **options)  # a batch of one entry shares nothing
    if way != "bias":
        assert list(alone) == ["tokens", "positions", "head"]


class Windows(nn.Module):
    """Images as windows, ``(entries * windows, rows, features)``, with four rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, images: Tensor) -> Tensor:
        windows = images.unflatten(2, (4, 4)).movedim(1, -1).flatten(0, 1).flatten(1, 2)
        output: Tensor = self.layer(windows).tanh().unflatten(0, (-1, 4)).mean((1, 2))
        return output


def test_windows_belong_to_their_examples() -> None:
    model = Windows().to(F64)
    images = torch.randn(6, 2, 16, 1, dtype=F64)
    found = quietly(model, images.split(3), factors="ekfac", loss=score)
    eigenvalues_agree(found, per_entry(model, images.split(1), score), 6)
    with pytest.warns(SecondOrderWarning, match="layer 'layer'.* choose a batch size"):
        measure(model, [images[:4]], factors="ekfac", loss=score, progress=False)


class Arranged(nn.Module):
    """Flattens the tokens of all entries, or puts positions before entries."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 3)
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        arranged = tokens.T if self.way == "positions first" else tokens
        if self.way == "one row":
            arranged = tokens.reshape(1, -1)
        output: Tensor = self.layer(self.embedding(arranged).tanh()).tanh()
        if self.way == "positions first":
            return output.mean(0)
        return output.reshape(*tokens.shape, -1).mean(1)


def test_rows_can_be_flattened() -> None:
    model = Arranged("one row").to(F64)
    tokens = torch.randint(7, (6, 5))
    found = quietly(model, tokens.split(3), factors="ekfac", loss=score)
    eigenvalues_agree(found, per_entry(model, tokens.split(1), score), 6)


@pytest.mark.parametrize("positions", [5, 6])
def test_positions_before_examples_are_reported(positions: int) -> None:
    tokens = torch.randint(7, (3, positions))
    with pytest.warns(SecondOrderWarning) as caught:
        measure(Arranged("positions first"), [tokens], factors="ekfac", loss=score, progress=False)
    texts = [str(each.message) for each in caught]
    for name in ("embedding", "layer"):
        assert any(f"rows of layer {name!r} cannot be assigned" in text for text in texts)


class Router(nn.Module):
    """A layer for some entries, and another one for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        to_left = x[:, 0] > 0
        output = x.new_empty(len(x), 2)
        output[to_left] = self.left(x[to_left])
        output[~to_left] = self.right(x[~to_left])
        return output


def test_a_row_that_a_router_sends_to_one_expert_is_not_shared() -> None:
    model = Router().to(F64)
    x = torch.randn(9, 3, dtype=F64)
    x[:, 0] = torch.tensor([1, -1, -1, -1, 1, 1, 1, -1, -1])
    with pytest.warns(SecondOrderWarning, match="count rows as examples"):
        found = measure(model, x.split(4), factors="ekfac", loss=score, progress=False)
    eigenvalues_agree(found, per_entry(model, x.split(1), score), 9)


def test_a_mask_without_positions_raises() -> None:
    model = model_of("Llama")
    data = data_of("Llama")
    mask = data["attention_mask"][:, None, None, :].expand(-1, 1, 7, 7)
    additive = torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min).to(F64)
    batch = {"input_ids": data["input_ids"], "attention_mask": additive}
    with pytest.raises(ValueError, match=r"shape \(10, 1, 7, 7\).*pass mask=lambda batch"):
        measure(model, [batch], progress=False)
    flat = {**batch, "attention_mask": additive[:, 0, 0]}
    with pytest.raises(ValueError, match=r"shape \(10, 7\).*pass mask="):
        measure(model, [flat], progress=False)
    found = measure(model, [batch], mask=lambda b: data["attention_mask"], progress=False)
    assert found["model.layers.0.mlp.up_proj"].rows == int(data["attention_mask"].sum())
