"""Captures that come, go, are copied and meet: each pair once for each that watches."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from contract import hook_count
from models import ZOO
from recorders import backward, linears, summed, watched
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

MLP = ZOO["mlp"]  # Linear layers "0", "2", "4"


# Attaching, detaching, and what remains.


def test_attach_watches_exactly_the_layers_given() -> None:
    model = MLP.model()
    capture, recorder = watched(model)
    capture.attach(model, [model[2]])
    backward(model)
    assert recorder.modules == [model[2]]
    assert hook_count(model) == 3, "a graph would not meet hooks that are new"
    capture.attach(model, [model[0], model[4]])
    recorder.clear()
    backward(model)
    assert recorder.modules == [model[4], model[0]]


@pytest.mark.parametrize("sampler", [None, summed])
@pytest.mark.parametrize("how", ["detach", "delete", "collect"])
def test_a_capture_that_goes_takes_its_hooks_along_and_no_others(sampler: Any, how: str) -> None:
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


@pytest.mark.parametrize("sampler", [None, summed])
@pytest.mark.parametrize("how", ["detach", "delete"])
def test_pairs_in_flight_are_forgotten(sampler: Any, how: str) -> None:
    """As `detach` says: the backward of an older forward tells nobody."""
    model = MLP.model()
    capture, recorder = watched(model, sampler)
    loss = model(MLP.batch()[0]).mean()
    if how == "detach":
        capture.detach()
    else:
        del capture
    loss.backward()
    assert not recorder.pairs


def test_a_module_that_goes_does_not_stay_for_the_capture() -> None:
    model = MLP.model()
    capture, _ = watched(model)
    backward(model)
    gone = weakref.ref(model[2])
    del model
    gc.collect()
    # The recorder's pairs hold modules; the capture does not.
    assert gone() is not None
    _.clear()
    gc.collect()
    assert gone() is None
    capture.detach()


# Copies.


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("sampler", [None, summed])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_of_a_watched_module_captures_nothing(
    duplicate: Callable[[nn.Module], nn.Module], sampler: Any
) -> None:
    model = MLP.model()
    capture, recorder = watched(model, sampler)
    twin = duplicate(model)
    backward(twin)
    assert not recorder.pairs
    assert capture.root_calls == 0
    backward(model)
    assert recorder.modules in (linears(model), linears(model)[::-1])


@pytest.mark.parametrize("sampler", [None, summed])
def test_a_copy_can_be_watched_itself_and_gives_each_pair_once(sampler: Any) -> None:
    """The hooks that came along are not doubled, and go with the copy's capture."""
    model = MLP.model()
    kept = watched(model, sampler)
    twin = copy.deepcopy(model)
    capture, recorder = watched(twin, sampler)
    assert hook_count(twin) == hook_count(model)
    backward(twin)
    assert sorted(map(id, recorder.modules)) == sorted(map(id, linears(twin)))
    assert not kept[1].pairs
    capture.detach()
    assert hook_count(twin) == 0
    backward(model)
    assert len(kept[1].pairs) == 3


# Two captures.


@pytest.mark.parametrize("samplers", [(None, None), (summed, summed), (None, summed)])
def test_two_captures_of_one_module_each_get_every_pair(samplers: tuple[Any, Any]) -> None:
    model = MLP.model()
    captures = [watched(model, sampler) for sampler in samplers]
    backward(model)
    for _, recorder in captures:
        assert len(recorder.pairs) == 3
    captures[0][0].enabled = False
    backward(model)
    assert [len(recorder.pairs) for _, recorder in captures] == [3, 6]
