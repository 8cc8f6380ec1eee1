"""Random small models: which layers, in which order, with which options; plain data until built.

`draw_model(random)` draws a `Spec`, which can be sent to other processes; `Net(spec)` is its
module, `batch(spec, seed, n, dtype)` fits it, and `loss_of(spec)` is the loss of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
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
        args: of the layer.
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
        head: "linear", "tied" (to the first embedding) or "none".
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


# ------------------------------------------------------------------------------------- layers


class LoRA(nn.Module):
    """A frozen Linear plus a trained one of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Transposed(nn.Module):
    """A Linear whose weight is stored (in, out), as Conv1D of `transformers` has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def third_party(inputs: int, outputs: int) -> nn.Module:
    """`transformers`' own, where it is installed."""
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        return Transposed(inputs, outputs)
    return Conv1D(outputs, inputs)


class Attention(nn.Module):
    """Of a sequence to itself."""

    def __init__(self, width: int, heads: int, kdim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.keys = None if kdim is None else nn.Linear(width, kdim)
        self.inner = nn.MultiheadAttention(
            width, heads, batch_first=True, bias=bias, kdim=kdim, vdim=kdim
        )

    def forward(self, x: Tensor) -> Tensor:
        keys = x if self.keys is None else self.keys(x)
        return self.inner(x, keys, keys, need_weights=False)[0]


class Recurrent(nn.Module):
    """The outputs of an LSTM or GRU, at all positions."""

    def __init__(self, kind: str, inputs: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(inputs, hidden, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Lone(nn.Module):
    """Parameters of no layer: a gain and a matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.matrix = nn.Parameter(torch.eye(width) + 0.1 * torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.matrix)


class NeverCalled(nn.Module):
    """Holds a layer that nobody calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spare = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Recomputed(nn.Module):
    """A Linear inside of a checkpoint."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(width, width), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Channels(nn.Module):
    """A norm over channels that stand last."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def _normed(kind: str, inputs: int, outputs: int) -> nn.Module:
    made = nn.Linear(inputs, outputs)
    return getattr(nn.utils.parametrizations, kind)(made)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": nn.Linear,
    "LoRA": LoRA,
    "Transposed": Transposed,
    "third_party": third_party,
    "weight_norm": lambda inputs, outputs: _normed("weight_norm", inputs, outputs),
    "Attention": Attention,
    "Recurrent": Recurrent,
    "Encoder": lambda width, heads, norm_first: nn.TransformerEncoderLayer(
        width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=norm_first
    ),
    "Lone": Lone,
    "NeverCalled": NeverCalled,
    "Recomputed": Recomputed,
    "Embedding": nn.Embedding,
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "GroupNorm": nn.GroupNorm,
    "BatchNorm1d": nn.BatchNorm1d,
    "BatchNorm2d": nn.BatchNorm2d,
    "BatchNorm3d": nn.BatchNorm3d,
    "InstanceNorm": lambda rank, channels: getattr(nn, f"InstanceNorm{rank}d")(
        channels, affine=True
    ),
    "ChannelNorm": lambda width: Channels(nn.LayerNorm(width)),
    "Conv": lambda rank, inputs, outputs, **more: getattr(nn, f"Conv{rank}d")(
        inputs, outputs, **more
    ),
    "ConvTranspose": lambda rank, inputs, outputs, **more: getattr(nn, f"ConvTranspose{rank}d")(
        inputs, outputs, **more
    ),
    "PReLU": nn.PReLU,
    "Dropout": lambda: nn.Dropout(0.1),
    "Tanh": nn.Tanh,
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
}


class Net(nn.Module):
    """The model of a `Spec`.

    Attributes:
        step: which step it is; parts are left out by it.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.step = spec, 0
        self.parts = nn.ModuleList(LAYERS[part.kind](**part.args) for part in spec.parts)
        outputs = {"classes": CLASSES, "squares": 2}[spec.loss]
        if spec.head == "tied":
            self.head = nn.Linear(spec.width, WORDS)
            self.head.weight = self.parts[0].weight
        elif spec.head == "linear":
            self.head = nn.Linear(spec.width, outputs)
        for part, module in zip(spec.parts, self.parts, strict=True):
            if part.frozen == "always":
                module.requires_grad_(False)

    def freeze(self) -> None:
        """Freeze what is to be frozen later."""
        for part, module in zip(self.spec.parts, self.parts, strict=True):
            if part.frozen == "later":
                module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for part, module in zip(self.spec.parts, self.parts, strict=True):
            if self.step in part.unused:
                continue
            y = module(x)
            y = module(y) if part.twice else y
            x = x + y if part.residual else y
        if self.spec.pooled == "flat":
            x = x.flatten(1)
        elif self.spec.pooled == "mean":
            x = x.mean(1) if self.spec.family == "tokens" else x.flatten(2).mean(2)
        return x if self.spec.head == "none" else self.head(x)


def loss_of(spec: Spec) -> Callable[[Tensor, Tensor], Tensor]:
    """(outputs, targets) -> mean over terms."""
    return _classes if spec.loss == "classes" else _squares


def _classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def examples_losses(spec: Spec, outputs: Tensor, targets: Tensor) -> Tensor:
    """(N,): the loss of each example."""
    if spec.loss == "classes":
        terms = functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), reduction="none"
        )
        return terms.view(len(outputs), -1).mean(1)
    return (outputs - targets).square().flatten(1).mean(1)


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


def draw_model(random: Random, others: bool = False) -> Spec:
    """A model; of at least one parameter that trains.

    Args:
        random: where chance comes from.
        others: whether layers of other packages may be among its own.
    """
    family = random.choice(["rows", "rows", "images", "tokens", "tokens"])
    return {"rows": _rows, "images": _images, "tokens": _tokens}[family](random, others)


def _loss(random: Random) -> str:
    return random.choice(["classes", "classes", "squares"])


def _touched(random: Random, part: Part) -> Part:
    """Some are called twice, left out at times, or frozen; `part` keeps the shape."""
    chance = random.random()
    values = dict(vars(part))
    if chance < 0.15:
        values["twice"] = True
    elif chance < 0.3:
        values["unused"] = tuple(sorted(random.sample(range(10), 3)))
    elif chance < 0.4:
        values["residual"] = True
    return Part(**values)


def _frozen(random: Random, parts: list[Part]) -> tuple[Part, ...]:
    """Now and then one is frozen, from the beginning or later; some activations are in place."""
    for i in range(1, len(parts)):
        if parts[i].kind == "ReLU" and parts[i - 1].kind in ("Linear", "Conv", "ConvTranspose"):
            parts[i] = Part("ReLU in place")
    if parts and random.random() < 0.2:
        i = random.randrange(len(parts))
        how = random.choice(["always", "later"])
        parts[i] = Part(**{**vars(parts[i]), "frozen": how})
    return tuple(parts)


def _to(random: Random, d: int, e: int, others: bool) -> Part:
    """A layer from width d to width e."""
    kinds = ["Linear", "Linear", "Linear", "LoRA", "Transposed", "weight_norm"]
    kind = random.choice([*kinds, "third_party"] if others else kinds)
    if kind == "Linear":
        sizes = {"in_features": d, "out_features": e}
        return Part(kind, {**sizes, "bias": random.random() < 0.7})
    if kind == "LoRA":
        return Part(kind, {"inputs": d, "outputs": e, "rank": random.randint(1, 2)})
    return Part(kind, {"inputs": d, "outputs": e})


def _same(random: Random, d: int, flat: bool, others: bool) -> Part:
    """A layer that keeps the width."""
    kinds = ["Linear", "LayerNorm", "RMSNorm", "Tanh", "GELU", "ReLU", "Lone", "NeverCalled"]
    kinds += ["Recomputed", "PReLU", "Dropout"]
    kinds += ["BatchNorm1d", "GroupNorm"] if flat else ["Attention", "Recurrent", "Encoder"] * 2
    kind = random.choice(kinds)
    if kind == "Linear":
        return _touched(random, _to(random, d, d, others))
    if kind in ("LayerNorm", "RMSNorm"):
        affine = random.random() < 0.8
        return Part(kind, {"normalized_shape": d, "elementwise_affine": affine})
    if kind in ("Lone", "NeverCalled"):
        return Part(kind, {"width": d})
    if kind == "Recomputed":
        return Part(kind, {"width": d, "reentrant": random.random() < 0.3})
    if kind == "BatchNorm1d":
        return Part(kind, {"num_features": d, "affine": random.random() < 0.8})
    if kind == "GroupNorm":
        return Part(kind, {"num_groups": random.choice([1, d]), "num_channels": d})
    if kind == "Attention":
        heads = random.choice([n for n in (1, 2, 3) if d % n == 0])
        kdim = random.choice([None, None, 3])
        args = {"width": d, "heads": heads, "kdim": kdim, "bias": random.random() < 0.7}
        return _touched(random, Part(kind, args))
    if kind == "Recurrent":
        args = {"kind": random.choice(["LSTM", "GRU", "RNN"]), "inputs": d, "hidden": d}
        args |= random.choice([{}, {"num_layers": 2}, {"bias": False}])
        return _touched(random, Part(kind, args))
    if kind == "Encoder":
        heads = random.choice([n for n in (1, 2, 3) if d % n == 0])
        return Part(kind, {"width": d, "heads": heads, "norm_first": random.random() < 0.5})
    return Part(kind)


def _stack(random: Random, d: int, flat: bool, others: bool) -> tuple[list[Part], int]:
    """Up to four layers on (..., d), and the width at their end."""
    parts = []
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.4:
            e = random.randint(2, 6)
            parts += [_to(random, d, e, others), Part("Tanh")]
            d = e
        else:
            parts.append(_same(random, d, flat, others))
    return parts, d


def _rows(random: Random, others: bool) -> Spec:
    d = random.randint(2, 6)
    parts, width = _stack(random, d, True, others)
    return Spec("rows", (d,), _frozen(random, parts), width, "linear", "", _loss(random))


def _tokens(random: Random, others: bool) -> Spec:
    d = random.choice([2, 4, 6])
    options = random.choice([{}, {}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
    first = Part("Embedding", {"num_embeddings": WORDS, "embedding_dim": d, **options})
    parts, width = _stack(random, d, False, others)
    tied = width == d and random.random() < 0.4
    pooled = "" if tied else random.choice(["", "mean"])
    loss = "classes" if tied else _loss(random)
    head = "tied" if tied else "linear"
    rest = _frozen(random, parts)
    return Spec("tokens", (random.randint(1, 4),), (first, *rest), width, head, pooled, loss)


def _images(random: Random, others: bool) -> Spec:
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
            kind = random.choice([f"BatchNorm{rank}d", "GroupNorm", "InstanceNorm", "ChannelNorm"])
            if kind == "InstanceNorm" and math.prod(places) < 2:
                kind = "ChannelNorm"
            args = {
                "GroupNorm": {"num_groups": 1, "num_channels": channels},
                "InstanceNorm": {"rank": rank, "channels": channels},
                "ChannelNorm": {"width": channels},
            }.get(kind, {"num_features": channels})
            parts.append(Part(kind, args))
        else:
            parts.append(Part(random.choice(["Tanh", "GELU", "ReLU"])))
    pooled = random.choice(["flat", "mean"])
    width = channels * math.prod(places) if pooled == "flat" else channels
    return Spec("images", shape, _frozen(random, parts), width, "linear", pooled, _loss(random))


def _conv(
    random: Random, rank: int, channels: int, places: list[int]
) -> tuple[Part, int, list[int]]:
    """A convolution, or its transpose, with what goes in and comes out."""
    groups = random.choice([g for g in (1, 1, 2, 4) if channels % g == 0])
    outputs = groups * random.randint(1, 2)
    sizes = [(random.randint(1, min(3, n)), random.randint(1, 2)) for n in places]
    kernel, stride = tuple(k for k, _ in sizes), tuple(s for _, s in sizes)
    args: dict[str, Any] = {"rank": rank, "inputs": channels, "outputs": outputs}
    args |= {"kernel_size": kernel, "stride": stride, "groups": groups}
    args["bias"] = random.random() < 0.7
    if random.random() < 0.25:
        found = [(n - 1) * s + k for n, k, s in zip(places, kernel, stride, strict=True)]
        return Part("ConvTranspose", args), outputs, found
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
    return Part("Conv", args), outputs, found
