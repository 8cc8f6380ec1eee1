"""Capture: which passes give pairs, their contents, and the memory that is held in between."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from capture_recorders import backward, linears, summed, watched
from models import ZOO
from optimizer_cases import hook_count
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

MLP = ZOO["mlp"]  # Linear layers "0", "2", "4"
F64 = torch.float64


# What is in a pair.


def test_a_pair_is_the_input_and_the_output_gradient() -> None:
    model = MLP.model()
    (x, _) = MLP.batch()
    capture, recorder = watched(model)
    backward(model, x)
    hidden = x
    expected = {}
    twin = MLP.model()
    for layer in twin:
        inputs = hidden
        hidden = layer(hidden)
        if isinstance(layer, nn.Linear):
            hidden.retain_grad()
            expected[len(expected)] = (inputs, hidden)
    hidden.square().mean().backward()
    assert recorder.modules == linears(model)[::-1]  # as gradients arrive
    for pair, (inputs, output) in zip(recorder.pairs[::-1], expected.values(), strict=True):
        assert torch.equal(pair.x, inputs)
        assert torch.equal(pair.d, output.grad)
        assert not pair.x.requires_grad
        assert not pair.d.requires_grad
    assert capture.root_calls == 0


# When there is a pair.


@pytest.mark.parametrize("sampler", [None, summed])
def test_enabled_is_read_in_the_forward_pass(sampler: Any) -> None:
    model = MLP.model()
    capture, recorder = watched(model, sampler)
    capture.gate.open = False
    loss = model(MLP.batch()[0]).sum()
    capture.gate.open = True
    loss.backward()
    assert not recorder.pairs
    backward(model)
    assert len(recorder.pairs) == 3
    recorder.clear()
    loss = model(MLP.batch()[0]).sum()
    capture.gate.open = False
    loss.backward()
    assert len(recorder.pairs) == 3  # what was captured arrives
    recorder.clear()
    backward(model)
    assert not recorder.pairs


# Passes.


def test_passes_are_counted_by_backward_calls() -> None:
    model = MLP.model()
    _capture, recorder = watched(model)
    (model(MLP.batch()[0]).mean() + model(MLP.batch(seed=1)[0]).mean()).backward()
    assert len(recorder.pairs) == 6
    assert len({pair.pass_id for pair in recorder.pairs}) == 1
    recorder.clear()
    loss = model(MLP.batch()[0]).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(recorder.pairs) == 6
    assert len({pair.pass_id for pair in recorder.pairs}) == 2


# Memory.


def test_inputs_pass_through_active_saved_tensor_hooks() -> None:
    model = MLP.model()
    x = MLP.batch()[0]
    _capture, recorder = watched(model)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor + 1

    bare = []
    twin = MLP.model()
    with saved_tensors_hooks(lambda t: bare.append(t) or t, lambda t: t):
        twin(x)
    with saved_tensors_hooks(pack, lambda tensor: tensor - 1):
        loss = model(x).square().mean()
    assert len(packed) == len(bare) + 3 + 1  # and the square's own
    loss.backward()
    torch.testing.assert_close(recorder.pairs[-1].x, x)


def test_inputs_are_released_with_their_graph() -> None:
    model = MLP.model()
    _capture, recorder = watched(model)
    inputs: list[StorageWeakRef] = []
    model[2].register_forward_pre_hook(
        lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    gc.disable()
    try:
        backward(model)
        recorder.clear()
        assert inputs[0].expired()
        loss = model(MLP.batch()[0]).mean()
        assert not inputs[1].expired()
        del loss  # no backward
        assert inputs[1].expired()
    finally:
        gc.enable()


def test_an_input_changed_in_place_is_reported() -> None:
    """A Linear works on a copy of a transposed sequence, so that the backward needs ours alone."""
    layer = nn.Linear(4, 3, dtype=F64)
    model = nn.Sequential(layer)
    capture, recorder = watched(model)
    x = torch.randn(2, 3, 4, dtype=F64)
    loss = model(x.transpose(0, 1)).mean()
    x.zero_()
    loss.backward()
    assert not recorder.pairs
    assert "changed in place" in capture.missed[layer]


# The sampled Fisher.


def test_sampled_pairs_do_not_change_other_gradients() -> None:
    model = MLP.model()
    (x, y) = MLP.batch()
    twin = MLP.model()
    _recorder, plain = watched(twin)
    functional.cross_entropy(twin(x), y, reduction="sum").backward()
    calls = []

    def sampler(output: Tensor, call: int) -> Tensor:
        calls.append(call)
        assert torch.is_grad_enabled()
        return functional.cross_entropy(output, y, reduction="sum")

    capture, recorder = watched(model, sampler)
    output = model(x)
    assert calls == [0]  # as soon as the forward returns
    assert all(p.grad is None for p in model.parameters())
    alone = MLP.model()
    for each in (output, alone(x)):
        each.square().mean().backward()  # the user's own
    assert len(recorder.pairs) == 3
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    by_module = {id(pair.module): pair for pair in recorder.pairs}
    for layer, its in zip(linears(model), plain.pairs[::-1], strict=True):
        assert torch.equal(by_module[id(layer)].x, its.x)
        torch.testing.assert_close(by_module[id(layer)].d, its.d, rtol=1e-12, atol=1e-15)
    backward(model)
    assert calls == [0, 1]
    assert capture.root_calls == 2
    assert [pair.pass_id for pair in recorder.pairs] == [0] * 3 + [1] * 3


def test_sampled_pairs_arrive_once_with_the_users_backward() -> None:
    """A forward that is only looked at leaves nothing, as without a sampler."""
    model = MLP.model()
    _capture, recorder = watched(model, summed)
    model(MLP.batch()[0])
    loss = model(MLP.batch(seed=1)[0]).mean()
    assert not recorder.pairs
    loss.backward(retain_graph=True)
    assert {pair.pass_id for pair in recorder.pairs} == {1}
    loss.backward()
    assert len(recorder.pairs) == 3


# Attaching, detaching, and what remains.


@pytest.mark.parametrize("sampler", [None, summed])
@pytest.mark.parametrize("how", ["detach", "delete", "collect"])
def test_a_deleted_capture_removes_only_its_own_hooks(sampler: Any, how: str) -> None:
    model = MLP.model()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    capture, recorder = watched(model, sampler)
    assert hook_count(model) == 2 + 3 + (0 if sampler is None else 2)
    backward(model)
    recorder.clear()
    gone = weakref.ref(capture)
    if how == "detach":
        capture.detach()
        capture.detach()  # twice does no harm
    elif how == "collect":
        capture.cycle = capture  # type: ignore[attr-defined]
        del capture
        gc.collect()
        assert gone() is None
    else:
        del capture
        assert gone() is None
    assert hook_count(model) == 2
    backward(model)
    assert not recorder.pairs
    assert seen == ["before", "forward"] * 2


# Two captures.


@pytest.mark.parametrize("samplers", [(None, None), (summed, summed), (None, summed)])
def test_two_captures_of_one_module_both_receive_every_pair(samplers: tuple[Any, Any]) -> None:
    model = MLP.model()
    captures = [watched(model, sampler) for sampler in samplers]
    backward(model)
    for _, recorder in captures:
        assert len(recorder.pairs) == 3
    captures[0][0].gate.open = False
    backward(model)
    assert [len(recorder.pairs) for _, recorder in captures] == [3, 6]
