"""Lightning and TorchTitan train a quantized model, by their own code and on two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIGHTNING = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from qtorch import int4_weight_only
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.integrations.lightning import QuantizeCallback
from qtorch.training import qat

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.losses = []
    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    data = DataLoader(TensorDataset(x, x[:, :8].clone()), batch_size=8)
    callback = QuantizeCallback(qat(int4_weight_only(group_size=32)), convert_at_end=True)
    module = Module()
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=5, callbacks=[callback],
                      default_root_dir=sys.argv[1], enable_progress_bar=False, enable_model_summary=False, logger=False)
    trainer.fit(module, data)
    assert len(callback.report.quantized) == 2
    assert type(module.layers[0].weight) is AffineQuantizedTensor, type(module.layers[0].weight)
    assert sum(module.losses[-4:]) < 0.7 * sum(module.losses[:4]), module.losses
    torch.save(module.layers[0].weight.dequantize(), f"{sys.argv[1]}/{trainer.global_rank}.pt")
"""


@pytest.mark.slow
def test_lightning_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))
