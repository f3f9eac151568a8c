"""LUTQuantizedTensor does what AffineQuantizedTensor does: kernels, gradients, copies, views, files, the compiler."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

from qtorch import (
    CodebookSpec,
    LinearSpec,
    LUTQuantizedTensor,
    PackedLayout,
    PerBlock,
    PerGroup,
    PerRow,
    PlainLayout,
    QuantSpec,
    compute_error,
    config,
    explain,
)
from qtorch.dtypes import NF4Tensor, linear_nf4, to_nf4
from qtorch.dtypes.codebook_tensor import nf4_spec
from qtorch.dtypes.serialize import from_canonical, to_canonical
from qtorch.kernels import FallbackError, lookup, record_kernels
from qtorch.kernels.ops.weight_only_mm import SLICE_BYTES

pytestmark = pytest.mark.usefixtures("torch_kernels")
from qtorch.kernels.registry import Problem, candidates

SPECS = {
    "nf4": nf4_spec(),
    "nf4 single": nf4_spec(16, None),
    "3 bits group": CodebookSpec("uint3", PerGroup(32)),
    "2 bits row": CodebookSpec("uint2", PerRow()),
    "4 bits block": CodebookSpec("uint4", PerBlock((8, 64))),
    "8 bits block": CodebookSpec("uint8", PerBlock((8, -1))),
}
# SQNR in dB of normal numbers: at least, at most.
SQNR = {
    "nf4": (19.5, 22),
    "nf4 single": (21.5, 26),
    "3 bits group": (16, 21),
    "2 bits row": (9, 12),
    "4 bits block": (20, 22),
    "8 bits block": (46, 56),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT = {torch.float32: 120, torch.float16: 60, torch.bfloat16: 42}

every_spec = pytest.mark.parametrize("name", SPECS)


def quantized(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> LUTQuantizedTensor:
    return LUTQuantizedTensor.from_float(torch.randn(shape or (32, 128), dtype=dtype), SPECS[name])


def layer(name: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
    module = nn.Linear(128, 32, dtype=dtype)
    module.weight = nn.Parameter(quantized(name, dtype=dtype), requires_grad=False)
    return module


@every_spec
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_float(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(32, 128, dtype=dtype)
    w = LUTQuantizedTensor.from_float(x, SPECS[name])
    codes, scale, table = w.plain()
    assert (w.shape, w.dtype, w.device.type) == ((32, 128), dtype, "cpu")
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (32, 128))
    assert tuple(scale.shape) == SPECS[name].scale_shape((32, 128))
    assert scale.is_floating_point()
    assert w.dequantize().dtype == dtype
    low, high = SQNR[name]
    assert low < compute_error(x, w.dequantize()) < high
    # Every element has its nearest entry under the scale that is stored.
    of_element = SPECS[name].dequantize(torch.zeros_like(codes), scale, torch.ones_like(table))
    distance = (x.float() - w.dequantize(torch.float32)).abs()
    other = LUTQuantizedTensor.from_plain(
        (codes + 1).clamp(max=table.shape[-1] - 1), scale, table, w.scheme.spec, dtype
    )
    assert bool((distance <= (x.float() - other.dequantize(torch.float32)).abs() + 1e-6 * of_element).all())


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("nf4", 4 + 8 / 64 + (2 * 32 + 32 + 16 * 32) / 2**15),
        ("nf4 single", 4 + 16 / 16 + 16 * 32 / 2**15),
        ("3 bits group", 3 + (16 + 8 * 16) / 32),
        ("2 bits row", 2 + (32 + 4 * 16) / 128),
        ("8 bits block", 8 + (32 + 256 * 16) / 1024),
    ],
)
def test_size(name: str, bits: float) -> None:
    w = quantized(name, 256, 128, dtype=torch.bfloat16)
    assert w.nbytes * 8 == bits * w.numel()


@every_spec
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_its_gradient(name: str, dtype: torch.dtype) -> None:
    w, bias = quantized(name, dtype=dtype), torch.randn(32, dtype=dtype)
    d, x = w.dequantize(), torch.randn(2, 3, 128, dtype=dtype, requires_grad=True)
    with record_kernels() as ran:
        y = functional.linear(x, w, bias)
    assert ran == ["linear:lut_weight_mm", "lut_weight_mm"]
    assert y.dtype == dtype
    assert compute_error(functional.linear(x, d, bias), y) > EXACT[dtype]
    grad = torch.randn_like(y)
    with record_kernels() as ran:
        y.backward(grad)
    assert ran == ["linear:lut_weight_mm", "lut_weight_mm"]
    assert compute_error(grad @ d, x.grad) > EXACT[dtype]


@every_spec
def test_slices_of_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices, the last one shorter, both ways around."""
    monkeypatch.setitem(SLICE_BYTES, "cpu", 4 * 128 * 11)
    w = quantized(name, 40, 128)
    x, z = torch.randn(3, 128), torch.randn(3, 40)
    torch.testing.assert_close(functional.linear(x, w), x @ w.dequantize().t())
    torch.testing.assert_close(z @ w, z @ w.dequantize())


@every_spec
def test_products(name: str) -> None:
    w, experts = quantized(name), quantized(name, 2, 32, 128)
    x, xe = torch.randn(3, 128), torch.randn(2, 3, 128)
    products: list[tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = [
        (lambda x, w: x @ w.t(), w, x),
        (lambda x, w: w @ x.t(), w, x),
        (lambda x, w: torch.addmm(torch.ones(32), x, w.t()), w, x),
        (lambda x, w: torch.bmm(x, w.mT), experts, xe),
        (lambda x, w: torch.einsum("bk,nk->bn", x, w), w, x),
        (lambda x, w: torch.matmul(x[0], w.t()), w, x),
    ]
    for product, q, input in products:
        with record_kernels() as ran:
            y = product(input, q)
        assert set(ran) == {"linear:lut_weight_mm", "lut_weight_mm"}
        torch.testing.assert_close(y, product(input, q.dequantize()))


@every_spec
def test_the_reference_agrees(name: str) -> None:
    w, x, ids = quantized(name), torch.randn(3, 128), torch.tensor([[1, 31], [0, 1]])
    for op, input, bias in (("linear", x, (None,)), ("embedding", ids, ())):
        kernels = [k for k, reason in candidates(Problem(op, w.scheme, x.dtype, "cpu")) if reason is None]
        assert [k.is_reference for k in kernels] == [False, True]
        torch.testing.assert_close(kernels[0](input, w, *bias), kernels[1](input, w, *bias))


@every_spec
def test_embedding(name: str) -> None:
    w, ids = quantized(name), torch.tensor([[1, 31], [0, 1]])
    for table in (w, w.to_layout(PlainLayout())):
        with record_kernels() as ran:
            y = functional.embedding(ids, table)
        assert ran == ["embedding:gather_lut_rows"]
        assert torch.equal(y, w.dequantize()[ids])


@every_spec
def test_views(name: str) -> None:
    w = quantized(name, 32, 128)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.t(),
        lambda t: t.t().t(),
        lambda t: t[8:24],
        lambda t: t[5],
        lambda t: t.t()[:, 3],
        lambda t: t.t()[64:].t(),
        lambda t: t.view(2, 16, 128)[1],
        lambda t: t.view(2, 16, 128).transpose(1, 2)[0],
        lambda t: t.unsqueeze(0).squeeze(0),
        lambda t: t.split(16)[1],
        lambda t: torch.cat([t, t]),
        lambda t: t.clone(),
        lambda t: t.detach(),
    ]
    if "block" not in name:
        views += [
            lambda t: t.index_select(0, torch.tensor([5, 1, 5])),
            lambda t: t[torch.tensor([5, 1])],
            lambda t: t[::3],
            lambda t: t.unbind()[2],
        ]
    for view in views:
        assert torch.equal(view(w).dequantize(), view(w.dequantize()))


def test_rows_and_transposes_stay_packed() -> None:
    w = quantized("nf4")
    assert w.scheme.layout == PackedLayout()
    assert w[8:16].qdata.data_ptr() == w.qdata[8:16].data_ptr()
    assert w.t().qdata.data_ptr() == w.qdata.data_ptr()
    assert w.t().scheme.layout == PackedLayout(-2)


def test_a_part_has_its_scales_in_floating_point() -> None:
    w = quantized("nf4")
    part = w[:4]
    assert (w.scale.dtype, part.scale.dtype) == (torch.int8, torch.float32)
    assert (w.codebook.scale_spec is None, part.codebook.scale_spec is None) == (False, True)
    with pytest.raises(ValueError, match=r"copy_ into a part .* the part has its own scale"):
        part.copy_(torch.ones(4, 128))


def test_canonical_names() -> None:
    stored, entry = to_canonical("fc.weight", quantized("nf4"))
    names = ["packed", "scale", "scale_mean", "scale_scale", "table"]
    assert sorted(stored) == [f"fc.weight_{name}" for name in names]
    assert stored["fc.weight_packed"].dtype == torch.int32
    del entry["tensors"]["table"]
    with pytest.raises(ValueError, match=r"table is missing: .* NF4"):
        from_canonical(entry, stored.__getitem__)


@every_spec
def test_copy_and_allocate(name: str) -> None:
    w, x = quantized(name), torch.randn(32, 128)
    wanted = LUTQuantizedTensor.from_float(x, SPECS[name])
    assert torch.equal(w.clone().copy_(x), wanted)
    assert torch.equal(w.clone().copy_(wanted), wanted)
    assert torch.equal(w.clone().copy_(wanted.to_layout(PlainLayout())), wanted)
    with pytest.raises(ValueError, match="into a float tensor"):
        torch.empty(32, 128).copy_(w)
    assert not torch.zeros_like(w).dequantize().any()
    assert torch.empty_like(w, device="meta").shape == w.shape


@pytest.mark.parametrize("name", ["nf4", "2 bits row"])
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_to_one_graph(name: str, grad: bool) -> None:
    module = layer(name)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (7, 3, 33):
            x = torch.randn(batch, 128, requires_grad=grad)
            z = x.detach().requires_grad_(grad)
            eager = module(x)
            with record_kernels() as ran:
                y = compiled(z)
                if grad:
                    y.square().sum().backward()
            assert ran == ["lut_weight_mm"] * (1 + grad)
            assert torch.equal(eager, y)
            if grad:
                eager.square().sum().backward()
                assert torch.equal(x.grad, z.grad)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_inductor() -> None:
    module, x = layer("nf4", torch.bfloat16), torch.randn(3, 128, dtype=torch.bfloat16)
    assert compute_error(module(x), torch.compile(module, fullgraph=True)(x)) > 40


def test_explain_and_strict() -> None:
    module = layer("nf4")
    explanation = str(explain(module))
    assert "runs lut_weight_mm" in explanation
    assert "not weight_only_mm: " in explanation
    with config.patch(strict=True):
        module(torch.ones(1, 128))
        with pytest.raises(FallbackError, match=r"lut_weight_mm takes a 2-d weight, this one has shape \(2, 32, 128\)"):
            lookup("linear", quantized("nf4", 2, 32, 128).scheme, torch.float32, "cpu")


def test_repr() -> None:
    assert repr(quantized("3 bits group")) == (
        "LUTQuantizedTensor(weight uint3 k-means PerGroup(group_size=32), layout=PackedLayout(), "
        "shape=(32, 128), dtype=torch.float32, device=cpu, 4,096 bytes)"
    )


def test_names_of_torchao() -> None:
    x, weight = torch.randn(3, 128), torch.randn(32, 128)
    w = NF4Tensor.from_tensor(weight, 64, 256)
    assert isinstance(w, NF4Tensor)
    assert w.codebook == nf4_spec(64, 256)
    assert torch.equal(w, to_nf4(weight))
    assert torch.equal(linear_nf4(x, w), functional.linear(x, w))


@every_spec
def test_zero_groups_stay_zero(name: str) -> None:
    x = torch.randn(32, 128)
    x[8:16] = 0
    w = LUTQuantizedTensor.from_float(x, SPECS[name])
    assert not w.dequantize()[8:16].any()
    assert compute_error(x, w.dequantize()) > 9


def test_importance_is_for_kmeans() -> None:
    x, importance = torch.randn(4, 128), torch.rand(4, 128).pow(8)
    plain = LUTQuantizedTensor.from_float(x, SPECS["2 bits row"])
    weighted = LUTQuantizedTensor.from_float(x, SPECS["2 bits row"], importance)
    errors = [(importance * (x - w.dequantize()).square()).sum() for w in (plain, weighted)]
    assert errors[1] < 0.95 * errors[0]
    with pytest.raises(ValueError, match="importance is for k-means, the table of uint4 NF4"):
        LUTQuantizedTensor.from_float(x, SPECS["nf4"], importance)


def test_errors_name_what_they_got() -> None:
    w = quantized("2 bits row")
    codes, scale, table = w.plain()
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int64"):
        LUTQuantizedTensor.from_float(torch.ones(2, 2, dtype=torch.long), SPECS["nf4"])
    with pytest.raises(ValueError, match="takes a CodebookSpec and no activation, got weight int8"):
        LUTQuantizedTensor.from_float(torch.ones(2, 2), QuantSpec("int8"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no activation, got weight uint4 NF4.*dynamic activation int8"):
        LUTQuantizedTensor.from_float(torch.ones(2, 64), LinearSpec(SPECS["nf4"], QuantSpec("int8")))
    with pytest.raises(ValueError, match="no product with quantized activations, got int8"):
        w.with_activation(QuantSpec("int8"))
    with pytest.raises(ValueError, match=r"table of .* has shape \(32, 1, 4\) of floating point, got \(4,\)"):
        w.with_plain((codes, scale, table[0, 0]))
    with pytest.raises(ValueError, match=r"scale of .* has shape \(32, 1\) of floating point, got \(1, 1\)"):
        w.with_plain((codes, scale[:1], table))
    with pytest.raises(ValueError, match=r"of torch\.uint8, got \(32, 128\) of torch\.int8"):
        w.with_plain((codes.to(torch.int8), scale, table))
    with pytest.raises(ValueError, match="cuts blocks of 16"):
        quantized("nf4 single")[:, 8:24]
    with pytest.raises(ValueError, match="cat joins tensors quantized alike"):
        torch.cat([quantized("nf4"), quantized("nf4 single")])
    assert not functional.linear(torch.ones(1, 128), nn.Parameter(w)).requires_grad
    assert replace(w.scheme) == w.scheme
