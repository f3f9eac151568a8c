"""What a layer keeps for its next call: when that runs, that it gives the same bits, and all that ends it."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import qtorch
from qtorch.calibration import observed
from qtorch.dtypes import deregister_aqt_quantized_linear_dispatch, linear, register_aqt_quantized_linear_dispatch
from qtorch.kernels import record_kernels, registry
from qtorch.kernels.cpu import compiled_library, memory, variants
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.refusals import refuses
from tests.rounding import assert_same_product

pytestmark = NEEDS_LIBRARY

RECIPES = {
    "int8": qtorch.int8_weight_only(),
    "int4": qtorch.int4_weight_only(group_size=32),
    "int8 dynamic": qtorch.int8_dynamic_activation_int8_weight(),
    "int4, int8 dynamic": qtorch.int8_dynamic_activation_int4_weight(),
    "int8 static": qtorch.int8_static_activation_int8_weight(0.04),
}
OF_CONVOLUTIONS = {
    "weight-only": qtorch.int8_weight_only(),
    "dynamic": qtorch.int8_dynamic_activation_int8_weight(act_granularity=qtorch.PerAxis(0)),
    "static": qtorch.int8_static_activation_int8_weight(0.04),
}
every_conv = pytest.mark.parametrize("name", OF_CONVOLUTIONS)
X, IMAGES = torch.randn(3, 96), torch.randn(2, 8, 6, 6)


def layer(recipe: str = "int8", dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    """One that has been called once."""
    made = nn.Linear(96, 40, bias=bias, dtype=dtype).requires_grad_(False)
    qtorch.quantize_(made, RECIPES[recipe])
    made(X.to(dtype))
    return made


def conv(name: str, ndim: int = 2, groups: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = (nn.Conv1d, nn.Conv2d)[ndim - 1](8, 16, 3, padding=1, groups=groups, dtype=dtype).requires_grad_(False)
    qtorch.quantize_(made, {"weight": OF_CONVOLUTIONS[name]})
    return made


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operation of each call that looks a kernel up."""
    names, find = [], linear.lookup
    monkeypatch.setattr(linear, "lookup", lambda op, *args: names.append(op) or find(op, *args))
    return names


def called_twice(model: nn.Module, x: Tensor, looked_up: list[str], again: list[str]) -> Tensor:
    """The second result, which is that of the first call; `again` is what is looked up for it."""
    first = model(x)
    looked_up.clear()
    second = model(x)
    assert looked_up == again
    assert torch.equal(first, second)
    assert (first.dtype, first.stride()) == (second.dtype, second.stride())
    return second


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_twice(recipe, dtype, bias, looked_up):
    with variants.force("tile"):
        for shape in [(1,), (2,), (70,), (0,), (2, 3), (1, 1, 4), ()]:
            model = layer(recipe, dtype, bias)
            model.weight.fast_linear = None
            y = called_twice(model, torch.randn(*shape, 96, dtype=dtype), looked_up, [])
            assert (y.shape, y.dtype) == ((*shape, 40), dtype)


@every_conv
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_twice(name, groups, ndim, dtype, looked_up):
    model = conv(name, ndim, groups, dtype)
    prepared = name != "weight-only" or dtype is torch.float32 or groups == 8
    for images, last in ((1, False), (3, False), (2, True)):
        x = torch.randn(images, 8, *(9, 7)[:ndim], dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last and ndim == 2 else x
        called_twice(model, x, looked_up, [] if prepared else ["conv"])


@every_conv
def test_images_of_one_pixel_and_one_feature(name):
    for features, size in ((16, 3), (1, 5), (1, 3)):
        model = nn.Conv2d(8, features, 3).requires_grad_(False)
        qtorch.quantize_(model, {"weight": OF_CONVOLUTIONS[name]})
        x = torch.randn(2, 8, size, size).contiguous(memory_format=torch.channels_last)
        wanted = nn.functional.conv2d(x, model.weight.dequantize(), model.bias)
        for y in (model(x), model(x), model(x.contiguous()), model(x.contiguous())):
            assert qtorch.compute_error(wanted, y) > 20


@every_conv
@pytest.mark.parametrize("groups", [1, 8])
def test_changes_of_a_convolution_are_seen(name, groups, looked_up):
    model = conv(name, groups=groups)
    model(IMAGES), model(IMAGES)
    looked_up.clear()
    changes = [
        lambda: model.bias.add_(1),  # the bias is read on each call
        lambda: model.weight.copy_(torch.randn_like(model.weight.dequantize())),
        lambda: model.weight.scale.mul_(2),
        lambda: model.weight.qdata.share_memory_(),
        lambda: model.weight.act_scale.mul_(3) if name == "static" else None,
        lambda: setattr(model, "weight", nn.Parameter(conv(name, groups=groups).weight, False)),
        lambda: setattr(model, "bias", None),
    ]
    for change in changes:
        change()
        assert torch.equal(model(IMAGES), copy.deepcopy(model)(IMAGES))
    for x in (torch.randn(2, 8, 7, 6), IMAGES[:, :, ::2]):
        assert torch.equal(model(x), copy.deepcopy(model)(x))
    assert looked_up


@every_conv
@pytest.mark.parametrize("groups", [1, 8])
def test_other_calls_of_a_convolution_take_the_full_path(name, groups, looked_up):
    model, x = conv(name, groups=groups), IMAGES
    y = model(x)
    looked_up.clear()
    sizes = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": groups}
    for options in (sizes, {"padding": "same", "groups": groups}):
        assert torch.equal(nn.functional.conv2d(x, model.weight, model.bias, **options), y)
    grown = x.clone().requires_grad_()
    model(grown).sum().backward()
    assert grown.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert len(looked_up) >= 4
    for wrong in (x.bfloat16(), x.double(), x[:, :4], x.to("meta")):
        with pytest.raises((ValueError, TypeError)):
            model(wrong)
    with pytest.raises((ValueError, TypeError)):
        nn.functional.conv1d(x, model.weight, model.bias, (1,), (1,), (1,), groups)


@pytest.mark.parametrize("make, x, name", [
    (layer, X, "fast_linear"),
    *((functools.partial(conv, each), IMAGES, "fast_conv") for each in OF_CONVOLUTIONS),
])  # fmt: skip
def test_copies_have_none_of_it(make: Callable[[], nn.Module], x: Tensor, name: str):
    model = make()
    model(x)
    assert getattr(model.weight, name) is not None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert getattr(other.weight, name) is None
        assert torch.equal(other(x), model(x))
    assert name not in model.weight._extra_state()


def test_settings_and_written_codes(looked_up):
    weight = layer().weight
    weight.fast_linear = None
    assert torch.equal(X @ weight.t(), nn.functional.linear(X, weight))
    looked_up.clear()
    model = layer()
    with qtorch.config.patch(float_copy_bytes=1 << 20):
        model(X)
    for _ in range(2):
        model(X)
        assert looked_up == ["linear"] * 3
    qtorch.config.strict = False
    model(X)
    assert looked_up == ["linear"] * 4
    model, other = layer(bias=False), layer(bias=False)
    with torch.no_grad():
        model.weight.copy_(other.weight)
    assert torch.equal(model(X), other(X))
    model = layer()
    codes, weight = weakref.ref(model.weight.qdata), weakref.ref(model.weight)
    gc.disable()
    try:
        del model
        assert codes() is None
        assert weight() is None
    finally:
        gc.enable()


def test_static_scales_are_read_on_each_call(looked_up):
    model, recipe = nn.Sequential(nn.Linear(96, 40)), qtorch.int8_static_activation_int8_weight
    qtorch.quantize_(model, observed(recipe(act_mapping_type=qtorch.MappingType.ASYMMETRIC), [X]))
    weight = model[0].weight
    before = called_twice(model, X, looked_up, [])
    weight.act_scale.mul_(3), weight.act_zero_point.add_(9)
    after = called_twice(model, X, looked_up, [])
    weight.fast_linear = None
    assert torch.equal(model(X), after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", ["qdata", "scale"])
def test_tensors_that_move_are_looked_at_again(name, looked_up):
    model = layer()
    wanted = model(X)
    if name == "qdata":
        model.weight.qdata.share_memory_()
    else:
        model.weight.scale = model.weight.scale.clone()
    looked_up.clear()
    for _ in range(2):
        assert torch.equal(model(X), wanted)
        assert looked_up == ["linear"]


def _autocast(model: nn.Linear) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(X).dtype == torch.bfloat16


def _gradient(model: nn.Linear) -> None:
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model.weight.dequantize().sum(0).expand_as(x))


def _gradient_of_bias(model: nn.Linear) -> None:
    bias = model.bias.clone().requires_grad_()
    nn.functional.linear(X, model.weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((40,), 3.0))


def _record(model: nn.Linear) -> None:
    with record_kernels() as ran:
        model(X)
    assert ran[0] == "linear:cpu_weight_only_mm"


def _other_library(model: nn.Linear) -> None:
    with compiled_library.use(None), record_kernels() as ran:
        model(X)
    assert ran[0] == "linear:weight_only_mm"


def _bias_and_strides(model: nn.Linear) -> None:
    assert nn.functional.linear(X, model.weight, model.bias.double()).dtype == torch.float64
    assert torch.equal(model(X.t().contiguous().t()), model(X))


@pytest.mark.parametrize("case", [_autocast, _gradient, _gradient_of_bias, _record, _other_library, _bias_and_strides])
def test_what_is_looked_up_again(case):
    """And the layer after it is as it was."""
    model = layer()
    wanted = model(X)
    case(model)
    assert torch.equal(model(X), wanted)


def test_inputs_that_are_refused():
    model = layer()
    wanted = model(X)
    for error, message, x in (
        (ValueError, r"expected an input of dtype torch\.float32", X.bfloat16()),
        (TypeError, "linear takes a float input", model.weight),
        (ValueError, r"an input of shape \(3, 95\) does not fit", X[:, :95]),
        (ValueError, "does not fit", torch.tensor(1.0)),
        (ValueError, "the input is on meta", X.to("meta")),
    ):
        refuses(message, lambda x=x: nn.functional.linear(x, model.weight, model.bias), error)
        assert torch.equal(model(X), wanted)


def test_compiled_after_a_call_and_mapped():
    model = layer()
    wanted = model(X)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with record_kernels() as ran:
        torch.testing.assert_close(compiled(X), wanted)
    assert ran[0] == "cpu_weight_only_mm", ran
    assert torch.equal(torch.vmap(model)(X[None]), wanted[None])


def test_registered_code_comes_first(looked_up):
    model = layer()

    def always(*_: object) -> bool:
        return True

    register_aqt_quantized_linear_dispatch(always, lambda x, weight, bias: x.new_zeros(1))
    try:
        assert model(X).shape == (1,)
    finally:
        deregister_aqt_quantized_linear_dispatch(always)

    @registry.register("linear", layout="plain", activation=(), device="cpu", priority=99, name="mine")
    def mine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_zeros(2)

    try:
        assert model(X).shape == (2,)
    finally:
        registry.deregister("linear", "mine")
    assert model(X).shape == (3, 40)


@pytest.mark.parametrize("variant", ["dot", "float", "torch"])
def test_other_variants(variant):
    model = layer("int4")
    wanted = model(X)
    with variants.force(variant):
        for _ in range(2):
            assert_same_product(model(X), wanted, X, model.weight.dequantize(), model.bias)
        with record_kernels() as ran:
            model(X)
        assert any(name.endswith(f".{variant}") for name in ran)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0, 3), (2, 3, 4)])
def test_results_are_allocated_as_torch_does(shape, monkeypatch):
    for _ in range(2):
        made, like = memory.empty(shape, torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
        with torch.inference_mode():
            assert memory.empty(shape, torch.float32).is_inference()
        monkeypatch.setattr(memory, "_allocate", None)


def _resized(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


NOT_THERE = {
    "on the meta device": (lambda x: x.to("meta"), "is on meta, and compiled kernels read the memory of the CPU"),
    "a resized storage": (_resized, "has no memory"),
    "of a functional graph": (torch._to_functional_tensor, "has no memory"),
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "has no memory"),
    "of zeros that are not there": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "has no memory"),
    "a lazy negative": (torch._neg_view, r"is a lazy negative of other memory; write it out with \.resolve_neg\(\)"),
    "of another dtype": (torch.Tensor.bfloat16, r"in torch\.bfloat16 is given to .* that takes torch\.float32"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", NOT_THERE)
def test_no_address_is_given_of_memory_that_is_not_there(name):
    change, message = NOT_THERE[name]
    x = torch.randn(3, 5)
    assert memory.address(x, torch.float32) == memory.address(x) == x.data_ptr() != 0
    assert memory.address(None) == memory.address(x[:0]) - x[:0].data_ptr() == 0
    refuses(rf"of shape \(3, 5\) .*{message}", lambda: memory.address(change(x), torch.float32))
