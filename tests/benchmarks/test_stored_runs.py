"""The figures of K-FAC's pages are those of the runs in ``benchmarks/results``.

Each test recomputes a table from the raw runs, without the code that printed it, and finds its
rows in the page.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from typing import TYPE_CHECKING

import pytest
from stored_runs import (
    RESULTS,
    ROOT,
    Runs,
    by_name,
    median,
    ratios_to_the_base,
    rows,
    share_of,
    shares_of_the_larger_model,
    steps_of,
    stored,
    text_of,
)

import tuned_rivals
from floor import floor_ratios
from workloads import WORKLOADS

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


def test_steps_of_kaisa() -> None:
    runs = stored("progress")["runs"]
    names = ["SGD", "Adam", "KAISA, defaults", "KAISA over Adam, defaults"]
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for label, cells in rows(DEFAULTS, "steps (seconds) to", "SGD", "Adam").items():
        model, target = task(label)
        for cell, name in zip(cells, names, strict=True):
            of = [run for run in runs[model] if run["optimizer"] == name]
            if not of:
                assert cell == ""
                continue
            steps, seconds = fewest(of, target)
            assert steps_of(cell) == steps, (label, name)
            if steps < math.inf:
                assert cell.endswith(f"({seconds:.2f} s)"), (label, name)
            found[label, name] = steps, seconds
    last = "autoencoder: training loss 15.8"
    (steps, seconds) = found[last, names[-1]]
    (sgd, _) = found[last, "SGD"]
    sentence = f"in {steps:.0f} steps and {seconds:.1f} s, SGD in {sgd:,.0f} and"
    assert sentence in text_of("README.md")


# ------------------------------------------------------------------------------- systems and speed


def test_the_cost_of_a_step_of_kaisa() -> None:
    record = stored("speed")
    of = {(row["workload"], row["variant"]): row for row in record["rows"]}
    table = rows(DEFAULTS, "network, batch size", "SGD's step, ms")
    assert len(table) == 4
    for label, cells in table.items():
        name, batch = label.split(", ")
        assert int(batch) == WORKLOADS[name].inputs[0]
        row = of[name, "inverse"]
        sgd = row["milliseconds"]["sgd"]
        floors = floor_ratios(record["floors"][name], "inverse", sgd)
        state = (row["factor_bytes"] + row["inverse_bytes"]) / 1e6
        assert cells == [
            f"{sgd:.3g}",
            f"{row['every_step']:.2f} × ({floors[0]:.2f})",
            f"{row['every_10_and_100']:.2f} × ({floors[1]:.2f})",
            f"{of[name, 'eigen']['every_10_and_100']:.2f} ×",
            f"{state:.1f}",
            f"{row['memory']['ratio']:.2f} ×",
        ]


def test_the_demo_reaches_the_loss_of_its_base_sooner() -> None:
    """KAISA reaches its base's last loss in fewer steps and seconds, and ends lower."""
    runs = {(run["task"], run["optimizer"]): run for run in stored("demo")["runs"]}
    for name, base in (("language model", "AdamW"), ("deep autoencoder", "Adam")):
        plain = runs[name, base]
        kaisa_runs = runs[name, f"KAISA, {base}"]
        met = next(i for i, loss in enumerate(kaisa_runs["losses"]) if loss <= plain["losses"][-1])
        assert kaisa_runs["steps"][met] < plain["steps"][-1]
        assert kaisa_runs["seconds"][met] < plain["seconds"][-1]
        assert kaisa_runs["losses"][-1] < plain["losses"][-1]
    muon = runs["language model", "Muon"]
    kaisa_runs = runs["language model", "KAISA, AdamW"]
    goal = runs["language model", "AdamW"]["losses"][-1]
    sooner = [
        next(s for s, loss in zip(run["seconds"], run["losses"], strict=True) if loss <= goal)
        for run in (muon, kaisa_runs)
    ]
    sentence = "In seconds, Muon reaches AdamW's loss a little sooner; it ends higher."
    assert sentence in text_of("docs/index.md")
    assert sooner[0] < sooner[1]
    assert muon["losses"][-1] > kaisa_runs["losses"][-1], "it ends higher"


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
    (high, low), (kaisa_runs, least) = ((max(found), min(found)) for found in best.values())
    sentence = f"from {high} to {low} for AdamW, from {kaisa_runs} to {least} for KAISA over it"
    assert sentence in text_of(DEFAULTS)


def test_first_learning_rates_on_the_tuning_page() -> None:
    rates: dict[str, dict[str, float]] = {}  # by optimizer and task
    for run in stored("defaults")["reported"]:
        job = run["job"]
        rates.setdefault(job["optimizer"], {})[job["task"]] = job["lr"]
    page = text_of("docs/how-to/tune.md")
    sgd, adamw = (statistics.median(rates[name].values()) for name in ("SGD", "AdamW"))
    assert f"SGD's own; if you have none, {sgd} with momentum 0.9" in page
    assert f"AdamW's own; if you have none, {adamw} |" in page


def test_the_tasks_that_chose_defaults_are_named() -> None:
    table = rows(DEFAULTS, "choice", "tasks")
    tuned = {run["job"]["task"] for run in stored("defaults")["tried"]}
    ((first,),) = [cells for label, cells in table.items() if label.startswith("damping 0.1")]
    assert set(first.split(", ")) == tuned
    ((second,),) = [cells for label, cells in table.items() if label.startswith("constants")]
    assert "and all [other tasks](#other-tasks)" in second


# ------------------------------------------------------------------------- language and other tasks


README_ROWS = {
    "AdamW, lr 0.003": "AdamW",
    "Muon with AdamW, lr 0.014": "Muon",
    "SOAP, lr 0.014": "SOAP",
    "SGD, lr 0.1": "SGD",
    "KAISA over AdamW, default settings, lr 0.003": "KAISA, defaults",
    "KAISA over AdamW, default settings, lr 0.006": "KAISA, twice AdamW's rate",
}


OLDER = {"KAISA", "KAISA, its default scale"}  # tuned, before step lengths and drift


@pytest.mark.parametrize("page", ["README.md", DEFAULTS])
def test_the_language_model(page: str) -> None:
    runs = by_name(stored("language")["runs"])
    assert set(README_ROWS.values()) == runs.keys() - OLDER
    table = rows(page, "optimizer", "held-out loss")
    assert set(table) == README_ROWS.keys() - ({"SGD, lr 0.1"} if page == "README.md" else set())
    for label, cells in table.items():
        of = runs[README_ROWS[label]]
        loss, *shares = cells[:3]
        mean = statistics.mean(run["losses"][-1] for run in of)
        assert float(loss) == pytest.approx(mean, abs=0.00051)
        for cell, key in zip(shares, ("steps", "seconds"), strict=True):
            share = share_of(of, runs["AdamW"], key)
            printed = math.inf if cell == "never" else float(cell.removesuffix(" ×"))
            assert printed == share or printed == pytest.approx(share, abs=0.0051), (label, key)
        assert float(label.rpartition("lr ")[2]) == of[0]["job"]["lr"]
        if page == DEFAULTS:
            assert cells[-1] == f"{statistics.median(run['seconds'][-1] for run in of):.1f}"


def test_gains_over_muon_and_soap_on_the_language_model() -> None:
    runs = by_name(stored("language")["runs"])
    page = text_of("docs/how-to/migrate.md")
    for kaisa_runs in "KAISA, twice AdamW's rate", "KAISA, defaults":
        sentence = []
        for rival in "Muon", "SOAP":
            pairs = zip(runs[kaisa_runs], runs[rival], strict=True)
            gains = [b["losses"][-1] - a["losses"][-1] for a, b in pairs]
            error = statistics.stdev(gains) / math.sqrt(len(gains))
            assert statistics.mean(gains) > 2 * error
            sentence.append(f"{statistics.mean(gains):.3f} ± {error:.3f}")
        assert " and ".join(sentence) in page, (kaisa_runs, sentence)
    assert " and ".join(sentence) in text_of("README.md"), "with nothing set"


TASK_ROWS = {
    **{name: name for name in ("AdamW", "Muon", "SOAP", "SGD")},
    "KAISA over AdamW": "KAISA, AdamW",
    "at twice the rate": "KAISA, AdamW, twice the rate",
    "KAISA over SGD": "KAISA, SGD",
    "at twice that rate": "KAISA, SGD, twice the rate",
    "at a third of that rate": "KAISA, SGD, a third of the rate",
    "KAISA over Muon": "KAISA, Muon",
}
KAISA_ROWS = [name for name in TASK_ROWS.values() if "KAISA" in name]


def other_tasks() -> dict[str, dict[str, Runs]]:
    """The stored runs by the task's name on the page, and by the optimizer's name."""
    tasks = stored("tasks")["tasks"]
    return {name.removeprefix("unseen "): by_name(of["runs"]) for name, of in tasks.items()}


def last_losses(runs: Runs) -> list[float]:
    return [run.get("end", {}).get("loss", run["losses"][-1]) for run in runs]


def assert_bold(cells: list[str], values: list[float]) -> None:
    """Exactly the least values are in bold."""
    assert [cell.startswith("**") for cell in cells] == [x == min(values) for x in values]


def tasks_of_a_table(on_images: bool) -> dict[str, dict[str, Runs]]:
    """The stored runs of the tasks in one of the page's two tables, as :func:`other_tasks`."""
    tasks = other_tasks()
    return {name: of for name, of in tasks.items() if name.startswith("fashion") == on_images}


def rows_of_tasks(record: dict[str, dict[str, Runs]]) -> dict[str, str]:
    """The rows of the optimizers that have run."""
    names = {name for runs in record.values() for name in runs}
    return {label: name for label, name in TASK_ROWS.items() if name in names}


@pytest.mark.parametrize("on_images", [False, True])
def test_losses_of_the_other_tasks(on_images: bool) -> None:
    record = tasks_of_a_table(on_images)
    optimizers = rows_of_tasks(record)
    header = []
    for name in record:
        header.append(name)
        if name.startswith("fashion"):
            header.append(f"{name}, accuracy")
    table = rows(DEFAULTS, "loss", *header)
    assert list(table) == list(optimizers)
    columns = iter(zip(*table.values(), strict=True))
    for name, runs in record.items():
        column = next(columns)
        shown = []
        means = []
        for row_name, cell in zip(optimizers.values(), column, strict=True):
            if row_name not in runs:
                assert cell == ""
                continue
            losses = last_losses(runs[row_name])
            mean = statistics.mean(losses)
            assert cell.strip("*") == f"{mean:#.3g} ({max(losses):#.3g})", (name, row_name)
            shown.append(cell)
            means.append(mean)
        assert_bold(shown, means)
        if not name.startswith("fashion"):
            continue
        accuracies = next(columns)
        found = []
        for row_name, cell in zip(optimizers.values(), accuracies, strict=True):
            found.append(-statistics.mean(run["end"]["accuracy"] for run in runs[row_name]))
            assert cell.strip("*") == f"{-found[-1]:.2%}", row_name
        assert_bold(list(accuracies), found)
    assert next(columns, None) is None


@pytest.mark.parametrize("on_images", [False, True])
def test_seconds_of_the_other_tasks(on_images: bool) -> None:
    record = tasks_of_a_table(on_images)
    optimizers = rows_of_tasks(record)
    table = rows(DEFAULTS, "seconds", *record)
    assert list(table) == list(optimizers)
    for (name, runs), column in zip(record.items(), zip(*table.values(), strict=True), strict=True):
        shown = []
        shares = []
        for row_name, cell in zip(optimizers.values(), column, strict=True):
            if row_name not in runs:
                assert cell == ""
                continue
            share = share_of(runs[row_name], runs["AdamW"], "seconds")
            whole = statistics.median(run["seconds"][-1] for run in runs[row_name])
            reached = "never" if share == math.inf else f"{share:.2f} ×"
            assert cell.strip("*") == f"{reached} ({whole:.2g} s)", (name, row_name)
            shown.append(cell)
            shares.append(share)
        assert_bold(shown, shares)


def test_the_page_names_the_tasks_on_which_kaisa_loses() -> None:
    record = other_tasks()
    slower = 0
    later = 0
    worse = {}
    for name, runs in record.items():
        shares = {each: share_of(of, runs["AdamW"], "seconds") for each, of in runs.items()}
        slower += shares["KAISA, AdamW"] > 1
        rivals = [each for each in ("AdamW", "Muon", "SOAP") if each in runs]
        later += min(shares[each] for each in rivals) < shares["KAISA, AdamW"]
        means = {each: statistics.mean(last_losses(of)) for each, of in runs.items()}
        least = min(means[each] for each in KAISA_ROWS if each in means)
        best = min(("Muon", "SOAP"), key=lambda each: means[each])
        if means[best] < least:
            worse[name] = best
        if name == "friedman":
            assert means["SOAP"] < means["KAISA, AdamW"]
        for each in KAISA_ROWS:
            base = each.split(", ")[1]
            if each in means and base != "Muon":
                assert means[each] < means[base], (name, each)
    page = text_of(DEFAULTS)
    readme = text_of("README.md")
    assert worse == {"llama": "Muon", "vit": "SOAP", "fashion resnet": "SOAP"}
    assert "KAISA ends above Muon on llama, and above SOAP on vit and fashion resnet" in page
    assert "On three of them, tuned Muon or SOAP ends lower" in page
    assert f"on {slower} of the {len(record)} tasks KAISA over AdamW needs more seconds" in page
    assert f"On {later} of the {len(record)} tasks AdamW itself, Muon or SOAP reaches" in page
    assert re.search(rf"on {slower} of (these )?{len(record)} [\w -]*tasks it needs more", readme)


def test_fashion_mnist() -> None:
    runs = other_tasks()["fashion resnet"]
    page = text_of(DEFAULTS)
    means = {each: statistics.mean(last_losses(of)) for each, of in runs.items()}
    shares = {each: share_of(of, runs["AdamW"], "seconds") for each, of in runs.items()}
    assert min(shares, key=lambda each: shares[each]) == "KAISA, AdamW"
    assert f"from {means['AdamW']:.3f} to {means['KAISA, AdamW']:.3f} over AdamW" in page
    assert f"from {means['SGD']:.3f} to {means['KAISA, SGD']:.3f} over SGD" in page
    assert f"SOAP ({means['SOAP']:.3f}) and Muon ({means['Muon']:.3f})" in page
    assert means["KAISA, Muon"] > means["Muon"]


def test_kaisa_over_muon() -> None:
    below = []
    for runs in other_tasks().values():
        if "KAISA, Muon" in runs:
            both = (statistics.mean(last_losses(runs[each])) for each in ("KAISA, Muon", "Muon"))
            below.append(operator.lt(*both))
    assert sorted(below) == [False, True, True]
    sentence = "On [three tasks](../evidence/benchmarks.md#other-tasks), KAISA over Muon ends below"
    assert sentence in text_of("docs/how-to/migrate.md")


def test_fashion_mnist_at_a_constant_rate() -> None:
    runs = other_tasks()["fashion resnet, constant rate"]
    means = {each: statistics.mean(last_losses(of)) for each, of in runs.items()}
    over_sgd, over_muon, muon, soap, sgd = (
        f"{means[each]:.3f}" for each in ("KAISA, SGD", "KAISA, Muon", "Muon", "SOAP", "SGD")
    )
    assert max(means["KAISA, SGD"], means["KAISA, Muon"]) < min(means["Muon"], means["SOAP"])
    sentence = (
        f"KAISA over SGD ({over_sgd}) and over Muon ({over_muon}) ends below Muon ({muon}) and"
    )
    assert f"{sentence} SOAP ({soap})" in text_of(DEFAULTS)
    sentence = f"KAISA over SGD ends lower than both ({over_sgd}; Muon {muon}, SGD {sgd})"
    assert sentence in text_of("README.md")


def test_seconds_of_a_run_with_the_defaults() -> None:
    ratios = {}
    for name, runs in other_tasks().items():
        kaisa_runs, base = (
            statistics.median(run["seconds"][-1] for run in runs[each])
            for each in ("KAISA, AdamW", "AdamW")
        )
        ratios[name] = kaisa_runs / base
    low, high = (pick(ratios, key=lambda name: ratios[name]) for pick in (min, max))
    assert (low, high) == ("fashion resnet", "diabetes")
    sentence = f"takes {ratios[low]:.2f} (Fashion-MNIST) to {ratios[high]:.2f} (diabetes) times"
    assert sentence in text_of(DEFAULTS)


def test_the_command_of_the_other_tasks_runs_those_that_are_stored() -> None:
    assert set(tuned_rivals.STORED) == stored("tasks")["tasks"].keys()


CLAIM = re.compile(r"chose no(thing| default)|held-out tasks?", re.IGNORECASE)
NAMES = {"fashion resnet": "Fashion-MNIST"}


def tuned_tasks() -> set[str]:
    """The tasks on which defaults or rivals were tuned, as pages name them."""
    names = {run["job"]["task"] for run in stored("defaults")["tried"]}
    for file in ("tasks", "sensitivity"):
        for task_name, of in stored(file)["tasks"].items():
            if of["tuning"]:
                names.add(task_name.removeprefix("unseen ").partition(",")[0])
    return {NAMES.get(name, name) for name in names}


def unfounded_claims(text: str) -> list[str]:
    """The tuned tasks that a page names if it says that a task is held out or chose no default."""
    if not CLAIM.search(" ".join(text.split())):
        return []
    return sorted(name for name in tuned_tasks() if re.search(rf"\b{name}\b", text))


def test_no_page_says_of_a_tuned_task_that_it_chose_no_default() -> None:
    """The seeds that tune the rivals chose drift's thresholds; the language task, the defaults."""
    assert {"Fashion-MNIST", "llama", "friedman", "language"} <= tuned_tasks()
    assert unfounded_claims("The head chose no default.") == ["head"]
    assert unfounded_claims("Held-out\ntasks, such as Fashion-MNIST") == ["Fashion-MNIST"]
    assert unfounded_claims("The held-out loss of Fashion-MNIST") == []
    for page in (*PAGES, ROOT / "Makefile", ROOT / "benchmarks" / "README.md"):
        assert unfounded_claims(page.read_text()) == [], page.name
    assert "one of the six on which we [chose" in text_of("README.md")


def test_each_section_says_whether_its_tasks_chose_defaults() -> None:
    text = (ROOT / DEFAULTS).read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    for title in ("A small language model", "Other tasks", "Steps to a target"):
        assert re.search(r"\*\*.* chose\s(defaults|constants)\.?\*\*", sections[title]), title
    assert re.search(r"\*\*.*\s?chose defaults or", sections["Sensitivity to the learning rate"])


def test_how_often_kaisa_ends_above_its_base() -> None:
    table = rows(DEFAULTS, "task, base", "half the rate", "the base's rate")
    cells: dict[str, list[str]] = {}
    worst = 0.0
    for found in stored("sensitivity")["tasks"].values():
        shares = ratios_to_the_base(found)
        worst = max(worst, *(ratio for ratios in shares.values() for ratio in ratios))
        name = found["task"].removeprefix("unseen ").removesuffix(", short")
        cells[f"{name}, {found['base']}"] = [
            f"{sum(not ratio <= 1 for ratio in ratios)} of {len(ratios)}"
            for ratios in shares.values()
        ]
    assert table == cells
    assert f"ends {worst:,.0f} times above the base's loss" in text_of(DEFAULTS)


def test_steps_on_a_gpu() -> None:
    models = {"transformer": "transformer-768", "ResNet-50": "resnet50"}
    steps = stored("gpu")["steps"]
    table = rows(DEFAULTS, "model, optimizer", "plain step", "statistics", "refresh")
    assert len(table) == 8
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
    share, seconds = shares_of_the_larger_model()
    page = text_of(DEFAULTS)
    assert f"ends at a held-out loss of {adamw['losses'][-1]:.2f}" in page
    assert f"with default settings, at {kaisa['losses'][-1]:.2f}" in page
    whole = f"takes {adamw['seconds'][-1]:.1f} s and KAISA's {kaisa['seconds'][-1]:.1f} s"
    assert whole in page
    assert f"after {share:.2f} of the steps, but after {seconds:.1f} times the seconds" in page
    early = kaisa["seconds"][32 // record["every"] - 1] / 32
    assert f"The first 32 steps of KAISA take {1000 * early:.0f} ms each" in page
