"""The Trainer of transformers trains as the usual loop does, with every optimizer."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import EXACT, each_kronecker, each_of_five
from stacks import assert_as_usual, optimizer_of, trainable

from second_order import parameter_groups

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@pytest.fixture(scope="module")
def hf() -> ModuleType:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import in_transformers

    return in_transformers


def made(hf: Any, System: Any, model: Any, name: str, **options: Any) -> Any:
    return optimizer_of(System, model, None, hf.loss_of, hf.curved(name), lr=hf.LR, **options)


def linear(optimizer: Any, steps: int = 4) -> Any:
    """The schedule that the Trainer makes unless told otherwise."""
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
def test_an_optimizer_handed_over(hf: Any, System: Any, tmp_path: Path) -> None:
    """`optimizers=(optimizer, None)`, with the Trainer's schedule and clipping."""
    model = hf.model_of("BERT")
    optimizer = made(hf, System, model, "BERT", momentum=0.9)
    _, seen = hf.fit(model, "BERT", tmp_path, optimizers=(optimizer, None), max_grad_norm=0.1)
    options = {"momentum": 0.9}
    assert_like_the_loop(hf, model, System, "BERT", seen, clip=0.1, options=options)


@each_kronecker
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_padded_text_accumulated_trains_as_whole_batches(
    hf: Any, System: Any, name: str, base: Any, tmp_path: Path
) -> None:
    """One to five targets a pass, of which the optimizer is told nothing.

    GPT-2 looks positions up once for all texts of a pass: their rows are no examples.
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
        return trainable(model), optimizer.statistics()["clip"], seen

    found, clip, seen = by_trainer()
    model = hf.model_of(name)
    start, plain = trainable(model), System(model, **options)
    with hf.in_float64():
        hf.on_whole_steps(model, plain, [seen[i : i + 4] for i in range(0, len(seen), 4)])
    moved = float((trainable(model) - start).norm())
    assert float((found - trainable(model)).norm()) < 1e-9 * moved
    assert clip == pytest.approx(plain.statistics()["clip"], nan_ok=True)
    control = by_trainer(loss_reduction="mean")[0]
    assert float((control - trainable(model)).norm()) > 1e-2 * moved


@each_of_five
@pytest.mark.parametrize("groups", ["one", "decay"])
def test_a_class_and_its_keywords(hf: Any, System: Any, groups: str, tmp_path: Path) -> None:
    """`optimizer_cls_and_kwargs`: the class with `model` among the keywords, or a factory.

    The Trainer gives the class its model in place of its groups, and calls a factory's result
    with the model: so it may have groups.
    """
    model = hf.model_of("Llama")
    keywords: dict[str, Any] = {"lr": hf.LR}

    def decayed(model: Any) -> Any:
        return parameter_groups(model, weight_decay=0.1)

    if groups == "one":
        given = (with_closure(hf, System), {**keywords, "model": model})
    else:

        def optimizer(model: Any, **keywords: Any) -> Any:
            return with_closure(hf, System)(decayed(model), model=model, **keywords)

        given = (lambda: optimizer, keywords)
    trainer, seen = hf.fit(model, "Llama", tmp_path, optimizer_cls_and_kwargs=given)
    decays = {group["weight_decay"] for group in trainer.optimizer.param_groups}
    assert decays == ({0.0} if groups == "one" else {0.0, 0.1})
    how = {} if groups == "one" else {"params": decayed}
    assert_like_the_loop(hf, model, System, "Llama", seen, **how)


def with_closure(hf: Any, System: Any) -> Any:
    """The class, as it stands in the tests, with a curvature closure where it needs one."""

    class Made(System):
        def __new__(cls, params: Any, **keywords: Any) -> Any:
            inner = keywords.pop("model", params)
            groups = None if inner is params else params
            return optimizer_of(System, inner, groups, hf.loss_of, hf.curved("Llama"), **keywords)

    return Made
