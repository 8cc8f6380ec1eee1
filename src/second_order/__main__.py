"""The command ``python -m second_order plan train.py``: what every system would cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from second_order.planning import plan

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: The words of the command line; those of this process if None.
    """
    parser = argparse.ArgumentParser(prog="python -m second_order")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    plan.add_command(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
