"""One preconditioned layer: where its statistics, factors and inverse live."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.errors import SecondOrderWarning
from second_order.kronecker.autograd import params_in_pass
from second_order.kronecker.decompositions import ieee_matmul
from second_order.kronecker.examples import live_rows
from second_order.kronecker.explained import TOLERANCE, Explanation
from second_order.kronecker.factors import (
    KroneckerFactors,
    Reduction,
    StagedStatistics,
    mean_eigenvalue,
)
from second_order.kronecker.layers import (
    KINDS,
    Approximation,
    FactorShape,
    Key,
    LayerKind,
    PairStatistics,
    factor_shape,
    gradient_from_matrix,
    gradient_to_matrix,
    is_convolution,
    key_of,
    pair_statistics,
)
from second_order.kronecker.solvers import Inverse
from second_order.kronecker.triangles import unpack_upper_triangular
from second_order.sharded import FSDPParams, is_dtensor, local
from second_order.stages import span

__all__ = [
    "GradientScale",
    "KroneckerBlock",
    "LayerState",
    "StatisticsCollector",
]


LOOK_EVERY = 100
"""Steps with statistics between two looks at whether a layer's pairs explain its gradient."""


@dataclass
class LayerState:
    """The history of a layer's statistics and refreshes; only its block writes it.

    Attributes:
        solved: Whether the layer's gradient workers, whichever ranks, hold an inverse.
        silent: Whether the last refresh found that no statistic had ever arrived.
        asked: Whether statistics have ever been due since the block was made.
        heard: Whether a pair has ever been captured, be it one without an example.
        failures: Number of refreshes in a row that gave no sound decomposition.
        complaint: Why the last refresh gave none, where an error tells; "" otherwise.
        unexplained: The share of the gradient that the pairs leave unexplained, where that is too
            much, so that they are not used; 0.0 otherwise.
        unlooked: Number of steps with statistics since the two were compared, that one included.
        work: Operations of the layer's passes in the last step with statistics on this process.
    """

    solved: bool = False
    silent: bool = False
    asked: bool = False
    heard: bool = False
    failures: int = 0
    complaint: str = ""
    unexplained: float = 0.0
    unlooked: int = LOOK_EVERY
    work: int = 0


class KroneckerBlock:
    """A weight, the bias that goes with it, and the curvature of the two.

    Attributes:
        names: Names of the modules that share the weight, one for most layers.
        modules: The modules that share the weight.
        keys: The kind of each module.
        weight: The shared weight.
        bias: The bias in the optimizer's care, or None.
        factors: Running averages; None before the first statistic or checkpoint.
        held: Whether A and G are kept on this process.
        staged: Statistics since the last step.
        inverse: The damped inverse, on the layer's gradient workers once it is solved.
        state: The history of statistics and refreshes; read-only for others.
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
        self.names = list(names)
        self.modules = list(modules)
        self.keys = list(keys) or list(map(key_of, modules))
        self.weight = self._key_parameter()
        self.bias = bias
        self.factor_dtype = factor_dtype
        self._triangular = triangular
        self.held = (True, True)
        self.inverse: Inverse | None = None
        self.state = LayerState()
        self._before: Inverse | Tensor | None = None
        self._change: Tensor | None = None
        self._expected_version = 0  # version of the weight's gradient at the next pass
        self._reset()

    def _key_parameter(self) -> nn.Parameter:
        key = self.keys[0]
        assert key is not None
        return cast(nn.Parameter, getattr(self.modules[0], KINDS[key].weight))

    @property
    def watched(self) -> Sequence[nn.Module]:
        """The modules whose passes make the statistics."""
        return self.modules

    def _reset(self) -> None:
        self.shape: FactorShape = self._current_shape()
        before = self.__dict__.get("staged")
        self.staged = StagedStatistics(
            self.shape, self.weight.device, self.factor_dtype, self._triangular
        )
        if before is not None:
            self.staged.dropped += before.dropped.to(self.weight.device)
        self.factors: KroneckerFactors | None = None
        self.drop_inverse()

    @property
    def name(self) -> str:
        """The layer's name, for messages."""
        return " = ".join(name or "(model)" for name in self.names)

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype in which gradients are clipped and exchanged: float32 at least."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def trainable(self) -> bool:
        """Whether the weight asks for a gradient now."""
        return self.weight.requires_grad

    @property
    def training(self) -> tuple[bool, ...]:
        """Whether the weight trains now, and whether the bias does."""
        return self.trainable, self.trains_bias

    @property
    def params(self) -> list[nn.Parameter]:
        """The weight, and the bias if it trains with it."""
        return (
            [self.weight, self.bias]
            if self.trains_bias and self.bias is not None
            else [self.weight]
        )

    @property
    def without_gradient(self) -> bool:
        """Whether no parameter of the block has a gradient."""
        return all(p.grad is None for p in self.params)

    def starts_anew(self, unreduced: bool = False) -> bool:
        """Whether gradients of staged statistics have been thrown away: set to None, or to zero.

        Call this once at the beginning of each pass. An accumulation adds 1 to a gradient's
        version, so that only gradients that something else has changed are looked at: a device is
        not waited for in a loop that merely accumulates. Of a sharded gradient the rows that are
        here tell, if there are any: other ranks may not be asked in a pass.

        Args:
            unreduced: Whether FSDP2 keeps gradients of earlier passes that it has yet to average.
        """
        gradient, expected = self.weight.grad, self._expected_version
        gradient = None if gradient is None else local(gradient)
        self._expected_version = 0 if gradient is None else gradient._version + 1
        if self.staged.empty:
            return False
        if gradient is None or gradient._version == expected:
            return self.without_gradient and not unreduced
        rows = [local(p.grad) for p in self.params if p.grad is not None]
        return any(map(Tensor.numel, rows)) and not any(bool(each.any()) for each in rows)

    def replace_params(self, others: Mapping[Tensor, Tensor]) -> None:
        """Put other parameters of the same shapes in the place of some of the block's."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, others.get(value, value))
            elif isinstance(value, list):
                value[:] = [others.get(v, v) if isinstance(v, Tensor) else v for v in value]

    @contextmanager
    def lent(self, gradients: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Let the block work on whole gradients of its parameters instead of on ``p.grad``.

        Args:
            gradients: The whole gradient of each parameter that trains; those of parameters without
                a gradient do not count.
        """
        others: dict[Tensor, Tensor] = {}
        for p in self.params:
            whole = gradients[p]
            # A tensor of the shape, without memory, that a gradient can be hung on.
            stand_in = whole.new_empty(()).expand(whole.shape).requires_grad_()
            stand_in.grad = None if p.grad is None else whole
            others[p] = stand_in
        self.replace_params(others)
        try:
            yield
        finally:
            self.replace_params({stand_in: p for p, stand_in in others.items()})

    @property
    def trains_bias(self) -> bool:
        """Whether A has the homogeneous coordinate now."""
        return self.bias is not None and self.bias.requires_grad

    def follow_requires_grad(self) -> None:
        """Start anew if the bias was frozen or unfrozen, or the layer moved: A has another size.

        A layer that is frozen as a whole keeps its averages until it thaws.
        """
        if not self.trainable:
            return
        moved = self.weight.device != self.staged.device
        if moved or self._current_shape() != self.shape:
            self._reset()

    def _current_shape(self) -> FactorShape:
        return factor_shape(self.modules[0], self.trains_bias, self.keys[0])

    def statistics(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        approximation: Approximation,
        dtype: torch.dtype,
        known: PairStatistics | None = None,
    ) -> PairStatistics:
        """Statistics of a captured pair of one of the modules; see :func:`pair_statistics`."""
        return pair_statistics(
            module,
            x,
            d,
            bias=self.trains_bias,
            approximation=approximation,
            dtype=dtype,
            triangular=self.staged.triangular,
            known=known,
            key=self.keys[self.modules.index(module)],
        )

    # ------------------------------------------------------------ do the pairs explain the gradient

    @property
    def looks(self) -> bool:
        """Whether the pairs of these passes are compared with the gradient."""
        return self.state.unlooked >= LOOK_EVERY

    def looked_at(self, module: nn.Module) -> str:
        """The name, in a module, of the parameter whose gradient is compared."""
        return self._kind_of(module).weight

    def _kind_of(self, module: nn.Module) -> LayerKind:
        key = self.keys[self.modules.index(module)]
        assert key is not None
        return KINDS[key]

    def product(self, module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
        """A pair's part of the gradient of :meth:`looked_at`, in float32 at least."""
        wide = torch.promote_types(d.dtype, torch.float32)
        x = x.to(wide) if x.is_floating_point() else x
        return self._kind_of(module).gradient(module, x, d.to(wide))

    def look(self, module: nn.Module, x: Tensor, d: Tensor, fsdp: FSDPParams | None) -> None:
        """Compare a pair with the gradient that is about to arrive."""
        weight = params_in_pass(module, fsdp).get(self.looked_at(module))
        if weight is not None:
            if self.staged.explanation is None:
                self.staged.explanation = Explanation()
            self.staged.explanation.add(self.product(module, x, d), x, d, weight)

    def fits_pair(self, module: nn.Module, x: Tensor, d: Tensor) -> bool:
        """Whether a pair's sizes can be those of the layer."""
        return self._kind_of(module).fits(module, x, d)

    def judge(self, residual: float) -> None:
        """Note how much of the gradient the step's pairs leave unexplained, if they were compared.

        Pairs that leave too much are dropped, and so are those to come, until they explain it.
        """
        state, self.state.unlooked = self.state, 1
        state.unexplained = residual if residual > TOLERANCE else 0.0
        if state.unexplained:
            self.staged.clear()
            state.heard = False

    def ensure_factors(self) -> KroneckerFactors:
        """The running averages, made on first use."""
        if self.factors is None:
            self.factors = self._blank_factors()
        return self.factors

    def _blank_factors(self) -> KroneckerFactors:
        return KroneckerFactors(
            self.shape, self.weight.device, self.factor_dtype, self._triangular, self.held
        )

    def keep(self, held: tuple[bool, bool]) -> None:
        """Keep A, or G, or both, or neither from now on; factors that are not kept are freed."""
        self.held = held
        if self.factors is not None:
            for letter, factor in self.factors.stored.items():
                self.factors.stored[letter] = factor if held[letter == "G"] else None

    def stored(self, which: str) -> Tensor | None:
        """The factor of a letter, as stored; None if it is not kept here, or is lost."""
        return None if self.factors is None else self.factors.stored[which]

    def stored_shape(self, which: str) -> tuple[int, ...]:
        """The shape of a stored factor, also if another process keeps it."""
        return self.shape.stored_shape(which, self._triangular)

    @property
    def lost(self) -> bool:
        """Whether a factor that is kept here is missing, though there have been statistics."""
        if self.factors is None:
            return False
        return any(self.held[k == "G"] and self.stored(k) is None for k in self.shape.letters)

    def saved_factors(self) -> dict[str, Tensor]:
        """The factors kept here, as a checkpoint has them; tensors are shared, not copied."""
        factors = self._blank_factors() if self.factors is None else self.factors
        parts = {
            "average_weight": factors.weight,
            "mean_eigenvalues": factors.means,
            "examples": factors.examples,
        }
        kept = factors.stored.items()
        return parts | {name: factor for name, factor in kept if factor is not None}

    def load_factors(self, saved: Mapping[str, Any]) -> None:
        """Take over saved averages, stored as triangles or not, whatever their dtype.

        A factor that is to be kept here and is not in ``saved`` counts as lost, which the next
        refresh reports.

        Raises:
            ValueError: If their sizes are not this layer's.
        """
        self.check_factors(saved)
        factors = self._blank_factors()
        factors.weight.copy_(torch.as_tensor(saved["average_weight"]))
        factors.examples.copy_(torch.as_tensor(saved.get("examples", 0.0)))
        letters = self.shape.letters
        matrices = {k: self._as_matrix(k, saved[k]) for k in letters if k in saved}
        if "mean_eigenvalues" in saved:
            factors.means.copy_(saved["mean_eigenvalues"])
        elif len(matrices) == len(letters):
            means = [mean_eigenvalue(m, m.shape[-1]) for m in matrices.values()]
            factors.means.copy_(torch.stack(means))
        for name in letters:
            matrix = matrices.get(name)
            stored = None
            if self.held[name == "G"] and matrix is not None:
                stored = factors.store(matrix).to(self.weight.device, copy=True)
            factors.stored[name] = stored
        self.factors = factors

    def _as_matrix(self, which: str, stored: Tensor) -> Tensor:
        """A saved factor as ``(groups, n, n)``, or as the diagonal it is."""
        if stored.dim() == 3 or self.shape.is_diagonal(which):
            return stored
        return unpack_upper_triangular(stored, self.shape.dim(which))

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether saved factors have this layer's sizes as it is now."""
        try:
            self.check_factors(saved)
        except ValueError:
            return False
        return True

    def check_factors(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless saved factors have this layer's sizes."""
        for letter in self.shape.letters:
            if letter not in saved:
                continue
            full, triangle = (self.shape.stored_shape(letter, packed) for packed in (False, True))
            allowed = {full, triangle}
            if tuple(saved[letter].shape) not in allowed:
                raise ValueError(
                    f"the checkpoint's factor {letter} of layer {self.name!r} has shape "
                    f"{tuple(saved[letter].shape)}, the model needs {full} or, as a triangle, "
                    f"{triangle}; load it into the model that it was saved from"
                )

    def forget(self) -> None:
        """Start the running averages anew: the layer runs on its base gradient until then."""
        self.factors = None
        self.state.asked, self.state.failures = False, 0
        self.drop_inverse()

    def expect(self) -> None:
        """Note that statistics are due: make the averages, so that a layer without any is found."""
        self.ensure_factors()
        self.state.asked = True

    def hear(self) -> None:
        """Note that a pair has been captured."""
        self.state.heard = True

    def find_silent(self, silent: bool) -> None:
        """Note whether a refresh has found that no statistic has ever arrived."""
        self.state.silent = silent

    def complain(self, why: str) -> None:
        """Keep the text of an error on this process, which makes the coming refresh fail."""
        self.state.complaint = why

    def fail(self) -> None:
        """Count a failed refresh; an inverse of an earlier one is kept."""
        self.state.failures += 1

    def install(self, inverse: Inverse | None, dtype: torch.dtype | None = None) -> None:
        """Mark the layer as solved.

        Args:
            inverse: The inverse; None where this rank is no gradient worker.
            dtype: Dtype of the inverses, for what the next :meth:`precondition` tells of the change
                to this one from the last; None if nobody asks.
        """
        if dtype is not None:
            self._before = self._preconditioned_before(dtype)
        self.inverse = inverse
        self.state = replace(self.state, solved=True, silent=False, failures=0, complaint="")

    def precondition(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The inverse applied to a gradient matrix, in a dtype; zeros if the gradient is None.

        Then no rank has a gradient, but the others expect a message of this size.
        """
        if gradient is None:
            size = (self.shape.groups, self.shape.out_dim, self.shape.in_dim)
            return torch.zeros(size, dtype=self.work_dtype, device=self.weight.device)
        assert self.inverse is not None
        result = self.inverse.precondition(gradient.to(dtype)).to(gradient.dtype)
        before, self._before = self._before, None
        if before is not None:
            if not isinstance(before, Tensor):
                before = before.precondition(gradient.to(dtype)).to(gradient.dtype)
            pairs = ((before, result), (before, before), (result, result))
            self._change = torch.stack([torch.vdot(a.flatten(), b.flatten()) for a, b in pairs])
        return result

    def _preconditioned_before(self, dtype: torch.dtype) -> Inverse | Tensor | None:
        """The gradient as the inverse so far preconditions it; that inverse if it is in shards."""
        if self.inverse is None or is_dtensor(self.weight):
            return self.inverse
        gradient = self.gradient(self.work_dtype)
        return None if gradient is None else self.precondition(gradient, dtype)

    def take_change(self) -> Tensor | None:
        """P₀ · P, |P₀|² and |P|² of the gradient preconditioned by the last two inverses, ``(3,)``.

        None where this process has not preconditioned since the last was installed.
        """
        change, self._change = self._change, None
        return change

    def drop_inverse(self) -> None:
        """Forget the inverse: the layer runs on its base gradient until it is solved again."""
        self.inverse = self._before = self._change = None
        self.state.solved = False

    @property
    def solved(self) -> bool:
        """Whether the layer's gradient workers, whichever ranks, hold an inverse."""
        return self.state.solved

    def gradient(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient as a matrix ``(groups, out, in)``; None if the weight has none.

        The matrix may be a view of the gradient: do not change it in place.
        """
        if self.weight.grad is None:
            return None
        bias = None
        if self.trains_bias:
            assert self.bias is not None
            bias = torch.zeros_like(self.bias) if self.bias.grad is None else self.bias.grad
        return gradient_to_matrix(self.weight.grad, bias, self.shape, dtype)

    def write_gradient(self, matrix: Tensor, coefficient: Tensor | float) -> None:
        """Overwrite the gradient by a preconditioned matrix times a coefficient."""
        assert self.weight.grad is not None
        bias = self.bias.grad if self.trains_bias and self.bias is not None else None
        if bias is None and self.trains_bias:
            matrix = matrix[..., :-1]
        gradient_from_matrix(matrix, coefficient, self.weight.grad, bias, self.shape)

    @property
    def size(self) -> int:
        """Number of scalar parameters in the block."""
        bias = self.bias if self.trains_bias else None
        return self.weight.numel() + (0 if bias is None else bias.numel())

    @property
    def factor_bytes(self) -> int:
        """Bytes of the running averages on this process."""
        return 0 if self.factors is None else self.factors.nbytes

    @property
    def inverse_bytes(self) -> int:
        """Bytes of the inverse on this process."""
        return 0 if self.inverse is None else sum(t.nbytes for t in self.inverse.tensors)


class GradientScale:
    """The factor for captured gradients that undoes a GradScaler and accumulation."""

    def __init__(self, accumulation_steps: int, scaler: Any) -> None:
        self._accumulation_steps = accumulation_steps
        self._scaler = scaler

    def __call__(self, gradient: Tensor) -> Tensor | float:
        """The factor, as a number or as a scalar on the gradient's device."""
        if self._scaler is None or not self._scaler.is_enabled():
            return float(self._accumulation_steps)
        # scale(1) is the scale as a tensor: get_scale() would wait for the device.
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        scale: Tensor = self._scaler.scale(one)
        return self._accumulation_steps / scale


@dataclass
class StatisticsCollector:
    """Turns captured pairs into staged statistics.

    Attributes:
        approximation: "expand" or "reduce".
        factor_dtype: Dtype in which statistics are formed, or float32 if that is wider.
        reduction: Tells what the loss of a pass is, asked at every pair.
        gradient_scale: Gives a further factor of the captured gradients, called at every pair.
        conv_approximation: The approximation for convolutions; None for the same.
        warn: Issues a warning of statistics that cannot be had.
        blocks: The blocks of each module.
        counted: The block whose terms are counted, whether it gets pairs or not; None for none.
        fsdp: What FSDP2 does with the model's parameters; None for nothing.
        heard: Hears of each block whose staged statistics have grown.
        sampled: Whether the pairs are of drawn labels, and say nothing of the gradient.
    """

    approximation: Approximation
    factor_dtype: torch.dtype
    reduction: Callable[[], Reduction]
    gradient_scale: Callable[[Tensor], Tensor | float]
    conv_approximation: Approximation | None = None
    warn: Callable[[str], None] = lambda message: warnings.warn(
        message, SecondOrderWarning, stacklevel=3
    )
    blocks: dict[nn.Module, list[KroneckerBlock]] = field(default_factory=dict)
    counted: KroneckerBlock | None = None
    fsdp: FSDPParams | None = None
    heard: Callable[[KroneckerBlock], None] = lambda block: None
    sampled: bool = False
    _last_a: tuple[tuple[int, int, bool], KroneckerBlock, PairStatistics] | None = None

    def watch(self, blocks: Iterable[KroneckerBlock]) -> None:
        """Set the blocks that get the pairs of their modules from now on."""
        self.blocks.clear()
        for block in blocks:
            for module in block.watched:
                self.blocks.setdefault(module, []).append(block)

    def settle(self) -> None:
        """Forget the backward passes so far."""
        self._last_a = None

    def wants(self, module: nn.Module) -> bool:
        """Whether any block of a module trains now."""
        blocks = [*self.blocks.get(module, ()), *self._counted(module)]
        return any(block.trainable for block in blocks)

    def _counted(self, module: nn.Module) -> list[KroneckerBlock]:
        """The block whose terms are counted, if it is a module's and trains."""
        block = self.counted
        if block is None or not block.trainable or module not in block.watched:
            return []
        return [block]

    def tell(self, message: str) -> None:
        """Warn the user."""
        self.warn(message)

    def lose(self, module: nn.Module, reason: str) -> None:
        """Count a pair that cannot be had, and warn of its layer once."""
        for block in self.blocks.get(module, ()):
            if block.looks:
                if block.staged.explanation is None:
                    block.staged.explanation = Explanation()
                block.staged.explanation.complete = False
            if not bool(block.staged.dropped):
                self.warn(f"a statistic of layer {block.name!r} is dropped: {reason}")
            block.staged.dropped += 1

    def looks(self, module: nn.Module) -> bool:
        """Whether the pairs of a module are compared with its gradient now."""
        return any(block.trainable and block.looks for block in self.blocks.get(module, ()))

    def look(self, module: nn.Module, x: Tensor, d: Tensor) -> None:
        """Compare a pair of the user's own loss with the gradient, if that is due."""
        for block in self.blocks.get(module, ()):
            if block.trainable and block.looks and block.fits_pair(module, x, d):
                with span("capture"), ieee_matmul(d.device):
                    block.look(module, x, d, self.fsdp)

    def consume(
        self,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        source: int = -1,
        again: bool = False,
    ) -> None:
        """Add one pair to the staged statistics of its blocks."""
        counted = self._counted(module) if self.reduction() == "step_mean" else []
        for block in {*self.blocks.get(module, ()), *counted}:
            if block.trainable and not block.staged.knows(pass_id):
                block.follow_requires_grad()
                unreduced = self.fsdp is not None and self.fsdp.unreduced(module)
                if block.starts_anew(unreduced):
                    block.staged.clear()
        for block in counted:
            block.staged.count(live_rows(d.reshape(-1, d.shape[-1])).count, pass_id)
        if not self.sampled:
            self.look(module, x, d)
        for block in self.blocks.get(module, ()):
            if block.trainable and not block.fits_pair(module, x, d):
                block.judge(1.0)
            elif block.trainable and not block.state.unexplained:
                with span("capture"), ieee_matmul(d.device):
                    pair = self._statistics(block, module, x, d, pass_id, source)
                    block.staged.add(
                        pair,
                        self.gradient_scale(d),
                        pass_id,
                        again=again,
                        reduction=self.reduction(),
                    )
                inputs = 1 if block.shape.diagonal_a else block.shape.in_dim
                block.staged.work += 6 * d.numel() * inputs
                block.state.work = block.staged.work
                block.hear()
                self.heard(block)

    def _statistics(
        self,
        block: KroneckerBlock,
        module: nn.Module,
        x: Tensor,
        d: Tensor,
        pass_id: int,
        source: int,
    ) -> PairStatistics:
        approximation = self.approximation
        if self.conv_approximation is not None and is_convolution(module):
            approximation = self.conv_approximation
        # Layers fed by one tensor have one A: the last one's may serve (Ba et al. 2017, app. C).
        plain = isinstance(module, nn.Linear) and type(block) is KroneckerBlock and source >= 0
        plain = plain and not block.shape.marginal
        key, last, known = (source, pass_id, block.trains_bias), self._last_a, None
        if plain and last is not None and last[0] == key and last[1] is not block:
            known = last[2]
        pair = block.statistics(module, x, d, approximation, self.factor_dtype, known)
        if known is not None and pair.factors["A"] is known.factors["A"]:
            return replace(pair, factors={**pair.factors, "A": pair.factors["A"].clone()})
        if plain:
            self._last_a = (key, block, pair)
        return pair
