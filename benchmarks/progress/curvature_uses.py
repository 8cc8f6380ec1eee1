"""What the curvature of a trained model is good for: the four examples, run and kept as they print.

    make curvature-uses

Each runs by itself, on one thread, as its page tells: influence of training images beside models
trained without them, compression beside plain SVD, learning without forgetting beside other
penalties, calibration of a last layer beside a temperature.
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


def printed(name: str, figures: Path, more: list[str]) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, str(ROOT / "examples" / USES[name]), *more]
    if name in FIGURES:
        command += ["--output", str(figures / f"{name}.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{name}:\n{run.stderr}")
    return [line for line in run.stdout.splitlines() if not line.startswith("figure: ")]


def main() -> None:
    """Run all, show what they print, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--uses", nargs="+", choices=USES, default=list(USES))
    parser.add_argument("--more", nargs="*", default=[], help="options of the examples")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    found = {name: printed(name, arguments.figures, arguments.more) for name in arguments.uses}
    reporting.store(arguments.json, printed=found)
    for name, lines in found.items():
        reporting.show(f"{name}:", *lines)


if __name__ == "__main__":
    main()
