"""Checkpoints that vLLM serves: recipes adapted to it, and the kernels that it picks."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch import int8_weight_only, load_quantized, nvfp4_weight_only, quantize_, recipes_for_vllm, save_quantized
from qtorch.checkpoint.formats.blocks import divisor_of, multiplier_of
from qtorch.checkpoint.formats.compressed_tensors.scheme import Args, Group
from qtorch.checkpoint.formats.compressed_tensors.vllm import EMBEDDING, EXPERTS, LINEAR, decide
from qtorch.checkpoint.formats.compressed_tensors.write import serve
from qtorch.recipes.base import WeightRecipe
from qtorch.training import qat
from tests.formats.compressed_tensors.cases import CASES, GROUPS, Case
from tests.formats.compressed_tensors.test_save import Model, floats, same
from tests.refusals import refuses

DYNAMIC = qtorch.int8_dynamic_activation_int8_weight()
RECIPES = [int8_weight_only(), DYNAMIC, qtorch.float8_weight_only(), nvfp4_weight_only()]


def test_what_a_recipe_becomes() -> None:
    recipes = recipes_for_vllm(Model(), int8_weight_only())
    assert set(recipes.values()) == {int8_weight_only(scale_dtype=torch.bfloat16)}
    assert set(recipes_for_vllm(Model().float(), int8_weight_only()).values()) == {int8_weight_only()}
    kept = int8_weight_only(scale_dtype=torch.float32)
    assert set(recipes_for_vllm(Model(), kept).values()) == {kept}
    assert set(recipes_for_vllm(Model(), qtorch.int4_weight_only(group_size=32)).values()) == {
        qtorch.int4_weight_only(group_size=32)
    }
    adapted = recipes_for_vllm(Model(), qat(DYNAMIC))
    assert set(adapted.values()) == {qat(qtorch.int8_dynamic_activation_int8_weight(scale_dtype=torch.bfloat16))}
    assert "lm_head" not in recipes_for_vllm(Model(), int8_weight_only())
    assert "layers.0.mlp.gate_proj" in recipes_for_vllm(Model(), int8_weight_only())
    asked = recipes_for_vllm(Model(), {"lm_head": int8_weight_only(), r"layers\..*": None})
    assert list(asked) == ["lm_head"]


def test_scales_of_nvfp4() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[0].self_attn["v_proj"].weight.mul_(7)
    recipes = recipes_for_vllm(model, nvfp4_weight_only())
    scales = {name.rpartition(".")[2]: recipe.tensor_scale for name, recipe in recipes.items()}  # type: ignore[attr-defined]
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] > scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"]
    assert all(torch.frexp(torch.tensor(scale))[0] == 0.5 for scale in scales.values())
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    quantize_(model, nvfp4_weight_only(tensor_scale=0.5))
    quantize_(model, nvfp4_weight_only(tensor_scale=0.5))
    refuses("already quantized", lambda: quantize_(model, nvfp4_weight_only(tensor_scale=0.25)))
    weight = torch.randn(32, 64)
    weight[3] = 0
    weight[4] *= 1e-9
    made = nvfp4_weight_only(tensor_scale=2.0**-9).apply(weight)
    assert isinstance(made, qtorch.dtypes.QuantizedTensor)
    assert float(made.scale_scale) == 2.0**-9  # type: ignore[attr-defined]
    default = nvfp4_weight_only().apply(weight)
    errors = [float((floats(each) - weight).norm() / weight.norm()) for each in (made, default)]
    assert 0.01 < errors[0] < 1.1 * errors[1]
    # Groups below the smallest scale become zero, as does what is below half the smallest number.
    assert not floats(made)[3:5].any()


@pytest.mark.parametrize("recipe", [
    int8_weight_only(), qtorch.int8_dynamic_activation_int8_weight(), qtorch.float8_weight_only(), nvfp4_weight_only()
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_result_can_be_saved_and_is_near(recipe: WeightRecipe, dtype: torch.dtype, tmp_path: Path) -> None:
    model, original = Model().to(dtype), Model().to(dtype)
    quantize_(model, recipes_for_vllm(model, recipe))
    save_quantized(model, tmp_path / "model", format="compressed-tensors")
    again = Model().to(dtype)
    load_quantized(again, tmp_path / "model")
    assert same(model, again)
    name = "layers.0.mlp.up_proj.weight"
    made, weight = floats(model.get_parameter(name)), original.get_parameter(name)
    error = float((made.float() - weight.float()).norm() / weight.float().norm().detach())
    assert 0.002 < error < (0.12 if "nvfp4" in str(recipe) else 0.04)


@pytest.mark.parametrize(
    ("absmax", "scale"), [(2688.0, 1.0), (2688.1, 2.0), (2687.9, 1.0), (1344.0, 0.5), (0.0, 1.0), (1e-45, 2.0**-126)]
)
def test_shared_tensor_scale(absmax: float, scale: float) -> None:
    assert qtorch.recipes.mx.shared_tensor_scale(absmax) == scale


def test_what_no_kernel_serves(tmp_path: Path) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})
    with torch.no_grad():
        # Scales of groups with all the mantissas.
        model["proj"].weight.copy_(torch.randn(64, 64) * torch.linspace(0.01, 0.2, 64).reshape(-1, 1))
    quantize_(model, nvfp4_weight_only(tensor_scale=9.836715616984293e-05))
    with pytest.raises(ValueError, match=r"proj\.weight: has the scale 9\.83.* for the tensor.* choose a power of two"):
        save_quantized(model, tmp_path / "model", format="compressed-tensors")
    model = nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})
    quantize_(model, qtorch.uintx_weight_only("uint3", group_size=32))
    with pytest.raises(ValueError, match=r"proj\.weight: CompressedTensorsWNA16: vLLM has zero points for codes of 4"):
        save_quantized(model, tmp_path / "model", format="compressed-tensors")
    assert not (tmp_path / "model").exists()


def test_divisors_and_multipliers() -> None:
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.manual_seed(0)
    found = 0
    for _ in range(100):
        multiplier = torch.rand(()) * 1e-4 + 1e-6
        try:
            divisor = divisor_of(multiplier, scales)
        except ValueError:
            continue
        found += 1
        assert torch.equal(scales.float() / divisor, scales.float() * multiplier)
        back = multiplier_of(divisor, scales)
        assert back is not None
        assert torch.equal(back, multiplier)
    assert 5 < found < 60  # some have one, most do not
    for exponent in (-126, -20, 0, 20, 126):
        assert float(divisor_of(torch.tensor(2.0**exponent), scales)) == 2.0**-exponent


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e-40])
def test_a_wrong_scale_is_an_error(scale: float) -> None:
    with pytest.raises(ValueError, match="nvfp4_weight_only: tensor_scale is positive, finite and a normal number"):
        nvfp4_weight_only(tensor_scale=scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_schemes_and_files_of_recipes(tmp_path: Path, case: Case) -> None:
    weight = case.make(torch.randn(64, 64))
    group, scheme = serve("layers.0.mlp.down_proj", weight)
    assert (scheme, group.format) == (case.scheme, case.format)
    if case.of_expert is None:
        refuses("vLLM has no scheme for weights", lambda: serve("layers.0.mlp.experts.0.down_proj", weight))
    else:
        assert serve("layers.0.mlp.experts.0.down_proj", weight)[1] == case.of_expert
    if case.scheme == "CompressedTensorsWNA16" and not weight.scheme.weight.has_zero_point:
        assert serve("model.embed_tokens", weight)[1] == "CompressedTensorsEmbeddingWNA16Int"
    else:
        refuses("vLLM has no scheme", lambda: serve("model.embed_tokens", weight))
    model = nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})
    model["proj"].weight = nn.Parameter(case.make(torch.randn(64, 64)), requires_grad=False)
    save_quantized(model, tmp_path / "model", format="compressed-tensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    (entry,) = config["config_groups"].values()
    inputs = entry["input_activations"]
    group = Group(Args.parse(entry["weights"]), None if inputs is None else Args.parse(inputs), entry["format"])
    assert decide(group) == case.scheme


@pytest.mark.parametrize("word", GROUPS)
def test_what_the_package_writes_by_itself(word: str) -> None:
    """Weights alone: formats with a byte per integer are for quantized inputs."""
    format, weights = GROUPS[word]
    group = Group(Args.parse(weights), None, format)
    refused = "in bytes" in word or word == "naive int8"
    odd = word.startswith("asymmetric") and weights["num_bits"] not in (4, 8)
    if refused or odd:
        refuses("zero points for codes of 4 and 8 bits" if odd else "has no scheme", lambda: decide(group))
        return
    expected = {
        "pack-quantized": "CompressedTensorsWNA16",
        "float-quantized": "CompressedTensorsW8A16Fp8",
        "naive-quantized": "CompressedTensorsW8A16Fp8",
        "mxfp4-pack-quantized": "CompressedTensorsW4A4Mxfp4",
        "mxfp8-quantized": "CompressedTensorsW8A8Mxfp8",
        "nvfp4-pack-quantized": "CompressedTensorsW4A4Fp4(use_a16=True)",
    }
    assert decide(group) == expected[format]


def test_other_tables_and_hopper() -> None:
    """vLLM does not ask for the type of the input before it takes W4A8Fp8 there; the default has a zero point."""
    weights = Args(4, "int", True, "group", 128)
    symmetric = Group(weights, Args(8, "int", True, "token", dynamic=True), "int-quantized")
    asymmetric = Group(weights, Args(8, "int", False, "token", dynamic=True), "int-quantized")
    assert decide(symmetric) == decide(asymmetric) == "CompressedTensorsW4A8Int"
    assert decide(symmetric, capability=90) == "CompressedTensorsW4A8Fp8"
    assert decide(asymmetric, capability=90) == "CompressedTensorsW4A8Int"
    assert decide(symmetric, capability=89) == "CompressedTensorsW4A8Int"
    nvfp4 = Args(4, "float", True, "tensor_group", 16)
    local = Args(4, "float", True, "tensor_group", 16, dynamic="local")
    assert decide(Group(nvfp4, local, "nvfp4-pack-quantized")) == "CompressedTensorsW4A4Fp4"
    mxfp4, fp8 = Args(4, "float", True, "group", 32), Args(8, "float", True, "group", 128, dynamic=True)
    assert decide(Group(mxfp4, fp8, "mxfp4-pack-quantized")) == "CompressedTensorsW4A8Mxfp4"
    int4 = Args(4, "int", True, "token", dynamic=True)
    assert decide(Group(Args(4, "int", True, "channel"), int4, "pack-quantized")) == "CompressedTensorsWNA4Int"
    assert len({decision.scheme for table in (LINEAR, EXPERTS, EMBEDDING) for decision in table}) == 24
