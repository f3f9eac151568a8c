"""Folders of other packages, written for tests, and what has to hold of every reader."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qtorch import explain, load_quantized, save_quantized
from qtorch.checkpoint.sources import open_source
from qtorch.dtypes import QuantizedTensor
from tests.refusals import refuses

KERNELS = {
    "cpu_weight_only_mm": {"cpu_weight_only_mm", "packed_weight_mm", "weight_only_mm", "int8_weight_mm"},
    "packed_weight_mm": {"cpu_weight_only_mm", "packed_weight_mm"},
    "weight_only_mm": {"cpu_weight_only_mm", "weight_only_mm"},
    "lut_weight_mm": {"cpu_lut_mm", "lut_weight_mm"},
}
"""A kernel, compiled or not, and the other one of its kind."""


def write(
    folder: Path, tensors: dict[str, Tensor], shards: int = 1, config: Any = None,
    metadata: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """A folder as transformers writes it."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    parts = [names[i::shards] for i in range(shards)]
    files = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    for file, part in zip(files, parts, strict=True):
        save_file({n: tensors[n].contiguous() for n in part}, folder / file, {"format": "pt", **(metadata or {})})
    if shards > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized_config(method: str, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    """The contents of config.json."""
    return {"torch_dtype": dtype, "quantization_config": {"quant_method": method, **more}}


class Matrices(nn.Module):
    """Experts with weights (experts, inputs, outputs), of which the first one multiplies."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[0]


class Layer(nn.Module):
    """A model with one quantized layer (outputs, inputs), or `Matrices`, called ``layer``, beside a plain one."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape[1])
        self.layer = nn.Linear(shape[1], shape[0], bias=False) if len(shape) == 2 else Matrices(*shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def plain_tensors(inputs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"norm.weight": torch.randn(inputs).to(dtype), "norm.bias": torch.randn(inputs).to(dtype)}


def load(folder: Path, shape: tuple[int, ...], mmap: bool = False) -> QuantizedTensor:
    """The weight of ``layer``, from a folder that also has its norm."""
    with torch.device("meta"):
        model = Layer(*shape)
    weight = load_quantized(model, folder, mmap=mmap).layer.weight
    assert isinstance(weight, QuantizedTensor)
    return weight


def refused(folder: Path, shape: tuple[int, ...], words: str) -> None:
    """Check that the weight of ``layer`` cannot be loaded, and that the error says why."""
    refuses(words, lambda: load(folder, shape))


def check(folder: Path, wanted: Tensor, kernel: str, bits: float) -> QuantizedTensor:
    """The weight of ``layer``; everything that holds of every reader is checked.

    Args:
        wanted: its dequantized values, in its logical dtype.
        kernel: what runs for it on a CPU with compiled kernels.
        bits: for each element in memory, at most.
    """
    shape = tuple(wanted.shape)
    weight = load(folder, shape)
    assert weight.dequantize().dtype == wanted.dtype
    assert torch.equal(weight.dequantize(), wanted)
    assert torch.equal(load(folder, shape, mmap=True).dequantize(), wanted)

    with open_source(folder) as source:
        contents = source.contents("layer.weight")
        assert (contents.scheme, contents.shape, contents.dtype) == (weight.scheme, shape, wanted.dtype)
        assert source.names == {"layer.weight", "norm.weight", "norm.bias"}
    # It stays packed, and codes are not all equal.
    assert sum(tensor.nbytes for tensor in weight.inner_tensors.values()) * 8 <= bits * wanted.numel()
    assert len(wanted.unique()) > 2

    model = load_quantized(Layer(*shape), folder)
    x = torch.randn(3, shape[1]).to(wanted.dtype)
    matrix = wanted.mT if wanted.dim() == 2 else wanted[0]
    if wanted.dim() == 2:
        assert explain(weight).kernel in KERNELS.get(kernel, {kernel})
    y, exact = model.layer(x).double(), x.double() @ matrix.double()
    assert 0 < (y - exact).norm() / exact.norm() < 0.02

    again = folder.parent / f"{folder.name}.safetensors"
    save_quantized(model, again)
    saved = load_quantized(Layer(*shape), again).layer.weight
    assert saved.scheme == weight.scheme
    assert all(torch.equal(saved.inner_tensors[name], part) for name, part in weight.inner_tensors.items())
    return weight


def to_dtype(values: list[list[float]], dtype: torch.dtype) -> Tensor:
    """Reals that plain loops computed, rounded once to fp32 as the arithmetic of every format is, then to `dtype`."""
    return torch.tensor(values, dtype=torch.float64).float().to(dtype)


def losses_in_training(model: Any, ids: Tensor) -> list[Tensor]:
    """The losses of four steps of gradient descent on what is trainable of a language model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
    losses = []
    for _ in range(4):
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses
