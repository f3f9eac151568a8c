"""Two gloo processes for a test: `run` starts a worker in both, `worker` is its main function."""

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SECONDS = 60
"""After which a rank that waits for another in a collective raises."""


def run(name: str, *arguments: str, seconds: float = 240, ranks: int = 2) -> None:
    """Run the file `name` of this folder in `ranks` processes; see `torchrun`."""
    said = torchrun(str(Path(__file__).parent / name), *arguments, seconds=seconds, ranks=ranks)
    for rank in range(ranks):
        assert said.count(f"rank {rank} ok") == 1, said[-3000:]


def torchrun(*arguments: str, seconds: float = 240, ranks: int = 2) -> str:
    """What a command prints that torchrun starts in `ranks` processes.

    Args:
        arguments: of torchrun: a file or ``-m`` and a module, and what it is called with.
        seconds: what it may take.
        ranks: number of processes.

    Raises:
        AssertionError: a rank failed.
        TimeoutExpired: they took longer than `seconds`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def worker(main: Callable[..., None]) -> None:
    """Run `main(*arguments)` as one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    main(*sys.argv[1:])
    print(f"rank {dist.get_rank()} ok", flush=True)
    dist.destroy_process_group()
    # Threads of gloo may outlive it, and abort a process that tears itself down.
    os._exit(0)


@contextlib.contextmanager
def counted_reduces() -> Iterator[list[int]]:
    """Its length is the number of calls of `all_reduce`."""
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce
