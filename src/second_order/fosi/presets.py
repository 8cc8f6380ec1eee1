"""Settings of the FOSI step for kinds of training; what is given by name goes before them.

general      gradients are noisy and everything trains: few pairs, short Newton steps
fine-tuning  little trains, behind a frozen body: a product of the Hessian costs a small share of a
             gradient, so many pairs are cheap, from the first step on
full-batch   every gradient is of the same examples, which are the curvature batch: no noise to
             average out, so Newton steps are long
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from torch import nn

from second_order.contract.training import Training
from second_order.fosi.options import FOSIOptions
from second_order.options import check_choice

__all__ = ["PRESETS", "Preset", "PresetName", "check_given", "frozen_body", "suited"]

PresetName: TypeAlias = Literal["auto", "general", "fine-tuning", "full-batch"]

LARGE_BODY = 0.75
"""The share of the parameters that a frozen body has at least, for "auto" to see fine-tuning."""


@dataclass(frozen=True)
class Preset:
    """Options that a preset sets; :class:`~second_order.DHO2` says what each means."""

    largest: int = 10
    lanczos_iterations: int | None = None
    warmup_steps: int | None = None
    newton_scale: float = 0.1
    subspace_momentum: float | Literal["average"] = "average"


NAMES = [field.name for field in fields(Preset)]
PRESETS: dict[str, Preset] = {
    "general": Preset(),
    "fine-tuning": Preset(
        largest=70,
        lanczos_iterations=100,
        warmup_steps=0,
        newton_scale=0.5,
        subspace_momentum=0.0,
    ),
    "full-batch": Preset(warmup_steps=100, newton_scale=0.5, subspace_momentum=0.0),
}


def check_given(values: Mapping[str, Any]) -> None:
    """Check options before anything is made of them.

    Args:
        values: The options by name, and ``preset``; None for what a preset is to set.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value outside its bounds, or an unknown preset.
    """
    check_choice("preset", values["preset"], ["auto", *PRESETS])
    given = {name: values[name] for name in NAMES if values[name] is not None}
    FOSIOptions.of({**values, **asdict(PRESETS["general"]), **given})


def suited(values: Mapping[str, Any], training: Training) -> tuple[FOSIOptions, str]:
    """The options of a training, and a line that tells where they come from.

    Args:
        values: As for :func:`check_given`, which has checked them.
        training: The training; "auto" looks at what of it is frozen.
    """
    name, why = values["preset"], ""
    if name == "auto":
        share = frozen_body(training)
        name = "fine-tuning" if share >= LARGE_BODY else "general"
        why = f", as a frozen body holds {share:.1%} of the parameters" if share else ""
    given = {name: values[name] for name in NAMES if values[name] is not None}
    chosen, smallest = {**asdict(PRESETS[name]), **given}, values["smallest"]
    most = chosen["lanczos_iterations"]
    fits = most is None or chosen["largest"] + smallest <= most
    if "lanczos_iterations" in given:
        chosen["largest"] = chosen["largest"] if fits else max(most - smallest, 0)
    elif "largest" in given or not fits:
        chosen["lanczos_iterations"] = None
    shown = ", ".join(f"{key}={chosen[key]!r}" for key in NAMES if key not in given)
    return FOSIOptions.of({**values, **chosen}), f"settings: {name}{why}: {shown or 'all given'}"


def frozen_body(training: Training) -> float:
    """The share of the parameters that are frozen and come before the first that trains.

    Autograd's graph begins at the first parameter that trains. The order is that in which modules
    were registered, which is that of the forward pass in most models. Embeddings do not count, on
    either side: looking up costs nothing. 0.0 where the model is not known.
    """
    if not training.known:
        return 0.0
    tables = [m for m in training.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    looked_up = {id(p) for table in tables for p in table.parameters()}
    params = [p for p in training.model.parameters() if id(p) not in looked_up]
    trained = {id(p) for p in training.training_params()}
    first = next((i for i, p in enumerate(params) if id(p) in trained), 0)
    whole = sum(p.numel() for p in params)
    return sum(p.numel() for p in params[:first]) / whole if whole else 0.0
