"""Random training runs and their outcomes.

`draw_example(random)` draws an `Example`, plain data. `train(rank, size, example)` runs it on each
process. `judge(example, results)` returns its outcome:

    trains    equal parameters on all workers at the end, finite if those of the base alone are
    refused   one of our errors at construction, on every process, with nothing changed
    raises    one of our errors later, on every process
    by base   the error, or the end without finite numbers, is that of the base alone
    diverges  steps grew until they were infinite: the options were too bold
    finding   anything else: a foreign error, different parameters on ranks, a hang, a crash
"""

from __future__ import annotations

import inspect
import io
import math
import re
import traceback
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from optimizer_cases import hook_count
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fuzz_models import Net, Spec, batch, draw_model, losses
from fuzz_options import SYSTEMS, draw_options
from second_order import SecondOrderError
from second_order.lanczos import Outputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

STEPS = 10
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
RARE = {  # how often a script does something; the rest of it as often as `OFTEN`
    "closure": 0.2,
    "DDP": 0.15,
    "autocast": 0.1,
    "scaler": 0.08,
    "schedule": 0.15,
    "clip": 0.15,
    "evaluation between steps": 0.15,
    "gradients are kept": 0.15,
}
OFTEN = 0.06
HABITS = (
    *RARE,
    "batches of many sizes",
    "one example at a time",
    "a graph for second derivatives",
    "two losses",
    "a look between forward and backward",
    "evaluation mode",
    "strided inputs",
    "a learning rate of zero at times",
    "the base's state",
    "another dtype later",
    "unfrozen later",
    "gradients set to zero by hand",
    "gradients of parameters dropped",
    "named parameters",
)
BOLD = 1e3  # if parameters grew by this factor before they became non-finite, the run diverged


@dataclass(frozen=True)
class Example:
    """A training.

    Attributes:
        ranks: processes, `helpers` included.
        examples: in a micro-batch.
        micro: micro-batches to a step.
        split: parameters are given in two groups, the second of which comes at this step.
        saved: the step at which a checkpoint is made; -1 for none.
        how: what becomes of it: "load" or "new".
        idle: a step without backward; -1 for none.
        habits: what else the script does: some of `HABITS`.
    """

    system: str
    ranks: int
    helpers: int
    spec: Spec
    dtype: str
    options: dict[str, Any]
    examples: int = 4
    micro: int = 1
    split: int = -1
    saved: int = -1
    how: str = "load"
    idle: int = -1
    habits: frozenset[str] = frozenset()

    @property
    def workers(self) -> int:
        return self.ranks - self.helpers

    @property
    def curved(self) -> bool:
        """Whether it has a curvature closure."""
        return self.system in ("DHO2", "MRDHO2")


def draw_example(random: Random, most_ranks: int = 3) -> Example:
    """A training."""
    system = random.choice(sorted(SYSTEMS))
    ranks = random.choice([n for n in (1, 1, 1, 2, 2, 3) if n <= most_ranks])
    spec = draw_model(random)
    options = draw_options(random, SYSTEMS[system])
    helpers = 0
    if ranks > 1 and system == "MRDHO2":
        helpers = options["helper_ranks"] = random.choice((0, 1, 1, 1))
    elif ranks > 1 and system == "DistKFAC":
        helpers = options["stats_workers"] = random.choice((0, 0, 1))
    example = Example(
        system=system,
        ranks=ranks,
        helpers=helpers,
        spec=spec,
        dtype=random.choice(["float32", "float32", "float64", "bfloat16"]),
        options=options,
        examples=random.choice([2, 4, 7]),
        micro=random.choice([1, 1, 1, 2, 3]),
        split=random.choice([0, 3]) if random.random() < 0.1 else -1,
        saved=random.randrange(1, STEPS) if random.random() < 0.35 else -1,
        how=random.choice(["load", "new"]),
        idle=random.randrange(STEPS) if random.random() < 0.08 else -1,
        habits=frozenset(h for h in HABITS if random.random() < RARE.get(h, OFTEN)),
    )
    return possible(example)


def possible(example: Example) -> Example:
    """An example without combinations that torch does not support."""
    habits = set(example.habits)
    spec = example.spec
    split = example.split
    how = example.how
    if example.ranks == 1 or example.helpers:
        habits.discard("DDP")
    if "DDP" in habits:
        fixed = tuple(replace(p, unused=(), frozen="") for p in spec.parts)
        spec = replace(spec, parts=fixed)
        split = -1
        if any(part.kind == "Recomputed" for part in fixed):
            habits.discard("DDP")
        habits.discard("a graph for second derivatives")
    if "scaler" in habits:
        habits.discard("scaler" if example.dtype == "bfloat16" else "closure")
    if example.helpers or "DDP" in habits:
        how = "load"
    if example.helpers:  # they have all parameters from the beginning
        split = min(split, 0)
    return replace(example, habits=frozenset(habits), spec=spec, split=split, how=how)


class Reported(Exception):  # noqa: N818 - carries a report
    """An error as data. Raising it in a process of the pool ends the other processes."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report)
        self.report = report


class Changed(Exception):  # noqa: N818 - a finding
    """A check has failed."""


class Training:
    """One process of an example."""

    def __init__(self, example: Example, rank: int, size: int) -> None:
        self.example = example
        self.rank = rank
        self.size = size
        self.stage = "model"
        self.largest = [0.0]  # entry of the parameters, after each step
        self.dtype = DTYPES[example.dtype]
        torch.manual_seed(0)
        self.model = Net(example.spec).to(self.dtype)
        self.outer: nn.Module = self.model
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if self.does("scaler") else None
        self.optimizer: Any = None

    def batch(self, step: int, micro: int = 0, rank: int | None = None) -> tuple[Tensor, Tensor]:
        rank = self.rank if rank is None else rank
        seed = 1 + (step * 10 + micro) * 10 + rank
        size = self.example.examples
        if self.does("batches of many sizes"):
            size = 2 + (size + step) % 5
        elif self.does("one example at a time"):
            size = 1
        x, y = batch(self.example.spec, seed, size, self.dtype)
        if self.does("strided inputs"):
            x = x.repeat_interleave(2, -1)[..., ::2]
        return x, y

    def does(self, habit: str) -> bool:
        """Whether the script does something."""
        return habit in self.example.habits

    def loss_at(self, step: int, micro: int, rank: int | None = None) -> Tensor:
        x, y = self.batch(step, micro, rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.does("autocast")):
            loss = self.loss(self.outer(x), y) / self.example.micro
            if self.does("two losses"):
                loss = 0.5 * loss + 0.5 * self.loss(self.outer(x), y) / self.example.micro
        if self.does("a look between forward and backward"):
            with torch.no_grad():
                self.model(x)
        return loss

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return losses(self.example.spec, outputs, y).mean()

    def curvature(self, chosen_batch: tuple[Tensor, Tensor] | None = None) -> Any:
        """Return the loss or the outputs, depending on the curvature that is needed."""
        x, y = self.batch(99) if chosen_batch is None else chosen_batch
        outputs = self.model(x)
        kind = self.example.options.get("curvature")
        if kind == "gauss-newton":
            return Outputs(outputs, lambda z: self.loss(z, y))
        if kind == "empirical-fisher":
            return Outputs(outputs, lambda z: losses(self.example.spec, z, y))
        return self.loss(outputs, y)

    def helpers_loss(self, chosen_batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(self.model(chosen_batch[0]), chosen_batch[1])

    def groups(self) -> list[dict[str, Any]]:
        """Parameters in two groups."""
        params = list(self.model.parameters())
        cut = len(params) // 2 + 1
        return [{"params": params[:cut]}, {"params": params[cut:]}]

    def make(self) -> Any:
        example = self.example
        options = dict(self.example.options)
        if self.scaler is not None:
            options["grad_scaler"] = self.scaler
        if example.curved:
            options["curvature_closure"] = self.curvature
        params: Any = self.outer
        if example.split >= 0:
            groups = self.groups()
            params = groups[:1] if example.split and groups[1]["params"] else groups
            params = [group for group in params if group["params"]]
            options["model"] = self.outer
        elif self.does("named parameters"):
            params = self.outer.named_parameters()
            options["model"] = self.outer
        return SYSTEMS[example.system](params, **options)

    def construct(self) -> None:
        """Make the optimizer; an error leaves everything as it was."""
        if self.does("DDP"):
            self.outer = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.stage = "construction"
        before = [t.detach().clone() for t in self.model.state_dict().values()]
        hooks = hook_count(self.model)
        try:
            self.optimizer = self.make()
        except Exception as error:
            after = list(self.model.state_dict().values())
            # Another rank's parameters are the first thing to come, once all have agreed.
            if self.rank == 0 or self.example.ranks == 1:
                same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                if not same:
                    raise Changed(f"refused, and parameters have changed: {error}") from error
            if hook_count(self.model) != hooks:
                raise Changed(f"refused, and hooks are left: {error}") from error
            raise

    def step(self, step: int) -> None:
        example = self.example
        self.model.step = step
        if step == STEPS // 2:
            self.model.freeze("later")
        if step == example.split and step > 0:
            self.optimizer.add_param_group(self.groups()[1])
        if self.does("evaluation between steps"):
            self.look(step)
        self.change(step)

        def passes() -> Tensor:
            self.optimizer.zero_grad(set_to_none=not self.does("gradients are kept"))
            total = torch.zeros(())
            for micro in range(example.micro):
                loss = self.loss_at(step, micro)
                total = total + loss.detach().float()
                if step != example.idle:
                    scaled = loss if self.scaler is None else self.scaler.scale(loss)
                    scaled.backward(create_graph=self.does("a graph for second derivatives"))
            self.average()
            self.change_gradients(step)
            if self.does("clip") and self.scaler is None:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return total

        if self.scaler is not None:
            passes()
            if any(p.grad is not None for p in self.model.parameters()):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        elif self.does("closure"):
            self.optimizer.step(passes)
        else:
            passes()
            self.optimizer.step()

    def change(self, step: int) -> None:
        """Change the run before a step."""
        if self.does("a learning rate of zero at times"):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0 if step % 3 == 1 else 0.01
        if step != STEPS // 2:
            return
        if self.does("another dtype later") and not self.does("DDP"):
            self.dtype = torch.float32 if self.dtype == torch.float64 else torch.float64
            self.model.to(self.dtype)
        if self.does("unfrozen later"):
            self.model.requires_grad_(True)
        is_own = type(self.optimizer) in SYSTEMS.values()
        if self.does("the base's state") and self.example.ranks == 1 and is_own:
            self.optimizer.load_state_dict(self.optimizer.export_base_state())

    def change_gradients(self, step: int) -> None:
        for i, p in enumerate(self.model.parameters()):
            if p.grad is None:
                continue
            if self.does("gradients set to zero by hand") and step % 3 == 2:
                p.grad.zero_()
            if self.does("gradients of parameters dropped") and (step + i) % 4 == 1:
                p.grad = None

    def average(self) -> None:
        """Averages gradients by hand if the optimizer does not."""
        if self.example.options.get("gradient_averaging") is not False or self.example.workers < 2:
            return
        if self.does("DDP"):
            return
        group = self.optimizer.worker_group if self.example.helpers else None
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)
                p.grad /= self.example.workers

    def look(self, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(self.batch(step, 7)[0])
        self.model.train()
        str(self.optimizer.summary())
        self.optimizer.metrics()

    def checkpoint(self, step: int) -> None:
        self.optimizer.consolidate(to=None)
        file = io.BytesIO()
        states = {"model": self.model, "optimizer": self.optimizer}
        torch.save({name: each.state_dict() for name, each in states.items()}, file)
        file.seek(0)
        saved = torch.load(file)
        if self.example.how == "new":
            self.optimizer.close()
            trained = [p.requires_grad for p in self.model.parameters()]
            self.model = Net(self.example.spec).to(self.dtype)
            self.outer = self.model
            if 0 < self.example.split <= step:  # it is there from the beginning now
                self.example = replace(self.example, split=0)
            if self.scaler is not None:
                self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            self.optimizer = self.make()
            for p, trains in zip(self.model.parameters(), trained, strict=True):
                p.requires_grad_(trains)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def work(self) -> None:
        example = self.example
        scheduler = None
        for step in range(STEPS):
            self.stage = f"step {step}"
            if step == example.saved:
                self.stage = f"checkpoint at step {step}"
                self.checkpoint(step)
                scheduler = None
                self.stage = f"step {step}"
            if self.does("schedule") and scheduler is None:
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
            torch.manual_seed(step)  # dropout
            self.step(step)
            if scheduler is not None:
                scheduler.step()
            self.largest.append(max(float(p.detach().abs().max()) for p in self.model.parameters()))
        self.stage = "end"
        str(self.optimizer.summary())
        self.optimizer.metrics()

    def go(self) -> None:
        self.construct()
        if self.does("evaluation mode"):
            self.outer.eval()
        optimizer = self.optimizer
        if getattr(optimizer, "role", "worker") != "worker":
            self.stage = "serving"
            batches = [self.batch(i) for i in range(4)]
            loss = self.curvature if self.example.curved else self.helpers_loss
            with optimizer:
                optimizer.serve(batches, loss)
            return
        if self.example.helpers:
            with optimizer:
                self.work()
        else:
            self.work()
            self.optimizer.close()

    def report(self) -> dict[str, Any]:
        values = [p.detach().double().reshape(-1) for p in self.model.parameters()]
        return {"status": "done", "parameters": torch.cat(values), "largest": self.largest}


def described(error: BaseException, stage: str) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "status": "raised",
        "stage": stage,
        "type": type(error).__name__,
        "ours": isinstance(error, SecondOrderError),
        "ordinary": isinstance(error, (ValueError, TypeError)),
        "message": str(error),
        "from": frames[-1].filename if frames else "",
        "traceback": "".join(traceback.format_exception(error)),
    }


def train(rank: int, size: int, example: Example) -> dict[str, Any]:
    """Run an example on one process. Raises `Reported` if it ends with an error."""
    dist.barrier()  # a rank that raises early must not leave before the others have checked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(example, rank, size)
        try:
            training.go()
        except Exception as error:
            report_error = Reported(described(error, training.stage))
        else:
            return training.report()
    raise report_error


def base_alone(example: Example) -> dict[str, Any]:
    """The same training under the base, in this process, with gradients averaged over ranks."""
    training = Training(example, 0, 1)
    own = set(inspect.signature(SYSTEMS[example.system]).parameters)
    keywords = {k: v for k, v in example.options.items() if k not in own or k == "lr"}
    base = example.options.get("base", torch.optim.SGD)
    params: Any = training.model.parameters()
    if base is getattr(torch.optim, "Muon", None):
        params = [p for p in training.model.parameters() if p.dim() == 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            training.optimizer = base(params, **keywords)
            for step in range(STEPS):
                training.stage = f"step {step}"
                training.model.step = step
                if step == STEPS // 2:
                    training.model.freeze("later")
                training.optimizer.zero_grad()
                training.change(step)
                if step != example.idle:
                    for rank in range(example.workers):
                        for micro in range(example.micro):
                            (training.loss_at(step, micro, rank) / example.workers).backward()
                training.change_gradients(step)
                training.optimizer.step()
        except Exception as error:
            return described(error, training.stage)
    return training.report()


@dataclass(frozen=True)
class Outcome:
    """The outcome of an example: its name, the error, and the whole traceback."""

    name: str
    detail: str = ""
    whole: str = ""


def judge(example: Example, results: Sequence[Any]) -> Outcome:
    """The outcome of an example from what each process returned or raised."""
    reports = [r.report if isinstance(r, Reported) else r for r in results]
    for r in reports:
        if not isinstance(r, dict):
            return Outcome("finding", f"{type(r).__name__}: {r}"[:300], str(r))
    raised = [r for r in reports if r["status"] == "raised"]
    workers = reports[: example.workers]
    # A helper that raises is lost to the workers, and costs them no step.
    lone = all(r["status"] == "raised" and _is_own_error(r) for r in reports[example.workers :])
    if raised and not (lone and all(r["status"] == "done" for r in workers)):
        return _judge_errors(example, reports, raised)
    first = workers[0]["parameters"]
    for j, r in enumerate(workers):
        if not torch.equal(first.nan_to_num(nan=7.0), r["parameters"].nan_to_num(nan=7.0)):
            return Outcome("finding", f"out of sync: rank {j} differs from rank 0")
    if bool(first.isfinite().all()):
        return Outcome("raises", "a helper alone") if raised else Outcome("trains")
    alone = base_alone(example)
    if alone["status"] == "raised" or not bool(alone["parameters"].isfinite().all()):
        return Outcome("by base", "not finite")
    finite = [x for x in workers[0]["largest"] if math.isfinite(x)]
    if finite and finite[-1] > BOLD:
        return Outcome("diverges", f"parameters of {finite[-1]:.1e} before")
    return Outcome("finding", f"not finite, with parameters of {finite[-1:]} before")


def _judge_errors(
    example: Example, reports: Sequence[dict[str, Any]], raised: Sequence[dict[str, Any]]
) -> Outcome:
    # Ranks that ended because of another rank say so.
    causes = [r for r in raised if not _is_echo(r)] or list(raised)
    if all("torch/optim" in r["from"] for r in causes):
        return Outcome("by base", f"{causes[0]['type']}: {causes[0]['message']}"[:300])
    for r in causes:
        if not _is_own_error(r):
            alone = base_alone(example)
            known = alone["status"] == "raised" and alone["type"] == r["type"]
            if known and _words(alone["message"]) == _words(r["message"]):
                return Outcome("by base", f"{r['type']}: {r['message']}"[:300])
            what = f"{r['type']} at {r['stage']}: {r['message']}"
            return Outcome("finding", what[:300], r["traceback"])
    # A helper ends by itself, and warns about the workers.
    quiet = [j for j, r in enumerate(reports[: example.workers]) if r["status"] == "done"]
    if quiet:
        what = f"ranks {quiet} ended well, others by {causes[0]['type']}: {causes[0]['message']}"
        return Outcome("finding", what[:300], causes[0]["traceback"])
    first = causes[0]
    name = "refused" if all(r["stage"] == "construction" for r in causes) else "raises"
    return Outcome(name, f"{first['type']} at {first['stage']}: {first['message']}"[:300])


def _is_echo(report: dict[str, Any]) -> bool:
    return "did not come to" in report["message"] or "has ended" in report["message"]


def _is_own_error(report: dict[str, Any]) -> bool:
    """Of this package, or of a base's own check, with a message."""
    known = re.search(r"second_order/|torch/optim", report["from"]) is not None
    is_own = report["ours"] or (report["ordinary"] and known)
    return is_own and len(report["message"]) >= 20


def _words(message: str) -> str:
    return re.sub(r"[\d.]+", "#", message)[:80]
