"""A resumed run equals the uninterrupted run, bit for bit: parameters and the next checkpoint."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from combinations import fractional_product
from optimizer_cases import EXACT, noted
from placement_training import written
from ranks import agreed, shard, vector
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from second_order import DPKFAC, KAISA, CheckpointError, DistKFAC, SecondOrderWarning, TraceRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")

STEPS = 10
SAVES = (1, 4, 5, 7)
"""Numbers of steps taken. By interval, refreshes are at 0, 4 and 8: just after one, before one,
while DistKFAC's threads solve, and several steps after."""

BY_INTERVAL: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4}
ON_THREADS: dict[str, Any] = {"deterministic": True, "max_staleness": 2}
BASES: dict[str, dict[str, Any]] = {
    "SGD": {"base": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
    "AdamW": {"base": torch.optim.AdamW, "lr": 0.01},
}


@dataclass(frozen=True)
class Run:
    """How a run is made: the system, its base and its options."""

    System: Any
    base: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.System.__name__} over {self.base}, {next(iter(self.options), 'default')}"

    def make(self, model: nn.Module, **options: Any) -> tuple[Any, Any]:
        """An optimizer on default settings, and a schedule of its learning rate."""
        threads = ON_THREADS if self.System is DistKFAC else {}
        chosen = {**EXACT, **threads, **BASES[self.base], **self.options, **options}
        optimizer = self.System(model, **chosen)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)


RUNS = [
    Run(System, base, options)
    for System in (KAISA, DPKFAC, DistKFAC)
    for base in BASES
    for options in ({}, BY_INTERVAL)
]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.LayerNorm(8)]
    for _ in range(2):
        layers += [nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, 12, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (STEPS, 12), generator=generator)
    return list(zip(x, y, strict=True))


BATCHES = batches()


def take(model: nn.Module, optimizer: Any, scheduler: Any, start: int, stop: int) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for batch in BATCHES[start:stop]:
        x, y = shard(batch, rank, size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()


def saved(model: nn.Module, optimizer: Any, scheduler: Any, to: int | None = 0) -> bytes:
    """A checkpoint; a rank that does not save has no optimizer in it."""
    optimizer.consolidate(to=to)
    here = to is None or not dist.is_initialized() or dist.get_rank() == to
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict() if here else None,
        "scheduler": scheduler.state_dict(),
    }
    return written(state)


def from_rank_0(data: bytes) -> bytes:
    """The checkpoint of the only rank that has saved all of it."""
    everywhere: list[Any] = [data]
    if dist.is_initialized():
        everywhere *= dist.get_world_size()
        dist.all_gather_object(everywhere, data)
    return bytes(everywhere[0])


def resumed(run: Run, data: bytes, **options: Any) -> tuple[nn.Module, Any, Any]:
    state = torch.load(io.BytesIO(data), weights_only=True)
    model = network(seed=5)
    optimizer, scheduler = run.make(model, **options)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return model, optimizer, scheduler


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places at which two states differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [each for key in a for each in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [each for i, pair in pairs for each in differences(*pair, f"{where}/{i}")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    else:
        same = bool(a == b)
    return [] if same else [where]


def unlike_after_resuming(run: Run, saves: Sequence[int] = SAVES) -> list[str]:
    """What differs between a run and those that resume it, at any of the saves."""
    model = network()
    optimizer, scheduler = run.make(model)
    start = 0
    checkpoints = dict[int, bytes]()
    for step in saves:
        take(model, optimizer, scheduler, start, step)
        checkpoints[step] = saved(model, optimizer, scheduler)
        start = step
    take(model, optimizer, scheduler, start, STEPS)
    end = torch.load(io.BytesIO(saved(model, optimizer, scheduler, to=None)))
    optimizer.close()

    found: list[str] = []
    for step, data in checkpoints.items():
        model, optimizer, scheduler = resumed(run, from_rank_0(data))
        take(model, optimizer, scheduler, step, STEPS)
        again = torch.load(io.BytesIO(saved(model, optimizer, scheduler, to=None)))
        found += [f"{step}: {each}" for each in differences(end, again)]
        optimizer.close()
    return found


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_resumed_run_equals_the_run(run: Run) -> None:
    assert unlike_after_resuming(run) == []


@pytest.mark.parametrize(
    "options",
    [
        {"solver": "eigen", "grafting": "none"},
        {"inv_update_steps": TraceRule(0.3, 0.1, every=2)},
        {"precondition_norms": True, "fisher": "categorical", **BY_INTERVAL},
        {"unsupported_layers": "gradient_factors", "skip_layers": ["5"]},
        {"factor_dtype": torch.bfloat16, **BY_INTERVAL},
        {"factor_dtype": torch.float32, "factor_update_steps": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_resuming_is_exact_for_every_kind_of_inverse(options: dict[str, Any]) -> None:
    assert unlike_after_resuming(Run(DistKFAC, "AdamW", options)) == []


def on_ranks(rank: int, world_size: int, runs: list[Run]) -> list[list[str]]:
    return [unlike_after_resuming(run, SAVES[2:]) for run in runs]


SPREAD = [
    Run(KAISA, "SGD", {"grad_worker_fraction": 0.5, "factor_exchange": "reduce"}),
    Run(KAISA, "AdamW", {"grad_worker_fraction": 0.5, "colocate_factors": False, **BY_INTERVAL}),
    Run(KAISA, "AdamW", {"factor_exchange": "pipelined", "solver": "eigen"}),
    Run(KAISA, "SGD", {"grad_worker_fraction": 0.0, "inv_update_steps": TraceRule(every=2)}),
]


@pytest.mark.parametrize("runs", [RUNS[1::2], SPREAD], ids=["everywhere", "spread"])
def test_resuming_is_exact_on_two_processes(world: World, runs: list[Run]) -> None:
    """Also where only one of them has a layer's inverse."""
    for found in world.run(on_ranks, 2, runs):
        assert found == [[] for _ in found]


def start_run(rank: int, world_size: int, run: Run, step: int = 7) -> tuple[bytes, Tensor]:
    """A checkpoint in the middle, and the end of the run that continues."""
    model = network()
    optimizer, scheduler = run.make(model)
    with optimizer:
        take(model, optimizer, scheduler, 0, step)
        data = saved(model, optimizer, scheduler)
        take(model, optimizer, scheduler, step, STEPS)
    return data, vector(model)


def ended(rank: int, world_size: int, run: Run, data: bytes, step: int) -> Tensor:
    model, optimizer, scheduler = resumed(run, data)
    with optimizer:
        take(model, optimizer, scheduler, step, STEPS)
    return vector(model)


HALF: dict[str, Any] = {"grad_worker_fraction": 0.5}
REDUCE: dict[str, Any] = {"factor_exchange": "reduce"}


@pytest.mark.parametrize(
    ("before", "after", "run", "options"),
    [
        (2, 1, Run(KAISA, "SGD", REDUCE), {}),
        (1, 2, Run(KAISA, "AdamW"), {**HALF, "colocate_factors": False}),
        (2, 4, Run(KAISA, "SGD", {**HALF, "solver": "eigen"}), {**REDUCE, "solver": "eigen"}),
        (2, 2, Run(KAISA, "AdamW", BY_INTERVAL), {**HALF, **BY_INTERVAL}),
        (2, 1, Run(DistKFAC, "SGD", BY_INTERVAL), BY_INTERVAL),
        (1, 2, Run(DistKFAC, "AdamW", BY_INTERVAL), BY_INTERVAL),
    ],
    ids=["reduce, 2 to 1", "1 to 2", "2 to 4", "fraction", "threads, 2 to 1", "threads, 1 to 2"],
)
def test_resuming_works_on_another_number_of_processes(
    world: World, before: int, after: int, run: Run, options: dict[str, Any]
) -> None:
    """Other ranks take over the inverses without computing them again; pending solves continue."""
    step = 5 if run.System is DistKFAC else 7
    data, expected = world.run(start_run, before, run, step)[0]
    for found in world.run(ended, after, Run(run.System, run.base, options), data, step):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def without_consolidate(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Each rank loads what it has saved itself, and then what rank 0 has."""
    model = network()
    optimizer, scheduler = run.make(model)
    take(model, optimizer, scheduler, 0, 7)
    with pytest.warns(SecondOrderWarning, match=r"lacks the inverses.*consolidate\(to=0\)"):
        state = {"optimizer": optimizer.state_dict()}
    data = written({**state, "model": model.state_dict(), "scheduler": scheduler.state_dict()})
    take(model, optimizer, scheduler, 7, STEPS)
    found = {"run": vector(model)}
    for name, loaded in (("own", data), ("first", from_rank_0(data))):
        model, optimizer, scheduler = resumed(run, loaded)
        take(model, optimizer, scheduler, 7, STEPS)
        found[name] = vector(model)
    return found


def test_inverses_that_no_rank_has_are_refreshed(world: World) -> None:
    run = Run(KAISA, "SGD", {**HALF, **BY_INTERVAL})
    for found in world.run(without_consolidate, 2, run):
        assert torch.equal(found["own"], found["run"])
        assert 1e-10 < (found["first"] - found["run"]).abs().max() < 0.1


@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
def test_the_summary_shows_the_bytes_of_inverses(System: Any) -> None:
    run = Run(System, "SGD", {**BY_INTERVAL})
    data, _ = start_run(0, 1, run, 7)
    _, optimizer, _ = resumed(run, data)
    state = torch.load(io.BytesIO(data))["optimizer"]["state"]
    parts = [entry["curvature"] for entry in state.values()]
    added = sum(part[f"inverse_{k}"].nbytes for part in parts for k in "AG" if "A" in part)
    assert optimizer.summary().inverse_bytes == added > 0
    optimizer.close()


@pytest.mark.parametrize("scales", [("none", "gradient"), ("gradient", "none")], ids=" to ".join)
@pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC])
def test_inverses_of_another_scale_are_refreshed(System: Any, scales: tuple[str, str]) -> None:
    old, new = (
        Run(System, "SGD", {**BY_INTERVAL, "grafting": scale, "kl_clip": 1e-3}) for scale in scales
    )
    data, _ = start_run(0, 1, old, 7)
    for run in (old, new):
        _, optimizer, _ = resumed(run, data)
        blocks = optimizer._curvature.layers.blocks
        assert all(block.solved is (run is old) for block in blocks)
        optimizer.close()


def test_a_layer_status_that_does_not_exist_is_refused() -> None:
    run = Run(KAISA, "SGD")
    data, _ = start_run(0, 1, run, 3)
    _, optimizer, _ = resumed(run, data)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    state["state"][5]["curvature"]["pass_history"][0] = 7.0
    with pytest.raises(CheckpointError, match=r"pass_history'\], of parameter '5.weight'.*with 7"):
        optimizer.load_state_dict(state)
    assert differences(optimizer.state_dict(), before) == []


def test_reading_the_state_changes_nothing() -> None:
    """Also before the first step, of a layer that is frozen then and trains later."""
    ends = []
    for looks in (False, True):
        model = network()
        optimizer, scheduler = Run(KAISA, "SGD", BY_INTERVAL).make(model)
        if looks:
            get_optimizer_state_dict(model, optimizer)
        for step in range(STEPS):
            model[3].requires_grad_(step >= 5)
            if looks:
                optimizer.state_dict()
            take(model, optimizer, scheduler, step, step + 1)
        ends.append(vector(model))
    assert torch.equal(*ends)


def frozen_at(run: Run, frozen: range, save: int, before: bool) -> tuple[Tensor, Tensor]:
    """The ends of a run that freezes a layer for some steps, and of one that resumes it.

    That one freezes it ``before`` its optimizer loads the checkpoint, or when its loop continues.
    """

    def follow(model: Any, optimizer: Any, scheduler: Any, start: int, stop: int) -> None:
        for step in range(start, stop):
            model[3].requires_grad_(step not in frozen)
            take(model, optimizer, scheduler, step, step + 1)

    model = network()
    optimizer, scheduler = run.make(model)
    follow(model, optimizer, scheduler, 0, save)
    state = torch.load(io.BytesIO(saved(model, optimizer, scheduler)))
    follow(model, optimizer, scheduler, save, STEPS)
    optimizer.close()

    twin = network(5)
    other, schedule = run.make(twin)
    twin.load_state_dict(state["model"])
    if before:
        twin[3].requires_grad_(save not in frozen)
    other.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["scheduler"])
    follow(twin, other, schedule, save, STEPS)
    other.close()
    return vector(model), vector(twin)


@pytest.mark.parametrize(
    ("run", "frozen", "before"),
    fractional_product(
        [
            Run(KAISA, "SGD", BY_INTERVAL),
            Run(KAISA, "SGD"),
            Run(DistKFAC, "AdamW"),
            Run(KAISA, "AdamW", {"inv_update_steps": TraceRule(every=2)}),
        ],
        [range(10), range(3, 8)],
        [True, False],
        part=2,
    ),
    ids=str,
)
def test_layers_can_be_frozen_before_and_after_loading(
    run: Run, frozen: range, before: bool
) -> None:
    """Inverses are refreshed where the run itself refreshes them, and nowhere else."""
    for save in (5, 8):
        expected, found = frozen_at(run, frozen, save, before)
        assert torch.equal(found, expected), save


def frozen_bias(
    rank: int, world_size: int, run: Run, then: bool, now: bool, before: bool
) -> tuple[list[str], list[str], Tensor, Tensor]:
    """Warnings and unsolved layers of a resumed run, and the ends of the run and of this one.

    A bias was frozen ``then``, when it was saved, and is frozen ``now``.
    """
    model: Any = network()
    optimizer, scheduler = run.make(model)
    model[3].bias.requires_grad_(not then)
    take(model, optimizer, scheduler, 0, 5)
    state = torch.load(io.BytesIO(from_rank_0(saved(model, optimizer, scheduler))))
    take(model, optimizer, scheduler, 5, STEPS)
    optimizer.close()

    twin: Any = network(5)
    other, schedule = run.make(twin)
    twin.load_state_dict(state["model"])
    if before:
        twin[3].bias.requires_grad_(not now)
    other.load_state_dict(state["optimizer"])
    twin[3].bias.requires_grad_(not now)
    schedule.load_state_dict(state["scheduler"])
    with noted() as warned:
        take(twin, other, schedule, 5, STEPS)
    warned = [line for line in warned if "layer '3' is not loaded" in line]
    unsolved = [block.name for block in other._curvature.layers.blocks if not block.solved]
    other.close()
    return warned, unsolved, vector(model), vector(twin)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("then", "now"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("run", [Run(KAISA, "SGD"), Run(DistKFAC, "AdamW", BY_INTERVAL)], ids=str)
def test_a_layer_whose_bias_was_frozen_or_unfrozen_starts_its_averages_again(
    run: Run, then: bool, now: bool, before: bool
) -> None:
    """Its saved factors have another size. A warning names it, and the others resume."""
    warned, unsolved, expected, found = frozen_bias(0, 1, run, then, now, before)
    assert len(warned) == (then is not now)
    assert unsolved == []
    if then is now:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "run", [SPREAD[1], Run(DPKFAC, "SGD"), Run(DistKFAC, "AdamW", BY_INTERVAL)], ids=str
)
def test_processes_agree_on_layers_whose_bias_was_frozen(world: World, run: Run) -> None:
    ranks = world.run(frozen_bias, 2, run, True, False, False)
    agreed([found for *_, found in ranks])
    for warned, unsolved, *_ in ranks:
        assert (len(warned), unsolved) == (1, [])


def test_the_entries_of_a_state_have_one_order() -> None:
    """Ranks gather DTensors one after the other: two orders would mix them up."""
    model = network()
    optimizer, scheduler = Run(KAISA, "AdamW").make(model)
    get_optimizer_state_dict(model, optimizer)  # makes the state before the first step
    take(model, optimizer, scheduler, 0, 1)
    for entry in optimizer.state_dict()["state"].values():
        assert list(entry) == ["base", "curvature"]


def from_a_full_state(rank: int, world_size: int, run: Run) -> list[Tensor]:
    """The ends of a run, of one that resumes it from torch's full state, and of its roll-back."""
    how = StateDictOptions(full_state_dict=True)
    model = network()
    optimizer, scheduler = run.make(model)
    take(model, optimizer, scheduler, 0, 7)
    optimizer.consolidate(to=None)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=how))
    schedule = scheduler.state_dict()
    take(model, optimizer, scheduler, 7, STEPS)
    ends = [vector(model)]

    twin = network(5)
    for resuming, other, again in ((twin, *run.make(twin)), (model, optimizer, scheduler)):
        resuming.load_state_dict(weights)
        set_optimizer_state_dict(resuming, other, copy.deepcopy(state), options=how)
        again.load_state_dict(schedule)
        take(resuming, other, again, 7, STEPS)
        ends.append(vector(resuming))
    return ends


def test_a_full_state_loads_if_ranks_store_different_layers(world: World) -> None:
    """Also into the optimizer that has trained on, to roll it back."""
    for expected, found, back in world.run(from_a_full_state, 2, Run(DPKFAC, "AdamW")):
        assert torch.equal(found, expected)
        assert torch.equal(back, expected)


def test_the_state_does_not_keep_old_inverses_alive() -> None:
    """What a checkpoint shares goes with it, once a refresh has replaced it."""
    run = Run(KAISA, "SGD", {"inv_update_steps": 1})
    model = network()
    optimizer, scheduler = run.make(model)
    take(model, optimizer, scheduler, 0, 2)
    optimizer.state_dict()
    names = [name for parts in optimizer.state.values() for name in parts["curvature"]]
    assert "A" in names
    assert not [name for name in names if name.startswith(("inverse_", "last_step"))]
    state = optimizer.state_dict()["state"]
    block = optimizer._curvature.layers.blocks[0]
    index = [id(p) for p in model.parameters()].index(id(block.weight))
    shared = state[index]["curvature"]["inverse_A"]
    assert shared.data_ptr() == block.inverse.entries["inverse_A"].data_ptr()
