"""The Trainer of transformers trains as the usual loop does, with every optimizer."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import assert_as_usual, decayed_groups, optimizer_of, trainable
from optimizer_cases import EXACT, each_of_five

from second_order import DPKFAC, KAISA, DistKFAC

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import transformers_training

    return transformers_training


def made(hf: Any, System: Any, model: Any, name: str, **options: Any) -> Any:
    return optimizer_of(System, model, None, hf.loss_of, hf.curved(name), lr=hf.LR, **options)


def linear(optimizer: Any, steps: int = 4) -> Any:
    """The default schedule of the Trainer."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)


def assert_like_the_loop(
    hf: Any, model: Any, System: Any, name: str, seen: Any, **how: Any
) -> None:
    """The loss is computed in float32 by most of these models."""
    assert_as_usual(
        model,
        System,
        **{
            "start": hf.model_of(name),
            "batches": seen,
            "loss": hf.loss_of,
            "curved": hf.curved(name),
            "schedule": linear,
            "rtol": 1e-6,
            **how,
            "options": {"lr": hf.LR, **how.get("options", {})},
        },
    )


@pytest.mark.works("Trainer")
@each_of_five
def test_the_trainer_accepts_an_optimizer(hf: Any, System: Any, tmp_path: Path) -> None:
    """`optimizers=(optimizer, None)`, with the Trainer's schedule and clipping."""
    model = hf.model_of("BERT")
    optimizer = made(hf, System, model, "BERT", momentum=0.9)
    _, seen = hf.fit(model, "BERT", tmp_path, optimizers=(optimizer, None), max_grad_norm=0.1)
    options = {"momentum": 0.9}
    assert_like_the_loop(hf, model, System, "BERT", seen, clip=0.1, options=options)


@pytest.mark.parametrize(
    ("System", "name", "base"),
    [
        (KAISA, "Llama", torch.optim.AdamW),
        (KAISA, "GPT-2", torch.optim.SGD),
        (DPKFAC, "GPT-2", torch.optim.AdamW),
        (DistKFAC, "Llama", torch.optim.SGD),
    ],
)
def test_padded_text_accumulated_trains_as_whole_batches(
    hf: Any, System: Any, name: str, base: Any, tmp_path: Path
) -> None:
    """One to five targets per pass. The optimizer does not get their number.

    GPT-2 looks positions up once for all texts of a pass, so their rows are not examples.
    """
    options = {"lr": hf.LR, "base": base, "max_staleness": 0, "skip_layers": ["*wpe"], **EXACT}
    options = {key: value for key, value in options.items() if key in signature(System).parameters}

    def by_trainer(**more: Any) -> tuple[Any, Any, Any]:
        model = hf.model_of(name)
        optimizer = System(model, gradient_averaging=False, **options, **more)
        with hf.in_float64():
            _, seen = hf.fit(
                model,
                name,
                tmp_path,
                optimizers=(optimizer, None),
                data=hf.ragged(name),
                collator=hf.padded,
                gradient_accumulation_steps=4,
                per_device_train_batch_size=1,
            )
        return trainable(model), optimizer.metrics()["clip"], seen

    found, clip, seen = by_trainer()
    model = hf.model_of(name)
    start = trainable(model)
    plain = System(model, **options)
    with hf.in_float64():
        hf.on_whole_steps(model, plain, [seen[i : i + 4] for i in range(0, len(seen), 4)])
    moved = float((trainable(model) - start).norm())
    assert float((found - trainable(model)).norm()) < 1e-9 * moved
    assert clip == pytest.approx(plain.metrics()["clip"], nan_ok=True)
    control = by_trainer(loss_reduction="mean")[0]
    assert float((control - trainable(model)).norm()) > 1e-2 * moved


@each_of_five
@pytest.mark.parametrize("groups", ["model", "factory", "Trainer"])
def test_the_trainer_accepts_a_class_and_its_keywords(
    hf: Any, System: Any, groups: str, tmp_path: Path
) -> None:
    """`optimizer_cls_and_kwargs`: the class, or a factory.

    The Trainer gives a class its groups, or what `model` is among the keywords, and calls a
    factory's result with the model: so that may have groups.
    """
    model = hf.model_of("Llama")
    keywords: dict[str, Any] = {"lr": hf.LR}

    def decayed(model: Any) -> Any:
        return decayed_groups(model, weight_decay=0.1)

    class Made(System):
        """The class with the options of these tests, and the closure if it needs one."""

        def __new__(cls, params: Any, **keywords: Any) -> Any:
            params = None if params is model else params
            curved = hf.curved("Llama")
            return optimizer_of(System, model, params, hf.loss_of, curved, **keywords)

    arguments: Any = {
        "model": (Made, {**keywords, "model": model}),
        "factory": (lambda: lambda model, **keywords: Made(decayed(model), **keywords), keywords),
        "Trainer": (Made, keywords),
    }
    trainer, seen = hf.fit(model, "Llama", tmp_path, optimizer_cls_and_kwargs=arguments[groups])
    made = trainer.optimizer.param_groups
    assert len(made) == (1 if groups == "model" else 2)
    assert {group["weight_decay"] for group in made} == ({0.0, 0.1} if groups == "factory" else {0})

    def divided(model: Any) -> Any:
        decays = trainer.get_decay_parameter_names(model)
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, p in model.named_parameters():
            parts[name in decays].append(p)
        return [{"params": params} for params in parts.values()]

    how: Any = {"model": {}, "factory": {"params": decayed}, "Trainer": {"params": divided}}
    assert_like_the_loop(hf, model, System, "Llama", seen, **how[groups])
