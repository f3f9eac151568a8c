"""`recipes_for_vllm`: what has to be chosen before the codes are."""

from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch import int8_weight_only, load_quantized, nvfp4_weight_only, quantize_, recipes_for_vllm, save_quantized
from qtorch.checkpoint.formats.blocks import divisor_of, multiplier_of
from qtorch.dtypes import QuantizedTensor
from qtorch.recipes.base import WeightRecipe
from qtorch.recipes.mx import shared_tensor_scale
from qtorch.training import qat
from tests.formats.compressed_tensors.test_save import Model, floats, same

DYNAMIC = qtorch.int8_dynamic_activation_int8_weight()
RECIPES = [int8_weight_only(), DYNAMIC, qtorch.float8_weight_only(), nvfp4_weight_only()]


def test_scales_get_the_dtype_of_the_model() -> None:
    recipes = recipes_for_vllm(Model(), int8_weight_only())
    assert set(recipes.values()) == {int8_weight_only(scale_dtype=torch.bfloat16)}
    assert set(recipes_for_vllm(Model().float(), int8_weight_only()).values()) == {int8_weight_only()}
    kept = int8_weight_only(scale_dtype=torch.float32)
    assert set(recipes_for_vllm(Model(), kept).values()) == {kept}
    assert set(recipes_for_vllm(Model(), qtorch.int4_weight_only(group_size=32)).values()) == {
        qtorch.int4_weight_only(group_size=32)
    }


def test_a_recipe_inside_another_is_adapted() -> None:
    adapted = recipes_for_vllm(Model(), qat(DYNAMIC))
    assert set(adapted.values()) == {qat(qtorch.int8_dynamic_activation_int8_weight(scale_dtype=torch.bfloat16))}


def test_the_head_is_left_alone_unless_it_is_asked_for() -> None:
    assert "lm_head" not in recipes_for_vllm(Model(), int8_weight_only())
    assert "layers.0.mlp.gate_proj" in recipes_for_vllm(Model(), int8_weight_only())
    asked = recipes_for_vllm(Model(), {"lm_head": int8_weight_only(), r"layers\..*": None})
    assert list(asked) == ["lm_head"]


def test_joined_layers_share_the_scale_of_nvfp4() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[0].self_attn["v_proj"].weight.mul_(7)
    recipes = recipes_for_vllm(model, nvfp4_weight_only())
    scales = {name.rpartition(".")[2]: recipe.tensor_scale for name, recipe in recipes.items()}  # type: ignore[attr-defined]
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] > scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"]
    assert all(torch.frexp(torch.tensor(scale))[0] == 0.5 for scale in scales.values())


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
    ("absmax", "scale"),
    [(2688.0, 1.0), (2688.1, 2.0), (2687.9, 1.0), (1344.0, 0.5), (0.0, 1.0), (1e-45, 2.0**-126)],
)
def test_shared_tensor_scale(absmax: float, scale: float) -> None:
    assert shared_tensor_scale(absmax) == scale


def test_nvfp4_with_a_given_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    weight[3] = 0
    weight[4] *= 1e-9
    made = nvfp4_weight_only(tensor_scale=2.0**-9).apply(weight)
    assert isinstance(made, QuantizedTensor)
    assert float(made.scale_scale) == 2.0**-9  # type: ignore[attr-defined]
    default = nvfp4_weight_only().apply(weight)
    errors = [float((floats(each) - weight).norm() / weight.norm()) for each in (made, default)]
    assert 0.01 < errors[0] < 1.1 * errors[1]
    # Groups below the smallest scale become zero, as does what is below half the smallest number.
    assert not floats(made)[3:5].any()


def test_a_scale_of_nvfp4_without_an_exact_inverse_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})
    with torch.no_grad():
        # Scales of groups with all the mantissas.
        model["proj"].weight.copy_(torch.randn(64, 64) * torch.linspace(0.01, 0.2, 64).reshape(-1, 1))
    quantize_(model, nvfp4_weight_only(tensor_scale=9.836715616984293e-05))
    with pytest.raises(
        ValueError, match=r"proj\.weight: has the scale 9\.83.*-05 for the tensor.* choose a power of two"
    ):
        save_quantized(model, tmp_path / "model", format="compressed-tensors")


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


def test_a_second_call_continues_only_with_the_same_scale() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    quantize_(model, nvfp4_weight_only(tensor_scale=0.5))
    quantize_(model, nvfp4_weight_only(tensor_scale=0.5))
    with pytest.raises(ValueError, match="already quantized"):
        quantize_(model, nvfp4_weight_only(tensor_scale=0.25))
