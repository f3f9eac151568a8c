"""Wrong arguments: the error says what was got, what is wanted and what to write instead; the model is unchanged."""

import contextlib
import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import qtorch
from qtorch import int4_weight_only, int8_dynamic_activation_int8_weight, int8_weight_only, primitives, quantize_
from qtorch.model import weight_kinds
from qtorch.recipes.base import Recipe, WeightRecipe
from qtorch.training import MasterWeight, convert, int8_mixed_precision_training, lsq, qat, scheduled_qat
from tests import every_recipe, quantize_model
from tests.attack import training_recipes
from tests.refusals import refuses

INT8 = int8_weight_only()
TRAINED_CODES = qtorch.training.int8_weight_only_quantized_training()
EVERY = [every_recipe.make(name, 32) for name in every_recipe.NAMES]
EVERY += [training_recipes.make(name) for name in (*training_recipes.NAMES, *training_recipes.VARIANTS)]
every = pytest.mark.parametrize("recipe", EVERY, ids=str)


def quantized(layer: nn.Module, recipe: Recipe, example: Tensor | None = None) -> nn.Module:
    """`layer`, its weight by `recipe`; static scales have seen `example`."""
    model = nn.Sequential(layer)
    quantize_(model, {"0": recipe})
    if example is not None and recipe.trains:
        model.train()(example)
    return model


# --- arguments ---


@pytest.mark.parametrize(
    "value", [None, 3, "int8", object(), [], torch.zeros(())], ids=lambda value: type(value).__name__
)
def test_no_public_function_fails_inside(value: object) -> None:
    """Called with one thing for all that it needs, it does what it says or raises an error of its own."""
    tried, rules = 0, list(weight_kinds.RULES)
    for module in (qtorch, qtorch.calibration, qtorch.training, qtorch.kv_cache):
        for function in (getattr(module, name) for name in module.__all__):
            if not callable(function) or inspect.isabstract(function) or not hasattr(function, "__name__"):
                continue
            wanted = inspect.signature(function).parameters.values()
            needed = [p for p in wanted if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
            if needed:
                tried += 1
                with contextlib.suppress(ValueError, TypeError, RuntimeError, OSError):
                    function(*[value] * len(needed))
    assert tried > 60
    assert rules == weight_kinds.RULES


@pytest.mark.parametrize(("words", "make"), [
    ("GemmSpec: lhs takes QuantSpec or None, got 'int8'", lambda: qtorch.training.GemmSpec("int8", "int8")),
    ("GemmSpec: output_dtype .* write torch.float32", lambda: qtorch.training.GemmSpec(output_dtype="float32")),
    ("LinearSpec: activation takes QuantSpec or None", lambda: qtorch.LinearSpec(qtorch.QuantSpec("int8"), "int8")),
    ("KVCacheSpec: recent takes an integer or None", lambda: qtorch.kv_cache.KVCacheSpec(recent="x")),
    ("PackedLayout: axis takes an integer, got None", lambda: qtorch.PackedLayout(None)),
    ("compute_error takes tensors, got list", lambda: qtorch.compute_error([1.0], [1.0])),
    ("parameter_groups: takes a model", lambda: qtorch.training.parameter_groups(None, 1e-3)),
])  # fmt: skip
def test_arguments_of_other_types_are_named(words: str, make: Callable[[], object]) -> None:
    refuses(words, make, TypeError)


# --- inputs ---
SYMMETRIC = qtorch.primitives.MappingType.SYMMETRIC
BLOCKS = ((1, 8), torch.ones(4, 1), None, torch.int8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize(("name", "call"), [
    ("quantize_affine", lambda x: primitives.quantize_affine(x, *BLOCKS)),
    ("fake_quantize_affine", lambda x: primitives.fake_quantize_affine(x, *BLOCKS)),
    ("fake_quantize_affine", lambda x: primitives.fake_quantize_affine_cachemask(x, *BLOCKS)),
    ("learned_step_fake_quantize", lambda x: primitives.learned_step_fake_quantize(x, *BLOCKS)),
    ("choose_qparams_affine", lambda x: primitives.choose_qparams_affine(x, SYMMETRIC, (1, 8), torch.int8)),
    (
        "choose_qparams_affine_with_min_max",
        lambda x: primitives.choose_qparams_affine_with_min_max(x, x, SYMMETRIC, (1, 1), torch.int8),
    ),
    ("lsq_scale", lambda x: primitives.lsq_scale(x, (1, 8), 7)),
    ("quantize_codebook", lambda x: primitives.quantize_codebook(x, *BLOCKS[:2], torch.arange(4.0))),
    ("kmeans_codebook", lambda x: primitives.kmeans_codebook(x, 2)),
    ("quantize_int8_rowwise", qtorch.kernels.quantize_int8_rowwise),
    ("choose_range", qtorch.primitives.QuantSpec("int8").choose_qparams),
])  # fmt: skip
def test_primitives_take_floating_point(name: str, call: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"^{name} takes a floating-point tensor, got {dtype}: input\.float\(\)$"):
        call(torch.ones(4, 8).to(dtype))


@every
def test_another_dtype_than_the_weight_is_an_error(recipe: Recipe) -> None:
    """As for `nn.Linear`; under autocast the input is cast, but fp64 never is."""
    x = torch.randn(2, 64)
    model = quantized(nn.Linear(64, 64), recipe, x)
    for dtype, wanted in {
        torch.bfloat16: "expected an input of dtype torch.float32, which the weight has, got torch.bfloat16: "
        "input.to(torch.float32), model.to(torch.bfloat16), or torch.autocast",
        torch.float16: "got torch.float16: input.to(torch.float32), model.to(torch.float16), or torch.autocast",
        torch.float64: "got torch.float64: input.to(torch.float32)",
        torch.int64: "takes a floating-point input, got torch.int64: input.to(torch.float32)",
    }.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            model(x.to(dtype))
        assert str(caught.value).endswith(wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert {model(rows).dtype for rows in (x, x.bfloat16())} == {torch.bfloat16}
        refuses(r"got torch\.float64", lambda: model(x.double()))
        assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    refuses(r"expected an input of dtype torch\.bfloat16", lambda: model(x))


@pytest.mark.parametrize("recipe", [recipe for recipe in EVERY if recipe.name != "lora_qat"], ids=str)
def test_images_of_another_dtype_than_the_weight_and_none(recipe: Recipe) -> None:
    x = torch.randn(2, 32, 5, 5)
    model = quantized(nn.Conv2d(32, 64, 3), recipe, x)
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        refuses(f"got {dtype}: input.to", lambda dtype=dtype: model(x.to(dtype)), (ValueError, TypeError))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    none = torch.zeros(0, 32, 5, 5, requires_grad=True)
    y = model(none)
    assert y.shape == (0, 64, 3, 3)
    y.sum().backward()
    assert none.grad.shape == none.shape


@pytest.mark.parametrize("recipe", [INT8, qat(INT8), TRAINED_CODES], ids=str)
def test_another_dtype_in_every_product(recipe: Recipe) -> None:
    weight = quantized(nn.Linear(64, 64), recipe)[0].weight
    x = torch.randn(2, 64).bfloat16()
    products = [lambda: x @ weight, lambda: torch.mm(x, weight.t()), lambda: torch.addmm(x[:1], x, weight.t())]
    if recipe.trains:
        products.append(lambda: torch.einsum("mk,nk->mn", x, weight))
    for product in products:
        refuses(r"expected an input of dtype torch\.float32", product)


@pytest.mark.parametrize("recipe", [INT8, int8_dynamic_activation_int8_weight()], ids=str)
def test_a_product_kept_under_autocast_is_not_used_outside(recipe: Recipe) -> None:
    model = quantized(nn.Linear(64, 64), recipe).requires_grad_(False)
    x = torch.randn(2, 64)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
    assert y.dtype == torch.bfloat16
    refuses("expected an input", lambda: model(x.bfloat16()))
    assert model(x).dtype == torch.float32


def test_gradients_under_autocast() -> None:
    """The weight is fp32, what it meets in the backward bf16."""
    for recipe in (INT8, int8_mixed_precision_training(), TRAINED_CODES, qat(INT8)):
        model, x = quantized(nn.Linear(64, 64), recipe), torch.randn(4, 64, requires_grad=True)
        if not recipe.trains:
            model.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
        assert x.grad.dtype == torch.float32
        wanted = model[0].weight.dequantize().detach().sum(0).expand(4, -1)
        assert 20 < qtorch.compute_error(wanted, x.grad) < 80


def takes_embeddings(recipe: Recipe) -> bool:
    if isinstance(recipe, WeightRecipe) and not recipe.trains:
        return recipe.linear_spec().activation is None
    return recipe.name not in ("lora_qat", "scheduled_training")


@pytest.mark.parametrize("recipe", list(filter(takes_embeddings, EVERY)), ids=str)
def test_indices(recipe: Recipe) -> None:
    table = quantized(nn.Embedding(32, 64), recipe, torch.arange(4))
    assert table(torch.zeros(0, dtype=torch.long)).shape == (0, 64)
    assert table(torch.zeros(0, 3, dtype=torch.int32)).shape == (0, 3, 64)
    refuses(r"(?i)indices", lambda: table(torch.zeros(3)), (TypeError, RuntimeError))
    if recipe.name not in ("lsq", "scheduled_qat"):  # which are for nn.Embedding exactly
        bag = quantized(nn.EmbeddingBag(32, 64, mode="sum"), recipe)
        assert bag(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 64)
        with pytest.raises(TypeError, match=r"embedding takes indices in int64 or int32, got torch.float32: ids.long"):
            bag(torch.zeros(2, 3))


@every
def test_on_the_meta_device(recipe: Recipe) -> None:
    model = quantized(nn.Linear(64, 64), recipe, torch.randn(4, 64)).eval().to("meta")
    y = model(torch.zeros(2, 64, device="meta"))
    assert (y.shape, y.device.type) == ((2, 64), "meta")
    fresh = nn.Linear(64, 64, device="meta")
    try:
        quantize_(fresh, recipe)
    except ValueError as error:
        assert "meta" in str(error)  # noqa: PT017
    else:
        assert isinstance(fresh.weight, MasterWeight)
        assert fresh.weight.is_meta


# --- models ---
@pytest.mark.parametrize("layer", [nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNN(8, 8)], ids=str)
def test_recurrent_layers_are_refused_by_name(layer: nn.Module) -> None:
    model = nn.ModuleDict({"fc": nn.Linear(8, 8), "layer": layer})
    before = quantize_model.state_of(model)
    assert [row.name for row in quantize_(model, {".*": INT8}, dry_run=True).quantized] == ["fc.weight"]
    for key in ("layer.weight_ih_l0", r"layer\.weight_ih_l0"):
        with pytest.raises(ValueError, match=rf"weight_ih_l0: is a parameter of {type(layer).__name__}, which"):
            quantize_(model, {key: INT8, ".*": INT8})
    assert quantize_model.same(before, quantize_model.state_of(model))


def test_cells_groups_and_reports() -> None:
    cell, x = nn.LSTMCell(32, 32).eval(), torch.randn(3, 32)
    wanted = cell(x)[0]
    quantize_(cell, dict.fromkeys(("weight_ih", "weight_hh"), INT8))
    with qtorch.kernels.record_kernels() as ran, torch.no_grad():
        y = cell(x)[0]
    assert sum(name.startswith("linear:") for name in ran) >= 2
    assert 25 < qtorch.compute_error(wanted, y) < 70
    refuses(r"uint7, got 4: write torch\.uint4$", lambda: qtorch.uintx_weight_only(4), TypeError)
    refuses(r"got 4: write torch\.int4$", lambda: qtorch.intx_weight_only(4), TypeError)
    refuses(r"got 9$", lambda: qtorch.uintx_weight_only(9), TypeError)
    with pytest.raises(ValueError, match="by a wildcard alone, which selects what multiplies like") as caught:
        quantize_(Moe(), {".*experts.*": INT8})
    assert "matches layers.0.experts.gate_up_proj, layers.0.experts.down_proj, " in str(caught.value)
    pattern = str(caught.value).partition('r"')[2].partition('"')[0]
    assert pattern == r".*\.experts\.(gate_up_proj|down_proj)"
    assert len(quantize_(Moe(), {pattern: INT8}).quantized) == 4
    model = nn.ModuleDict({"a": nn.Linear(34, 8), "b": nn.Linear(32, 8)})
    for recipe in (int4_weight_only(group_size=16), qtorch.mxfp4_weight_only()):
        with pytest.raises(ValueError, match="does not divide") as caught:
            quantize_(model, recipe)
        entry = str(caught.value).splitlines()[-1]
        assert entry in ('"a": None,', '"a": int4_weight_only(group_size=34),  # or None')  # a whole row
    model = Moe()
    first = str(quantize_(model, INT8)).splitlines()[0]
    share = 2 * 4096 / sum(p.numel() for p in model.parameters())
    assert f"layers.*.experts.gate_up_proj ({share:.1%}: a bare parameter of Experts; ask for it by name)" in first
    assert "left in floating point" not in str(quantize_(model, {r".*\.(gate_up_proj|down_proj)": INT8}))


@pytest.mark.parametrize(("model", "wanted"), [
    (nn.Linear(8, 8).state_dict(), "an nn.Module, got a OrderedDict, a state dict it seems; load it into its model"),
    ([nn.Linear(8, 8)], "an nn.Module, got a list; give one model at a time"),
    (None, "an nn.Module, got None"),
    ("model.pt", "an nn.Module, got 'model.pt'; build the model first"),
    (nn.Linear, "an nn.Module, got the class Linear; make one: Linear(...)"),
], ids=["state dict", "list", "none", "path", "class"])  # fmt: skip
@pytest.mark.parametrize("function", [
    lambda model: quantize_(model, INT8),
    qtorch.dequantize_,
    qtorch.explain,
    qtorch.get_model_size_in_bytes,
    lambda model: qtorch.load_quantized(model, "no such file"),
], ids=["quantize_", "dequantize_", "explain", "get_model_size_in_bytes", "load_quantized"])  # fmt: skip
def test_no_model(function: Callable[[object], object], model: object, wanted: str) -> None:
    with pytest.raises(TypeError) as caught:
        function(model)
    assert wanted in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_cuda() -> None:
    refuses("device='cuda' is not available here: ", lambda: quantize_(nn.Linear(8, 8), INT8, device="cuda"))


# --- mappings ---
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 32, 64))
        self.down_proj = nn.Parameter(torch.randn(2, 32, 32))


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(32, 24), "experts": Experts()}) for _ in range(2))
        self.head = nn.Linear(24, 8)


def test_reprs(tmp_path) -> None:
    model = Moe()
    floats = repr(model)
    quantize_(model, {r".*\.gate_up_proj": int4_weight_only(group_size=32), "head": INT8})
    head = "(head): Linear(in_features=24, out_features=8, bias=True, weight=int8 PerRow() symmetric, 8x24, 224 bytes)"
    experts = "Experts(gate_up_proj=uint4 PerGroup(group_size=32) asymmetric, 2x32x64, 2,688 bytes)"
    assert head in repr(model)
    assert experts in repr(model)
    copied = copy.deepcopy(model)
    unpickled = pickle.loads(pickle.dumps(model))
    loaded = Moe()
    loaded.load_state_dict(model.state_dict(), assign=True)
    for other in (copied, unpickled, loaded):
        assert repr(other) == repr(model)
        qtorch.dequantize_(other)
        assert repr(other) == floats
    assert head in repr(model)
    model.head.weight = nn.Parameter(torch.randn(8, 24))
    assert "(head): Linear(in_features=24, out_features=8, bias=True)\n" in repr(model)
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    floats = repr(model)
    quantize_(model, int8_mixed_precision_training())
    assert "weight=in training by output int8" in repr(model)
    quantize_(model, convert())
    shown = repr(model)
    assert "weight=int8 PerRow() symmetric, dynamic activation" in shown
    qtorch.save_quantized(model, tmp_path / "m.safetensors")
    fresh = nn.Sequential(nn.Linear(32, 32))
    assert repr(qtorch.load_quantized(fresh, tmp_path / "m.safetensors")) == shown
    x = torch.randn(2, 32)
    assert torch.compile(fresh, fullgraph=True, backend="aot_eager")(x).equal(model(x))
    assert repr(qtorch.dequantize_(fresh)) == floats


def test_models_are_freed_and_a_repr_of_the_users_own_stays() -> None:
    model = nn.Linear(32, 32)
    quantize_(model, INT8)
    assert "int8" in repr(model)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    model = nn.Linear(8, 8)
    model.extra_repr = str
    quantize_(model, INT8)
    assert repr(model) == "Linear()"
    qtorch.dequantize_(model)
    assert model.extra_repr is str


# --- parametrizations ---
REPARAMETRIZE = {
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "register_parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
}


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", REPARAMETRIZE)
@pytest.mark.parametrize("recipe", [int8_mixed_precision_training(), qat(INT8), INT8], ids=str)
def test_parametrizations_of_a_weight_in_training_are_refused(recipe: Recipe, name: str) -> None:
    """They would compute a plain tensor, and the layer leave low precision."""
    layer = quantized(nn.Linear(32, 32), recipe)[0]
    x, values = torch.randn(4, 32), layer.weight.dequantize().detach().clone()
    wanted = layer(x)
    if not recipe.trains and name == "weight_norm":
        pytest.skip("torch takes the weight out of the layer before it reads it")
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        REPARAMETRIZE[name](layer)
    if recipe.trains and name in ("parametrizations.weight_norm", "register_parametrization", "prune", "weight_norm"):
        assert "the layer would leave low precision" in str(caught.value)
    assert sorted(layer._parameters) == ["bias", "weight"]
    assert type(layer.weight).__name__ == type(quantized(nn.Linear(32, 32), recipe)[0].weight).__name__
    assert torch.equal(layer.weight.dequantize(), values)
    assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize(
    "recipe", [lsq(weight_bits=4, activation_bits=8), scheduled_qat(INT8, start_step=0, freeze_step=10)], ids=str
)
def test_prepared_layers_quantize_what_a_parametrization_computes(recipe: Recipe) -> None:
    x = torch.randn(4, 32)
    model = quantized(nn.Linear(32, 32), recipe, x).eval()
    parametrize.register_parametrization(model[0], "weight", Doubled())
    y = model(x)
    weight = model[0].weight
    assert 8 < qtorch.compute_error(nn.functional.linear(x, weight, model[0].bias), y) < 60, "not that of the floats"
    parametrize.remove_parametrizations(model[0], "weight")
    quantize_(model, convert())
    torch.testing.assert_close(model(x), y)
