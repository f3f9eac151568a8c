"""Loading from a path that another process saves to: the old model or the new one, whole, never a mixture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch import load_quantized

ROOT = Path(qtorch.__file__).parent.parent
LOADS = int(os.environ.get("QTORCH_LOADS", "150"))

SAVES_IN_A_LOOP = """
import itertools, sys, torch
from torch import nn
from qtorch import int8_weight_only, quantize_, save_quantized

models = []
for value in (0.0, 1.0):
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    for layer in layers:
        layer.weight.data.fill_(value)
    models.append(nn.Sequential(*layers))
    quantize_(models[-1], {"[0-2]": int8_weight_only()})
for i in itertools.count():
    save_quantized(models[i % 2], sys.argv[1], max_shard_size=int(sys.argv[2]))
    if i == 0:
        print("ready", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [1, 10_000, 2**30])
@pytest.mark.parametrize("mmap", [True, False])
def test_never_a_mixture(shard_size: int, mmap: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVES_IN_A_LOOP, str(path), str(shard_size)]
    seen = set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as saver:
        try:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "ready\n"
            for attempt in range(100 * LOADS):
                model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
                load_quantized(model, path, mmap=mmap)
                values = {float(v) for layer in model for v in layer.weight.detach().dequantize().unique()}
                assert len(values) == 1
                seen |= values
                if attempt >= LOADS and len(seen) == 2:
                    break
        finally:
            saver.kill()
    assert seen == {0.0, 1.0}


def test_a_root_that_is_replaced_between_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save comes when the root was opened and its shards were not: they are gone, the path has a new checkpoint."""
    path = tmp_path / "model.safetensors"
    old, new = (nn.Linear(8, 8) for _ in range(2))
    qtorch.save_quantized(old, path, max_shard_size=1)
    opened = []
    parse = qtorch.checkpoint.header.Header.parse

    def saves_first(metadata: dict[str, str]) -> object:
        if not opened:
            qtorch.save_quantized(new, path, max_shard_size=1)
        opened.append(metadata)
        return parse(metadata)

    monkeypatch.setattr(qtorch.checkpoint.header.Header, "parse", saves_first)
    model = load_quantized(nn.Linear(8, 8), path)
    assert len(opened) == 2
    assert torch.equal(model.weight, new.weight)
    assert torch.equal(model.bias, new.bias)
