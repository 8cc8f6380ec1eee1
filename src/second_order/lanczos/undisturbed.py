"""Evaluate a loss on the side: whatever a training loop could notice is put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Undisturbed"]


# Otherwise its reducer would wait for a backward pass that never comes.
_DDP_FLAGS = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}

_cuda = torch.backends.cuda
_SETTINGS: tuple[tuple[Callable[[], bool], Callable[[bool], object], bool], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled, True),
    # Fused attention has no second derivative.
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp, False),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp, False),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp, False),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp, True),
    # An outer autocast would go on with casts of weights that differences have moved since.
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
)
"""What says how a setting of torch's is, what sets it, and how it is while a loss is evaluated."""


class Undisturbed:
    """Evaluate and differentiate inside, and find everything as before outside.

    Put back are torch's random state and settings, every buffer of every module that is called,
    ``.grad`` of the parameters, the state of DistributedDataParallel's reducer, and ``training`` of
    ``model`` and its parts. Attention runs without fused kernels inside.

    Args:
        params: The parameters to differentiate with respect to.
        model: The module whose train/eval mode is kept.
    """

    def __init__(self, params: Sequence[Tensor], model: nn.Module | None = None) -> None:
        self._params, self._model = params, model
        self._random: list[Callable[[], object]] = []  # set generators back
        self._seen: set[int] = set()
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        self._put_back = ExitStack()

    def __enter__(self) -> Undisturbed:
        self._random = [partial(torch.set_rng_state, torch.get_rng_state())]
        for device in {p.device for p in self._params if p.is_cuda}:
            state = torch.cuda.get_rng_state(device)
            self._random.append(partial(torch.cuda.set_rng_state, state, device))
        with ExitStack() as stack:  # left in the reverse order, after an error here, too
            for module in () if self._model is None else self._model.modules():
                stack.callback(setattr, module, "training", module.training)
            for p in self._params:
                stack.callback(setattr, p, "grad", p.grad)
                p.grad = None
            stack.callback(self.rewind)
            stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
            for setting, put, inside in _SETTINGS:
                stack.callback(put, setting())
                put(inside)
            self._put_back = stack.pop_all()
        if self._model is not None:  # compiled code may call it unseen
            self._about_to_call(self._model)
        self._put_back.callback(register_module_forward_pre_hook(self._about_to_call).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back.close()

    def _about_to_call(self, module: nn.Module, _: Any = None) -> None:
        """Note the state of a module and its parts, once."""
        if torch.compiler.is_compiling() or id(module) in self._seen:
            return
        for part in module.modules():
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    entry = (part._buffers, name, buffer, buffer.detach().clone())
                    self._buffers.append(entry)
            if isinstance(part, nn.RNNBase):  # cuDNN has no second derivative of them
                torch.backends.cudnn.enabled = False
            if isinstance(part, DistributedDataParallel):
                for flag, value in _DDP_FLAGS.items():
                    if hasattr(part, flag):
                        self._put_back.callback(setattr, part, flag, getattr(part, flag))
                        setattr(part, flag, value)

    def rewind(self) -> None:
        """Set random state and buffers back to those of the first evaluation.

        Buffers unseen by the version counters: a graph outside may hold them.
        """
        for restore in self._random:
            restore()
        for place, name, buffer, value in self._buffers:
            buffer.data.copy_(value)
            place[name] = buffer
