"""A pretended accelerator: tensors that say they are on another device, compute on the CPU, and
keep count.

    with pretend_device() as seen:
        model, x = Net().to("pretend"), torch.randn(32, 8).to("pretend")
        optimizer = KAISA(model, lr=1e-3, base=torch.optim.AdamW, foreach=True)
        ...
        seen.clear()
        optimizer.step()
    seen.kernels, seen.syncs, seen.uploads     by operation and the package's line that asked for it

kernels   operations that are no view: what a GPU would be asked to launch, a _foreach_ one is one
syncs     what makes the host wait for a device: item(), tolist(), copies to the CPU, nonzero, masks
          as indices, decompositions that check their result
uploads   copies from the CPU to the device
raises    what a device would refuse: operands on two devices, numpy() of its tensors

It stands for the habits of any accelerator; times, streams, memory and rounding are not pretended.
It is made with torch.utils.backend_registration and a tensor subclass, so it exists once a process.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

NAME = "pretend"
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"),
    *("_unique2", "unique_consecutive", "bincount", "linalg_lstsq", "linalg_eig"),
    # They look at the device's error code.
    *("linalg_eigvals", "_linalg_eigvals", "_linalg_eigh", "_linalg_svd", "_linalg_check_errors"),
}
FREE = {
    *("detach", "alias", "lift", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"),
    *("new_empty_strided", "_unsafe_view", "_reshape_alias", "set_", "resize_", "record_stream"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPYING = {"copy_", "_to_copy", "_copy_from", "_foreach_copy_"}


@dataclass
class Seen:
    """What has been asked of the device since the last ``clear``, by ``operation @ file:line``."""

    kernels: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Begin to count anew."""
        for counter in (self.kernels, self.syncs, self.uploads):
            counter.clear()


class Pretended(torch.Tensor):
    """A tensor "on the device": a shell around a tensor on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def tolist(self) -> Any:
        _note(_seen.syncs, "tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert a {NAME} tensor to numpy; use .cpu() first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.inner})"


_seen = Seen()


@contextmanager
def pretend_device() -> Iterator[Seen]:
    """Make the device "pretend" known for a block, and count from zero."""
    _register()
    _seen.clear()
    with _Everywhere():
        yield _seen


class _Everywhere(TorchDispatchMode):
    """Also sees operations without an operand there, as ``torch.zeros(3, device="pretend")``."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    name = op._schema.name.split("::")[-1]
    flat, spec = tree_flatten((args, kwargs))
    ours = [a for a in flat if isinstance(a, Pretended)]
    plain = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, Pretended)]
    device = kwargs.get("device")
    arrives = device is not None and torch.device(device).type == NAME
    if not ours and not arrives:
        return op(*args, **kwargs)
    if name == "_pin_memory":
        return args[0]
    leaves = name == "_to_copy" and device is not None and not arrives
    _refuse_two_devices(op, name, ours, plain)
    _count(op, name, flat[0], ours, plain, arrives, leaves)
    bare = [_bare(a) for a in flat]
    bare_args, bare_kwargs = tree_unflatten(bare, spec)
    if arrives:
        bare_kwargs["device"] = torch.device("cpu")
        bare_kwargs.pop("pin_memory", None)
    out = op(*bare_args, **bare_kwargs)
    shells: dict[int, torch.Tensor] = {id(a.inner): a for a in ours} | {id(p): p for p in plain}

    def shell(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or isinstance(t, Pretended) or leaves:
            return t
        if name == "_to_copy" and id(t) in shells:
            return Pretended(t.clone())
        return shells.get(id(t)) if id(t) in shells else Pretended(t)

    return tree_map(shell, out)


def _bare(a: Any) -> Any:
    if isinstance(a, Pretended):
        return a.inner
    return torch.device("cpu") if isinstance(a, torch.device) and a.type == NAME else a


def _refuse_two_devices(op: Any, name: str, ours: list[Any], plain: list[torch.Tensor]) -> None:
    wide = [tuple(p.shape) for p in plain if p.dim() > 0]
    if ours and wide and name not in COPYING | INDEXING:
        raise RuntimeError(f"{op}: operands on {NAME} and on the CPU, those of {wide}")


def _count(
    op: Any,
    name: str,
    first: Any,
    ours: list[Any],
    plain: list[torch.Tensor],
    arrives: bool,
    leaves: bool,
) -> None:
    if not op.is_view and name not in FREE:
        _note(_seen.kernels, name)
    if name in COPYING and (leaves or (ours and plain and not isinstance(first, Pretended))):
        _note(_seen.syncs, name)
    elif name in COPYING and plain and (arrives or ours):
        _note(_seen.uploads, name)
    masks = any(p.dtype in (torch.bool, torch.uint8) for p in ours[1:])
    if ours and (name in WAITING or (name in INDEXING and (plain or masks))):
        _note(_seen.syncs, name)


def _note(counter: Counter[str], name: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and "second_order" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    place = "elsewhere"
    if frame is not None:
        place = f"{frame.f_code.co_filename.split('second_order/')[-1]}:{frame.f_lineno}"
    counter[f"{name} @ {place}"] += 1


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@cache
def _register() -> torch.library.Library:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # Where the mode is not: other threads, new_tensor.
    library = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    ops = (aten.empty.memory_format, aten.empty_strided, aten.copy_, aten._copy_from, aten._to_copy)
    for each in ops:
        op = each if isinstance(each, torch._ops.OpOverload) else each.default
        run: Callable[..., Any] = partial(_plainly, op)
        library.impl(op, run, "PrivateUse1")
    return library


def _plainly(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(op, args, kwargs)
