"""Random training runs: the same few in each test run. `make fuzz` runs more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from stored_runs import rows, stored

from fuzz import OUTCOMES, play
from fuzz_models import Net, Part, Spec, batch, draw_model, losses
from fuzz_options import RANGES, SYSTEMS, choices, draw_value, hints, signature
from fuzz_training import Example, Reported, base_alone, draw_example, judge, train

if TYPE_CHECKING:
    from pool import World

LINEAR = Part("Linear", {"in_features": 3, "out_features": 2, "bias": True})
SMALL = Spec("rows", (3,), (LINEAR, Part("Tanh")), 2, "linear", "", "classes")
KAISA = Example("KAISA", 2, 0, SMALL, "float64", {"lr": 0.05})
ERROR = {
    "status": "raised",
    "stage": "construction",
    "type": "ValueError",
    "ours": False,
    "ordinary": True,
    "message": "lr=-1 is below what there is",
    "from": "/src/second_order/utils/checks.py",
    "traceback": "",
}


@hypothesis.settings(
    max_examples=12 if hypothesis.settings.default.max_examples < 300 else 300,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)
@hypothesis.given(seed=st.integers(0, 2**40))
def test_random_training_runs_have_no_finding(world: World, seed: int) -> None:
    """To look at a finding, run `make fuzz`: shrinking a seed makes no example simpler."""
    example = draw_example(Random(seed), most_ranks=2)
    outcome = play(world, example)
    assert outcome.name != "finding", f"{outcome.detail}\n{outcome.whole}\nseed {seed}: {example}"


def test_random_models_can_be_trained() -> None:
    kinds = set()
    for seed in range(60):
        spec = draw_model(Random(seed))
        model = Net(spec).double()
        x, y = batch(spec, seed, 3, torch.float64)
        losses(spec, model(x), y).mean().backward()
        assert any(p.grad is not None for p in model.parameters())
        kinds |= {part.kind for part in spec.parts}
    assert len(kinds) > 20


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_option_has_values(name: str) -> None:
    """A new option whose type says too little needs an entry in RANGES."""
    system = SYSTEMS[name]
    for option, parameter in signature(system).items():
        drawn = [
            draw_value(Random(i), system, option, hints(system)[option], parameter.default)
            for i in range(20)
        ]
        assert any(value != parameter.default for value in drawn), option


def test_strings_are_read_from_the_error_message() -> None:
    assert "factor_exchange" not in RANGES
    exchanges = ("all_reduce", "reduce", "pipelined")
    assert choices(SYSTEMS["KAISA"], "factor_exchange") == exchanges


def test_the_page_has_the_stored_run() -> None:
    run = stored("fuzz")["results"]
    assert len(run) >= 1000
    assert {row["outcome"] for row in run} <= set(OUTCOMES) - {"finding"}
    assert sum(row["outcome"] == "trains" for row in run) > 0.7 * len(run)
    assert {row["system"] for row in run} == SYSTEMS.keys()
    counts = Counter(row["outcome"] for row in run)
    ((_, cells),) = rows("docs/evidence/reliability.md", "test", "runs", "trains").items()
    names = ("trains", "refused", "raises", "by base", "finding")
    assert cells == [f"{count:,}" for count in (len(run), *(counts[name] for name in names))]
    assert counts["diverges"] == 0


def done(*parameters: float, **more: Any) -> dict[str, Any]:
    values = torch.tensor(parameters)
    return {"status": "done", "parameters": values, "largest": [1.0], **more}


def raised(**more: Any) -> Reported:
    return Reported({**ERROR, **more})


def test_every_outcome_is_recognized() -> None:
    def name(*results: Any, example: Example = KAISA) -> str:
        return judge(example, results).name

    assert name(done(1.0), done(1.0)) == "trains"
    assert name(done(1.0), done(2.0)) == "finding", "out of sync"
    assert name(raised(), raised()) == "refused"
    assert name(raised(stage="step 3"), raised(stage="step 3")) == "raises"
    assert name(raised(), done(1.0)) == "finding", "one rank alone"
    assert name(raised(message="?"), raised(message="?")) == "finding", "no message"
    assert name(*[raised(type="KeyError", ordinary=False)] * 2) == "finding"
    assert name(*[raised(**{"from": "/torch/nn/functional.py"})] * 2) == "finding"
    assert name(*[done(float("nan"))] * 2) == "finding", "the base alone stays finite"
    assert name(*[done(float("nan"), largest=[1.0, 1e9, float("inf")])] * 2) == "diverges"
    wild = replace(KAISA, options={"lr": 1e200, "weight_decay": 1.0})
    assert name(*[done(float("nan"))] * 2, example=wild) == "by base"
    assert name(RuntimeError("lost"), done(1.0)) == "finding"


def test_the_base_alone_ends_with_other_parameters(world: World) -> None:
    """All ranks of the optimizer end with equal parameters."""
    example = replace(KAISA, options={"lr": 0.05, "inv_update_steps": 2})
    results = world.run(train, 2, example)
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])
    alone = base_alone(example)["parameters"]
    assert not torch.allclose(alone, results[0]["parameters"], rtol=1e-3)
    assert alone.isfinite().all()


def test_an_error_of_the_package_is_a_finding(world: World) -> None:
    """An error of an option's check is a refusal."""
    refused = replace(KAISA, options={"lr": 0.05, "factor_dtype": "float32"})
    assert play(world, refused).name == "refused"
    assert play(world, replace(KAISA, dtype="float8")).name == "finding"
