"""`nn.MultiheadAttention`: its projections against four Linears that compute the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import reference as ref
import torch
from models import CLASSES, Pool
from optimizer_cases import assert_same_factors, each_kronecker, factors, make, take
from reference import cross_entropy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from second_order import KAISA

if TYPE_CHECKING:
    from pool import World

F64 = torch.float64
WIDTH = 4
pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
SHARED = ("all", "keys and values", "nothing")
each_shared = pytest.mark.parametrize("shared", SHARED)


class Packed(nn.Module):
    """Attention between pieces of one sequence, with a class for each, or for all, positions."""

    def __init__(self, shared: str, batch_first: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.shared = shared
        self.batch_first = batch_first
        self.bias = bias
        self.keys = slice(2, None)  # as many as there are queries
        self.first = nn.Linear(3, WIDTH)
        self.attention = self.made()
        self.pool: nn.Module = nn.Identity()
        self.head = nn.Linear(WIDTH, CLASSES)

    def made(self) -> nn.Module:
        return nn.MultiheadAttention(WIDTH, 2, bias=self.bias, batch_first=self.batch_first)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = (k is q, v is k)
        if not self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            k = q if shared[0] else k
            v = k if shared[1] else v
        found: Tensor = self.attention(q, k, v, need_weights=False)[0]
        return found if self.batch_first else found.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        q, k, v = {
            "all": (x, x, x),
            "keys and values": (x[:, :3], memory := x[:, self.keys], memory),
            "nothing": (x[:, :3], x[:, self.keys].clone(), x[:, self.keys].sin()),
        }[self.shared]
        return self.head(self.pool(self.attend(q, k, v)))


class Linears(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        make = partial(nn.Linear, WIDTH, WIDTH, bias=bias)
        self.q = make()
        self.k = make()
        self.v = make()
        self.out_proj = make()


class Separate(Packed):
    """The same of Linears that are called."""

    def made(self) -> nn.Module:
        return Linears(self.bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers: Any = self.attention
        q = layers.q(q)
        k = layers.k(k)
        v = layers.v(v)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        found: Tensor = layers.out_proj(mixed.transpose(1, 2).flatten(2))
        return found


def pair(
    shared: str, batch_first: bool = True, bias: bool = True, pooled: bool = False
) -> tuple[Packed, Separate]:
    """Two models with equal parameters."""
    torch.manual_seed(0)
    packed = Packed(shared, batch_first, bias)
    separate = Separate(shared, bias=bias)
    for model in (packed, separate):
        model.double()
        model.pool = Pool() if pooled else nn.Identity()
    attention_module: Any = packed.attention
    if bias:
        with torch.no_grad():
            attention_module.in_proj_bias.normal_()
            attention_module.out_proj.bias.normal_()
    separate.first.load_state_dict(packed.first.state_dict())
    separate.head.load_state_dict(packed.head.state_dict())
    linears: Any = separate.attention
    linears.out_proj.load_state_dict(attention_module.out_proj.state_dict())
    for i, layer in enumerate((linears.q, linears.k, linears.v)):
        layer.weight.data.copy_(attention_module.in_proj_weight.data.chunk(3)[i])
        if bias:
            layer.bias.data.copy_(attention_module.in_proj_bias.data.chunk(3)[i])
    return packed, separate


def batch_of(model: Packed, n: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, 3, dtype=F64, generator=generator)
    with torch.no_grad():  # nothing that an optimizer of the model would look at
        positions = model(x).shape[1:-1]
    return x, torch.randint(CLASSES, (n, *positions), generator=generator)


def vector(model: Packed) -> Tensor:
    """All parameters, in one order for both models."""
    layers: Any = model.attention
    if isinstance(model, Separate):
        each = [layers.q, layers.k, layers.v]
        found = [torch.cat([layer.weight for layer in each])]
        found += [torch.cat([layer.bias for layer in each])] if model.bias else []
    else:
        found = [layers.in_proj_weight, *([layers.in_proj_bias] if model.bias else [])]
    rest = [*model.first.parameters(), *layers.out_proj.parameters(), *model.head.parameters()]
    return torch.cat([p.detach().flatten() for p in (*found, *rest)])


@each_shared
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_factors_equal_those_of_separate_linears(shared: str, approx: Any) -> None:
    packed, separate = pair(shared, pooled=approx == "reduce")
    packed.keys = separate.keys = slice(1, None)  # four, of three queries
    x, y = batch_of(packed)
    names = [f"attention.{name}" for name in ("q", "k", "v", "out_proj")]
    expected = [
        ref.empirical_factors(separate, x, y, cross_entropy, name, approx) for name in names
    ]
    optimizer = make(KAISA, packed, kfac_approx=approx)
    take(packed, optimizer, (x, y))
    found = factors(optimizer)
    for letter in range(2):
        stacked = torch.cat([each[letter] for each in expected[:3]])
        torch.testing.assert_close(found["attention"][letter], stacked, rtol=1e-10, atol=1e-14)
        out = found["attention.out_proj"][letter]
        torch.testing.assert_close(out, expected[3][letter], rtol=1e-10, atol=1e-14)
    assert found["attention"][0].shape == (3, WIDTH + 1, WIDTH + 1)


@each_kronecker
@each_shared
@pytest.mark.parametrize(
    ("batch_first", "bias", "fisher"),
    [(True, True, "empirical"), (False, False, "categorical"), (False, True, "empirical")],
)
def test_training_equals_that_of_separate_linears(
    System: Any, shared: str, batch_first: bool, bias: bool, fisher: str
) -> None:
    packed, separate = pair(shared, batch_first, bias)
    plain, _ = pair(shared, batch_first, bias)
    models: list[tuple[Packed, Any]] = [
        (packed, make(System, packed, fisher=fisher)),
        (separate, make(System, separate, fisher=fisher)),
        (plain, torch.optim.SGD(plain.parameters(), 0.05)),
    ]
    torch.testing.assert_close(vector(packed), vector(separate), rtol=0, atol=0)
    for seed in range(3):
        for model, optimizer in models:
            take(model, optimizer, batch_of(packed, seed=seed))
    torch.testing.assert_close(vector(packed), vector(separate), rtol=1e-9, atol=1e-12)
    start = WIDTH * WIDTH * 3
    moved = (vector(packed) - vector(plain))[:start]
    assert moved.norm() > 1e-3 * vector(packed)[:start].norm()


def test_padded_keys_and_unbatched_sequences_are_supported() -> None:
    """Masked keys take no part, and the calls of one pass share its terms."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
    x = torch.randn(3, 5, WIDTH, dtype=F64)
    lengths = torch.tensor([5, 3, 4])
    padded = torch.arange(5) >= lengths[:, None]

    def loss_of_batch() -> Tensor:
        out = attention(x, x, x, key_padding_mask=padded, need_weights=False)[0]
        return out[~padded].square().sum()

    def loss_one_by_one() -> Tensor:
        each = [x[i, :n] for i, n in enumerate(lengths.tolist())]
        return sum(attention(t, t, t)[0].square().sum() for t in each)  # type: ignore[return-value]

    found = []
    for loss in (loss_of_batch, loss_one_by_one):
        optimizer = make(KAISA, attention, lr=0.0, loss_reduction="sum")
        loss().backward()
        optimizer.step()
        found.append(factors(optimizer)["(model)"])
        optimizer.close()
        attention.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("reentrant", [True, False])
@each_shared
def test_activation_checkpointing_does_not_change_the_factors(shared: str, reentrant: bool) -> None:
    found = []
    for recomputed in (False, True):
        model, _ = pair(shared)
        if recomputed:
            plain = model.attend
            model.attend = partial(checkpoint, plain, use_reentrant=reentrant)  # type: ignore[method-assign]
        optimizer = make(KAISA, model)
        take(model, optimizer, batch_of(model))
        found.append(factors(optimizer))
    for name, pair_of in found[0].items():
        if name == "attention.out_proj" and not reentrant:
            (row,) = (row for row in optimizer.summary().rows if row.name == name)
            assert "use use_reentrant=True" in row.detail
            continue
        for one, other in zip(pair_of, found[1][name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_an_attention_outside_of_the_compiled_graph_has_the_same_factors() -> None:
    found = []
    for backend in (None, "eager"):
        model, _ = pair("keys and values")
        optimizer = make(KAISA, model)
        run = model
        if backend is not None:
            model.attention.forward = torch.compiler.disable(model.attention.forward)
            run = torch.compile(model, backend=backend)
        take(run, optimizer, batch_of(model))
        found.append(factors(optimizer))
    assert_same_factors(*found)


def factors_after_step(rank: int, ranks: int, sharded: bool) -> dict[str, ref.Factors]:
    model, _ = pair("keys and values")
    batch = batch_of(model)
    if sharded:
        fully_shard(model.attention)
        fully_shard(model)
    optimizer = make(KAISA, model)
    take(model, optimizer, batch)
    return factors(optimizer)


def test_an_attention_that_fully_shard_shards_by_itself_has_the_same_factors(world: World) -> None:
    """FSDP2 shards it again before the hook that looks for its products."""
    (found,) = world.run(factors_after_step, 1, True)
    assert_same_factors(found, factors_after_step(0, 1, False))


def test_subclasses_with_their_own_forward_and_unequal_widths_are_reported() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    unlike = nn.MultiheadAttention(4, 2, kdim=3, vdim=3)
    rows = KAISA(nn.ModuleList([Doubled(4, 2), unlike]), lr=0.1).summary().rows
    details = {row.name: row.detail for row in rows if row.status == "base"}
    assert details["0.in_proj_weight"] == "Doubled overrides MultiheadAttention.forward"
    assert details["1"] == "its queries, keys and values have weights of their own"
