"""Steps of several passes: accumulation, validation beside, activations that are not kept."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from contract import (
    asking,
    assert_same_curvature,
    assert_same_factors,
    curvature_of,
    each_kronecker,
    each_system,
    eigenpairs_only,
    factors,
    make,
    same,
    take,
)
from models import CLASSES, ZOO, Checkpointed
from reference import cross_entropy
from stepped import SCALERS, assert_near, fixed_labels, reference, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from second_order import DHO2, CurvatureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reference import Batch

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)


# Accumulation.

ACCUMULATING = ["mlp", "conv_grouped", "shared_linear", "sequence_mlp", "inplace"]


@each_system
@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("k", [2, 4])
def test_k_micro_batches_equal_one_batch(System: Any, name: str, k: int) -> None:
    """With the loss of each divided by k, as one does; a module called twice included."""
    case = ZOO[name]
    model, twin = case.model(), case.model()
    declared = {} if System is DHO2 else {"accumulation_steps": k}
    optimizer, plain = make(System, model, **declared), make(System, twin)
    for x, y in case.batches(3):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(k), y.chunk(k), strict=True))
        for part_x, part_y in parts:
            (case.loss(model(part_x), part_y) / k).backward()
        asked = [asking(model, optimizer, part, case.loss) for part in parts]
        optimizer.step(**{name: [each[name] for each in asked] for name in asked[0]})
        take(twin, plain, (x, y), case.loss)
        if System is not DHO2:
            assert_same_factors(factors(optimizer), factors(plain), rtol=1e-9)
        assert_near(model, twin, atol=1e-11)


@each_kronecker
def test_accumulation_with_loss_scaling(System: Any) -> None:
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    scaler = SCALERS["torch.amp"]()
    optimizer = make(System, model, accumulation_steps=2, grad_scaler=scaler)
    (x, y) = BATCHES[0]
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        scaler.scale(cross_entropy(model(part_x), part_y) / 2).backward()
    scaler.step(optimizer)
    assert_same_factors(factors(optimizer), expected)


# Forwards that are not training, and training that is not in training mode.


def validate(model: nn.Module, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        model(batch[0])
    with torch.inference_mode():
        model(batch[0])
    model.train()


def forward_without_backward(model: nn.Module, batch: Batch) -> None:
    cross_entropy(model(batch[0]), batch[1])


def no_grad_in_training_mode(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model(batch[0])


@each_kronecker
def test_a_model_in_eval_mode_that_trains_is_preconditioned(System: Any) -> None:
    """Fine-tuning with frozen batch norm: `requires_grad` counts, not `training`."""
    case = ZOO["batch_norm"]
    model = case.model().eval()
    expected = reference(model, case.batch())
    optimizer = make(System, model)
    take(model, optimizer, case.batch())
    assert_same_factors(factors(optimizer), expected)


def average(model: nn.Module, batch: Batch) -> None:
    ema = AveragedModel(model)
    cross_entropy(ema(batch[0]), batch[1]).backward()
    ema.update_parameters(model)


@each_system
@pytest.mark.parametrize("when", ["before the forward", "before the backward", "before the step"])
@pytest.mark.parametrize(
    "disturb", [validate, no_grad_in_training_mode, forward_without_backward, average]
)
def test_a_step_is_what_it_would_be_without_passes_beside_it(
    System: Any, disturb: Callable[[nn.Module, Batch], None], when: str
) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    for (x, y), other in pairwise(BATCHES):
        optimizer.zero_grad()
        if when == "before the forward":
            disturb(model, other)
        loss = cross_entropy(model(x), y)
        if when == "before the backward":
            disturb(model, other)
            optimizer.zero_grad()
        loss.backward()
        if when == "before the step":
            disturb(model, other)
        optimizer.step(**asking(model, optimizer, (x, y)))
        take(twin, plain, (x, y))
        assert same(model, twin)
        if System is not DHO2 or plain.curvature.refreshes:
            assert_same_curvature(curvature_of(optimizer), curvature_of(plain), rtol=0)


# Activations: in place, checkpointed, offloaded.


@each_kronecker
@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh], ids=lambda a: a.__name__
)
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_in_place_activation_after_a_layer_equals_the_plain_one(
    System: Any, activation: Any, fisher: str
) -> None:
    x, y = ZOO["conv"].batch()
    models = []
    for inplace in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 2), activation(inplace=inplace), nn.Flatten(),
            nn.Linear(64, 6), activation(inplace=inplace), nn.Linear(6, CLASSES),
        ).double()  # fmt: skip
        optimizer = make(System, model, fisher=fisher, likelihood=fixed_labels(y))
        expected = reference(copy.deepcopy(models[0][0]), (x, y)) if models else None
        start = copy.deepcopy(model)
        take(model, optimizer, (x, y))
        models.append((start, model, factors(optimizer)))
        if expected:
            assert_same_factors(factors(optimizer), expected)
    assert same(models[0][1], models[1][1])
    assert_same_factors(models[1][2], models[0][2])


@each_kronecker
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_equals_plain(System: Any, reentrant: bool) -> None:
    """The forward runs twice, the statistics count once."""
    models = []
    for mode in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(mode).double()
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
        assert weights(optimizer) == {round((1 - 0.95**4) / 0.05, 12)}
        models.append((model, factors(optimizer)))
    assert_same_factors(models[1][1], models[0][1])
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@eigenpairs_only
def test_reentrant_checkpointing_is_refused_with_the_remedy_and_may_be_left_out_of_the_curvature(
    System: Any,
) -> None:
    """Nothing has changed then, and the step may be taken again."""
    torch.manual_seed(0)
    model = Checkpointed(True).double()
    optimizer = make(System, model, warmup_steps=0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CurvatureError, match=r"checkpoint\(\.\.\., use_reentrant=False\)"):
        take(model, optimizer, BATCHES[0])
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())

    def loss() -> Tensor:
        model.reentrant = None
        try:
            return cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
        finally:
            model.reentrant = True

    optimizer.step(curvature_closure=loss)
    torch.manual_seed(0)
    plain = Checkpointed(None).double()
    take(plain, make(System, plain, warmup_steps=0), BATCHES[0])
    assert_near(model, plain)
