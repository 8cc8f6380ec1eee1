"""Steps of several passes: accumulation, validation beside, activations that are not kept."""

from __future__ import annotations

import copy
import gc
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
from stepped import SCALERS, assert_near, first_factors, fixed_labels, inputs_of, reference, weights
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

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
def test_accumulation_that_is_denied_shows(System: Any) -> None:
    """The control: loss / 2 makes G four times smaller."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model, accumulation_steps=1)
    (x, y) = BATCHES[0]
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        (cross_entropy(model(part_x), part_y) / 2).backward()
    optimizer.step()
    torch.testing.assert_close(factors(optimizer)["4"][1] * 4, expected["4"][1])


@each_kronecker
def test_unequal_micro_batches_are_weighted_by_examples(System: Any) -> None:
    """A sum of losses has gradients that do not depend on how the batch is cut."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model, loss_reduction="sum")
    x, y = BATCHES[0]
    for part in (slice(0, 3), slice(3, 8)):
        functional.cross_entropy(model(x[part]), y[part], reduction="sum").backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
@pytest.mark.parametrize("n", [1, 4, 8])
def test_gradient_factors_do_not_depend_on_the_size_of_the_batch(System: Any, n: int) -> None:
    """A batch of n copies of one example has the factors of that example."""
    x, y = MLP.batch(1)
    found = first_factors(System, MLP, (x.repeat(n, 1), y.repeat(n)))
    assert_same_factors(found, reference(MLP.model(), (x, y)))


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


def refresh_batch_norm(model: nn.Module, batch: Batch) -> None:
    update_bn([batch[0]], model)


@each_kronecker
@pytest.mark.parametrize(
    ("forward", "fisher"),
    [
        (validate, "empirical"),
        (validate, "sampled"),
        (no_grad_in_training_mode, "empirical"),
        (no_grad_in_training_mode, "sampled"),
        (refresh_batch_norm, "empirical"),
        (refresh_batch_norm, "sampled"),
        (forward_without_backward, "empirical"),
        (forward_without_backward, "sampled"),
    ],
)
def test_a_forward_that_sees_no_backward_changes_no_factor(
    System: Any, forward: Callable[[nn.Module, Batch], None], fisher: str
) -> None:
    case = ZOO["batch_norm"]
    model = case.model()
    optimizer = make(System, model, fisher=fisher)
    first, other, *_ = case.batches(3)
    take(model, optimizer, first)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    parameters = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    forward(model, other)
    optimizer.step()
    assert same(model.parameters(), parameters)
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry["curvature"].items():
            if isinstance(value, Tensor):
                assert torch.equal(value, before[index]["curvature"][key])


@each_kronecker
def test_validation_between_forward_and_backward_changes_nothing(System: Any) -> None:
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    validate(model, BATCHES[1])
    forward_without_backward(model, BATCHES[2])
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
    assert weights(optimizer) == {1}


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


@eigenpairs_only
def test_batch_norm_has_the_running_statistics_of_training_alone(System: Any) -> None:
    """The curvature's passes are not among them; a model in eval mode stays there, and trains."""
    case = ZOO["batch_norm"]
    model, twin = case.model(), case.model()
    optimizer = make(System, model)
    for batch in case.batches(4):
        twin.load_state_dict(model.state_dict())
        take(model, optimizer, batch)
        twin(batch[0])
        assert same(model.buffers(), twin.buffers())
    assert optimizer.curvature.refreshes == 2
    model.eval()
    before = copy.deepcopy(model)
    for batch in case.batches(2):
        take(model, optimizer, batch)
    assert optimizer.curvature.refreshes == 3
    assert not any(part.training for part in model.modules())
    assert same(model.buffers(), before.buffers())
    assert not any(map(torch.equal, model.parameters(), before.parameters()))


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


@eigenpairs_only
@pytest.mark.parametrize(
    "activation", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh], ids=lambda a: a.__name__
)
def test_in_place_activations_train_as_plain_ones(System: Any, activation: Any) -> None:
    models = []
    for inplace in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 2), activation(inplace=inplace), nn.Flatten(),
            nn.Linear(64, 6), activation(inplace=inplace), nn.Linear(6, CLASSES),
        ).double()  # fmt: skip
        optimizer = make(System, model)
        for batch in ZOO["conv"].batches(3):
            take(model, optimizer, batch)
        assert optimizer.curvature.refreshes == 1
        models.append(model)
    assert_near(*models)


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
def test_non_reentrant_checkpointing_trains_as_plain(System: Any) -> None:
    models = []
    for mode in (None, False):
        torch.manual_seed(0)
        model = Checkpointed(mode).double()
        optimizer = make(System, model)
        for batch in BATCHES:
            take(model, optimizer, batch)
        models.append(model)
    assert_near(*models)


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


@eigenpairs_only
def test_offloaded_activations_train_as_plain_ones(System: Any) -> None:
    model, twin = MLP.model(), MLP.model()
    optimizer, plain = make(System, model), make(System, twin)
    for batch in BATCHES:
        with save_on_cpu():
            take(model, optimizer, batch)
        take(twin, plain, batch)
    assert_near(model, twin)


class Repeated(nn.Module):
    """One layer applied twice, each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.reentrant is None:
                x = self.part(x)
            else:
                x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.head(x)


@each_kronecker
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_layer_used_twice_in_checkpoints_has_the_lumped_statistics(
    System: Any, reentrant: bool | None
) -> None:
    torch.manual_seed(0)
    model = Repeated(reentrant).double()
    plain = copy.deepcopy(model)
    plain.reentrant = None
    expected = reference(plain, BATCHES[0])
    optimizer = make(System, model)
    take(model, optimizer, BATCHES[0])
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_checkpointed_activations_are_not_held(System: Any) -> None:
    """The memory that non-reentrant checkpointing frees stays free."""
    for mode, freed in ((None, False), (False, True)):
        model = Checkpointed(mode).double()
        alive = inputs_of(model.middle[1])
        optimizer = make(System, model)
        loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
        gc.collect()
        assert [ref.expired() for ref in alive] == [freed]
        loss.backward()
        optimizer.step()
        assert "middle.1" in factors(optimizer)


@each_kronecker
def test_inputs_are_saved_through_the_saved_tensor_hooks_in_force(System: Any) -> None:
    """Offloading takes our copy of the input along, as it takes autograd's own."""
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    alive = inputs_of(model[2])
    optimizer = make(System, model)
    with saved_tensors_hooks(torch.clone, lambda packed: packed):
        loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    gc.collect()
    assert [ref.expired() for ref in alive] == [True]
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)


@each_kronecker
def test_save_on_cpu_equals_plain(System: Any) -> None:
    model = MLP.model()
    expected = reference(model, BATCHES[0])
    optimizer = make(System, model)
    with save_on_cpu():
        loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    loss.backward()
    optimizer.step()
    assert_same_factors(factors(optimizer), expected)
