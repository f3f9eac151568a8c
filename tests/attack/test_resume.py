"""A process that calibrates is killed at random moments, and the next one continues: the same bits in the end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROCESS = [sys.executable, "-m", "tests.attack.calibrate_process"]
KILLS = int(os.environ.get("QTORCH_KILLS", "5"))

pytestmark = pytest.mark.slow


def start(folder: Path, result: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*PROCESS, str(folder), str(result)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_killed_and_continued(tmp_path: Path) -> None:
    process = start(tmp_path / "whole", tmp_path / "whole.safetensors")
    begin = time.monotonic()
    process.communicate(timeout=600)
    seconds = time.monotonic() - begin
    assert process.returncode == 0
    wanted = (tmp_path / "whole.safetensors").read_bytes()
    chance, killed, attempts = random.Random(0), 0, 0
    while killed < KILLS or attempts == 0:
        attempts += 1
        folder, result = tmp_path / f"{attempts}", tmp_path / f"{attempts}.safetensors"
        while not result.exists():
            process = start(folder, result)
            try:
                process.communicate(timeout=chance.uniform(0, 0.6 * seconds) + 0.01)
                assert process.returncode == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                killed += 1
        assert result.read_bytes() == wanted
    print(f"killed {killed} times in {attempts} calibrations of {seconds:.1f} s")
