"""Factors of convolutions of every kind against patches and locations: invariants 6 and 8.

The numbers in names are those of the invariants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import reference as ref
import torch
from factor_checks import close, pair_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from second_order.kronecker.convolutions import extract_patches

if TYPE_CHECKING:
    from reference import Approx, Factors

F64 = torch.float64
CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


# 6. Every convolution: A equals the one built from patches, however it is really computed.


@dataclass(frozen=True)
class ConvCase:
    """A convolution, and the size of its input without the batch."""

    dims: int
    channels: tuple[int, int]
    shape: tuple[int, ...]
    options: dict[str, Any]
    approx: Approx
    layout: str
    n: int | None

    def conv(self) -> Any:
        return CONVS[self.dims - 1](*self.channels, **self.options).double()


@st.composite
def conv_cases(draw: Any) -> ConvCase:
    dims = draw(st.integers(1, 3))
    most = 3 if dims < 3 else 2

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel = each(1, most)
    dilation = each(1, most)
    groups = draw(st.integers(1, 3))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    kind = draw(st.sampled_from(["numbers", "same", "valid"]))
    padding: Any = {"numbers": each(0, 2)}.get(kind, kind)
    after = {"numbers": padding, "same": [r // 2 for r in reach], "valid": [0] * dims}[kind]
    # Large enough for one location, and for what is reflected or wrapped around.
    shape = tuple(
        max(r - 2 * p if kind == "numbers" else r, p + 1) + draw(st.integers(0, 2))
        for r, p in zip(reach, after, strict=True)
    )
    return ConvCase(
        dims,
        (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))),
        shape,
        {
            "kernel_size": kernel,
            "dilation": dilation,
            "groups": groups,
            "padding": padding,
            "padding_mode": draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"])),
            "stride": (1,) * dims if kind == "same" else each(1, 3),
            "bias": draw(st.booleans()),
        },
        draw(st.sampled_from(["expand", "reduce"])),
        draw(st.sampled_from(["plain", "channels last", "transposed"])),
        draw(st.sampled_from([None, 1, 2, 3])),  # None: one example without the batch's axis
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another order in memory."""
    if layout == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.mT.contiguous().mT if layout == "transposed" else x


def conv_statistics(conv: Any, x: Tensor, d: Tensor, approx: Approx) -> Factors:
    """The package's A and G of one pair, for a loss that is a mean over examples."""
    pair = pair_statistics(
        conv, x, d, has_bias=conv.bias is not None, approximation=approx, dtype=F64
    )
    return pair.factors["A"] / pair.num_examples, pair.factors["G"] * pair.num_examples


@settings(max_examples=120)
@given(case=conv_cases())
def test_6_every_convolution_has_the_factors_of_its_patches(case: ConvCase) -> None:
    conv = case.conv()
    x = laid_out(torch.randn(case.n or 1, conv.in_channels, *case.shape, dtype=F64), case.layout)
    with torch.no_grad():
        outputs = conv(x)
    d = laid_out(torch.randn_like(outputs), case.layout)
    expected = ref.conv_factors(x, d, conv, case.approx)
    if case.n is None:
        x = x[0]
        d = d[0]
    close(conv_statistics(conv, x, d, case.approx), expected)


@given(case=conv_cases())
def test_6_weight_times_patches_is_the_convolution(case: ConvCase) -> None:
    """This checks the patches without the reference."""
    conv = case.conv()
    x = laid_out(torch.randn(2, conv.in_channels, *case.shape, dtype=F64), case.layout)
    patches = extract_patches(x, conv).flatten(2, 2 + case.dims).flatten(3)  # (N, groups, in, T)
    weight = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
    outputs = torch.einsum("goi,ngit->ngot", weight, patches).flatten(1, 2)
    if conv.bias is not None:
        outputs = outputs + conv.bias[:, None]
    close([outputs], [conv(x).flatten(2)])


# 8. Appendix-A convolution factors = reduce over locations.


@settings(max_examples=40)
@given(case=conv_cases())
def test_8_cheap_factors_are_those_of_a_linear_whose_positions_are_reduced(case: ConvCase) -> None:
    """Each group of the convolution is a Linear on its patches, with locations for positions."""
    conv = case.conv()
    x = torch.randn(case.n or 1, conv.in_channels, *case.shape, dtype=F64)
    x = laid_out(x, case.layout)
    d = torch.randn_like(conv(x))
    A, G = conv_statistics(conv, x, d, "reduce")
    rows = extract_patches(x, conv).flatten(2, 2 + case.dims).flatten(3).mT  # (N, groups, T, in)
    gradients = d.flatten(2).unflatten(1, (conv.groups, -1)).mT
    for group in range(conv.groups):
        linear = nn.Linear(rows.shape[-1], gradients.shape[-1], bias=conv.bias is not None)
        expected = conv_statistics(linear, rows[:, group], gradients[:, group], "reduce")
        close([A[group], G[group]], [expected[0][0], expected[1][0]])
        # By hand: ã the mean over locations, d̃ the sum.
        a = rows[:, group].mean(1)
        g = gradients[:, group].sum(1) * len(x)
        if conv.bias is not None:
            a = torch.cat([a, torch.ones(len(x), 1)], 1)
        close([A[group], G[group]], [a.T @ a / len(x), g.T @ g / len(x)])
