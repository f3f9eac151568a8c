"""Which weights are targets, and what is done where a recipe does not fit one."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.utils import prune

import qtorch
from qtorch import int4_weight_only, int8_weight_only, load_quantized, quantize_, quantize_checkpoint, save_quantized
from qtorch.calibration import gptq
from qtorch.dtypes import PaddedWeight, QuantizedTensor, TransposedWeight
from qtorch.model.misfit import Padded
from qtorch.model.targets import Refused, find_targets
from tests.refusals import refuses

INT8, INT4 = int8_weight_only(), int4_weight_only(group_size=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))


class Model(nn.Module):
    """An embedding, two blocks with bare 3-d parameters, a convolution, and a head tied to the embedding or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 16)
        if tied:
            self.head.weight = self.embed.weight


def asked(recipe: object, filter_fn: object = None, model: nn.Module | None = None) -> str:
    """One line for each weight that a recipe was found for."""
    targets = find_targets(model or Model(), recipe, filter_fn)
    return "\n".join(
        f"{' = '.join(slot.name for slot in target.slots)}: {target.recipe}" for target in targets if target.recipe
    )


def names(recipe: object, filter_fn: object = None, model: nn.Module | None = None) -> list[str]:
    return [line.partition(":")[0] for line in asked(recipe, filter_fn, model).splitlines()]


def error(recipe: object, model: nn.Module | None = None) -> str:
    with pytest.raises(Refused) as caught:
        find_targets(model or Model(), recipe, None)
    return str(caught.value)


LINEAR = [*(f"blocks.{i}.{name}_proj.weight" for i in (0, 1) for name in "qk"), "head.weight"]


def test_other_weights_say_why_not() -> None:
    skipped = [target.slots[0] for target in find_targets(Model(), INT8, None) if target.recipe is None]
    assert_expected_inline(
        "\n".join(f"{slot.name}: {slot.reason}" for slot in skipped),
        """\
embed.weight: an embedding; ask for it by name, or with targets="all"
blocks.0.experts: a bare parameter of Block; ask for it by name
blocks.1.experts: a bare parameter of Block; ask for it by name
conv.weight: a convolution; ask for it by name, or with targets="all"
""".rstrip(),
    )
    model = net(64, 48, 8)
    with pytest.raises(ValueError, match="does not divide") as caught:
        quantize_(model, MISFIT_INT4)
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    last = str(caught.value).splitlines()[-1]
    found = re.fullmatch(r'"(\S+)": (.+),  # or None', last)
    quantize_(model, {found[1]: eval(f"qtorch.{found[2]}"), ".*": MISFIT_INT4})
    with pytest.raises(ValueError, match="on_misfit is 'error', 'pad', 'coarser', 'skip', got 'fit'"):
        quantize_(net(8, 8), MISFIT_INT4, on_misfit="fit")  # type: ignore[arg-type]
    data = [torch.randn(4, 72)]
    for recipe in (gptq(MISFIT_INT4, data), qtorch.training.qat(MISFIT_INT4)):
        refuses("72 % 32", lambda recipe=recipe: quantize_(net(72, 8), recipe, on_misfit="pad"))
    refuses("27 % 32", lambda: quantize_(nn.Conv2d(3, 8, 3), MISFIT_INT4, targets="all", on_misfit="pad"))


def test_keys_and_filters() -> None:
    assert_expected_inline(
        asked({"blocks.1.k_proj": INT4, r"blocks\.\d+\.k_proj": None, r"blocks\..*": INT8, "head": INT4}),
        """\
blocks.0.q_proj.weight: int8_weight_only()
blocks.1.q_proj.weight: int8_weight_only()
blocks.1.k_proj.weight: int4_weight_only(group_size=8)
head.weight: int4_weight_only(group_size=8)""",
    )
    targets = find_targets(Model(), {"head": None, ".*": INT8}, None)
    assert next(t for t in targets if t.slots[0].name == "head.weight").slots[0].reason == "None for 'head'"
    seen = []

    def only_heads(module: nn.Module, name: str) -> bool:
        seen.append(name)
        return name == "head" or isinstance(module, nn.Embedding | nn.Conv1d)

    assert names(INT8, only_heads) == ["embed.weight", "conv.weight", "head.weight"]
    layers = [name.removesuffix(".weight") for name in LINEAR]
    assert seen == ["embed", *layers[:-1], "conv", layers[-1]]
    found = names({r"blocks.*": INT8, "head": None}, lambda module, name: name.endswith("q_proj"))
    assert found == ["blocks.0.q_proj.weight", "blocks.1.q_proj.weight"]


@pytest.mark.parametrize(("key", "found"), [
    ("embed", ["embed.weight"]),
    ("embed.weight", ["embed.weight"]),
    (r"emb.*", ["embed.weight"]),
    (r".*embed\.weight", ["embed.weight"]),
    ("blocks.0.experts", ["blocks.0.experts"]),
    (r"blocks\.\d\.experts", ["blocks.0.experts", "blocks.1.experts"]),
    (r".*\.experts", ["blocks.0.experts", "blocks.1.experts"]),
    (r".*exp.*", ["blocks.0.experts", "blocks.1.experts"]),
    ("head.weight", ["head.weight"]),
    (r".*q_proj", ["blocks.0.q_proj.weight", "blocks.1.q_proj.weight"]),
    *((key, ["conv.weight"]) for key in ("conv", "conv.weight", r".*conv", r"c\w+v")),
    # Wildcards reach linear layers only.
    *((key, LINEAR) for key in (".*", r".*\.weight", r".*weight", r"(.*\.)?\w+", r"[a-z0-9._]+", ".*|.*")),
])  # fmt: skip
def test_names_reach_what_they_name(key: str, found: list[str]) -> None:
    assert names({key: INT8}) == found


MATCHES_NO = "matches no linear layer, embedding, convolution or parameter of two or more dimensions. "


@pytest.mark.parametrize(("recipes", "message"), [
    ({"proj": INT8}, f"'proj' {MATCHES_NO}The model has embed, "),
    ({r"blocks\.0": INT8}, rf"'blocks\\.0' {MATCHES_NO}The model has embed, "),  # not the whole name
    ({"head": INT8, "haed": INT8}, f"'haed' {MATCHES_NO}The model has embed, blocks.0.experts, blocks.0.q_proj, "),
    ({"blocks.0": INT8}, f"'blocks.0' {MATCHES_NO}For what is inside it, write 'blocks.0.*' as a regular expression"),
    (
        {r"blocks\..*": INT8, r"blocks\.0\.q_proj": INT4},
        r"'blocks\\.0\\.q_proj': all that it matches is taken by entries before it; the first that matches wins",
    ),
    ({"*.q_proj": INT8}, "'*.q_proj' is neither a name nor a regular expression: nothing to repeat at position 0"),
])  # fmt: skip
def test_keys_that_select_nothing(recipes: dict, message: str) -> None:
    assert error(recipes).startswith(message)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8))
    assert "by entries before it, or stays as it is: 0 is" in error({"1": INT8, ".*": INT4}, model)
    assert error({"weight": INT8}, nn.LayerNorm(8)).endswith(f"{MATCHES_NO}The model has no such weight")


@pytest.mark.parametrize("other", [INT4, None], ids=str)
def test_tied_weights_asked_for_differently(other: object) -> None:
    wanted = f"a tied weight takes one recipe, got different ones: embed: int8_weight_only(), head: {other}"
    assert error({"embed": INT8, "head": other}, Model(tied=True)) == wanted


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("hook", [prune.random_unstructured, nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_makes(hook: Callable[..., object]) -> None:
    hook(layer := nn.Linear(8, 8), "weight", **({"amount": 0.5} if hook is prune.random_unstructured else {}))
    for given in (INT8, {"0": INT8}):
        refuses("0.*: is what a hook makes the weight from", lambda given=given: quantize_(nn.Sequential(layer), given))


def test_parametrized_layers_and_two_names() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    assert names(INT8, model=model) == ["1.weight"]
    assert_expected_inline(
        error({"0": INT8}, model),
        "'0' matches no linear layer, embedding, convolution or parameter of two or more dimensions. "
        "0.parametrizations.weight.original0 is parametrized; "
        "call torch.nn.utils.parametrize.remove_parametrizations first",
    )
    refuses(r"nothing to quantize: .*original0: is parametrized; call torch", lambda: quantize_(model[:1], INT8))
    model = nn.Module()
    model.first = model.second = nn.Linear(8, 8)
    for key in ("first", "second", "second.weight"):
        assert names({key: INT8}, model=model) == ["first.weight = second.weight"]
    assert "first: int8_weight_only(), second: None" in error({"first": INT8, "second": None}, model)
    assert names(INT8, model=Model(tied=True))[0] == "embed.weight = head.weight"
    assert names({"embed": INT8}, model=Model(tied=True)) == ["embed.weight = head.weight"]
    assert names({"embed": INT8, "head": INT8}, model=Model(tied=True)) == ["embed.weight = head.weight"]


class Rescaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(("model", "recipe", "found"), [
    (Model(), INT8, LINEAR),
    (nn.Sequential(Rescaled(8, 8)), INT8, ["0.weight"]),
    (nn.ModuleDict({"b": nn.Linear(8, 8), "a(": nn.Linear(8, 8)}), {"a(": INT8}, ["a(.weight"]),
    (nn.Linear(8, 8), INT8, ["weight"]),
    (nn.Linear(8, 8), {"weight": INT8}, ["weight"]),
    (nn.Embedding(8, 8), {"weight": INT8}, ["weight"]),
])  # fmt: skip
def test_names_of_weights(model: nn.Module, recipe: object, found: list[str]) -> None:
    """Of subclasses, of what is no regular expression, and of a layer alone, which has no name as a module."""
    assert names(recipe, model=model) == found
    assert "'.*' matches weight by a wildcard alone" in error({".*": INT8}, nn.Embedding(8, 8))


GROUPED: list[qtorch.recipes.base.WeightRecipe] = [
    qtorch.int4_weight_only(group_size=32), qtorch.int8_dynamic_activation_int4_weight(),
    qtorch.nf4_weight_only(group_size=32), qtorch.lut_weight_only(bits=3, group_size=32),
    qtorch.mxfp4_dynamic_activation_mxfp4_weight(), qtorch.nvfp4_weight_only(), qtorch.gguf_q4_k(),
]  # fmt: skip
EACH = pytest.mark.parametrize("recipe", GROUPED, ids=str)
MISFIT_INT4 = GROUPED[0]


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(k, n) for k, n in itertools.pairwise(sizes)])


def error_of(model: nn.Module, x: Tensor, wanted: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - wanted).norm() / wanted.norm())


@EACH
def test_padded_groups_have_the_numbers_of_a_weight_with_zeros(recipe: qtorch.recipes.base.WeightRecipe) -> None:
    """Of the product with a weight that has zeros at the end of its rows, and an input that has."""
    model, x = net(72, 48), torch.randn(5, 72)
    longer = nn.Linear({"nvfp4_weight_only": 80, "gguf_q4_k": 256}.get(recipe.name, 96), 48)  # groups of 16, 256, 32
    longer.weight.data = nn.functional.pad(model[0].weight.detach(), (0, longer.in_features - 72))
    longer.bias.data = model[0].bias.detach().clone()
    wanted = model(x).detach()
    quantize_(longer, recipe)
    (row,) = quantize_(model, recipe, on_misfit="pad").quantized
    assert quantize_(model, recipe, on_misfit="pad").quantized == ()
    assert row.detail == f"padded(recipe={recipe}, padding={longer.weight.shape[1] - 72})"
    weight = model[0].weight
    assert isinstance(weight, PaddedWeight)
    assert weight.shape == (48, 72)
    assert torch.equal(weight.dequantize(), longer.weight.dequantize()[:, :72])  # type: ignore[operator]
    assert torch.equal(model(x), longer(nn.functional.pad(x, (0, longer.weight.shape[1] - 72))))
    assert 0 < error_of(model, x, wanted) < 0.4


@pytest.mark.skipif(qtorch.kernels.cpu.compiled_library.library() is None, reason="nothing is built")
@pytest.mark.parametrize(("recipe", "kernel"), [(GROUPED[0], "cpu_weight_only_mm"), (GROUPED[1], "cpu_int8_mm")])
def test_kernels_of_padded_weights(recipe: qtorch.recipes.base.WeightRecipe, kernel: str) -> None:
    model, x = net(72, 48), torch.randn(5, 72)
    (row,) = quantize_(model, recipe, on_misfit="pad").quantized
    assert row.kernel == kernel
    assert [each.kernel for each in qtorch.explain(model)] == [kernel]
    with qtorch.kernels.custom_ops.record_kernels() as ran:
        model(x)
    assert ran[:2] == [f"linear:{kernel}", kernel]
    model(x)
    assert model[0].weight.matrix.fast_linear is not None


def test_views_of_padded_weights() -> None:
    weight: Any = Padded(MISFIT_INT4, 24).apply(torch.randn(3, 48, 72))
    floats = weight.dequantize()
    x = torch.randn(3, 5, 72)
    wanted = torch.bmm(x, floats.mT)
    assert isinstance(weight.mT, TransposedWeight)
    torch.testing.assert_close(torch.bmm(x, weight.mT), wanted)
    torch.testing.assert_close(nn.functional.linear(x[1], weight[1]), wanted[1])
    torch.testing.assert_close(x[1] @ weight[1].t(), wanted[1])
    torch.testing.assert_close(torch.randn(0, 48) @ weight[1], torch.empty(0, 72))
    y = torch.randn(4, 48)
    torch.testing.assert_close(y @ weight[1], y @ floats[1])
    for part, of in ((weight[1:], floats[1:]), (weight[:, 8:16], floats[:, 8:16]), (weight.view(3, 48, 72), floats)):
        assert isinstance(part, PaddedWeight)
        assert torch.equal(part.dequantize(), of)
    assert torch.equal(weight.view(1, 3, 48, 72).dequantize()[0], floats)
    for whole in (torch.stack(list(weight)), torch.cat(weight.split(2)), torch.cat(weight.chunk(2, 1), 1)):
        assert whole.scheme == weight.scheme
        assert torch.equal(whole, weight)
    refuses(r"cuts the contracted axis of .*PaddedWeight", lambda: torch.cat([weight, weight], 2))
    refuses(r"cuts the contracted axis of .*PaddedWeight", lambda: weight[..., :32])


def test_padding_along_inputs_and_gradients() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 24), "head": nn.Linear(24, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    quantize_(model, MISFIT_INT4, on_misfit="pad")
    assert model["head"].weight is model["embed"].weight
    ids = torch.tensor([[1, 3], [9, 0]])
    assert torch.equal(model["embed"](ids), nn.functional.embedding(ids, model["head"].weight.dequantize()))
    model = net(72, 48, 31)
    quantize_(model, MISFIT_INT4, on_misfit="pad")
    x = torch.randn(5, 72, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    one, other = (model[i].weight.dequantize() for i in (0, 1))
    torch.testing.assert_close(grad, (torch.ones(5, 31) @ other @ one))
    model, x = net(72, 48, 31), torch.randn(5, 72)
    quantize_(model, MISFIT_INT4, on_misfit="pad")
    program = torch.export.export(qtorch.export.portable(model), (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)
    transformers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    layer, x = transformers.Conv1D(48, 72), torch.randn(5, 72)
    wanted = layer(x).detach()
    weight = layer.weight.detach().clone()
    quantize_(layer, MISFIT_INT4, on_misfit="pad")
    assert isinstance(layer.weight, TransposedWeight)
    assert layer.weight.scheme.padding == 24
    assert 0 < error_of(layer, x, wanted) < 0.2
    assert torch.equal(layer.weight.dequantize().mT, Padded(MISFIT_INT4, 24).apply(weight.mT).dequantize())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("length", "group"), [(72, 24), (48, 16), (64, 32), (40, 8), (31, 31), (7, 7)], ids=lambda n: str(n)
)
def test_coarser_chooses_a_size_that_divides(length: int, group: int) -> None:
    model = net(length, 16)
    (row,) = quantize_(model, MISFIT_INT4, on_misfit="coarser").quantized
    assert row.detail == f"int4_weight_only(group_size={group})"
    model = net(length, 16)
    (row,) = quantize_(model, gptq(MISFIT_INT4, [torch.randn(8, length)]), on_misfit="coarser").quantized
    assert f"int4_weight_only(group_size={group})" in row.detail


def test_skipped_and_first_of_a_tuple() -> None:
    model, x = net(64, 48, 8), torch.randn(5, 64)
    wanted = model(x).detach()
    report = quantize_(model, MISFIT_INT4, on_misfit="skip")
    assert [row.name for row in report.quantized] == ["0.weight"]
    (row,) = report.skipped
    assert row.detail.startswith("on_misfit='skip': block_size (1, 32) does not divide shape (8, 48)")
    assert 0 < error_of(model, x, wanted) < 0.2
    for other in (
        qtorch.gguf_q4_k(),
        qtorch.block_sparse(qtorch.int8_weight_only(), block_size=32),
        qtorch.low_rank(MISFIT_INT4, rank=16),
    ):
        report = quantize_(net(256, 64, 16), other, on_misfit="skip")
        assert [row.name for row in report.quantized + report.skipped] == ["0.weight", "1.weight"]
        word = '"pad" accepts' if other.name == "gguf_q4_k" else '"skip" leaves'
        refuses(f"on_misfit={word}", lambda recipe=other: quantize_(net(64, 16), recipe, on_misfit="coarser"))
    model = net(64, 48, 31, 8)
    recipes = {".*": (MISFIT_INT4, qtorch.int4_weight_only(group_size=16), None)}
    report = quantize_(model, recipes)
    assert [row.detail for row in report.quantized] == [
        "int4_weight_only(group_size=32)",
        "int4_weight_only(group_size=16)",
    ]
    assert [row.detail for row in report.skipped] == ["None is the first of its recipes that fits"]
    assert quantize_(model, recipes).quantized == ()
    with pytest.raises(ValueError, match="2: block_size \\(1, 16\\) does not divide"):
        quantize_(net(64, 48, 31, 8), {".*": recipes[".*"][:2]})
    with pytest.raises(TypeError, match="takes a recipe such as"):
        quantize_(model, {".*": (MISFIT_INT4, "int8")})  # type: ignore[dict-item]
    refuses("takes a recipe such as", lambda: quantize_(model, {".*": ()}), TypeError)


@pytest.mark.parametrize("on_misfit", ["pad", "coarser"])
def test_checkpoints(on_misfit: Any, tmp_path: Path) -> None:
    """The same bits as in the model."""
    model = net(72, 48, 8)
    save_quantized(model, tmp_path / "float.safetensors")
    quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "q.safetensors", MISFIT_INT4, on_misfit=on_misfit)
    fresh = copy.deepcopy(model)
    load_quantized(fresh, tmp_path / "q.safetensors")
    quantize_(model, MISFIT_INT4, on_misfit=on_misfit)
    x = torch.randn(5, 72)
    assert torch.equal(fresh(x), model(x))
