"""The second moment of patches without patches equals the one with them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import conv_factors
from torch import nn

from second_order.kronecker import layers
from second_order.kronecker.autocorrelation import patch_second_moment
from second_order.kronecker.patches import extract_patches, pad_input


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, torch.Tensor]:
    """Stride 1, any kernel and padding, outputs from the size of the kernel up."""
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.sampled_from(["same", "valid", 0, 1]))
    bias = draw(st.booleans())
    size = [draw(st.integers(2 * k + 1, 2 * k + 5)) for k in kernel]
    channels, examples = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    conv = nn.Conv2d(channels, 2, kernel, padding=padding, padding_mode=mode, bias=bias).double()
    torch.manual_seed(draw(st.integers(0, 2**16)))
    return conv, torch.randn(examples, channels, *size, dtype=torch.float64)


@given(convolutions())
def test_autocorrelations_equal_patches(case: tuple[nn.Conv2d, torch.Tensor]) -> None:
    conv, x = case
    patches = extract_patches(x, conv).squeeze(1).flatten(4).flatten(1, 3)  # (N, C k1 k2, T)
    expected = torch.einsum("npt,nqt->pq", patches, patches)
    k1, k2 = conv.kernel_size
    moment = patch_second_moment(pad_input(x, conv), (k1, k2))
    torch.testing.assert_close(moment, expected, rtol=1e-10, atol=1e-10)


@given(convolutions(), st.booleans())
def test_a_layers_statistics_are_the_same_either_way(
    case: tuple[nn.Conv2d, torch.Tensor], channels_last: bool
) -> None:
    """Invariant 6, through the function that chooses."""
    conv, x = case
    bias = conv.bias is not None
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    d = torch.randn_like(conv(x).detach())
    with mock.patch.object(layers, "AUTOCORRELATION_ELEMENTS", 0):
        pair = layers.pair_statistics(
            conv, x, d, bias=bias, approximation="expand", dtype=torch.float64
        )
    a, g = conv_factors(x, d, conv, "expand")
    torch.testing.assert_close(pair.a / pair.examples, a, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pair.g * pair.terms**2 / pair.examples, g, rtol=1e-10, atol=1e-10)


def test_the_choice_takes_both_ways() -> None:
    """Otherwise the test above would compare one way with itself."""
    chosen = layers._has_shared_window
    x = torch.randn(1, 2, 8, 8)
    assert not chosen(nn.Conv2d(2, 3, 3, padding=1), x)  # too small to gain
    assert chosen(nn.Conv2d(32, 3, 3, padding=1), torch.randn(16, 32, 16, 16))
    with mock.patch.object(layers, "AUTOCORRELATION_ELEMENTS", 0):
        assert chosen(nn.Conv2d(2, 3, 3, padding=1), x)
        assert chosen(nn.Conv2d(2, 3, 3, padding="same"), x)
        assert not chosen(nn.Conv2d(2, 3, 1), x)
        assert not chosen(nn.Conv2d(2, 3, 3, stride=2), x)
        assert not chosen(nn.Conv2d(2, 3, 3, dilation=2), x)
        assert not chosen(nn.Conv2d(2, 2, 3, groups=2), x)
        assert not chosen(nn.Conv2d(2, 3, 5), x)
        assert not chosen(nn.Conv1d(2, 3, 3), x[0])


def test_an_output_smaller_than_the_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="the output 2 x 2 is smaller than the kernel 3 x 3"):
        patch_second_moment(torch.randn(1, 1, 4, 4), (3, 3))
