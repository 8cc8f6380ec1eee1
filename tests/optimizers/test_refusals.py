"""What is refused is refused on every rank, before anything has changed on one.

Functions that take (rank, world_size, ...) run on the pool's ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from contract import hook_count
from models import ZOO
from ranks import vector
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
SYSTEMS = [KAISA, DPKFAC, DistKFAC, DHO2, MRDHO2]
MLP = ZOO["mlp"]


class ByTensor(torch.optim.SGD):
    """A base that is not known to work element by element."""


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "fraction": (KAISA, {"grad_worker_fraction": 0.75}, "0.75 with 2 processes gives 1.5 gradient"),
    "device": (DistKFAC, {"inverse_device": "cuda"}, "inverse_device='cuda', but the parameters"),
    "stats": (DistKFAC, {"stats_workers": 2}, "stats_workers=2 with 2 processes leaves none to"),
    "helpers": (MRDHO2, {"accelerators": 2}, "accelerators=2 with 2 processes leaves none to"),
    "base": (DHO2, {"base": ByTensor}, "not known to work element by element; use layout"),
}
UNEQUAL: dict[str, tuple[Any, str, list[Any]]] = {
    "fractions": (KAISA, "grad_worker_fraction", [1.0, 0.75]),
    "stats": (DistKFAC, "stats_workers", [1, 2]),
    "helpers": (MRDHO2, "accelerators", [2, 1]),
    "epochs": (MRDHO2, "epoch_steps", [3, 4]),
    "bounds": (DPKFAC, "max_factor_dim", [100, 200]),
}


def refusal(System: Any, rank: int, **options: Any) -> str:
    """What the system says, once it is known that the model is as it was."""
    model = MLP.model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(float(rank))
    before = vector(model)
    try:
        System(model, lr=0.1, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        assert torch.equal(vector(model), before), "the parameters have been overwritten"
        assert hook_count(model) == 0
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals(rank: int, world_size: int) -> dict[str, str]:
    found = {name: refusal(System, rank, **o) for name, (System, o, _) in REFUSED.items()}
    found |= {
        f"unequal {name}": refusal(System, rank, **{option: values[rank]})
        for name, (System, option, values) in UNEQUAL.items()
    }
    for System, option in ((DistKFAC, "stats_workers"), (MRDHO2, "accelerators")):
        model = DistributedDataParallel(MLP.model())
        before = vector(model)
        with pytest.raises(ValueError, match=f"{option}=1 with a model in DistributedData"):
            System(model, lr=0.1, **{option: 1})
        assert torch.equal(vector(model), before)
    found["sound"] = refusal(KAISA, rank, grad_worker_fraction=0.5)  # nobody waits for anybody
    return found


def test_refusals_come_on_all_ranks_before_parameters_are_overwritten(world: World) -> None:
    for found in world.run(refusals, 2):
        for name, (_, _, message) in REFUSED.items():
            assert message in found[name], name
        for name in UNEQUAL:
            assert found[f"unequal {name}"].startswith("RankMismatchError"), name
        assert found["sound"] == "accepted"


def outsiders(rank: int, world_size: int) -> dict[str, str]:
    group = dist.new_group([0])
    others: dict[str, Any] = {"text": "gloo", "object": object(), "ranks": [0, 1]}
    if rank == 1:
        others["not mine"] = group
    return {
        f"{System.__name__} {name}": refusal(System, rank, process_group=given)
        for System in SYSTEMS
        for name, given in others.items()
    }


def test_only_a_group_that_this_process_is_in_is_taken(world: World) -> None:
    first, second = world.run(outsiders, 2)
    assert len(second) == len(first) + len(SYSTEMS)
    for name, message in [*first.items(), *second.items()]:
        if name.endswith("not mine"):
            assert "this process is not a member of process_group=" in message, name
        else:
            assert "is not a torch.distributed.ProcessGroup; pass what" in message, name
