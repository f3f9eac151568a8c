"""Training by other packages: Lightning, TorchTitan, code of transformers under injection."""

import copy
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtorch import compute_error, quantize_
from qtorch.integrations.qat_schemes import SCHEMES, qat_scheme
from qtorch.kernels import record_kernels
from qtorch.training import convert, fully_quantized, inject, mixed_precision_training
from tests.zoo.architectures import built


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_trains_for_its_recipe(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)), torch.randn(4, 128)
    quantize_(model, qat_scheme(name.upper().replace("FP8", "float8")))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    model(x).square().mean().backward()
    optimizer.step()
    trained = model(x).detach()
    quantize_(model, convert())
    assert str(model[0].weight.scheme.spec.weight) == str(SCHEMES[name]().linear_spec().weight)
    torch.testing.assert_close(model(x), trained, rtol=1e-5, atol=1e-5)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ValueError, match=r"'int3' is not known, want one of int4, int8-int4"):
        qat_scheme("int3")


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


pytest.importorskip("transformers")


SPEC = fully_quantized(8, 8)
LAYERS = 2
# model -> the number of quantized products of a forward, by function; those of attention are added
MODELS: dict[str, Counter[str]] = {
    # query, key, value, attention output, intermediate, output; two layers of the head
    "bert": Counter(linear=6 * LAYERS + 2),
    # the same, the convolution in front, and the classifier
    "vit": Counter(linear=6 * LAYERS + 1, conv2d=1),
    # q, k, v, o and the router; head; up and down of all experts
    "mixtral": Counter(linear=5 * LAYERS + 1, grouped_mm=2 * LAYERS),
}


def build(name: str, attention: str = "sdpa") -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = built(name, attn_implementation=attention)
    return model, {key: value for key, value in batch.items() if key != "attention_mask"}


def by_function(counts: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in counts.items():
        found[name.rpartition(":")[2].partition(".")[0]] += count
    return found


def first(output: Any) -> Tensor:
    return output[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_counts_and_conversion(name: str, attention: str) -> None:
    """All products of the forward, each with both gradients; the converted model gives equal outputs."""
    wanted, (model, inputs) = MODELS[name], build(name, attention)
    products = Counter({"scores": LAYERS, "values": LAYERS}) if attention == "sdpa" else Counter(matmul=2 * LAYERS)
    with torch.no_grad():
        floats = first(model(**inputs))
    injection = inject(SPEC)
    with injection:
        y = first(model(**inputs))
    assert by_function(injection.counts) == wanted + products
    assert 15 < compute_error(floats, y) < 90
    with record_kernels() as kernels:
        y.square().mean().backward()
    assert "int_matmul" in kernels
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    with torch.no_grad():
        trained = y.detach()
        injection.convert(model, **inputs)
        with injection:
            served = first(model(**inputs))
        assert torch.equal(trained, served)
    kept = [p for p in model.parameters() if not p.is_meta and p.dim() > 1]
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    assert len(injection.stored) > 0
    if name != "mixtral":
        assert all(any(p is table for table in tables) or p.dim() == 3 for p in kept)


def test_the_same_as_the_recipe_for_layers() -> None:
    """With attention in full precision, BERT injected is BERT quantized by `quantize_`, forward and gradients."""
    model, inputs = build("bert")
    model = model.bert
    other = copy.deepcopy(model)
    quantize_(other, mixed_precision_training(SPEC))
    with inject({r".*:(scores|values)": None, r".*": SPEC}):
        y = first(model(**inputs))
    z = first(other(**inputs))
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, torch.as_tensor(b.grad)), key
    quantize_(other, convert())
    with torch.no_grad():
        assert torch.equal(first(other(**inputs)), y)


def test_a_model_attached_generates() -> None:
    """The context is entered by the model itself; cached keys and values meet other lengths in each step."""
    model, inputs = build("mixtral")
    injection = inject({"lm_head": None, r".*": SPEC})
    injection.attach(model)
    injection.convert(model, **inputs)
    tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 15)
    assert injection.counts
    assert "lm_head:linear" not in injection.counts
