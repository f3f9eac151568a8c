"""What load_quantized puts where: tensors that do not fit a place, attributes, and interrupted installations."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import int4_weight_only, int8_dynamic_activation_int8_weight, int8_weight_only, load_quantized, quantize_
from qtorch import save_quantized as save
from qtorch.dtypes import ConvWeight, QuantizedTensor
from qtorch.training import lora_qat, qat
from tests.checkpoint_model import INT8, Model, contents, edit_header, error, meta, quantized
from tests.fast_part import slow_but
from tests.quantize_model import interrupted


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def matrix(*shape: int) -> nn.Parameter:
    return frozen(INT8.apply(torch.randn(shape)))


def conv_weight(*shape: int) -> nn.Parameter:
    return frozen(ConvWeight.from_float(torch.randn(shape), INT8.linear_spec()))


def with_parameter(shape: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(torch.randn(shape))
    return module


def with_buffer(shape: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    module.register_buffer("w", torch.randn(shape))
    return module


LINEAR = {"weight": matrix(8, 4, 2)}
NO_KERNEL = ", which has no quantized kernel"


@pytest.mark.parametrize(
    ("saved", "model", "message"),
    [
        (LINEAR, nn.Conv1d(4, 8, 2, bias=False), "of a linear layer, but the weight of a Conv1d"),
        ({"w": conv_weight(8, 4, 2)}, with_parameter((8, 4, 2)), "of a convolution, but the w of a Module"),
        ({"w": matrix(8, 4)}, with_buffer((8, 4)), "w is quantized, but a buffer of the model"),
        (
            {"weight": matrix(8, 4), "bias": torch.zeros(8, 4)},
            nn.LayerNorm((8, 4)),
            f"weight is quantized, but the weight of a LayerNorm{NO_KERNEL}",
        ),
        (
            {"weight": matrix(8, 4, 2, 2), "bias": torch.zeros(4)},
            nn.ConvTranspose2d(8, 4, 2),
            f"weight is quantized, but the weight of a ConvTranspose2d{NO_KERNEL}",
        ),
        (
            {"weight": torch.randn(8, 4), "bias": frozen(INT8.apply(torch.randn(1, 8))[0])},
            nn.Linear(4, 8),
            f"bias is quantized, but the bias of a Linear{NO_KERNEL}",
        ),
        (
            {"weight": torch.ones(8, 4).to(torch.int8)},
            nn.Linear(4, 8, bias=False),
            "is torch.int8, the model's is torch",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str | dict) else type(value).__name__,
)
def test_kinds_that_do_not_fit(saved: dict[str, Tensor], model: nn.Module, message: str, path: Path) -> None:
    save(saved, path)
    said = error(model, path)
    assert message in said
    assert re.fullmatch(r"model\.safetensors: (w|weight|bias) is .*; the model is unchanged", said)


def test_a_convolution_s_scheme_on_a_linear_layer(path: Path) -> None:
    """With the header of a file edited: the shape of a convolution is that of no matrix."""
    save(quantized(), path)
    edit_header(path, lambda h: h["quantized"]["experts"]["scheme"].update(type="ConvScheme"))
    assert error(Model(), path).startswith("model.safetensors: experts: ")
    layer = nn.ModuleDict({"fc": nn.Conv1d(4, 8, 2)})
    quantize_(layer, {"fc": INT8})
    save(layer, path)
    edit_header(path, lambda h: h["quantized"]["fc.weight"]["scheme"].update(type="Scheme"))
    assert error(layer, path) == "model.safetensors: fc.weight: the codes have shape (8, 8), the scheme (8, 4, 2)"


def test_an_activation_that_does_not_fit(path: Path) -> None:
    layer = nn.ModuleDict({"fc": nn.Linear(64, 64)})
    quantize_(layer, int8_dynamic_activation_int8_weight())
    save(layer, path)
    group = {"type": "PerGroup", "group_size": 48}
    edit_header(path, lambda h: h["quantized"]["fc.weight"]["scheme"]["spec"]["activation"].update(granularity=group))
    assert error(layer, path).startswith("model.safetensors: fc.weight asks for an input quantized as int8 PerGroup(gr")


@pytest.mark.parametrize("recipe", [qat(int8_weight_only()), lora_qat(int8_weight_only(), 2)], ids=["qat", "lora_qat"])
def test_a_model_in_training(recipe: qtorch.quantize_api.Recipe, path: Path) -> None:
    """One whose weight alone trains is filled; one whose layer was exchanged has parameters that the file lacks."""
    served = nn.Sequential(nn.Linear(8, 8))
    quantize_(served, INT8)
    save(served, path)
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_(model, recipe)
    if type(model[0]) is nn.Linear:
        load_quantized(model, path)
        assert torch.equal(model[0].weight, served[0].weight)
    else:
        assert error(model, path).startswith("model.safetensors: missing key 0.lora_a, 0.lora_b")


# --- gradients and attributes ---


@pytest.mark.parametrize("mmap", [True, False])
def test_requires_grad_and_attributes(mmap: bool, path: Path) -> None:
    """Whatever was on the parameters of the model stays; names that a quantized weight needs for itself do not hide
    them."""
    save(quantized(), path)
    for model in (Model(), meta(), quantized()):
        for name, tensor in contents(model):
            tensor.tag = name
            if not isinstance(tensor, QuantizedTensor):
                tensor.qdata = tensor.fast_linear = "mine"
        model.fc.bias.requires_grad_(False)
        before = dict(contents(model))
        load_quantized(model, path, mmap=mmap)
        for name, tensor in contents(model):
            assert tensor is not before[name]
            assert tensor.tag in (name, "embed.weight", "head.weight")
            assert not tensor.requires_grad
            if isinstance(tensor, QuantizedTensor):
                assert isinstance(tensor.qdata, Tensor)
                assert tensor.fast_linear is None
    float_model = Model()
    save(float_model, path)
    model = Model()
    model.fc.weight.requires_grad_(False)
    load_quantized(model, path)
    wanted = {name: name != "fc.weight" for name, _ in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted


def test_a_complex_parameter_keeps_its_gradient(path: Path) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    save(module, path)
    assert load_quantized(module, path).w.requires_grad


# --- all or nothing ---


def installs(file: str) -> bool:
    """Whether it is one of `qtorch` that installs or reads a checkpoint."""
    of_qtorch = file.startswith(str(Path(qtorch.__file__).parent))
    return of_qtorch and ("checkpoint" in file or file.endswith("model/install.py"))


@pytest.mark.parametrize("raises", slow_but([KeyboardInterrupt], [KeyboardInterrupt, MemoryError]))
def test_interrupted_at_every_line(raises: type[BaseException], path: Path) -> None:
    """The old model or the new one; of the first lines, which only read, some are left out."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    saved = build()
    quantize_(saved, int4_weight_only(group_size=4))
    save(saved, path)
    lines = next(
        count
        for count in range(200, 4000, 50)
        if not interrupted(lambda: load_quantized(build(), path), count, installs, raises)
    )
    outcomes = set()
    for at in [*range(1, lines - 150, 7), *range(max(1, lines - 150), lines + 1)]:
        model = build()
        before = dict(contents(model))
        interrupted(lambda model=model: load_quantized(model, path), at, installs, raises)
        after = dict(contents(model))
        assert list(after) == list(before)
        is_old = {after[name] is before[name] for name in before}
        assert len(is_old) == 1, at
        outcomes |= is_old
    assert outcomes == {True, False}
