"""First-order optimizers that are not torch's, written from their papers, as bases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023), with an attribute of its own."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.signs = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.signs += 1
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(average.lerp(p.grad, 1 - first)))
                average.lerp_(p.grad, 1 - second)
        return None


class OwnTensor(torch.Tensor):
    """A tensor that knows few operations, as the states of 8 bits in torchao."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("isfinite", "abs", "isnan"):
            raise NotImplementedError(f"unimplemented operator {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnTensorSGD(torch.optim.Optimizer):
    """Momentum in tensors of its own class, and learning rates in tensors, as in torchao."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.tensor(param_group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise RuntimeError("lr was changed to a non-Tensor object")
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p).as_subclass(OwnTensor)
                state["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["momentum"].as_subclass(torch.Tensor))
        return None


class GetSGD(torch.optim.Optimizer):
    """Momentum in a state that is looked up by get, setdefault and pop, as in any dictionary."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                last = self.state.get(p)
                if last is None:
                    last = self.state.setdefault(p, {"momentum": torch.zeros_like(p)})
                    assert self.state.pop(p) is last
                    assert self.state.pop(p, None) is None
                    assert p not in self.state
                self.state[p] = {"momentum": 0.9 * last["momentum"] + p.grad}
                p.sub_(group["lr"] * self.state[p]["momentum"])
        return None


class Counting(torch.optim.Optimizer):
    """SGD whose steps shrink, by a counter that belongs to no parameter, as in MADGRAD."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1, dtype=torch.int64)
        self.state["k"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / self.state["k"].item() * p.grad)
        return None


class ScheduleFree(torch.optim.Optimizer):
    """SGD at y, between an iterate z and its average x (Defazio et al. 2024); eval() sets x.

    z <- z - lr g(y)    x <- (1 - c) x + c z, c = 1 / step    y = (1 - beta) z + beta x
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "train_mode": False, "k": 0, "warmed": False}
        )

    @torch.no_grad()
    def eval(self) -> None:
        self._set(False)

    @torch.no_grad()
    def train(self) -> None:
        self._set(True)

    def _set(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            beta = group["momentum"]
            for p in group["params"]:
                state = self.state[p]
                if "z" in state:
                    p.lerp_(state["z"], 1 - beta if train else 1 - 1 / beta)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            beta = group["momentum"]
            c = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                z = state["z"]
                x = p.lerp(z, 1 - 1 / beta)
                z.sub_(group["lr"] * p.grad)
                x.lerp_(z, c)
                p.copy_(x.lerp(z, 1 - beta))
        return None
