"""Every type is written back from the tensors that were read; what is of no type is refused; the recipes have ggml's
numbers, in training and calibration too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("gguf")

import gguf
import numpy as np
from gguf import GGMLQuantizationType

import qtorch
from qtorch import MappingType, ZeroPointDomain
from qtorch.calibration import gptq
from qtorch.checkpoint.formats.gguf.block_types import ENCODED, encode, type_of
from qtorch.checkpoint.formats.gguf.writing import WRITTEN, quantize
from qtorch.kernels.cpu.compiled_library import library
from qtorch.primitives import qdtype
from qtorch.training import convert, qat
from tests.formats.gguf.random_blocks import QUANTIZED, random_bytes
from tests.refusals import refuses

OF_GGUF = {name: recipe for name, recipe in qtorch.recipes.base.RECIPES.items() if name.startswith("gguf_")}
AS_GGML = [
    name for name in OF_GGUF if name != "gguf_iq4_nl" and name[-1] != "k"
]  # the package does not quantize to those


def numbers(name: str, blocks: Tensor) -> Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[name])))


def made(recipe: Any, dtype: torch.dtype = torch.float32, weight: Tensor | None = None) -> Any:
    layer = nn.Linear(512, 64, bias=False, dtype=dtype)
    if weight is not None:
        layer.weight.data = weight.clone()
    qtorch.quantize_(layer, recipe)
    return layer.weight.detach()


@pytest.mark.parametrize("shape", [(6, 512), (3, 2, 256), (0, 256)], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_was_read_is_written(name: str, shape: tuple[int, ...]) -> None:
    assert QUANTIZED.keys() == ENCODED.keys()
    for seed in range(3):
        data = torch.from_numpy(random_bytes(QUANTIZED[name][1], shape, seed))
        tensor = QUANTIZED[name][1].tensor(data.reshape(-1), shape)
        kind, blocks = type_of(tensor)  # type: ignore[arg-type]
        assert kind == name
        assert blocks.shape == data.shape
        if data.numel():
            assert torch.equal(numbers(name, blocks), tensor.dequantize())  # type: ignore[operator]
        # Five digits of base 3 are not every byte.
        assert name == "TQ1_0" or torch.equal(blocks, data)


@pytest.mark.parametrize("name", WRITTEN)
def test_floats_become_every_type(name: str) -> None:
    weight = torch.randn(16, 512)
    kind, data = quantize(weight, name)
    assert kind == name
    real = data.float() if name not in ENCODED else numbers(name, data)
    bits = data.element_size() * 8 * data.numel() / weight.numel()
    # Two values of a block would take one bit; ternary types are for weights that are ternary already.
    assert 6.02 * min(bits, 10) - (16 if "TQ" in name else 8) < qtorch.compute_error(weight, real)


@pytest.mark.parametrize("name", ENCODED)
def test_small_weights_and_zeros(name: str) -> None:
    weight = torch.randn(16, 512)
    weight[1], weight[2, 64:96] = 0, 0
    of_ones, of_small = (numbers(name, quantize(weight * std, name)[1]) / std for std in (1, 2.0**-10))
    assert not of_small[1].any()
    if not name.startswith("TQ"):
        assert not of_small[2, 64:96].any()
        assert abs(qtorch.compute_error(weight, of_small) - qtorch.compute_error(weight, of_ones)) < 1


EXACT = {
    "groups of 128": (qtorch.intx_weight_only("int4", group_size=128), torch.bfloat16, "Q4_0"),
    "rows": (qtorch.int8_weight_only(scale_dtype=torch.float16), torch.float32, "Q8_0"),
    "int6": (qtorch.intx_weight_only("int6"), torch.float16, "Q8_0"),
    "int3": (qtorch.intx_weight_only("int3", group_size=32), torch.float16, "Q4_0"),
    "zero points": (qtorch.int4_weight_only(group_size=32), torch.float16, "Q5_0"),
    "offsets": (qtorch.uintx_weight_only("uint4", 32, zero_point_domain=ZeroPointDomain.OFFSET), torch.float16, "Q4_1"),
    "activations": (qtorch.int8_dynamic_activation_int4_weight(), torch.bfloat16, "Q4_0"),
    "MXFP4": (qtorch.mxfp4_weight_only(), torch.bfloat16, "MXFP4"),
}


@pytest.mark.parametrize("name", EXACT)
def test_other_schemes_with_the_numbers_of_a_type(name: str) -> None:
    recipe, dtype, wanted = EXACT[name]
    weight = made(recipe, dtype)
    kind, blocks = type_of(weight)
    assert kind == wanted
    assert torch.equal(numbers(kind, blocks), weight.dequantize(torch.float32))


def test_groups_and_signed_scales() -> None:
    for granularity in (qtorch.PerGroup(256), qtorch.PerTensor()):
        spec = qtorch.QuantSpec(qdtype("int2"), granularity, scale_dtype=torch.float16, quant_min=-1, quant_max=1)
        weight = qtorch.AffineQuantizedTensor.from_float(torch.randn(4, 512), qtorch.LinearSpec(spec))
        kind, blocks = type_of(weight)
        assert kind == "TQ1_0"
        assert torch.equal(numbers(kind, blocks), weight.dequantize())
        assert torch.equal(numbers("TQ2_0", encode(weight, "TQ2_0")), weight.dequantize())
    with pytest.raises(ValueError, match="its groups have 16 elements, blocks of Q8_0 32"):
        type_of(made(qtorch.intx_weight_only("int4", group_size=16), torch.bfloat16))
    weight = made(qtorch.gguf_q5_0())
    refuses("its codes reach from -16 to 15, those of Q4_0 7", lambda: encode(weight, "Q4_0"))
    weight = torch.randn(64, 512)
    q4_0, plain = made(qtorch.gguf_q4_0(), weight=weight), made(qtorch.intx_weight_only("int4", 32), weight=weight)
    assert q4_0.scheme.weight.mapping is MappingType.SYMMETRIC_SIGNED
    assert (q4_0.scale < 0).any()
    assert (q4_0.scale > 0).any()
    blocks = weight.reshape(64, 16, 32)
    extreme = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    found = q4_0.dequantize().reshape_as(blocks).gather(2, blocks.abs().argmax(2, keepdim=True))
    assert torch.equal(found, (extreme / -8).half().float() * -8)
    assert qtorch.compute_error(weight, q4_0.dequantize()) > qtorch.compute_error(weight, plain.dequantize()) + 0.5


REFUSED = {
    "float32": (qtorch.int4_weight_only(group_size=32), "its scales, in float32, are not numbers of fp16"),
    "NF4": (qtorch.nf4_weight_only(), "no type of GGUF has the numbers of uint4 NF4"),
    "float8": (qtorch.float8_weight_only(), "no type of GGUF has the numbers of float8_e4m3fn"),
    "NVFP4": (qtorch.nvfp4_weight_only(), "no type of GGUF has the numbers of float4_e2m1"),
    "rotated": (qtorch.mxfp4_dynamic_activation_mxfp4_weight(rotated=True), "no type of GGUF has .* rotated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_no_type(name: str) -> None:
    recipe, message = REFUSED[name]
    refuses(message, lambda: type_of(made(recipe)))


@pytest.mark.parametrize("std", [1.0, 0.02, 1e-4])
@pytest.mark.parametrize("name", AS_GGML)
def test_the_numbers_of_ggml(name: str, std: float) -> None:
    """Scales bit for bit; codes are nearer to the weight where they differ."""
    kind, weight = name.removeprefix("gguf_").upper(), torch.randn(64, 512) * std
    ours = made(OF_GGUF[name](), weight=weight)
    data = torch.from_numpy(gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind]))
    theirs: Any = QUANTIZED[kind][1].tensor(data.reshape(-1), weight.shape)
    codes, others = ours.canonical()
    wanted, of_theirs = theirs.canonical()
    for part in of_theirs:
        assert torch.equal(others[part], of_theirs[part])
    different = codes != wanted
    assert int((codes.int() - wanted.int()).abs().max()) <= (1 if std > 0.01 else 3)
    assert float(different.float().mean()) < (0.01 if std > 0.01 else 0.4)
    errors = [(reals.dequantize() - weight)[different].abs() for reals in (ours, theirs)]
    assert (errors[0] <= errors[1] * (1 + 1e-5) + std * 1e-7).all()


@pytest.mark.parametrize("name", AS_GGML)
def test_blocks_of_ggml_again(name: str) -> None:
    """Of weights that are numbers of the type, ggml's quantizer and the recipe make the same bytes."""
    kind = name.removeprefix("gguf_").upper()
    weight = made(OF_GGUF[name](), weight=torch.randn(64, 512)).dequantize()
    found, blocks = type_of(made(OF_GGUF[name](), weight=weight))
    assert found == kind
    assert np.array_equal(blocks.numpy(), gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind]))


@pytest.mark.parametrize("name", OF_GGUF)
def test_a_compiled_kernel_runs(name: str) -> None:
    layer = nn.Linear(512, 64)
    qtorch.quantize_(layer, OF_GGUF[name]())
    is_table = name == "gguf_iq4_nl"
    of_torch = "lut_weight_mm" if is_table else "weight_only_mm" if name == "gguf_q8_0" else "packed_weight_mm"
    kernel = of_torch if library() is None else "cpu_lut_mm" if is_table else "cpu_weight_only_mm"
    for rows in (1, 40):
        with qtorch.kernels.record_kernels() as ran:
            layer(torch.randn(rows, 512))
        assert ran[0] == f"linear:{kernel}"


@pytest.mark.parametrize("name", OF_GGUF)
def test_training_and_calibration_see_the_type(name: str, tmp_path: Path) -> None:
    kind, x = name.removeprefix("gguf_").upper(), torch.randn(64, 512)
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 32))
    before = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    qtorch.quantize_(model, qat(OF_GGUF[name]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # With these inputs, the outputs are the weights.
    model[0].bias.data.zero_()
    trained, reals = model(x).detach(), model[0](torch.eye(512)).detach().t()
    qtorch.quantize_(model, convert())
    assert torch.equal(model[0].weight.dequantize(), reals)
    assert qtorch.compute_error(trained, model(x)) > 100
    trained = model(x)
    assert type_of(model[0].weight.detach())[0] == kind

    qtorch.save_quantized(model, tmp_path / "x.safetensors")
    again = qtorch.load_quantized(
        nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 32)), tmp_path / "x.safetensors"
    )
    assert torch.equal(again(x), trained)

    calibrated, nearest = nn.Linear(512, 256), nn.Linear(512, 256)
    inputs = x @ torch.randn(512, 512) * (torch.rand(512) < 0.2)
    for layer in (calibrated, nearest):
        layer.weight.data, layer.bias.data = before[0].clone(), torch.zeros(256)
    qtorch.quantize_(nearest, OF_GGUF[name]())
    qtorch.quantize_(calibrated, gptq(OF_GGUF[name](), [inputs]))
    assert type_of(calibrated.weight.detach())[0] == kind
    wanted = inputs @ before[0].t()
    assert qtorch.compute_error(wanted, calibrated(inputs)) > qtorch.compute_error(wanted, nearest(inputs)) + 1
