"""If a rank does something else than the others, all ranks raise and can continue.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from models import ZOO
from optimizer_cases import make, take
from ranks import agreed, counted, replaced, shard, vector
from torch import Tensor, nn

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC, RankMismatchError
from second_order.distributed import world as worlds
from second_order.distributed.roles import assign_roles
from second_order.optimizers.consistency import fingerprint, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable

    from pool import World

CASE = ZOO["mlp"]
BATCHES = CASE.batches(6, n=12)
AT = 2  # the step before which a rank does something else


HELPED = {"helper_timeout": 20.0}
THREADS = {"inverse_threads": 1}
CHOICES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "KAISA": (2, KAISA, {}),
    "KAISA, f = 1/2": (2, KAISA, {"grad_worker_fraction": 0.5, "factor_exchange": "reduce"}),
    "DPKFAC": (2, DPKFAC, {}),
    "DistKFAC": (2, DistKFAC, {"max_staleness": None, **THREADS}),
    "DistKFAC, stats": (3, DistKFAC, {"stats_workers": 1, **THREADS, **HELPED}),
    "DHO2, row": (2, DHO2, {}),
    "DHO2, column": (2, DHO2, {"layout": "column"}),
    "MRDHO2": (3, MRDHO2, {"num_largest": 2, "epoch_steps": 2, **HELPED}),
}


def freeze(model: nn.Module, optimizer: Any) -> None:
    next(iter(model.parameters())).requires_grad_(False)


def add(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def load(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.saved)


def close(model: nn.Module, optimizer: Any) -> None:
    optimizer.close()


def slower(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def decay(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.25


DEEDS: dict[str, Callable[[nn.Module, Any], None]] = {
    f.__name__: f for f in (freeze, add, load, close, slower, decay)
}


# By option: what a callable returns, and what another does from step `AT` on.
PAIRS = {"newton_scale": (0.5, 0.4)}
FACTORS = {"inv_update_steps": (1, 2), "damping": (0.5, 0.6)}
MORE = {"factor_update_steps": (2, 1), "factor_decay": (0.9, 0.8), "kl_clip": (0.1, 0.2)}


def schedules(name: str) -> dict[str, tuple[Any, Any]]:
    if "DHO2" in name:
        return PAIRS | ({} if name == "MRDHO2" else {"curvature_interval": (2, 1)})
    return FACTORS | (MORE if name == "KAISA" else {})


def stray(last: bool, value: Any, other: Any, step: int) -> Any:
    return other if last and step >= AT else value


def out_of_line(rank: int, world_size: int, name: str, which: list[str]) -> dict[str, str]:
    """What a worker raises, by what the last of the workers does out of line."""
    warnings.simplefilter("ignore")
    _, System, extra_options = CHOICES[name]
    found = {}
    for deed in which:
        torch.manual_seed(0)
        model = CASE.model()
        options: dict[str, Any] = {}
        if deed in schedules(name):
            last = rank == world_size - 1 - name.endswith(("stats", "MRDHO2"))
            options[deed] = partial(stray, last, *schedules(name)[deed])
        params = list(model[:-1].parameters())
        optimizer = make(System, params, model=model, **{"lr": 0.05, **extra_options, **options})
        optimizer.curvature_closure = lambda m=model: CASE.loss(m(BATCHES[0][0]), BATCHES[0][1])
        with contextlib.closing(optimizer):
            if getattr(optimizer, "role", "worker") != "worker":
                optimizer.serve(BATCHES, lambda batch, m=model: CASE.loss(m(batch[0]), batch[1]))
            else:
                found[deed] = raised(rank, model, optimizer, deed)
        check = torch.ones(3)
        dist.all_reduce(check)
        assert check.tolist() == [world_size] * 3
    return found


def raised(rank: int, model: nn.Module, optimizer: Any, deed: str) -> str:
    group = getattr(optimizer, "worker_group", None)
    workers = dist.get_world_size(group)
    for batch in BATCHES[:AT]:
        take(model, optimizer, shard(batch, rank, workers), CASE.loss)
    if deed == "load":
        optimizer.consolidate(to=None)
        optimizer.saved = copy.deepcopy(optimizer.state_dict())
    before = vector(model)
    strays = deed in DEEDS and rank == workers - 1
    error = error_of(model, optimizer, rank, workers, DEEDS[deed] if strays else None)
    assert torch.equal(vector(model), before), "the step was not taken"
    return error


def error_of(model: nn.Module, optimizer: Any, rank: int, ranks: int, deed: Any = None) -> str:
    """What a rank raises that does something, or nothing, and then takes a step."""
    try:
        if deed is not None:
            deed(model, optimizer)
        take(model, optimizer, shard(BATCHES[AT], rank, ranks), CASE.loss)
    except RankMismatchError as error:
        return str(error)
    raise AssertionError("nothing was raised")


ERRORS = {
    "freeze": "0.weight: [7, 5], {}",
    "add": "about to: {}",
    "load": "a checkpoint loaded since the last step: {}",
    "close": "closed: {}",
    "slower": "group 0, lr: {}",
    "decay": "group 0, weight_decay: {}",
}
HOW = {
    "freeze": ("trains", "frozen"),
    "add": ("take a step of", "add a parameter group of"),
    "slower": ("0.05", "0.025"),
    "decay": ("0", "0.25"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_rank_out_of_sync_raises_on_all_ranks(world: World, name: str) -> None:
    """No rank takes the step, and the processes' group is as it was."""
    ranks = CHOICES[name][0]
    values = schedules(name)
    results = world.run(out_of_line, ranks, name, [*DEEDS, *values], timeout=60)
    first, last = [result for result in results if result]
    assert first == last
    for deed, text in first.items():
        here, there = text.split(" rank 1 has [")
        first_value, second_value = values.get(deed, HOW.get(deed, (False, True)))
        template = ERRORS.get(deed, f"{deed}: {{}}")
        if deed == "close" and name == "MRDHO2":  # its workers continue without accelerators
            template = "accelerators at work: {}"
            first_value = 1
            second_value = 0
        if deed == "load" and "the base's state in parts" in text:
            continue  # a load gives DHO2 its whole state, which is named first
        assert template.format(first_value) in here, deed
        assert template.format(second_value) in there, deed


# A corrected run can continue; the same under DDP, and if a rank is absent.


LIMIT = 4.0  # seconds, in which ranks of a loaded machine meet


def missing(rank: int, world_size: int) -> tuple[str, float]:
    """What the others raise, and after how long, where the last rank closes and leaves."""
    dist.barrier()
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=LIMIT))
    model = CASE.model()
    optimizer = make(KAISA, model, process_group=group)
    take(model, optimizer, shard(BATCHES[0], rank, world_size), CASE.loss)
    dist.barrier()
    start = time.monotonic()
    text = ""
    if rank == world_size - 1:
        optimizer.close()
    else:
        text = error_of(model, optimizer, rank, world_size)
    seconds = time.monotonic() - start
    dist.barrier()
    return text, seconds


def test_a_missing_rank_raises_within_the_timeout(world: World) -> None:
    *others, last = world.run(missing, 3)
    assert last[0] == ""
    for rank, (text, seconds) in enumerate(others):
        assert f"rank {rank} is about to take a step of KAISA, and not all of the 3" in text
        assert "Lost contact with the other ranks" in text
        assert seconds < LIMIT + 5.0  # for the load of the machine


def among_others(rank: int, world_size: int) -> list[Tensor]:
    """Optimizers of all ranks and of some, where ranks are in unlike numbers of the user's groups.

    Torch names groups by these numbers.
    """
    some = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    dist.new_group([0, 1, 2])
    trained = []
    for options in (
        {"process_group": some},
        {"grad_worker_fraction": 0.5},
        {"stats_workers": 1},
        {"helper_ranks": 2, "num_largest": 1},
    ):
        if "process_group" in options and rank > 1:
            continue
        System: Any = KAISA
        if "stats_workers" in options or "helper_ranks" in options:
            System = DistKFAC if "stats_workers" in options else MRDHO2
        model = CASE.model()
        with contextlib.closing(make(System, model, lr=0.05, **options)) as optimizer:
            if getattr(optimizer, "role", "worker") == "worker":
                take(model, optimizer, BATCHES[0], CASE.loss)
        trained.append(vector(model))
    return trained[-3:]


def test_the_users_process_groups_do_not_interfere(world: World) -> None:
    results = world.run(among_others, 4, timeout=40)
    agreed([each[:1] for each in results])
    agreed([each[1:2] for each in results[:3]])
    agreed([each[2:] for each in results[:2]])


# The contents of the fingerprint, and its cost.


def steps_of(rank: int, world_size: int) -> list[Any]:
    """Learning rates that differ by rounding; and what the comparison sends in a step."""
    model = CASE.model()
    optimizer = make(KAISA, model)
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15 * rank
    take(model, optimizer, shard(BATCHES[0], rank, world_size), CASE.loss)
    sizes = []
    all_equal = worlds.World.all_equal

    def noted(self: Any, word: Any) -> bool:
        with counted() as counts:
            found = all_equal(self, word)
        sizes.append((dict(+counts), self.group is dist.group.WORLD))
        return found

    optimizer = make(KAISA, CASE.model())
    with replaced(worlds.World, {"all_equal": noted}):
        take(model, optimizer, shard(BATCHES[0], rank, world_size), CASE.loss)
    return sizes


def test_rounding_is_not_a_difference_and_a_step_sends_one_word(world: World) -> None:
    for sizes in world.run(steps_of, 2):
        assert sizes == [({"all_reduce": 1}, False)]


LEAST = -(2**63)
MOST = 2**63 - 1
# By rank, its word; and whether the ranks have the same one.
WORDS: list[tuple[list[int], bool]] = [
    ([7, 7, 7], True),
    ([LEAST, LEAST, LEAST], True),
    ([MOST, MOST, MOST], True),
    ([0, 0, -1], False),
    ([MOST, LEAST, LEAST], False),
    ([LEAST + 1, LEAST, LEAST], False),
]


def compared(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    world = worlds.World()
    own_words = [words[min(rank, 2)] for words, _ in WORDS]
    return [(world.control_world().all_equal(word), world.all_equal(word)) for word in own_words]


@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_detect_different_fingerprints(world: World, world_size: int) -> None:
    expected = [(same, same) for _, same in WORDS]
    assert world.run(compared, world_size) == [expected] * world_size
    assert worlds.World.alone().all_equal(7)


def same_word(rank: int, world_size: int) -> int:
    return fingerprint(("step", 3, 0.1, [None, True, float("nan")]))


def test_a_fingerprint_is_equal_in_every_process(world: World) -> None:
    """Where the hash of a text is not."""
    words = world.run(same_word, 2)
    assert len({*words, same_word(0, 1)}) == 1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([("x", 1.0)], [("x", 1.0 + 1e-9)], None),
        ([("x", 1)], [("x", 1.0)], None),
        ([("x", 2_000_000)], [("x", 2_000_001)], ("x: 2000000", "x: 2000001")),
        ([("x", [float("nan"), 2.0])], [("x", (float("nan"), 2.0))], None),
        ([("x", 1.0)], [("x", 1.001)], ("x: 1.0", "x: 1.001")),
        ([("x", "1")], [("x", 1)], ("x: 1", "x: 1")),
        ([("x", 1), ("y", 2)], [("z", 1), ("y", 3)], ("x: 1", "z: 1")),
        ([("x", 1)], [("x", 1), ("y", 3)], ("nothing more", "y: 3")),
        ([("x", [1, 2])], [("x", [1])], ("x: [1, 2]", "x: [1]")),
    ],
)
def test_the_first_difference_is_reported(a: Any, b: Any, expected: Any) -> None:
    assert first_difference(a, b) == expected


# Groups made of a group.


def limits(rank: int, world_size: int) -> dict[str, Any]:
    """Seconds that collectives may take in groups made of one with 77."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=77))
    world = worlds.World(group)
    roles = assign_roles(world_size, 2, "accelerator")
    with replaced(world, {"backends": {"cuda": "nccl"}}):
        on_device = world.on_cpu()
    groups = {
        "itself": world,
        "of some": world.subgroup([0, 1, 2] if rank < 3 else [3], needs_group=True),
        "aside": world.control_world(),
        "for a device's": on_device,
        "team": roles.role_world(world),
        "patient": roles.role_world(world, 100.0),
        "impatient": roles.role_world(world, 5.0),
        "impatient, aside": roles.role_world(world, 5.0).control_world(),
    }
    seconds = {}
    for name, each in groups.items():
        limit = each.timeout
        seconds[name] = None if limit is None else limit.total_seconds()
    return seconds


def test_groups_inherit_the_timeout_of_their_parent(world: World) -> None:
    for rank, seconds in enumerate(world.run(limits, 4)):
        own = {"impatient": 5.0, "impatient, aside": 5.0} if rank >= 2 else {}
        assert seconds == dict.fromkeys(seconds, 77.0) | own


def on_meta_at_one_rank(rank: int, world_size: int) -> str:
    model = CASE.model()
    optimizer = make(KAISA, model[:-1].parameters(), model=model)
    if rank == 1:
        model[-1].to("meta")
    with pytest.raises(RankMismatchError) as caught:
        optimizer.add_param_group({"params": [*model[-1].parameters()]})
    return str(caught.value)


def test_a_group_on_the_meta_device_of_one_rank_raises_on_all_ranks(world: World) -> None:
    first, second = world.run(on_meta_at_one_rank, 2, timeout=60)
    assert first == second
    assert "refuse a parameter group" in first
    assert "is on the meta device and has no data" in first


def after_destroying(rank: int, world_size: int) -> list[str]:
    """What is raised by the systems whose group is gone."""
    found = []
    for System in (KAISA, DPKFAC, DHO2):
        group = dist.new_group(list(range(world_size)))
        model = CASE.model()
        optimizer = make(System, model, process_group=group)
        take(model, optimizer, shard(BATCHES[0], rank, world_size), CASE.loss)
        dist.destroy_process_group(group)
        before = vector(model)
        for doing in (
            partial(take, model, optimizer, shard(BATCHES[1], rank, world_size), CASE.loss),
            partial(optimizer.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]}),
        ):
            with pytest.raises(RuntimeError) as caught:
                doing()
            found.append(str(caught.value))
        assert torch.equal(vector(model), before)
        optimizer.close()
    return found


def test_a_step_without_the_process_group_raises(world: World) -> None:
    for messages in world.run(after_destroying, 2):
        assert len(messages) == 6
        for message in messages:
            assert (
                "after destroy_process_group(), which has destroyed the group of the 2" in message
            )
            assert "make the optimizer again after init_process_group()" in message
