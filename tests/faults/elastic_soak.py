"""Kill processes of `examples/elastic.py` at random, and look where the training ends.

    python tests/faults/elastic_soak.py --optimizer kaisa dpkfac --json elastic.json

A process is killed (SIGKILL) at a random moment, twenty times: while processes find each other,
within a step, while a checkpoint is written. The others have to end by themselves, unless they were
still looking for each other, which torch does until the group's timeout. Then the script is started
again with another number of processes, 1 to 3, and has to resume from the newest checkpoint that is
whole. Some are cut short in between. The end is compared with that of two runs that are not
disturbed:

- with the same numbers of processes from the same steps on, bit for bit;
- with one process, up to rounding, which a third run of two undisturbed processes measures.

With ``--torchrun`` the first life is one of ``torchrun --max-restarts=1``, and has two kills.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import elastic
from second_order import load_checkpoint

FORK = multiprocessing.get_context("fork")  # torch is imported once
PATIENCE = 30.0  # seconds after which what has not ended by itself is hung
MEETING = 1.0  # the same before all have met; torchrun's agent ends the others immediately
COMPARED = ("model", "optimizer", "batches", "rng")


@dataclass
class Life:
    """From one start to the kill that ends it."""

    processes: int
    start: int
    killed: int | None = None
    moment: str = ""
    cut_short: str = ""


@dataclass
class Soak:
    optimizer: str
    steps: int
    seed: int
    folder: Path
    lives: list[Life] = field(default_factory=list)
    hung: int = 0
    unmet: int = 0
    left_out: int = 0
    pace: float = 0.2  # seconds from one checkpoint to the next
    cut_short: dict[Path, float] = field(default_factory=dict)

    def arguments(self, folder: Path, steps: int) -> list[str]:
        run = ["--optimizer", self.optimizer, "--seed", str(self.seed)]
        return [*run, "--folder", str(folder), "--steps", str(steps)]

    def newest(self) -> int:
        """The step of the newest intact checkpoint."""
        for path in elastic.checkpoints(self.folder):
            if self.cut_short.get(path) != path.stat().st_mtime:
                return int(path.stem.removeprefix("step-"))
        return 0


def ranks(size: int, arguments: list[str], log: Path) -> list[Any]:
    """Start the script on processes of their own, with the variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    started = [FORK.Process(target=run, args=(place, r, arguments, log)) for r in range(size)]
    for process in started:
        process.start()
    return started


def run(place: dict[str, str], rank: int, arguments: list[str], log: Path) -> None:
    output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update({**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.argv = ["elastic.py", *arguments]
    elastic.main()


def until(done: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not done() and time.monotonic() < deadline:
        time.sleep(0.002)
    return done()


def moment(soak: Soak, dice: random.Random, log: Path, over: Callable[[], bool]) -> str:
    """Wait for the moment of a kill; returns it in words."""
    if dice.random() < 0.2:
        time.sleep(dice.uniform(0.0, 3 * soak.pace))
        return "at the start"
    count = dice.choice([0, 1, 1, 2])
    started_at = time.monotonic()

    def saved() -> int:
        return log.read_text().count("saved") if log.exists() else 0

    if until(lambda: saved() >= count or over(), 10 * PATIENCE) and count:
        soak.pace = 0.5 * soak.pace + 0.5 * (time.monotonic() - started_at) / count
    time.sleep(dice.uniform(0.0, soak.pace))
    return f"after {count} checkpoints"


def live(soak: Soak, dice: random.Random, size: int, kills: bool) -> bool:
    """One life; whether the training has come to its end."""
    life = Life(size, soak.newest())
    soak.lives.append(life)
    log = soak.folder / f"life-{len(soak.lives):02}.log"
    processes = ranks(size, soak.arguments(soak.folder, soak.steps), log)

    def over() -> bool:
        return not any(process.is_alive() for process in processes)

    if kills:
        life.moment = moment(soak, dice, log, over)
        life.killed = dice.randrange(size)
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[life.killed].pid, signal.SIGKILL)
        met = log.exists() and "starting at step" in log.read_text()
        if not until(over, PATIENCE if met else MEETING):
            soak.hung += met
            soak.unmet += not met
    else:
        until(over, 10 * PATIENCE)
    for process in processes:
        process.kill()
        process.join()
    output = log.read_text() if log.exists() else ""
    start_lines = [line for line in output.splitlines() if line.startswith("starting at step")]
    message = f"starting at step {life.start} on {life.processes} processes"
    if start_lines and start_lines != [message]:
        raise SystemExit(f"{message!r} was expected, and not {start_lines}:\n{output}")
    soak.left_out += output.count("skipped: ")
    return not any(process.exitcode for process in processes)


def cut_newest(soak: Soak, dice: random.Random) -> str:
    """Cut the newest checkpoint short."""
    paths = elastic.checkpoints(soak.folder)
    if not paths or soak.cut_short.get(paths[0]) == paths[0].stat().st_mtime:
        return ""
    path = paths[0]
    data = path.read_bytes()
    length = dice.randrange(len(data))
    path.write_bytes(data[:length])
    soak.cut_short[path] = path.stat().st_mtime
    return f"cut to {length} bytes"


def under_torchrun(soak: Soak, dice: random.Random, size: int) -> None:
    """Two kills of one life: after the first one torchrun starts the processes again itself."""
    log = soak.folder / "torchrun.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={size}", elastic.__file__]
    extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        agent = subprocess.Popen(
            [*command, *soak.arguments(soak.folder, soak.steps)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **extra},
        )
    for lives in (1, 2):
        assert until(lambda n=lives: log.read_text().count("starting at step") >= n, PATIENCE * 3)  # type: ignore[misc]
        known = log.read_text().count("saved")
        assert until(lambda n=known: log.read_text().count("saved") > n, PATIENCE)  # type: ignore[misc]
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        starts = [
            line for line in log.read_text().splitlines() if line.startswith("starting at step")
        ]
        victim = dice.randrange(len(children))
        soak.lives.append(Life(size, int(starts[-1].split()[3]), victim, "under torchrun"))
        os.kill(int(children[victim]), signal.SIGKILL)
    agent.wait(PATIENCE)


def replay(soak: Soak, folder: Path) -> None:
    """The same numbers of processes from the same steps on, without kills."""
    folder.mkdir()
    ends = [life.start for life in soak.lives[1:]] + [soak.steps]
    for i, (life, end) in enumerate(zip(soak.lives, ends, strict=True)):
        # If two lives start at the same step, the later one counts, with the checkpoint it loaded.
        if all(later > life.start for later in ends[i:]) and (end > life.start):
            last = min(ends[i:])
            for process in ranks(life.processes, soak.arguments(folder, last), folder / "log"):
                process.join()
                if process.exitcode:
                    raise SystemExit((folder / "log").read_text())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of a parameter, relative to the largest of its tensor."""
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max()) for k in a)


def soaked(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dice = random.Random(args.seed)
    soak = Soak(args.optimizer, args.steps, args.seed, folder / "disturbed")
    soak.folder.mkdir()
    size = dice.choice([2, 3])
    if args.torchrun:
        under_torchrun(soak, dice, size)
    while True:
        kills = len([life for life in soak.lives if life.killed is not None])
        size = dice.choice([n for n in (1, 2, 3) if n != size])
        if live(soak, dice, size, kills < args.kills):
            break
        if kills >= args.kills:
            raise SystemExit("the last life was not killed, and has failed; see its log")
        if dice.random() < 0.3:
            soak.lives[-1].cut_short = cut_newest(soak, dice)
        print(soak.lives[-1], flush=True)
    if kills < args.kills:
        raise SystemExit(f"it came to its end after {kills} kills; give it more --steps")
    replay(soak, folder / "replay")
    for count, name in ((1, "alone"), (2, "two")):
        for process in ranks(count, soak.arguments(folder / name, args.steps), folder / "log"):
            process.join()
    paths = (folder / name for name in ("disturbed", "replay", "alone", "two"))
    states = (load_checkpoint(elastic.path_of(path, args.steps)) for path in paths)
    disturbed, again, one, two = ({name: state[name] for name in COMPARED} for state in states)
    return {
        "optimizer": args.optimizer,
        "steps": args.steps,
        "kills": kills,
        "kills_under_torchrun": 2 * args.torchrun,
        "resumed_on_another_number": sum(
            a.processes != b.processes for a, b in zip(soak.lives[:-1], soak.lives[1:], strict=True)
        ),
        "hung": soak.hung,
        "ended_while_they_had_not_met": soak.unmet,
        "checkpoints_cut_short": sum(bool(life.cut_short) for life in soak.lives),
        "times_left_out": soak.left_out,
        "equal_to_undisturbed_bit_for_bit": same(disturbed, again),
        "distance_from_one_process": distance(disturbed["model"], one["model"]),
        "distance_of_two_undisturbed": distance(two["model"], one["model"]),
        "lives": [asdict(life) for life in soak.lives],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", nargs="+", choices=elastic.OPTIMIZERS, default=["kaisa"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for logs and checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"runs": {}}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}"
    record |= {"machine": machine}
    for name in args.optimizer:
        each = argparse.Namespace(**{**vars(args), "optimizer": name})
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) if args.keep is None else args.keep / name
            folder.mkdir(parents=True, exist_ok=True)
            found = soaked(each, folder)
        print({key: value for key, value in found.items() if key != "lives"}, flush=True)
        record["runs"][name] = found
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
