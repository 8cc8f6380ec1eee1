"""Claims of DP-KFAC's paper: Zhang, Shi, Wang and Li, 2023."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from claim import Row, Scale, ratio
from instruments import moved_bytes
from kaisa_claims import Planned
from measure import Training
from measuring import CONV, IMAGES, Make, Processes, Trial, resnet, step_times, train
from second_order import DPKFAC, KAISA

__all__ = ["dpkfac_rows"]

PAPER = "DP-KFAC"
FLOAT = 4  # bytes


def every_step(step: int) -> int:
    """An interval of one step, from the first step on."""
    return 1


def make(system: type[Any], model: nn.Module, **options: Any) -> Any:
    """An optimizer that refreshes at every step, as the paper's timed iterations do."""
    return system(
        model,
        lr=0.01,
        momentum=0.9,
        factor_update_steps=every_step,
        inv_update_steps=every_step,
        **options,
    )


# ------------------------------------------------------------------------------- communication


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """N_f and N_g of the paper: elements of all factors, and of all their gradients."""
    factors = gradients = 0
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            a = module.weight[0].numel() + (module.bias is not None)
            g = len(module.weight)
            factors += a * a + g * g
            gradients += a * g
    return factors, gradients


def volumes(scale: Scale) -> dict[str, dict[str, float]]:
    """Elements that leave this rank in a step with a refresh, and that it keeps, by system."""
    workload = resnet(scale.tiny)
    systems = {
        "KAISA": partial(make, KAISA, grad_worker_fraction=0.0, solver="inverse"),
        "DPKFAC": partial(make, DPKFAC, solver="inverse"),
    }
    found = {}
    for name, build in systems.items():
        training = Training(workload, build)
        training.step()  # the first step allocates, and exchanges what later ones do not
        with moved_bytes() as moved:
            training.step()
        state = training.optimizer.summary().total_bytes
        found[name] = {kind: count / FLOAT for kind, count in moved.items()}
        found[name]["state"] = state / FLOAT
        training.optimizer.close()
    return found


def communication(scale: Scale, processes: Processes) -> list[Row]:
    """Table 2, in elements summed over all processes."""
    by_rank = processes.together(volumes, scale)
    ranks = processes.count
    workload = resnet(scale.tiny)
    factors, gradients = sizes_of(workload.model())

    def total(system: str, kind: str) -> float:
        return sum(of[system].get(kind, 0.0) for of in by_rank)

    how = f"{ranks} gloo processes, {workload.name}, counted, over the formula's value"
    factor_formula = 2 * (ranks - 1) * factors
    gradient_formula = (ranks - 1) * gradients
    kaisa_factors = total("KAISA", "factors")
    our_factors = total("DPKFAC", "factors")
    preconditioned = total("DPKFAC", "gradients") / gradient_formula
    averaged = total("DPKFAC", "averaging") / (2 * gradient_formula)
    state = {name: total(name, "state") / ranks for name in ("KAISA", "DPKFAC")}
    formula = 2 * factors
    return [
        Row(
            PAPER,
            "Factors sent by KAISA and DP-KFAC",
            "table 2, FactorComm",
            "1 ×; 0",
            f"{ratio(kaisa_factors / factor_formula)}; {our_factors / factor_formula:.2g}",
            how,
            our_factors == 0 and 0.4 < kaisa_factors / factor_formula < 1.1,
            "",
            {"KAISA": kaisa_factors / factor_formula, "DPKFAC": our_factors / factor_formula},
        ),
        Row(
            PAPER,
            "Preconditioned gradients sent",
            "table 2, PredComm",
            "1 ×",
            ratio(preconditioned),
            how,
            0.9 < preconditioned < 1.1,
            "",
            {"DPKFAC": preconditioned},
        ),
        Row(
            PAPER,
            "Plain gradients sent",
            "table 2, GradComm",
            "1 ×",
            ratio(averaged),
            how,
            averaged < 1.1,
            "",
            {"DPKFAC": averaged},
        ),
        Row(
            PAPER,
            "Factors and inverses stored by KAISA and DP-KFAC",
            "table 2, Memory",
            f"1 ×; {ratio(1 / ranks)}",
            f"{ratio(state['KAISA'] / formula)}; {ratio(state['DPKFAC'] / formula)}",
            how + ", mean; KAISA is MEM-OPT, where only the factors are on every process",
            state["DPKFAC"] / formula <= 1.1 / ranks,
            "",
            {name: value / formula for name, value in state.items()},
        ),
    ]


def planned_memory(plan: Planned) -> Row:
    """Second-order memory on many ranks."""
    of = plan.state
    saved = {mode: 1 - of["DPKFAC"] / of[f"KAISA {mode}"] for mode in ("COMM-OPT", "MEM-OPT")}
    return Row(
        PAPER,
        "Memory that DP-KFAC saves over COMM-OPT and MEM-OPT",
        "table 5",
        "26 %, 15 % of the GPU's",
        ", ".join(f"{100 * value:.0f} %" for value in saved.values()) + " of second-order memory",
        f"planned: {plan.network}, {plan.ranks} ranks, fullest rank",
        all(value > 0.1 for value in saved.values()),
        "",
        saved,
    )


# ------------------------------------------------------------------------------------------ time


def sgd(model: nn.Module) -> torch.optim.SGD:
    """SGD on a DDP model."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def timed(scale: Scale) -> dict[str, float]:
    """Milliseconds of a step that refreshes everything, by system."""
    makers: dict[str, Make] = {
        "KAISA-CO": partial(make, KAISA, solver="eigen", grad_worker_fraction=1.0),
        "KAISA-MO": partial(make, KAISA, solver="eigen", grad_worker_fraction=0.0),
        "SPD-KFAC": partial(make, KAISA, solver="eigen", factor_exchange="pipelined"),
        "DP-KFAC": partial(make, DPKFAC, solver="eigen"),
        "KAISA-CO, inverse": partial(make, KAISA, solver="inverse", grad_worker_fraction=1.0),
        "DP-KFAC, inverse": partial(make, DPKFAC, solver="inverse"),
        "S-SGD": lambda model: sgd(DistributedDataParallel(model)),
    }
    times = step_times(resnet(scale.tiny), makers, max(scale.repeats // 3, 1))
    return {name: statistics.median(kinds.values()) for name, kinds in times.items()}


def iteration_times(scale: Scale, processes: Processes) -> list[Row]:
    """Table 5, and the two solvers."""
    times = processes.together(timed, scale)[0]
    base = times["DP-KFAC"]
    slower = {name: times[name] / base for name in ("KAISA-CO", "KAISA-MO", "SPD-KFAC")}
    over_sgd = times["DP-KFAC, inverse"] / times["S-SGD"]
    solvers = base / times["DP-KFAC, inverse"]
    how = f"{processes.count} gloo processes, {resnet(scale.tiny).name}, every step refreshes"
    return [
        Row(
            PAPER,
            "Step time, KAISA-CO, KAISA-MO and SPD-KFAC over DP-KFAC",
            "table 5",
            "1.68, 1.63, 1.45 ×",
            ", ".join(f"{value:.2f}" for value in slower.values()) + " ×",
            f"{how}, eigen",
            min(slower.values()) > 1.0,
            "two processes halve the statistics and save few messages",
            slower,
        ),
        Row(
            PAPER,
            "Step time, DP-KFAC over SGD",
            "figure 9",
            "1.7 to 2 ×",
            ratio(over_sgd),
            how,
            over_sgd <= 2.1,
            "on a CPU, the statistics of convolutions cost more",
            {"over S-SGD": over_sgd},
        ),
        Row(
            PAPER,
            "Step time, eigen over inverse",
            "§ 6.4",
            "2.2 ×",
            ratio(solvers),
            how,
            solvers > 1.1,
            "the factors of ResNet-20 have at most 577 rows, and statistics take most of the step",
            {"eigen over inverse": solvers},
        ),
    ]


# -------------------------------------------------------------------------------------- accuracy


def train_all(trials: list[Trial]) -> list[float]:
    """Best test accuracy of each run, on all ranks together."""
    return [train(trial).best_accuracy for trial in trials]


def parity(scale: Scale, processes: Processes) -> Row:
    """Accuracy with factors from one process's share of the batch."""
    local = 32
    batch = local * processes.count
    steps = max(5, scale.epochs * (IMAGES // batch))
    best = {}
    for system in ("SGD", "KAISA", "DPKFAC"):
        trials = [
            Trial(CONV, system, 0.1, batch, seed, steps, {"momentum": 0.9})
            for seed in range(scale.seeds)
        ]
        best[system] = statistics.mean(processes.together(train_all, trials)[0])
    return Row(
        PAPER,
        "Accuracy of SGD, KAISA and DP-KFAC",
        "table 7",
        "93.8, 93.8, 94.0 %",
        ", ".join(f"{value:.1f}" for value in best.values()) + " %",
        f"{processes.count} gloo processes, digits conv net, {local} images each, "
        f"{scale.epochs} epochs, mean of the best over {scale.seeds} seeds",
        best["DPKFAC"] > best["KAISA"] - 0.5,
        "",
        best,
    )


def dpkfac_rows(scale: Scale, processes: Processes, plan: Planned) -> list[Row]:
    """All rows of this paper."""
    return [
        *communication(scale, processes),
        planned_memory(plan),
        *iteration_times(scale, processes),
        parity(scale, processes),
    ]
