"""Kinds of weights: experts, convolutions, embeddings, and parameters that nothing is known of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import qtorch
from qtorch.checkpoint.sources import Source, open_source
from qtorch.checkpoint.stacked_experts import fuse_experts, is_fused, split_experts
from qtorch.dtypes import AffineQuantizedTensor, QuantizedTensor, TransposedWeight
from qtorch.model.weight_kinds import EXPERTS, LINEAR_IN_OUT, RULES, UNKNOWN, WeightKind, is_router, kind_of
from qtorch.recipes.base import WeightRecipe
from tests.refusals import refuses

INT8 = qtorch.int8_weight_only()


class Mixture(nn.Module):
    """A mixture of experts as transformers marks one, with its router, an embedding and a convolution."""

    is_concatenated = True

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(16, 32), nn.Conv1d(32, 32, 1)
        self.gate, self.head = nn.Linear(32, 4, bias=False), nn.Linear(32, 16)
        self.experts = nn.Module()
        self.experts.is_transposed, self.experts.is_concatenated = is_transposed, True  # type: ignore[assignment]
        self.experts.down_proj = nn.Parameter(torch.randn(4, 32, 32) * torch.linspace(0.01, 1, 32))
        self.is_transposed = is_transposed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.conv(x.mT).mT
        rows = x.flatten(0, 1)
        weight = self.experts.down_proj
        each = torch.stack([rows @ w if self.is_transposed else nn.functional.linear(rows, w) for w in weight])  # type: ignore[union-attr]
        return self.head(torch.einsum("eto,te->to", each, self.gate(rows).softmax(-1)))


def quantized(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if hasattr(p, "scheme")}


@pytest.mark.parametrize(("targets", "found"), [
    ("linear", ["experts.down_proj", "head.weight"]),
    ("experts", ["experts.down_proj"]),
    (["embedding", "router"], ["embed.weight", "gate.weight"]),
    ("all", ["conv.weight", "embed.weight", "experts.down_proj", "gate.weight", "head.weight"]),
], ids=str)  # fmt: skip
def test_words_for_what_is_reached(targets: Any, found: list[str]) -> None:
    for recipe in (INT8, {".*": INT8}):
        model = Mixture(True)
        qtorch.quantize_(model, recipe, targets=targets)
        assert sorted(quantized(model)) == found


def test_routers_and_unknown_modules() -> None:
    model = Mixture(False)
    report = qtorch.quantize_(model, INT8)
    (row,) = [row for row in report.skipped if row.name == "gate.weight"]
    assert row.detail == 'a router, which stays in floating point; ask for it by name, or with targets="all"'
    qtorch.quantize_(model, {"gate": INT8})
    assert "gate.weight" in quantized(model)
    names = {"", "a", "a.gate", "a.experts", "b", "b.gate", "c.router", "c.router.layer"}
    assert {name for name in names if is_router(name, names)} == {"a.gate", "c.router", "c.router.layer"}
    dense = nn.ModuleDict({"gate": nn.Linear(8, 8)})  # of a gated layer, without experts
    qtorch.quantize_(dense, INT8)
    assert quantized(dense) == {"gate.weight"}
    for targets in ("linears", ["linear", 3], 3):
        with pytest.raises(ValueError, match=r'targets is one or some of .*"?all.*got'):
            qtorch.quantize_(nn.Linear(8, 8), INT8, targets=targets)  # type: ignore[arg-type]
    model, x = Strange(), torch.randn(3, 8)
    wanted = model(x).detach()
    uses = qtorch.find_uses(model, x)
    report = qtorch.quantize_(model, INT8, targets=uses)
    assert quantized(model) == {"kernel"}
    assert isinstance(model.kernel, TransposedWeight)
    assert 0 < float((model(x) - wanted).norm() / wanted.norm()) < 0.02
    assert {row.name: row.detail for row in report.skipped} == {
        "both": "took part in products that sum over different axes of it",
        "scaled": "is not multiplied: it took part in mul",
        "table": "is not multiplied: it took part in add",
        "layer_scale": "has shape (16, 1, 1), a vector: it scales elements one by one",
        "unused": "is not multiplied: nothing was done with it",
    }


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_and_uses(is_transposed: bool) -> None:
    model = Mixture(is_transposed)
    weight = model.experts.down_proj.detach().clone()  # type: ignore[union-attr]
    qtorch.quantize_(model, INT8)
    made: Any = model.experts.down_proj
    assert isinstance(made, TransposedWeight) == is_transposed
    assert made.scales()[0].shape == (4, 32, 1)
    error = (made.dequantize() - weight).abs().amax(-2 if is_transposed else -1)
    largest = weight.abs().amax(-2 if is_transposed else -1)
    assert bool((error <= largest / 127 / 2 * 1.001).all())
    assert bool((error > 0).any())
    model = Mixture(is_transposed)
    uses = qtorch.find_uses(model, torch.randint(0, 16, (2, 5)))
    assert uses["embed.weight"].obstacle == "is not multiplied: its rows were looked up"
    assert uses["embed.weight"].lookups == 10
    (of_experts,) = uses["experts.down_proj"].contractions
    assert (of_experts.axis, of_experts.rows) == (-2 if is_transposed else -1, 40)
    assert of_experts.function == ("matmul" if is_transposed else "linear")
    assert uses["conv.weight"].is_convolution
    assert "linear over axis -1, 10 rows" in str(uses)


class Strange(nn.Module):
    """Parameters that nothing is known of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(torch.randn(8, 16))
        self.both = nn.Parameter(torch.randn(16, 16))
        self.scaled = nn.Parameter(torch.randn(16, 16))
        self.table = nn.Parameter(torch.randn(5, 16))
        self.layer_scale = nn.Parameter(torch.ones(16, 1, 1))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,io->bo", x, self.kernel)
        y = (
            torch.vmap(lambda row: torch.matmul(input=row, other=self.both))(y)
            + nn.functional.linear(y, self.both)
            + y @ (self.scaled * 2)
        )
        return (y + self.table[0]) * self.layer_scale.flatten()


@pytest.fixture
def rules() -> Iterator[None]:
    before = list(RULES)
    yield
    RULES[:] = before


@pytest.mark.usefixtures("rules")
def test_kinds_of_other_packages() -> None:
    @qtorch.register_weight_kind
    def mine(module: nn.Module, attribute: str) -> WeightKind | None:
        return LINEAR_IN_OUT if isinstance(module, Strange) and attribute == "kernel" else None

    model, x = Strange(), torch.randn(3, 8)
    assert kind_of(model, "kernel") is LINEAR_IN_OUT
    assert kind_of(model, "both") is UNKNOWN
    qtorch.quantize_(model, INT8)
    assert isinstance(model.kernel, TransposedWeight)
    assert torch.equal(model.kernel.matrix.plain()[1], INT8.apply(Strange().kernel.mT).plain()[1])  # type: ignore[attr-defined]
    model(x)


def test_depthwise_weights_that_are_viewed() -> None:
    """As state-space models do: the weight (C, 1, k) is squeezed, and a parameter (C, k) unsqueezed."""
    conv, x = nn.Conv1d(8, 8, 4, groups=8), torch.randn(2, 8, 20)
    plain = nn.Module()
    plain.weight = nn.Parameter(conv.weight.detach().squeeze(1).clone())
    qtorch.quantize_(conv, INT8, targets="all")
    qtorch.quantize_(plain, {"weight": INT8})
    wanted = conv(x)
    squeezed = conv.weight.squeeze(1)
    assert isinstance(squeezed, AffineQuantizedTensor)
    assert torch.equal(nn.functional.conv1d(x, squeezed.unsqueeze(1), conv.bias, groups=8), wanted)
    assert torch.equal(nn.functional.conv1d(x, plain.weight.unsqueeze(1), conv.bias, groups=8), wanted)
    with pytest.raises(TypeError, match="conv1d takes floats and a ConvWeight"):
        nn.functional.conv1d(x, INT8.apply(torch.randn(8, 8, 4)), None)


def test_axes_in_files_and_names(tmp_path: Path) -> None:
    """A weight that was quantized along one axis does not become that of a layer that contracts another."""
    transformers = pytest.importorskip("transformers.pytorch_utils")
    layer = transformers.Conv1D(8, 8)
    qtorch.quantize_(layer, INT8)
    qtorch.save_quantized(layer, tmp_path / "model.safetensors")
    other = transformers.Conv1D(8, 8)
    qtorch.load_quantized(other, tmp_path / "model.safetensors")
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())
    with pytest.raises(ValueError, match=r"weight is quantized as a weight that is stored as \(inputs, outputs\), but"):
        qtorch.load_quantized(nn.Linear(8, 8), tmp_path / "model.safetensors")
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Conv1D(8, 8)})
    model["b"].weight = model["a"].weight
    refuses(r"a: is shared by a.weight \(linear\) and b.weight .*different axes", lambda: qtorch.quantize_(model, INT8))
    # Asked for by name, they are refused now and not in the first forward pass.
    model = Strange()
    for module in (nn.LSTM(8, 8), nn.GRU(8, 8), nn.Bilinear(8, 8, 8), nn.ConvTranspose1d(8, 8, 3)):
        model.inner = module
        name = "inner." + next(iter(dict(module.named_parameters())))
        with pytest.raises(ValueError, match=rf"{name}: is a parameter of {type(module).__name__}, which has no quant"):
            qtorch.quantize_(model, {name: INT8, "kernel": INT8})
        assert quantized(model) == set()
    refuses(r"layer_scale: has shape \(16, 1, 1\), a vector", lambda: qtorch.quantize_(model, {"layer_scale": INT8}))


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_its_model(name: str, tmp_path: Path) -> None:
    """The same bits as in the model."""
    pytest.importorskip("transformers")
    from tests.zoo.architectures import built

    model, _ = built(name)
    folder = tmp_path / name
    folder.mkdir()
    model.config.save_pretrained(folder)
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else {}
    save_file({k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}, folder / "model.safetensors")
    report = qtorch.quantize_checkpoint(folder, tmp_path / "out.safetensors", qtorch.int4_weight_only(group_size=32))
    qtorch.quantize_(model, {row.name: qtorch.int4_weight_only(group_size=32) for row in report.quantized})
    fresh, _ = built(name)
    qtorch.load_quantized(fresh, tmp_path / "out.safetensors")
    transposed = 0
    for row in report.quantized:
        one, other = fresh.get_parameter(row.name), model.get_parameter(row.name)
        transposed += isinstance(one, TransposedWeight)
        assert type(one) is type(other)
        assert torch.equal(one.dequantize(), other.dequantize()), row.name
    assert transposed >= 4
    assert EXPERTS.name == "experts"


RECIPES = [
    qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=16), qtorch.float8_weight_only(),
    qtorch.float8_weight_only(granularity=qtorch.PerTensor()), qtorch.nvfp4_weight_only(),
    qtorch.nf4_weight_only(group_size=32), qtorch.int8_static_activation_int8_weight(0.02),
]  # fmt: skip

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


def test_blocks_of_experts_and_refused_models() -> None:
    spec = qtorch.QuantSpec("float8_e4m3fn", qtorch.PerBlock((16, 16)), zero_point_domain=qtorch.ZeroPointDomain.NONE)  # type: ignore[arg-type]
    fused = qtorch.AffineQuantizedTensor.from_float(torch.randn(2, 64, 32), qtorch.LinearSpec(spec))
    parts = split_experts("mlp.experts.gate_up_proj", fused, {})
    assert torch.equal(floats(parts["mlp.experts.1.up_proj.weight"]), fused.dequantize()[1, 32:])
    misfit = qtorch.AffineQuantizedTensor.from_float(torch.randn(2, 48, 32), qtorch.LinearSpec(spec))
    with pytest.raises(ValueError, match=r"mlp\.experts\.gate_up_proj.*24 rows cut through the blocks"):
        split_experts("mlp.experts.gate_up_proj", misfit, {})
    with pytest.raises(ValueError, match=r"mlp\.experts\.down_proj: checkpoints of gpt_oss have no matrix per expert"):
        split_experts("mlp.experts.down_proj", torch.randn(2, 4, 4), {"model_type": "gpt_oss"})
    assert is_fused("mlp.experts.down_proj")
    assert not is_fused("mlp.experts.0.down_proj.weight")


def test_names_of_mixtral_and_of_tied_parameters(tmp_path: Path, path: Path) -> None:
    block = "layers.0.block_sparse_moe"
    stored = {f"{block}.experts.{e}.{p}.weight": torch.randn(4, 4) for e in (0, 1) for p in ("w1", "w3", "w2")}
    stored |= {f"{block}.gate.weight": torch.randn(2, 4), "norm.weight": torch.randn(4)}
    wanted = [FUSED, "layers.0.mlp.experts.down_proj", "layers.0.mlp.gate.weight", "norm.weight"]
    source = fuse_experts(saved(stored, path), wanted)
    assert set(source.names) == set(wanted)
    assert torch.equal(source.tensor(FUSED)[1, 4:], stored[f"{block}.experts.1.w3.weight"])
    assert torch.equal(source.tensor("layers.0.mlp.gate.weight"), stored[f"{block}.gate.weight"])
    assert source.contents("layers.0.mlp.gate.weight").shape == (2, 4)
    source = saved({"weight": torch.zeros(1)}, path)
    assert fuse_experts(source, ["weight", "mlp.experts.down_proj"]) is source
    # A file holds a tied tensor once; the model says which names are tied.
    weight = torch.randn(4, 8)
    qtorch.save_quantized({"a.weight": weight}, tmp_path / "file.safetensors")
    model = nn.ModuleDict({"a": nn.Linear(8, 4, bias=False), "b": nn.Linear(8, 4, bias=False)})
    refuses(r"missing key b\.weight", lambda: qtorch.load_quantized(model, tmp_path / "file.safetensors"))
    model["b"].weight = model["a"].weight
    qtorch.load_quantized(model, tmp_path / "file.safetensors")
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["b"].weight, weight)


@pytest.mark.parametrize(("of_second", "words"), [
    (qtorch.int8_weight_only(), r"mlp\.experts\.down_proj cannot be made of mlp\.experts\.0"),
    (RECIPES[-1], "static activations of the matrices have different scales"),
])  # fmt: skip
def test_matrices_that_differ_are_named(of_second: WeightRecipe, words: str, path: Path) -> None:
    first, second = torch.randn(2, 4, 16)
    if of_second is RECIPES[-1]:
        first = qtorch.int8_static_activation_int8_weight(0.1).apply(first)
    stored = {"mlp.experts.0.down_proj.weight": first, "mlp.experts.1.down_proj.weight": of_second.apply(second)}
    refuses(words, lambda: fuse_experts(saved(stored, path), ["mlp.experts.down_proj"]).tensor("mlp.experts.down_proj"))
