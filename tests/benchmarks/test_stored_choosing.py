"""The figures of the README and of the FAQ in docs/start/choosing.md are those of stored runs."""

from __future__ import annotations

import re
import statistics

from stored_runs import (
    ROOT,
    Runs,
    by_name,
    by_optimizer,
    median,
    ratios_to_the_base,
    share_of,
    shares_of_the_larger_model,
    stored,
    text_of,
)

PAGE = "docs/start/choosing.md"


def runs_of(task: str) -> dict[str, Runs]:
    """The stored runs of a task, by the optimizer's name."""
    return by_name(stored("tasks")["tasks"][task]["runs"])


def test_there_are_ten_questions() -> None:
    page = (ROOT / PAGE).read_text("utf-8")
    assert len(re.findall(r"^### .*\?$", page, re.MULTILINE)) == 10


def test_the_list_has_the_questions_of_the_chart() -> None:
    drawing = (ROOT / "docs/figures/make_figures.py").read_text("utf-8")
    chart = drawing[drawing.index("CHOICES = [") : drawing.index("def choosing")]
    questions = [each.replace("\\n", " ") for each in re.findall(r'"(.*\?)"', chart)]
    listed = re.findall(r"\d\. \*\*(.*?)\*\*", text_of(PAGE))
    assert len(questions) == 6
    for question, line in zip(questions, listed, strict=True):
        plain = line.replace("`", "").replace("print(KAISA(model, lr=0.1).summary())", "summary()")
        assert plain == question


def test_seconds_to_the_loss_of_adamw() -> None:
    tasks = stored("tasks")["tasks"]
    shares = []
    for task in tasks:
        runs = runs_of(task)
        shares.append(share_of(runs["KAISA, AdamW"], runs["AdamW"], "seconds"))
    fewer = sum(share < 1 for share in shares)
    page = text_of(PAGE)
    assert f"On {fewer} of {len(tasks)} [small tasks]" in page
    assert f"and on {len(tasks) - fewer} it needs more" in page

    steps, seconds = shares_of_the_larger_model()
    assert f"got there after {steps:.2f} of the steps, but after {seconds:.1f} times" in page


def test_cost_of_a_step() -> None:
    steps = stored("gpu")["steps"]["resnet50"]
    plain = steps["AdamW"]
    kaisa_runs = steps["KAISA inverse"]
    page = text_of(PAGE)
    assert f"takes {plain['plain']:.0f} ms with AdamW and {kaisa_runs['plain']:.0f} ms with" in page
    assert f"refreshes all inverses takes {kaisa_runs['full']:.0f} ms" in page
    assert (
        f"takes {plain['plain']:.0f} ms with AdamW and {kaisa_runs['plain']:.0f} ms with KAISA, "
        f"or {kaisa_runs['full']:.0f} ms if it refreshes all inverses"
    ) in text_of("README.md")
    ratios = [
        row["memory"]["ratio"] for row in stored("speed")["rows"] if row["variant"] == "inverse"
    ]
    assert len(ratios) == 4
    assert f"was {min(ratios):.2f} to {max(ratios):.2f} times SGD's" in page


def test_how_often_a_run_ends_above_its_base() -> None:
    usual: list[bool] = []
    four: list[bool] = []
    for found in stored("sensitivity")["tasks"].values():
        for share, ratios in ratios_to_the_base(found).items():
            of = four if share == 4 else usual
            of.extend(not ratio <= 1 for ratio in ratios)
    page = text_of(PAGE)
    assert f"{sum(usual)} of {len(usual)} runs ended above the base's loss" in page
    assert f"At four times that rate, {sum(four)} of {len(four)} did" in page


def test_kills_of_the_elastic_run() -> None:
    run = stored("elastic")["runs"]["kaisa"]
    assert run["equal_to_undisturbed_bit_for_bit"]
    assert f"[killed a run {run['kills']} times]" in text_of(PAGE)


def test_losses_and_accuracies_next_to_rivals() -> None:
    language = by_name(stored("language")["runs"])
    losses_of = {
        name: statistics.mean(run["losses"][-1] for run in runs) for name, runs in language.items()
    }
    muon, soap = (losses_of[name] - losses_of["KAISA, defaults"] for name in ("Muon", "SOAP"))
    page = text_of(PAGE)
    assert f"tuned Muon and SOAP end {muon:.3f} and {soap:.3f} above KAISA" in page

    fashion = runs_of("fashion resnet")
    losses = {}
    accuracies = {}
    for name, runs in fashion.items():
        losses[name] = statistics.mean(run["end"]["loss"] for run in runs)
        accuracies[name] = statistics.mean(run["end"]["accuracy"] for run in runs)
    assert max(losses["Muon"], losses["SOAP"]) < min(losses["KAISA, AdamW"], losses["KAISA, SGD"])
    sentence = (
        f"is {accuracies['KAISA, AdamW']:.2%} with KAISA over AdamW and {accuracies['AdamW']:.2%} "
        f"with AdamW. Over SGD, it is {accuracies['KAISA, SGD']:.2%} instead of "
        f"{accuracies['SGD']:.2%}"
    )
    assert sentence.replace("%", " %") in page


def test_accuracy_on_the_digits() -> None:
    runs = stored("progress")["runs"]["mlp"]
    target = "98 % test accuracy"
    settings: dict[str, list[float]] = {}
    for run in by_optimizer(runs, "SGD"):
        settings.setdefault(run["setting"], []).append(run["steps_to"].get(target))
    fewest = min(median(steps) for steps in settings.values())
    kaisa_runs = median(
        run["steps_to"].get(target) for run in by_optimizer(runs, "KAISA, defaults")
    )
    assert kaisa_runs == float("inf")
    assert f"SGD reaches 98 % in {fewest:.0f} steps, and KAISA not in 300" in text_of(PAGE)


def test_costs_and_fashion_mnist_in_the_readme() -> None:
    page = text_of("README.md")
    (row,) = [
        row
        for row in stored("speed")["rows"]
        if (row["workload"], row["variant"]) == ("transformer", "inverse")
    ]
    assert f"[{row['every_10_and_100']:.1f} times SGD's step]" in page

    losses = {
        name: statistics.mean(run["end"]["loss"] for run in runs)
        for name, runs in runs_of("fashion resnet").items()
    }
    sentence = (
        f"({losses['Muon']:.3f} and {losses['SOAP']:.3f}; KAISA over SGD {losses['KAISA, SGD']:.3f}"
        f", SGD {losses['SGD']:.3f})"
    )
    assert sentence in page


def test_links_of_the_readme_and_contributing_lead_to_files() -> None:
    """mkdocs checks the links inside docs/ only."""
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text("utf-8")
        for target, _, anchor in re.findall(r"\]\(((?!http)[^)#]*)(#([^)]*))?\)", text):
            assert (ROOT / target).exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (ROOT / target).read_text("utf-8"), re.M)
                slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
                assert anchor in slugs, f"{target}#{anchor}"
