"""`second_order.integrations`: what each framework makes trains as the optimizer made directly."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stacks import trainable
from torch import nn

from second_order import KAISA, DistKFAC

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, Any] = {"damping": 0.2, "inv_update_steps": 2, "factor_update_steps": 1}


def train(model: nn.Module, optimizer: Any, steps: int = 5) -> torch.Tensor:
    """Train on random images; returns the parameters."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(8, 3, 32, 32, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
        optimizer.step()
    return trainable(model)


def network() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, stride=4)
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(256, 3))


def from_the_page(framework: str, **names: Any) -> Any:
    """Run a framework's block of docs/stacks.md; returns the optimizer that it makes."""
    text = (Path(__file__).parents[2] / "docs" / "stacks.md").read_text("utf-8")
    block = text.split(f"**{framework}.**")[1].split("```python\n")[1].split("```")[0]
    exec(compile(block, "stacks.md", "exec"), names)
    return names["optimizer"]


# ---------------------------------------------------------------------------------- transformers


def test_the_trainer_logs_metrics_to_all_reporters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import in_transformers as hf

    from second_order.integrations.transformers import MetricsCallback

    reported: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            reported.append(dict(given["logs"]))

    model = hf.model_of("Llama")
    optimizer = KAISA(model, lr=hf.LR, **OPTIONS)
    how = {"max_steps": 4, "logging_steps": 2, "disable_tqdm": True, "use_cpu": True}
    how |= {"save_strategy": "no", "report_to": "none"}
    with hf.fresh_state():
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(str(tmp_path), **how),
            train_dataset=hf.examples("Llama"),
            data_collator=hf.collated,
            optimizers=(optimizer, None),
            callbacks=[Reporter()],
        )
        MetricsCallback.add_to(trainer)
        trainer.train()
    expected = {name for name, value in optimizer.statistics().items() if not math.isnan(value)}
    for logs in (reported[1], trainer.state.log_history[1]):
        found = {name.removeprefix("second_order/") for name in logs if "/" in name}
        assert found == expected
        assert logs["second_order/step"] == 4
    assert "second_order/step" not in reported[-1]  # the summary of the whole run
    assert not any(math.isnan(value) for logs in reported for value in logs.values())


# ------------------------------------------------------------------------------------------ timm


def test_timm_makes_optimizers_by_name() -> None:
    timm = pytest.importorskip("timm")
    from second_order.integrations.timm import register

    names = register()
    assert names == ["kaisa", "kaisaadamw", "dpkfac", "dpkfacadamw", "distkfac", "distkfacadamw"]
    create: Callable[..., Any] = timm.optim.create_optimizer_v2
    for name, base, keywords in (
        ("kaisa", torch.optim.SGD, {"momentum": 0.8}),
        ("kaisaadamw", torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-6}),
    ):
        model = timm.create_model("test_vit", num_classes=3, img_size=32)
        twin = copy.deepcopy(model)
        made = create(model, opt=name, lr=0.01, weight_decay=0.05, **keywords, **OPTIONS)
        assert sorted(group["weight_decay"] for group in made.param_groups) == [0.0, 0.05]
        groups = timm.optim.param_groups_weight_decay(
            twin, 0.05, no_weight_decay_list=twin.no_weight_decay()
        )
        direct = KAISA(groups, model=twin, lr=0.01, base=base, **keywords, **OPTIONS)
        assert torch.equal(train(model, made), train(twin, direct))
    assert type(from_the_page("timm", model=network())) is KAISA
    made = create(network(), opt="distkfac", lr=0.01)
    assert isinstance(made, DistKFAC)
    made.close()
    layers = create(timm.create_model("test_vit"), opt="kaisa", lr=0.01, layer_decay=0.7)
    assert len({group["lr_scale"] for group in layers.param_groups}) > 2


# --------------------------------------------------------------------------------------- axolotl


def test_axolotl_trains_with_the_plugins_optimizer(tmp_path: Path) -> None:
    base = pytest.importorskip("axolotl.integrations.base")
    mixins = pytest.importorskip("axolotl.core.trainers.mixins.optimizer")
    import in_transformers as hf
    from axolotl.utils.dict import DictDefault

    plugin = base.load_plugin("second_order.integrations.axolotl.SecondOrderPlugin")
    assert plugin.get_input_args() == "second_order.integrations.axolotl.SecondOrderArgs"
    options = {"optimizer": "KAISA", "base": "AdamW", **OPTIONS}

    def trainer_of(model: nn.Module, second_order: Any) -> Any:
        arguments = hf.TrainingArguments(
            str(tmp_path), max_steps=4, learning_rate=0.01, weight_decay=0.1, logging_steps=2,
            use_cpu=True, disable_tqdm=True, save_strategy="no", report_to="none",
        )  # fmt: skip
        for name in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
            setattr(arguments, name, None)
        trainer = mixins.OptimizerMixin(
            model, arguments, train_dataset=hf.examples("Llama"), data_collator=hf.collated
        )
        plugin.post_trainer_create(DictDefault(second_order=second_order), trainer)
        return trainer

    with hf.fresh_state():
        model = hf.model_of("Llama")
        trainer = trainer_of(model, options)
        trainer.train()
        made = trainer.optimizer.optimizer
        assert type(made) is KAISA
        assert sorted({group["weight_decay"] for group in made.param_groups}) == [0.0, 0.1]
        assert trainer.state.log_history[1]["second_order/step"] == 4

        twin = hf.model_of("Llama")
        other = trainer_of(twin, None)
        groups = other.create_optimizer_grouped_parameters(twin, {"lr": 0.01})
        direct = KAISA(groups, model=twin, lr=0.01, base=torch.optim.AdamW, **OPTIONS)
        other.optimizer = direct
        other.train()
        assert torch.equal(trainable(model), trainable(twin))
        assert trainer_of(twin, {"lr": 0.5}).optimizer_cls_and_kwargs[1]["lr"] == 0.5
        with pytest.raises(ValueError, match="optimizer='KAISER' is not one of KAISA, DPKFAC"):
            trainer_of(twin, {"optimizer": "KAISER"})


# ------------------------------------------------------------------------------------ torchtitan


def test_torchtitan_builds_and_resumes(tmp_path: Path) -> None:
    titan = pytest.importorskip("torchtitan.components.optimizer")
    import torch.distributed.checkpoint as dcp

    from second_order.integrations.torchtitan import SecondOrderOptimizersContainer

    def config_of(name: str, **keywords: Any) -> Any:
        options = {"lr": 0.01, "weight_decay": 0.1}
        group = titan.ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=options)
        return SecondOrderOptimizersContainer.Config(
            implementation="for-loop",
            param_groups=[group],
            optimizer_factory_kwargs_by_name={name: keywords},
        )

    config = config_of("KAISA", base=torch.optim.AdamW, **OPTIONS)
    model, twin = network(), network()
    container = config.build(model_parts=[model])
    assert type(container) is SecondOrderOptimizersContainer
    options = {"base": torch.optim.AdamW, "foreach": False, "weight_decay": 0.1, **OPTIONS}
    direct = KAISA(twin, lr=0.01, **options)
    assert torch.equal(train(model, container), train(twin, direct))

    models = [network(), network()]
    for each in models:
        each.load_state_dict(model.state_dict())
    resumed, expected = config.build(model_parts=models[:1]), KAISA(models[1], lr=0.01, **options)
    dcp.save({"optimizer": container}, checkpoint_id=tmp_path)
    dcp.load({"optimizer": resumed}, checkpoint_id=tmp_path)
    expected.load_state_dict(direct.state_dict())
    assert torch.equal(train(models[0], resumed), train(models[1], expected))
    (made,) = from_the_page("torchtitan").build(model_parts=[network()])
    assert type(made) is KAISA
    (adamw,) = config_of("AdamW").build(model_parts=[network()])
    assert type(adamw) is torch.optim.AdamW
