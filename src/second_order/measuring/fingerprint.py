"""Digests of functions and batches by content. Equal content has equal digests in any process.

A digest covers, for each kind of value:

    function    bytecode, constants, names, defaults and closure; the global values that it reads,
                including the functions that it calls
    module      class name, code of forward, hyperparameters and tensors of an nn.Module
    object      class name; the attributes and methods that the code using it reads, where that
                code is the class's ``__call__`` if it has one that is not installed
    tensor      dtype, shape and elements

A name that the code itself assigns, such as a counter, is state, and its value is left out.
Memory addresses, Python's hash() and file names are also left out, because they differ between
processes.
"""

from __future__ import annotations

import ctypes
import dis
import enum
import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from second_order.sharded import local

__all__ = ["fingerprint"]

PRIMITIVES = (bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device)
MUTATORS = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def fingerprint(value: Any) -> str:
    """A digest of a function, a batch or anything else, as 32 hexadecimal digits."""
    description = _Description()
    text = description.of(value)
    for function in description.functions:  # reading one may add others
        text += f"\n{description.function(function)}"
    return _hashed(text.encode())


def _hashed(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


@dataclass(frozen=True)
class _Uses:
    """The names that a function's code uses, including those used by its inner functions.

    Attributes:
        code: The function's code.
        loaded: Global names that the code reads.
        names: All names of globals and attributes in the code.
        stored: Globals, closure variables and attributes that the code assigns.
        mutates: Whether the code may change a list, a dictionary or a set.
        methods: Methods of the given class that the code names, directly or through each other.
    """

    code: CodeType
    loaded: frozenset[str]
    names: frozenset[str]
    stored: frozenset[str]
    mutates: bool
    methods: tuple[FunctionType, ...]

    @classmethod
    def of_code(cls, code: CodeType, kind: type = object) -> _Uses:
        """Collect the names in ``code`` and in the methods of ``kind`` that it reaches by name."""
        loaded = set[str]()
        names = set[str]()
        stored = set[str]()
        methods: dict[str, FunctionType] = {}
        mutates = False
        todo = [code]
        while todo:
            here = todo.pop()
            todo += [each for each in here.co_consts if isinstance(each, CodeType)]
            for name in here.co_names:
                method = getattr(kind, name, None)
                if not isinstance(method, FunctionType) or name in methods:
                    continue
                if not _is_installed(method.__code__.co_filename):
                    methods[name] = method
                    todo.append(method.__code__)
            names |= {*here.co_names}
            for instruction in dis.get_instructions(here):
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    loaded.add(instruction.argval)
                elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
                    stored.add(instruction.argval)
                elif instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                    mutates = True
        mutates = mutates or not MUTATORS.isdisjoint(names)
        found = tuple(methods.values())
        return cls(code, frozenset(loaded), frozenset(names), frozenset(stored), mutates, found)


class _Description:
    """Describes values as texts.

    A function's text is only its index in ``functions``. :meth:`function` describes its content
    later, so a deep or circular call graph causes no recursion. A container that contains itself
    is replaced by a marker where it recurs.
    """

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self._positions: dict[int, int] = {}
        self._within: set[int] = set()

    def of(self, value: Any, uses: _Uses | None = None) -> str:
        """The text of a value. ``uses`` holds the names used by the code that reads the value."""
        kind = type(value).__qualname__
        if isinstance(value, enum.Enum):
            return f"{kind}.{value.name}"
        if value is None or value is ... or isinstance(value, PRIMITIVES):
            return f"{kind} {value!r}"
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, FunctionType):
            if id(value) not in self._positions:
                self._positions[id(value)] = len(self.functions)
                self.functions.append(value)
            return f"function {self._positions[id(value)]}"
        if id(value) in self._within:
            return f"{kind} that contains this"
        self._within.add(id(value))
        try:
            return f"{kind}({self._content(value, uses)})"
        finally:
            self._within.remove(id(value))

    def _content(self, value: Any, uses: _Uses | None) -> str:
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, MethodType):
            uses = _uses_of(value.__func__)
            return f"{self.of(value.__func__)} of {self.of(value.__self__, uses)}"
        if isinstance(value, functools.partial):
            uses = _uses_of(value.func)
            return self._all([value.func, value.args, value.keywords], uses)
        if isinstance(value, tuple):
            return self._all(value, uses)
        if isinstance(value, (list, Mapping, Set)):
            if uses is not None and uses.mutates:
                return "of any content"
            if isinstance(value, Mapping):
                pairs = [f"{self.of(k, uses)}: {self.of(v, uses)}" for k, v in value.items()]
                return ", ".join(sorted(pairs))
            parts = [self.of(each, uses) for each in value]
            return ", ".join(sorted(parts) if isinstance(value, Set) else parts)
        if isinstance(value, nn.Module):
            return self._module(value)
        if hasattr(value, "tobytes") and not getattr(
            getattr(value, "dtype", 0), "hasobject", False
        ):
            return f"{getattr(value, 'dtype', '')} {_hashed(value.tobytes())}"  # NumPy, Pillow
        if isinstance(value, ModuleType):
            return self._imported(value, uses)
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            return _name(value)
        return self._object(value, uses)

    def _all(self, values: Any, uses: _Uses | None = None) -> str:
        return ", ".join(self.of(each, uses) for each in values)

    def _code(self, code: CodeType) -> str:
        # The bytecode refers to names and constants only by their index in these tuples.
        names = (code.co_names, code.co_freevars, code.co_cellvars)
        return f"{_hashed(code.co_code)} {names} {self._all(code.co_consts)}"

    def function(self, function: FunctionType) -> str:
        """The text of a function. An installed one omits its closure and globals."""
        uses = _Uses.of_code(function.__code__)
        parts = [
            self.of(function.__code__),
            self.of(function.__defaults__, uses),
            self.of(function.__kwdefaults__, uses),
            self.of(getattr(function, "__wrapped__", None)),  # set by functools.wraps
        ]
        if _is_installed(function.__code__.co_filename):
            return ", ".join([_name(function), *parts])

        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        values = {name: _cell_content(cell) for name, cell in cells}
        for name in sorted(uses.loaded & function.__globals__.keys()):
            values[name] = function.__globals__[name]
        for name, value in values.items():
            if name not in uses.stored:
                parts.append(f"{name} = {self.of(value, uses)}")
        return ", ".join(parts)

    def _imported(self, module: ModuleType, uses: _Uses | None) -> str:
        """The name of an imported module and, if not installed, the values read from it."""
        parts = [module.__name__]
        if uses is not None and not _is_installed(getattr(module, "__file__", None)):
            for key in sorted(uses.names & vars(module).keys() - uses.stored):
                value = vars(module)[key]
                if not isinstance(value, ModuleType):
                    parts += [f"{key} = {self.of(value, uses)}"]
        return ", ".join(parts)

    def _module(self, module: nn.Module) -> str:
        """The class, code, hyperparameters and tensors of an nn.Module, not its hooks or mode."""
        parts = [_name(type(module)), self.of(type(module).forward)]
        for key, value in sorted(vars(module).items()):
            hidden = key.startswith("_") or key == "training"
            if not hidden and isinstance(value, (*PRIMITIVES, tuple, list, FunctionType)):
                parts.append(f"{key} = {self.of(value)}")
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for key, inner in (*tensors, *module.named_children()):
            parts.append(f"{key} = {self.of(inner)}")
        return ", ".join(parts)

    def _object(self, value: Any, uses: _Uses | None) -> str:
        """The class of an object, and the attributes and methods that code reads from it.

        That code is the class's ``__call__`` if it has one that is not installed, otherwise the
        code in ``uses``.
        Without either, all attributes count.
        """
        kind = type(value)
        parts = [_name(kind)]
        call = inspect.getattr_static(kind, "__call__", None)
        code = None if uses is None else uses.code
        if isinstance(call, FunctionType) and not _is_installed(call.__code__.co_filename):
            parts.append(self.of(call))
            code = call.__code__
        uses = None if code is None else _Uses.of_code(code, kind)
        for key, attribute in sorted(vars(value).items()):
            if uses is None or (key in uses.names and key not in uses.stored):
                parts.append(f"{key} = {self.of(attribute, uses)}")
        if uses is not None:
            parts += [self.of(method) for method in uses.methods]
        return ", ".join(parts)


def _uses_of(function: Any) -> _Uses | None:
    code = getattr(function, "__code__", None)
    return None if code is None else _Uses.of_code(code)


def _tensor(tensor: Tensor) -> str:
    described = f"{tensor.dtype} {tuple(tensor.shape)}"
    tensor = local(tensor.detach())
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return described
    here = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    if not here.numel() or not here.data_ptr():
        return described
    elements = ctypes.c_char * (here.numel() * here.itemsize)
    return f"{described} {_hashed(elements.from_address(here.data_ptr()))}"


def _cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is assigned later
        return None


def _name(value: Any) -> str:
    """The qualified name, without the module, which is ``__main__`` when run as a script."""
    named: str = getattr(value, "__qualname__", type(value).__qualname__)
    return named


def _is_installed(path: str | None) -> bool:
    """Whether a source file is in the standard library or an installed package.

    ``None``, a source without a file, also counts as installed.
    """
    return path is None or any(Path(path).is_relative_to(folder) for folder in INSTALLED)
