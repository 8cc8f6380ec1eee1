"""Commands: ``python -m second_order profile train.py`` shows where the time of a step goes.

And ``python -m second_order plan train.py`` what every system would cost, on how many ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from second_order import profiling
from second_order.planning import plan

__all__ = ["main"]

COMMANDS = (profiling.add_command, plan.add_command)
"""Functions that add a command each: its arguments, and as ``run`` what it does with them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: The words of the command line; those of this process if None.
    """
    parser = argparse.ArgumentParser(prog="python -m second_order")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for add in COMMANDS:
        add(commands)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
