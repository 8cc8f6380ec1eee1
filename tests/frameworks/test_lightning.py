"""Lightning trains as the usual loop does, with every optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_training import BATCHES, assert_as_usual
from optimizer_cases import each_of_five

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")


@pytest.fixture(scope="module")
def lit() -> ModuleType:
    pytest.importorskip("lightning.pytorch")
    import lightning_training

    return lightning_training


@pytest.mark.works("Lightning")
@each_of_five
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_optimization(lit: Any, System: Any, manual: bool) -> None:
    module = lit.Lit(System, manual=manual, momentum=0.9)
    lit.fit(module)
    assert_as_usual(module.net, System, options={"momentum": 0.9})


@each_of_five
def test_accumulation_clipping_and_a_schedule(lit: Any, System: Any) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    class Scheduled(lit.Lit):
        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer()
            config = {"scheduler": schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    module = Scheduled(System)
    lit.fit(module, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert_as_usual(module.net, System, accumulate=2, clip=0.1, schedule=schedule)


@each_of_five
def test_lightnings_wrapper_passes_calls_on(lit: Any, System: Any) -> None:
    """It imitates the optimizer's class and has nothing of its own: all goes to the optimizer."""

    class Asking(lit.Lit):
        def training_step(self, batch: Any, index: int) -> None:
            wrapper = self.optimizers()
            optimizer = wrapper.optimizer
            assert isinstance(wrapper, System)
            assert str(wrapper.summary()) == str(optimizer.summary())
            assert wrapper.param_groups is optimizer.param_groups
            self.manual_backward(self.loss_of(BATCHES[0]))  # of another batch; dropped with
            wrapper.zero_grad()
            self.manual_backward(self.loss_of(batch))
            wrapper.step()
            if index == 2:
                saved = wrapper.state_dict()
                wrapper.param_groups = [dict(group) for group in optimizer.param_groups]
                assert "param_groups" not in vars(wrapper)
                assert wrapper.param_groups is optimizer._base.param_groups
                wrapper.load_state_dict(saved)
                assert wrapper.param_groups is optimizer._base.param_groups

    module = Asking(System, manual=True, momentum=0.9)
    lit.fit(module)
    assert_as_usual(module.net, System, options={"momentum": 0.9})
