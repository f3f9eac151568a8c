"""Checkpoints that do not fit the model, or whose header is damaged."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import save_file
from torch import Tensor, nn

import qtorch
from qtorch import int4_weight_only, int8_weight_only, load_quantized, quantize_, save_quantized
from qtorch import save_quantized as save
from qtorch.training import lora_qat, qat
from tests import fast_part, quantize_model
from tests.checkpoint_model import INT8, Model, contents, edit_header, error, meta, quantized


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def matrix(*shape: int) -> nn.Parameter:
    return frozen(INT8.apply(torch.randn(shape)))


def conv_weight(*shape: int) -> nn.Parameter:
    return frozen(qtorch.dtypes.ConvWeight.from_float(torch.randn(shape), INT8.linear_spec()))


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


@pytest.mark.parametrize(("saved", "model", "message"), [
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
    ({"weight": torch.ones(8, 4).to(torch.int8)}, nn.Linear(4, 8, bias=False), "is torch.int8, the model's is torch"),
], ids=lambda value: "" if isinstance(value, str | dict) else type(value).__name__)  # fmt: skip
def test_kinds_that_do_not_fit(saved: dict[str, Tensor], model: nn.Module, message: str, path: Path) -> None:
    save(saved, path)
    said = error(model, path)
    assert message in said
    assert re.fullmatch(r"model\.safetensors: (w|weight|bias) is .*; the model is unchanged", said)


def test_schemes_data_and_headers_that_do_not_fit(path: Path) -> None:
    """With the header of a file edited: the shape of a convolution is that of no matrix."""
    save(quantized(), path)
    edit_header(path, lambda h: h["quantized"]["experts"]["scheme"].update(type="ConvScheme"))
    assert error(Model(), path).startswith("model.safetensors: experts: ")
    layer = nn.ModuleDict({"fc": nn.Conv1d(4, 8, 2)})
    quantize_(layer, {"fc": INT8})
    save(layer, path)
    edit_header(path, lambda h: h["quantized"]["fc.weight"]["scheme"].update(type="Scheme"))
    assert error(layer, path) == "model.safetensors: fc.weight: the codes have shape (8, 8), the scheme (8, 4, 2)"
    layer = nn.ModuleDict({"fc": nn.Linear(64, 64)})
    quantize_(layer, qtorch.int8_dynamic_activation_int8_weight())
    save(layer, path)
    group = {"type": "PerGroup", "group_size": 48}
    edit_header(path, lambda h: h["quantized"]["fc.weight"]["scheme"]["spec"]["activation"].update(granularity=group))
    assert error(layer, path).startswith("model.safetensors: fc.weight asks for an input quantized as int8 PerGroup(gr")
    save_quantized(quantized(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_expected_inline(
        error(Model(), path),
        """model.safetensors: embed.weight_scale is corrupted: its data does not match its checksum""",
    )
    load_quantized(Model(), path, verify=False)
    path.write_bytes(whole.replace(b'"I64"', b'"U64"'))
    assert error(Model(), path) == "model.safetensors: steps is corrupted: its data does not match its checksum"
    path.write_bytes(whole.replace(b"int8", b"int7"))
    assert_expected_inline(
        error(Model(), path), """model.safetensors: its header is corrupted: it does not match its checksum"""
    )


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
            if not isinstance(tensor, qtorch.dtypes.QuantizedTensor):
                tensor.qdata = tensor.fast_linear = "mine"
        model.fc.bias.requires_grad_(False)
        before = dict(contents(model))
        load_quantized(model, path, mmap=mmap)
        for name, tensor in contents(model):
            assert tensor is not before[name]
            assert tensor.tag in (name, "embed.weight", "head.weight")
            assert not tensor.requires_grad
            if isinstance(tensor, qtorch.dtypes.QuantizedTensor):
                assert isinstance(tensor.qdata, Tensor)
                assert tensor.fast_linear is None
    float_model = Model()
    save(float_model, path)
    model = Model()
    model.fc.weight.requires_grad_(False)
    load_quantized(model, path)
    wanted = {name: name != "fc.weight" for name, _ in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted


# --- all or nothing ---
def installs(file: str) -> bool:
    """Whether it is one of `qtorch` that installs or reads a checkpoint."""
    of_qtorch = file.startswith(str(Path(qtorch.__file__).parent))
    return of_qtorch and ("checkpoint" in file or file.endswith("model/install.py"))


@pytest.mark.parametrize("raises", fast_part.slow_but([KeyboardInterrupt], [KeyboardInterrupt, MemoryError]))
def test_interrupted_at_every_line(raises: type[BaseException], path: Path) -> None:
    """The old model or the new one; of the first lines, which only read, some are left out."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    saved = build()
    quantize_(saved, int4_weight_only(group_size=4))
    save(saved, path)
    lines = quantize_model.lines_run(lambda: load_quantized(build(), path), installs)
    assert lines is not None
    outcomes = set()
    for at in [*range(1, lines - 150, 7), *range(max(1, lines - 150), lines + 2)]:
        model = build()
        before = dict(contents(model))
        quantize_model.lines_run(lambda model=model: load_quantized(model, path), installs, at, raises)
        after = dict(contents(model))
        assert list(after) == list(before)
        is_old = {after[name] is before[name] for name in before}
        assert len(is_old) == 1, at
        outcomes |= is_old
    assert outcomes == {True, False}


NOT_SAFETENSORS = "model.safetensors: truncated, or not a safetensors file ("


def header(**values: object) -> Callable[[dict], object]:
    return lambda whole: whole.update(values)


def of_fc(change: Callable[[dict], object]) -> Callable[[dict], object]:
    return lambda whole: change(whole["quantized"]["fc.weight"])


def scheme(**values: object) -> Callable[[dict], object]:
    return of_fc(lambda entry: entry["scheme"].update(values))


def spec(**values: object) -> Callable[[dict], object]:
    return of_fc(lambda entry: entry["scheme"]["spec"].update(values))


def renamed(old: str, new: str) -> Callable[[dict], object]:
    return of_fc(lambda entry: entry["tensors"].update({new: entry["tensors"].pop(old)}))


def shard(name: str, *tensors: str) -> Callable[[dict], object]:
    return lambda whole: whole["shards"].update({name: list(tensors)})


@pytest.mark.parametrize(("change", "message"), [
    (header(version=99), "format version 99; this qtorch reads version 1"),
    (lambda h: h.pop("version"), "format version None; this qtorch reads version 1"),
    (lambda h: (h["plain"].append("more"), h["checksums"].update(more=1)), "missing key more"),
    (shard("gone"), "its shard gone is missing"),
    (scheme(type="NewScheme"), "fc.weight: from_json: unknown type 'NewSch"),
    (scheme(shape=[32, 31]), "fc.weight has shape (32, 31), the model's has (32, 32); the model is unchanged"),
    (of_fc(lambda entry: entry["scheme"].pop("dtype")), "fc.weight: "),
    (lambda h: h["checksums"].pop(h["quantized"]["fc.weight"]["tensors"].pop("scale")), "fc.weight: scale is"),
    (header(version=1.0), "format version 1.0; this qtorch reads version 1"),
    (header(version=[]), "format version []; this qtorch reads version 1"),
    (lambda h: h.pop("plain"), "its header is wrong: plain is not a list of names"),
    (lambda h: h["plain"].append(3), "its header is wrong: plain is not a list of names"),
    (header(quantized=[]), "its header is wrong: quantized is not an object"),
    (header(shards=None), "its header is wrong: shards is not an object"),
    (header(shards={"a": "steps"}), "its header is wrong: the shard a has no list of names"),
    (header(aliases={"head.weight": {}}), "its header is wrong: head.weight is another name of {}"),
    (lambda h: h["checksums"].update(steps=True), "its header is wrong: steps has the checksum True"),
    (lambda h: h["checksums"].update(steps=2**32), "its header is wrong: steps has the checksum 4294967296"),
    (lambda h: h["checksums"].pop("steps"), "its header is wrong: 'steps' has no checksum"),
    (lambda h: h["checksums"].update(more=1), "its header is wrong: 'more' has a checksum, but is not used"),
    (lambda h: h["plain"].remove("steps"), "its header is wrong: 'steps' has a checksum, but is not used"),
    (lambda h: h["plain"].append("steps"), "its header is wrong: 'steps' names more than one tensor"),
    (lambda h: h["aliases"].update(steps="steps"), "its header is wrong: 'steps' names more than one tensor"),
    (
        lambda h: h["aliases"].update({"head.weight": "head.weights"}),
        "its header is wrong: head.weight is another name of 'head.weights', which is missing",
    ),
    (
        lambda h: h["aliases"].update({"x": "head.weight"}),
        "its header is wrong: x is another name of 'head.weight', which is missing",
    ),
    (
        of_fc(lambda entry: entry["tensors"].update(scale="experts_scale")),
        "its header is wrong: 'experts_scale' is used more than once",
    ),
    (shard("a", "x"), "its header is wrong: 'x' is in a shard, but is not used"),
    (shard("../a"), "its header is wrong: '../a' is not the name of a"),
    (shard(".."), "its header is wrong: '..' is not the name of a"),
    (shard("/etc/passwd"), "its header is wrong: '/etc/passwd' is not the name of a"),
    (shard("a\0"), "its header is wrong: 'a\\x00' is not the name of a"),
    (shard("model.safetensors", "steps"), "steps is in it and in its shard model.safet"),
    (of_fc(lambda entry: entry.pop("scheme")), "fc.weight: its entry has no scheme"),
    (of_fc(lambda entry: entry.update(tensors=[])), "fc.weight: its entry has no names of tensors"),
    (renamed("scale", "scales"), "fc.weight: its tensors are codes, scales; the codes of int8"),
    (renamed("codes", "packed"), "fc.weight: its tensors are packed, scale; the codes of int8"),
    (scheme(shape=[-32, -32]), "fc.weight: no tensor has the shape (-32, -3"),
    (scheme(shape=[2**70]), "fc.weight: no tensor has the shape (1180591"),
    (scheme(shape=[32, None]), "fc.weight: from_json: Scheme.shape takes tuple[int, ...], got (32, None)"),
    (scheme(shape=32), "fc.weight: from_json: Scheme.shape takes tuple[int, ...], got 32"),
    (scheme(dtype="torch.int8"), "fc.weight: a quantized tensor has the dty"),
    (scheme(dtype=None), "fc.weight: from_json: Scheme.dtype takes torch.dtype, got None"),
    (spec(layout="PlainLayout"), "fc.weight: a layout is one of BlockSparseLayout, PackedLayout, PlainLayout"),
    (spec(weight=None), "fc.weight: no quantized tensor has a None"),
    (spec(static=0), "fc.weight: from_json: LinearSpec.static takes True or False, got 0"),
    (scheme(type="ConvScheme"), "fc.weight: the weight of a convolution has 3 to 5 dimensions, got shape (32, 32)"),
])  # fmt: skip
def test_edited_header(change: Callable[[dict], object], message: str, path: Path) -> None:
    """Of another version, or what an attacker makes of a header, with a checksum that fits."""
    save_quantized(quantized(), path)
    edit_header(path, change)
    for target in (Model(), quantized()):
        assert error(target, path).startswith(f"model.safetensors: {message}")


@pytest.mark.parametrize(("text", "message"), [
    ("", "its header is not JSON: "),
    ("[" * 100_000 + "]" * 100_000, "its header is not JSON: the JSON is nested too deep"),
    ('{"version": 1, "version": 1}', "its header is not JSON: the key 'version' occurs twice"),
    ("[]", "its header is wrong: its header is not an object"),
    ('{"version": 1' + "0" * 5000 + "}", "its header is not JSON: "),
])  # fmt: skip
def test_header_that_is_no_header(text: str, message: str, path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, path, {"qtorch": text, "qtorch.crc32": str(zlib.crc32(text.encode()))})
    assert error(nn.Linear(2, 2), path).startswith(f"model.safetensors: {message}")


def test_not_one_of_ours_and_complex_parameters(path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, path)
    assert_expected_inline(
        error(nn.Linear(2, 2), path),
        """model.safetensors: a safetensors file, but not one of save_quantized (its header has no 'qtorch')""",
    )
    assert error(nn.Linear(2, 2), path.with_name("none"), FileNotFoundError) == "none: no such file"
    for data in (b"", b"\0" * 7, b"\x80" + b"\0" * 99, b"\xff" * 99):
        path.write_bytes(data)
        assert error(nn.Linear(2, 2), path).startswith(NOT_SAFETENSORS)
    for zipped in (True, False):
        torch.save(nn.Linear(2, 2).state_dict(), path, _use_new_zipfile_serialization=zipped)
        assert error(nn.Linear(2, 2), path).startswith("model.safetensors: a file of torch.save, not of save_quantized")
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    save(module, path)
    assert load_quantized(module, path).w.requires_grad


@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupted", "swapped"])
def test_broken_shard(damage: str, path: Path) -> None:
    save_quantized(quantized(), path, max_shard_size=1)
    first, second, *_ = sorted(path.parent.glob("model-*"))
    if damage == "missing":
        first.unlink()
        says = f"model.safetensors: its shard {first.name} is missing"
    elif damage == "truncated":
        first.write_bytes(first.read_bytes()[:-1])
        says = f"{first.name}: truncated, or not a safetensors file"
    elif damage == "corrupted":
        first.write_bytes(first.read_bytes()[:-1] + b"\x55")
        says = f"{first.name}: experts_scale is corrupted: its data does not match its checksum"
    else:
        second.write_bytes(first.read_bytes())
        says = "model.safetensors: missing key "
    assert error(Model(), path).startswith(says)
