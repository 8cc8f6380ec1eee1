"""A fake device: tensors that report another device, compute on the CPU, and count operations.

    with pretend_device() as seen:
        model, x = Net().to("pretend"), torch.randn(32, 8).to("pretend")
        optimizer = KAISA(model, lr=1e-3, base=torch.optim.AdamW, foreach=True)
        ...
        seen.clear()
        optimizer.step()
    seen.kernels, seen.syncs, seen.uploads     by operation and the calling line of the package

kernels     operations other than views, which a GPU would launch. A _foreach_ operation counts as
            one. Operands in some forms cost more on CUDA:
                lists of _foreach_ with different dtypes or strides, or tensors that are not dense:
                one per tensor (can_use_fast_route in ATen's ForeachUtils.h)
                products of matrices that cuBLAS cannot read by two strides: one per copy
                addmm and baddbmm that are not in place: one for the copy of the addend
syncs       operations that make the host synchronize with the device: item(), tolist(), copies to
            the CPU, nonzero, masks as indices, decompositions that check their result, multinomial
uploads     copies from the CPU to the device; torch.where copies a number that is a CPU tensor
raises      what a device would refuse: operands on two devices, except for a number in an
            elementwise operation; numpy() of its tensors
on_threads  synchronizations of the threads that the package starts

Bases use foreach by default, as on CUDA. Generators are the CPU's. Times, streams, memory and
rounding are not simulated. A decomposition counts as one kernel, and so do a function of
torch.compile and a _foreach_ that CUDA would divide into lists of some 30 to 110 tensors.
The device uses torch.utils.backend_registration, so it exists once per process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretend"
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"),
    *("_unique2", "unique_consecutive", "bincount", "linalg_lstsq", "linalg_eig", "multinomial"),
    # They look at the device's error code.
    *("linalg_eigvals", "_linalg_eigvals", "_linalg_eigh", "_linalg_svd", "_linalg_check_errors"),
    "cholesky",
}
FREE = {
    *("detach", "alias", "lift", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"),
    *("new_empty_strided", "_unsafe_view", "_reshape_alias", "set_", "resize_", "record_stream"),
    *("t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "is_pinned"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPYING = {"copy_", "_to_copy", "_copy_from", "_foreach_copy_"}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}  # first factor


@dataclass
class Seen:
    """The operations on the device since the last ``clear``, by ``operation @ file:line``."""

    kernels: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    on_threads: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Restart the counts."""
        for counter in vars(self).values():
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
    compiles = patch.object(torch, "compile", _compiled)
    with _Everywhere(), patch.object(torch, "Generator", _Generator), compiles:
        yield _seen
    # Autograd's device thread releases the dispatch mode after the last backward has returned, and
    # needs the GIL for it. If the interpreter is already finalizing then, the process aborts with
    # "terminate called without an active exception".
    time.sleep(0.2)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that counts as one kernel, like one that torch.compile has made."""

    def call(*args: Any) -> Any:
        _note(_seen.kernels, function.__name__)
        found = function(*_each(_bare, args))
        return _each(lambda t: Pretended(t) if isinstance(t, torch.Tensor) else t, found)

    return call


class _Generator(torch.Generator):
    """A generator of the CPU's, for the device as well."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class _Everywhere(TorchDispatchMode):
    """Also sees operations without an operand there, as ``torch.zeros(3, device="pretend")``."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    if sys.gettrace() is None and threading.gettrace() is not None:
        sys.settrace(threading.gettrace())  # coverage's, which autograd's threads do not have
    name = op._schema.name.split("::")[-1]
    flat = [*_leaves(args), *_leaves(kwargs)]
    pretended = [a for a in flat if isinstance(a, Pretended)]
    plain = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, Pretended)]
    device = kwargs.get("device")
    arrives = device is not None and torch.device(device).type == NAME
    if not pretended and not arrives:
        return op(*args, **kwargs)
    if name == "_pin_memory":
        return args[0]
    leaves = name == "_to_copy" and device is not None and not arrives
    _refuse_two_devices(op, name, pretended, plain)
    _count(op, name, args, pretended, plain, arrives, leaves)
    bare_args = _each(_bare, args)
    bare_kwargs = _each(_bare, kwargs)
    if arrives:
        bare_kwargs["device"] = torch.device("cpu")
        bare_kwargs.pop("pin_memory", None)
    if name in PRODUCTS and op._overloadname.startswith("dtype"):
        out = _widely(op, *bare_args, **bare_kwargs)
    else:
        out = op(*bare_args, **bare_kwargs)
    shells: dict[int, torch.Tensor] = {id(a.inner): a for a in pretended} | {
        id(p): p for p in plain
    }

    def shell(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or isinstance(t, Pretended) or leaves:
            return t
        if name == "_to_copy" and id(t) in shells:
            return Pretended(t.clone())
        return shells.get(id(t)) if id(t) in shells else Pretended(t)

    return _each(shell, out)


def _widely(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A product of narrow numbers in a wide one, which a CPU has not."""
    (wide,) = (a for a in args if isinstance(a, torch.dtype))
    operands = [a.to(wide) for a in args if isinstance(a, torch.Tensor)]
    return op.overloadpacket(*operands, **kwargs)


def _leaves(value: Any) -> Iterator[Any]:
    """What tuples, lists and dicts hold; torch's own function takes most of the time of a test."""
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with a change of each leaf."""
    if isinstance(value, list | tuple):
        found = [_each(change, each) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        return {key: _each(change, each) for key, each in value.items()}
    return change(value)


def _bare(a: Any) -> Any:
    if isinstance(a, Pretended):
        return a.inner
    return torch.device("cpu") if isinstance(a, torch.device) and a.type == NAME else a


def _refuse_two_devices(
    op: Any, name: str, pretended: list[Any], plain: list[torch.Tensor]
) -> None:
    numbers = torch.Tag.pointwise in op.tags or name.startswith(("fill_", "_foreach", "_amp"))
    wide = [tuple(p.shape) for p in plain if p.dim() > 0 or not numbers]
    if pretended and wide and name not in COPYING | INDEXING:
        raise RuntimeError(f"{op}: operands on {NAME} and on the CPU, those of {wide}")


def _count(
    op: Any,
    name: str,
    args: Any,
    pretended: list[Any],
    plain: list[torch.Tensor],
    arrives: bool,
    leaves: bool,
) -> None:
    first = next(_leaves(args), None)
    if not op.is_view and name not in FREE:
        added = (
            name in PRODUCTS and "out" in op._overloadname and pretended[-1] is first
        )  # in place
        _note(_seen.kernels, name, _launches(f"{name}_" if added else name, args))
    if name in COPYING and (leaves or (pretended and plain and not isinstance(first, Pretended))):
        _note(_seen.syncs, name)
    elif plain and (name == "where" or (name in COPYING and (arrives or pretended))):
        _note(_seen.uploads, name)
    masks = any(p.dtype in (torch.bool, torch.uint8) for p in pretended[1:])
    if pretended and (name in WAITING or (name in INDEXING and (plain or masks))):
        _note(_seen.syncs, name)


def _launches(name: str, args: Any) -> int:
    """How many an operation is, by the form of its operands."""
    if name.startswith("_foreach"):
        lists = [[_bare(t) for t in a] for a in args if isinstance(a, list | tuple) and a]
        return (
            1
            if _fast(name, [a for a in lists if isinstance(a[0], torch.Tensor)])
            else len(lists[0])
        )
    if name not in PRODUCTS:
        return 1
    first = PRODUCTS[name]
    copies = sum(not _readable(_bare(t)) for t in args[first : first + 2])
    if first and name.endswith("_"):
        copies += 2 * (not _readable(_bare(args[0])))
    elif first:
        copies += args[0].dim() > 1
    return 1 + copies


def _fast(name: str, lists: list[list[torch.Tensor]]) -> bool:
    """Whether CUDA has one kernel for a _foreach_ of these lists."""
    kinds = [{t.dtype for t in tensors} for tensors in lists]
    are_equal = all(len(each) == 1 for each in kinds)
    same = name == "_foreach_copy_" or len(set().union(*kinds)) == 1

    def form(t: torch.Tensor) -> Any:
        return [pair for pair in zip(t.shape, t.stride(), strict=True) if pair[0] != 1], t.shape

    dense = all(torch.ops.aten.is_non_overlapping_and_dense(t) for each in lists for t in each)
    forms = ([form(t) for t in each] for each in lists)
    first = next(forms)
    return are_equal and same and dense and all(each == first for each in forms)


def _readable(t: torch.Tensor) -> bool:
    """Whether cuBLAS takes a matrix, or a batch, as it lies: one of its two strides is 1."""
    (rows, columns) = t.shape[-2:]
    (down, across) = t.stride()[-2:]
    by_rows = across == 1 and down >= columns
    by_columns = down == 1 and across >= rows
    return by_rows or by_columns or t.is_contiguous()


def _note(counter: Counter[str], name: str, times: int = 1) -> None:
    thread = threading.current_thread()  # autograd's are not Python's own
    pretended = isinstance(thread, threading._DummyThread) or thread is threading.main_thread()
    frame = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("second_order"):
        frame = frame.f_back  # type: ignore[assignment]
    place = "elsewhere"
    if frame is not None:
        place = f"{frame.f_code.co_filename.split('second_order/')[-1]}:{frame.f_lineno}"
    (counter if pretended else _seen.on_threads)[f"{name} @ {place}"] += times


class _Module(backend_registration._DummyBackendModule):
    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@cache
def _register() -> torch.library.Library:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _foreach_supported_types.append(Pretended)  # type: ignore[arg-type]
    if not torch.cuda.is_available():  # the process has an accelerator from now on, without streams
        torch.accelerator.synchronize = lambda *_: None
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
