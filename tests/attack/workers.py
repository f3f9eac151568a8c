"""Cases run in processes that may die: `python -m tests.attack.workers MODULE FIRST COUNT`.

MODULE has ``run(seed: int) -> str | None``, what is wrong with the case of that seed; with ``MODULE:PART``, its `run`
gets the part too. A child that is forked from a
process which has imported everything runs one case after the other and says which it begins; when it is killed, by
SIGSEGV say, that case has failed and the next child goes on after it. Only what fails is printed, one JSON list
``[seed, what]`` a line, and the number of cases last.
"""

import functools
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

SECONDS = 60
"""What a case may take; one that takes longer is killed and has failed."""

MEMORY = 12 * 2**30
"""Address space of a child: sizes that a damaged file asks for are refused by the allocator, not by the machine."""

ROOT = Path(__file__).parents[2]


def failures(module: str, first: int, count: int) -> list[str]:
    """What fails of the cases `first` to `first + count - 1` of `module`, each with what reproduces it."""
    command = [sys.executable, "-m", "tests.attack.workers", module, str(first), str(count)]
    # Processes that die leave their files behind.
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines or json.loads(lines[-1]) != count:
        raise RuntimeError(f"{' '.join(command)} did not finish (status {done.returncode}): {done.stdout[-2000:]}")
    found = [json.loads(line) for line in lines[:-1]]
    return [f"python -m tests.attack.workers {module!r} {seed} 1: {what}" for seed, what in found]


def main(name: str, first: int, count: int) -> None:
    module, _, part = name.partition(":")
    os.environ["OMP_NUM_THREADS"] = "1"  # a child has no threads of its parent, and would wait for them
    of_module = importlib.import_module(module).run
    run: Callable[[int], str | None] = functools.partial(of_module, name=part) if part else of_module
    result = sys.stdout
    start, stop = first, first + count
    while start < stop:
        start = _one_child(run, start, stop, result)
    print(count, file=result)


def _one_child(run: Callable[[int], str | None], start: int, stop: int, result: IO[str]) -> int:
    """Run cases from `start` in a child; the case to go on with, `stop` where it came to the end."""
    result.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _cases(run, start, stop, write)
    os.close(write)
    running = start
    with os.fdopen(read) as pipe:
        for line in pipe:
            running, what = json.loads(line)
            if what is not None:
                print(line, end="", file=result)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return stop
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    print(json.dumps([running, f"the process died: {how}"]), file=result)
    return running + 1


def _cases(run: Callable[[int], str | None], start: int, stop: int, write: int) -> None:
    status = 1
    try:
        if "ASAN_OPTIONS" not in os.environ:  # the sanitizer reserves terabytes
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for seed in range(start, stop):
            os.write(write, f"{json.dumps([seed, None])}\n".encode())
            signal.alarm(SECONDS)
            what = run(seed)
            signal.alarm(0)
            if what is not None:
                os.write(write, f"{json.dumps([seed, what])}\n".encode())
        status = 0
    except BaseException as error:
        os.write(write, f"{json.dumps([seed, f'{type(error).__name__}: {error}'])}\n".encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
