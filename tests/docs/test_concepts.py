"""Numbers on the concept pages are those of the code."""

from __future__ import annotations

import inspect

from stored_runs import rows, stored, text_of

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC
from second_order.fosi import update
from second_order.kfac import precondition, schedule, step_scale
from second_order.optimizers import config
from second_order.papers import paper_settings

KFAC_PAGE = "docs/concepts/kfac.md"
DISTRIBUTED_PAGE = "docs/concepts/distributed.md"
DHO2_PAGE = "docs/concepts/dho2.md"


def test_numbers_of_the_page_of_kfac() -> None:
    text = text_of(KFAC_PAGE)
    steps = round(1 / (1 - config.STEP_DECAY.decay))
    adaptive_steps = round(1 / (1 - config.ADAPTIVE_STEP_DECAY.decay))
    assert f"remember about {steps} steps over SGD, and about {adaptive_steps} over" in text
    assert f"the default, with damping = {config.DAMPING}" in text
    assert config.DAMPING_FLOOR == 0.25
    assert "c is at least a quarter of the mean over all layers" in text
    assert f"Over SGD, τ is at most {step_scale.PLAIN_BOUNDS.high:g}." in text
    assert step_scale.ADAPTIVE_BOUNDS.high == step_scale.MAX_SCHEDULED_SCALE == 2
    assert step_scale.ADAPTIVE_BOUNDS.low_scheduled == step_scale.MAX_SCHEDULED_SCALE
    assert "it is at most 2. If both hold, it is exactly 2" in text
    assert precondition.MAX_RATIO == 4
    assert "if Σ P·∇ is more than four times its running average" in text
    assert f"is doubled, up to {schedule.MAX_INTERVAL} steps" in text
    assert f"`max_factor_dim` ({config.KFACOptions().max_factor_dim:,}) rows" in text


def test_settings_of_the_papers() -> None:
    table = rows(DISTRIBUTED_PAGE, "keyword", "KAISA", "DPKFAC", "DistKFAC")
    for column, optimizer in enumerate((KAISA, DPKFAC, DistKFAC)):
        epoch_steps = 100 if optimizer is DistKFAC else None
        settings = paper_settings(optimizer, epoch_steps=epoch_steps)
        clip = settings["kl_clip"]
        for name in ("grafting", "solver", "factor_decay"):
            assert table[f"`{name}`"][column].strip('"') == str(settings[name])
        for name in ("factor_update_steps", "inv_update_steps"):
            assert int(table[f"`{name}`"][column]) == settings[name]
        if "damping" in settings:
            assert float(table["`damping`, absolute"][column]) == settings["damping"]
        shown = table["`kl_clip`"][column]
        if clip is None:
            assert shown == "None"
        elif isinstance(clip, config.DecayingClip):
            assert clip.every == epoch_steps // 2
            assert shown == f"{clip.start}, times {clip.decay} every half epoch"
        else:
            assert float(shown) == clip(0) == clip(1000)
        for shown in filter(None, table["its own"][column].split(", ")):
            name, value = shown.strip("`").split("=")
            assert settings[name] == value.strip('"')


def test_numbers_of_the_page_of_dho2() -> None:
    text = text_of(DHO2_PAGE)
    options = config.FOSIOptions()
    assert f"**α** is {options.newton_scale} by default" in text
    assert f"at most {update.SGD_SCALE_CLIP:g} over SGD, and 1 over adaptive" in text
    assert f"at most {options.overhead} of the time of the other steps" in text
    products = update.max_products(options, 10**6, warm=False)
    assert f"fewer than about {products / options.overhead:g} steps has no refresh" in text

    for optimizer in (DHO2, MRDHO2):
        settings = paper_settings(optimizer, epoch_steps=10)
        sentence = (
            f"with {settings['num_largest']} eigenpairs and α = {settings['newton_scale'](0)}"
        )
        assert sentence in text
    assert inspect.signature(MRDHO2).parameters["final_update"].default == "guarded"


def test_messages_of_a_step() -> None:
    def fewest_and_most(model: str) -> str:
        counts = [
            run["collectives"]
            for run in stored("many_ranks")["rows"]
            if run["model"] == model and run["ranks"] == 4096 and "DHO2" not in run["system"]
        ]
        return f"{min(counts)} to {max(counts)}"

    text = text_of(DISTRIBUTED_PAGE)
    sentence = f"on 4,096 simulated ranks, we counted {fewest_and_most('narrow')} messages"
    assert sentence in text
    assert f"so ResNet-50 takes {fewest_and_most('resnet50')}." in text
