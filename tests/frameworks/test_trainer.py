"""The Trainer of transformers trains as the usual loop does, with every optimizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import each_of_five, each_system, make
from stacks import assert_as_usual, optimizer_of

from second_order import DHO2, KAISA, MRDHO2

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


def curved(hf: Any, name: str) -> Any:
    return hf.collated(hf.examples(name)[:3])


def made(hf: Any, System: Any, model: Any, name: str, **options: Any) -> Any:
    return optimizer_of(System, model, None, hf.loss_of, curved(hf, name), lr=hf.LR, **options)


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
            "curved": curved(hf, name),
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


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_language_models(hf: Any, name: str, tmp_path: Path) -> None:
    """Over AdamW, with accumulation: each loss is a sum over the tokens of all of a step's."""
    model = hf.model_of(name)
    options = {"base": torch.optim.AdamW, "weight_decay": 0.1}
    optimizer = made(hf, KAISA, model, name, **options)
    _, seen = hf.fit(
        model,
        name,
        tmp_path,
        optimizers=(optimizer, None),
        gradient_accumulation_steps=2,
        max_steps=2,
    )
    assert_like_the_loop(
        hf,
        model,
        KAISA,
        name,
        seen,
        accumulate=2,
        options=options,
        schedule=partial(linear, steps=2),
        rtol=1e-4,
    )


@each_of_five
@pytest.mark.parametrize("groups", ["one", "decay"])
def test_a_class_and_its_keywords(hf: Any, System: Any, groups: str, tmp_path: Path) -> None:
    """`optimizer_cls_and_kwargs`: with `model` among the keywords, or bound to the class.

    Bound, the Trainer's groups of what decays and what does not stay.
    """
    model = hf.model_of("Llama")
    keywords = {"lr": hf.LR}
    if groups == "one":
        given = (partial(_closing, hf, System), {**keywords, "model": model})
    else:
        given = (partial(_closing, hf, System, model=model), keywords)
    trainer, seen = hf.fit(
        model, "Llama", tmp_path, optimizer_cls_and_kwargs=given, weight_decay=0.1
    )
    decays = {group["weight_decay"] for group in trainer.optimizer.param_groups}
    assert decays == ({0.0} if groups == "one" else {0.0, 0.1})

    def decayed(model: Any) -> Any:
        pairs = [(p.ndim > 1, p) for p in model.parameters()]
        return [
            {"params": [p for matrix, p in pairs if matrix is yes], "weight_decay": 0.1 * yes}
            for yes in (True, False)
        ]

    how = {} if groups == "one" else {"params": decayed}
    assert_like_the_loop(hf, model, System, "Llama", seen, **how)


def _closing(hf: Any, System: Any, params: Any, **keywords: Any) -> Any:
    """The optimizer as it stands in the tests, with a curvature closure where it needs one."""
    model = keywords.get("model", params)
    optimizer = make(System, params, **keywords)
    if System in (DHO2, MRDHO2):
        batch = curved(hf, "Llama")
        optimizer.curvature_closure = lambda: hf.loss_of(model, batch)
    return optimizer


@each_of_five
def test_resume(hf: Any, System: Any, tmp_path: Path) -> None:
    options = {"base": torch.optim.Adam}
    first, second = hf.model_of("BERT"), hf.model_of("BERT")
    optimizer = made(hf, System, first, "BERT", **options)
    saved = {"save_strategy": "steps", "save_steps": 2}
    _, seen = hf.fit(first, "BERT", tmp_path, optimizers=(optimizer, None), **saved)
    assert_like_the_loop(hf, first, System, "BERT", seen, options=options)
    for p in second.parameters():
        p.data.zero_()  # all comes from the checkpoint
    optimizer = made(hf, System, second, "BERT", **options)
    _, seen = hf.fit(
        second,
        "BERT",
        tmp_path,
        optimizers=(optimizer, None),
        resume=str(tmp_path / "checkpoint-2"),
    )
    assert len(seen) == 2
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


@each_system
def test_bfloat16(hf: Any, System: Any, tmp_path: Path) -> None:
    model = hf.model_of("BERT").float()
    optimizer = made(hf, System, model, "BERT")
    _, seen = hf.fit(model, "BERT", tmp_path, optimizers=(optimizer, None), bf16=True)
    how = {"start": hf.model_of("BERT").float(), "autocast": torch.bfloat16}
    assert_like_the_loop(hf, model, System, "BERT", seen, rtol=1e-5, **how)
