"""Small models for every kind of layer and use, each with its batches and its loss.

    case = ZOO["conv_strided"]
    model, (x, y) = case.model(torch.float64), case.batch(8, torch.float64)
    case.loss(model(x), y).backward()

A `Case` can be sent to other processes. `FACTORED` are the cases that have nothing but Linear and
convolution layers with parameters, all of them called.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from reference import cross_entropy, half_squared_error
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import second_order

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 3


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        name: its key in `ZOO`.
        build: makes the model, from torch's global random state.
        shape: of one input.
        vocabulary: inputs are integers below it; 0 for real inputs.
        target_shape: of one target: of class numbers for `cross_entropy`, of reals otherwise.
        loss: (outputs, targets) -> mean over terms.
        shared: whether a Linear sees several positions of an example: "expand" (a loss term each),
            "reduce" (pooled into one), or None.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    target_shape: tuple[int, ...] = ()
    vocabulary: int = 0
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    shared: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def reference(self) -> Case:
        """The case whose model computes the same plainly: itself, unless this one recomputes."""
        return ZOO["checkpointed_plain"] if self.name.startswith("checkpointed") else self

    def model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build().to(dtype)

    def batch(
        self, n: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(input, target) of `n` examples; drawn in float64, so that dtypes differ by rounding."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            x = torch.randint(self.vocabulary, (n, *self.shape), generator=generator)
        else:
            x = torch.randn(n, *self.shape, generator=generator, dtype=torch.float64).to(dtype)
        if self.loss is cross_entropy:
            return x, torch.randint(CLASSES, (n, *self.target_shape), generator=generator)
        y = torch.randn(n, *self.target_shape, generator=generator, dtype=torch.float64)
        return x, y.to(dtype)

    def batches(
        self, count: int, n: int = 8, dtype: torch.dtype = torch.float64
    ) -> list[tuple[Tensor, Tensor]]:
        """`count` different ones."""
        return [self.batch(n, dtype, seed=i) for i in range(count)]


# Linear layers.


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=bias), nn.Tanh(), nn.Linear(6, CLASSES)
    )


def deep_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))


class Pool(nn.Module):
    """The mean over positions: (N, T, d) -> (N, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def pooled_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), Pool(), nn.Linear(3, 2))


def sequence_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def inplace() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, CLASSES), nn.LeakyReLU(inplace=True)
    )


class Shared(nn.Module):
    """One module called twice."""

    def __init__(self, around: nn.Module, shared: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.around = around
        self.shared = shared
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.around(x))
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.shared(x))
        return self.head(x)


def shared_linear() -> nn.Module:
    return Shared(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def shared_conv() -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, CLASSES))
    return Shared(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 3, 3, padding=1), head)


class Unused(nn.Module):
    """One layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    """`mlp`, its middle recomputed in the backward pass; `reentrant=None`: plainly."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(7, 6), nn.Tanh())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.head(self.middle(x))
        return self.head(checkpoint(self.middle, x, use_reentrant=self.reentrant))


class TransposedLinear(nn.Module):
    """x W + b, whose W is (in, out)."""

    def __init__(self, d_in: int, d_out: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = d_in
        self.out_features = d_out
        self.weight = nn.Parameter(torch.randn(d_in, d_out) / d_in**0.5)
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + (0.0 if self.bias is None else self.bias)


second_order.register_layer(TransposedLinear, transposed=True)


class LoRALinear(nn.Module):
    """A frozen Linear plus a trainable one of rank 2."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(d_in, d_out).requires_grad_(False)
        self.down = nn.Linear(d_in, 2, bias=False)
        self.up = nn.Linear(2, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def lora() -> nn.Module:
    return nn.Sequential(LoRALinear(5, 7), nn.Tanh(), LoRALinear(7, CLASSES))


# Convolutions.


def conv(
    *layers: nn.Module, shape: tuple[int, ...], activation: Callable[[], nn.Module] = nn.Tanh
) -> nn.Module:
    """`layers` with activations between them, then a Linear."""
    body = nn.Sequential(*(part for layer in layers for part in (layer, activation())))
    with torch.no_grad():
        features = body(torch.zeros(1, *shape)).numel()
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(features, CLASSES))


def conv2d(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> nn.Module:
    """Two convolutions, the first of them plain and the second with the arguments."""
    return conv(nn.Conv2d(shape[0], 4, 2), nn.Conv2d(4, *args, **kwargs), shape=shape)


def conv1d(shape: tuple[int, ...]) -> nn.Module:
    first = nn.Conv1d(shape[0], 4, 3, stride=2, padding=1)
    return conv(first, nn.Conv1d(4, 3, 2, dilation=2, bias=False), shape=shape)


def conv3d(shape: tuple[int, ...]) -> nn.Module:
    return conv(nn.Conv3d(shape[0], 3, (2, 1, 2), stride=(1, 2, 1), padding=(0, 0, 1)), shape=shape)


# Norms, attention, embeddings.


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(4 * 9, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES),
    )  # fmt: skip


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 9, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES),
    )  # fmt: skip


class Block(nn.Module):
    """A pre-norm transformer block; `nn.MultiheadAttention` never calls its `out_proj`."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.norm2 = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Block(8, 2), Pool(), nn.Linear(8, CLASSES))


class QKV(nn.Module):
    """Attention of three Linears on one input, which can share their A."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def attention() -> nn.Module:
    return nn.Sequential(QKV(4), Pool(), nn.Linear(4, CLASSES))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), Pool(), nn.Tanh(), nn.Linear(4, CLASSES))


def language_model() -> nn.Module:
    """A class for each position, without any mixing of positions."""
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class Tied(nn.Module):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


_IMAGE = (2, 5, 5)
_CONVOLUTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "conv": ((3, 3), {"padding": 1}),
    "conv_no_bias": ((3, 3), {"bias": False}),
    "conv_strided": ((3, 3), {"stride": 2, "padding": 1}),
    "conv_dilated": ((3, 2), {"dilation": 2}),
    "conv_grouped": ((6, 3), {"groups": 2, "padding": 1}),
    "conv_depthwise": ((4, 2), {"groups": 4}),
    "conv_rectangular": (
        (4, (3, 2)),
        {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2},
    ),
    "conv_circular": ((3, 3), {"padding": 1, "padding_mode": "circular"}),
    "conv_reflect": ((3, 3), {"padding": (1, 2), "padding_mode": "reflect"}),
    "conv_replicate": ((3, 3), {"padding": 2, "padding_mode": "replicate"}),
    "conv_same": ((3, (3, 2)), {"padding": "same"}),
    "conv_same_circular": (
        (3, 2),
        {"padding": "same", "dilation": 3, "padding_mode": "circular"},
    ),
}

_FACTORED = [
    Case("mlp", mlp, (5,)),
    Case("mlp_no_bias", partial(mlp, bias=False), (5,)),
    Case("deep_linear", deep_linear, (4,), (2,), loss=half_squared_error),
    Case("sequence_linear", deep_linear, (3, 4), (3, 2), loss=half_squared_error, shared="expand"),
    Case("pooled_linear", pooled_linear, (3, 4), (2,), loss=half_squared_error, shared="reduce"),
    Case("sequence_mlp", sequence_mlp, (3, 4), (3,), shared="expand"),
    Case("inplace", inplace, (5,)),
    Case("shared_linear", shared_linear, (5,)),
    Case("shared_conv", shared_conv, (2, 4, 4)),
    Case("checkpointed_plain", partial(Checkpointed, None), (5,)),
    Case("checkpointed_reentrant", partial(Checkpointed, True), (5,)),
    Case("checkpointed_nonreentrant", partial(Checkpointed, False), (5,)),
    Case("conv1d", partial(conv1d, (2, 9)), (2, 9)),
    Case("conv3d", partial(conv3d, (2, 3, 4, 3)), (2, 3, 4, 3)),
    *(
        Case(name, partial(conv2d, _IMAGE, *args, **kwargs), _IMAGE)
        for name, (args, kwargs) in _CONVOLUTIONS.items()
    ),
]
_OTHERS = [
    Case("unused", Unused, (5,)),
    Case("lora", lora, (5,)),
    Case("norms", norms, (2, 4, 4)),
    Case("batch_norm", batch_norm, (2, 4, 4)),
    Case("transformer", transformer, (3, 4), shared="reduce"),
    Case("attention", attention, (3, 4), shared="reduce"),
    Case("embedding", embedding, (3,), vocabulary=6, shared="reduce"),
    Case("language_model", language_model, (3,), (3,), vocabulary=6, shared="expand"),
    Case("tied", Tied, (3,), (3,), vocabulary=CLASSES, shared="expand"),
]
FACTORED: dict[str, Case] = {case.name: case for case in _FACTORED}
ZOO: dict[str, Case] = FACTORED | {case.name: case for case in _OTHERS}


class Attention(nn.Module):
    """q, k and v get one tensor, or copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 3)
        self.one_tensor = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        k, v = (x, x) if self.one_tensor else (x.clone(), x.clone())
        weights = (self.q(x) @ self.k(k).mT).softmax(-1)
        return self.out(weights @ self.v(v)).mean(1)
