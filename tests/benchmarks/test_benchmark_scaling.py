"""The benchmark of large worlds: its arithmetic is what simulated processes do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import scaling
from workloads import resnet50

if TYPE_CHECKING:
    from pathlib import Path


def tiny_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 6, 3, padding=1, groups=2),
        nn.Flatten(),
        nn.Linear(6 * 16, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )


def resnet_50() -> scaling.Network:
    with torch.device("meta"):
        return scaling.network_of(resnet50())


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("system", scaling.SYSTEMS, ids=lambda system: system.name)
def test_simulated_processes_send_and_keep_what_is_computed(
    system: scaling.System, solver: scaling.SolverName
) -> None:
    batch = torch.randn(4, 3, 4, 4), torch.arange(4)
    volumes = system.volumes(scaling.network_of(tiny_net()), 5, solver)
    for rank in range(5):  # one of them owns no layer
        scaling.check(system, volumes, tiny_net, batch, rank, solver)


def test_a_wrong_volume_is_reported() -> None:
    system = scaling.SYSTEMS[0]
    volumes = system.volumes(scaling.network_of(tiny_net()), 4, "inverse")
    volumes.factors[1] += 1
    batch = torch.randn(4, 3, 4, 4), torch.arange(4)
    with pytest.raises(RuntimeError, match=r"COMM-OPT, rank 1: computed .*'kept factors'"):
        scaling.check(system, volumes, tiny_net, batch, 1, "inverse")


def test_resnet_50_is_as_large_as_the_paper_says() -> None:
    network = resnet_50()
    assert network.gradient_elements == 25_557_032
    assert network.factor_elements == pytest.approx(153.9e6, rel=1e-3)


@pytest.mark.parametrize("processes", [2, 3, 4, 8, 16, 64])
def test_balanced_owners_are_as_full_as_they_must_be(processes: int) -> None:
    network = resnet_50()
    least = scaling.least_possible(network, processes)
    assert scaling.fullest(network, processes, "balanced") <= scaling.ALLOWANCE * least


def test_owners_move_no_more_than_ssgd() -> None:
    network = resnet_50()
    rows = {s.name: s.volumes(network, 64, "inverse") for s in scaling.SYSTEMS}
    plain = scaling.s_sgd(network, 64)
    reference = scaling.total(plain, "averaging")
    for name, most in (("DPKFAC, balanced", 1.02), ("DPKFAC, all_reduce", 1.52)):
        moved = sum(scaling.total(rows[name], kind) for kind in scaling.KINDS)
        assert moved <= most * reference
        assert scaling.total(rows[name], "factors") == 0
    paper = scaling.paper_traffic(network, 64)
    assert paper["S-SGD"][2] == pytest.approx(reference)


def test_the_tables_and_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results" / "scaling.json"
    scaling.main(["--skip-check", "--processes", "8", "--json", str(output)])
    printed = capsys.readouterr().out
    assert "N_g 25.6 M, N_f 153.9 M" in printed
    for system in scaling.SYSTEMS:
        assert printed.count(system.name) == 3
    record = json.loads(output.read_text())
    assert [row["name"] for row in record["systems"]][1:] == [s.name for s in scaling.SYSTEMS]
    assert record["factor_elements"] == 153_851_562
