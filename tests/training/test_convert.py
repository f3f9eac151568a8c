"""What you train is what you serve: the converted model computes what the model in training computed."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import AffineQuantizedTensor, PackedLayout, PerBlock, PerRow, compute_error, quantize_, training
from qtorch.primitives import LSQRule, PerGroup, Rounding
from qtorch.recipes.base import Recipe
from qtorch.training import GemmSpec, TrainingSpec, TrainingWeight, convert, lsq, mixed_precision_training, qat
from qtorch.training.engine.numerics import int8
from qtorch.training.quantization_aware.converted import sums_integers
from tests.every_recipe import OF_QAT, make
from tests.training.small_model import fit, mlp

W4A8 = TrainingSpec(GemmSpec(int8(), qtorch.QuantSpec("int4", PerGroup(32), quant_min=-7)))

BLOCKS = PerBlock((32, 32))
# recipe: (kernel that serves, dtype of the weight's codes, bits of a code)
SERVED = {
    training.int8_mixed_precision_training(): ("int8_scaled_mm", "int8", 8),
    training.switchback_training(): ("int8_scaled_mm", "int8", 8),
    mixed_precision_training(W4A8): ("packed_int8_scaled_mm", "int4", 4),
    training.bitnet_training(): ("packed_int8_scaled_mm", "int2", 2),
    training.int8_tilewise_training(): ("int8_block_mm", "int8", 8),
    mixed_precision_training(training.fully_quantized(granularity=PerGroup(16))): ("int8_block_mm", "int8", 8),
    training.float8_training(): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    training.float8_training("tensorwise"): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    training.float8_training(BLOCKS): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    training.mxfp8_training(): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    training.nvfp4_training(): ("emulated_scaled_mm", "float4_e2m1", 4),
    training.mxfp4_training(): ("emulated_scaled_mm", "float4_e2m1", 4),
    training.int8_weight_only_quantized_training(): ("weight_only_mm", "int8", 8),
    training.int4_weight_only_quantized_training(): ("packed_weight_mm", "int4", 4),
}
INT4 = qtorch.int4_weight_only(group_size=32)
DYNAMIC = qtorch.int8_dynamic_activation_int8_weight
# recipe: SQNR of the served weight in dB, at least and at most
LEARNED = {
    lsq(): (15, 30),
    lsq(2, 2): (4, 15),
    lsq(3, 5, granularity=qtorch.PerTensor()): (9, 25),
    lsq(8, 8): (35, 55),
    lsq(4, 8, PerGroup(32)): (15, 30),
    lsq(activation_offset=True): (15, 30),
    lsq(8, 8, activation_offset=True): (35, 55),
    lsq(weight_init=LSQRule(), activation_init=LSQRule()): (10, 30),
    lsq(weights="clip"): (15, 30),
    training.pact(): (15, 30),
    lsq(4, None): (15, 30),
    lsq(recipe=qtorch.int8_dynamic_activation_int4_weight()): (15, 30),
    lsq(recipe=DYNAMIC(qtorch.MappingType.ASYMMETRIC)): (35, 55),
    lsq(recipe=qtorch.int8_static_activation_int8_weight(0.03)): (35, 55),
    lsq(recipe=qtorch.int8_weight_only()): (35, 55),
    lsq(recipe=INT4): (15, 30),
    lsq(recipe=INT4, weights="clip"): (15, 30),
    lsq(recipe=qtorch.intx_weight_only("int3", 32)): (9, 25),
    lsq(recipe=qtorch.uintx_weight_only("uint3", 32)): (9, 25),
    qat(qtorch.int8_dynamic_activation_int4_weight(), lora_rank=4): (15, 30),
    qat(DYNAMIC(), lora_rank=4): (35, 55),
    qat(INT4, lora_rank=4): (15, 30),
    qat(qtorch.nf4_weight_only(group_size=32), lora_rank=4): (15, 30),
}
LEARNED |= {qat(make(name, 32)): (3, 60) for name in OF_QAT}
BOUNDS: dict[Recipe, tuple[float, float]] = {
    **{recipe: (4 if codes == "int2" else 15, 55) for recipe, (_, codes, _) in SERVED.items()},
    **LEARNED,
}
pytestmark = [pytest.mark.usefixtures("each_library"), pytest.mark.filterwarnings("ignore:(?s)qtorch")]


def names(recipes: Iterable[Recipe]) -> list[str]:
    return [f"{i} {recipe}" for i, recipe in enumerate(recipes)]


def trained(recipe: Recipe, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model after a few steps."""
    model = mlp(dtype)
    quantize_(model, recipe)
    fit(model)
    return model.eval()


def weight_of(layer: nn.Linear) -> Tensor:
    """What is quantized when the layer is converted, in floating point."""
    if hasattr(layer, "merged"):
        return layer.merged().detach()
    return layer.weight.dequantize() if isinstance(layer.weight, TrainingWeight) else layer.weight.detach()


def assert_served(got: Tensor, wanted: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(got, wanted)
    else:
        assert compute_error(wanted.float(), got.float()) > (70 if got.dtype is torch.float32 else 40)


def is_exact(recipe: Recipe, layer: nn.Linear) -> bool:
    """Sums of integers are, and the engine multiplies as the kernels do that serve."""
    return recipe in SERVED or sums_integers(layer.weight.scheme.spec)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("recipe", BOUNDS, ids=names(BOUNDS))
def test_equal_bit_for_bit(recipe: Recipe, dtype: torch.dtype, each_library: str) -> None:
    model = trained(recipe, dtype)
    inputs = [torch.randn(*shape, 64).to(dtype) for shape in ((), (5, 7), (64,), (100,))]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        learned = [p for name, p in model.named_parameters() if name.endswith("weight_quantizer.log_scale")]
        quantizer = getattr(model[0], "weight_quantizer", None)
        hat = None if quantizer is None else quantizer(model[0].weight).values
    # Where nothing clips, an offset or a clip does not move.
    assert all(p.dtype == torch.float32 and bool(p.any()) for p in learned)
    before = [weight_of(model[i]) for i in (0, 2)]
    quantize_(model, convert())
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight"]
    for layer, weight in zip((model[0], model[2]), before):
        assert type(layer) is nn.Linear
        assert not isinstance(layer.weight, TrainingWeight)
        if recipe.name.endswith("quantized_training"):
            assert torch.equal(layer.weight.dequantize(), weight)
        else:
            low, high = BOUNDS[recipe]
            assert low < compute_error(weight.float(), layer.weight.dequantize().float()) < high
    assert hat is None or torch.equal(model[0].weight.dequantize(), hat)
    exact = is_exact(recipe, model[0])
    for x, y in zip(inputs, wanted):
        with qtorch.kernels.record_kernels() as ran:
            got = model(x)
        assert len([name for name in ran if name.startswith("linear:")]) == 2
        assert recipe not in LEARNED or not exact or any("int8" in name for name in ran)
        assert_served(got, y, exact)
        if recipe in SERVED and dtype is torch.float32 and each_library == "torch":
            assert ran[0] == f"linear:{SERVED[recipe][0]}"


@pytest.mark.parametrize("recipe", SERVED, ids=names(SERVED))
def test_codes_have_their_size(recipe: Recipe) -> None:
    model = trained(recipe)
    quantize_(model, convert())
    weight, (_, codes, bits) = model[0].weight, SERVED[recipe]
    assert weight.scheme.weight.dtype.name == codes
    of_scales = sum(tensor.nbytes for name, tensor in weight.inner_tensors.items() if name.startswith("scale"))
    assert weight.nbytes == weight.numel() * bits // 8 + of_scales
    assert of_scales <= weight.scales()[0].nbytes


OTHERS = [lsq(), lsq(4, None), lsq(8, 8, activation_offset=True), qat(qtorch.int8_dynamic_activation_int4_weight())]
OTHERS.append(qat(qtorch.int8_dynamic_activation_int4_weight(), lora_rank=4))


@pytest.mark.parametrize("recipe", [*SERVED, *OTHERS], ids=names([*SERVED, *OTHERS]))
def test_equal_under_autocast(recipe: Recipe) -> None:
    model, x = trained(recipe), torch.randn(40, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        quantize_(model, convert())
        assert wanted.dtype == torch.bfloat16
        assert_served(model(x), wanted, is_exact(recipe, model[0]))


def test_the_weight_is_that_of_the_inference_recipe() -> None:
    for trains, serves in (
        (training.int8_mixed_precision_training(), DYNAMIC()),
        (training.int8_weight_only_quantized_training(), qtorch.int8_weight_only()),
        (training.float8_training(BLOCKS), qtorch.float8_dynamic_activation_float8_weight(BLOCKS)),
        (training.nvfp4_training(), qtorch.nvfp4_dynamic_activation_nvfp4_weight()),
        (training.mxfp4_training(), qtorch.mxfp4_dynamic_activation_mxfp4_weight()),
    ):
        layer = nn.Sequential(nn.Linear(64, 32))
        wanted = serves.apply(layer[0].weight.detach())
        quantize_(layer, trains)
        quantize_(layer, convert())
        weight = layer[0].weight
        if "fp4" in trains.name:  # the same format, the scales of 16 or 32 rows being one
            assert weight.scheme == wanted.scheme
            assert {n: (t.dtype, t.shape) for n, t in weight.inner_tensors.items()} == {
                n: (t.dtype, t.shape) for n, t in wanted.inner_tensors.items()
            }
        else:
            assert torch.equal(weight.dequantize(), wanted.dequantize())
        assert weight.scheme.weight == wanted.scheme.weight
        assert str(weight.scheme.activation).replace("PerToken", "PerRow") == str(wanted.scheme.activation).replace(
            "PerToken", "PerRow"
        )


def test_bitnet_floats_and_stochastic_weights() -> None:
    model = trained(training.bitnet_training())
    master = model[0].weight.floats().clone()
    quantize_(model, convert())
    weight = model[0].weight
    codes, scale, _ = weight.plain()
    assert isinstance(weight, AffineQuantizedTensor)
    assert weight.scheme.layout == PackedLayout()
    assert weight.qdata.nbytes * 4 == weight.numel()
    mean = master.abs().mean()
    assert set(codes.unique().tolist()) == {-1, 0, 1}
    torch.testing.assert_close(scale, mean.expand(96, 1))
    assert torch.equal(codes.float(), (master / mean).round().clamp(-1, 1))
    table = nn.Embedding(50, 64)
    quantize_(table, training.bitnet_training(), targets="all")
    table(torch.arange(50)).sum().backward()
    assert bool((table.weight.grad == 1).all())  # beyond the clip, too
    recipe = training.int8_mixed_precision_training(training.Int8MixedPrecisionTrainingConfig(output=False))
    model, x = trained(recipe), torch.randn(8, 64)
    wanted = model(x)
    quantize_(model, convert())
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model(x), wanted)
    spec = TrainingSpec(GemmSpec(int8(), int8(rounding=Rounding.STOCHASTIC)))
    model = nn.Sequential(nn.Linear(64, 32))
    values = model[0].weight.detach().clone()
    quantize_(model, mixed_precision_training(spec))
    quantize_(model, convert())
    wanted = int8().quantize(values, *int8().choose_qparams(values))
    assert torch.equal(model[0].weight.plain()[0], wanted)
    assert model[0].weight.scheme.weight.granularity == PerRow()


@pytest.mark.parametrize("recipe", [lsq(4, 4), qat(make("int4_weight_only", 32)), qtorch.int8_weight_only()], ids=str)
def test_encoder_layers_of_torch_do_not_pass_by_what_quantizes(recipe: Recipe) -> None:
    """Their fused kernel, in evaluation without gradients, would read the weights itself."""
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), torch.randn(2, 9, 64)
    model, mask = nn.TransformerEncoder(layer, 2), torch.arange(9) >= torch.tensor([[9], [6]])
    quantize_(model, {r".*linear\d": recipe, r".*": None})
    model(x)
    wanted = model.eval()(x, src_key_padding_mask=mask).detach()
    with torch.no_grad():
        for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            assert compute_error(wanted, function(x, src_key_padding_mask=mask)) > 100
