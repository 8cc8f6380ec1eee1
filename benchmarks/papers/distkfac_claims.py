"""Claims of the paper on distributed K-FAC: Ba, Grosse and Martens, 2017."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import nn

from claim import Row, Scale, ratio
from measure import interval
from measuring import (
    CONV,
    MLP,
    NORM,
    PLAIN,
    Processes,
    Result,
    Trial,
    block_times,
    digits_conv,
    finite,
    median_of,
    resnet,
    step_times,
    steps_to,
    train_by_name,
)
from second_order import DistKFAC

__all__ = ["distkfac_rows"]

PAPER = "DistKFAC"
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
SGD_RATES = (0.03, 0.1, 0.2, 0.3, 0.5)
TARGET = 0.05  # training loss
EVERY = 20  # steps between inverses, section 6.1


def sgd(model: nn.Module) -> Any:
    """The first-order optimizer of the paper."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def best_rate(
    processes: Processes, networks: list[tuple[str, int]], steps: int, every: int
) -> dict[tuple[str, int], float]:
    """SGD's learning rate with the fewest steps, by network and batch, on a seed of its own."""
    trials = {
        (network, batch, lr): [
            Trial(network, "SGD", lr, batch, 100, steps, MOMENTUM, every, TARGET)
        ]
        for network, batch in networks
        for lr in SGD_RATES
    }
    results = train_by_name(processes, trials)

    def score(network: str, batch: int, lr: float) -> tuple[float, float]:
        result = results[network, batch, lr][0]
        return steps_to(result, loss=TARGET), result.losses[-1]

    return {
        (network, batch): min(SGD_RATES, key=lambda lr: score(network, batch, lr))
        for network, batch in networks
    }


def median_steps(results: list[Result]) -> float:
    """Median steps to the target."""
    return median_of(results, lambda result: steps_to(result, loss=TARGET))


def batch_sizes(scale: Scale, processes: Processes) -> Row:
    """Examples to a training loss by batch size."""
    batches = (64, 128) if scale.tiny else (128, 1437)
    small, large = batches
    steps = min(scale.steps, 150)
    rates = best_rate(processes, [(MLP, batch) for batch in batches], steps, every=1)
    trials = {}
    for batch in batches:
        for name, rate in (("SGD", rates[MLP, batch]), ("DistKFAC", 0.1)):
            trials[name, batch] = [
                Trial(MLP, name, rate, batch, seed, steps, MOMENTUM, 1, TARGET)
                for seed in range(scale.seeds)
            ]
    loss_steps = {key: median_steps(of) for key, of in train_by_name(processes, trials).items()}
    growth = {
        name: large * loss_steps[name, large] / (small * loss_steps[name, small])
        for name in ("SGD", "DistKFAC")
    }
    return Row(
        PAPER,
        "Examples to a loss, large batch over small",
        "figure 6",
        "K-FAC: about 1 ×; SGD: many more",
        f"K-FAC: {ratio(growth['DistKFAC'])}; SGD: {ratio(growth['SGD'])}",
        f"digits MLP, examples to a training loss of {TARGET}, batch {large:,} over batch {small}; "
        "SGD's rate tuned",
        growth["DistKFAC"] < growth["SGD"] / 1.5 and growth["DistKFAC"] < 2,
        f"{loss_steps['DistKFAC', small]:g} steps with {small} images leave little room for fewer",
        {name: finite(value) for name, value in growth.items()},
    )


# -------------------------------------------------------------------------- asynchronous inverses


def asynchronous(model: nn.Module, every: int, threads: bool) -> Any:
    """DistKFAC with asynchronous or synchronous inverses."""
    return DistKFAC(
        model,
        lr=0.01,
        momentum=0.9,
        solver="inverse",
        factor_update_steps=min(every, 10),
        inv_update_steps=every,
        inverse_threads=1,
        async_inverse=threads,
    )


def asynchronous_inverses(scale: Scale, processes: Processes) -> list[Row]:
    """Time and progress of asynchronous inverses over synchronous ones."""
    faster = {}
    for every in (EVERY, 1):
        makers = {
            "sync": partial(asynchronous, every=every, threads=False),
            "async": partial(asynchronous, every=every, threads=True),
        }
        times = block_times(digits_conv(), makers, length=scale.block, blocks=scale.repeats)
        faster[every] = times["sync"] / times["async"]

    options = {**MOMENTUM, "inverse_threads": 1, "inv_update_steps": EVERY}
    trials = {
        threads: [
            Trial(
                CONV,
                "DistKFAC",
                0.1,
                64,
                seed,
                scale.steps,
                {**options, "factor_update_steps": 10, "async_inverse": threads},
                target=0.02,
            )
            for seed in range(scale.seeds)
        ]
        for threads in (False, True)
    }
    results = train_by_name(processes, trials)
    shares = []
    for sync, threaded in zip(results[False], results[True], strict=True):
        for loss in (0.5, 0.2, 0.1, 0.05, 0.02):
            synchronous = steps_to(sync, loss=loss)
            if finite(synchronous) is not None:
                shares.append(steps_to(threaded, loss=loss) / synchronous)
    progress = statistics.median(shares or [float("inf")])
    return [
        Row(
            PAPER,
            "Speedup by asynchronous inverses",
            "§ 6.1",
            "about 1.5 ×",
            f"{ratio(faster[EVERY])}; {ratio(faster[1])} with inverses every step",
            "digits conv net, one thread trains and one inverts, blocks of 20 steps in turn",
            faster[EVERY] >= 1.2,
            "both have one CPU core",
            {f"every {every}": value for every, value in faster.items()},
        ),
        Row(
            PAPER,
            "Steps with asynchronous inverses over synchronous",
            "figure 2",
            "about 1 ×",
            ratio(progress),
            f"digits conv net, steps to training losses, inverses every {EVERY} steps, median",
            progress <= 1.15,
            "",
            {"steps": finite(progress)},
        ),
    ]


# ------------------------------------------------------------- doubly factored and batch norm


WIDE = "6"
"""The Linear after the convolutions of the digits' conv net: 16 locations of 32 channels."""


def doubly_factored(scale: Scale, processes: Processes) -> Row:
    """Steps and state with a doubly factored layer."""
    settings: dict[str, dict[str, Any]] = {
        "A and G": {"doubly_factored": None},
        "doubly": {"doubly_factored": {WIDE: (16, 32)}},
        "base": {"doubly_factored": None, "skip_layers": [WIDE]},
    }
    trials = {
        name: [
            Trial(
                CONV,
                "DistKFAC",
                0.1,
                64,
                seed,
                scale.steps,
                {**MOMENTUM, "async_inverse": False, **options},
                target=TARGET,
            )
            for seed in range(scale.seeds)
        ]
        for name, options in settings.items()
    }
    results = train_by_name(processes, trials)
    steps = {name: median_steps(of) for name, of in results.items()}
    memory = results["doubly"][0].state_bytes / results["A and G"][0].state_bytes
    return Row(
        PAPER,
        "A doubly factored layer speeds up training",
        "§ 6.2.2",
        "1.5 ×",
        f"{ratio(steps['base'] / steps['doubly'])} SGD; {ratio(memory)} memory",
        f"digits conv net, Linear with 512 inputs, steps to a training loss of {TARGET}, median",
        steps["doubly"] <= steps["base"] and memory < 0.5,
        "on a layer of this size the third factor costs steps and gains memory",
        {"memory": memory, **{name: finite(value) for name, value in steps.items()}},
    )


def batch_norm(scale: Scale, processes: Processes) -> list[Row]:
    """K-FAC with and without batch norm, whose gains and biases have exact blocks."""
    networks = (PLAIN, NORM)
    rates = best_rate(processes, [(network, 64) for network in networks], scale.steps, every=5)
    trials = {}
    for network in networks:
        for name, rate in (("SGD", rates[network, 64]), ("DistKFAC", 0.1)):
            options = MOMENTUM if name == "SGD" else {**MOMENTUM, "async_inverse": False}
            trials[name, network] = [
                Trial(network, name, rate, 64, seed, scale.steps, options, target=TARGET)
                for seed in range(scale.seeds)
            ]
    steps = {key: median_steps(of) for key, of in train_by_name(processes, trials).items()}
    affected = steps["DistKFAC", PLAIN] / steps["DistKFAC", NORM]
    gained = steps["SGD", NORM] / steps["DistKFAC", NORM]
    how = f"plain network of six convolutions, steps to a training loss of {TARGET}, median"
    values = {f"{name}, {network}": finite(value) for (name, network), value in steps.items()}
    return [
        Row(
            PAPER,
            "Steps without batch norm over steps with it",
            "figure 3",
            "about 1 ×",
            f"{ratio(affected)}; SGD {ratio(steps['SGD', PLAIN] / steps['SGD', NORM])}",
            how,
            0.67 <= affected <= 1.5,
            "batch norm helps K-FAC on this network",
            values,
        ),
        Row(
            PAPER,
            "Time with batch norm, SGD over K-FAC",
            "§ 6.2.1",
            "3.5 ×",
            f"{ratio(gained)} the steps",
            f"{how}, SGD's rate tuned",
            gained >= 1.5,
            "a network of 20,000 parameters is easy for SGD with batch norm",
            {"steps": finite(gained)},
        ),
    ]


# ----------------------------------------------------------------------------------- the overhead


def overhead(scale: Scale) -> list[Row]:
    """Time per iteration over SGD's, and what cheap factors of convolutions save."""
    workload = resnet(scale.tiny)

    def distkfac(model: nn.Module) -> Any:
        return DistKFAC(
            model,
            lr=0.01,
            momentum=0.9,
            factor_update_steps=10,
            inv_update_steps=EVERY,
            inverse_threads=1,
        )

    blocks = max(scale.repeats // 3, 1)
    times = block_times(
        workload, {"SGD": sgd, "DistKFAC": distkfac}, length=scale.block, blocks=blocks
    )
    over = times["DistKFAC"] / times["SGD"]

    def synchronous(model: nn.Module, factors: str) -> Any:
        return DistKFAC(
            model,
            lr=0.01,
            momentum=0.9,
            async_inverse=False,
            conv_factors=factors,
            factor_update_steps=interval("full", "statistics"),
            inv_update_steps=interval("full"),
        )

    makers = {name: partial(synchronous, factors=name) for name in ("kfc", "cheap")}
    by_factors = step_times(workload, makers, blocks)
    saved = 1 - by_factors["cheap"]["statistics"] / by_factors["kfc"]["statistics"]
    return [
        Row(
            PAPER,
            "Step time, DistKFAC over SGD",
            "§ 7",
            "similar",
            ratio(over),
            f"{workload.name}, statistics every 10 steps, inverses every {EVERY} on a thread",
            over <= 1.25,
            "the training thread computes the statistics",
            {"over SGD": over},
        ),
        Row(
            PAPER,
            "Time that cheap factors of convolutions save",
            "appendix A",
            "20 to 30 %",
            f"{100 * saved:.0f} %",
            f"{workload.name}, steps with statistics, synchronous",
            saved >= 0.15,
            "our factors of convolutions of stride 1 are autocorrelations, which form no patches",
            {"saved": saved},
        ),
    ]


def distkfac_rows(scale: Scale, processes: Processes) -> list[Row]:
    """All rows of this paper."""
    return [
        batch_sizes(scale, processes),
        *asynchronous_inverses(scale, processes),
        doubly_factored(scale, processes),
        *batch_norm(scale, processes),
        *overhead(scale),
    ]
