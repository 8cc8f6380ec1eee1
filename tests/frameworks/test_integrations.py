"""`second_order.integrations`: what each framework makes trains as the optimizer made directly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_training import trainable
from torch import nn

from second_order import KAISA

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, Any] = {"damping": 0.2, "inv_update_steps": 2, "factor_update_steps": 1}


# ---------------------------------------------------------------------------------- transformers


def test_the_trainer_logs_metrics_to_all_reporters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import transformers_training as hf

    from second_order.integrations.transformers import MetricsCallback

    reported: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            reported.append(dict(kwargs["logs"]))

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
    expected = {name for name, value in optimizer.metrics().items() if not math.isnan(value)}
    for logs in (reported[1], trainer.state.log_history[1]):
        found = {name.removeprefix("second_order/") for name in logs if "/" in name}
        assert found == expected
        assert logs["second_order/step"] == 4
    assert "second_order/step" not in reported[-1]  # the summary of the whole run
    assert not any(math.isnan(value) for logs in reported for value in logs.values())


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_the_state_is_consolidated_before_the_trainer_saves(tmp_path: Path, strategy: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import transformers_training as hf

    from second_order.integrations.transformers import MetricsCallback

    model = hf.model_of("Llama")
    optimizer = KAISA(model, lr=hf.LR, **OPTIONS)
    consolidated: list[int] = []
    optimizer.consolidate = lambda to=None: consolidated.append(to)  # type: ignore[method-assign]
    how = {"save_strategy": strategy, "save_steps": 1, "use_cpu": True, "report_to": "none"}
    with hf.fresh_state():
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(str(tmp_path), **how),
            optimizers=(optimizer, None),
        )
        MetricsCallback.add_to(trainer)
        handler = trainer.callback_handler
        handler.optimizer = optimizer
        trainer.state.global_step = 1
        trainer.state.save_steps = 1
        trainer.state.max_steps = 2
        happens = handler.on_step_end if strategy == "steps" else handler.on_epoch_end
        control = happens(trainer.args, trainer.state, trainer.control)
    assert control.should_save
    assert consolidated == [0]


# --------------------------------------------------------------------------------------- axolotl


def test_axolotl_trains_with_the_plugins_optimizer(tmp_path: Path) -> None:
    base = pytest.importorskip("axolotl.integrations.base")
    mixins = pytest.importorskip("axolotl.core.trainers.mixins.optimizer")
    import transformers_training as hf
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
