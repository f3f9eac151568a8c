"""The kernels for Arm, in an emulator: their numbers, not their speed. `make arm` says what is missing for it."""

import platform
import warnings

import pytest
import torch

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, PerRow, QuantSpec, compute_error
from qtorch.kernels.cpu import build, compiled_library, variants
from qtorch.kernels.cpu.low_rank import cpu_low_rank_mm
from tests.kernels.cpu.emulated import INSTRUCTION_SETS, MISSING, emulate
from tests.kernels.quantized_weights import ASYMMETRIC, ASYMMETRIC_TOKEN, TOKEN, weight_of
from tests.rounding import assert_same_product

EMULATED = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {' and '.join(MISSING)}: apt-get install g++-aarch64-linux-gnu qemu-user"
    ),
]
SETS = [pytest.param(name, marks=EMULATED) for name in INSTRUCTION_SETS]

WEIGHTS = {
    "int8 row": (QuantSpec("int8", quant_min=-127), 77),
    "uint8 group": (QuantSpec("uint8", PerGroup(64), ASYMMETRIC), 192),
    "int4 group": (QuantSpec("int4", PerGroup(32)), 256),
    "uint4 long group": (QuantSpec("uint4", PerGroup(128), ASYMMETRIC), 1152),
    "int3 row": (QuantSpec("int3", PerRow()), 130),
}


def quantized(name: str, activation: QuantSpec | None = None) -> AffineQuantizedTensor:
    spec, k = WEIGHTS[name]
    return weight_of(spec, (37, k), activation=activation)


@pytest.mark.parametrize("variant", ["dot", "tile"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_int8_activations_have_the_bits_of_the_reference(instruction_set, name, variant):
    for activation in (TOKEN, ASYMMETRIC_TOKEN):
        weight = quantized(name, activation)
        for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (19, torch.float16)):
            x = (torch.randn(rows, weight.shape[1]) + 0.3).to(dtype)
            with emulate(instruction_set) as library, variants.force(variant), qtorch.kernels.record_kernels() as ran:
                y = torch.nn.functional.linear(x, weight.to(dtype))
            assert ran[-1] == f"cpu_int8_mm.{instruction_set}.{variant}"
            assert library.calls[-1] == "int8_mm"
            assert torch.equal(y, qtorch.kernels.linear.reference.linear(x, weight.to(dtype), None))


@pytest.mark.parametrize("instruction_set", SETS)
def test_the_largest_codes_and_no_numbers(instruction_set):
    """What is added for signed products must not overflow, nor saturate."""
    weight = AffineQuantizedTensor.from_float(torch.ones(8, 512), LinearSpec(QuantSpec("int8"), TOKEN))
    signs = torch.ones(4, 512)
    signs[1], signs[2, ::2] = -1, -1
    for variant in ("dot", "tile"):
        with emulate(instruction_set), variants.force(variant):
            y = torch.nn.functional.linear(signs, weight)
        assert torch.equal(y, qtorch.kernels.linear.reference.linear(signs, weight, None))
        assert y[0].eq(-y[1]).all()
    x = torch.randn(3, 256)
    x[1, 7] = torch.nan
    for activation in (None, TOKEN):
        with emulate(instruction_set):
            y = torch.nn.functional.linear(x, quantized("int4 group", activation))
        assert y[1].isnan().all()
        assert y[::2].isfinite().all()


@pytest.mark.parametrize("variant", ["dot", "tile", "fixed"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_weight_only(instruction_set, name, variant):
    for rows, dtype in ((1, torch.float32), (2, torch.bfloat16), (6, torch.float16), (21, torch.float32)):
        weight, bias = quantized(name).to(dtype), torch.randn(37, dtype=dtype)
        x = torch.randn(rows, weight.shape[1], dtype=dtype)
        with emulate(instruction_set) as library, variants.force(variant), qtorch.kernels.record_kernels() as ran:
            y = torch.nn.functional.linear(x, weight, bias)
        assert ran[-1] == f"cpu_weight_only_mm.{instruction_set}.{variant}"
        assert library.calls[-1] == "weight_only_mm"
        real = weight.dequantize(torch.float32)
        exact = torch.nn.functional.linear(x.float(), real, bias.float())
        if dtype == torch.float32:
            assert_same_product(y, exact, x, real, bias)
        # No bound from above: sums of dequantized weights in the order of `exact` have its bits.
        assert compute_error(exact, y.float()) > {torch.float32: 110, torch.float16: 60, torch.bfloat16: 40}[dtype]


@pytest.mark.parametrize("instruction_set", SETS)
def test_whole_layers(instruction_set):
    """Embeddings, convolutions on codes, and attention's and optimizers' kernels are in the same library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, image = torch.nn.Embedding(50, 64), torch.nn.Conv2d(5, 12, 3, padding=1)
        qtorch.quantize_(table, qtorch.int4_weight_only(group_size=32), targets="all")
        recipe = qtorch.int8_dynamic_activation_int8_weight(act_granularity=qtorch.PerAxis(0))
        qtorch.quantize_(image, recipe, targets="all")
        ids, pixels = torch.tensor([3, 49, 0]), torch.randn(2, 5, 9, 11)
        y, x, down, up = (torch.randn(shape).half() for shape in ((5, 37), (5, 600), (9, 600), (37, 9)))
        with compiled_library.use(None):
            rows, features, branch = table(ids), image(pixels), cpu_low_rank_mm(y, x, down, up)
        with emulate(instruction_set) as library:
            assert torch.equal(table(ids), rows)
            assert torch.equal(image(pixels), features)
            assert compute_error(branch, cpu_low_rank_mm(y, x, down, up)) > 70
    assert {"embed", "conv", "low_rank_mm"} <= set(library.calls)


@pytest.mark.parametrize("instruction_set, processor", [
    pytest.param("dotprod", "cortex-a72", marks=EMULATED),
    pytest.param("i8mm", "neoverse-n1", marks=EMULATED),
])  # fmt: skip
def test_each_set_runs_instructions_of_its_own(instruction_set, processor):
    """Which a processor without them refuses."""
    refused = pytest.raises(RuntimeError, match="Illegal instruction")
    with emulate(instruction_set, processor), variants.force("dot"), refused:
        torch.nn.functional.linear(torch.randn(1, 256), quantized("int4 group", TOKEN))


def test_the_set_is_chosen_by_what_the_processor_has(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    chosen = {}
    for has in ({}, {"dot": True}, {"dot": True, "i8mm": True}, {"i8mm": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"neon": True, **has})
        chosen[tuple(has)] = [name for name in build.instruction_sets() if compiled_library.runs_here(name)]
    assert list(chosen.values()) == [["portable"], ["portable", "dotprod"], list(INSTRUCTION_SETS), ["portable"]]
    assert not compiled_library.runs_here("avx2")
    for name in INSTRUCTION_SETS:
        key = variants.key_of("int8", True, True, 1)
        assert variants.choose(name, key, 3) in (*variants.VARIANTS, *variants.OTHER_VARIANTS)
