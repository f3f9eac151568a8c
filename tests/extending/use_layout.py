"""What docs/extending/layout.md promises, with its file loaded by `test_pages.py`."""

import warnings
from pathlib import Path

import pytest
import torch
from my_layout import NibblesLayout, nibbles_weight_mm

import qtorch
from qtorch.kernels import record_kernels
from qtorch.kernels.registry import needs_matrix, register
from tests.extending.pages import layers, reloaded

RECIPES = {
    "uint4": qtorch.int4_weight_only(group_size=32, layout=NibblesLayout()),
    "int4": qtorch.intx_weight_only("int4", group_size=32, layout=NibblesLayout()),
    "int3": qtorch.intx_weight_only("int3", group_size=32, layout=NibblesLayout()),
    "uint2": qtorch.uintx_weight_only("uint2", group_size=32, layout=NibblesLayout()),
}
SQNR = {"uint4": (19, 27), "int4": (16, 25), "int3": (10, 18), "uint2": (4, 13)}
"""In dB, of a layer with normal weights: at least, at most."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_a_quantized_layer_runs_its_kernel(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    in_float, quantized = layers(RECIPES[name], 96, 40, dtype)
    x = torch.randn(3, 5, 96, dtype=dtype)
    with record_kernels() as ran, warnings.catch_warnings():
        warnings.simplefilter("error")
        y = quantized(x)
    assert ran == ["linear:nibbles_weight_mm"]
    expected = qtorch.kernels.linear.reference.linear(x, quantized.weight, quantized.bias)
    assert qtorch.compute_error(expected, y) > {torch.float32: 105, torch.float16: 50, torch.bfloat16: 38}[dtype]
    low, high = SQNR[name]
    assert low < qtorch.compute_error(in_float(x), y) < high
    (explained,) = qtorch.explain(quantized, x)
    assert explained.kernel == "nibbles_weight_mm"
    assert str(explained.problem.scheme.layout) == "NibblesLayout()"
    loaded = reloaded(quantized, tmp_path)
    assert loaded.weight.scheme.layout == NibblesLayout()
    assert torch.equal(loaded(x), y)


def test_where_codes_lie() -> None:
    codes = torch.tensor([[-8, 7, -1, 0, 3]], dtype=torch.int8)
    spec = qtorch.LinearSpec(qtorch.QuantSpec("int4"), layout=NibblesLayout())
    weight = qtorch.AffineQuantizedTensor.from_plain(codes, torch.ones(1, 1), None, spec, torch.float32)
    assert weight.qdata.tolist() == [[0x78, 0x0F, 0x03]]
    assert weight.plain()[0].tolist() == codes.tolist()
    assert weight.nbytes == 3 + 4


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="holds codes of up to 4 bits, the weight has int5"):
        qtorch.intx_weight_only("int5", layout=NibblesLayout())


def test_without_a_kernel_the_reference_runs_and_says_so() -> None:
    qtorch.kernels.deregister("linear", "nibbles_weight_mm")
    try:
        _, quantized = layers(RECIPES["uint4"], 96, 40)
        with pytest.warns(UserWarning, match="runs the reference implementation"), record_kernels() as ran:
            quantized(torch.randn(2, 96))
        assert ran == ["linear:reference"]
    finally:
        registered = register("linear", layout="nibbles", activation=(), priority=10, supports=needs_matrix)
        registered(nibbles_weight_mm)
