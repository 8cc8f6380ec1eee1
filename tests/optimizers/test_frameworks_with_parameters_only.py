"""Frameworks that make the optimizer themselves, and hand over parameters and nothing else."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from contract import KAISA, PLAIN, curvature_of, each_system, make, same, take
from models import ZOO
from reference import cross_entropy
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::second_order.SecondOrderWarning")
MLP = ZOO["mlp"]
BATCHES = MLP.batches(4)
KNOWN = inspect.signature(KAISA).parameters
OPTIONS = {k: v for k, v in PLAIN.items() if k in KNOWN and k != "lr"}


class SkorchNet:
    """How skorch makes an optimizer: from the module's parameters, and `optimizer__` keywords."""

    def __init__(self, module: nn.Module, optimizer: Any, lr: float, **kwargs: Any) -> None:
        self.module_, self.optimizer, self.lr = module, optimizer, lr
        prefix = "optimizer__"
        self.keywords = {k.removeprefix(prefix): v for k, v in kwargs.items()}
        named = list(self.module_.named_parameters())
        args = ([p for _, p in named],)
        self.optimizer_ = self.optimizer(*args, lr=self.lr, **self.keywords)

    def train_step(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizer_.zero_grad(set_to_none=True)
            loss = cross_entropy(self.module_(x), y)
            loss.backward()
            return loss

        self.optimizer_.step(closure)


class FastaiWrapper:
    """How fastai wraps torch's optimizers: groups of lists, hyperparameters by another name."""

    def __init__(self, params: Any, opt: Any, **kwargs: Any) -> None:
        self.opt = opt([{"params": list(part)} for part in params], **kwargs)

    def set_hypers(self, lr: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] = lr

    def clear_state(self) -> None:
        self.opt.state = defaultdict(dict, {})


def ignite_auto_optim(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Ignite returns the optimizer that it is given, or a subclass made on the spot."""
    kind = type(type(optimizer).__name__, (type(optimizer),), {})
    found: Any = kind.__new__(kind)
    found.__dict__ = optimizer.__dict__
    return found  # type: ignore[no-any-return]


def expected() -> tuple[nn.Module, Any]:
    model = MLP.model()
    optimizer = make(KAISA, model)
    for batch in BATCHES:
        take(model, optimizer, batch)
    return model, optimizer


def test_skorch() -> None:
    model = MLP.model()
    net = SkorchNet(model, partial(KAISA, model=model, **OPTIONS), lr=0.05)
    for batch in BATCHES:
        net.train_step(*batch)
    twin, _ = expected()
    assert same(model, twin)
    model = MLP.model()
    keywords = {f"optimizer__{k}": v for k, v in OPTIONS.items()}
    net = SkorchNet(model, KAISA, lr=0.05, optimizer__model=model, **keywords)
    net.train_step(*BATCHES[0])
    assert curvature_of(net.optimizer_)


def test_fastai() -> None:
    model = MLP.model()
    opt_func = partial(
        FastaiWrapper, opt=partial(KAISA, model=model, **{**OPTIONS, "momentum": 0.9})
    )
    wrapper = opt_func([model[:2].parameters(), model[2:].parameters()], lr=0.5)
    wrapper.set_hypers(0.05)
    twin = MLP.model()
    optimizer = make(KAISA, twin, momentum=0.9)
    for batch in BATCHES[:2]:
        take(model, wrapper.opt, batch)
        take(twin, optimizer, batch)
    assert same(model, twin)
    wrapper.clear_state()  # fastai does so where a model is loaded without its optimizer
    assert not wrapper.opt.state
    for group in wrapper.opt.param_groups:
        for p in group["params"]:
            assert "momentum_buffer" not in wrapper.opt._base.state[p]
    take(model, wrapper.opt, BATCHES[2])
    buffer = wrapper.opt.state[model[0].weight]["base"]["momentum_buffer"]
    torch.testing.assert_close(buffer, model[0].weight.grad)  # of one step
    assert wrapper.opt.state_dict()["state"][0]["base"]


def test_ignite() -> None:
    model = MLP.model()
    optimizer = ignite_auto_optim(make(KAISA, model))
    for batch in BATCHES:
        take(model, optimizer, batch)
    twin, _ = expected()
    assert same(model, twin)


# One optimizer for each parameter.


@each_system
def test_a_step_from_a_hook_within_backward_is_refused(System: Any) -> None:
    """Before anything changes; and one step later all is as if it had not been tried."""
    model = MLP.model()
    optimizers = {p: make(System, [p], model=model) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="Make one optimizer of the model"):
        cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    assert same(model, before)
    assert not any(optimizer.state for optimizer in optimizers.values())
