"""Uses of a trained model's curvature: runs four examples and stores their output.

    make curvature-uses

Each example runs in a separate process on one thread:

    influence      influence of training images, compared with models trained without them
    compression    low-rank weights by curvature, compared with plain SVD
    continual      learning without forgetting, compared with other penalties
    laplace        calibration of the last layer, compared with a temperature
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import reporting

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"compression", "laplace"}
USES = {name: f"{name}.py" for name in ("influence", "compression", "continual")} | {
    "laplace": "laplace_digits.py"
}


def run_example(name: str, figures: Path, options: list[str]) -> list[str]:
    """Run an example, and return the lines that it prints."""
    command = [sys.executable, str(ROOT / "examples" / USES[name]), *options]
    if name in FIGURES:
        command += ["--output", str(figures / f"{name}.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{name}:\n{run.stderr}")
    return [line for line in run.stdout.splitlines() if not line.startswith("figure: ")]


def main() -> None:
    """Run all examples, and print and store their output."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--uses", nargs="+", choices=USES, default=list(USES))
    parser.add_argument("--more", nargs="*", default=[], help="options of the examples")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--json", type=Path, help="write the output to this file")
    arguments = parser.parse_args()
    printed = {}
    for name in arguments.uses:
        printed[name] = run_example(name, arguments.figures, arguments.more)
    reporting.store(arguments.json, printed=printed)
    for name, lines in printed.items():
        reporting.show(f"{name}:", *lines)


if __name__ == "__main__":
    main()
