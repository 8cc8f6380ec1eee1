"""Random small models: which layers, in which order, with which options; plain data until built.

`draw_model(random)` draws a `Spec`, which can be sent to other processes; `Net(spec)` is its
module, `batch(spec, seed, n, dtype)` fits it, and `losses(spec, outputs, targets)` are its terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from models import LoRALinear, TransposedLinear
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

CLASSES = 3
WORDS = 7


@dataclass(frozen=True)
class Part:
    """One layer, and what becomes of its output.

    Attributes:
        kind: of the layer: a key of `LAYERS`.
        residual: whether the input is added to the output; the layer keeps the shape.
        twice: whether it is called twice.
        unused: steps at which the model goes without it; it keeps the shape.
        frozen: "", "always", or "later": from the middle of training on.
    """

    kind: str
    args: dict[str, Any] = field(default_factory=dict)
    residual: bool = False
    twice: bool = False
    unused: tuple[int, ...] = ()
    frozen: str = ""


@dataclass(frozen=True)
class Spec:
    """A model and its data.

    Attributes:
        family: "rows" (N, d), "images" (N, C, ...) or "tokens" (N, T) of whole numbers.
        shape: of one example's input.
        parts: the layers before the head.
        width: of what reaches the head, in its last dimension, once it is pooled.
        head: "linear" or "tied" (to the first embedding).
        pooled: how what is left of positions or places goes: "mean", "flat" or "" (a loss for each
            position).
        loss: "classes" or "squares".
    """

    family: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    width: int
    head: str
    pooled: str
    loss: str


class Around(nn.Module):
    """A layer, and how it is called."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


class Lone(nn.Module):
    """Parameters of no layer: a gain and a matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.matrix = nn.Parameter(torch.eye(width) + 0.1 * torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.matrix)


def _attention(width: int, heads: int, **options: Any) -> nn.Module:
    inner = nn.MultiheadAttention(width, heads, batch_first=True, **options)
    return Around(inner, lambda layer, x: layer(x, x, x, need_weights=False)[0])


def _recurrent(kind: str, width: int, **options: Any) -> nn.Module:
    inner = getattr(nn, kind)(width, width, batch_first=True, **options)
    return Around(inner, lambda layer, x: layer(x)[0])


def _recomputed(width: int, reentrant: bool) -> nn.Module:
    return Around(
        nn.Linear(width, width), lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)
    )


def _encoder(width: int, heads: int, norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=norm_first
    )


def _channel_norm(width: int) -> nn.Module:
    """Over channels that stand last."""
    return Around(nn.LayerNorm(width), lambda norm, x: norm(x.movedim(1, -1)).movedim(-1, 1))


LAYERS: dict[str, Callable[..., nn.Module]] = {
    **{
        kind: getattr(nn, kind)
        for kind in ("Linear", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "PReLU", "Tanh")
    },
    **{kind: getattr(nn, kind) for kind in ("GELU", "ReLU")},
    **{f"BatchNorm{n}d": getattr(nn, f"BatchNorm{n}d") for n in (1, 2, 3)},
    **{f"Conv{n}d": getattr(nn, f"Conv{n}d") for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": getattr(nn, f"ConvTranspose{n}d") for n in (1, 2, 3)},
    "LoRA": LoRALinear,
    "Transposed": lambda d_in, d_out: TransposedLinear(d_in, d_out, bias=True),
    "weight_norm": lambda d_in, d_out: weight_norm(nn.Linear(d_in, d_out)),
    "Attention": _attention,
    "Recurrent": _recurrent,
    "Encoder": _encoder,
    "Recomputed": _recomputed,
    "Lone": Lone,
    "NeverCalled": lambda width: Around(nn.Linear(width, width), lambda _, x: x),
    "ChannelNorm": _channel_norm,
    "Dropout": lambda: nn.Dropout(0.1),
    "ReLU in place": lambda: nn.ReLU(inplace=True),
}


class Net(nn.Module):
    """The model of a `Spec`; `step` says which parts are left out."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.step = 0
        self.parts = nn.ModuleList(LAYERS[part.kind](**part.args) for part in spec.parts)
        outputs = {"classes": CLASSES, "squares": 2}[spec.loss]
        self.head = nn.Linear(spec.width, WORDS if spec.head == "tied" else outputs)
        if spec.head == "tied":
            self.head.weight = self.parts[0].weight
        self.freeze("always")

    def freeze(self, when: str) -> None:
        for part, module in zip(self.spec.parts, self.parts, strict=True):
            if part.frozen == when:
                module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for part, module in zip(self.spec.parts, self.parts, strict=True):
            if self.step in part.unused:
                continue
            y = module(x)
            if part.twice:
                y = module(y)
            if part.residual:
                y = x + y
            x = y
        if self.spec.pooled == "flat":
            x = x.flatten(1)
        elif self.spec.pooled == "mean":
            x = x.mean(1) if self.spec.family == "tokens" else x.flatten(2).mean(2)
        return self.head(x)


def losses(spec: Spec, outputs: Tensor, targets: Tensor) -> Tensor:
    """(N,): the loss of each example, whose mean is that of the batch."""
    if spec.loss == "classes":
        flat = outputs.flatten(0, -2), targets.flatten()
        terms = functional.cross_entropy(*flat, reduction="none")
    else:
        terms = (outputs - targets).square()
    return terms.reshape(len(outputs), -1).mean(1)


def batch(spec: Spec, seed: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of n examples."""
    generator = torch.Generator().manual_seed(seed)
    positions = spec.shape if spec.family == "tokens" and not spec.pooled else ()
    if spec.family == "tokens":
        x = torch.randint(WORDS, (n, *spec.shape), generator=generator)
    else:
        x = torch.randn(n, *spec.shape, generator=generator).to(dtype)
    if spec.loss == "classes":
        classes = WORDS if spec.head == "tied" else CLASSES
        return x, torch.randint(classes, (n, *positions), generator=generator)
    return x, torch.randn(n, *positions, 2, generator=generator).to(dtype)


# ------------------------------------------------------------------------------------- drawing


def draw_model(random: Random) -> Spec:
    """A model; of at least one parameter that trains."""
    family = random.choice([_rows, _rows, _images, _tokens, _tokens])
    return family(random, random.choice(["classes", "classes", "squares"]))


def _touched(random: Random, part: Part) -> Part:
    """Some are called twice, left out at times, or have a residual; `part` keeps the shape."""
    chance = random.random()
    if chance < 0.15:
        return replace(part, twice=True)
    if chance < 0.3:
        return replace(part, unused=tuple(sorted(random.sample(range(10), 3))))
    return replace(part, residual=chance < 0.4)


def _frozen(random: Random, parts: list[Part]) -> tuple[Part, ...]:
    """Now and then one is frozen, from the beginning or later; some activations are in place."""
    for i in range(1, len(parts)):
        if parts[i].kind == "ReLU" and parts[i - 1].kind.startswith(("Linear", "Conv")):
            parts[i] = Part("ReLU in place")
    if random.random() < 0.2:
        i = random.randrange(len(parts))
        parts[i] = replace(parts[i], frozen=random.choice(["always", "later"]))
    return tuple(parts)


def _to(random: Random, d: int, e: int) -> Part:
    """A layer from width d to width e."""
    kind = random.choice(["Linear", "Linear", "Linear", "LoRA", "Transposed", "weight_norm"])
    if kind == "Linear":
        sizes = {"in_features": d, "out_features": e}
        return Part(kind, {**sizes, "bias": random.random() < 0.7})
    return Part(kind, {"d_in": d, "d_out": e})


def _same(random: Random, d: int, flat: bool) -> Part:
    """A layer that keeps the width."""
    coin = random.random() < 0.7
    heads = random.choice([n for n in (1, 2, 3) if d % n == 0])
    more = random.choice([{}, {"num_layers": 2}, {"bias": False}])
    options: dict[str, dict[str, Any]] = {
        **{kind: {} for kind in ("Tanh", "GELU", "ReLU", "PReLU", "Dropout")},
        **{kind: {"width": d} for kind in ("Lone", "NeverCalled")},
        "LayerNorm": {"normalized_shape": d, "elementwise_affine": coin},
        "RMSNorm": {"normalized_shape": d, "elementwise_affine": coin},
        "Linear": {},
        "Recomputed": {"width": d, "reentrant": not coin},
    }
    if flat:
        options["BatchNorm1d"] = {"num_features": d, "affine": coin}
        options["GroupNorm"] = {"num_groups": random.choice([1, d]), "num_channels": d}
    else:
        options["Attention"] = {"width": d, "heads": heads, "bias": coin}
        options["Encoder"] = {"width": d, "heads": heads, "norm_first": coin}
        options["Recurrent"] = {"kind": random.choice(["LSTM", "GRU", "RNN"]), "width": d, **more}
    mixing = ["Attention", "Encoder", "Recurrent"]
    kind = random.choice([*options, *([] if flat else mixing)])
    if kind == "Linear":
        return _touched(random, _to(random, d, d))
    part = Part(kind, options[kind])
    return _touched(random, part) if kind in ("Attention", "Recurrent") else part


def _stack(random: Random, d: int, flat: bool) -> tuple[list[Part], int]:
    """Up to four layers on (..., d), and the width at their end."""
    parts = []
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.4:
            e = random.randint(2, 6)
            parts += [_to(random, d, e), Part("Tanh")]
            d = e
        else:
            parts.append(_same(random, d, flat))
    return parts, d


def _rows(random: Random, loss: str) -> Spec:
    d = random.randint(2, 6)
    parts, width = _stack(random, d, True)
    return Spec("rows", (d,), _frozen(random, parts), width, "linear", "", loss)


def _tokens(random: Random, loss: str) -> Spec:
    d = random.choice([2, 4, 6])
    options = random.choice([{}, {}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
    first = Part("Embedding", {"num_embeddings": WORDS, "embedding_dim": d, **options})
    parts, width = _stack(random, d, False)
    tied = width == d and random.random() < 0.4
    pooled = "" if tied else random.choice(["", "mean"])
    head, loss = ("tied", "classes") if tied else ("linear", loss)
    rest = _frozen(random, parts)
    return Spec("tokens", (random.randint(1, 4),), (first, *rest), width, head, pooled, loss)


def _images(random: Random, loss: str) -> Spec:
    rank = random.choice([1, 2, 2, 3])
    channels = random.choice([1, 2, 4])
    shape = (channels, *(random.randint(3, 8 - 2 * rank + 1) for _ in range(rank)))
    parts: list[Part] = []
    places = list(shape[1:])
    for _ in range(random.randint(1, 3)):
        chance = random.random()
        if chance < 0.65:
            part, channels, places = _conv(random, rank, channels, places)
            parts.append(part)
        elif chance < 0.8:
            norms: dict[str, dict[str, Any]] = {
                "GroupNorm": {"num_groups": 1, "num_channels": channels},
                "ChannelNorm": {"width": channels},
                f"BatchNorm{rank}d": {"num_features": channels},
            }
            kind = random.choice(list(norms))
            parts.append(Part(kind, norms[kind]))
        else:
            parts.append(Part(random.choice(["Tanh", "GELU", "ReLU"])))
    pooled = random.choice(["flat", "mean"])
    width = channels * math.prod(places) if pooled == "flat" else channels
    return Spec("images", shape, _frozen(random, parts), width, "linear", pooled, loss)


def _conv(
    random: Random, rank: int, channels: int, places: list[int]
) -> tuple[Part, int, list[int]]:
    """A convolution, or its transpose, with the channels and places that come out."""
    groups = random.choice([g for g in (1, 1, 2, 4) if channels % g == 0])
    outputs = groups * random.randint(1, 2)
    kernel = tuple(random.randint(1, min(3, n)) for n in places)
    stride = tuple(random.randint(1, 2) for _ in places)
    args: dict[str, Any] = {"in_channels": channels, "out_channels": outputs}
    args |= {"kernel_size": kernel, "stride": stride, "groups": groups}
    args["bias"] = random.random() < 0.7
    if random.random() < 0.25:
        found = [(n - 1) * s + k for n, k, s in zip(places, kernel, stride, strict=True)]
        return Part(f"ConvTranspose{rank}d", args), outputs, found
    padding = tuple(random.randint(0, k // 2) for k in kernel)
    dilation = tuple(
        2 if n + 2 * p >= 2 * (k - 1) + 1 and random.random() < 0.3 else 1
        for n, k, p in zip(places, kernel, padding, strict=True)
    )
    mode = random.choice(["zeros", "zeros", "zeros", "circular", "replicate"])
    args |= {"padding": padding, "dilation": dilation, "padding_mode": mode}
    found = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(places, kernel, stride, padding, dilation, strict=True)
    ]
    return Part(f"Conv{rank}d", args), outputs, found
