"""Fused experts: their factors against sums over examples, written by hand."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import assert_same_factors, each_kronecker, factors, make
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from second_order import DPKFAC, KAISA, DistKFAC
from second_order.kronecker.experts import Routed, is_experts
from second_order.kronecker.model_blocks import find_blocks

if TYPE_CHECKING:
    from pool import World

F64 = torch.float64
WIDTH = 4
INNER = 3
CLASSES = 3
pytestmark = pytest.mark.filterwarnings("ignore:.*preconditioned; trained by")
KINDS: list[dict[str, Any]] = [
    {},
    {"has_gate": False},
    {"has_bias": True, "is_transposed": True},
    {"has_post_expert_norm": True, "is_transposed": True},
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")


class Experts(nn.Module):
    """Experts as in transformers, one after the other; records the inputs of each."""

    def __init__(
        self,
        experts: int,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
        has_post_expert_norm: bool = False,
    ) -> None:
        super().__init__()
        self.has_gate = has_gate
        self.has_bias = has_bias
        self.is_transposed = is_transposed
        self.has_post_expert_norm = has_post_expert_norm
        self.post_expert_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.act_fn = torch.tanh
        self.first = "gate_up_proj" if has_gate else "up_proj"
        for name, out, width in (
            (self.first, INNER * (1 + has_gate), WIDTH),
            ("down_proj", WIDTH, INNER),
        ):
            size = (width, out) if is_transposed else (out, width)
            setattr(self, name, nn.Parameter(torch.randn(experts, *size)))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(experts, out)))
        self.seen: list[tuple[str, int, Tensor, Tensor]] = []

    def _apply_gate(self, u: Tensor) -> Tensor:
        gate, up = u.chunk(2, -1)
        return self.act_fn(gate) * up

    def product(self, name: str, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        self.seen.append((name, expert, x.detach(), tokens))
        weight = getattr(self, name)[expert]
        y = x @ (weight if self.is_transposed else weight.mT)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.seen.clear()
        found = torch.zeros_like(hidden_states)
        for expert in range(len(self.down_proj)):
            token, slot = torch.where(top_k_index == expert)
            if len(token):
                u = self.product(self.first, expert, hidden_states[token], token)
                a = self._apply_gate(u) if self.has_gate else self.act_fn(u)
                y = self.product("down_proj", expert, a, token)
                y = self.post_expert_norm(y) if self.has_post_expert_norm else y
                found.index_add_(0, token, y * top_k_weights[token, slot, None])
        return found


class Mixture(nn.Module):
    """A class for each token, by two of its experts."""

    def __init__(self, experts: int, checkpointed: bool = False, **kind: Any) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.experts = Experts(experts, **kind)
        self.checkpointed = checkpointed

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = self.experts(torch.tanh(self.first(x)), index, top_k_weights=weights)
        return found

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self.checkpointed:
            mixed = checkpoint(self.mixed, x, index, weights, use_reentrant=False)
        else:
            mixed = self.mixed(x, index, weights)
        return self.head(mixed)


def mixture(experts: int = 4, **kind: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(experts, **kind).double()


def batch(tokens: int, experts: int = 4, seed: int = 0, k: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, dtype=F64, generator=generator)
    weights, index = scores.topk(k)
    x = torch.randn(tokens, 5, dtype=F64, generator=generator)
    return x, index, weights, torch.randint(CLASSES, (tokens,), generator=generator)


def losses(model: nn.Module, *arguments: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(*arguments[:-1]), arguments[-1], reduction="none")


def step(model: nn.Module, optimizer: Any, *arguments: Tensor, mean: bool = True) -> None:
    optimizer.zero_grad()
    value = losses(model, *arguments)
    (value.mean() if mean else value.sum()).backward()
    optimizer.step()


def by_hand(model: Mixture, *arguments: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of each expert, by parameter, from gradients by token."""
    module = model.experts
    n = len(arguments[0])
    names = [name for name, _ in module.named_parameters() if not name.endswith("bias")]
    value = losses(model, *arguments)
    found = {}
    for name in names:
        parameters = [dict(module.named_parameters())[name]]
        if module.has_bias:
            parameters.append(dict(module.named_parameters())[f"{name}_bias"])
        each = []
        for one in value:
            g, *bias = torch.autograd.grad(one, parameters, retain_graph=True)
            g = g.mT if module.is_transposed else g
            each.append(torch.cat([g, *(b.unsqueeze(-1) for b in bias)], -1))
        gradients = torch.stack(each)  # (tokens, experts, out, in)
        experts, out, width = gradients.shape[1:]
        a = gradients.new_zeros(experts, width, width)
        g = gradients.new_zeros(experts, out, out)
        for of, expert, inputs, tokens in module.seen:
            if of == name:
                x = nn.functional.pad(inputs, (0, int(module.has_bias)), value=1.0)
                rows = gradients[tokens, expert]
                d = (rows @ x.unsqueeze(-1)).squeeze(-1) / x.square().sum(-1, keepdim=True)
                a[expert] = x.mT @ x / len(x)
                g[expert] = d.mT @ d / n
        found[f"experts.{name}"] = a, g
    return found


@each_kind
@each_kronecker
def test_each_experts_factors_equal_those_computed_by_hand(System: Any, kind: Any) -> None:
    for mean in (True, False):
        model = mixture(**kind)
        arguments = batch(11)
        reduction = "mean" if mean else "sum"
        expected = by_hand(model, *arguments)
        optimizer = make(System, model, lr=0.0, loss_reduction=reduction)
        step(model, optimizer, *arguments, mean=mean)
        found = factors(optimizer)
        assert_same_factors({name: found[name] for name in expected}, expected)
        optimizer.close()


def test_each_weight_of_experts_is_listed_with_its_own_reason() -> None:
    experts = Experts(2, has_bias=True)
    sizes = {id(p): p.numel() for p in experts.parameters()}
    weight = experts.down_proj
    bias = experts.down_proj_bias

    def rows(owned: Any, excluded: Any = frozenset()) -> Any:
        blocks, left = find_blocks(experts, owned, (), {}, torch.float32, excluded=excluded)
        assert [block.name for block in blocks] == ["gate_up_proj"]
        return [(row.name, row.parameters, row.by_option, row.unexpected) for row in left]

    both = weight.numel() + bias.numel()
    assert rows(sizes, {id(weight)}) == [("down_proj", both, True, False)]
    del sizes[id(weight)]
    assert rows(sizes) == [("down_proj_bias", bias.numel(), False, False)]


def test_experts_whose_output_weight_starts_at_zero_have_finite_factors() -> None:
    """The first G of the input weight is zero, and its A starts with the second step."""
    model = mixture()
    optimizer = make(KAISA, model, lr=0.1)
    nn.init.zeros_(model.experts.down_proj)
    for seed in range(2):
        step(model, optimizer, *batch(11, seed=seed))
    a, g = factors(optimizer)["experts.gate_up_proj"][:2]
    assert a.isfinite().all()
    assert a.any()
    assert g.any()


def test_experts_ignore_sequence_boundaries() -> None:
    """A mean over the tokens of a sequence would multiply G by their number."""
    with pytest.warns(UserWarning, match="experts.down_proj .kfac_approx='reduce' needs") as caught:
        optimizer = make(KAISA, mixture(has_bias=True), lr=0.0, kfac_approx="reduce")
    assert "experts.gate_up_proj (kfac_approx='reduce'" in str(caught[0].message)
    assert [block.name for block in optimizer._curvature.layers.blocks] == ["first", "head"]
    assert {row.name for row in optimizer._curvature.layers.left_to_base} == {
        "experts.gate_up_proj",
        "experts.down_proj",
    }


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    accumulated=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_a_is_the_mean_over_an_experts_own_tokens(
    sizes: list[int], seed: int, accumulated: bool
) -> None:
    model = mixture(6)
    experts = 6
    decay = 0.9
    parts = [batch(n, experts, seed + i) for i, n in enumerate(sizes)]
    wholes = [tuple(map(torch.cat, zip(*parts, strict=True)))] if accumulated else parts
    optimizer = make(KAISA, model, lr=0.0, factor_decay=decay, loss_reduction="sum", damping=0.1)
    if accumulated:
        optimizer.zero_grad()
        for part in parts:
            losses(model, *part).sum().backward()
        optimizer.step()
    else:
        for part in parts:
            step(model, optimizer, *part, mean=False)
    of_steps = [by_hand(model, *whole) for whole in wholes]
    found = factors(optimizer)
    for name in of_steps[0]:
        weights = [decay ** (len(wholes) - 1 - i) for i in range(len(wholes))]
        shares = [
            torch.bincount(whole[1].flatten(), minlength=experts) / len(whole[0]) * weight
            for whole, weight in zip(wholes, weights, strict=True)
        ]
        total = sum(shares).clamp_min(1e-30)
        both = list(zip(weights, shares, of_steps, strict=True))
        a = sum(share[:, None, None] * each[name][0] for _, share, each in both)
        g = sum(weight * each[name][1] for weight, _, each in both)
        torch.testing.assert_close(found[name][0], a / total[:, None, None])
        torch.testing.assert_close(found[name][1], g / sum(weights))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_tokens_without_a_loss_are_not_examples() -> None:
    x, index, weights, y = batch(9)
    alone = mixture()
    padded = mixture()
    fewer = [t[:6] for t in (x, index, weights, y)]
    ignored = y.index_fill(0, torch.arange(6, 9), -100)
    optimizers = [make(KAISA, model, lr=0.0) for model in (alone, padded)]
    nn.functional.cross_entropy(alone(*fewer[:3]), fewer[3]).backward()
    nn.functional.cross_entropy(padded(x, index, weights), ignored).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_factors(factors(optimizers[1]), factors(optimizers[0]))


def test_activation_checkpointing_of_experts_keeps_the_factors() -> None:
    found = []
    arguments = batch(7)
    for checkpointed in (False, True):
        model = mixture(checkpointed=checkpointed)
        optimizer = make(KAISA, model, lr=0.0)
        step(model, optimizer, *arguments)
        found.append(factors(optimizer))
    assert_same_factors(*found)


@pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
@pytest.mark.parametrize("caught", [True, False])
def test_experts_with_another_forward_fall_back_to_the_base(caught: bool) -> None:
    model = mixture()
    arguments = batch(9)
    if not caught:  # the module's forward uses another gate than its attribute
        model.experts._apply_gate = lambda u: Experts._apply_gate(model.experts, 2 * u)
        model.experts.register_forward_hook(lambda module, args, output: 2 * output)
    optimizer = make(KAISA, model, lr=0.0)
    step(model, optimizer, *arguments)
    optimizer.refresh() if hasattr(optimizer, "refresh") else step(model, optimizer, *arguments)
    found = {b.name: b.unverified for b in optimizer._curvature.layers.blocks}
    assert found["experts.gate_up_proj"] is not caught
    assert not found["first"]


class Router(nn.Module):
    """A router as transformers has them, whose logits are used before they are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.hidden_dim = WIDTH
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.mT
        return logits, *logits.softmax(-1).topk(2)


class RoutedMixture(Mixture):
    def __init__(self) -> None:
        super().__init__(4)
        self.gate = Router()

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        _, weights, index = self.gate(hidden)
        return self.head(self.experts(hidden, index, weights))


@pytest.mark.filterwarnings("ignore:no statistics arrived for")
def test_experts_outside_of_the_compiled_graph_have_the_same_factors() -> None:
    found = []
    arguments = batch(9)
    for compiled, outside in ((False, False), (True, True), (True, False)):
        torch.manual_seed(0)
        model = RoutedMixture().double()
        hidden = {model.experts, model.gate}
        optimizer = make(KAISA, model, lr=0.0)
        run = model
        for module in hidden if outside else ():
            module.forward = torch.compiler.disable(module.forward)
        if compiled:
            run = torch.compile(model, backend="eager")
        step(run, optimizer, *arguments)
        found.append(factors(optimizer))
        missed = optimizer._curvature.layers.capture.missed
        assert outside or not compiled or all("torch.compile" in missed[m] for m in hidden)
    assert "gate" in found[0]
    assert_same_factors(*found[:2])


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_all_implementations_of_transformers_experts_train_equally(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    sizes: dict[str, Any] = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    sizes |= {"intermediate_size": 12, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    sizes |= {"shared_expert_intermediate_size": 4, "first_k_dense_replace": 1}
    sizes |= dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
    sizes |= {"n_group": 2, "topk_group": 1, "kv_lora_rank": 4, "q_lora_rank": 4}
    sizes |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    x = torch.randint(23, (4, 6), generator=torch.Generator().manual_seed(0))
    found: list[Any] = []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        config._experts_implementation = implementation
        model = getattr(transformers, f"{name}ForCausalLM")(config).train()
        for key, p in model.named_parameters():
            if key.endswith(("gate.weight", "router.weight")):
                nn.init.normal_(p)  # else each token goes to the first experts
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*trained by AdamW alone.*norm layers")
            optimizer = KAISA(model, lr=1e-2, base=torch.optim.AdamW, factor_update_steps=1)
            values = []
            for _ in range(4):
                optimizer.zero_grad()
                value = model(input_ids=x, labels=x).loss
                value.backward()
                optimizer.step()
                values.append(value.item())
                if len(values) == 1:  # later, rounding makes them differ
                    of_experts = {k: v for k, v in factors(optimizer).items() if "mlp.experts" in k}
        assert values[-1] < values[0] - 0.2
        covered = sum(block.size for block in optimizer._curvature.layers.blocks)
        norms = sum(p.numel() for key, p in model.named_parameters() if p.dim() == 1)
        assert covered >= sum(map(torch.numel, model.parameters())) - norms
        assert not any(b.unverified for b in optimizer._curvature.layers.blocks)
        found.append(of_experts)
    assert found[0]
    for other in found[1:]:
        assert_same_factors(other, found[0], rtol=1e-3)


def separate_inputs(seed: int) -> tuple[Tensor, ...]:
    """A batch whose experts have tokens of some ranks alone; the last has none in most steps."""
    x, _, weights, y = batch(12, 6, seed)
    first = torch.arange(12) // 3
    index = torch.stack([first, first + 1], 1)
    index[0, 1] = 5 if seed == 2 else 1
    return x, index, weights, y


Trained = tuple[list[Tensor], dict[str, Any], Any]


def trained(
    rank: int,
    ranks: int,
    System: Any,
    options: dict[str, Any],
    steps: range = range(4),
    saved: Any = None,
) -> Trained:
    """Parameters, factors and a checkpoint after some steps, by each rank's share of the tokens.

    DPKFAC's ranks have all tokens each.
    """
    model = mixture(6, has_bias=True)
    options = dict(options)
    if options.pop("sharded", False):
        fully_shard(model.experts)
        fully_shard(model)
    optimizer = make(System, model, **options)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for seed in steps:
        whole = separate_inputs(seed)
        own_part = whole if System is DPKFAC else (t.chunk(ranks)[rank] for t in whole)
        step(model, optimizer, *own_part)
    layers = optimizer.curvature(dtype=F64, gather=True)
    found = {name: tuple(each.factors.values()) for name, each in layers.items()}
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    after = [p.detach().clone() for p in whole]
    optimizer.consolidate(to=None)
    return after, found, (model.state_dict(), optimizer.state_dict())


def assert_same_training(found: Trained, expected: Trained) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    assert_same_factors(found[1], expected[1])


INVERSE = {"solver": "inverse", "relative_damping": True, "kl_clip": 0.01}
each_way = pytest.mark.parametrize(
    ("System", "options"),
    [
        (KAISA, {}),
        (KAISA, {"factor_exchange": "pipelined"}),
        (KAISA, {"factor_exchange": "reduce", "colocate_factors": False, **INVERSE}),
        (DPKFAC, INVERSE),
        (DistKFAC, INVERSE),
        (DistKFAC, {"max_staleness": 2, "deterministic": True}),
    ],
)


@each_way
def test_many_processes_train_experts_like_one(
    world: World, System: Any, options: dict[str, Any]
) -> None:
    alone = trained(0, 1, System, options)
    for each in world.run(trained, 3, System, options):
        assert_same_training(each, alone)


def test_sharded_experts_train_like_one_process(world: World) -> None:
    alone = trained(0, 1, KAISA, {})
    for each in world.run(trained, 2, KAISA, {"sharded": True}):
        assert_same_training(each, alone)


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_experts_resumes_on_other_processes(
    world: World, System: Any, before: int, after: int
) -> None:
    """An expert gets its first tokens later."""
    options = {**INVERSE, **({"factor_exchange": "reduce"} if System is KAISA else {})}
    saved = world.run(trained, before, System, options, range(2))[0][2]
    whole = trained(0, 1, System, options)
    for each in world.run(trained, after, System, options, range(2, 4), saved):
        assert_same_training(each, whole)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_rows_are_found_without_a_backward_pass() -> None:
    model = mixture(has_bias=True)
    (x, index, weights, _) = batch(9)
    mask = torch.arange(9) % 3 > 0
    calls: list[Any] = []
    model.experts.register_forward_hook(
        lambda module, args, kwargs, output: calls.append(Routed.from_call(args, kwargs)),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(x, index, weights)
        xs = calls[0].products(model.experts, mask).inputs
    assert is_experts(model.experts)
    assert not is_experts(model.head)
    assert not is_experts(torch.jit.script(nn.Linear(2, 2)))
    tokens = xs.tokens.split(xs.counts)
    for name, expert, rows, of in model.experts.seen:
        chosen = mask[of]
        torch.testing.assert_close(xs.by_weight[name].split(xs.counts)[expert], rows[chosen])
        assert torch.equal(tokens[expert], of[chosen])
    assert Routed.from_call((x,), {}) is None
    assert Routed.from_call((x, weights), {"top_k_weights": weights}) is None
