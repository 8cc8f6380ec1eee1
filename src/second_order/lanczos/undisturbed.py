"""Evaluate a loss on the side: whatever a training loop could notice is put back afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["RandomState", "Undisturbed"]


class RandomState:
    """torch's generators on the CPU and on the CUDA devices of some tensors, as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        devices = {t.device for t in tensors if t.is_cuda}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Set the generators back to what they were."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


# Otherwise its reducer would wait for a backward pass that never comes.
_DDP_FLAGS = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


_CALL = type(torch.autocast_increment_nesting).__call__
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

    An interrupt (Ctrl-C) may come before any line, those that enter and leave included. So all is
    read before any of it is set, and put back again where an interrupt has cut that short. Where it
    has come before the first line of leaving, another call does it: ``with closing(x), x``.

    Args:
        params: The parameters to differentiate with respect to.
        model: The module whose train/eval mode is kept.
    """

    _entered = False

    def __init__(self, params: Sequence[Tensor], model: nn.Module | None = None) -> None:
        self._params, self._model = params, model
        self._random = RandomState(params)
        self._gradients = [p.grad for p in params]
        self._modes = {} if model is None else {m: m.training for m in model.modules()}
        self._cudnn = torch.backends.cudnn.enabled
        self._settings = [setting() for setting, _, _ in _SETTINGS]
        self._device = params[0].device.type if params else "cpu"
        self._autocast = (
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            torch.is_autocast_cache_enabled(),
        )
        self._nesting = _autocast_nesting()
        self._seen: set[int] = set()
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        self._ddp: list[tuple[DistributedDataParallel, str, bool]] = []
        self._hook = partial(_about_to_call, weakref.ref(self))

    def __enter__(self) -> Undisturbed:
        try:
            self._entered = True
            if self._model is not None:  # compiled code may call it unseen
                self.about_to_call(self._model)
            register_module_forward_pre_hook(self._hook)
            for p in self._params:
                p.grad = None
            for _, put, inside in _SETTINGS:
                put(inside)
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back()
        finally:
            self._put_back()

    def about_to_call(self, module: nn.Module) -> None:
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
                        self._ddp.append((part, flag, getattr(part, flag)))
                        setattr(part, flag, value)

    def rewind(self) -> None:
        """Set random state and buffers back to those of the first evaluation.

        Buffers unseen by the version counters: a graph outside may hold them.
        """
        self._random.restore()
        for place, name, buffer, value in self._buffers:
            buffer.data.copy_(value)
            place[name] = buffer

    def _put_back(self) -> None:
        if not self._entered:
            return
        for key in [k for k, hook in _global_forward_pre_hooks.items() if hook is self._hook]:
            del _global_forward_pre_hooks[key]
        for (_, put, _), before in zip(_SETTINGS, self._settings, strict=True):
            put(before)
        enabled, dtype, cached = self._autocast
        torch.set_autocast_enabled(self._device, enabled)
        torch.set_autocast_dtype(self._device, dtype)
        torch.set_autocast_cache_enabled(cached)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        torch.backends.cudnn.enabled = self._cudnn
        for ddp, flag, value in self._ddp:
            setattr(ddp, flag, value)
        self.rewind()
        for p, gradient in zip(self._params, self._gradients, strict=True):
            p.grad = gradient
        for part, training in self._modes.items():
            part.training = training
        self._entered = False


def _about_to_call(aside: weakref.ref[Undisturbed], module: nn.Module, _: Any) -> None:
    alive = aside()
    if alive is not None:
        alive.about_to_call(module)


def _autocast_nesting() -> int:
    """How many contexts of autocast this is in."""
    both = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
    return int([*map(_CALL, both)][1])  # without a line between them
