"""The second moment of patches without patches equals the one with them."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from factor_checks import pair_statistics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from second_order.kronecker import convolutions as conv_file
from second_order.kronecker import layers
from second_order.kronecker.convolutions import extract_patches, pad_input, patch_second_moment


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, Tensor]:
    """Any kernel and padding, outputs of any size from 1 x 1 up, and an input."""
    channels = draw(st.integers(1, 3))
    conv = nn.Conv2d(
        channels,
        1,
        kernel_size=draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        padding=draw(st.sampled_from(["same", "valid", 0, 1])),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    size = [max(k + draw(st.integers(0, 6)), 2) for k in conv.kernel_size]
    torch.manual_seed(draw(st.integers(0, 2**16)))
    return conv, torch.randn(draw(st.integers(1, 3)), channels, *size, dtype=torch.float64)


def moment_of_patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    patches = extract_patches(x, conv).flatten(2, 4).flatten(3)  # (N, groups, C k1 k2, T)
    return torch.einsum("ngpt,ngqt->gpq", patches, patches)


def moment_without(x: Tensor, conv: nn.Conv2d) -> Tensor:
    return patch_second_moment(pad_input(x, conv), conv.kernel_size).unsqueeze(0)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest element; all of them may be zero, as of padding alone."""
    largest = expected.abs().max()
    return float((found - expected).abs().max() / torch.where(largest > 0, largest, 1.0))


@given(case=convolutions(), longest_sum=st.sampled_from([1, 20, 2**14]))
def test_autocorrelations_equal_patches(case: tuple[nn.Conv2d, Tensor], longest_sum: int) -> None:
    conv, x = case
    with mock.patch.object(conv_file, "LONGEST_SUM", longest_sum):
        moment = moment_without(x, conv)
    assert error(moment, moment_of_patches(x, conv)) < 1e-12
    assert torch.equal(moment, moment.mT)


@pytest.mark.parametrize("shape", [(16, 8, 16, 16), (2, 64, 12, 12)], ids=["many", "few"])
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("border", [1.0, 30.0, 1000.0])
def test_float32_stays_semidefinite(shape: tuple[int, ...], mean: float, border: float) -> None:
    """Although blocks follow from others by differences, with fewer positions than dimensions."""
    conv = nn.Conv2d(shape[1], 1, 3)
    x = torch.randn(shape) + mean
    for dim in (2, 3):
        x.narrow(dim, 0, 2).mul_(border)
    moment = moment_without(x, conv)
    bound = 1e-5 if border == 1.0 else 1e-4
    assert error(moment.double(), moment_of_patches(x.double(), conv)) < bound
    eigenvalues = torch.linalg.eigvalsh(moment.double())
    assert eigenvalues[0, 0] > -1e-5 * eigenvalues[0, -1]


CHOICES = {
    "plain": (nn.Conv2d(2, 3, 3, padding=1), True),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), True),
    "groups": (nn.Conv2d(2, 2, 3, groups=2), False),
    "dilation": (nn.Conv2d(2, 3, 3, dilation=(1, 2), padding=2), False),
    "one dimension": (nn.Conv1d(2, 3, 3), True),
    "stride of the columns": (nn.Conv2d(2, 3, 3, stride=(1, 2)), False),
    "pixels": (nn.Conv2d(2, 3, 1), False),
    "kernel half of the output": (nn.Conv2d(2, 3, 5, padding="valid"), False),
    "three dimensions": (nn.Conv3d(2, 3, 3), False),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_both_algorithms_are_chosen_where_they_are_faster(kind: str) -> None:
    """Otherwise patches would be compared with themselves."""
    conv, chosen = CHOICES[kind]
    conv = conv.double()
    x = torch.randn(2, 2, *[12] * len(conv.kernel_size)).double()
    d = torch.randn_like(conv(x).detach())
    found = []
    for least in (0, math.inf):  # elements of a patch matrix that is spared
        with (
            mock.patch.object(conv_file, "AUTOCORRELATION_ELEMENTS", least),
            mock.patch.object(conv_file, "extract_patches", wraps=extract_patches) as patches,
        ):
            options = {"approximation": "expand", "dtype": torch.float64}
            found.append(pair_statistics(conv, x, d, has_bias=conv.bias is not None, **options))
        assert patches.called is not (chosen and least == 0)
    assert error(found[0].factors["A"], found[1].factors["A"]) < 1e-12
    assert torch.equal(found[0].factors["G"], found[1].factors["G"])


@given(
    groups=st.integers(1, 2),
    dim=st.sampled_from([1, 127, 128, 129, 300]),
    rows=st.sampled_from([3, 1024]),
    homogeneous=st.booleans(),
)
def test_strips_of_a_gram_matrix_equal_the_whole(
    groups: int, dim: int, rows: int, homogeneous: bool
) -> None:
    x = torch.randn(groups, rows, dim, dtype=torch.float64)
    extended = nn.functional.pad(x, (0, int(homogeneous)), value=1.0)
    expected = torch.einsum("grp,grq->gpq", extended, extended)
    for variant in (x, x.mT.contiguous().mT):
        assert error(layers.gram(variant, homogeneous), expected) < 1e-12
