"""ONNX files of quantized models: the types of the weights in them, and their numbers in ONNX Runtime."""

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qtorch
from tests.export.models import Convnet, Llama, Mlp, made
from tests.fast_part import slow_but
from tests.refusals import refuses

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TYPES = {value: name for name, value in onnx.TensorProto.DataType.items()}


def run(path: Path, *inputs: torch.Tensor) -> torch.Tensor:
    """What ONNX Runtime computes in fp32: by default it quantizes the inputs of fused products to 8 bits."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    names = [node.name for node in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0])


def exported(model: torch.nn.Module, inputs: Iterable[torch.Tensor], path: Path, **options: Any) -> Any:
    """The file that `qtorch.export.onnx` writes, checked by onnx."""
    qtorch.export.onnx(model, tuple(inputs), path, **options)
    onnx.checker.check_model(path, full_check=False)
    return onnx.load(path)


def types(file: Any, end: str = "_qdata") -> dict[str, str]:
    """The types of the initializers whose name ends so."""
    return {each.name: TYPES[each.data_type] for each in file.graph.initializer if each.name.endswith(end)}


def operators(file: Any) -> set[str]:
    return {node.op_type for node in file.graph.node}


REAL_ZERO = qtorch.int4_weight_only(group_size=32, zero_point_domain=qtorch.ZeroPointDomain.FLOAT)
SCHEMES = {
    "int8": (qtorch.int8_weight_only(), "INT8", 8, "DequantizeLinear"),
    "int4": (qtorch.int4_weight_only(group_size=32), "UINT4", 4, "DequantizeLinear"),
    "int4, real zero": (REAL_ZERO, "UINT4", 4, "Cast"),
    "int3": (qtorch.intx_weight_only("int3", group_size=32), "INT4", 4, "DequantizeLinear"),
    "uint6": (qtorch.uintx_weight_only("uint6", group_size=32), "UINT8", 8, "DequantizeLinear"),
    "nf4": (qtorch.nf4_weight_only(), "UINT4", 4, "Gather"),
    "tables": (qtorch.lut_weight_only(3), "UINT4", 4, "Gather"),
    "float8": (qtorch.float8_weight_only(), "FLOAT8E4M3FN", 8, "Cast"),
    "mxfp4": (qtorch.mxfp4_weight_only(), "UINT4", 4, "Gather"),
    "nvfp4": (qtorch.nvfp4_weight_only(), "UINT4", 4, "Gather"),
    "fp6": (qtorch.fpx_weight_only(3, 2), "UINT8", 8, "Gather"),
    "W8A8": (qtorch.int8_dynamic_activation_int8_weight(), "UINT8", 8, "MatMulInteger"),
    "W4A8": (qtorch.int8_dynamic_activation_int4_weight(group_size=64), "INT4", 4, "MatMul"),
    "static": (qtorch.int8_static_activation_int8_weight(0.03), "UINT8", 8, "MatMulInteger"),
}


@pytest.mark.parametrize("name", slow_but(["int4", "W8A8"], SCHEMES))
def test_weights_are_integers_in_the_file(name: str, tmp_path: Path) -> None:
    recipe, type_, bits, operator = SCHEMES[name]
    model = made(lambda: Mlp(192))
    floats = copy.deepcopy(model)
    qtorch.quantize_(model, recipe)
    x = torch.randn(2, 5, 192)
    file = exported(model, [x], tmp_path / "model.onnx")
    assert types(file) == {"up.weight_qdata": type_, "down.weight_qdata": type_}
    assert operator in operators(file)
    elements = 2 * 192 * 384
    codes = [len(each.raw_data) for each in file.graph.initializer if each.name.endswith("_qdata")]
    assert sum(codes) == elements * bits // 8
    others = sum(len(each.raw_data) for each in file.graph.initializer) - sum(codes)  # scales, tables, bias
    # Nothing else is large: torch.onnx writes a few hundred bytes for each node, where it comes from.
    nodes = 1000 * len(file.graph.node) + 20_000
    assert (tmp_path / "model.onnx").stat().st_size < sum(codes) + others + nodes < 4 * elements
    y, expected = run(tmp_path / "model.onnx", x), model(x)
    if recipe.linear_spec().activation is not None:  # type: ignore[attr-defined]
        # The same codes and sums: only a code of the second layer can move, since gelu is not the same to the last bit.
        assert qtorch.compute_error(expected, y) > 55
    else:
        assert qtorch.compute_error(expected, y) > 105
    assert qtorch.compute_error(floats(x), y) < 60  # it is quantized


def test_integers_and_stored_weights(tmp_path: Path) -> None:
    """Without a function between that ONNX Runtime approximates."""
    model = made(lambda: torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)))
    qtorch.quantize_(model, qtorch.int8_dynamic_activation_int8_weight())
    x = 3 * torch.randn(4, 256)
    file = exported(model, [x], tmp_path / "model.onnx")
    assert torch.equal(run(tmp_path / "model.onnx", x), model(x))
    # uint8 * uint8 is exact on every processor in ONNX Runtime, unlike uint8 * int8.
    assert types(file) == {"0.weight_qdata": "UINT8", "2.weight_qdata": "UINT8"}
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int8_static_activation_int8_weight(0.03))
    x = torch.randn(3, 64)
    file = exported(model, [x], tmp_path / "model.onnx", activations="qdq")
    kinds = [node.op_type for node in file.graph.node]
    assert kinds.count("QuantizeLinear") == 2
    assert kinds.count("DequantizeLinear") == 4
    assert types(file) == {"up.weight_qdata": "INT8", "down.weight_qdata": "INT8"}
    assert qtorch.compute_error(model(x), run(tmp_path / "model.onnx", x)) > 40
    # (K, N), with the groups along K: what ONNX Runtime fuses into a product with 4-bit weights.
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int4_weight_only(group_size=32))
    file = exported(model, [torch.randn(2, 3, 64)], tmp_path / "model.onnx")
    assert operators(file) == {"DequantizeLinear", "MatMul", "Add", "Gelu"} or "Transpose" not in operators(file)
    shapes = {each.name: tuple(each.dims) for each in file.graph.initializer}
    assert shapes["up.weight_qdata"] == (64, 128)
    scale = next(node.input[1] for node in file.graph.node if node.input[0] == "up.weight_qdata")
    assert shapes[scale] == (2, 128)
    optimized = onnxruntime.SessionOptions()
    optimized.optimized_model_filepath = str(tmp_path / "fused.onnx")
    optimized.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "model.onnx", optimized)
    assert "MatMulNBits" in operators(onnx.load(tmp_path / "fused.onnx"))


@pytest.mark.parametrize("group", slow_but(["integer"], ["integer", "qdq"]))
def test_dynamic_asymmetric_activations(group: str, tmp_path: Path) -> None:
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int8_dynamic_activation_int4_weight())
    x = torch.randn(3, 64)
    file = exported(model, [x], tmp_path / "model.onnx", activations=group)
    assert set(types(file).values()) == {"INT4"}
    assert qtorch.compute_error(model(x), run(tmp_path / "model.onnx", x)) > 50


@pytest.mark.parametrize(("recipe", "activations"), [
    pytest.param(qtorch.int8_weight_only(), "integer", marks=pytest.mark.slow),
    pytest.param(qtorch.int8_dynamic_activation_int8_weight(), "integer", marks=pytest.mark.slow),
    (qtorch.int8_static_activation_int8_weight(0.05), "qdq"),
], ids=["weight-only", "dynamic", "static"])  # fmt: skip
def test_convnet(recipe: Any, activations: str, tmp_path: Path) -> None:
    model = made(Convnet)
    qtorch.quantize_(model, dict.fromkeys(["stem", "grouped", "line", "head"], recipe))
    x = torch.randn(2, 3, 12, 12)
    file = exported(model, [x], tmp_path / "model.onnx", activations=activations)
    assert len(types(file)) == 4
    assert set(types(file).values()) <= {"INT8", "UINT8"}
    assert qtorch.compute_error(model(x), run(tmp_path / "model.onnx", x)) > 45


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "int8", "nf4"])
def test_llama_of_every_length(name: str, tmp_path: Path) -> None:
    """The table of the embedding, tied to the head, is in the file once."""
    model = made(Llama)
    qtorch.quantize_(model, {"embed|head": SCHEMES[name][0], r".*": qtorch.int4_weight_only(group_size=32)})
    length = torch.export.Dim("length", min=2, max=32)
    ids = torch.randint(128, (1, 7))
    file = exported(model, [ids], tmp_path / "model.onnx", dynamic_shapes=({1: length},))
    found = types(file)
    assert len(found) == 8
    assert sorted(found.values()).count(SCHEMES[name][1]) == (1 if name == "int8" else 8)
    assert not [each for each in file.graph.initializer if each.data_type == 1 and math.prod(each.dims) >= 64 * 64]
    for count in (3, 20):
        ids = torch.randint(128, (1, count))
        assert qtorch.compute_error(model(ids), run(tmp_path / "model.onnx", ids)) > 85


def test_torch_onnx_export_takes_the_translations(tmp_path: Path) -> None:
    model = made(Mlp)
    qtorch.quantize_(model, qtorch.int4_weight_only(group_size=32))
    x = torch.randn(3, 64)
    program = torch.onnx.export(
        qtorch.export.portable(model), (x,), dynamo=True, opset_version=21,
        custom_translation_table=qtorch.export.onnx_translations(), verbose=False,
    )  # fmt: skip
    program.save(tmp_path / "model.onnx")
    assert set(types(onnx.load(tmp_path / "model.onnx")).values()) == {"UINT8"}
    assert qtorch.compute_error(model(x), run(tmp_path / "model.onnx", x)) > 105


def test_codes_of_all_values_survive_and_errors(tmp_path: Path) -> None:
    """Every code of int4, the negative ones too."""
    layer = torch.nn.Linear(32, 4, bias=False)
    layer.weight.data = torch.arange(-64, 64).reshape(4, 32).float() / 8
    model = torch.nn.Sequential(layer).eval().requires_grad_(False)
    qtorch.quantize_(model, qtorch.intx_weight_only("int4", group_size=32))
    exported(model, [torch.eye(32)], tmp_path / "model.onnx")
    y = run(tmp_path / "model.onnx", torch.eye(32))
    assert torch.equal(y, model[0].weight.dequantize().t())
    assert np.unique(model[0].weight.plain()[0].numpy()).size == 15
    model = made(Mlp)
    qtorch.quantize_(model, {"up": qtorch.mxfp4_dynamic_activation_mxfp4_weight()})
    with pytest.raises(ValueError, match=r"up\.weight quantizes its input to float4_e2m1"):
        qtorch.export.onnx(model, (torch.randn(2, 64),), tmp_path / "refused.onnx")
    refuses("opset_version is 18", lambda: qtorch.export.onnx(model, (torch.randn(2, 64),), opset_version=18))
    refuses("call quantize_ first", lambda: qtorch.export.onnx(made(Mlp), (torch.randn(2, 64),)))
    assert not list(tmp_path.glob("refused*"))
