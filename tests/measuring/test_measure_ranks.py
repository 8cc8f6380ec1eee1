"""`measure` on several processes: the same sums, each layer's on one of them."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from measure_cases import ENTRIES, F64, batches_of, close, data_of, model_of, terms
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from second_order import SecondOrderError, measure
from second_order.distributed.fsdp import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pool import World

Found = dict[tuple[str, str], Tensor]


def shares(ranks: int) -> list[list[tuple[int, int]]]:
    """Cuts of the entries by rank; the last has a batch less than the others."""
    each = ENTRIES // ranks
    cuts = [[(r * each, r * each + 1), (r * each + 1, (r + 1) * each)] for r in range(ranks)]
    cuts[-1] = [((ranks - 1) * each, ENTRIES)]
    return cuts


def found_by(
    rank: int, ranks: int, name: str, factors: Any, wrapper: str, options: dict[str, Any]
) -> tuple[Found, dict[str, int]]:
    """The factors that are here, and the owner of each layer by the report."""
    model = model_of(name)
    data = data_of(name)
    if wrapper.startswith("FSDP2"):
        mesh = init_device_mesh("cpu", (ranks,))
        whole = model
        model = copy.deepcopy(whole).to("meta") if "meta" in wrapper else whole
        for block in model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if "meta" in wrapper:  # as a model too large for one process is made
            model.to_empty(device="cpu")
            values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
            with torch.no_grad():
                for key, value in (*model.named_parameters(), *model.named_buffers()):
                    argument = values[key].detach()
                    value.copy_(
                        distribute_tensor(argument, mesh) if is_dtensor(value) else argument
                    )
    argument = DistributedDataParallel(model) if wrapper == "DDP" else model
    loader = batches_of(data, shares(ranks)[rank])
    more = {} if factors == "inputs" else {"loss": terms}
    curvature = measure(argument, loader, factors=factors, progress=False, **more, **options)
    stored: Found = {}
    for layer, own_layer in curvature.local_layers.items():
        stored |= {(layer, letter): factor for letter, factor in own_layer.factors.items()}
        if own_layer.corrected is not None:
            stored[layer, "F"] = own_layer.corrected.sort().values  # whichever basis it is in
    owners = {row.name: row.owner for row in curvature.report.rows if row.owner is not None}
    return stored, owners


@pytest.mark.parametrize("factors", ["inputs", "ekfac"])
@pytest.mark.parametrize(
    ("wrapper", "keep", "ranks"),
    [
        ("", "device", 2),
        ("", "owner", 3),
        ("", "cpu", 2),
        ("DDP", "owner", 2),
        ("FSDP2", "device", 3),
        ("FSDP2 from meta", "owner", 2),
    ],
)
def test_many_processes_equal_one(
    world: World, factors: str, wrapper: str, keep: str, ranks: int
) -> None:
    options = {"keep": keep}
    alone, _ = found_by(0, 1, "Llama", factors, "", {})
    together: Found = {}
    for rank, (stored, owners) in enumerate(
        world.run(found_by, ranks, "Llama", factors, wrapper, options)
    ):
        assert not together.keys() & stored.keys()
        assert {owners[name] for name, _ in stored} == {rank}
        together |= stored
    assert together.keys() == alone.keys()
    for key, factor in alone.items():
        close(together[key], factor, 1e-9)


def mixed(rank: int, ranks: int, factors: Any) -> Found:
    return found_by(rank, ranks, "Mixtral", factors, "", {"keep": "owner"})[0]


@pytest.mark.parametrize("factors", ["inputs", "ekfac"])
def test_a_layer_that_a_process_skips_does_not_block_the_others(world: World, factors: str) -> None:
    together: Found = {}
    for stored in world.run(mixed, 3, factors):
        together |= stored
    for key, factor in mixed(0, 1, factors).items():
        close(together[key], factor, 1e-9)


def failing(rank: int, ranks: int, moment: str, keep: Any, factors: Any) -> str:
    """The error of a rank, if the forward pass or the loader of rank 1 fails."""

    def call(model: nn.Module, batch: Tensor) -> Tensor:
        if rank == 1 and moment == "forward pass" and len(batch) == 2:
            raise ArithmeticError("no such number")
        output: Tensor = model(batch)
        return output

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            for i, examples in enumerate((3, 2, 1, 1)):
                if rank == 1 and moment == f"batch {i}":
                    raise ArithmeticError("no such record")
                yield torch.randn(examples, 3, dtype=F64)

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(F64)
    with pytest.raises((SecondOrderError, ArithmeticError)) as caught:
        measure(model, Loader(), call=call, keep=keep, factors=factors, progress=False)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("moment", "keep", "factors"),
    [
        ("forward pass", "device", "inputs"),
        ("forward pass", "device", "kfac"),
        ("forward pass", "owner", "inputs"),
        ("forward pass", "owner", "kfac"),
        ("batch 0", "owner", "inputs"),
        ("batch 1", "owner", "inputs"),
    ],
)
def test_a_failure_on_one_process_raises_on_all(
    world: World, moment: str, keep: str, factors: str
) -> None:
    errors = world.run(failing, 3, moment, keep, factors)
    missing = "number" if moment == "forward pass" else "record"
    assert errors[1] == f"ArithmeticError: no such {missing}"
    assert errors[0] == errors[2] == f"SecondOrderError: measure: rank 1 failed: {errors[1]}"


def failing_within(rank: int, ranks: int, seconds: float) -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(F64)
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("short",))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)

    def call(model: nn.Module, batch: Tensor) -> Tensor:
        if rank == 1 and len(batch) == 2:
            raise ArithmeticError("no such number")
        output: Tensor = model(batch)
        return output

    loader = [torch.randn(n, 3, dtype=F64) for n in (3, 2, 1)]
    started = time.monotonic()
    with pytest.raises((SecondOrderError, ArithmeticError)) as caught:
        measure(model, loader, call=call, keep="owner", factors="kfac", progress=False)
    assert time.monotonic() - started < 10 * seconds
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_failure_inside_an_fsdp_pass_raises_its_own_error(world: World) -> None:
    """The others wait for its shards, for as long as their group does."""
    errors = world.run(failing_within, 2, 3.0)
    assert errors[1] == "ArithmeticError: no such number"
    assert errors[0].startswith("SecondOrderError: Lost contact with the other ranks")


def ended(rank: int, ranks: int, moment: str) -> Found | str:
    """FSDP2, of which the last rank's data end first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(F64)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
    many = 4 if rank == 0 else {"before": 0, "between": 2}[moment]
    batches = torch.arange(24.0, dtype=F64).view(4, 2, 3).unbind()[:many]
    try:
        curvature = measure(model, batches, progress=False)
    except SecondOrderError as error:
        return str(error)
    return {("0", "A"): curvature["0"].A}


def test_under_fsdp_a_process_can_have_fewer_batches_but_not_none(world: World) -> None:
    rows = torch.arange(24.0, dtype=F64).view(8, 3)
    rows = torch.cat([rows, rows[:4]])
    for found in world.run(ended, 2, "between"):
        close(found["0", "A"][0], rows.mT @ rows / 12)
    errors = world.run(ended, 2, "before")
    assert all("has no batch" in each for each in errors)


def idling(rank: int, ranks: int, keep: Any) -> tuple[int, float]:
    """A rank without any batch joins the others."""
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)}).to(F64)
    x = torch.eye(3, dtype=F64)
    calls = [0]

    def call(model: nn.Module, batch: Tensor) -> None:
        calls[0] += 1
        [module(batch) for module in model.children()]

    loader = [] if rank == 0 else [x[:2], x[2:]]
    curvature = measure(model, loader, call=call, keep=keep, progress=False)
    for name in ("a", "b"):
        close(curvature[name].A[0], torch.eye(3, dtype=F64) / 3)
    return calls[0], curvature.report.batches


@pytest.mark.parametrize("keep", ["device", "owner"])
def test_a_process_without_batches_participates(world: World, keep: str) -> None:
    assert world.run(idling, 2, keep) == [(0, 2), (2, 2)]
