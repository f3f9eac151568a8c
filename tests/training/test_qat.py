"""Quantization-aware training: what is prepared computes what is converted, for every inference recipe."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import compute_error, load_quantized, quantize_, save_quantized
from qtorch.primitives import AbsMaxRule, PercentileRule, QuantSpec, fake_quantize_affine, prune_2_4
from qtorch.training import convert, qat
from qtorch.training.quantization_aware import converted, fake_quantize, qat_weight
from tests.every_recipe import OF_QAT, make
from tests.refusals import refuses
from tests.training.small_model import fit, mlp

every_recipe = pytest.mark.parametrize("name", OF_QAT)
INTEGERS = [name for name in OF_QAT if converted.sums_integers(make(name).linear_spec())]


pytestmark = pytest.mark.filterwarnings("ignore:qtorch")


def codes(weight: Tensor) -> list[Tensor]:
    return [part for part in weight.plain() if part is not None]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@every_recipe
def test_codes_are_those_of_the_recipe(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """And files hold what was converted; that it computes the same is in `test_convert`."""
    recipe, model = make(name, 32), mlp(dtype)
    quantize_(model, qat(recipe))
    before = model[0].weight.dequantize().clone()
    fit(model)
    masters = [model[i].weight.dequantize() for i in (0, 2)]
    assert not torch.equal(masters[0], before)
    quantize_(model, convert())
    for layer, master in zip((model[0], model[2]), masters):
        wanted = recipe.apply(master)
        assert layer.weight.scheme == wanted.scheme
        assert all(map(torch.equal, codes(layer.weight), codes(wanted)))
    loaded, x = mlp(dtype).to("meta"), torch.randn(5, 7, 64).to(dtype)
    save_quantized(model, tmp_path / "model.safetensors")
    load_quantized(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded(x), model(x))


def gradients(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), inputs)


def explicit(x: Tensor, spec: qtorch.QuantSpec | None, scale: Tensor | None = None) -> Tensor:
    """Fake quantization written out: straight through, except where a scale that is given clips."""
    if spec is None:
        return x
    if scale is not None:
        numerics = (spec.dtype, spec.quant_min, spec.quant_max, spec.zero_point_domain)
        return fake_quantize_affine(x, spec.block_size(x.shape), scale, None, *numerics)
    rows = x.detach().reshape(-1, x.shape[-1])
    scale, other = spec.choose_qparams(rows)
    value = spec.dequantize(spec.quantize(rows, scale, other), scale, other, x.dtype).reshape(x.shape)
    return x + (value - x.detach())


@pytest.mark.parametrize("name", [name for name in OF_QAT if "sparse" not in name])
def test_gradients_are_those_of_explicit_fake_quantization(name: str) -> None:
    recipe, layer = make(name, 32), nn.Linear(64, 96)
    spec, weight = recipe.linear_spec(), layer.weight.detach().clone().requires_grad_()
    quantize_(layer, qat(recipe))
    x, g = 2 * torch.randn(5, 7, 64, requires_grad=True), torch.randn(5, 7, 96)
    scale = recipe.act_scale(torch.device("cpu"))
    wanted = nn.functional.linear(explicit(x, spec.activation, scale), explicit(weight, spec.weight), layer.bias)
    got = layer(x)
    assert compute_error(wanted, got) > 100
    wanted = torch.autograd.grad(wanted, [x, weight, layer.bias], g)
    for a, b in zip(torch.autograd.grad(got, [x, layer.weight, layer.bias], g), wanted):
        assert type(a) is Tensor
        assert compute_error(b, a) > 100
    if scale is not None:
        assert 0 < (wanted[0] == 0).float().mean() < 0.2


@pytest.mark.parametrize("name", ["int8_dynamic_activation_int4_weight", "nvfp4_weight_only", "nf4_weight_only"])
def test_embeddings(name: str) -> None:
    """Tied to a linear layer, and alone in bags."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(48, 64, padding_idx=3), nn.Linear(64, 48, bias=False)
            self.bag = nn.EmbeddingBag(40, 64)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids)) + self.bag(ids).mean(-1)[:, None, None]

    model, ids = Tied(), torch.tensor([[1, 2, 3], [0, 1, 1]])
    quantize_(model, {"head": qat(make(name, 32)), "bag": qat(make(name, 32))})
    assert model.embed.weight is model.head.weight
    wanted = model(ids)
    grad_embed, grad_bag = gradients(wanted, [model.embed.weight, model.bag.weight])
    assert bool((grad_embed.abs().sum(1) > 0).all())
    assert (grad_bag.abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 2, 3]
    (alone,) = gradients(model.embed(ids), [model.embed.weight])
    assert (alone.abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 2]
    with torch.no_grad():
        assert torch.equal(model(ids), wanted)
        rows = model.embed(ids)
    quantize_(model, convert())
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.embed(ids), rows)
    got = model(ids)
    assert torch.equal(got, wanted) if name in INTEGERS else compute_error(wanted, got) > 70


class Experts(nn.Module):
    """Fused experts, used in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 64, 96) / 8)
        self.down = nn.Parameter(torch.randn(3, 64, 96) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.bmm(x, self.up)
        by_index = torch.stack([nn.functional.linear(h[e], self.down[e]) for e in range(3)])
        offs = torch.tensor([4, 8, 12], dtype=torch.int32)
        grouped = torch._grouped_mm(h.flatten(0, 1), self.down.transpose(1, 2), offs=offs)
        by_einsum = torch.einsum("emk,enk->emn", h, self.down)
        return by_index + grouped.unflatten(0, (3, 4)) + torch.matmul(h, self.down.mT) + by_einsum


@pytest.mark.parametrize("name", ["int8_dynamic_activation_int8_weight", "int4_weight_only", "nf4_weight_only"])
def test_fused_experts(name: str) -> None:
    recipe = make(name, 32)
    if name == "nf4_weight_only":
        recipe = dataclasses.replace(recipe, double_quantize=False)
    model, x = Experts(), torch.randn(3, 4, 64, requires_grad=True)
    in_float = gradients(model(x), [x, model.up, model.down])
    quantize_(model, {"up": qat(recipe), "down": qat(recipe)})
    wanted = model(x)
    for a, b in zip(gradients(wanted, [x, model.up, model.down]), in_float):
        assert 8 < compute_error(b, a) < 60
    quantize_(model, convert())
    got = model(x)
    assert torch.equal(got, wanted) if name in INTEGERS else compute_error(wanted, got) > 70


@pytest.mark.parametrize("same", [True, False], ids=["self-attention", "cross-attention"])
def test_multi_head_attention(same: bool) -> None:
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    quantize_(model, {n: qat(make("int8_dynamic_activation_int4_weight")) for n in ("in_proj_weight", "out_proj")})
    assert isinstance(model.in_proj_weight, qat_weight.FakeQuantizedWeight)
    x = torch.randn(2, 5, 64)
    other = x if same else torch.randn(2, 7, 64)
    wanted = model(x, other, other)[0]
    assert all(grad.abs().sum() > 0 for grad in gradients(wanted, list(model.parameters())))
    quantize_(model, convert())
    assert torch.equal(model(x, other, other)[0], wanted)


def test_parts_of_a_weight_and_what_has_no_gradient() -> None:
    """Rows have codes of their own; parts of rows, or of a weight with one scale, have not."""
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(5, 64)
    quantize_(layer, qat(make("int8_dynamic_activation_int4_weight")))
    wanted = layer(x)[:, 32:64]
    assert torch.equal(nn.functional.linear(x, layer.weight[32:64]), wanted)
    assert torch.equal(x @ layer.weight.chunk(3)[1].t(), wanted)
    rows = torch.baddbmm(torch.zeros(1), batch1=x.expand(2, 5, 64), batch2=layer.weight.view(2, 48, 64).mT)
    assert torch.equal(torch.cat([*rows], 1), layer(x))
    assert torch.equal(x @ layer.weight.t().unsqueeze(0), layer(x)[None])
    for part in (layer.weight[:, :32], layer.weight.view(48, 128)):
        with pytest.raises(ValueError, match="a product with a part of a weight that converts to int4 PerGroup"):
            nn.functional.linear(torch.randn(5, part.shape[1]), part)
    layer = nn.Linear(64, 96)
    quantize_(layer, qat(make("float8_static_activation_float8_weight")))
    with pytest.raises(ValueError, match="depend on the rest of the weight; multiply the whole of it"):
        nn.functional.linear(x, layer.weight[:32])
    recipe, layer = qtorch.int8_weight_only(scale_rule=PercentileRule(90.0)), nn.Linear(64, 96)
    weight = layer.weight.detach().clone()
    quantize_(layer, qat(recipe))
    (grad,) = torch.autograd.grad(layer(torch.randn(5, 64)).sum(), layer.weight)
    scale, _ = recipe.linear_spec().weight.choose_qparams(weight)
    clipped = (weight / scale).round().abs() > 127
    assert 0.02 < clipped.float().mean() < 0.15
    assert torch.equal(grad == 0, clipped)
    assert not fake_quantize.clips(QuantSpec("int8", scale_rule=AbsMaxRule()))
    recipe, layer = make("int8_dynamic_activation_int8_semi_sparse_weight"), nn.Linear(64, 96)
    kept = prune_2_4(layer.weight.detach()) != 0
    quantize_(layer, qat(recipe))
    (grad,) = torch.autograd.grad(layer(torch.randn(5, 64)).sum(), layer.weight)
    assert torch.equal(grad != 0, kept)


def test_which_kernels_run(each_library: str) -> None:
    model, x = mlp(), torch.randn(5, 64)
    quantize_(model, qat(make("int8_dynamic_activation_int4_weight")))
    for grad in (True, False):
        with qtorch.kernels.record_kernels() as ran, torch.set_grad_enabled(grad):
            model(x)
        assert ran.count("cpu_int8_mm") == 2
    if each_library == "torch" or qtorch.kernels.cpu.compiled_library.library() is None:
        assert ran.count("int8_grouped_mm") == 2


@pytest.mark.parametrize("name", ["int8_dynamic_activation_int4_weight", "float8_dynamic_activation_float8_weight"])
def test_compute_dtype(name: str) -> None:
    """In bf16 all through: near what is converted, and not equal to it."""
    model, x = mlp(torch.bfloat16), torch.randn(50, 64).bfloat16().requires_grad_()
    exact = copy.deepcopy(model)
    quantize_(model, qat(make(name, 32), compute_dtype=torch.bfloat16))
    quantize_(exact, qat(make(name, 32)))
    with qtorch.kernels.record_kernels() as ran:
        y = model(x)
    assert ran == []
    assert 20 < compute_error(exact(x), y) < 60
    inputs = [x, model[0].weight]
    for a, b in zip(gradients(y, inputs), gradients(exact(x), [x, exact[0].weight])):
        assert a.dtype == torch.bfloat16
        assert 15 < compute_error(b, a) < 60
    quantize_(model, convert())
    quantize_(exact, convert())
    assert all(torch.equal(a, b) for a, b in zip(codes(model[0].weight), codes(exact[0].weight)))


def test_errors_leave_the_model() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.ModuleDict({"down": nn.Linear(40, 33)}))
    before = [model[0].weight, model[1]["down"].weight]
    with pytest.raises(ValueError, match=r"1.down: block_size \(1, 32\) does not divide shape \(33, 40\)"):
        quantize_(model, qat(qtorch.int4_weight_only(group_size=32)))
    assert model[0].weight is before[0]
    quantize_(model[0], qat(qtorch.int8_weight_only()))
    refuses("0: is already quantized: FakeQuantizedWeight", lambda: quantize_(model, qat(qtorch.float8_weight_only())))
    on_meta = nn.Linear(64, 8, device="meta")  # its values come later
    quantize_(on_meta, qat(qtorch.int8_weight_only()))
    assert on_meta.weight.is_meta
    refuses("takes an inference recipe such as int4_weight_only", lambda: qat(convert()), TypeError)
    with pytest.raises(ValueError, match=r"compute_dtype is a floating-point dtype or None, got torch\.int8"):
        qat(qtorch.int8_weight_only(), compute_dtype=torch.int8)
    refuses("would search its scales anew in each step", lambda: qat(qtorch.int4_weight_only(use_hqq=True)))
    refuses("compute_dtype takes affine codes", lambda: qat(qtorch.nf4_weight_only(), compute_dtype=torch.bfloat16))
    model = mlp()
    quantize_(model, qat(qtorch.int8_weight_only()))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    refuses("2: has 1 values of 6144 that are NaN or infinite", lambda: quantize_(model, convert()))
    model, x = Experts(), torch.randn(4, 64)
    quantize_(model, {"up": qat(make("int8_weight_only"))})
    with pytest.raises(NotImplementedError, match="this is another product, or a product with sums of the weight"):
        torch.einsum("mk,ekn->mn", x, model.up)
    with pytest.raises(NotImplementedError, match=r"aten\.mm\.default with a weight in training would run in full"):
        torch.ops.aten.mm(x, model.up[0])
    with pytest.raises(NotImplementedError, match=r"aten\.addmv\.default with a weight in training would run in full"):
        torch.addmv(torch.zeros(()), model.up[0], x[0])
