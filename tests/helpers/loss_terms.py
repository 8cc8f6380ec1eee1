"""Models and batches of tests about rows and loss terms: padding, prompts, hinges, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

F64 = torch.float64
B = 6
T = 5
WIDTH = 4
CLASSES = 3


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)
    )


class Experts(nn.Module):
    """Linears, each of which is called with the rows that are sent to it, or with all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        rows = h.flatten(0, -2)
        sent = torch.arange(len(rows), device=x.device) % 3 == 0
        out = torch.zeros_like(rows)
        for which, expert in zip((sent, ~sent), self.experts, strict=True):
            index = which.nonzero().squeeze(1)
            out = out.index_add(0, index, torch.tanh(expert(rows[index])))
        return self.head(out.view(h.shape))


class Causal(nn.Module):
    """Tokens that attend to those before them, and not to padding."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(4, CLASSES)
        self.flat = flat

    def forward(self, x: Tensor, eager: bool = False) -> Tensor:
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        if eager:
            scores = q @ k.mT / WIDTH**0.5
            mask = torch.ones(x.shape[1], x.shape[1]).tril() == 0
            weights = (scores.masked_fill(mask, -torch.inf) - scores.detach().amax()).exp()
            mixed = (weights / weights.sum(-1, keepdim=True)) @ v  # zeros are rounding here
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.relu(self.inner(x + mixed))
        return self.head(hidden.flatten(0, 1) if self.flat else hidden)


def labels(padded: int = 0, prompt: int = 0) -> Tensor:
    y = torch.arange(B * T).view(B, T) % CLASSES
    y[: B // 2, T - padded :] = -100
    y[:, :prompt] = -100
    return y


class Attention(nn.Module):
    """Tokens of a table that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table((x.abs().sum(-1) * 10).long() % 7)
        out: Tensor = self.head(h + self.attention(h, h, h, need_weights=False)[0])
        return out
