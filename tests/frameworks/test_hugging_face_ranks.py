"""The Trainer and Accelerate on two processes, and checkpoints of what processes keep apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import BATCHES, CASE, launched, loss_of, optimizer_of, usual_loop
from optimizer_cases import EXACT, base_only
from ranks import shard, vector
from torch.nn.parallel import DistributedDataParallel

from second_order import DHO2, DPKFAC, KAISA, MRDHO2, DistKFAC

if TYPE_CHECKING:
    from pathlib import Path

    from pool import World

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
each_of_four = pytest.mark.parametrize("System", [KAISA, DPKFAC, DistKFAC, DHO2])


def assert_agreed(found: list[list[torch.Tensor]], rtol: float) -> None:
    """Both ranks have the same; all ways of training but the last led there, and that did not."""
    for own_value, first in zip(found[1], found[0], strict=True):
        assert torch.equal(own_value, first)
    *ways, usual, alone = found[0]
    bound = rtol * float(usual.abs().max())
    for way in ways:
        assert float((way - usual).abs().max()) <= bound
    assert float((usual - alone).abs().max()) > 100 * bound


def by_trainer(rank: int, world_size: int, System: Any, folder: Path) -> list[torch.Tensor]:
    """Undisturbed; from its checkpoint; by the usual loop; by the base alone."""
    import transformers_training as hf

    from second_order.integrations.transformers import MetricsCallback

    curved = hf.curved("Llama")

    def made(model: Any, **options: Any) -> Any:
        options = {"lr": hf.LR, "momentum": 0.9, **options}
        return optimizer_of(System, model, None, hf.loss_of, curved, **options)

    shared = {"ddp_backend": "gloo", "per_device_train_batch_size": 2}
    whole, half, wrapped, alone = (hf.model_of("Llama") for _ in range(4))
    with launched(rank, world_size):
        _, seen = hf.fit(
            whole,
            "Llama",
            folder,
            optimizers=(made(whole, gradient_averaging=False), None),
            callbacks=[MetricsCallback()],
            save_strategy="steps",
            save_steps=2,
            **shared,
        )
        path = str(folder / "checkpoint-2")
        hf.fit(half, "Llama", folder, optimizers=(made(half), None), resume=path, **shared)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (hf.STEPS - s) / hf.STEPS)

    models = [wrapped, alone]
    for model, only in zip(models, ({}, base_only(System)), strict=True):
        outer = DistributedDataParallel(model)
        optimizer = made(outer, **only)
        usual_loop(outer, optimizer, seen, loss=hf.loss_of, scheduler=schedule(optimizer))
    return [vector(model) for model in (whole, half, *models)]


@pytest.mark.works("Trainer DDP")
@each_of_four
def test_the_trainer_on_two_processes_equals_the_usual_loop(
    world: World, System: Any, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    assert_agreed(world.run(by_trainer, 2, System, tmp_path, timeout=240), rtol=1e-5)


def on_padded_text(rank: int, world_size: int, System: Any, folder: Path) -> Any:
    """The parameters in the end, and the batches of this process."""
    import transformers_training as hf

    model = hf.model_of("Llama")
    optimizer = System(model, lr=hf.LR, gradient_averaging=False, **EXACT)
    with launched(rank, world_size), hf.in_float64():
        _, seen = hf.fit(
            model,
            "Llama",
            folder,
            optimizers=(optimizer, None),
            data=hf.ragged("Llama"),
            collator=hf.padded,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=1,
            ddp_backend="gloo",
        )
    return vector(model), seen


@pytest.mark.parametrize("System", [KAISA, DistKFAC])
def test_padded_text_with_unequal_shares_of_the_targets_equals_one_process(
    world: World, System: Any, tmp_path: Path
) -> None:
    """One process takes each step in one pass. The Trainer divides by the targets of all ranks."""
    pytest.importorskip("transformers")
    import transformers_training as hf

    (found, seen), (other, other_seen) = world.run(on_padded_text, 2, System, tmp_path, timeout=240)
    assert torch.equal(found, other)
    shares = [sum(hf.targets(b) for b in batches[:2]) for batches in (seen, other_seen)]
    assert shares[0] != shares[1]
    model = hf.model_of("Llama")
    start = vector(model)
    optimizer = System(model, lr=hf.LR, **EXACT)
    steps = [[*seen[i : i + 2], *other_seen[i : i + 2]] for i in range(0, len(seen), 2)]
    with hf.in_float64():
        hf.on_whole_steps(model, optimizer, steps)
    expected = vector(model)
    assert float((found - expected).norm()) < 1e-8 * float((expected - start).norm())


def by_accelerate(rank: int, world_size: int, System: Any, folder: Path) -> list[torch.Tensor]:
    """Undisturbed, the optimizer made of the prepared model; from a checkpoint; the usual loop."""
    from accelerate import Accelerator
    from transformers_training import fresh_state

    batches = [shard(batch, rank, world_size) for batch in BATCHES]
    found = []

    def prepared() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(CASE.model())
        optimizer = accelerator.prepare(optimizer_of(System, model, momentum=0.9))
        assert optimizer.optimizer._training.under_ddp
        accelerator.register_save_state_pre_hook(
            lambda *_: optimizer.optimizer.consolidate(to=None)
        )
        return accelerator, model, optimizer

    def train(parts: tuple[Any, Any, Any], batches: Any) -> None:
        accelerator, model, optimizer = parts
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()

    with launched(rank, world_size):
        for stop in (len(batches), 3):
            with fresh_state():
                parts = prepared()
                train(parts, batches[:stop])
                if stop == 3:
                    parts[0].save_state(str(folder))
                    torch.distributed.barrier()
                    parts = prepared()
                    parts[0].load_state(str(folder))
                    train(parts, batches[stop:])
                found.append(vector(parts[1]))
    for only in ({}, base_only(System)):
        model = DistributedDataParallel(CASE.model())
        usual_loop(model, optimizer_of(System, model, momentum=0.9, **only), batches)
        found.append(vector(model))
    return found


@pytest.mark.works("Accelerate DDP")
@each_of_four
def test_accelerate_on_two_processes_equals_the_usual_loop(
    world: World, System: Any, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert_agreed(world.run(by_accelerate, 2, System, tmp_path, timeout=240), rtol=1e-10)


def with_accelerators(rank: int, world_size: int, folder: Path) -> list[str]:
    """The errors of MRDHO2 in the Trainer, and in Accelerate before and after `prepare`."""
    import transformers_training as hf
    from accelerate import Accelerator

    messages = []
    with launched(rank, world_size):
        model = hf.model_of("Llama")
        optimizer = optimizer_of(MRDHO2, model, None, hf.loss_of, hf.curved("Llama"), lr=hf.LR)
        shared = {"ddp_backend": "gloo", "per_device_train_batch_size": 2}
        with pytest.raises(ValueError, match="worker_group") as error:
            hf.fit(model, "Llama", folder, optimizers=(optimizer, None), **shared)
        messages.append(str(error.value))
        with hf.fresh_state():
            accelerator = Accelerator(cpu=True)
            plain = CASE.model()
            model, _ = accelerator.prepare(plain, optimizer_of(MRDHO2, plain))
            with pytest.raises(ValueError, match="worker_group") as error:
                accelerator.backward(loss_of(model, BATCHES[0]))
            messages.append(str(error.value))
            with pytest.raises(ValueError, match="worker_group") as error:
                optimizer_of(MRDHO2, model)
            messages.append(str(error.value))
    return messages


OVER = "wrapped in DistributedDataParallel over"


@pytest.mark.refused("Trainer DDP", "MRDHO2", when="with accelerators", message=OVER)
@pytest.mark.refused("Accelerate DDP", "MRDHO2", when="with accelerators", message=OVER)
def test_ddp_over_accelerators_is_refused_on_every_rank(world: World, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for by_trainer, before, after in world.run(with_accelerators, 2, tmp_path, timeout=240):
        assert OVER in by_trainer
        assert OVER in before
        assert "with a model in DistributedDataParallel" in after
