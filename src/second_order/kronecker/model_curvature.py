"""The curvature of a trained model: a block for each layer, zero between the layers.

Vectors of a model are dictionaries by parameter name; a layer's are matrices, as
:mod:`second_order.kronecker.layer_curvature` has them. If other processes store a layer, they send
results, not factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from second_order.distributed.fsdp import is_dtensor
from second_order.distributed.world import World
from second_order.errors import SecondOrderError
from second_order.kronecker.layer_curvature import Eigen, LayerCurvature, read_eigen
from second_order.kronecker.saved_curvature import (
    read_index,
    read_layer,
    remove_index,
    write_index,
    write_layer,
)

__all__ = ["KroneckerCurvature"]

Parts: TypeAlias = Mapping[str, Tensor]
Damping: TypeAlias = float | Mapping[str, float] | None


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
        world: World | None = None,
        report: Any = None,
    ) -> None:
        self._world = World.alone() if world is None else world
        self.names = list(names)
        self.uncovered = dict(uncovered)
        self.report = report
        self.owners = dict(owners or {}) if self._world.size > 1 else {}
        self._layers = dict(layers)
        self._sizes = {n: size for each in layers.values() for n, size in each.shapes.items()}

    def __getitem__(self, name: str) -> LayerCurvature:
        if name not in self._layers:
            raise KeyError(self._unknown(name))
        layer = self._layers[name]
        if name not in self.owners:
            return layer
        tensors = self._share(lambda: self._compute([name], LayerCurvature.tensors))[name]
        return layer if layer.stored else layer.with_tensors(tensors)

    def _unknown(self, name: object) -> str:
        """The reason why no layer has a name, and what to write instead."""
        for layer, curvature in self._layers.items():
            if name in curvature.shapes:
                return f"{name!r} is a parameter of layer {layer!r}; write curvature[{layer!r}]"
        for parameter, reason in self.uncovered.items():
            if name in (parameter, parameter.rpartition(".")[0]):
                return f"{name!r} has no curvature: {reason}"
        return f"{name!r} is the name of no layer; there are {', '.join(map(repr, self))}"

    def __contains__(self, name: object) -> bool:  # Mapping's own would fetch the layer
        return name in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        count = sum(map(math.prod, self._sizes.values()))
        return (
            f"KroneckerCurvature({len(self)} layers, {len(self.here)} of them here, {count:,} "
            f"parameters, {len(self.uncovered)} without)"
        )

    @property
    def here(self) -> dict[str, LayerCurvature]:
        """By name, the layers whose factors this process keeps."""
        return {name: layer for name, layer in self._layers.items() if layer.stored}

    def gather(self, to: int | None = None) -> KroneckerCurvature:
        """The curvature with all factors on every process, or on the rank ``to``; a collective.

        On the other ranks there are then no layers, and :attr:`uncovered` says so.
        """
        size = self._world.size
        if to is not None and to not in range(size):
            raise ValueError(
                f"to={to} is not a rank of {size} processes; give 0 to {size - 1}, or None for all"
            )
        if not self.owners:
            return self
        layers = {}
        uncovered = dict(self.uncovered)
        for name in self:
            layer = self[name]  # fetched on every rank, and kept on some
            if to in (None, self._world.rank):
                layers[name] = layer
            else:
                uncovered |= dict.fromkeys(layer.shapes, f"it has been gathered on rank {to}")
        return KroneckerCurvature(layers, self.names, uncovered, report=self.report)

    # --------------------------------------------------------------------------------- functions

    def apply(self, vector: Parts) -> dict[str, Tensor]:
        """F v, by parameter name.

        Results are on the device of the vector, in the dtype of the factors, float32 at least.

        Args:
            vector: By parameter name; names that are left out count as zero, and the result has all
                parameters of the layers that are named. With one dimension more in front,
                ``(n, ...)``, the tensors are n vectors, and so are those of the result.

        Raises:
            ValueError: For a parameter without curvature, or another shape than the parameter's.
            SecondOrderError: If another process raises.
        """
        return self._map(vector, LayerCurvature.apply)

    def solve(
        self, vector: Parts, damping: Damping = None, *, relative: bool = False
    ) -> dict[str, Tensor]:
        """(F + γ)⁻¹ v.

        Args:
            vector: As for :meth:`apply`.
            damping: γ > 0, a number, or one for each layer by name; None for the training's own.
            relative: Whether γ is ``damping`` times the mean eigenvalue of the layer.

        Raises:
            ValueError: As for :meth:`apply`, and for a γ that is not positive or not known.
        """

        def solved(layer: LayerCurvature, matrix: Tensor) -> Tensor:
            return layer.solve(matrix, self._damping_of(layer, damping), relative=relative)

        return self._map(vector, solved)

    def sqrt(self, vector: Parts) -> dict[str, Tensor]:
        """F^(1/2) v; ``vector`` as for :meth:`apply`."""
        return self.function(vector, torch.sqrt)

    def function(self, vector: Parts, f: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """f(F) v, f of the eigenvalues, element by element.

            whitened = curvature.function(v, lambda values: (values + gamma).rsqrt())

        Args:
            vector: As for :meth:`apply`.
            f: Gives a tensor of the shape of its argument, a layer's ``(groups, out, in)``.
        """
        return self._map(vector, lambda layer, matrix: layer.function(matrix, f))

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

        def sampled(layer: LayerCurvature) -> Tensor:
            return layer.sample(self._damping_of(layer, damping), generator, relative=relative)

        return self._vector(sampled)

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of F, by parameter name."""
        return self._vector(LayerCurvature.diagonal)

    def eigen(self) -> dict[str, Eigen]:
        """The eigenvalues and eigenvectors of the factors of all layers, on every rank.

        Raises:
            DecompositionError: For a factor that cannot be decomposed; SecondOrderError if another
                rank raises.
        """
        found = self._of_all(LayerCurvature.eigen_tensors)
        return {name: read_eigen(tensors) for name, tensors in found.items()}

    def eigenvalues(self) -> Tensor:
        """All eigenvalues of F, the largest first: as many as there are parameters."""
        found = self._of_all(lambda layer: {"": layer.values.flatten()}).values()
        return torch.cat([each[""] for each in found]).sort(descending=True).values

    def trace(self) -> float:
        """Tr F."""
        return self._sum(LayerCurvature.trace)

    def logdet(self, damping: Damping = None, *, relative: bool = False) -> float:
        """Log det (F + γ), γ as for :meth:`solve`."""
        return self._sum(
            lambda layer: layer.logdet(self._damping_of(layer, damping), relative=relative)
        )

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
        folder = Path(folder)
        rank = self._world.rank if self.owners else 0

        def write_layers() -> dict[str, Parts]:
            folder.mkdir(parents=True, exist_ok=True)
            remove_index(folder)
            for name, layer in self._layers.items():
                if self.owners.get(name, 0) == rank:
                    write_layer(folder, layer)
            return {}

        def write_end() -> dict[str, Parts]:
            if rank == 0:
                write_index(folder, self._layers, self.names, self.uncovered, self.report)
            return {}

        self._share(write_layers)
        self._share(write_end)  # once all ranks have written their layers

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

    def _map(
        self, vector: Parts, f: Callable[[LayerCurvature, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The results of a function of each layer and its part of the vector, as a matrix."""

        def work() -> dict[str, Parts]:
            is_stack = self._is_stack(vector)

            def result(layer: LayerCurvature) -> Parts:
                parts = {name: vector[name] for name in layer.shapes if name in vector}
                device = next(iter(parts.values())).device
                to_matrix = torch.vmap(layer.to_matrix) if is_stack else layer.to_matrix
                to_vector = torch.vmap(layer.to_vector) if is_stack else layer.to_vector
                found = to_vector(f(layer, to_matrix(parts)))
                return {name: part.to(device) for name, part in found.items()}

            names = [k for k, layer in self._layers.items() if layer.shapes.keys() & vector.keys()]
            return self._compute(names, result)

        return _joined(self._share(work))

    def _vector(self, f: Callable[[LayerCurvature], Tensor]) -> dict[str, Tensor]:
        """The matrices of all layers as a vector."""
        return _joined(self._of_all(lambda layer: layer.to_vector(f(layer))))

    def _sum(self, f: Callable[[LayerCurvature], float]) -> float:
        def number(layer: LayerCurvature) -> Parts:
            return {"": torch.tensor(f(layer), dtype=torch.float64, device="cpu")}

        return sum(float(each[""]) for each in self._of_all(number).values())

    def _of_all(self, compute: Callable[[LayerCurvature], Parts]) -> dict[str, Parts]:
        """Compute tensors of all layers."""
        return self._share(lambda: self._compute(list(self), compute))

    def _compute(
        self, names: Sequence[str], compute: Callable[[LayerCurvature], Parts]
    ) -> dict[str, Parts]:
        """Compute tensors of layers; nothing for those that another rank owns."""
        rank = self._world.rank
        return {
            name: compute(self._layers[name]) if self.owners.get(name, rank) == rank else {}
            for name in names
        }

    def _share(self, work: Callable[[], dict[str, Parts]]) -> dict[str, Parts]:
        """Do this rank's work, and give every rank the tensors that each layer's owner has.

        Collective, unless every rank has all layers. If a rank raises, all of them do.
        """
        if not self.owners:
            return work()
        found: dict[str, Parts] = {}
        error = None
        try:
            found = work()
        except Exception as raised:  # the others wait for this rank
            error = raised

        # Agree that no rank has failed, on the layers, and on the shapes of what arrives.
        shapes = {
            name: {key: (tuple(x.shape), x.dtype, x.device.type) for key, x in parts.items()}
            for name, parts in found.items()
        }
        everywhere = self._world.all_gather_object((repr(error) if error else "", shapes))
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everywhere) if text]
        if failed:
            raise SecondOrderError("; ".join(failed))
        names = list(everywhere[0][1])
        for rank, (_, others) in enumerate(everywhere):
            if list(others) != names:
                raise SecondOrderError(
                    f"rank 0 asks for layers {names}, and rank {rank} for {list(others)}; every "
                    f"rank has to ask for the same ones, or to call gather() before"
                )

        # Broadcast the tensors of each owner, all of one call being on one kind of device.
        arrived = {name: dict(parts) for name, parts in found.items()}
        tensors: list[Tensor] = []
        owners: list[int] = []
        for name in [name for name in names if name in self.owners]:
            owner = self.owners[name]
            for key, (shape, dtype, device) in everywhere[owner][1][name].items():
                if owner != self._world.rank:
                    arrived[name][key] = torch.empty(shape, dtype=dtype, device=device)
                tensors.append(arrived[name][key])
                owners.append(owner)
        on_host = bool(tensors) and tensors[0].device.type == "cpu"
        world = self._world.on_cpu() if on_host else self._world
        world.broadcast(tensors, owners)
        return dict(arrived)

    def _is_stack(self, vector: Parts) -> bool:
        """Whether these are several vectors; raises unless all parameters have curvature."""
        if not isinstance(vector, Mapping):
            raise TypeError(
                f"a {type(vector).__name__} is no vector; give a dictionary by parameter name, as "
                f"dict(zip(curvature.names, tensors))"
            )
        numbers: dict[torch.Size, str] = {}
        for name, tensor in vector.items():
            if name not in self._sizes:
                why = self.uncovered.get(name, "it is no parameter of the optimizer")
                raise ValueError(f"{name!r} has no curvature: {why}; leave it out of the vector")
            if is_dtensor(tensor):
                raise ValueError(
                    f"the vector has a DTensor for {name!r}; give whole tensors, as "
                    f"tensor.full_tensor() returns them"
                )
            size = self._sizes[name]
            if size not in (tensor.shape, tensor.shape[1:]):
                raise ValueError(
                    f"the vector has shape {tuple(tensor.shape)} for {name!r}, a parameter of "
                    f"shape {tuple(size)}"
                )
            numbers[tensor.shape[: tensor.dim() - len(size)]] = name
        if len(numbers) > 1:
            each = ", ".join(f"{list(n) or 'one'} for {name!r}" for n, name in numbers.items())
            raise ValueError(f"the vectors are not as many for all parameters: {each}")
        return any(numbers)

    def _damping_of(self, layer: LayerCurvature, damping: Damping) -> float | None:
        """The damping that is given for a layer."""
        if not isinstance(damping, Mapping):
            return damping
        unknown = [name for name in damping if name not in self]
        if unknown:
            raise ValueError(f"damping= is of {unknown[0]!r}, no layer; give names of {list(self)}")
        return damping.get(layer.name)


def _joined(parts: Mapping[str, Parts]) -> dict[str, Tensor]:
    return {name: tensor for each in parts.values() for name, tensor in each.items()}
