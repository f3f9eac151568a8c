"""`portable`: exported programs of operators of torch alone, with the numbers of the model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.integrations.export import portable
from tests import every_recipe, fast_part
from tests.export.models import Convnet, Llama, Mlp, made
from tests.refusals import refuses

# Sums of integers, then the same elementwise operations in fp32.
EXACT = {
    "int8_dynamic_activation_int8_weight", "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int4_weight", "int8_static_activation_int8_weight",
}  # fmt: skip
NAMESPACES = {"aten", "quantized_decomposed", "_operator", "_assert_tensor_metadata"}


def namespaces(program: torch.export.ExportedProgram) -> set[str]:
    """The namespaces of all operators of a program."""
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {call.namespace if hasattr(call, "namespace") else call.__module__ for call in calls}


def operators(program: torch.export.ExportedProgram) -> list[str]:
    return [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("activations", ["integer", pytest.param("qdq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fast_part.slow_but(every_recipe.FAMILIES, every_recipe.NAMES))
def test_every_recipe(name: str, activations: str) -> None:
    model = made(Mlp)
    qtorch.quantize_(model, every_recipe.make(name, group_size=32))
    x = torch.randn(2, 5, 64)
    expected = model(x)
    program = torch.export.export(portable(model, activations), (x,))
    assert namespaces(program) <= NAMESPACES
    y = program.module()(x)
    if name in EXACT and activations == "integer":
        assert torch.equal(y, expected)
    elif activations == "integer" or every_recipe.make(name).linear_spec().activation is None:
        assert qtorch.compute_error(expected, y) > 110
    else:  # a sum in another order can move a code of the second layer
        assert qtorch.compute_error(expected, y) > 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8_dynamic_activation_int8_weight", "int4_weight_only", "nf4_weight_only"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model = made(Mlp).to(dtype)
    qtorch.quantize_(model, every_recipe.make(name, group_size=32))
    x = torch.randn(3, 64, dtype=dtype)
    y = torch.export.export(portable(model), (x,)).module()(x)
    assert y.dtype == dtype
    if name in EXACT:
        assert torch.equal(y, model(x))
    else:
        assert qtorch.compute_error(model(x), y) > 35


@pytest.mark.parametrize("activations", ["integer", "qdq"])
def test_every_batch_size(activations: str) -> None:
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int8_dynamic_activation_int4_weight(act_mapping_type=qtorch.MappingType.SYMMETRIC))
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(portable(model, activations), (torch.randn(3, 64),), dynamic_shapes=({0: rows},))
    for count in (2, 64):
        x = torch.randn(count, 64)
        assert qtorch.compute_error(model(x), program.module()(x)) > 50


def test_weights_and_errors_of_the_ordinary_export() -> None:
    """Nothing stands between the codes and the operator, nor between that and the product."""
    model = made(Mlp)
    qtorch.quantize_(model, {"up": qtorch.int8_weight_only(), "down": qtorch.int4_weight_only(group_size=32)})
    program = torch.export.export(portable(model), (torch.randn(2, 64),))
    assert operators(program) == [
        "dequantize_per_channel.default", "linear.default", "gelu.default", "dequantize_per_channel_group.default",
        "linear.default",
    ]  # fmt: skip
    assert {name: tensor.dtype for name, tensor in program.state_dict.items() if name.endswith("qdata")} == {
        "up.weight_qdata": torch.int8,
        "down.weight_qdata": torch.uint8,
    }
    model = made(Mlp)
    refuses("no weight of this Mlp is quantized; call quantize_ first", lambda: portable(model))
    with pytest.raises(TypeError, match="portable"):
        portable(torch.randn(2))  # type: ignore[type-var]
    qtorch.quantize_(model, qtorch.int8_weight_only())
    refuses("activations is 'integer' or 'qdq', got 'int8'", lambda: portable(model, "int8"))
    qtorch.quantize_(trained := made(Mlp), qtorch.training.int8_mixed_precision_training())
    refuses(r"up.weight is in training; call quantize_\(model, convert\(\)\) first", lambda: portable(trained))
    model, sparse = made(Mlp), qtorch.block_sparse(qtorch.int8_weight_only(), 0.5, 32)
    qtorch.quantize_(model, {"up": qtorch.int8_weight_only(), "down": sparse})  # of one class, with other inner tensors
    x = torch.randn(2, 64)
    program = torch.export.export(model, (x,))
    assert "qtorch" in namespaces(program)
    assert torch.equal(program.module()(x), model(x))


def test_activations_bare_parameters_and_what_is_shared() -> None:
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int8_static_activation_int8_weight(0.03))
    program = torch.export.export(portable(model, "qdq"), (torch.randn(2, 64),))
    assert operators(program)[:4] == [
        "quantize_per_tensor.default", "dequantize_per_tensor.default", "dequantize_per_channel.default",
        "linear.default",
    ]  # fmt: skip
    first = next(node for node in program.graph.nodes if "quantize_per_tensor" in node.name)
    assert first.args[1:5] == (pytest.approx(0.03), 0, -127, 127)
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int8_dynamic_activation_int4_weight())
    program = torch.export.export(portable(model, "qdq"), (torch.randn(2, 64),))
    used = operators(program)
    for name in ("choose_qparams_per_token_asymmetric", "quantize_per_token", "dequantize_per_token"):
        assert used.count(f"{name}.default") == 2
    # XNNPACK takes its 4-bit kernel by these bounds, and asks for zero points.
    groups = [node for node in program.graph.nodes if "dequantize_per_channel_group" in node.name]
    assert [(node.args[3], node.args[4], node.args[6]) for node in groups] == [(-8, 7, 32)] * 2
    assert all(node.args[2] is not None for node in groups)
    model = made(Experts)
    names = ["experts", "conv1d", "attention.in_proj_weight", "attention.out_proj"]
    qtorch.quantize_(model, dict.fromkeys(names, qtorch.int8_weight_only()))
    x = torch.randn(2, 5, 64)
    program = torch.export.export(portable(model), (x,))
    assert namespaces(program) <= NAMESPACES
    assert qtorch.compute_error(model(x), program.module()(x)) > 100
    model = made(Mlp)
    qtorch.quantize_(model, {"up": qtorch.int8_weight_only()})
    weight = model.up.weight
    ready = portable(model)
    assert model.up.weight is weight
    assert type(model.up) is nn.Linear
    assert isinstance(ready.up, nn.Linear)
    assert ready.down.weight is model.down.weight
    assert set(dict(ready.named_buffers())) == {"up.weight_qdata", "up.weight_scale"}


@pytest.mark.parametrize("recipe", [
    qtorch.int8_weight_only(),
    qtorch.float8_weight_only(),
    qtorch.int4_weight_only(group_size=16),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_static_activation_int8_weight(0.05),
], ids=lambda recipe: recipe.name)  # fmt: skip
@pytest.mark.parametrize("activations", ["integer", "qdq"])
def test_convolutions(recipe: qtorch.recipes.base.Recipe, activations: str) -> None:
    model = made(Convnet)
    keys = ["grouped", "line", "head"] if recipe.name == "int4_weight_only" else ["stem", "grouped", "line", "head"]
    qtorch.quantize_(model, dict.fromkeys(keys, recipe))
    x = torch.randn(2, 3, 12, 12)
    program = torch.export.export(portable(model, activations), (x,))
    assert namespaces(program) <= NAMESPACES
    y, expected = program.module()(x), model(x)
    exact = recipe.linear_spec().activation is not None and activations == "integer"  # type: ignore[attr-defined]
    assert torch.equal(y, expected) if exact else qtorch.compute_error(expected, y) > 45
    if recipe.name in ("int8_weight_only", "int8_static_activation_int8_weight") and activations == "qdq":
        for node in program.graph.nodes:
            if "conv" in node.name:
                assert "dequantize_per_channel" in node.args[1].name


@pytest.mark.parametrize("recipe", [
    qtorch.int8_weight_only(),
    qtorch.int4_weight_only(group_size=32),
    qtorch.nf4_weight_only(),
    qtorch.mxfp4_weight_only(),
    qtorch.nvfp4_weight_only(),
], ids=lambda recipe: recipe.name)  # fmt: skip
def test_tied_embeddings(recipe: qtorch.recipes.base.Recipe) -> None:
    model = made(Llama)
    qtorch.quantize_(model, {"embed|head": recipe, r".*": qtorch.int8_weight_only()})
    ready = portable(model)
    assert ready.embed.weight_qdata is ready.head.weight_qdata
    ids = torch.randint(128, (2, 7))
    program = torch.export.export(ready, (ids,))
    assert namespaces(program) <= NAMESPACES
    assert qtorch.compute_error(model(ids), program.module()(ids)) > 90


class Experts(nn.Module):
    """Bare parameters: matrices in one tensor, and one that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 32, 64))
        self.conv1d = nn.Parameter(torch.randn(64, 32))
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([nn.functional.linear(x, self.experts[e]) for e in range(3)]).sum(0) + x @ self.conv1d
        return self.attention(y, y, y, need_weights=False)[0]


@pytest.mark.slow
def test_a_saved_program_runs_without_qtorch(tmp_path: Path) -> None:
    model = made(Mlp)
    qtorch.quantize_(model, {"up": qtorch.int8_dynamic_activation_int4_weight(), "down": qtorch.nf4_weight_only()})
    x = torch.randn(2, 64)
    torch.export.save(torch.export.export(portable(model), (x,)), tmp_path / "model.pt2")
    torch.save((x, model(x)), tmp_path / "numbers.pt")
    code = """
import sys, torch
sys.modules["qtorch"] = None  # an import raises
import torch.ao.quantization.fx._decomposed
x, expected = torch.load("numbers.pt")
y = torch.export.load("model.pt2").module()(x)
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
