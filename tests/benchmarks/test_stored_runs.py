"""The figures of K-FAC's pages are those of the runs in ``benchmarks/results``.

Each test computes a table anew from the raw runs, without the code that printed it, and finds its
rows in the page.
"""

from __future__ import annotations

import math
import re
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from stored_runs import (
    RESULTS,
    ROOT,
    Runs,
    by_optimizer,
    median,
    numbers,
    rows,
    steps_of,
    stored,
    text_of,
)

import tuned_rivals

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()
DEFAULTS = "docs/evidence/benchmarks.md"

# ---------------------------------------------------------------------------- lists and commands


def test_every_stored_run_is_named_with_its_command() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    table = re.findall(r"^\| (`\w+\.json`.*?) \| .* \| (.*) \|$", text, re.MULTILINE)
    named = {f: how for files, how in table for f in re.findall(r"\w+\.json", files)}
    assert named.keys() == {path.name for path in RESULTS.glob("*.json")}
    for file, how in named.items():
        assert how.startswith("`make"), f"{file}: a run without a command goes"
        assert f"benchmarks/results/{file}" in MAKEFILE + how, file
    pages = "".join(page.read_text() for page in PAGES)
    assert {n for n in re.findall(r"\w+\.json", pages) if n in named} <= named.keys()


def test_every_benchmark_is_in_the_list_with_its_command() -> None:
    folder = ROOT / "benchmarks"
    parts = re.split(r"^## (\w+): ", (folder / "README.md").read_text(), flags=re.MULTILINE)
    shared = re.findall(r"^\| `(\w+\.py)` \| [^|]* \|$", parts[0], re.MULTILINE)
    listed = [folder / file for file in shared]
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        for file, command in re.findall(r"^\| `(\w+\.py)` \| .* \| (.*)\|$", part, re.MULTILINE):
            listed.append(folder / name / file)
            for target in re.findall(r"^`make ([\w-]+)`", command):
                (recipe,) = re.findall(rf"^{target}: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
                script = f"/{name}/{file}"
                assert f"$(BENCH){script}" in recipe or f"benchmarks{script}" in recipe, target
    assert sorted(listed) == sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= targets


# ------------------------------------------------------------------------------- steps to a target

MODEL = {"MLP": "mlp", "conv": "conv", "conv net": "conv", "autoencoder": "autoencoder"}


def task(label: str) -> tuple[str, str]:
    """'MLP: training loss 0.05' -> ('mlp', 'loss 0.05')."""
    name, _, target = label.partition(": ")
    target = target.removeprefix("training ")
    return MODEL[name.removeprefix("deep ")], target + " test accuracy" * target.endswith("%")


def fewest(runs: Runs, target: str) -> tuple[float, float]:
    """Median steps, and seconds, of the setting with the fewest."""
    settings: dict[str, Runs] = {}
    for run in runs:
        settings.setdefault(run["setting"], []).append(run)
    return min(
        tuple(median(run[key].get(target) for run in of) for key in ("steps_to", "seconds_to"))
        for of in settings.values()
    )


def assert_steps(runs: dict[str, Runs], table: dict[str, list[str]], names: list[str]) -> None:
    for label, cells in table.items():
        model, target = task(label)
        for cell, name in zip(cells, names, strict=True):
            steps, seconds = fewest(by_optimizer(runs[model], name), target)
            assert steps_of(cell) == steps, (label, name)
            told = re.search(r"\(([\d.]+)", cell)
            assert told is None or float(told[1]) == pytest.approx(seconds, abs=0.051)


def test_steps_of_kaisa() -> None:
    runs = stored("progress")["runs"]
    table = rows(DEFAULTS, "steps to", "SGD", "KAISA, default settings, `lr=0.1`")
    assert_steps(runs, table, ["SGD", "KAISA, defaults", "KAISA"])
    names = ["SGD", "Adam", "KAISA over Adam, defaults", "KAISA over Adam"]
    table = rows(DEFAULTS, "steps (seconds) to", "SGD", "Adam")
    assert_steps(runs, table, names)
    sgd, _, ours, _ = table["autoencoder: training loss 15.8"]
    said = f"in {ours.split()[0]} steps and {numbers(ours)[1]} s, SGD in {sgd.split()[0]} and"
    assert said in text_of("README.md")


# ------------------------------------------------------------------------------- systems and speed


def test_what_a_step_of_kaisa_costs() -> None:
    page = (ROOT / "docs" / "evidence/cost.md").read_text()
    for row in stored("speed")["rows"]:
        if row["variant"] in ("eigen", "inverse"):
            (line,) = re.findall(
                rf"^\| {row['workload']} \| {row['variant']} \|(.*)\|$", page, re.M
            )
            told = [numbers(cell)[0] for cell in line.split("|")]
            expected = [row["every_step"], row["every_10_and_100"], row["memory"]["ratio"]]
            assert [*told[:2], told[3]] == pytest.approx(expected, abs=0.0051)


def test_what_the_picture_of_the_demo_shows() -> None:
    """KAISA is as good as its base's last loss sooner, in steps and in seconds, and better then."""
    runs = {(run["task"], run["optimizer"]): run for run in stored("demo")["runs"]}
    for name, base in (("language model", "AdamW"), ("deep autoencoder", "Adam")):
        plain, ours = runs[name, base], runs[name, f"KAISA, {base}"]
        met = next(i for i, loss in enumerate(ours["losses"]) if loss <= plain["losses"][-1])
        assert ours["steps"][met] < plain["steps"][-1]
        assert ours["seconds"][met] < plain["seconds"][-1]
        assert ours["losses"][-1] < plain["losses"][-1]
    muon, ours = runs["language model", "Muon"], runs["language model", "KAISA, AdamW"]
    goal = runs["language model", "AdamW"]["losses"][-1]
    sooner = [
        next(s for s, loss in zip(run["seconds"], run["losses"], strict=True) if loss <= goal)
        for run in (muon, ours)
    ]
    assert "In seconds, Muon reaches AdamW's loss a little sooner; it ends" in text_of("README.md")
    assert sooner[0] < sooner[1]
    assert muon["losses"][-1] > ours["losses"][-1], "it ends higher"


# ------------------------------------------------------------------------------------- the options


def test_rates_and_dampings_by_width() -> None:
    losses: dict[tuple[str, str], dict[tuple[float, float], float]] = {}
    for run in stored("widths")["runs"]:
        job = run["job"]
        of = losses.setdefault((job["task"].split()[-1], job["optimizer"].split(",")[0]), {})
        of[job["lr"], job["options"].get("damping", 0.1)] = run["losses"][-1]
    best: dict[str, list[float]] = {"AdamW": [], "KAISA": []}
    for (width, name), of in losses.items():
        rates = {lr: loss for (lr, damping), loss in of.items() if damping == 0.1}
        best[name].append(min(rates, key=lambda lr: rates[lr]))
        if name == "KAISA":
            alone = losses[width, "AdamW"]
            assert all(loss < alone[lr, 0.1] for lr, loss in rates.items())
            tried = [loss for (lr, _), loss in of.items() if lr == best[name][-1]]
            assert rates[best[name][-1]] < min(tried) + 0.02
    (high, low), (ours, least) = ((max(found), min(found)) for found in best.values())
    said = f"from {high} to {low} for AdamW, from {ours} to {least} for KAISA over it"
    assert said in text_of(DEFAULTS)


def test_first_learning_rates_on_the_tuning_page() -> None:
    rates: dict[str, dict[str, float]] = {}  # by optimizer and task
    for run in stored("defaults")["reported"]:
        job = run["job"]
        rates.setdefault(job["optimizer"], {})[job["task"]] = job["lr"]
    page = text_of("docs/how-to/tune.md")
    sgd, adamw = (statistics.median(rates[name].values()) for name in ("SGD", "AdamW"))
    assert f"SGD's own; if you have none, {sgd} with momentum 0.9" in page
    assert f"AdamW's own; if you have none, {adamw} |" in page


def test_the_defaults_beside_their_base() -> None:
    targets = {"language": 1.7, "autoencoder": 15.8, "tabular": 0.15}
    for label, cells in rows(DEFAULTS, "task, base, its best rate", "base alone").items():
        name, base, rate = label.split(", ")
        of = [run for run in stored("defaults")["reported"] if run["job"]["task"] == name]
        plain = [run for run in of if not run["job"]["options"]]
        every = 10 if name == "language" else 5
        for cell, optimizer, factor in (
            (cells[0], base, 1),
            (cells[1], f"KAISA, {base}", 1),
        ):
            jobs = [(run["job"]["optimizer"], run["job"]["lr"]) for run in plain]
            lr = float(rate) * factor
            chosen = [
                run
                for run, (n, x) in zip(plain, jobs, strict=True)
                if n == optimizer and math.isclose(x, lr)
            ]
            met = [
                next(
                    (i for i, x in enumerate(r["losses"], 1) if x <= targets.get(name, 0.01)), None
                )
                for r in chosen
            ]
            assert steps_of(cell) == every * median(met), (label, optimizer, factor)


# ------------------------------------------------------------------------- language and other tasks


def share_of(runs: Runs, theirs: Runs, key: str) -> float:
    """Median over the seeds of what the others' last loss takes, over what they took."""
    shares = []
    for run, other in zip(runs, theirs, strict=True):
        goal = other["losses"][-1]
        place = next((i for i, loss in enumerate(run["losses"]) if loss <= goal), None)
        if place is None:
            shares.append(math.inf)
        elif key == "steps":
            shares.append((place + 1) / len(other["losses"]))
        else:
            shares.append(run["seconds"][place] / other["seconds"][-1])
    return statistics.median(shares)


def language_runs(name: str) -> dict[str, Runs]:
    found: dict[str, Runs] = {}
    for run in stored(name)["runs"]:
        found.setdefault(run["name"], []).append(run)
    return found


README_ROWS = {
    "AdamW, lr 0.003": "AdamW",
    "Muon with AdamW, lr 0.014": "Muon",
    "SOAP, lr 0.014": "SOAP",
    "KAISA over AdamW, default settings, lr 0.003": "KAISA, defaults",
    "KAISA over AdamW, default settings, lr 0.006": "KAISA, twice AdamW's rate",
}


OLDER = {"KAISA", "KAISA, its default scale"}  # tuned, before step lengths and drift


@pytest.mark.parametrize(
    ("page", "header"),
    [
        ("README.md", ("optimizer", "held-out loss")),
        ("docs/how-to/migrate.md", ("optimizer", "setting", "held-out loss")),
    ],
)
def test_the_language_model(page: str, header: tuple[str, ...]) -> None:
    runs, table = language_runs("language"), rows(page, *header)
    assert set(table) == set(README_ROWS if page == "README.md" else runs.keys() - OLDER)
    for label, cells in table.items():
        of = runs[README_ROWS.get(label, label)]
        loss, *shares = cells[len(header) - 2 :][:3]
        mean = statistics.mean(run["losses"][-1] for run in of)
        assert float(loss) == pytest.approx(mean, abs=0.00051)
        for cell, key in zip(shares, ("steps", "seconds"), strict=True):
            share = share_of(of, runs["AdamW"], key)
            told = math.inf if cell == "never" else float(cell.removesuffix(" ×"))
            assert told == share or told == pytest.approx(share, abs=0.0051), (label, key)
        if "setting" in header:
            assert cells[-1] == f"{statistics.median(run['seconds'][-1] for run in of):.0f}"


def test_what_the_language_model_gains_over_muon_and_soap() -> None:
    runs, page = language_runs("language"), text_of("docs/how-to/migrate.md")
    for ours in "KAISA, twice AdamW's rate", "KAISA, defaults":
        said = []
        for theirs in "Muon", "SOAP":
            pairs = zip(runs[ours], runs[theirs], strict=True)
            gains = [b["losses"][-1] - a["losses"][-1] for a, b in pairs]
            error = statistics.stdev(gains) / math.sqrt(len(gains))
            assert statistics.mean(gains) > 2 * error
            said.append(f"{statistics.mean(gains):.3f} ± {error:.3f}")
        assert " and ".join(said) in page, (ours, said)
    assert " and ".join(said) in text_of("README.md"), "with nothing set"


TASK_COLUMNS = [
    *("AdamW", "Muon", "SOAP", "SGD"),
    *(f"KAISA, {base}{more}" for base in ("AdamW", "SGD") for more in ("", ", twice the rate")),
    *("KAISA, SGD, a third of the rate", "KAISA, Muon"),
]


def other_tasks() -> dict[str, Any]:
    """The stored tasks by their names on the pages."""
    return {name.removeprefix("unseen "): of for name, of in stored("tasks")["tasks"].items()}


def test_other_tasks() -> None:
    record, table = other_tasks(), rows(DEFAULTS, "task", "AdamW", "Muon", "SOAP", "SGD")
    assert table.keys() == record.keys()
    for name, cells in table.items():
        losses: dict[str, list[float]] = {}
        for run in record[name]["runs"]:
            loss = run.get("end", {}).get("loss", run["losses"][-1])
            losses.setdefault(run["name"], []).append(loss)
        for column, cell in zip(TASK_COLUMNS, cells, strict=True):
            of = losses.get(column)
            assert cell == (f"{statistics.mean(of):.3g} / {max(of):.3g}" if of else "")


def test_seconds_of_the_held_out_tasks() -> None:
    record = other_tasks()
    table = rows(DEFAULTS, "seconds, task", "AdamW", "Muon", "SOAP", "SGD")
    assert table.keys() == record.keys()
    slower = 0
    for name, cells in table.items():
        runs: dict[str, Runs] = {}
        for run in record[name]["runs"]:
            runs.setdefault(run["name"], []).append(run)
        slower += share_of(runs["KAISA, AdamW"], runs["AdamW"], "seconds") > 1
        for column, cell in zip(TASK_COLUMNS, cells, strict=True):
            if column not in runs:
                assert cell == ""
                continue
            base = "SGD" if "SGD" in column else "AdamW"
            base = "Muon" if column == "KAISA, Muon" else base
            share = share_of(runs[column], runs[base], "seconds")
            assert cell == ("never" if share == math.inf else f"{share:.2f} ×"), (name, column)
    said = f"On {slower} of the {len(table)} tasks KAISA over AdamW needs more seconds"
    assert said in text_of(DEFAULTS)
    assert f"on {slower} of {len(table)} held-out tasks it needs more seconds" in text_of(
        "README.md"
    )


def test_accuracies_of_the_held_out_tasks() -> None:
    accuracies: dict[str, dict[str, list[float]]] = {}
    for name, of in other_tasks().items():
        for run in of["runs"]:
            if "accuracy" in run.get("end", {}):
                by_name = accuracies.setdefault(name, {})
                by_name.setdefault(run["name"], []).append(run["end"]["accuracy"])
    table = rows(DEFAULTS, "accuracy, task", "AdamW", "Muon", "SOAP", "SGD")
    assert table.keys() == accuracies.keys()
    for name, cells in table.items():
        for column, cell in zip(TASK_COLUMNS, cells, strict=True):
            found = accuracies[name].get(column)
            assert cell == (f"{statistics.mean(found):.2%}" if found else ""), (name, column)


def test_the_command_of_the_held_out_tasks_runs_those_that_are_stored() -> None:
    assert set(tuned_rivals.STORED) == stored("tasks")["tasks"].keys()


def test_no_page_says_that_a_task_chose_no_default() -> None:
    """The seeds that tune the rivals chose drift's thresholds; the language task, the defaults."""
    for page in (*PAGES, ROOT / "Makefile", ROOT / "benchmarks" / "README.md"):
        assert "chose no default" not in page.read_text(), page.name
    assert "one of the six on which we [chose" in text_of("README.md")


def test_how_often_kaisa_ends_above_its_base() -> None:
    above: dict[float, list[bool]] = {}
    worst = 0.0
    for found in stored("sensitivity")["tasks"].values():
        base, levels = found["base"], {}
        for run in found["runs"]:
            key = tuple(run["job"][each] for each in ("warmup", "optimizer", "lr", "seed"))
            levels[key] = statistics.mean(run["losses"][-5:])
        for warmup, lr in found["rates"].items():
            rises = max(w for w, *_ in levels) if warmup != "none" else 0
            for share in (0.5, 1.0, 2.0, 4.0):
                for seed in sorted({seed for *_, seed in levels}):
                    ours = levels[rises, f"KAISA, {base}", share * lr, seed]
                    ratio = ours / levels[rises, base, lr, seed]
                    above.setdefault(share, []).append(not ratio <= 1)
                    worst = max(worst, ratio)
    usual = [each for share, of in above.items() if share <= 2 for each in of]
    page, four = text_of(DEFAULTS), above[4.0]
    said = (
        f"{sum(usual)} of {len(usual)} end above the base, at four times {sum(four)} of {len(four)}"
    )
    assert said in page
    assert f"one ends {worst:,.0f} times above the base's loss" in page


def test_steps_on_a_gpu() -> None:
    models = {"transformer": "transformer-768", "GPT": "gpt-12", "ResNet-50": "resnet50"}
    steps = stored("gpu")["steps"]
    table = rows("docs/evidence/cost.md", "model, optimizer", "plain step", "statistics", "refresh")
    assert len(table) == 18
    for label, shown in table.items():
        model, optimizer = label.split(", ")
        found = steps[models[model]][optimizer]
        statistics = f"{found['statistics']:.0f}" if " " in optimizer else ""
        refresh = f"{found['full']:,.0f}" if optimizer not in ("AdamW", "Muon") else ""
        peak = f"{found['peak_bytes'] / 2**30:.1f}"
        assert shown == [f"{found['plain']:.1f}", statistics, refresh, peak]


def test_the_larger_model_on_a_gpu() -> None:
    record = stored("larger")
    adamw, kaisa = record["runs"]
    goal = adamw["losses"][-1]
    first = next(i for i, loss in enumerate(kaisa["losses"]) if loss <= goal)
    share = (first + 1) * record["every"] / record["size"]["steps"]
    seconds = kaisa["seconds"][first] / adamw["seconds"][-1]
    page = text_of("docs/evidence/cost.md")
    assert f"ends at a held-out loss of {goal:.2f}" in page
    assert f"with default settings, at {kaisa['losses'][-1]:.2f}" in page
    assert f"after {share:.2f} of the steps, but after {seconds:.1f} times the seconds" in page
    early = kaisa["seconds"][32 // record["every"] - 1] / 32
    assert f"the first 32 steps of KAISA take {1000 * early:.0f} ms each" in page
