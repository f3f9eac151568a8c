"""Compile the C++ kernels: ``python -m qtorch.kernels.cpu``."""

import argparse
import os
import sys

from . import build, cache


def main(arguments: list[str] | None = None) -> int:
    """Compile, and say what came of it: the exit status."""
    names = list(build.instruction_sets())
    parser = argparse.ArgumentParser(prog="python -m qtorch.kernels.cpu", description="Compile qtorch's CPU kernels.")
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"instruction sets, of {', '.join(names)}; default: all")
    parser.add_argument(
        "--user", action="store_true", help="into the user's cache; so it is too where the package cannot be written"
    )
    parser.add_argument("--needed", action="store_true", help="the best set of this machine and the portable one alone")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sets if name not in names]:
        parser.error(f"no instruction set {', '.join(unknown)} here; there are {', '.join(names)}")
    directory = build.LIBRARIES
    installed = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if options.user or not os.access(installed, os.W_OK):
        directory = cache.folder()
        if reason := cache.prepare(directory):
            parser.error(reason)
    wanted = build.needed() if options.needed else options.sets
    errors = build.build(directory, names=wanted, say=_say)
    for name in wanted or names:
        _say(f"{name}: {errors.get(name, build.library_path(name, directory))}")
    return bool(errors)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
