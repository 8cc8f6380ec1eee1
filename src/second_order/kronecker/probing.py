"""What a module computes, found out by calling it once with a few random numbers.

Hugging Face's models bring norms and Linears of their own, quantisation wraps Linears in classes
that override forward. What matters to a curvature is not the class but the gradient: of a Linear's
weight it is the outer product of the output's gradient and the input; of a gain, the output's
gradient times what the gain multiplies.

The module itself is not called: a copy is, with weights of its own, so that no buffer, hook or
gradient of the model changes, and no random number is drawn.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from second_order.sharded import is_dtensor, local, plain_type

__all__ = ["computes_like", "gain_factor", "has_gain", "scale_of_lookup"]

NEAR = 0.05  # relative error of products in low precision, or of quantised inputs
LEADING = (2, 3)  # batch and positions of the inputs

_products: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_gains: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_scales: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


def computes_like(module: nn.Module) -> str | None:
    """The key of the kind of layer that a module of an unknown class is, or None.

    Args:
        module: A module; it is a layer if it has a ``weight`` of two dimensions whose gradient is
            that of a Linear, "linear", of one whose weight is transposed, "transposed linear", or
            a multiple of that of an embedding, "scaled embedding".
    """
    if module not in _products:
        _products[module] = _product_of(module) if _is_simple(module, 2) else ""
    return _products[module] or None


def scale_of_lookup(module: nn.Module) -> float:
    """The number that an embedding's subclass multiplies entries by; 1 for an embedding itself."""
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    if module not in _scales:
        _scales[module] = 0.0
        _tried(_has_scale, module)
    return _scales[module]


def has_gain(module: nn.Module) -> bool:
    """Whether a module multiplies something by its ``weight``, along the last dimension.

    Something more, which depends neither on the weight nor on the ``bias``, may be added, and so
    may be the bias.
    """
    if module not in _gains:
        _gains[module] = _is_simple(module, 1) and _tried(_is_gain, module)
    return _gains[module]


def gain_factor(module: nn.Module, x: Tensor) -> Tensor:
    """The factor of a module's gain: its output with a gain of one, less that with zero."""
    weight = _plain(cast(Tensor, module.weight))
    with torch.no_grad():
        found = [_output(module, x, torch.full_like(weight, gain), 0.0) for gain in (1.0, 0.0)]
    return (found[0] - found[1]).to(x.dtype)


def _is_simple(module: nn.Module, dims: int) -> bool:
    """Whether a module has a ``weight`` of so many dimensions, and no parameters inside others."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    return (
        isinstance(weight, nn.Parameter)
        and not isinstance(weight, nn.parameter.UninitializedParameter)
        and weight.dim() == dims
        and min(weight.shape) > 1
        and weight.is_floating_point()
        and weight.device.type != "meta"
        and not getattr(module, "sparse", False)
        and (bias is None or bias.dim() == 1)
        and not any(True for child in module.children() for _ in child.parameters())
    )


def _tried(test: Callable[[nn.Module], bool], module: nn.Module) -> bool:
    """The result of a test; False where the module cannot be called like that."""
    device = cast(Tensor, module.weight).device
    state = torch.get_rng_state(), _device_state(device)
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            return test(module)
    except Exception:  # of somebody else's forward
        return False
    finally:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)


def _device_state(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _random(seed: int, like: Tensor, *shape: int) -> Tensor:
    """Random numbers on the device and in the dtype of a tensor, the same for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(like)


def _plain(p: Tensor) -> Tensor:
    """A parameter's values; random ones in the place of a sharded one's, which are not all here."""
    if not is_dtensor(p):
        return p.detach()
    return _random(4, local(p).detach(), *p.shape)


def _copied(module: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A copy with buffers and inner modules of its own, and other tensors as parameters."""
    # Not by copy.copy(), which FSDP2's classes do not stand.
    probe, own = plain_type(module).__new__(plain_type(module)), module.__dict__
    others = {k: None if p is None else _plain(p) for k, p in own["_parameters"].items()}
    inside: dict[str, Any] = {
        "_parameters": {**others, "weight": weight},
        "_buffers": {
            k: None if b is None else b.detach().clone() for k, b in own["_buffers"].items()
        },
        "_modules": {k: copy.deepcopy(child) for k, child in own["_modules"].items()},
    }
    if "bias" in others:
        inside["_parameters"]["bias"] = bias
    probe.__dict__.update({**own, **inside})
    return probe


def _call(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    probe = _copied(module, weight, bias)
    output = type(module).forward(probe, x)
    if not isinstance(output, Tensor):
        raise TypeError("the output is no tensor")
    return output


def _output(module: nn.Module, x: Tensor, weight: Tensor, bias: float) -> Tensor:
    """The output of a module with a gain, and a constant for a bias."""
    has_bias = module._parameters.get("bias") is not None
    return _call(module, x, weight, torch.full_like(weight, bias) if has_bias else None)


def _product_of(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "scaled embedding" if scale_of_lookup(module) else ""
    if _tried(_is_linear, module):
        return "linear"
    return "transposed linear" if _tried(_is_transposed, module) else ""


def _is_linear(module: nn.Module) -> bool:
    return _is_product(module, transposed=False)


def _is_transposed(module: nn.Module) -> bool:
    return _is_product(module, transposed=True)


def _is_product(module: nn.Module, transposed: bool) -> bool:
    """Whether the gradient of the weight is the sum of d xᵀ, or of x dᵀ; of the bias, of d."""
    params = [module._parameters.get(name) for name in ("weight", "bias")]
    leaves = [None if p is None else _plain(p).clone().requires_grad_() for p in params]
    weight, bias = leaves
    assert weight is not None
    out_dim, in_dim = reversed(weight.shape) if transposed else weight.shape
    x, d = _random(0, weight, *LEADING, in_dim), _random(1, weight, *LEADING, out_dim)
    output = _call(module, x, weight, bias)
    if output.shape != d.shape:
        return False
    found = torch.autograd.grad(output, [p for p in leaves if p is not None], d.to(output.dtype))
    flat_x, flat_d = x.flatten(0, 1), d.flatten(0, 1)
    expected = [flat_x.mT @ flat_d if transposed else flat_d.mT @ flat_x, flat_d.sum(0)]
    return all(map(_near, found, expected))


def _has_scale(module: nn.Module) -> bool:
    """Whether the gradient of an embedding's weight is a multiple of d at the entries looked up."""
    embedding = cast(nn.Embedding, module)
    weight = _plain(embedding.weight).clone().requires_grad_()
    entries = [i for i in range(len(weight)) if i != embedding.padding_idx]
    words = torch.tensor([entries[i % len(entries)] for i in range(6)], device=weight.device)
    d = _random(0, weight, *LEADING, weight.shape[1])
    output = _call(module, words.view(LEADING), weight, None)
    if output.shape != d.shape:
        return False
    (found,) = torch.autograd.grad(output, weight, d.to(output.dtype))
    plain = torch.zeros_like(found).index_add_(0, words, d.flatten(0, 1).to(found.dtype))
    scale = float((found * plain).sum() / plain.square().sum())
    if _near(found, scale * plain):
        _scales[module] = scale
    return _scales[module] != 0


def _is_gain(module: nn.Module) -> bool:
    """Whether the output is a factor times the weight, along the last dimension, plus the bias."""
    gain = _plain(cast(Tensor, module.weight))
    bias = module._parameters.get("bias")
    if bias is not None and bias.shape != gain.shape:
        return False
    x = _random(0, gain, *LEADING, gain.numel()) + 0.5
    weight = _random(1, gain, gain.numel()).requires_grad_()
    shift = None if bias is None else _random(2, gain, gain.numel())
    output = _call(module, x, weight, shift)
    if output.shape != x.shape:
        return False
    factor, rest = gain_factor(module, x), _output(module, x, torch.zeros_like(gain), 0.0)
    expected = rest + weight * factor + (0.0 if shift is None else shift)
    d = _random(3, gain, *LEADING, gain.numel()) + 1.0
    (found,) = torch.autograd.grad(output, weight, d.to(output.dtype))
    return _near(output, expected) and _near(found, (d * factor).sum((0, 1)))


def _near(found: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal up to the rounding of low precision."""
    error, size = (found - expected).float().norm(), expected.float().norm()
    return bool(size > 0) and bool(error <= NEAR * size)
