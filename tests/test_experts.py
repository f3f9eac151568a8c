"""Experts of a mixture: one matrix each in a checkpoint, one parameter in the model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.checkpoint.sources import Source, open_source
from qtorch.checkpoint.stacked_experts import fuse_experts, is_fused, split_experts
from qtorch.dtypes import QuantizedTensor
from qtorch.recipes.base import WeightRecipe
from tests.refusals import refuses

RECIPES = [
    qtorch.int8_weight_only(),
    qtorch.int4_weight_only(group_size=16),
    qtorch.float8_weight_only(),
    qtorch.float8_weight_only(granularity=qtorch.PerTensor()),
    qtorch.nvfp4_weight_only(),
    qtorch.nf4_weight_only(group_size=32),
    qtorch.int8_static_activation_int8_weight(0.02),
]

FUSED = "layers.0.mlp.experts.gate_up_proj"


def saved(tensors: dict[str, Tensor], path: Path) -> Source:
    qtorch.save_quantized(tensors, path)
    return open_source(path)


def floats(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_fused_experts_have_the_numbers_of_their_matrices(recipe: WeightRecipe | None, path: Path) -> None:
    matrices: dict[str, Tensor] = {}
    for expert in range(3):
        for projection in ("gate_proj", "up_proj"):
            matrix = torch.randn(32, 64) * (1 + expert)
            name = f"layers.0.mlp.experts.{expert}.{projection}.weight"
            matrices[name] = matrix if recipe is None else recipe.apply(matrix)
    source = fuse_experts(saved(matrices, path), [FUSED])
    assert set(source.names) == {FUSED}
    fused = source.tensor(FUSED)
    assert fused.shape == (3, 64, 64)
    assert isinstance(fused, QuantizedTensor) == (recipe is not None)
    assert torch.equal(floats(fused), torch.cat([floats(matrix) for matrix in matrices.values()]).reshape(3, 64, 64))
    contents = source.contents(FUSED)
    assert contents.shape == (3, 64, 64)
    assert contents.nbytes == sum(matrix.nbytes for matrix in matrices.values())
    again = split_experts(FUSED, fused, {"model_type": "qwen3_moe"})
    assert again.keys() == matrices.keys()
    for name, matrix in matrices.items():
        assert torch.equal(floats(again[name]), floats(matrix))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_fused_weight_is_cut_exactly(recipe: WeightRecipe) -> None:
    fused = recipe.apply(torch.randn(2, 64, 64))
    parts = split_experts("mlp.experts.gate_up_proj", fused, {"model_type": "mixtral"})
    assert [name for name in parts if ".0." in name] == [
        "block_sparse_moe.experts.0.w1.weight",
        "block_sparse_moe.experts.0.w3.weight",
    ]
    whole = floats(fused)
    for (name, part), wanted in zip(parts.items(), [*whole[0].chunk(2), *whole[1].chunk(2)], strict=True):
        assert isinstance(part, QuantizedTensor), name
        assert torch.equal(part.dequantize(), wanted)


def test_square_blocks() -> None:
    spec = qtorch.QuantSpec("float8_e4m3fn", qtorch.PerBlock((16, 16)), zero_point_domain=qtorch.ZeroPointDomain.NONE)  # type: ignore[arg-type]
    fused = qtorch.AffineQuantizedTensor.from_float(torch.randn(2, 64, 32), qtorch.LinearSpec(spec))
    parts = split_experts("mlp.experts.gate_up_proj", fused, {})
    assert torch.equal(floats(parts["mlp.experts.1.up_proj.weight"]), fused.dequantize()[1, 32:])
    misfit = qtorch.AffineQuantizedTensor.from_float(torch.randn(2, 48, 32), qtorch.LinearSpec(spec))
    with pytest.raises(ValueError, match=r"mlp\.experts\.gate_up_proj.*24 rows cut through the blocks"):
        split_experts("mlp.experts.gate_up_proj", misfit, {})


def test_mixtral_names(path: Path) -> None:
    block = "layers.0.block_sparse_moe"
    stored = {f"{block}.experts.{e}.{p}.weight": torch.randn(4, 4) for e in (0, 1) for p in ("w1", "w3", "w2")}
    stored |= {f"{block}.gate.weight": torch.randn(2, 4), "norm.weight": torch.randn(4)}
    wanted = [FUSED, "layers.0.mlp.experts.down_proj", "layers.0.mlp.gate.weight", "norm.weight"]
    source = fuse_experts(saved(stored, path), wanted)
    assert set(source.names) == set(wanted)
    assert torch.equal(source.tensor(FUSED)[1, 4:], stored[f"{block}.experts.1.w3.weight"])
    assert torch.equal(source.tensor("layers.0.mlp.gate.weight"), stored[f"{block}.gate.weight"])
    assert source.contents("layers.0.mlp.gate.weight").shape == (2, 4)


def test_nothing_to_fuse_is_the_source_itself(path: Path) -> None:
    source = saved({"weight": torch.zeros(1)}, path)
    assert fuse_experts(source, ["weight", "mlp.experts.down_proj"]) is source


@pytest.mark.parametrize(
    ("of_second", "words"),
    [
        (qtorch.int8_weight_only(), r"mlp\.experts\.down_proj cannot be made from mlp\.experts\.0"),
        (RECIPES[-1], "static activations of the matrices have different scales"),
    ],
)
def test_matrices_that_differ_are_named(of_second: WeightRecipe, words: str, path: Path) -> None:
    first, second = torch.randn(2, 4, 16)
    if of_second is RECIPES[-1]:
        first = qtorch.int8_static_activation_int8_weight(0.1).apply(first)
    stored = {"mlp.experts.0.down_proj.weight": first, "mlp.experts.1.down_proj.weight": of_second.apply(second)}
    refuses(words, lambda: fuse_experts(saved(stored, path), ["mlp.experts.down_proj"]).tensor("mlp.experts.down_proj"))


def test_models_whose_files_hold_fused_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp\.experts\.down_proj: checkpoints of gpt_oss have no matrix per expert"):
        split_experts("mlp.experts.down_proj", torch.randn(2, 4, 4), {"model_type": "gpt_oss"})
    assert is_fused("mlp.experts.down_proj")
    assert not is_fused("mlp.experts.0.down_proj.weight")


def test_a_name_that_a_tied_parameter_lacks(tmp_path: Path) -> None:
    """A file holds a tied tensor once; the model says which names are tied."""
    weight = torch.randn(4, 8)
    qtorch.save_quantized({"a.weight": weight}, tmp_path / "file.safetensors")
    model = nn.ModuleDict({"a": nn.Linear(8, 4, bias=False), "b": nn.Linear(8, 4, bias=False)})
    refuses(r"missing key b\.weight", lambda: qtorch.load_quantized(model, tmp_path / "file.safetensors"))
    model["b"].weight = model["a"].weight
    qtorch.load_quantized(model, tmp_path / "file.safetensors")
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["b"].weight, weight)
