"""One preconditioned layer: where its statistics, factors and inverse live."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.kronecker.autograd import params_in_pass
from second_order.kronecker.explanation import TOLERANCE, Explanation
from second_order.kronecker.factors import (
    KroneckerFactors,
    StagedStatistics,
    mean_eigenvalue,
)
from second_order.kronecker.layers import (
    KINDS,
    FactorShape,
    Form,
    Key,
    Layout,
    PairStatistics,
    key_of,
    layout_of,
)
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.triangles import unpack_upper_triangular
from second_order.sharded import FSDPParams, local

__all__ = ["AGREED_STATE", "PASS_HISTORY", "KroneckerBlock", "LayerState"]

LOOK_EVERY = 100
"""Steps with statistics between two looks at whether a layer's pairs explain its gradient."""


PASS_HISTORY = "pass_history"
AGREED_STATE = ("no_statistics", "statistics_due", "failures")
"""The entries of a layer's state in a checkpoint: four numbers on the ranks whose passes make the
statistics, and whole numbers that all ranks have."""


@dataclass
class LayerState:
    """The history of a layer's statistics and refreshes."""

    silent: bool = False  # the last refresh found that no statistic had ever arrived
    asked: bool = False  # statistics have been due since the block was made
    heard: bool = False  # a pair has been captured, be it one without an example
    failures: int = 0  # refreshes in a row that gave no sound decomposition
    complaint: str = ""  # an error on this process, which makes the coming refresh fail
    unexplained: float = 0.0  # share of the gradient, if too much for the pairs to be used
    unlooked: int = LOOK_EVERY  # steps with statistics since the two were compared
    work: int = 0  # operations of the passes in the last step with statistics, on this process

    def note_pair(self, work: int) -> None:
        """Note a captured pair, and the operations of the step's passes so far."""
        self.heard = True
        self.work = work

    def agreed(self) -> dict[str, Any]:
        """The entries of a checkpoint that are the same on all ranks."""
        values = int(self.silent), int(self.asked), self.failures
        return dict(zip(AGREED_STATE, values, strict=True))

    def history(self, ranks: int) -> list[float]:
        """The numbers of captured passes that a checkpoint has; work is that of all ``ranks``."""
        work = float(self.work * ranks)
        return [float(self.heard), float(self.unlooked), self.unexplained, work]

    def load(self, saved: Mapping[str, Any], ranks: int) -> None:
        """Take over the entries that a checkpoint has; work is shared by so many ``ranks``."""
        if saved.keys() >= {*AGREED_STATE}:
            silent, asked, self.failures = (saved[name] for name in AGREED_STATE)
            self.silent = bool(silent)
            self.asked = bool(asked)
        if PASS_HISTORY in saved:
            heard, unlooked, self.unexplained, work = saved[PASS_HISTORY].tolist()
            self.heard = bool(heard)
            self.unlooked = int(unlooked)
            self.work = int(work / ranks)


class KroneckerBlock:
    """A weight, the bias that goes with it, and the curvature of the two.

    Attributes:
        names: Names of the modules that share the weight, one for most layers.
        name: The layer's name, for messages.
        keys: The name of the kind of each of these modules; ``kinds`` has the rules.
        bias: The bias in the optimizer's care, or None.
        factors: Running averages; None before the first statistic or checkpoint.
        held: Whether A and G are kept on this process.
        staged: Statistics since the last step.
        inverse: The damped inverse, on the layer's gradient workers once it is solved.
        solved: Whether the layer's gradient workers, whichever ranks, hold an inverse.
        shape: The sizes of the factors, by which parameters train.
        stored_shapes: By letter, the shape of a factor as stored here or on another process.
        trains_bias: Whether A has the homogeneous coordinate.
        work_dtype: The dtype in which gradients are clipped and exchanged: float32 at least.
        triangular: Whether symmetric matrices are kept as upper triangles.
    """

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[nn.Module],
        bias: nn.Parameter | None,
        factor_dtype: torch.dtype,
        triangular: bool,
        keys: Sequence[Key | None] = (),
    ) -> None:
        self.names, self.modules = list(names), list(modules)
        self.name = " = ".join(name or "(model)" for name in names)
        self.watched = self.modules  # whose passes make the statistics
        self.keys = list(keys) or list(map(key_of, modules))
        named = zip(modules, self.keys, strict=True)
        self.kinds = {module: KINDS[key] for module, key in named if key is not None}
        self.weight, self.bias = self._key_parameter(), bias
        self.factor_dtype, self.triangular = factor_dtype, triangular
        self.held = (True, True)
        self.inverse: Inverse | None = None
        self.state = LayerState()
        self._expected_version = 0  # version of the weight's gradient at the next pass
        self._arrived: weakref.ref[Tensor] | None = None  # the weight's first gradient
        self._last_backward = -1  # the number of the pass that brought the last pair
        self._reset()

    def _key_parameter(self) -> nn.Parameter:
        module = self.modules[0]
        return cast(nn.Parameter, getattr(module, self.kinds[module].weight))

    def _reset(self) -> None:
        self.trains_bias = self.bias is not None and self.bias.requires_grad
        self.work_dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.shape: FactorShape = self._current_shape()
        shape, packed = self.shape, self.triangular
        self.stored_shapes = {k: shape.stored_shape(k, packed) for k in shape.letters}
        before = self.__dict__.get("staged")
        self.staged = StagedStatistics(shape, self.weight.device, self.factor_dtype, packed)
        if before is not None:
            self.staged.dropped += before.dropped.to(self.weight.device)
        self.factors: KroneckerFactors | None = None
        self.drop_inverse()

    @property
    def trainable(self) -> bool:
        """Whether the weight asks for a gradient now."""
        return self.weight.requires_grad

    @property
    def training(self) -> tuple[bool, ...]:
        """Whether the weight trains now, and whether the bias does."""
        return self.trainable, self.bias is not None and self.bias.requires_grad

    @property
    def params(self) -> list[nn.Parameter]:
        """The weight, and the bias if it trains with it."""
        bias = self.bias
        return [self.weight] if bias is None or not bias.requires_grad else [self.weight, bias]

    @property
    def without_gradient(self) -> bool:
        """Whether no parameter of the block has a gradient."""
        return all(p.grad is None for p in self.params)

    def begin_pass(self, backward: int, pass_id: int, unreduced: bool) -> None:
        """Drop statistics whose gradients have been dropped, as the first pair of a pass comes.

        ``unreduced``: FSDP2 has yet to average earlier passes' gradients.
        """
        begins = self._last_backward != backward and not self.staged.knows(pass_id)
        self._last_backward = backward
        if begins:
            self.follow_requires_grad()
            if self.starts_anew(unreduced):
                self.staged.clear()

    def starts_anew(self, unreduced: bool = False) -> bool:
        """Whether gradients of staged statistics have been set to None or to zero; ask each pass.

        An accumulation adds 1 to a gradient's version, and the first one makes a gradient, which
        :meth:`end_pass` has seen: a device is not waited for in a loop that merely accumulates.
        ``unreduced``: FSDP2 has yet to average earlier passes' gradients.
        """
        whole, expected = self.weight.grad, self._expected_version
        arrived, self._arrived = self._arrived, None
        gradient = None if whole is None else local(whole)
        self._expected_version = 0 if gradient is None else gradient._version + 1
        if self.staged.empty:
            return False
        same = expected > 0 or arrived is None or arrived() is whole
        if gradient is None or (gradient._version == expected and same):
            return self.without_gradient and not unreduced
        rows = [local(p.grad) for p in self.params if p.grad is not None]
        return any(map(Tensor.numel, rows)) and not any(bool(each.any()) for each in rows)

    def end_pass(self) -> None:
        """See the gradient that a pass has made, if there was none before."""
        if self._expected_version == 0 and self.weight.grad is not None:
            self._arrived = weakref.ref(self.weight.grad)

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Put other parameters of the same shapes in the place of some of the block's."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, others.get(value, value))
            elif isinstance(value, list):
                value[:] = [others.get(v, v) if isinstance(v, Tensor) else v for v in value]

    def follow_requires_grad(self) -> None:
        """Start anew where the bias was frozen or unfrozen, or the layer moved, if it trains."""
        moved = self.weight.device != self.staged.device
        if self.trainable and (moved or self._current_shape() != self.shape):
            self._reset()

    def _current_shape(self) -> FactorShape:
        module = self.modules[0]
        return self.kinds[module].shape(module, self.training[1])

    def statistics(self, module: nn.Module, x: Tensor, d: Tensor, form: Form) -> PairStatistics:
        """Statistics of a captured pair of one of the modules, in the dtype of the pair."""
        return self.kinds[module].statistics(module, x, d, form)

    # ------------------------------------------------------------ do the pairs explain the gradient

    @property
    def looks(self) -> bool:
        """Whether the pairs of these passes are compared with the gradient."""
        return self.state.unlooked >= LOOK_EVERY

    def looked_at(self, module: nn.Module) -> str:
        """The name, in a module, of the parameter whose gradient is compared."""
        return self.kinds[module].weight

    def product(self, module: nn.Module, x: Any, d: Tensor) -> Tensor:
        """A pair's part of the gradient of :meth:`looked_at`, in float32 at least."""
        wide = torch.promote_types(d.dtype, torch.float32)
        x = x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x
        return self.kinds[module].gradient(module, x, d.to(wide))

    def look(self, module: nn.Module, x: Any, d: Tensor, fsdp: FSDPParams | None) -> None:
        """Compare a pair with the gradient that is about to arrive."""
        weight = params_in_pass(module, fsdp).get(self.looked_at(module))
        if weight is not None:
            rows = x if isinstance(x, Tensor) else x.hidden
            self.explanation.add(self.product(module, x, d), rows, d, weight)

    @property
    def explanation(self) -> Explanation:
        """The gradient in these passes beside the pairs, from the first one that is compared."""
        if self.staged.explanation is None:
            self.staged.explanation = Explanation()
        return self.staged.explanation

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair's sizes can be those of the layer."""
        return self.kinds[module].fits(module, x, d)

    def judge(self, residual: float) -> None:
        """Note how much of the gradient the step's pairs leave unexplained; drop what does."""
        state, self.state.unlooked = self.state, 1
        state.unexplained = residual if residual > TOLERANCE else 0.0
        if state.unexplained:
            self.staged.clear()
            state.heard = False

    def ensure_factors(self, asked: bool = False) -> KroneckerFactors:
        """The running averages, made on first use; ``asked``: as statistics are due."""
        self.state.asked |= asked
        if self.factors is None:
            self.factors = KroneckerFactors(
                self.shape, self.weight.device, self.factor_dtype, self.triangular, self.held
            )
        return self.factors

    def keep(self, held: tuple[bool, bool]) -> None:
        """Keep A, or G, or both, or neither from now on; factors that are not kept are freed.

        Those that are get a place of their own: a slice would keep the memory of all its stack.
        """
        self.held = held
        if self.factors is not None:
            for letter, factor in self.factors.stored.items():
                kept = factor if held[letter == "G"] else None
                if kept is not None and kept.untyped_storage().nbytes() > kept.nbytes:
                    kept = kept.clone()
                self.factors.stored[letter] = kept

    def stored(self, which: str) -> Tensor | None:
        """The factor of a letter, as stored; None if it is not kept here, or is lost."""
        return None if self.factors is None else self.factors.stored[which]

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Numbers as a tensor of a checkpoint, which has all of its tensors on one device."""
        device = self.weight.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(values, dtype=wide, device=device)

    @property
    def lost(self) -> bool:
        """Whether a factor that is kept here is missing, though there have been statistics."""
        if self.factors is not None:
            for letter, factor in self.factors.stored.items():
                if factor is None and self.held[letter == "G"]:
                    return True
        return False

    def saved_factors(self) -> dict[str, Tensor]:
        """The factors kept here, as a checkpoint has them; tensors are shared, not copied."""
        factors = self.ensure_factors()
        heads = {
            "average_weight": factors.weight,
            "mean_eigenvalues": factors.means,
            "examples": factors.examples,
        }
        return heads | {k: factor for k, factor in factors.stored.items() if factor is not None}

    def load_factors(self, saved: Mapping[str, Any]) -> None:
        """Take over saved averages that fit, triangles or not; a missing one counts as lost."""
        self.factors = self.read_factors(saved)

    def read_factors(self, saved: Mapping[str, Any]) -> KroneckerFactors:
        """Copy saved averages that fit, triangles or not, as they are kept on this process."""
        shape = self.shape
        factors = KroneckerFactors(
            shape, self.weight.device, self.factor_dtype, self.triangular, self.held
        )
        device = factors.weight.device
        factors.weight.copy_(torch.as_tensor(saved["average_weight"], device=device))
        factors.examples.copy_(torch.as_tensor(saved.get("examples", 0.0), device=device))
        matrices = {k: saved[k] for k in shape.letters if k in saved}
        for k, stored in matrices.items():
            if stored.dim() < 3 and k not in shape.diagonals:
                matrices[k] = unpack_upper_triangular(stored, shape.dims[k])
        if "mean_eigenvalues" in saved:
            factors.means.copy_(saved["mean_eigenvalues"])
        elif len(matrices) == len(shape.letters):
            means = [mean_eigenvalue(m, m.shape[-1]) for m in matrices.values()]
            factors.means[: len(means)] = torch.stack(means)
            factors.means[len(means) :] = 1.0
        for k in shape.letters:
            here = self.held[k == "G"] and k in matrices
            kept = factors.store(matrices[k]).to(self.weight.device, copy=True) if here else None
            factors.stored[k] = kept
        return factors

    def misfit(self, saved: Mapping[str, Any]) -> str:
        """Why saved factors have not this layer's sizes as it is now; "" if they have."""
        for letter in filter(saved.__contains__, self.shape.letters):
            allowed = [self.shape.stored_shape(letter, packed) for packed in (False, True)]
            if tuple(saved[letter].shape) not in allowed:
                return (
                    f"the checkpoint's factor {letter} of layer {self.name!r} has shape "
                    f"{tuple(saved[letter].shape)}, the model needs {allowed[0]} or, as a "
                    f"triangle, {allowed[1]}; load it into the model that it was saved from"
                )
        return ""

    def forget(self) -> None:
        """Start the running averages anew: the layer runs on its base gradient until then."""
        self.factors = None
        self.state.asked, self.state.failures = False, 0
        self.drop_inverse()

    def installed(self) -> None:
        """Mark the layer as solved by its gradient workers, this process or others."""
        self.solved = True
        self.state.silent, self.state.failures, self.state.complaint = False, 0, ""

    def drop_inverse(self) -> None:
        """Forget the inverse: the layer runs on its base gradient until it is solved again."""
        self.inverse = None
        self.solved = False

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient to precondition."""
        return self.weight.grad is not None

    @property
    def layout(self) -> Layout:
        """The places of the gradients of :attr:`params` in the layer's matrix."""
        return layout_of(self.shape, [p.numel() for p in self.params])

    @property
    def size(self) -> int:
        """Number of scalar parameters in the block."""
        return sum(p.numel() for p in self.params)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the running averages here."""
        stored = [] if self.factors is None else [*self.factors.stored.values()]
        return sum(factor.nbytes for factor in stored if factor is not None)

    @property
    def inverse_bytes(self) -> int:
        """Bytes of the inverse here."""
        return 0 if self.inverse is None else sum(t.nbytes for t in self.inverse.tensors)
