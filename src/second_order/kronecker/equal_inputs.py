"""One A for layers that are fed by the same tensor, as q, k and v are (Ba et al. 2017, app. C)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from second_order.kronecker.block import KroneckerBlock
from second_order.kronecker.factors import KroneckerFactors, StatisticsSums

__all__ = ["link_equal_inputs"]


def link_equal_inputs(
    blocks: Iterable[KroneckerBlock],
    found: Mapping[KroneckerBlock, KroneckerBlock],
    sums: Mapping[KroneckerBlock, StatisticsSums],
) -> set[KroneckerBlock]:
    """Let layers with equal statistics of their inputs keep one running average of them.

    Where A's differ after all, on another process or in another pass, each layer has its own.

    Args:
        blocks: All of them.
        found: By layer, another one that had the same input in the passes of the sums.
        sums: Of some layers, over all processes, before they go into the averages.

    Returns:
        The layers whose A is another one's, which alone is to update it.
    """
    leaders = {leader for leader in found.values() if leader not in found and leader in sums}
    followers = [block for block in sums if found.get(block) in leaders]
    for block in blocks:
        if block not in followers:
            _keep_own(block)
    linked: set[KroneckerBlock] = set()
    for block in followers:
        leader = found[block]
        ours, theirs = block.ensure_factors(), leader.ensure_factors()
        if _same(ours, theirs) and torch.equal(sums[block].a, sums[leader].a):
            ours.stored["A"] = theirs.a
            linked.add(block)
        else:
            _keep_own(block)
    for block in linked:
        block.shares_a = True
    return linked


def _keep_own(block: KroneckerBlock) -> None:
    """End the sharing of a layer that has had another one's average."""
    if block.shares_a and block.factors is not None and block.factors.a is not None:
        block.factors.stored["A"] = block.factors.a.clone()
    block.shares_a = False


def _same(ours: KroneckerFactors, theirs: KroneckerFactors) -> bool:
    """Whether two layers have seen the same inputs so far."""
    a, b = ours.a, theirs.a
    # On CUDA a comparison would wait for the device; averages stay apart there.
    if a is None or b is None or a.device.type != "cpu" or a.shape != b.shape:
        return False
    return torch.equal(ours.weight, theirs.weight) and (a is b or torch.equal(a, b))
