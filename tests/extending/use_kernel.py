"""What docs/extending/kernel.md promises, with its file loaded by `test_pages.py`; on CPU by Triton's interpreter."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import my_kernel
import pytest
import torch

import qtorch
from qtorch.kernels import features, record_kernels, register, registry
from tests.extending.pages import layers, reloaded
from tests.kernels.triton.interpreter import install
from tests.rounding import assert_same_product

DEVICE = my_kernel.DEVICE

if DEVICE == "cpu":
    install()
    # The same kernel as on a GPU, for the tests that ask the registry for CUDA kernels and interpret them.
    register(
        "linear", layout="packed", weight=("float5_e2m2", "float5_e3m1"), activation=(), device="cuda", priority=30,
        supports=my_kernel._supports, name="my_float5_linear_on_cuda",
    )(my_kernel.my_float5_linear)  # fmt: skip

FORMATS = {(2, 2): (22, 30), (3, 1): (18, 26)}
"""SQNR in dB of a layer with normal weights: at least, at most."""


def layer(ebits: int, mbits: int, dtype: torch.dtype = torch.float32, n: int = 70, k: int = 100):
    """(float layer, quantized layer, input) of odd sizes."""
    made = layers(qtorch.fpx_weight_only(ebits, mbits), k, n, dtype, DEVICE)
    return (*made, torch.randn(3, 5, k, device=DEVICE, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("ebits", "mbits"), FORMATS)
@torch.no_grad()
def test_a_quantized_layer_runs_it(ebits: int, mbits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    in_float, quantized, x = layer(ebits, mbits, dtype)
    with record_kernels() as ran, warnings.catch_warnings():
        warnings.simplefilter("error")
        y = quantized(x)
    assert ran == ["linear:my_float5_linear", "my_float5_mm"]
    assert (y.dtype, y.shape) == (dtype, (3, 5, 70))
    expected = qtorch.kernels.linear.reference.linear(x, quantized.weight, quantized.bias)
    # The products are exact and their sums in fp32: the results may well be the same bits.
    assert qtorch.compute_error(expected, y) > {torch.float32: 105, torch.float16: 55, torch.bfloat16: 38}[dtype]
    low, high = FORMATS[ebits, mbits]
    assert low < qtorch.compute_error(in_float(x), y) < high
    (explained,) = qtorch.explain(quantized, x)
    assert (explained.kernel, explained.note) == ("my_float5_linear", "decodes 5-bit floats in registers")
    assert dict(explained.rejected)["packed_weight_mm"] == "comes after it"
    assert explained.problem.device == DEVICE
    with record_kernels() as ran:
        assert torch.equal(reloaded(quantized, tmp_path)(x), y)
    assert ran[0] == "linear:my_float5_linear"


@pytest.mark.parametrize(("ebits", "mbits"), FORMATS)
def test_every_code_is_decoded(ebits: int, mbits: int) -> None:
    """All 32 codes, in each of the eight segments; negative zero too."""
    dtype = qtorch.primitives.qdtype(f"float5_e{ebits}m{mbits}")
    codes = torch.stack([torch.arange(32).roll(shift) for shift in range(32)]).repeat(1, 2).to(torch.uint8)
    spec = qtorch.LinearSpec(
        qtorch.QuantSpec(dtype, zero_point_domain=qtorch.primitives.ZeroPointDomain.NONE), layout=qtorch.PackedLayout()
    )
    weight = qtorch.AffineQuantizedTensor.from_plain(codes, torch.ones(32, 1), None, spec, torch.float32).to(DEVICE)
    y = torch.nn.functional.linear(torch.eye(64, device=DEVICE), weight)
    assert torch.equal(y.t().cpu(), dtype.decode(codes))


@pytest.mark.parametrize("shape", [(96,), (1, 96), (0, 96), (33, 96), (2, 1, 4, 96)], ids=str)
@torch.no_grad()
def test_shapes(shape: tuple[int, ...]) -> None:
    _, quantized, _ = layer(2, 2, n=8, k=96)
    x = torch.randn(shape, device=DEVICE)
    expected = qtorch.kernels.linear.reference.linear(x, quantized.weight, quantized.bias)
    assert_same_product(quantized(x), expected, x, quantized.weight.dequantize(), quantized.bias)


@torch.no_grad()
def test_the_fallback_serves_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(spec: qtorch.QuantSpec, dtype: torch.dtype = torch.float32, view=lambda weight: weight) -> str | None:
        linear = qtorch.LinearSpec(spec, layout=qtorch.PackedLayout())
        weight = view(qtorch.AffineQuantizedTensor.from_float(torch.randn(32, 64), linear))
        problem = registry.Problem("linear", weight.scheme, dtype, DEVICE)
        found = {kernel.name: why for kernel, why in registry.candidates(problem)}["my_float5_linear"]
        fallbacks = ("cpu_weight_only_mm", "cpu_transposed_mm", "packed_weight_mm")
        assert found is None or registry.choose(problem).name in fallbacks
        return found

    spec = qtorch.QuantSpec("float5_e2m2", zero_point_domain=qtorch.primitives.ZeroPointDomain.NONE)
    assert reason(spec) is None
    assert "transposed" in reason(spec, view=lambda weight: weight.t())
    assert "one scale for each output channel" in reason(spec.with_granularity(qtorch.PerGroup(32)))
    assert "one scale for each output channel" in reason(spec.with_granularity(qtorch.PerTensor()))
    assert "fp32, fp16 or bf16" in reason(spec, torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(my_kernel, "cuda_lacks", lambda feature: f"needs {feature}")
        registry.forget_choices()
        assert reason(spec) == "needs triton"
    registry.forget_choices()


def test_the_operator_is_well_formed() -> None:
    _, quantized, x = layer(2, 2)
    weight = quantized.weight
    arguments = (x.reshape(-1, 100), weight.qdata, weight.scale, "float5_e2m2")
    torch.library.opcheck(torch.ops.qtorch.my_float5_mm.default, arguments)


@torch.no_grad()
def test_compiled_for_any_batch() -> None:
    _, quantized, x = layer(3, 1)
    compiled = torch.compile(quantized, fullgraph=True, dynamic=True, backend="aot_eager")
    with record_kernels() as ran:
        assert torch.equal(compiled(x), quantized(x))
    assert "my_float5_mm" in ran


COMPILE = """
import json, sys, torch, my_kernel
from tests.kernels.triton.compile_launches import Launch, compile_all
def launches():
    for dtype, capability in ((torch.bfloat16, 80), (torch.float16, 90), (torch.float32, 90)):
        x, codes = torch.ones(16, 256, dtype=dtype), torch.zeros(64, 160, dtype=torch.uint8)
        arguments = x, codes, torch.ones(64, 1), "float5_e2m2"
        yield Launch(str(dtype), lambda: my_kernel.my_float5_mm(*arguments), capability=capability)
json.dump(compile_all(launches()), sys.stdout)
"""


@pytest.mark.skipif(features.cuda_lacks("triton") is not None, reason="needs triton")
def test_it_compiles_for_gpus_that_need_not_be_there(tmp_path: Path) -> None:
    """Tensor cores multiply, the tiles fit, and no sum depends on timing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, kernel in json.loads(done.stdout).items():
        assert any("mma" in i for i in kernel["instructions"]) == (name != "torch.float32"), kernel
        assert kernel["shared"] <= 163 * 1024
        assert not [i for i in kernel["instructions"] if i.startswith(("atom", "red", "cvt.f64"))]
