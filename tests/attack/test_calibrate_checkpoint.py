"""Calibrating a checkpoint takes the memory of a block, not of the model: measured on processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROCESS = [sys.executable, "-m", "tests.attack.calibrate_checkpoint_process"]
HIDDEN, INNER = 1024, 2048
BLOCK = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
"""Bytes of the weights of a block, in fp32."""

pytestmark = pytest.mark.slow


def llama(folder: Path, blocks: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=blocks, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    grown = {}
    for blocks in (2, 8):
        source = llama(tmp_path / f"{blocks}", blocks)
        said = subprocess.run(
            [*PROCESS, str(source), str(tmp_path / f"q{blocks}")],
            cwd=ROOT,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=900,
        ).stdout
        grown[blocks] = int(said.split()[-1])
    print({blocks: f"{size / 2**20:.0f} MiB" for blocks, size in grown.items()}, f"a block: {BLOCK / 2**20:.0f} MiB")
    # Six more blocks are 240 MiB; what is added is the journal, and what the allocator keeps.
    assert grown[8] < grown[2] + BLOCK
    # Two blocks, the statistics and the rounding of `down`, and the codes of a block.
    assert grown[8] < 2 * BLOCK + 4 * (8 * INNER**2 + 8 * HIDDEN * INNER) + BLOCK // 4 + 64 * 2**20
