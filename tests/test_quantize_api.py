"""quantize_ and dequantize_ on small models; tests/zoo has real architectures."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.kernels import record_kernels
from qtorch.recipes.base import Recipe
from tests.quantize_model import INT8, Mlp, same, state_of
from tests.refusals import refuses

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

# recipe, lowest and highest SQNR of a model's output in dB, the linear kernel that runs on fp32
CASES = [
    (INT8, 33, 55, "linear:weight_only_mm"),
    (qtorch.int4_weight_only(group_size=32), 13, 30, "linear:packed_weight_mm"),
    (qtorch.int8_dynamic_activation_int8_weight(), 30, 50, "linear:int8_scaled_mm"),
    (qtorch.int8_dynamic_activation_int4_weight(), 13, 30, "linear:packed_int8_scaled_mm"),
]
every_case = pytest.mark.parametrize(("recipe", "low", "high", "kernel"), CASES, ids=[case[0].name for case in CASES])


def output(model: nn.Module, *args: Tensor) -> tuple[Tensor, list[str]]:
    """What the model gives, and which linear kernels ran."""
    with torch.no_grad(), record_kernels() as ran:
        y = model(*args)
    return y, [name for name in ran if name.startswith("linear:")]


@every_case
def test_small_model(recipe: Recipe, low: float, high: float, kernel: str) -> None:
    model, ids = Mlp(), torch.randint(32, (4, 5))
    model.up.register_forward_hook(lambda module, args, result: None)
    before, wanted = state_of(model), output(model, ids)[0]
    report = qtorch.quantize_(model, recipe)
    y, ran = output(model, ids)
    assert low < qtorch.compute_error(wanted, y) < high
    assert ran == [kernel] * 2
    assert {layer.kernel for layer in report.quantized} == {kernel.partition(":")[2]}
    changed = [name for (name, old), (_, new) in zip(before, state_of(model), strict=True) if old is not new]
    assert changed == ["up.weight", "down.weight"]


@every_case
def test_transformer_encoder(recipe: Recipe, low: float, high: float, kernel: str) -> None:
    """Whose fast path reads the weights itself."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 64)
    wanted = output(model, x)[0]
    assert len(qtorch.quantize_(model, recipe).quantized) == 8
    y, ran = output(model, x)
    assert low - 5 < qtorch.compute_error(wanted, y) < high
    assert ran == [kernel] * 8


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_projection_asked_for_by_name(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=batch_first)
    x = torch.randn(2, 7, 64)
    wanted = attention(x, x, x)[0]
    qtorch.quantize_(attention, {"in_proj_weight": INT8, "out_proj": INT8})
    with record_kernels() as ran:
        y = attention(x, x, x)[0]
    assert 35 < qtorch.compute_error(wanted, y) < 55
    assert ran.count("linear:weight_only_mm") == 2


def test_dry_run_predicts_and_changes_nothing() -> None:
    model = Mlp()
    before = state_of(model)
    versions = [parameter._version for parameter in model.parameters()]
    predicted = qtorch.quantize_(model, INT8, dry_run=True)
    assert same(before, state_of(model))
    assert versions == [parameter._version for parameter in model.parameters()]
    done = qtorch.quantize_(model, INT8)
    assert predicted.layers == done.layers
    assert (predicted.dry_run, done.dry_run) == (True, False)


def test_device() -> None:
    model, ids = Mlp(), torch.randint(32, (4,))
    twin, before = copy.deepcopy(model), state_of(model)
    refuses("device='nowhere' is not available here", lambda: qtorch.quantize_(model, INT8, device="nowhere"))
    assert same(before, state_of(model))
    qtorch.quantize_(model, INT8, device=torch.device("cpu"))
    qtorch.quantize_(twin, INT8, device="cpu")
    assert torch.equal(output(model, ids)[0], output(twin, ids)[0])


@pytest.mark.parametrize("progress", [False, True])
def test_progress(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    qtorch.quantize_(Mlp(), INT8, progress=progress)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert ("quantize: 100%" in captured.err) == progress
    assert progress or not captured.err


def test_dequantize() -> None:
    model, ids = Mlp(), torch.randint(32, (4,))
    original = copy.deepcopy(model)
    qtorch.quantize_(model, {"embed": INT8, ".*": INT8})
    quantized = copy.deepcopy(model)
    assert qtorch.dequantize_(model) is model
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
        assert parameter.shape == original.get_parameter(name).shape
    assert 35 < qtorch.compute_error(original.up.weight, model.up.weight) < 50
    assert qtorch.compute_error(output(quantized, ids)[0], output(model, ids)[0]) > 100
    refuses("dequantize_: no weight of this Mlp is quantized", lambda: qtorch.dequantize_(model))
    # The second time loses nothing: codes of codes.
    qtorch.quantize_(model, INT8)
    assert torch.equal(model.up.weight.plain()[0], quantized.up.weight.plain()[0])
