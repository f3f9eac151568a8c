"""Weights of any format that train in codes: unbiased updates, what is served, memory, and what is refused."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import CodebookSpec, LinearSpec, MappingType, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, quantize_
from qtorch.primitives import MSERule, Noise, PowerSpec, RotatedSpec, Rounding, ZeroPointDomain
from qtorch.recipes.base import Recipe, WeightRecipe
from qtorch.training import AdamW4bit, AdamW8bit, convert, weight_only_quantized_training
from tests.refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore:(?s)qtorch")
BF16, E4M3, NONE, NO_CODES = torch.bfloat16, torch.float8_e4m3fn, ZeroPointDomain.NONE, MappingType.ASYMMETRIC
FLOAT8 = QuantSpec(E4M3, zero_point_domain=NONE)
# format: (what is given, bits of a code and of its part of the scales in a weight 64 x 96)
FORMATS: dict[str, tuple[QuantSpec | CodebookSpec | WeightRecipe, float]] = {
    **{f"int{bits}": (QuantSpec(f"int{bits}"), bits + 32 / 96) for bits in range(2, 9)},
    **{f"uint{bits}": (QuantSpec(f"uint{bits}", PerGroup(32), NO_CODES), bits + 40 / 32) for bits in range(2, 9)},
    "int8 of a tensor": (QuantSpec("int8", PerTensor()), 8 + 32 / 64 / 96),
    "uint4, symmetric": (QuantSpec("uint4", PerGroup(32)), 4 + 40 / 32),
    "int4, signed scales": (QuantSpec("int4", PerGroup(32), MappingType.SYMMETRIC_SIGNED), 4 + 32 / 32),
    "int4, a rule that clips": (qtorch.int4_weight_only(group_size=32, scale_rule=MSERule()), 4 + 40 / 32),
    "int4, fp16 scales": (QuantSpec("int4", PerGroup(32), scale_dtype=torch.float16), 4 + 16 / 32),
    "midrise3": (QuantSpec("midrise3", zero_point_domain=NONE), 3 + 32 / 96),
    "e4m3": (qtorch.float8_weight_only(), 8 + 32 / 96),
    "e4m3, groups": (qtorch.float8_weight_only(granularity=PerGroup(32)), 8 + 32 / 32),
    "e4m3, blocks": (FLOAT8.with_granularity(PerBlock((16, 32))), 8 + 32 / 512),
    "e5m2": (qtorch.float8_weight_only(torch.float8_e5m2), 8 + 32 / 96),
    "e3m2": (qtorch.fpx_weight_only(3, 2), 6 + 32 / 96),
    "mxfp8": (qtorch.mxfp8_weight_only(), 8 + 8 / 32),
    "mxfp6": (qtorch.mxfp6_weight_only(), 6 + 8 / 32),
    "mxfp4": (qtorch.mxfp4_weight_only(), 4 + 8 / 32),
    "mxfp4, rotated": (RotatedSpec("float4_e2m1", PerGroup(32), scale_dtype=torch.float8_e8m0fnu), 4 + 8 / 32),
    "nvfp4": (qtorch.nvfp4_weight_only(), 4 + 8 / 16 + 32 / 64 / 96),
    "nf4": (qtorch.nf4_weight_only(32, double_quantize=False), 4 + 32 / 32 + 16 * 32 / 64 / 96),
    "table": (CodebookSpec("uint2", PerRow(), (-1.0, -0.25, 0.1, 0.5)), 2 + 32 / 96 + 4 * 32 / 64 / 96),
}
of_every_format = pytest.mark.parametrize("name", FORMATS)
of_few = pytest.mark.parametrize("name", ["int4, fp16 scales", "uint3", "e4m3", "nvfp4", "nf4"])


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    quantize_(model, weight_only_quantized_training(FORMATS[name][0]))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    model(torch.randn(40, 96).to(dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits_of(model: nn.Sequential) -> list[Tensor]:
    return [t.view(torch.uint8).clone() for i in (0, 2) for t in model[i].weight.inner_tensors.values()]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@of_every_format
def test_updates_are_unbiased_and_go_to_a_neighbour(name: str, dtype: torch.dtype) -> None:
    """The mean of N roundings of x is x within 5 standard errors, also of the largest value of a block, and their
    variance (x - low)(high - x), with low and high the codes on either side."""
    count = 16384
    weight = weight_only_quantized_training(FORMATS[name][0]).apply(torch.zeros(count, 64, dtype=dtype))
    torch.manual_seed(1)
    row = torch.randn(64) * torch.logspace(-1, 1, 64)
    weight.copy_(row.expand(count, 64))
    samples = weight.dequantize(torch.float32).double()
    low, high = samples.amin(0), samples.amax(0)
    error, tiny = (samples.mean(0) - row).abs(), 4e-6 * row.abs().max()
    if "rotated" in name:  # a sum of 32 roundings
        assert (error <= 5 * samples.std(0) / count**0.5 + tiny).all()
        return
    assert (low <= row + tiny).all()
    assert (row <= high + tiny).all()
    variance = ((row - low) * (high - row)).clamp(min=0)
    assert (error <= 5 * (variance / count).sqrt() + (high - low) / count + tiny).all()
    assert 0.97 < samples.var(0).sum() / variance.sum() < 1.03
    codes = weight.plain()[0]
    kind = weight.scheme.weight.dtype
    every = torch.arange(2**kind.bits, dtype=torch.uint8)
    if not kind.is_floating_point:  # the places of integers, also in a table, are what they are
        places = codes.int()
    else:
        levels = kind.decode(every.view(kind.storage))
        places = torch.searchsorted(levels[levels.isfinite()].unique(), kind.decode(codes).contiguous())
    assert (places.amax(0) - places.amin(0)).max() == 1


@of_every_format
def test_begins_as_the_recipe_and_is_served_as_it_is(name: str) -> None:
    model, (spec, bits) = made(name, BF16), FORMATS[name]
    assert made(name)[0].weight.nbytes * 8 == round(bits * 64 * 96)
    torch.manual_seed(0)
    floats = nn.Linear(96, 64).to(BF16).weight.detach()
    if isinstance(spec, Recipe) and name != "nvfp4":
        wanted = spec.apply(floats)
        pairs = zip(wanted.inner_tensors.values(), model[0].weight.inner_tensors.values(), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    before = model[0].weight.dequantize()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        step(model, optimizer, BF16)
    assert 0.001 < (model[0].weight.dequantize() - before).abs().mean() < 0.1
    # Updates of nothing bring the largest values to the outermost codes, and then change nothing.
    weight, values = model[0].weight.detach(), torch.empty(0)
    for _ in range(6):
        values = weight.dequantize()
        weight.add_(torch.zeros(64, 96))
    assert torch.equal(weight.dequantize(), values)
    x = torch.randn(7, 96).to(BF16)
    y = model(x)
    quantize_(model, convert())
    linear: LinearSpec = spec.linear_spec() if isinstance(spec, WeightRecipe) else LinearSpec(spec)
    assert model[0].weight.scheme.weight == linear.weight
    assert type(model[0].weight) is qtorch.dtypes.quantized_type(linear.weight)
    assert torch.equal(model(x), y)


@of_every_format
def test_one_graph_of_forward_and_backward(name: str) -> None:
    model = made(name)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    grads, x = [], torch.randn(8, 96)
    for run, held in ((model, model), (compiled, other)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        grads.append([y, leaf.grad, *(p.grad for p in held.parameters())])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


OPTIMIZERS: dict[str, Callable] = {
    "foreach": lambda p: torch.optim.AdamW(p, 1e-3),
    "fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.01),
    "8 bits": lambda p: AdamW8bit(p, 1e-3),
    "4 bits": lambda p: AdamW4bit(p, 1e-3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@of_few
def test_resumes_with_the_same_bits(name: str, kind: str) -> None:
    model = made(name, BF16)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(2):
        step(model, optimizer, BF16)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = made(name, BF16)
    again = OPTIMIZERS[kind](resumed.parameters())
    resumed.load_state_dict(state[0])
    again.load_state_dict(state[1])
    before = bits_of(model)
    for run, stepping in ((model, optimizer), (resumed, again)):
        torch.set_rng_state(state[2])
        step(run, stepping, BF16)
    assert all(map(torch.equal, bits_of(model), bits_of(resumed)))
    assert not all(map(torch.equal, bits_of(model), before))


@pytest.mark.parametrize("fused", [False, True])
@of_few
def test_small_updates_and_decay_of_a_16_bit_model(name: str, fused: bool) -> None:
    """Each is a hundredth of what bf16 tells apart; torch's fused optimizers take all tensors in one dtype."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 1024, bias=False).to(BF16)
    quantize_(nn.Sequential(layer), weight_only_quantized_training(FORMATS[name][0]))
    before = layer.weight.dequantize(torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-5, weight_decay=0.0, fused=fused)
    for _ in range(20):
        layer.weight.grad = torch.ones(1024, 96, dtype=BF16)
        optimizer.step()
    assert 0.5 < (before - layer.weight.dequantize(torch.float32)).mean() / 2e-4 < 1.5
    size = layer.weight.dequantize(torch.float32).abs().mean()
    for _ in range(100):
        with torch.no_grad():
            layer.weight.mul_(1 - 1e-4)
    assert 0.98 < layer.weight.dequantize(torch.float32).abs().mean() / size < 0.998


def test_what_is_refused() -> None:
    train, of_scales = weight_only_quantized_training, QuantSpec("int8", PerGroup(256), quant_min=-127)
    for given, words in (
        (qtorch.int8_dynamic_activation_int8_weight(), "takes a recipe of weights alone"),
        (qtorch.int8_weight_only(double_quantize=True), "scales in integers would all move"),
        (qtorch.nf4_weight_only(), "scales in integers would all move"),
        (qtorch.lut_weight_only(), "k-means would fit tables anew"),
        (qtorch.vector_codebook_weight_only(), "a RotatedVectorSpec has no stochastic rounding"),
        (PowerSpec("uint8"), "a PowerSpec has no stochastic rounding"),
        (
            qtorch.int4_weight_only(zero_point_domain=ZeroPointDomain.FLOAT),
            r"zero points that are real numbers \(FLOAT\) do not hold still",
        ),
        (QuantSpec("int8", PerGroup(32), scale_spec=of_scales), "scales in integers would all move"),
        (QuantSpec("int1"), "takes codes of 2 to 8 bits, got int1"),
        (QuantSpec("int12"), "takes codes of 2 to 8 bits, got int12"),
        (QuantSpec("int2", quant_min=0, quant_max=1), "has no code on the other side of zero"),
        (CodebookSpec("uint2", PerRow(), (0.0, 0.2, 0.5, 1.0)), "has no code on the other side of zero"),
    ):
        refuses(f"weight_only_quantized_training:? {words}", lambda given=given: train(given))
    with pytest.raises(TypeError, match="takes an inference recipe such as"):
        train("float8")
    model = nn.Sequential(nn.Linear(40, 8))
    refuses("0: block_size", lambda: quantize_(model, train(qtorch.mxfp8_weight_only())))
    noisy = QuantSpec("int4", rounding=Rounding.STOCHASTIC, noise=Noise(bits=8))
    assert train(noisy, stochastic_rounding=False).served().weight == QuantSpec("int4")
