"""The command line: `qtorch` and `python -m qtorch`. What a subcommand needs is imported when it runs.

`--help` and wrong arguments are answered before torch is imported, which takes seconds: `qtorch/__init__.py` calls
`answer_without_torch` first. So nothing but the standard library is imported here.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import checkpoints, kernels, models
from .arguments import UsageError, check, positive

__all__ = ["answer_without_torch", "main"]

COMMANDS = (*checkpoints.COMMANDS, *models.COMMANDS, *kernels.COMMANDS)

_EPILOG = """examples:
  qtorch quantize meta-llama/ llama-int4/ --recipe int4_weight_only --set group_size=32
  qtorch quantize model/ served/ --recipe int8_weight_only --format compressed-tensors
  qtorch inspect llama-int4/

exit status: 0, 1 for a failure, 2 for wrong arguments"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default of the process: 0, or the exit status 1 for a failure, 2 for wrong use."""
    try:
        given = _parse(sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        return _say(error, 2)
    try:
        if given.threads is not None:
            import torch

            torch.set_num_threads(given.threads)
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
        # An OSError without a file: where the disk is full.
        where = f" (writing {given.dst})" if "dst" in given and getattr(error, "filename", "") is None else ""
        return _say(f"{error}{where}", 1)
    return 0


def answer_without_torch() -> None:
    """End the process if it is the command line, and asks for help or has wrong arguments."""
    if _is_command_line():
        try:
            _parse(sys.argv[1:] if sys.argv[0] != "-m" else sys.orig_argv[sys.orig_argv.index("-m") + 2 :])
        except UsageError as error:
            sys.exit(_say(error, 2))


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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; `run` is the function of the subcommand. Help and arguments that argparse refuses end the
    process; others that are wrong are a `UsageError`."""
    form, what = argparse.RawDescriptionHelpFormatter, "Quantize checkpoints, look into them, and measure them."
    parser = argparse.ArgumentParser(prog="qtorch", description=what, epilog=_EPILOG, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"qtorch {sys.modules['qtorch'].__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, text, add_arguments, run, check_more in COMMANDS:
        about, _, more = text.partition("\n")
        more = f"{about}\n{more}"
        command = commands.add_parser(name, help=about.rstrip("."), description=more, formatter_class=form)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_argument("--threads", type=positive, metavar="N", help="threads of the CPU; by default all cores")
        add_arguments(command)
        command.set_defaults(run=run, checks=[*filter(None, (check, check_more))])
    given = parser.parse_args(arguments)
    for each in given.checks:
        each(given)
    return given
