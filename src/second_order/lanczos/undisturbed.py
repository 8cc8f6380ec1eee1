"""Evaluate a loss on the side: whatever a training loop could notice is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["RandomState", "undisturbed"]


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


class _Modules:
    """The modules called, with their earlier state: buffers, DDP's reducer, cuDNN's RNNs."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        self._ddp: list[tuple[DistributedDataParallel, str, bool]] = []
        self._cudnn = torch.backends.cudnn.enabled

    def about_to_call(self, module: nn.Module, _: Any) -> None:
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

    def put_back(self) -> None:
        torch.backends.cudnn.enabled = self._cudnn
        for ddp, flag, value in self._ddp:
            setattr(ddp, flag, value)
        self.rewind()

    def rewind(self) -> None:
        """Set the buffers back, unseen by the version counters: a graph outside may hold them."""
        for place, name, buffer, value in self._buffers:
            buffer.data.copy_(value)
            place[name] = buffer


@contextmanager
def undisturbed(params: Sequence[Tensor], model: nn.Module | None = None) -> Iterator[_Modules]:
    """Evaluate and differentiate inside, and find everything as before outside.

    Put back are torch's random state, every buffer of every module that is called, ``.grad`` of the
    parameters, the state of DistributedDataParallel's reducer, and ``training`` of ``model`` and
    its parts. Attention runs without fused kernels inside, which have no second derivative.

    Args:
        params: The parameters to differentiate with respect to.
        model: The module whose train/eval mode is kept.

    Yields:
        The modules called, which can put buffers back for another evaluation.
    """
    random, modules = RandomState(params), _Modules()
    gradients = [p.grad for p in params]
    modes = {} if model is None else {part: part.training for part in model.modules()}
    with ExitStack() as stack:
        stack.callback(random.restore)
        stack.callback(modules.put_back)
        if model is not None:  # compiled code may call it unseen
            modules.about_to_call(model, None)
        handle = register_module_forward_pre_hook(modules.about_to_call)
        stack.callback(handle.remove)
        try:
            for p in params:
                p.grad = None
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                yield modules
        finally:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
            for part, training in modes.items():
                part.training = training
