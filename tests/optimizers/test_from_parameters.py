"""Optimizers made of parameters: the model is found, and trains as if it had been given."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from fsdp_training import fsdp, go_on, narrow, shares
from models import ZOO
from optimizer_cases import KRONECKER, each_of_five, make, same, take
from ranks import agreed, follow, vector
from reference import cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from second_order import DHO2, KAISA, MRDHO2, RankMismatchError, SecondOrderWarning
from second_order.optimizers import base
from second_order.optimizers.find_model import find_model

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]


def found(params: Any) -> Any:
    """The module that parameters are found to belong to."""
    result = find_model(list(params))
    return None if result is None else result.module


def trained(System: Any, case: Any, by_parameters: bool, steps: int = 3) -> nn.Module:
    """A model of a case after some steps."""
    model = case.model()
    options = {"num_largest": 1, "num_smallest": 0} if System in (DHO2, MRDHO2) else {}
    optimizer = make(System, model.parameters() if by_parameters else model, **options)
    for batch in case.batches(steps):
        with torch.random.fork_rng():  # dropout
            take(model, optimizer, batch, case.loss)
    return model


@pytest.mark.parametrize("case", ZOO.values(), ids=str)
def test_every_model_is_found_from_its_parameters(case: Any) -> None:
    assert same(trained(KAISA, case, True), trained(KAISA, case, False))


@each_of_five
@pytest.mark.parametrize("name", ["mlp", "shared_linear"])
def test_every_optimizer_finds_the_model_from_its_parameters(System: Any, name: str) -> None:
    case = ZOO[name]
    assert same(trained(System, case, True), trained(System, case, False))
    assert not same(trained(System, case, True), case.model())


def frozen_body(model: nn.Module) -> Any:
    model[:3].requires_grad_(False)
    return [p for p in model.parameters() if p.requires_grad]


def part(model: nn.Module) -> Any:
    return [{"params": model[2:].parameters()}]


@each_of_five
@pytest.mark.parametrize("choose", [frozen_body, part])
def test_the_parameters_of_a_submodule_train_as_with_the_model_passed(
    System: Any, choose: Any
) -> None:
    """An average of the weights exists at the same time."""
    model = MLP.model()
    twin = MLP.model()
    average = copy.deepcopy(model)
    optimizer = make(System, choose(model))
    expected = make(System, choose(twin), model=twin)
    for batch in MLP.batches(3):
        take(model, optimizer, batch)
        take(twin, expected, batch)
    assert same(model, twin)
    assert same(model[:2], average[:2])
    assert not same(model, average)


@each_of_five
def test_parameters_of_an_actor_and_a_critic_find_both_modules(System: Any) -> None:
    pairs = [[MLP.model(seed=0), MLP.model(seed=1)] for _ in range(2)]
    params = [p for each in pairs[0] for p in each.parameters()]
    optimizers = [make(System, params), make(System, nn.ModuleList(pairs[1]))]
    for pair, optimizer in zip(pairs, optimizers, strict=True):
        both = Both(*pair)
        for batch in MLP.batches(3):
            take(both, optimizer, batch)
    assert same(nn.ModuleList(pairs[0]), nn.ModuleList(pairs[1]))


class Both:
    """Two models that are in no module together, and whose outputs are added."""

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        self.actor = actor
        self.critic = critic

    def __call__(self, x: Tensor) -> Tensor:
        return self.actor(x) + self.critic(x)


# ------------------------------------------------------------------------ how parameters are given


def split(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model[:2].parameters()}, {"params": list(model[2:].parameters())}]


ARGUMENTS = {
    "iterator": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
    "names": lambda model: model.named_parameters(),
    "groups": split,
    "generator of groups": lambda model: iter(split(model)),
    "named groups": lambda model: [{"params": model.named_parameters()}],
    "reversed": lambda model: reversed(list(model.parameters())),
    "compiled": lambda model: torch.compile(model, backend="eager").parameters(),
}


@pytest.mark.parametrize("how", ARGUMENTS)
def test_parameters_can_be_passed_as_to_any_torch_optimizer(how: str) -> None:
    model = MLP.model()
    twin = MLP.model()
    optimizer = make(KAISA, ARGUMENTS[how](model))
    assert optimizer.training.model is model
    expected = make(KAISA, twin)
    for batch in MLP.batches(3):
        take(model, optimizer, batch)
        take(twin, expected, batch)
    assert same(model, twin)


@each_of_five
def test_the_learning_rate_can_be_the_second_positional_argument(System: Any) -> None:
    model = MLP.model()
    for argument in (model, model.parameters()):
        assert System(argument, 0.25).param_groups[0]["lr"] == 0.25
    named = System(params=model.parameters(), lr=0.25)  # as configuration files have it
    assert named.training.model is model


@each_of_five
def test_groups_with_learning_rates_need_no_lr_argument(System: Any) -> None:
    model = MLP.model()
    groups = [{**group, "lr": lr} for group, lr in zip(split(model), (0.1, 0.2), strict=True)]
    optimizer = System(groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for wrong in (model, model.parameters(), [groups[0], {"params": [*model[2:].parameters()]}]):
        with pytest.raises(TypeError, match=rf"{System.__name__} needs a learning rate: write"):
            System(wrong)
    with pytest.raises(ValueError, match="lr=nan is outside"):
        System([{"params": [*model.parameters()], "lr": float("nan")}])


@each_of_five
def test_a_frozen_model_raises_with_requires_grad_as_remedy(System: Any) -> None:
    model = MLP.model().requires_grad_(False)
    trains = [p for p in model.parameters() if p.requires_grad]
    for argument in (model, trains, model.parameters(), [{"params": model.parameters()}]):
        with pytest.raises(ValueError, match="requires_grad is False for all of them"):
            System(argument, lr=0.1)
    with pytest.raises(ValueError, match=r"a parameter group has no 'params', only \['lr'\]"):
        System([{"lr": 0.1}])


@each_of_five
def test_lists_of_models_raise_without_printing_the_models(System: Any) -> None:
    models = [MLP.model(), ZOO["conv"].model()]
    for wrong in (models, {"actor": models[0]}, {"params": models[0]}):
        with pytest.raises(TypeError, match=r"nn\.ModuleList") as error:
            make(System, wrong)
        with pytest.raises(TypeError, match=r"model=.* is not .*nn\.ModuleList") as other:
            make(System, models[0].parameters(), model=wrong)
        assert "Linear" not in f"{error.value}{other.value}"
        assert "\n" not in f"{error.value}{other.value}"


# --------------------------------------------------------------------------- which module is found


class Holder(nn.Module):
    """As a LightningModule, or any module that keeps a network as an attribute."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_the_smallest_module_with_all_parameters_is_found() -> None:
    model = MLP.model()
    other = MLP.model()
    around: list[Any] = [Holder(net=model), nn.Sequential(model, other), nn.DataParallel(model)]
    around += [torch.compile(model, backend="eager"), nn.ModuleList([model])]
    assert found(model.parameters()) is model
    assert found(model[2].parameters()) is model[2]
    assert found([*model.parameters(), *other.parameters()]) is around[1]


def test_copies_are_not_mistaken_for_the_model() -> None:
    """Deep ones have other parameters; lists, exports and traces hold the same ones."""
    model = MLP.model()
    batch = MLP.batch()
    twins: list[Any] = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)]
    with torch.no_grad():
        twins.append(torch.export.export(model, (batch[0],)).module())
        twins.append(torch.fx.symbolic_trace(model))
    penalty = Holder()  # of a loss: it has them all in one module
    for i, p in enumerate(model.parameters()):
        penalty.register_parameter(str(i), p)
    twins += [nn.ParameterList(model.parameters()), copy.copy(model), penalty]
    optimizer = make(KAISA, model.parameters())
    take(model, optimizer, batch)
    assert [row.status for row in optimizer.summary().rows] == ["preconditioned"] * 3
    ema = Holder(net=model, ema=copy.deepcopy(model).requires_grad_(False))
    rows = make(KAISA, model.parameters()).summary().rows
    assert [row.parameters for row in rows] == [row.parameters for row in optimizer.summary().rows]
    del ema


def test_either_of_two_models_with_the_same_parameters_can_run() -> None:
    batches = MLP.batches(3)
    for runs in (0, 1):
        models = [MLP.model(), MLP.model()]
        models[1].load_state_dict(models[0].state_dict(keep_vars=True), assign=True)
        assert models[1][0].weight is models[0][0].weight
        optimizer = make(KAISA, models[0].parameters())
        twin = MLP.model()
        expected = make(KAISA, twin)
        for batch in batches:
            take(models[runs], optimizer, batch)
            take(twin, expected, batch)
        assert same(models[0], twin)


def test_a_tied_weight_belongs_to_the_model_with_all_of_its_owners() -> None:
    body = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    head = nn.Linear(3, 5, bias=False)
    head.weight = body[0].weight
    model = Holder(body=body, head=head)
    assert found(model.parameters()) is model


def test_unrelated_modules_are_found_in_the_order_of_their_parameters() -> None:
    actor = MLP.model()
    critic = ZOO["conv"].model()
    trunk = nn.Linear(5, 4)
    keeper = Holder(net=critic)
    params = [*critic.parameters(), *actor.parameters()]
    for _ in range(2):  # the list of the first search is not taken for a model of the user's
        module = found(params)
        assert list(module) == [critic, actor]
        assert isinstance(module, nn.ModuleList)
    assert found(critic.parameters()) is critic
    sharing = [nn.Sequential(trunk, nn.Linear(4, 1)), nn.Sequential(trunk, nn.Linear(4, 2))]
    first, second = found(p for each in sharing for p in each.parameters())
    assert first is sharing[0]
    assert second is sharing[1]
    del keeper


def test_frozen_parts_of_the_network_are_part_of_the_model() -> None:
    """So that names, and the parameters that processes share, are those of the whole model."""
    model = MLP.model()
    model[:3].requires_grad_(False)
    trains = [p for p in model.parameters() if p.requires_grad]
    wrapped = Holder(net=model)
    assert found(trains) is model
    model[0].requires_grad_(True)  # this one trains elsewhere
    assert found(trains) is model[4]
    del wrapped


def test_containers_without_a_forward_are_not_chosen() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    assert found(layers.parameters()) is layers
    model = Holder(layers=layers)
    assert found(layers.parameters()) is model


def test_unusual_objects_do_not_stop_the_search() -> None:
    """A module that is not one yet, an object that lies about its class, a class without a hash."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            """Without that of `nn.Module`."""

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("not bound to anything")

    class Meta(type):
        __hash__ = None  # type: ignore[assignment]

    class Odd(metaclass=Meta):
        pass

    odd = [Empty(), Proxy(), Odd()]
    model = MLP.model()
    assert found(model.parameters()) is model
    del odd


def test_a_parametrized_layer_is_found() -> None:
    layer = nn.Linear(3, 3, bias=False)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert found(layer.parameters()) is layer


@pytest.mark.parametrize("System", KRONECKER)
def test_parameters_outside_of_modules_fall_back_with_a_warning(System: Any) -> None:
    model = MLP.model()
    scale = nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
    groups = [{"params": model.parameters()}, {"params": scale}]
    with pytest.warns(SecondOrderWarning, match=r"1 of 7 .*of shape \(2, 5\)"):
        optimizer = make(System, groups)
    with pytest.warns(SecondOrderWarning, match="'temperature' of shape"):
        make(System, [*model.named_parameters(), ("temperature", scale)])
    scale.grad = torch.ones_like(scale)
    optimizer.step()
    torch.testing.assert_close(scale, torch.full_like(scale, 1 - 0.05))
    with pytest.warns(SecondOrderWarning, match=r"1 of 1 parameters belong to no module .*model="):
        alone = make(System, [scale], base=torch.optim.Adam)
    assert not alone.training.owns_params
    alone.step()
    head = make(System, model[4].parameters())
    message = r"2 of 2 parameters are not in the model, a Linear, .*model="
    with pytest.warns(SecondOrderWarning, match=message):
        head.add_param_group({"params": model[2].parameters()})


def test_dho2_needs_no_module() -> None:
    scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for System in (DHO2, MRDHO2):
        assert not make(System, [scale]).training.owns_params


def test_a_model_that_is_passed_is_used_without_a_search() -> None:
    model = MLP.model()
    wrapped = Holder(net=model)
    with patch.object(base, "find_model", side_effect=AssertionError):
        make(KAISA, model)
        optimizer = make(KAISA, model.parameters(), model=wrapped)
    assert optimizer.training.model is wrapped


def test_objects_around_the_model_are_freed() -> None:
    """Nor are modules that are garbage already taken for parts of the network."""
    model = MLP.model()
    wrapped = Holder(net=model, other=nn.Linear(2, 2))
    optimizer = make(KAISA, model.parameters())
    # type: ignore[assignment]
    gone = weakref.ref(wrapped)
    wrapped = None
    gc.collect()
    assert gone() is None
    assert optimizer.training.model is model
    garbage: Any = Holder(net=model, judge=nn.Linear(2, 2).requires_grad_(False))
    garbage.cycle = [garbage]
    del garbage
    assert found(model.parameters()) is model


def test_the_sampled_fisher_needs_the_whole_model() -> None:
    model = MLP.model()
    agents = nn.ModuleList([model, MLP.model()])  # this one has no outputs
    assert make(KAISA, model.parameters(), fisher="categorical").training.model is model
    del agents
    wrapped = Holder(net=model)
    with pytest.raises(ValueError, match=r"Sequential inside a Holder, .*model=model"):
        make(KAISA, model.parameters(), fisher="categorical")
    make(KAISA, model.parameters(), model=model, fisher="categorical")
    del wrapped


class Llama(nn.Module):
    """As many modules and parameters as a language model of a billion of them."""

    def __init__(self, width: int = 2048, layers: int = 16, vocabulary: int = 128_256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            sizes = {"q": (width, width), "k": (width, 512), "v": (width, 512), "o": (width, width)}
            sizes |= {"up": (width, 8192), "gate": (width, 8192), "down": (8192, width)}
            parts = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
            self.layers.append(nn.ModuleDict({**parts, "norm": nn.LayerNorm(width)}))


def test_large_models_are_found_in_a_second() -> None:
    with torch.device("meta"):
        model = Holder(net=Llama())
    params = list(model.parameters())
    assert sum(p.numel() for p in params) > 1e9
    begin = time.process_time()
    module = found(params)
    assert time.process_time() - begin < 1.0
    assert module is model.net


# ----------------------------------------------------------------------------------- on many ranks


def averaged(rank: int, world_size: int) -> list[list[Tensor]]:
    """Trajectories by models and by parameters: plain, under DDP, with and without the wrapper."""
    results = []
    for wraps in (False, True):
        for by_parameters in (False, True):
            torch.manual_seed(rank)  # all ranks get the first rank's parameters
            model: nn.Module = MLP.build().double()
            outer = DistributedDataParallel(model) if wraps else model
            optimizer = make(KAISA, outer.parameters() if by_parameters else outer)
            assert optimizer.training.model is model
            assert optimizer.training.under_ddp is wraps
            assert optimizer.training.averages_gradients is not wraps
            results.append(follow(rank, world_size, outer, optimizer, MLP, MLP.batches(3)))
    cycle: list[Any] = [outer]
    cycle.append(cycle)
    del outer, optimizer, cycle
    lone = make(KAISA, model.parameters())  # the wrapper is garbage that is not collected yet
    assert lone.training.averages_gradients
    return results


def frozen_and_stray(rank: int, world_size: int) -> list[Tensor]:
    """What ranks begin with whose seeds are not the same."""
    torch.manual_seed(rank)
    model = MLP.build().double()
    stray = nn.Parameter(torch.randn(2, dtype=torch.float64))
    model[0].requires_grad_(False)
    make(KAISA, [*model[2:].parameters(), stray])
    return [vector(model), stray.detach()]


def sharded(rank: int, world_size: int) -> list[list[Tensor]]:
    """Trajectories under FSDP2, by the model and by parameters."""
    results = []
    for how in ("model", "parameters", "after a forward"):
        model = fsdp(narrow(), "root")
        params = list(model.parameters())
        data = shares(rank, world_size)
        if how == "after a forward":  # the root has whole parameters then
            model(data[0][0])
        optimizer = make(KAISA, model if how == "model" else params)
        assert optimizer.training.model is model
        results.append(go_on(model, optimizer, data))
    assert make(KAISA, model.middle[0].parameters()).training.model is model
    return results


def uneven(rank: int, world_size: int) -> list[str]:
    """The errors of optimizers whose model is in another module on the first rank alone."""
    model = MLP.model()
    around: list[tuple[Any, dict[str, Any]]] = [
        (lambda: Holder(net=model, judge=nn.Linear(2, 2).requires_grad_(False)), {}),
        (lambda: nn.Sequential(model, nn.Tanh()), {"fisher": "categorical"}),
    ]
    messages = []
    for build, options in around:
        wrapped = build() if rank == 0 else None
        with pytest.raises(RankMismatchError) as error:
            make(KAISA, model.parameters(), **options)
        messages.append(str(error.value))
        del wrapped
    return messages


def test_parameters_of_a_ddp_model_find_the_wrapped_model(world: World) -> None:
    ranks = world.run(averaged, 2)
    plain, by_parameters, wrapped, wrapped_by_parameters = (
        agreed([rank[i] for rank in ranks]) for i in range(4)
    )
    assert all(map(torch.equal, plain, by_parameters))
    assert all(map(torch.equal, wrapped, wrapped_by_parameters))


def test_processes_start_with_equal_parameters_and_unowned_parameters(world: World) -> None:
    agreed(world.run(frozen_and_stray, 2))


def test_different_modules_on_ranks_raise_on_all_ranks(world: World) -> None:
    for first, second in world.run(uneven, 2):
        assert first.endswith("if only some ranks have a module that contains it, pass model=")
        assert "[module around the model: Sequential]" in second


def test_parameters_of_a_sharded_model_find_the_model(world: World) -> None:
    ranks = world.run(sharded, 2)
    expected, *others = (agreed([rank[i] for rank in ranks]) for i in range(3))
    for other in others:
        assert all(map(torch.equal, expected, other))


def test_parameters_of_a_compiled_model_find_the_model() -> None:
    results = []
    for by_parameters in (False, True):
        model = MLP.model()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = make(KAISA, compiled.parameters() if by_parameters else compiled)
        for x, y in MLP.batches(3):
            optimizer.zero_grad()
            cross_entropy(compiled(x), y).backward()
            optimizer.step()
        results.append(model)
        torch.compiler.reset()
    assert same(*results)
