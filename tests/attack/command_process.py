"""A command that is killed at random moments, or may not write large files; then it is left to finish.

``python -m tests.attack.command_process HOW SEED TIMES DST COMMAND...``, where HOW is "killed" or "full". Prints, after
each attempt, its status ("killed" if it was) and whether DST exists.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from qtorch.cli import main


def attempt(arguments: list[str], seconds: float | None, largest: int | None) -> str:
    """Run the command in a fork of this process, which has imported everything."""
    child = os.fork()
    if child == 0:
        if largest is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
        try:
            status = main(arguments)
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "killed" if code == -signal.SIGKILL else str(code)


def attack(how: str, seed: str, times: str, dst: str, *command: str) -> None:
    import transformers

    assert transformers.AutoModelForCausalLM
    assert transformers.AutoTokenizer
    torch.set_num_threads(1)
    chance, path, arguments = random.Random(seed), Path(dst), list(command)
    begin = time.monotonic()
    assert attempt(arguments, None, None) == "0"
    whole = time.monotonic() - begin
    sizes = [file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path])]
    done = 0
    while done < int(times):
        if path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if how == "killed":
            said = attempt(arguments, chance.uniform(0, whole), None)
        else:
            said = attempt(arguments, None, chance.randrange(max(sizes)))
        done += said != "0"
        print(said, path.exists(), flush=True)
    if not path.exists():
        assert attempt(arguments, None, None) == "0"


if __name__ == "__main__":
    attack(*sys.argv[1:])
