"""The curvature of a trained model: a block for each layer, zero between the layers.

Vectors of a model are dictionaries by parameter name, or lists like the optimizer's parameters; a
layer's are matrices, as :mod:`second_order.kronecker.layer_curvature` has them. Of layers that
other processes keep, results are sent and not factors.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from second_order.errors import SecondOrderError
from second_order.kronecker.layer_curvature import LayerCurvature
from second_order.kronecker.saved_curvature import (
    read_index,
    read_layer,
    remove_index,
    write_index,
    write_layer,
)
from second_order.sharded import is_dtensor

__all__ = ["KroneckerCurvature", "Vector"]

Vector: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor | None]
T = TypeVar("T")
V = TypeVar("V", Mapping[str, Tensor], Sequence[Tensor | None])
Damping: TypeAlias = float | Mapping[str, float] | None


class Processes(Protocol):
    """The processes that keep layers: :class:`~second_order.distributed.world.World`."""

    rank: int
    size: int

    def broadcast(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Give every rank the value that each tensor has on its owner, in place."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""

    def on_cpu(self) -> Processes:
        """These ranks for tensors on the CPU."""


class KroneckerCurvature(Mapping[str, LayerCurvature]):
    """F, the Fisher information of a model by layers.

    F is the *mean* over examples of g gᵀ, g the gradient of one example's loss (of a term of the
    mean, so of a token or a row where the loss is a mean over those): for a data set of N examples,
    N F is the Fisher information of all of them. With the data's labels it is the empirical one;
    with labels drawn from the model F is the Gauss-Newton matrix of the usual losses. Weights move
    while a training takes averages: its F of the last weights needs some more steps with lr=0, or a
    short memory.

    A layer is found by its name, ``curvature["0"]``. Where processes have shared the layers out,
    everything but :attr:`here`, names and lengths is a collective: every process asks alike, with
    the same vectors, and each gets the whole answer. ``curvature[name]`` then fetches the layer's
    factors, which are kept by nobody but the owner; :meth:`gather` keeps all.

    Args:
        layers: The layers' curvature, by name, in an order that all processes share. One that
            another process keeps has nothing in ``stored``.
        names: Names of the optimizer's parameters, in their order.
        uncovered: Why a parameter has no curvature here, by its name.
        owners: The rank that keeps a layer, by name; one that is not named is on every rank.
        world: The processes that the ranks are of; needed with ``owners``.
        report: What has been measured, as a text or an object whose ``str`` is one.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerCurvature],
        names: Sequence[str],
        uncovered: Mapping[str, str],
        *,
        owners: Mapping[str, int] | None = None,
        world: Processes | None = None,
        report: Any = None,
    ) -> None:
        if owners and world is None:
            raise ValueError("owners= are ranks of processes; give world=, the World they are of")
        self._layers, self.names = dict(layers), list(names)
        self.uncovered, self.report = dict(uncovered), report
        alone = world is None or world.size == 1
        self.owners, self._world = {} if alone else dict(owners or {}), world
        self._sizes = {n: size for each in layers.values() for n, size in each.shapes.items()}

    def __getitem__(self, name: str) -> LayerCurvature:
        if name not in self._layers:
            raise KeyError(self._unknown(name))
        layer = self._layers[name]
        if name not in self.owners:
            return layer
        tensors = self._everywhere([name], LayerCurvature.tensors)[name]
        return layer if layer.stored else layer.with_tensors(tensors)

    def _unknown(self, name: object) -> str:
        """The reason why no layer has a name, and what to write instead."""
        owner = next((key for key, each in self._layers.items() if name in each.shapes), None)
        if owner is not None:
            return f"{name!r} is a parameter of layer {owner!r}; write curvature[{owner!r}]"
        of_layer = (why for key, why in self.uncovered.items() if key.rpartition(".")[0] == name)
        why = self.uncovered.get(str(name)) or next(of_layer, None)
        if why is not None:
            return f"{name!r} has no curvature: {why}"
        near = difflib.get_close_matches(str(name), self._layers, n=1) or list(self._layers)[:3]
        return (
            f"{name!r} is the name of no layer; there are {', '.join(map(repr, near))} and others"
        )

    def __contains__(self, name: object) -> bool:  # Mapping's own would fetch the layer
        return name in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        elsewhere = len(self) - len(self.here)
        said = f", {elsewhere} of them elsewhere" if elsewhere else ""
        said += f", {len(self.uncovered)} without" if self.uncovered else ""
        count = sum(map(math.prod, self._sizes.values()))
        return f"KroneckerCurvature({len(self)} layers, {count:,} parameters{said})"

    @property
    def here(self) -> dict[str, LayerCurvature]:
        """By name, the layers whose factors this process keeps."""
        return {name: layer for name, layer in self._layers.items() if layer.stored}

    def gather(self, to: int | None = None) -> KroneckerCurvature:
        """The curvature with all factors on every process, or on the rank ``to``; a collective.

        On the other ranks there are then no layers, and :attr:`uncovered` says so.
        """
        rank, size = (0, 1) if self._world is None else (self._world.rank, self._world.size)
        if to is not None and to not in range(size):
            raise ValueError(
                f"to={to} is no rank of {size} processes; give 0 to {size - 1}, or None for all"
            )
        if not self.owners:
            return self
        wanted, layers = to in (None, rank), {}
        for name in self:
            layer = self[name]
            if wanted:
                layers[name] = layer
        away = {} if wanted else dict.fromkeys(self._sizes, f"it has been gathered on rank {to}")
        return KroneckerCurvature(layers, self.names, self.uncovered | away, report=self.report)

    # --------------------------------------------------------------------------------- functions

    def apply(self, vector: V) -> V:
        """F v, as a dictionary or a list, whichever v is.

        Results are on the device of the vector, in the dtype of the factors, float32 at least.

        Args:
            vector: By parameter name; names that are left out count as zero, and the result has all
                parameters of the layers that are named. Or a list with an entry for each of
                :attr:`names`, None for those without curvature. Of FSDP2's shards, given by every
                process, the result is whole. With one dimension more in front, ``(n, ...)``, all
                its tensors are of n vectors, and so are those of the result.

        Raises:
            ValueError: For a parameter without curvature, or another shape than the parameter's.
            SecondOrderError: If another process raises.
        """
        return self._mapped(vector, lambda layer, matrix: layer.apply(matrix))

    def solve(self, vector: V, damping: Damping = None, *, relative: bool = False) -> V:
        """(F + γ)⁻¹ v.

        Args:
            vector: As for :meth:`apply`.
            damping: γ > 0, a number, or one for each layer by name; None for the training's own.
            relative: Whether γ is ``damping`` times the mean eigenvalue of the layer.

        Raises:
            ValueError: As for :meth:`apply`, and for a γ that is not positive or not known.
        """
        gamma = self._dampings(damping, relative)
        return self._mapped(
            vector, lambda layer, matrix: layer.solve(matrix, gamma[layer.name], relative=relative)
        )

    def sqrt(self, vector: V) -> V:
        """F^(1/2) v; ``vector`` as for :meth:`apply`."""
        return self.function(vector, torch.sqrt)

    def function(self, vector: V, f: Callable[[Tensor], Tensor]) -> V:
        """f(F) v, f of the eigenvalues, element by element.

            whitened = curvature.function(v, lambda values: (values + gamma).rsqrt())

        Args:
            vector: As for :meth:`apply`.
            f: Gives a tensor of the shape of its argument, a layer's ``(groups, out, in)``.
        """
        return self._mapped(vector, lambda layer, matrix: layer.function(matrix, f))

    def sample(
        self,
        damping: Damping = None,
        generator: torch.Generator | None = None,
        *,
        relative: bool = False,
    ) -> dict[str, Tensor]:
        """A sample of N(0, (F + γ)⁻¹), by parameter name.

        For Laplace's approximation with N examples and a prior precision δ, the covariance is
        (N F + δ)⁻¹: use ``damping=δ / N``, and divide the sample by √N.

        Args:
            damping: γ, as for :meth:`solve`.
            generator: Where random numbers come from; on the factors' device. That of a layer's
                owner draws for it.
            relative: As for :meth:`solve`.
        """
        gamma = self._dampings(damping, relative)
        return self._vector(
            lambda layer: layer.sample(gamma[layer.name], generator, relative=relative)
        )

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of F, by parameter name."""
        return self._vector(LayerCurvature.diagonal)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues of F, the largest first: as many as there are parameters."""
        found = self._everywhere(self, lambda layer: {"": layer.values.flatten()}).values()
        return torch.cat([each[""] for each in found]).sort(descending=True).values

    def trace(self) -> float:
        """Tr F."""
        return self._sum(LayerCurvature.trace)

    def logdet(self, damping: Damping = None, *, relative: bool = False) -> float:
        """Log det (F + γ), γ as for :meth:`solve`."""
        gamma = self._dampings(damping, relative)
        return self._sum(lambda layer: layer.logdet(gamma[layer.name], relative=relative))

    # ------------------------------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write a file for each layer, and ``curvature.json`` once all of them are there.

        ``<layer>.safetensors`` has the factors as whole matrices ``(groups, n, n)`` under their
        letters, or ``(groups, n)`` of a diagonal A; corrected eigenvalues as "corrected", with
        the eigenvectors that they belong to as "A_eigenvectors" and so on. Characters of a name
        that are no letters, digits or ``.-_`` are written as in a URL, and a long name is cut; the
        index has the file of each layer. Each owner writes its own
        layers, into a folder that all processes see; of a curvature without owners one process
        alone is to call this.
        """
        folder, world = Path(folder), self._world if self.owners else None
        rank = 0 if world is None else world.rank

        def begin() -> None:
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                remove_index(folder)

        def write() -> None:
            for name, layer in self._layers.items():
                if self.owners.get(name, 0) == rank:
                    write_layer(folder, layer)

        def end() -> None:
            if rank == 0:
                write_index(folder, self._layers, self.names, self.uncovered, self.report)

        for each in (begin, write, end):
            self._agreed(each)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device | str | None = None
    ) -> KroneckerCurvature:
        """Read what :meth:`save` has written, all layers, by whatever number of processes.

        Args:
            folder: The folder.
            device: Device of the factors. None: the CPU, where a factor is read from its file
                when it is used, so that files are not to be changed meanwhile.

        Raises:
            CheckpointError: If the folder has no index, or a file is missing, cut short or spoilt.
        """
        index = read_index(Path(folder))
        layers = {each.name: read_layer(Path(folder), each, device) for each in index.layers}
        return cls(layers, index.names, index.uncovered, report=index.report)

    # ------------------------------------------------------------------------------------ layers

    def _mapped(self, vector: V, f: Callable[[LayerCurvature, Tensor], Tensor]) -> V:
        given = self._together(lambda: self._named(vector))
        named = {
            name: cast(Any, part).full_tensor() if is_dtensor(part) else part
            for name, part in given.items()
        }
        device = next((part.device for part in named.values()), None)
        stacked = any(part.shape != self._sizes[name] for name, part in named.items())

        def result(layer: LayerCurvature) -> dict[str, Tensor]:
            to_matrix, to_vector = layer.to_matrix, layer.to_vector
            if stacked:
                to_matrix, to_vector = torch.vmap(to_matrix), torch.vmap(to_vector)
            parts = to_vector(
                f(layer, to_matrix({n: named[n] for n in layer.shapes if n in named}))
            )
            return {name: part.to(device) for name, part in parts.items()}

        chosen = [
            k for k, layer in self._layers.items() if not layer.shapes.keys().isdisjoint(named)
        ]
        found = _joined(self._everywhere(chosen, result))
        if isinstance(vector, Mapping):
            return cast(V, found)
        return cast(V, [found.get(name) for name in self.names])

    def _vector(self, f: Callable[[LayerCurvature], Tensor]) -> dict[str, Tensor]:
        """The matrices of all layers as a vector."""
        return _joined(self._everywhere(self, lambda layer: layer.to_vector(f(layer))))

    def _sum(self, f: Callable[[LayerCurvature], float]) -> float:
        def number(layer: LayerCurvature) -> dict[str, Tensor]:
            return {"": torch.tensor(f(layer), dtype=torch.float64, device="cpu")}

        return sum(float(each[""]) for each in self._everywhere(self, number).values())

    def _everywhere(
        self,
        names: Iterable[str],
        compute: Callable[[LayerCurvature], Mapping[str, Tensor]],
    ) -> dict[str, Mapping[str, Tensor]]:
        """Compute tensors of layers where these are; all processes get them, by layer and key."""
        names, rank = list(names), 0 if self._world is None else self._world.rank
        found: dict[str, Mapping[str, Tensor]] = {}

        def mine() -> dict[tuple[str, str], Tensor]:
            for name in names:
                if self.owners.get(name, rank) == rank:
                    found[name] = compute(self._layers[name])
            owned = [name for name in found if name in self.owners]
            return {(name, key): t for name in owned for key, t in found[name].items()}

        if self.owners.keys().isdisjoint(names):
            mine()
            return found
        assert self._world is not None
        arrived: dict[str, dict[str, Tensor]] = {}
        for (name, key), tensor in self._spread(names, mine).items():
            arrived.setdefault(name, {})[key] = tensor
        return {name: arrived.get(name, found.get(name, {})) for name in names}

    def _spread(
        self, names: list[str], compute: Callable[[], dict[tuple[str, str], Tensor]]
    ) -> dict[tuple[str, str], Tensor]:
        """Send what each process computes to all; raise if not all ask for the same layers."""
        world, mine = cast(Processes, self._world), {}

        def told() -> tuple[list[str], dict[tuple[str, str], Any]]:
            mine.update(compute())
            return names, {k: (tuple(t.shape), t.dtype, t.device.type) for k, t in mine.items()}

        agreed = self._agreed(told)
        for rank, (asked, _) in enumerate(agreed):
            if asked != agreed[0][0]:
                raise SecondOrderError(
                    f"rank 0 asks for layers {agreed[0][0]}, and rank {rank} for {asked}; every "
                    f"process is to ask for the same ones, or call gather() before"
                )
        tensors, owners = {}, {}
        for rank, (_, said) in enumerate(agreed):
            for key, (shape, dtype, device) in said.items():
                owners[key] = rank
                here = rank == world.rank
                tensors[key] = mine[key] if here else torch.empty(shape, dtype=dtype, device=device)
        for kind in sorted({tensor.device.type for tensor in tensors.values()}):
            over = world.on_cpu() if kind == "cpu" else world
            keys = [key for key, tensor in tensors.items() if tensor.device.type == kind]
            over.broadcast([tensors[key] for key in keys], [owners[key] for key in keys])
        return tensors

    def _agreed(self, compute: Callable[[], Any]) -> list[Any]:
        """What each process computes, by rank; where one raises, all do."""
        if not self.owners or self._world is None:
            return [compute()]
        value, error = None, None
        try:
            value = compute()
        except Exception as raised:  # the others wait for this process
            error = raised
        told = self._world.all_gather_object((value, repr(error) if error else ""))
        if error is not None:
            raise error
        failed = {rank: said for rank, (_, said) in enumerate(told) if said}
        if failed:
            raise SecondOrderError("; ".join(f"rank {r}: {said}" for r, said in failed.items()))
        return [value for value, _ in told]

    def _together(self, check: Callable[[], T]) -> T:
        """What this process's check returns; where one raises, all do."""
        found: list[T] = []
        self._agreed(lambda: found.append(check()))
        return found[0]

    def _named(self, vector: Vector) -> Mapping[str, Tensor]:
        """A vector, or a stack of vectors, by name, of parameters that have curvature."""
        if not isinstance(vector, Mapping):
            if len(vector) != len(self.names):
                raise ValueError(
                    f"a list of {len(vector)} tensors is no vector of {len(self.names)} "
                    f"parameters; give one for each of curvature.names, or a dictionary by name"
                )
            pairs = zip(self.names, vector, strict=True)
            vector = {name: tensor for name, tensor in pairs if tensor is not None}
        for name, tensor in vector.items():
            size = self._sizes.get(name)
            if size is None:
                why = self.uncovered.get(name, "it is no parameter of the optimizer")
                raise ValueError(
                    f"{name!r} has no curvature: {why}; leave it out of the vector, or give None "
                    f"in its place in a list"
                )
            if size not in (tensor.shape, tensor.shape[1:]):
                raise ValueError(
                    f"the vector has shape {tuple(tensor.shape)} for {name!r}, a parameter of "
                    f"shape {tuple(size)}"
                )
        numbers = {t.shape[: t.dim() - len(self._sizes[name])]: name for name, t in vector.items()}
        if len(numbers) > 1:
            said = ", ".join(f"{list(n) or 'one'} for {name!r}" for n, name in numbers.items())
            raise ValueError(f"the vectors are not as many for all parameters: {said}")
        return vector

    def _dampings(self, damping: Damping, relative: bool) -> dict[str, float]:
        """The number given for each layer, or known."""
        given = damping if isinstance(damping, Mapping) else dict.fromkeys(self, damping)

        def numbers() -> dict[str, float]:
            unknown = [repr(name) for name in given if name not in self]
            if unknown:
                raise ValueError(
                    f"damping= is of {unknown[0]}, no layer; give names of {list(self)}"
                )
            layers = self._layers.items()
            return {n: layer.check_damping(given.get(n), relative) for n, layer in layers}

        return self._together(numbers)


def _joined(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for each in parts.values() for name, tensor in each.items()}
