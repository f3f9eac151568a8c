"""The command line: `qtorch` and `python -m qtorch`. A subcommand is a file; what it needs is imported when it runs.

`--help` and wrong arguments are answered before torch is imported, which takes seconds: `qtorch/__init__.py` calls
`answer_without_torch` first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .parser import UsageError, parse

__all__ = ["answer_without_torch", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those of the process by default.

    Returns:
        The exit status: 0, 1 for a failure, 2 for wrong use.
    """
    given = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        given.run(given)
    except UsageError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return _say("interrupted", 1)
    except BrokenPipeError:  # what reads the output has read enough
        sys.stderr.close()
        return 1
    except Exception as error:
        if given.debug:
            raise
        return _say(error, 1)
    return 0


def answer_without_torch() -> None:
    """End the process if it is the command line, and asks for help or has wrong arguments."""
    if _is_command_line():
        parse(sys.argv[1:] if sys.argv[0] != "-m" else sys.orig_argv[sys.orig_argv.index("-m") + 2 :])


def _is_command_line() -> bool:
    if not sys.argv:
        return False
    if sys.argv[0] == "-m":
        at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else len(sys.orig_argv)
        return sys.orig_argv[at + 1 : at + 2] == ["qtorch"]
    script = Path(sys.argv[0])
    if script.name != "qtorch" or not script.is_file():
        return False
    # Not a program of the user that has the same name.
    return "from qtorch.cli import main" in script.read_text(errors="replace")


def _say(error: object, status: int) -> int:
    """Print an error in one line."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    print(f"qtorch: error: {text or type(error).__name__}", file=sys.stderr)
    return status
