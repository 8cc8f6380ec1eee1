"""Inject faults into small training runs: none may hang, drift apart, or be lost or unclear.

    python tests/faults/faults.py --jobs 4 --json benchmarks/results/faults.json

A case is a system (an optimizer and a number of processes), a fault and a moment. Its processes
must end by themselves within a deadline. The outcome is

    hung         if a process has not ended by the deadline;
    out of sync  if workers end without an error, and with different parameters;
    lost         if training continues without a warning, and with other numbers or less curvature
                 than without the fault; or if it ends with an error and had to continue;
    unclear      if an error is neither the package's nor the injected one, or if a process ends by
                 a signal that the fault did not send;
    clean        otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fault_checkpoints  # noqa: F401 - adds to the faults
import fault_ranks  # noqa: F401 - adds to the faults
from fault_kinds import FAULTS, Fault
from fault_scenes import SYSTEMS, Run, System, is_close, perform

DEADLINE = 30.0  # seconds for a phase; the longest wait of ours in it is the group's timeout
GROUP_TIMEOUT = 8.0
PLAIN = Fault("nothing", "none", lambda run: None)


@dataclass(frozen=True)
class Case:
    """A system, a fault, a moment."""

    system: System
    fault: Fault
    moment: str

    @property
    def name(self) -> str:
        """For ``--only``."""
        return f"{self.system.name} / {self.fault.group} / {self.fault.name} / {self.moment}"


@dataclass
class Result:
    """The outcome of a case, and the reason if it is not clean.

    `ended` is "continues", "warns" or "ends by an error".
    """

    system: str
    fault: str
    group: str
    moment: str
    outcome: str
    detail: str
    ended: str
    seconds: float


@dataclass
class Rank:
    """A process, and what it left: `sent` is the signal that it has sent itself."""

    pid: int
    status: int | None = None
    report: dict[str, Any] | None = None
    sent: int | None = None
    output: str = ""
    killed: bool = False


class Child(BaseException):
    """Unwinds the parent's stack in a child, whose process must end as a script does."""

    def __init__(self, run: Run) -> None:
        self.run = run


def go(run: Run) -> None:
    """What a rank does."""

    def join() -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{run.directory}/store.{run.phase}",
            rank=run.rank,
            world_size=run.size,
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )

    perform(run, join)


class Running:
    """A case under way."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.directory = Path(tempfile.mkdtemp(prefix="fault"))
        self.phases: list[list[Rank]] = []
        self._started = time.monotonic()
        self._sizes = case.fault.sizes(case.system)
        self._start()

    def _start(self) -> None:
        phase = len(self.phases)
        size = self._sizes[phase]
        self.phases.append([Rank(self._fork(phase, rank, size)) for rank in range(size)])
        self._until = time.monotonic() + DEADLINE

    def _fork(self, phase: int, rank: int, size: int) -> int:
        case = self.case
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        # A shell has jobs in the background ignore it, and so would whatever they start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(self.directory / f"out.{phase}.{rank}", os.O_CREAT | os.O_WRONLY)
        for stream in 1, 2:
            os.dup2(output, stream)
        step = case.system.moments.get(case.moment, 0)
        run = Run(case.system, rank, size, step, phase, self.directory)
        case.fault.install(run)
        raise Child(run)

    def poll(self) -> Result | None:
        """What became of it, once it has."""
        ranks = self.phases[-1]
        for rank in ranks:
            if rank.status is None:
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                rank.status = status if pid else None
        left = [rank for rank in ranks if rank.status is None]
        if left and all(_is_stopped(rank.pid) for rank in left) and len(left) < len(ranks):
            for rank in left:  # the others have ended, so a stopped process has to end as well
                os.kill(rank.pid, signal.SIGCONT)
        if left and time.monotonic() > self._until:
            for rank in left:
                rank.killed = True
                os.kill(rank.pid, signal.SIGKILL)
                _, rank.status = os.waitpid(rank.pid, 0)
        elif left:
            return None
        self._read()
        if len(self.phases) < len(self._sizes) and not any(r.killed for r in ranks):
            self._start()
            return None
        return self._result()

    def _read(self) -> None:
        phase = len(self.phases) - 1
        for j, rank in enumerate(self.phases[-1]):
            report = self.directory / f"report.{phase}.{j}"
            if report.exists():
                rank.report = json.loads(report.read_text())
            sent = self.directory / f"signal.{phase}.{j}"
            rank.sent = int(sent.read_text()) if sent.exists() else None
            rank.output = (self.directory / f"out.{phase}.{j}").read_text(errors="replace")

    def _result(self) -> Result:
        case = self.case
        outcome, detail, ended = judge(case, self.phases, references.get(case.system.name))
        if case.fault is PLAIN and outcome == "clean":
            references[case.system.name] = [r.report or {} for r in self.phases[-1]]
        if outcome == "clean":
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            print(f"    kept: {self.directory}")
        seconds = round(time.monotonic() - self._started, 2)
        return Result(
            system=case.system.name,
            fault=case.fault.name,
            group=case.fault.group,
            moment=case.moment,
            outcome=outcome,
            detail=detail,
            ended=ended,
            seconds=seconds,
        )


references: dict[str, list[dict[str, Any]]] = {}


def _is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"


def judge(
    case: Case, phases: Sequence[Sequence[Rank]], reference: Sequence[dict[str, Any]] | None
) -> tuple[str, str, str]:
    """The outcome, its reason, and how the case ended."""
    fault = case.fault
    for phase in phases:
        for j, rank in enumerate(phase):
            if rank.killed:
                return "hung", f"rank {j} had not ended after {DEADLINE:g} s", "hangs"
            problem = unclear_end(rank, fault)
            if problem:
                return "unclear", f"rank {j}: {problem}", "ends by an error"
    last = phases[-1]
    workers = [r.report for r in last[: len(last) - case.system.helpers] if r.report is not None]
    raised = [w for w in workers if w["status"] == "raised"]
    if raised or not workers:
        if fault.expect in ("same", "continues"):
            error = raised[0]["error"] if raised else {"type": "no report", "message": ""}
            return "lost", f"ended by {error['type']}: {error['message']}", "ends by an error"
        return "clean", "", "ends by an error"
    parameters = [[_whole(p) for p in w["parameters"]] for w in workers]
    for j, other_parameters in enumerate(parameters):
        if other_parameters != parameters[0]:
            return "out of sync", f"rank {j} differs from rank 0", "continues"
    usual = {line for r in reference or [] for line in r.get("warnings", [])}
    messages = sorted({line for w in workers for line in w["warnings"]} - usual)
    messages += [f"refused: {e['message']}" for w in workers for e in w["caught"]]
    ended = "warns" if messages else "continues"
    problem = silently_wrong(case, workers, reference or [], bool(messages))
    return ("lost", problem, ended) if problem else ("clean", "", ended)


def _whole(value: float) -> float | str:
    return value if math.isfinite(value) else "not finite"


def unclear_end(rank: Rank, fault: Fault) -> str:
    """What is unclear about the end of a process; "" if nothing is."""
    assert rank.status is not None
    if os.WIFSIGNALED(rank.status):
        number = os.WTERMSIG(rank.status)
        if number != rank.sent and number not in fault.signals:
            tail = rank.output.strip()[-300:]
            return f"died of {signal.Signals(number).name}, which the fault did not send: {tail}"
        return ""
    if rank.report is None:
        return f"ended without a word: {rank.output.strip()[-300:]}"
    if os.WEXITSTATUS(rank.status):
        return f"exit status {os.WEXITSTATUS(rank.status)}: {rank.output.strip()[-300:]}"
    for complaint in ("terminate called", "Exception ignored"):
        if complaint in rank.output:
            return f"{complaint}: {rank.output.strip()[-300:]}"
    errors = [*rank.report["caught"]]
    if rank.report["status"] == "raised":
        errors.append(rank.report["error"])
    return next(filter(None, (unclear(error, fault) for error in errors)), "")


def unclear(error: dict[str, Any], fault: Fault) -> str:
    """What is unclear about an error; "" if nothing is."""
    name = error["type"]
    message = error["message"]
    whole = " ".join([name, message, *error["chain"]])
    if name == "Injected" or "injected" in message.lower() or name in fault.errors:
        return ""
    is_own_error = error["module"].startswith("second_order")
    # The base reports what it does not accept.
    known = re.search("second_order|optim", error["from"]) is not None
    from_us = known and name in ("ValueError", "TypeError")
    if (is_own_error or from_us) and len(message) >= 20:
        return ""
    return f"{name}: {whole[:300]}"


def silently_wrong(
    case: Case,
    workers: Sequence[dict[str, Any]],
    reference: Sequence[dict[str, Any]],
    has_messages: bool,
) -> str:
    """What is silently wrong; "" if nothing is."""
    expect = case.fault.expect
    if not reference and case.fault is not PLAIN:
        return "the training without a fault has failed"
    accepted = [note for w in workers for note in w["notes"] if note.startswith("accepted")]
    if accepted:
        return str(accepted[0])
    if expect in ("reported", "raises") and not has_messages:
        return "no error, and no warning"
    finite = all(math.isfinite(p) for w in workers for p in w["parameters"])
    if not finite and not case.fault.poisons:
        return "parameters are not finite"
    if expect == "any":
        return ""
    if any(not w["finite"] for w in workers) and not has_messages:
        return "the curvature is not finite"
    comparable = expect == "same" and case.system.exact and not case.fault.poisons
    if comparable and not is_close(workers[0]["parameters"], reference[0]["parameters"]):
        return "other parameters than without the fault"
    if not (case.fault.alters or case.fault.poisons or has_messages):
        for worker, usual in zip(workers, reference, strict=False):
            less = [k for k, v in usual["use"].items() if worker["use"].get(k, 0.0) < v]
            if less and (case.system.exact or less != ["epochs"]):
                return f"less curvature in use, and nothing said: {', '.join(less)}"
    return ""


def cases(pattern: str, every: bool) -> list[Case]:
    """All of them whose names a pattern matches, in the order of systems.

    Without `every` a fault comes with one of three systems that it suits, and at one of its
    moments, which take turns.
    """
    found = []
    for j, fault in enumerate(FAULTS):
        suited = [s for s in SYSTEMS if fault.suits(s) and (fault.shards or not s.sharded)]
        for i, system in enumerate(suited):
            if every:
                found += [Case(system, fault, moment) for moment in fault.moments]
            elif (i + j) % 3 == 0 or len(suited) <= 4:
                found.append(Case(system, fault, fault.moments[(i + j) // 3 % len(fault.moments)]))
    found.sort(key=lambda case: SYSTEMS.index(case.system))
    return [case for case in found if re.search(pattern, case.name)]


def perform_all(chosen: Sequence[Case], jobs: int) -> list[Result]:
    """One result for each case; a plain training of each system comes first."""
    todo = [Case(s, PLAIN, "whole") for s in SYSTEMS if any(c.system is s for c in chosen)]
    results: list[Result] = []
    for wave in (todo, list(chosen)):
        wave.reverse()
        running: list[Running] = []
        while wave or running:
            while wave and len(running) < jobs:
                running.append(Running(wave.pop()))
            time.sleep(0.01)
            for run in list(running):
                result = run.poll()
                if result is not None:
                    running.remove(run)
                    results.append(result)
                    _report(result)
    return results


def _report(result: Result) -> None:
    mark = "" if result.outcome == "clean" else f": {result.detail}"
    name = f"{result.system} / {result.group} / {result.fault} / {result.moment}"
    print(f"{result.outcome:12}{result.seconds:6.1f} s  {name} ({result.ended}){mark}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--only", default="", help="a regular expression: 'system / group / fault / at'"
    )
    parser.add_argument("--every", action="store_true", help="all systems at all moments")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--list", action="store_true", help="list the cases")
    arguments = parser.parse_args()
    chosen = cases(arguments.only, arguments.every)
    if arguments.list:
        print("\n".join(case.name for case in chosen), f"\n{len(chosen)} cases")
        return 0
    started = time.monotonic()
    results = [r for r in perform_all(chosen, arguments.jobs) if r.fault != PLAIN.name or r.detail]
    counts = Counter(result.outcome for result in results)
    print(f"{len(results)} cases, {time.monotonic() - started:.0f} s:", dict(counts))
    found = [asdict(result) for result in results]
    if arguments.json:
        about = {"machine": platform.machine(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")
    return int(any(result.outcome != "clean" for result in results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that no child collects the modules again
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    child: Child | None = None
    try:
        status = main()
    except Child as forked:
        child = forked
        child.__traceback__ = None
    if child is None:
        sys.exit(status)
    go(child.run)
    sys.exit(0)  # by the way of threads, hooks of exit and destructors
