"""The curvature F of a model: one block for each layer, and zero between layers.

A vector of the model is a dictionary by parameter name. A vector of a layer is a
matrix, as :mod:`second_order.kronecker.layer_curvature` defines it. If another rank
stores a layer, that rank computes with the factors and sends the results, which are
smaller than factors:

    _map, _compute_all      say what to compute with each layer
    _compute                computes it for the layers that this rank owns
    _run_and_share          broadcasts the results from the owners to all ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
from second_order.utils.checks import check_rank

__all__ = ["KroneckerCurvature"]

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by parameter name, or by another name."""

Damping: TypeAlias = float | Mapping[str, float] | None


class KroneckerCurvature(Mapping[str, LayerCurvature]):
    """The Fisher information F of a model, with a Kronecker product for each layer.

        # or curvature = optimizer.curvature()
        curvature = second_order.measure(model, loader, factors="kfac")
        gradient = {
            name: p.grad
            for name, p in model.named_parameters()
            if p.grad is not None and name not in curvature.uncovered
        }
        natural_gradient = curvature.solve(gradient, damping=0.1, relative=True)
        curvature["model.layers.0.mlp.down_proj"].A  # a layer's factor
        curvature.save("curvature")

    F is the *mean* of g gᵀ over examples, where g is the gradient of the loss of one
    example. If the loss is a mean over tokens or rows, each of them is an example. For
    a data set of N examples, N F is the Fisher information of all of them. If the
    labels are the data's, F is the empirical Fisher. If they are sampled from the
    model, F is the Gauss-Newton matrix of the usual losses. The running averages of a
    training run lag behind its weights. For F at the last weights, take more steps with
    ``lr=0``, or use a short memory.

    It is a mapping from layer names to :class:`LayerCurvature`. If ranks store
    different layers, everything that needs factors, except :attr:`local_layers`, is a
    collective: every rank calls it with the same arguments and receives the complete
    result. ``curvature[name]`` copies the layer's factors from its owner without
    storing them. :meth:`gather` stores all layers.

    Args:
        layers: The curvature of each layer, by name, in the same order on all ranks. A
            layer that another rank stores has an empty ``stored``.
        names: Names of the model's or the optimizer's parameters, in their order.
        uncovered: By parameter name, why the parameter has no curvature.
        owners: By layer, the rank that stores it. Every rank stores the other layers.
        world: The ranks; required with ``owners``.
        report: What was measured; a string, or an object with a ``__str__``.

    Attributes:
        parameter_layers: The name of each parameter's layer, by parameter name.
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
        self.names = list(names)
        self.uncovered = dict(uncovered)
        self.report = report
        self._world = World.alone() if world is None else world
        self.owners: dict[str, int] = {}
        if owners is not None and self._world.size > 1:
            self.owners = dict(owners)
        self._layers = dict(layers)
        self.parameter_layers: dict[str, str] = {}
        self._param_shapes: dict[str, torch.Size] = {}
        for name, layer in layers.items():
            self.parameter_layers |= dict.fromkeys(layer.shapes, name)
            self._param_shapes |= layer.shapes

    def __getitem__(self, name: str) -> LayerCurvature:
        if name not in self._layers:
            raise KeyError(self._explain_missing(name))
        layer = self._layers[name]
        if name not in self.owners:
            return layer
        tensors = self._run_and_share(
            lambda: self._compute([name], LayerCurvature.tensors)
        )
        if layer.stored:
            return layer
        return layer.with_tensors(tensors[name])

    def _explain_missing(self, name: str) -> str:
        """Return why no layer has this name, and what to write instead."""
        if name in self.parameter_layers:
            layer_name = self.parameter_layers[name]
            return (
                f"{name!r} is a parameter of layer {layer_name!r}; write "
                f"curvature[{layer_name!r}]"
            )
        for parameter, reason in self.uncovered.items():
            module = parameter.rpartition(".")[0]
            if name in (parameter, module):
                return f"{name!r} has no curvature: {reason}"
        layers = ", ".join(repr(layer) for layer in self)
        return f"{name!r} is the name of no layer; there are {layers}"

    def __contains__(self, name: object) -> bool:
        return name in self._layers  # Mapping's own method would fetch the layer

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes to copy or pickle, without the process groups."""
        if self.owners:
            raise TypeError(
                "a curvature whose layers are on several ranks cannot be copied or pickled; call "
                "gather() on every rank first, or use save()"
            )
        return self.__dict__ | {"_world": World.alone()}

    def __repr__(self) -> str:
        num_parameters = sum(math.prod(shape) for shape in self._param_shapes.values())
        return (
            f"KroneckerCurvature({len(self)} layers, {len(self.local_layers)} on this rank, "
            f"{num_parameters:,} parameters, {len(self.uncovered)} without curvature)"
        )

    @property
    def local_layers(self) -> dict[str, LayerCurvature]:
        """The layers whose factors this rank stores, by name."""
        return {name: layer for name, layer in self._layers.items() if layer.stored}

    def gather(self, to: int | None = None) -> KroneckerCurvature:
        """Return the curvature with all factors on every rank, or on one. Collective.

        Args:
            to: The rank that receives all factors; None for all ranks. On the other
                ranks the result has no layers, and :attr:`uncovered` gives the reason.

        Raises:
            TypeError: If ``to`` is not an integer.
            ValueError: If ``to`` is not a rank.
        """
        check_rank("gather", to, self._world.size)
        if not self.owners:
            return self
        layers: dict[str, LayerCurvature] = {}
        uncovered = dict(self.uncovered)
        for name in self:
            layer = self[name]  # every rank takes part
            if to is None or to == self._world.rank:
                layers[name] = layer
            else:
                reason = f"it has been gathered on rank {to}"
                uncovered |= dict.fromkeys(layer.shapes, reason)
        return KroneckerCurvature(layers, self.names, uncovered, report=self.report)

    # ------------------------------------------------------------------------ functions

    def apply(self, vector: Tensors) -> dict[str, Tensor]:
        """Return F v by parameter name.

        Results are on the vector's device, in the factors' dtype, at least float32,
        also under autocast.

        Args:
            vector: Tensors by parameter name. Missing parameters count as zeros. The
                result has all parameters of each layer that has one in the vector. To
                pass n vectors together, add a leading dimension n to all tensors. The
                result then has it too.

        Raises:
            ValueError: If a parameter has no curvature, or a tensor has a wrong shape.
            SecondOrderError: If another rank raises.
        """
        return self._map(vector, LayerCurvature.apply)

    def solve(
        self, vector: Tensors, damping: Damping = None, *, relative: bool = False
    ) -> dict[str, Tensor]:
        """Return (F + γ)⁻¹ v by parameter name.

        Args:
            vector: As for :meth:`apply`.
            damping: γ > 0; a number, or a mapping from layer names to numbers. None, or
                a layer missing from the mapping, uses the damping of training.
            relative: Whether γ is ``damping`` times the mean eigenvalue of the layer.

        Raises:
            ValueError: As for :meth:`apply`, or if γ is unknown or not positive.
        """

        def solve_layer(layer: LayerCurvature, matrix: Tensor) -> Tensor:
            layer_damping = self._layer_damping(layer, damping)
            return layer.solve(matrix, layer_damping, relative=relative)

        return self._map(vector, solve_layer)

    def sqrt(self, vector: Tensors) -> dict[str, Tensor]:
        """Return F^(1/2) v by parameter name; ``vector`` as for :meth:`apply`."""
        return self.function(vector, torch.sqrt)

    def function(
        self, vector: Tensors, f: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Return f(F) v by parameter name.

            whitened = curvature.function(v, lambda values: (values + gamma).rsqrt())

        Args:
            vector: As for :meth:`apply`.
            f: Maps the eigenvalues of a layer, ``(groups, out, in)``, elementwise.
        """
        return self._map(vector, lambda layer, matrix: layer.function(matrix, f))

    def sample(
        self,
        damping: Damping = None,
        generator: torch.Generator | None = None,
        *,
        relative: bool = False,
    ) -> dict[str, Tensor]:
        """Return a sample of N(0, (F + γ)⁻¹) by parameter name.

        For Laplace's approximation with N examples and the prior precision δ, the
        covariance is (N F + δ)⁻¹: use ``damping=δ / N``, and divide the sample by √N.

        Args:
            damping: γ, as for :meth:`solve`.
            generator: The random number generator, on the device of the factors. A
                layer's owner samples with its own generator.
            relative: As for :meth:`solve`.
        """

        def sample_layer(layer: LayerCurvature) -> Tensor:
            layer_damping = self._layer_damping(layer, damping)
            return layer.sample(layer_damping, generator, relative=relative)

        return self._vector(sample_layer)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal of F by parameter name."""
        return self._vector(LayerCurvature.diagonal)

    def eigen(self) -> dict[str, Eigen]:
        """Return the factors' eigendecompositions by layer, on every rank.

        Raises:
            DecompositionError: If a factor cannot be decomposed.
            SecondOrderError: If another rank raises.
        """
        by_layer = self._compute_all(LayerCurvature.eigen_tensors)
        return {name: read_eigen(tensors) for name, tensors in by_layer.items()}

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of F in descending order, one per scalar parameter."""
        by_layer = self._compute_all(lambda layer: {"values": layer.values.flatten()})
        if not by_layer:  # gathered on another rank
            return torch.empty(0, device="cpu")
        values = torch.cat([tensors["values"] for tensors in by_layer.values()])
        return values.sort(descending=True).values

    def trace(self) -> float:
        """Return Tr F."""
        return self._sum(LayerCurvature.trace)

    def logdet(self, damping: Damping = None, *, relative: bool = False) -> float:
        """Return log det (F + γ); γ as for :meth:`solve`."""

        def layer_logdet(layer: LayerCurvature) -> float:
            return layer.logdet(self._layer_damping(layer, damping), relative=relative)

        return self._sum(layer_logdet)

    # ---------------------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write one file for each layer, and then the index ``curvature.json``.

        ``<layer>.safetensors`` contains the factors "A", "G" and "L" as matrices
        ``(groups, n, n)``, or ``(groups, n)`` for a diagonal A. If there are corrected
        eigenvalues, it also contains them as "corrected", with their eigenvectors
        "A_eigenvectors" and so on. Characters of a layer name other than letters,
        digits and ``.-_~`` are percent-encoded, as in a URL. A layer of tied modules has
        the name of the first. The index lists the file of each layer.

        Each owner writes its own layers into a folder that all ranks can access. If
        there are no owners, call this on one rank only.
        """
        folder = Path(folder)
        rank = self._world.rank if self.owners else 0

        def write_layers() -> dict[str, Tensors]:
            folder.mkdir(parents=True, exist_ok=True)
            remove_index(folder)
            for name, layer in self._layers.items():
                if self.owners.get(name, 0) == rank:
                    write_layer(folder, layer)
            return {}

        def write_last() -> dict[str, Tensors]:
            if rank == 0:
                write_index(
                    folder=folder,
                    layers=self._layers,
                    names=self.names,
                    uncovered=self.uncovered,
                    report=self.report,
                )
            return {}

        # The index marks the folder as complete, so write it after all layers.
        self._run_and_share(write_layers)
        self._run_and_share(write_last)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device | str | None = None
    ) -> KroneckerCurvature:
        """Read what :meth:`save` has written: all layers, on any number of ranks.

        Args:
            folder: The folder.
            device: Device of the factors; None for the CPU. On the CPU, factors are
                mapped into memory, and read from their files when used. The files must
                not be modified while the curvature is in use. :meth:`save` replaces
                them instead, which is safe.

        Raises:
            CheckpointError: If the folder has no index, or if a file is missing,
                truncated or damaged.
        """
        folder = Path(folder)
        index = read_index(folder)
        layers: dict[str, LayerCurvature] = {}
        for layer in index.layers:
            path = folder / index.files[layer.name]
            layers[layer.name] = read_layer(path, layer, device)
        return cls(layers, index.names, index.uncovered, report=index.report)

    # --------------------------------------------------------------- work on all layers

    def _map(
        self, vector: Tensors, f: Callable[[LayerCurvature, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Return the results of ``f(layer, vector of the layer as a matrix)``."""

        def map_layers() -> dict[str, Tensors]:
            is_stacked = self._check_vector(vector)

            def map_layer(layer: LayerCurvature) -> Tensors:
                parts = {name: vector[name] for name in layer.shapes if name in vector}
                device = next(iter(parts.values())).device
                if is_stacked:
                    matrices = torch.vmap(layer.to_matrix)(parts)
                    result = torch.vmap(layer.to_vector)(f(layer, matrices))
                else:
                    result = layer.to_vector(f(layer, layer.to_matrix(parts)))
                return {name: part.to(device) for name, part in result.items()}

            names = []
            for name, layer in self._layers.items():
                if layer.shapes.keys() & vector.keys():
                    names.append(name)
            return self._compute(names, map_layer)

        return _merge(self._run_and_share(map_layers))

    def _vector(self, compute: Callable[[LayerCurvature], Tensor]) -> dict[str, Tensor]:
        """Return a vector, given a function that computes the matrix of a layer."""
        return _merge(self._compute_all(lambda layer: layer.to_vector(compute(layer))))

    def _sum(self, compute: Callable[[LayerCurvature], float]) -> float:
        """Return the sum of a number over all layers."""

        def as_tensor(layer: LayerCurvature) -> Tensors:
            number = torch.tensor(compute(layer), dtype=torch.float64, device="cpu")
            return {"number": number}

        by_layer = self._compute_all(as_tensor)
        return sum(float(tensors["number"]) for tensors in by_layer.values())

    def _compute_all(
        self, compute: Callable[[LayerCurvature], Tensors]
    ) -> dict[str, Tensors]:
        """Return on every rank what ``compute`` returns for each layer."""
        return self._run_and_share(lambda: self._compute(list(self), compute))

    def _compute(
        self, names: Sequence[str], compute: Callable[[LayerCurvature], Tensors]
    ) -> dict[str, Tensors]:
        """Return tensors by layer; empty for layers that another rank owns."""
        tensors: dict[str, Tensors] = {}
        for name in names:
            is_local = self.owners.get(name, self._world.rank) == self._world.rank
            tensors[name] = compute(self._layers[name]) if is_local else {}
        return tensors

    def _layer_damping(self, layer: LayerCurvature, damping: Damping) -> float | None:
        """Return the damping of a layer; ``damping`` may be a mapping by layer name."""
        if not isinstance(damping, Mapping):
            return damping
        for name in damping:
            if name not in self:
                raise ValueError(
                    f"damping= has {name!r}, which is not a layer; use names from {list(self)}"
                )
        return damping.get(layer.name)

    def _check_vector(self, vector: Tensors) -> bool:
        """Check the shapes of a vector, and return whether it is a stack of vectors.

        Raises:
            TypeError: If the vector is not a mapping to tensors.
            ValueError: If a parameter has no curvature, or a tensor has a wrong shape.
        """
        if not isinstance(vector, Mapping):
            raise TypeError(
                f"a {type(vector).__name__} is not a vector; pass a dictionary by parameter name, "
                f"such as dict(zip(curvature.names, tensors))"
            )

        # Check each tensor, and note its leading dimensions.
        stack_shapes: dict[torch.Size, str] = {}
        for name, tensor in vector.items():
            if name not in self._param_shapes:
                unknown = "no layer has a parameter of this name"
                reason = self.uncovered.get(name, unknown)
                raise ValueError(
                    f"{name!r} has no curvature: {reason}; leave it out of the vector"
                )
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise TypeError(
                    f"the vector has a {kind} for {name!r}; pass tensors, and leave out a "
                    f"parameter whose gradient is None"
                )
            if is_dtensor(tensor):
                raise ValueError(
                    f"the vector has a DTensor for {name!r}; pass full tensors, which "
                    f"tensor.full_tensor() returns"
                )
            shape = self._param_shapes[name]
            if shape not in (tensor.shape, tensor.shape[1:]):
                raise ValueError(
                    f"the vector has shape {tuple(tensor.shape)} for {name!r}, but the parameter "
                    f"has shape {tuple(shape)}; (n, *shape) is a stack of n vectors"
                )
            stack_shapes[tensor.shape[: tensor.dim() - len(shape)]] = name
        if len(stack_shapes) > 1:
            counts = []
            for n, name in stack_shapes.items():
                counts.append(f"{list(n) or 'one'} for {name!r}")
            raise ValueError(
                f"all parameters need the same number of vectors, not {', '.join(counts)}"
            )
        return any(len(stack_shape) > 0 for stack_shape in stack_shapes)

    # -------------------------------------------------------------------- communication

    def _run_and_share(
        self, work: Callable[[], dict[str, Tensors]]
    ) -> dict[str, Tensors]:
        """Do this rank's work, and return the tensors of all ranks by layer.

        Collective, unless every rank has all layers. If one rank raises, all raise.
        """
        if not self.owners:
            return work()
        tensors: dict[str, Tensors] = {}
        error: Exception | None = None
        try:
            tensors = work()
        except Exception as raised:  # the other ranks wait for this rank
            error = raised
        specs = self._exchange_specs(tensors, error)
        return self._broadcast(tensors, specs)

    def _exchange_specs(
        self, tensors: Mapping[str, Tensors], error: Exception | None
    ) -> list[SpecsByLayer]:
        """Return the specs of all ranks' tensors, if all succeeded. Collective.

        Raises:
            SecondOrderError: If another rank has raised, or has used other layers.
        """
        # Send the specs of this rank's tensors, or its error, to all ranks.
        specs: SpecsByLayer = {}
        for name, layer_tensors in tensors.items():
            specs[name] = {key: TensorSpec.of(t) for key, t in layer_tensors.items()}
        local_result = RankResult(repr(error) if error else "", specs)
        results: list[RankResult] = self._world.all_gather_object(local_result)
        if error is not None:
            raise error
        failures = []
        for rank, result in enumerate(results):
            if result.error:
                failures.append(f"rank {rank}: {result.error}")
        if failures:
            raise SecondOrderError("; ".join(failures))

        # All ranks need the same layers, in the same order.
        names = list(results[0].specs)
        for rank, result in enumerate(results):
            if list(result.specs) != names:
                raise SecondOrderError(
                    f"rank 0 uses layers {names}, but rank {rank} uses {list(result.specs)}; use "
                    f"the same layers on every rank, or call gather() first"
                )
        return [result.specs for result in results]

    def _broadcast(
        self, tensors: Mapping[str, Tensors], specs: Sequence[SpecsByLayer]
    ) -> dict[str, Tensors]:
        """Broadcast the tensors of each layer from its owner. Collective."""
        received = {name: dict(local) for name, local in tensors.items()}
        buffers: list[Tensor] = []
        owners: list[int] = []
        for name, layer_tensors in received.items():
            if name not in self.owners:
                continue
            owner = self.owners[name]
            for key, spec in specs[owner][name].items():
                if owner != self._world.rank:
                    layer_tensors[key] = spec.allocate()
                buffers.append(layer_tensors[key])
                owners.append(owner)

        # All tensors of a call are on one type of device.
        world = self._world
        if buffers and buffers[0].device.type == "cpu":
            world = world.on_cpu()
        world.broadcast(buffers, owners)
        return dict(received)


class TensorSpec(NamedTuple):
    """What a rank needs to know about a tensor that it receives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def allocate(self) -> Tensor:
        """Return an uninitialized tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


SpecsByLayer: TypeAlias = dict[str, dict[str, TensorSpec]]


@dataclass(frozen=True)
class RankResult:
    """What a rank sends to the others: its error, or the specs of its tensors."""

    error: str
    specs: SpecsByLayer


def _merge(by_layer: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """Return the tensors of all layers in one dictionary."""
    merged: dict[str, Tensor] = {}
    for tensors in by_layer.values():
        merged |= tensors
    return merged
