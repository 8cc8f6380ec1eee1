"""The tasks, their rivals, and the benchmarks on them: each at a small size."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import images
import larger
import sensitivity
import tasks
import tuned_rivals
from muon import Muon
from task import Task
from tasks import TASKS, FlattenedMuon, Job, Run
from tuned_rivals import THIRD, TWICE
from unseen import UNSEEN


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of two judgements, and rivals with two rates."""
    for name in ("unseen head", "unseen diabetes", "digits MLP"):
        short = replace(TASKS[name](), steps=10, every=5)
        monkeypatch.setitem(TASKS, name, lambda short=short: short)
    for name, rates in list(tuned_rivals.GRIDS.items()):
        two = {rival: of[1:3] for rival, of in rates.items()}
        monkeypatch.setitem(tuned_rivals.GRIDS, name, two)
    cell = sensitivity.Cell("digits MLP", "SGD", (0.1, 0.003))
    monkeypatch.setattr(sensitivity, "CELLS", {cell.name: cell})


def run(task: str, optimizer: str, losses: list[float], seconds: list[float], seed: int = 0) -> Run:
    return Run(Job(task, optimizer, 0.1, seed), losses, seconds)


def judged_run(optimizer: str, losses: list[float], loss: float, accuracy: float) -> Run:
    """A run of two judgements, with figures of its end."""
    end = {"loss": loss, "accuracy": accuracy}
    return replace(run("unseen vit", optimizer, losses, [1.0, 2.0]), end=end)


# ---------------------------------------------------------------------------------------- the tasks


@pytest.mark.parametrize("name", UNSEEN)
def test_every_rival_takes_a_step_of_every_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(TASKS[name](), steps=2, every=2)
    monkeypatch.setitem(TASKS, name, lambda: one)
    for optimizer in tuned_rivals.GRIDS[name]:
        found = tasks.train(Job(name, optimizer, 0.001, 0))
        assert len(found.losses) == 1
        assert math.isfinite(found.losses[0]), optimizer


@pytest.fixture
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image tasks on random images of the same shapes, with runs of two lengths."""
    generator = torch.Generator().manual_seed(0)

    def random_images(channels: int, side: int) -> images.Images:
        x = torch.randn(64, channels, side, side, generator=generator)
        labels = torch.randint(10, (64,), generator=generator)
        return images.Images(x, labels, x, labels)

    fashion = random_images(1, 28)
    cifar = random_images(3, 32)
    monkeypatch.setattr(images, "fashion_mnist", lambda: fashion)
    monkeypatch.setattr(images, "cifar10", lambda: cifar)
    for name, make in images.IMAGES.items():
        short = replace(make(), steps=2, every=1, warmup=None)
        monkeypatch.setitem(TASKS, name, lambda short=short: short)


@pytest.mark.parametrize("name", images.IMAGES)
def test_every_rival_and_kaisa_over_muon_take_steps_on_images(
    name: str, small_images: None
) -> None:
    for optimizer in ("SGD", "AdamW", "Muon", "SOAP", "KAISA, Muon"):
        found = tasks.train(Job(name, optimizer, 0.001, 0))
        assert len(found.losses) == 2
        assert all(map(math.isfinite, found.losses)), optimizer
        assert 0 <= found.end.get("accuracy", 0) <= 1


def test_muon_trains_a_kernel_as_the_matrix_of_its_rows() -> None:
    kernel = torch.randn(6, 4, 3, 3)
    convolution, matrix, as_torch_does = (
        torch.nn.Parameter(each.clone()) for each in (kernel, kernel.flatten(1), kernel.flatten(1))
    )
    flattened = FlattenedMuon([convolution, matrix], lr=0.1, weight_decay=0.2)
    muon = Muon([as_torch_does], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(6, 4, 3, 3)
        convolution.grad = gradient
        matrix.grad = gradient.flatten(1)
        as_torch_does.grad = gradient.flatten(1)
        before = convolution.detach().clone()
        flattened.step()
        muon.step()
    assert torch.equal(convolution.flatten(1), matrix)
    assert torch.equal(matrix, as_torch_does)
    step = (convolution - (1 - 0.1 * 0.2) * before).flatten(1)
    singular = torch.linalg.svdvals(step)
    assert singular.max() < 2 * singular.min()  # Newton-Schulz pushes them to 0.7 to 1.2


def test_soap_trains_a_kernel_as_the_matrix_of_its_rows() -> None:
    kernel = torch.randn(6, 4, 3, 3)
    convolution = torch.nn.Parameter(kernel.clone())
    matrix = torch.nn.Parameter(kernel.flatten(1).clone())
    both = tasks.SOAP([convolution, matrix], lr=0.1, frequency=2)
    for _ in range(5):
        gradient = torch.randn(6, 4, 3, 3)
        convolution.grad = gradient
        matrix.grad = gradient.flatten(1)
        both.step()
    assert not torch.equal(convolution, kernel)
    assert torch.equal(convolution.flatten(1), matrix)


def test_muon_trains_all_kernels_and_not_the_head() -> None:
    model = images.resnet(1)
    matrices = tasks.hidden_matrices(model)
    kernels = [p for p in model.parameters() if p.dim() == 4]
    assert {id(p) for p in matrices} == {id(p) for p in kernels}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Task:
    """The regression on diabetes with a judgement that takes a tenth of a second."""
    task = TASKS["unseen diabetes"]()

    def judge(model: torch.nn.Module) -> float:
        time.sleep(0.1)
        return task.judge(model)

    slow = replace(task, steps=8, every=2, judge=judge)
    monkeypatch.setitem(TASKS, "unseen diabetes", lambda: slow)
    return slow


def test_accounts_of_a_run_are_without_its_judgements(counted: Task) -> None:
    began = time.perf_counter()
    run = tasks.train(Job("unseen diabetes", "KAISA, AdamW", 0.01, 0))
    seconds = time.perf_counter() - began
    assert run.accounts.keys() >= {"statistics", "solve", "precondition", "base", "elsewhere"}
    assert all(spent >= 0 for spent in run.accounts.values())
    assert sum(run.accounts.values()) < seconds - 4 * 0.1
    assert tasks.train(Job("unseen diabetes", "AdamW", 0.01, 0)).accounts == {}


def test_a_stored_run_is_restored() -> None:
    run = Run(
        job=Job("unseen vit", "KAISA, SGD", 0.1, 3, {"damping": 0.5}),
        losses=[2.0, math.inf],
        seconds=[0.5, 1.0],
        end={"loss": 1.5, "accuracy": 0.25},
        accounts={"solve": 0.25},
        refresh_interval=4.0,
    )
    stored = json.loads(json.dumps({"name": "a row", **asdict(run)}))
    assert tasks.restore_run(stored) == run


# ---------------------------------------------------------------------------------- what is counted


def test_a_rival_is_tuned_by_the_mean_over_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is best on one seed, and breaks off on the other, is not chosen."""
    losses = {(0.1, 100): 1.0, (0.1, 101): 1.2, (0.2, 100): math.nan, (0.2, 101): 0.5}

    def done(jobs: Any, processes: int) -> list[Run]:
        return [Run(job, [losses[job.lr, job.seed]]) for job in jobs]

    monkeypatch.setattr(tasks, "run_all", done)
    best, tried = tasks.tune(
        {"SGD": [(0.2, {}), (0.1, {})]},
        lambda name, setting, seed: Job("digits MLP", name, setting[0], seed),
        (100, 101),
        1,
    )
    assert best == {"SGD": (0.1, {})}
    assert [(name, r.job.lr, r.job.seed) for name, r in tried] == [
        ("SGD", 0.2, 100),
        ("SGD", 0.2, 101),
        ("SGD", 0.1, 100),
        ("SGD", 0.1, 101),
    ]


def test_the_figures_of_a_task() -> None:
    seconds = [1.0, 2.0]
    ends = {
        "AdamW": [(3.0, 2.0), (3.0, 2.2)],
        "SOAP": [(2.0, 1.5), (2.0, 1.9)],
        "SGD": [(8.0, 4.0), (4.0, 4.0)],
        "KAISA, AdamW": [(1.9, 1.0), (2.5, 1.2)],
        "KAISA, SGD": [(5.0, 4.1), (4.0, math.nan)],
    }
    runs = {
        name: [run("unseen vit", name, list(of), seconds, seed) for seed, of in enumerate(both)]
        for name, both in ends.items()
    }
    found = tuned_rivals.figures(runs, ["AdamW", "SOAP", "SGD"])
    kaisa_runs = found["KAISA, AdamW"]
    assert kaisa_runs["loss"] == pytest.approx(1.1)
    assert kaisa_runs["worst"] == 1.2
    assert kaisa_runs["worst over base"] == pytest.approx(1.2 / 2.2)
    assert (kaisa_runs["steps"], kaisa_runs["seconds"], kaisa_runs["share of seconds"]) == (
        15,
        1.5,
        0.75,
    )
    assert kaisa_runs["best rival"] == "SOAP"  # losses 1.5 and 1.9, differences -0.5 and -0.7
    assert kaisa_runs["above best rival"] == pytest.approx((-0.6, 0.1))
    assert found["SOAP"]["above best rival"] is None
    assert found["SGD"]["steps"] == 15
    over_sgd = found["KAISA, SGD"]  # held against SGD; one broke off
    assert over_sgd["worst over base"] == over_sgd["loss"] == math.inf
    assert over_sgd["above best rival"] is None


def test_figures_judge_by_the_end_and_time_by_the_curve() -> None:
    runs = {
        "AdamW": [judged_run("AdamW", [3.0, 2.0], 0.5, 0.8)],
        "Muon": [judged_run("Muon", [3.0, 1.0], 0.7, 0.6)],
        "KAISA, AdamW": [
            replace(
                judged_run("KAISA, AdamW", [1.9, 1.5], 0.6, 0.7),
                accounts={"solve": 0.04, "base": 0.02},
                refresh_interval=8.0,
            )
        ],
        "KAISA, Muon": [judged_run("KAISA, Muon", [1.5, 0.9], 0.35, 0.9)],
    }
    found = tuned_rivals.figures(runs, ["AdamW", "Muon"])
    row = found["KAISA, AdamW"]
    assert (row["loss"], row["worst over base"], row["accuracy"]) == (0.6, 1.2, 0.7)
    assert row["best rival"] == "AdamW"
    assert (row["steps"], row["seconds"], row["share of seconds"]) == (10, 1.0, 0.5)
    assert row["milliseconds"] == pytest.approx({"solve": 2.0, "base": 1.0})  # per step of 20
    assert row["refresh interval"] == 8
    over_muon = found["KAISA, Muon"]  # its base is Muon
    assert (over_muon["worst over base"], over_muon["steps"]) == (0.5, 20)


def test_the_tables_of_the_page_have_a_row_for_each_optimizer() -> None:
    runs = {
        "AdamW": [judged_run("AdamW", [3.0, 2.0], 0.5, 0.8)],
        "SGD": [judged_run("SGD", [3.0, 2.5], 0.7, 0.6)],
        "KAISA, SGD": [judged_run("KAISA, SGD", [1.9, 1.5], 0.4, 0.9)],
    }
    record = {
        "figures": tuned_rivals.figures(runs, ["AdamW", "SGD"]),
        "runs": [{"name": name, **asdict(each)} for name, of in runs.items() for each in of],
    }
    tables = tuned_rivals.markdown({"fashion vit": record, "unseen vit": record}).split("\n\n")
    losses, fashion_losses, seconds, fashion_seconds = tables
    assert losses.splitlines() == [
        "| loss | vit | vit, accuracy |",
        "|---|---|---|",
        "| AdamW | 0.500 (0.500) | 80.00% |",
        "| SGD | 0.700 (0.700) | 60.00% |",
        "| KAISA over SGD | **0.400 (0.400)** | **90.00%** |",
    ]
    assert seconds.splitlines()[2:] == [
        "| AdamW | 1.00 × (2 s) |",
        "| SGD | never (2 s) |",
        "| KAISA over SGD | **0.50 × (2 s)** |",
    ]
    assert fashion_losses.splitlines()[0] == "| loss | fashion vit | fashion vit, accuracy |"
    assert fashion_losses.splitlines()[1:] == losses.splitlines()[1:]
    assert fashion_seconds.splitlines()[1:] == seconds.splitlines()[1:]


def test_runs_above_their_base_are_counted_by_seed() -> None:
    base_runs = [
        run("digits MLP", "SGD", [9.0, *[loss] * 5], [], s) for s, loss in enumerate((1, 2))
    ]
    kaisa_runs = [run("digits MLP", "KAISA, SGD", [0.1, *[1.5] * 5], [], s) for s in range(2)]
    assert sensitivity.compare(kaisa_runs, base_runs) == {"above": 1, "of": 2, "worst ratio": 1.5}
    assert sensitivity.compare(base_runs, base_runs)["above"] == 0
    kaisa_runs[1].losses[-1] = math.nan
    assert sensitivity.compare(kaisa_runs, base_runs)["worst ratio"] == math.inf


# ---------------------------------------------------------------------------------------- as called


def test_a_job_gives_the_same_losses_in_a_pool() -> None:
    job = Job("unseen head", "KAISA, SGD", 0.03, 0)
    (found,) = tasks.run_all([job], processes=1)
    assert found.losses == tasks.train(job).losses


def test_a_rerun_of_one_task_keeps_the_other_results(
    shortened: None, trained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.json"
    for task in ("unseen head", "unseen diabetes"):
        arguments = ["--tasks", task, "--seeds", "2", "--processes", "1", "--json", str(path)]
        tuned_rivals.main(arguments)
        assert task in capsys.readouterr().out
    record = json.loads(path.read_text())["tasks"]
    assert list(record) == ["unseen head", "unseen diabetes"]
    for task, found in record.items():
        names = ["AdamW", "Muon", "SOAP", "SGD"]
        kaisa = [f"KAISA, {base}{rate}" for base in ("AdamW", "SGD") for rate in ("", TWICE)]
        kaisa.append(f"KAISA, SGD{THIRD}")
        assert list(found["settings"]) == list(found["figures"]) == [*names, *kaisa]
        rates = {name: lr for name, (lr, _) in found["settings"].items()}
        assert rates["KAISA, SGD"] == rates["SGD"] in tuned_rivals.GRIDS[task]["SGD"]
        assert rates[f"KAISA, AdamW{TWICE}"] == 2 * rates["AdamW"]
        assert len(found["tuning"]) == 4 * 2 * 2
        assert {r["job"]["seed"] for r in found["tuning"]} == {100, 101}
        assert [r["job"]["seed"] for r in found["runs"] if r["name"] == "SOAP"] == [0, 1]
        assert not any(r["job"]["options"] for r in found["runs"])


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the optimizers that are trained, in this process."""
    names: list[str] = []

    def all_of(jobs: Any, processes: int) -> list[Run]:
        jobs = list(jobs)
        names.extend(job.optimizer for job in jobs)
        return [tasks.train(job) for job in jobs]

    for module in (tasks, tuned_rivals, sensitivity):
        monkeypatch.setattr(module, "run_all", all_of)
    return names


def test_tasks_keeps_rivals_that_are_valid(
    shortened: None, trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tasks.json"
    arguments = ["--tasks", "unseen diabetes", "--json", str(path), "--keep-rivals", "--seeds"]
    tuned_rivals.main([*arguments, "1"])
    first = json.loads(path.read_text())["tasks"]["unseen diabetes"]
    assert "SOAP" in trained

    trained.clear()
    tuned_rivals.main([*arguments, "1"])
    second = json.loads(path.read_text())["tasks"]["unseen diabetes"]
    assert set(trained) == {"KAISA, AdamW", "KAISA, SGD"}
    assert second["tuning"] == first["tuning"]
    assert second["settings"] == first["settings"]
    rivals = [[r for r in of["runs"] if r["name"] == "SOAP"] for of in (first, second)]
    assert rivals[0] == rivals[1]
    assert second["figures"]["SOAP"] == first["figures"]["SOAP"]

    record = json.loads(path.read_text())
    record["tasks"]["unseen diabetes"]["basis"]["cpu"] = "another"
    path.write_text(json.dumps(record))
    trained.clear()
    tuned_rivals.main([*arguments, "1"])  # the rates hold on every processor, seconds do not
    assert trained.count("SOAP") == 1
    assert json.loads(path.read_text())["tasks"]["unseen diabetes"]["tuning"] == first["tuning"]

    tuned_rivals.main([*arguments, "2"])  # of which one has not been trained
    assert "SOAP" in trained
    trained.clear()
    longer = replace(TASKS["unseen diabetes"](), steps=20)
    monkeypatch.setitem(TASKS, "unseen diabetes", lambda: longer)
    tuned_rivals.main([*arguments, "2"])
    assert "SOAP" in trained


def test_tasks_without_data_are_left_out(
    shortened: None,
    trained: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing() -> Task:
        raise images.MissingDataError("install the package")

    monkeypatch.setitem(TASKS, "fashion vit", missing)
    monkeypatch.setattr(tuned_rivals, "STORED", ["fashion vit", "unseen head"])
    few = ["--seeds", "1", "--processes", "1"]
    tuned_rivals.main(few)
    output = capsys.readouterr().out
    assert "install the package" in output
    assert "unseen head" in output
    with pytest.raises(SystemExit) as ended:
        tuned_rivals.main(["--tasks", "fashion vit", "unseen head", *few])
    assert ended.value.code == 1
    assert "unseen head: losses" in capsys.readouterr().out


def test_sensitivity_keeps_bases_that_are_valid(
    shortened: None, trained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sensitivity.json"
    arguments = ["--tasks", "digits MLP", "--json", str(path), "--keep-rivals", "--seeds"]
    sensitivity.main([*arguments, "2"])
    assert len(trained) == 2 * (2 * 5 + 2 + 4 * 2)  # warm-ups; tuning, the base, KAISA
    (name, first), *others = json.loads(path.read_text())["tasks"].items()
    assert (name, others) == ("digits MLP, SGD", [])
    assert (first["task"], first["base"]) == ("digits MLP", "SGD")
    assert [row["of"] for row in first["rows"]] == [2] * 8
    above = sum(row["above"] for row in first["rows"] if row["rate"] <= 2)
    assert f"{above} of 12 end above it" in capsys.readouterr().out

    trained.clear()
    sensitivity.main([*arguments, "2"])
    second = json.loads(path.read_text())["tasks"][name]
    assert set(trained) == {"KAISA, SGD"}
    for key in ("rates", "rows", "tuning"):
        assert second[key] == first[key]
    losses = [[run["losses"] for run in of["runs"]] for of in (first, second)]
    assert losses[0] == losses[1]

    sensitivity.main([*arguments, "3"])
    assert "SGD" in trained


def test_sensitivity_trains_a_task_over_each_of_its_bases() -> None:
    by_task: dict[str, list[str]] = {}
    for name, cell in sensitivity.CELLS.items():
        assert name == f"{cell.task}, {cell.base}"
        by_task.setdefault(cell.task, []).append(cell.base)
    assert by_task["fashion resnet, short"] == ["SGD", "AdamW"]
    assert by_task["digits MLP"] == ["SGD"]
    assert by_task["unseen friedman"] == ["AdamW", "SGD"]


def test_larger_trains_both_in_the_same_steps_at_adamws_best_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "larger.json"
    for name in (larger.FULL, larger.SHORT, larger.TIMED):
        monkeypatch.setitem(TASKS, name, TASKS["digits MLP"])  # so that it is removed afterwards
    monkeypatch.setattr(larger, "step_seconds", lambda size, threads, device: 0.1)
    tiny = ["--layers", "1", "--width", "64", "--context", "8", "--batch", "2"]
    larger.main(["--minutes", "0.05", "--processes", "1", "--json", str(path), *tiny])
    assert "30 steps" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert (record["size"]["steps"], record["size"]["warmup"]) == (30, 3)
    assert [run["job"]["lr"] for run in record["tuning"]] == list(larger.GRIDS["AdamW"])
    assert {len(run["losses"]) for run in record["tuning"]} == {6}  # a fifth of the steps
    best = min(record["tuning"], key=lambda run: float(run["losses"][-1]))["job"]["lr"]
    adamw, kaisa = record["runs"]
    assert (adamw["job"]["optimizer"], kaisa["job"]["optimizer"]) == ("AdamW", "KAISA, AdamW")
    assert adamw["job"]["lr"] == kaisa["job"]["lr"] == best
    assert not kaisa["job"]["options"]
    assert len(adamw["losses"]) == len(kaisa["losses"]) == 30
    assert {adamw["job"]["seed"], kaisa["job"]["seed"]} == {0}
    assert {run["job"]["seed"] for run in record["tuning"]} == {100}


def test_larger_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, larger.TIMED, TASKS["digits MLP"])
    began = time.perf_counter()
    found = larger.step_seconds(larger.Size(1, 64, 1, 8, 2, 6, 1), 1, "cpu")
    assert 0 < found < (time.perf_counter() - began) / 3


def test_larger_judges_the_last_step() -> None:
    size = larger.Size(1, 64, 1, 8, 2, 1, 1)
    for steps in (10, 59, 121, 243, 2_519):
        task = larger.make_task(larger.with_steps(size, steps))
        assert task.steps % task.every == 0
        assert steps - task.every < task.steps <= steps
