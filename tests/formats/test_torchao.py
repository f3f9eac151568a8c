"""Checkpoints of torchao: safetensors and pickles."""

import io
import json
import pickle
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtorch import load_quantized
from qtorch.checkpoint import pickled_file, sources
from qtorch.checkpoint.streaming.quantize_checkpoint import convert_checkpoint
from qtorch.dtypes import QuantizedTensor
from tests.formats.folders import Layer, check, load, plain_tensors, quantized_config, refused, to_dtype, write
from tests.formats.test_float8 import E2M1, e4m3
from tests.refusals import refuses

OUTPUTS, INPUTS, GROUP = 24, 64, 32
SHAPE = OUTPUTS, INPUTS


def dtype_entry(dtype: torch.dtype) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}


BF16 = dtype_entry(torch.bfloat16)


def folder(
    path: Path, kind: str, parts: dict[str, Tensor], attributes: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Path:
    plain = plain_tensors(INPUTS, dtype)
    entry = {"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)}
    metadata = {name: json.dumps({"_type": "Tensor"}) for name in plain} | {"layer.weight": json.dumps(entry)}
    metadata["tensor_names"] = json.dumps(["layer.weight", *plain])
    tensors = {f"layer._weight_{name}": part for name, part in parts.items()} | plain
    config = quantized_config("torchao", str(dtype).removeprefix("torch."))
    return write(path / "model", tensors, 2, config, metadata)


def affine(codes: Any, scale: Any, zero: Any, block: tuple[int, int], dtype: torch.dtype, order: str = "int") -> Tensor:
    def real(o: int, i: int, q: float) -> float:
        s, z = (t[o // block[0]][i // block[1]] for t in (scale, zero))
        return (q - z) * s if order == "int" else q * s + z

    return to_dtype([[real(o, i, q) for i, q in enumerate(row)] for o, row in enumerate(codes)], dtype)


def zeros(scale: Tensor) -> list[list[float]]:
    return torch.zeros(scale.shape).tolist()


@pytest.mark.parametrize("block", [(1, INPUTS), SHAPE, (1, GROUP), (8, GROUP)])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int8(block: tuple[int, int], with_zeros: bool, tmp_path: Path) -> None:
    shape = OUTPUTS // block[0], INPUTS // block[1]
    parts = {"qdata": torch.randint(-128, 128, SHAPE, dtype=torch.int8), "scale": torch.rand(shape) + 0.01}
    if with_zeros:
        parts["zero_point"] = torch.randint(-128, 128, shape, dtype=torch.int8)
    attributes = {"block_size": list(block), "dtype": BF16, "act_quant_kwargs": None}
    zero = parts["zero_point"].tolist() if with_zeros else zeros(parts["scale"])
    wanted = affine(parts["qdata"].tolist(), parts["scale"].tolist(), zero, block, torch.bfloat16)
    kernel = "weight_only_mm" if block[0] == 8 else "cpu_weight_only_mm"
    check(folder(tmp_path, "Int8Tensor", parts, attributes), wanted, kernel, 9.3)


@pytest.mark.parametrize("float_zeros", [False, True])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_intx(bits: int, float_zeros: bool, tmp_path: Path) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    shape = OUTPUTS, INPUTS // GROUP
    zero = torch.randn(shape).bfloat16() if float_zeros else torch.randint(low, high, shape, dtype=torch.int8)
    parts = {
        "qdata": torch.randint(low, high, SHAPE, dtype=torch.int8),
        "scale": (torch.rand(shape) + 0.01).bfloat16(),
        "zero_point": zero,
    }
    kind = dtype_entry(getattr(torch, f"int{bits}"))
    attributes = {"target_dtype": kind, "block_size": [1, GROUP], "dtype": BF16, "activation_quantization": None}
    scale = parts["scale"].tolist()
    wanted = affine(parts["qdata"].tolist(), scale, zero.tolist(), (1, GROUP), torch.bfloat16)
    check(folder(tmp_path, "IntxUnpackedToInt8Tensor", parts, attributes), wanted, "cpu_weight_only_mm", bits + 1)


def nibbles(packed: Tensor) -> list[list[int]]:
    return [[n for byte in row for n in (byte & 15, (byte >> 4) & 15)] for row in packed.tolist()]


@pytest.mark.parametrize(("group", "kept"), [(32, 32), (48, 16), (64, 64)])
def test_int4(group: int, kept: int, tmp_path: Path) -> None:
    """Also where the last group of a row is shorter."""
    shape = -(-INPUTS // group), OUTPUTS
    parts = {
        "qdata": torch.randint(-128, 128, (OUTPUTS, INPUTS // 2), dtype=torch.int8),
        "scale": (torch.rand(shape) + 0.01).bfloat16(),
        "zero_point": torch.randn(shape).bfloat16(),
    }
    attributes = {"block_size": [1, group], "shape": [OUTPUTS, INPUTS]}
    codes = [[n - 16 if n > 7 else n for n in row] for row in nibbles(parts["qdata"])]
    scale, zero = (parts[name].T.tolist() for name in ("scale", "zero_point"))
    wanted = affine(codes, scale, zero, (1, group), torch.bfloat16, "real")
    weight = check(folder(tmp_path, "Int4Tensor", parts, attributes), wanted, "cpu_weight_only_mm", 4 + 32 / kept)
    assert weight.scheme.weight.granularity.group_size == kept


@pytest.mark.parametrize("block", [(1, INPUTS), SHAPE, (8, GROUP)])
def test_float8(block: tuple[int, int], tmp_path: Path) -> None:
    shape = OUTPUTS // block[0], INPUTS // block[1]
    parts = {"qdata": e4m3(*SHAPE), "scale": torch.rand(shape) + 0.01}
    preference = {"_type": "KernelPreference", "_data": "AUTO"}
    attributes = {"block_size": list(block), "dtype": BF16, "kernel_preference": preference}
    scale = parts["scale"].tolist()
    wanted = affine(parts["qdata"].float().tolist(), scale, zeros(parts["scale"]), block, torch.bfloat16)
    check(folder(tmp_path, "Float8Tensor", parts, attributes), wanted, "weight_only_mm", 8.6)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float4_e2m1fn_x2"])
def test_mx(element: str, tmp_path: Path) -> None:
    scale = (2.0 ** torch.randint(-9, 9, (OUTPUTS, INPUTS // 32))).to(torch.float8_e8m0fnu)
    if element == "float8_e4m3fn":
        codes = e4m3(*SHAPE)
        values = codes.float().tolist()
    else:
        codes = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8)
        values = [[(-1.0) ** (n >> 3) * E2M1[n & 7] for n in row] for row in nibbles(codes)]
    elements = {"_type": "torch.dtype", "_data": element}
    attributes = {"elem_dtype": elements, "block_size": 32, "orig_dtype": BF16, "is_swizzled_scales": False}
    wanted = affine(values, scale.float().tolist(), zeros(scale), (1, 32), torch.bfloat16)
    made = folder(tmp_path, "MXTensor", {"qdata": codes, "scale": scale}, attributes)
    packed = codes.dtype is torch.uint8
    check(made, wanted, "packed_weight_mm" if packed else "weight_only_mm", 4.25 if packed else 8.25)


@pytest.mark.parametrize("factor", [None, 0.0007])
def test_nvfp4(factor: float | None, tmp_path: Path) -> None:
    parts = {
        "qdata": torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8),
        "scale": (torch.rand(OUTPUTS, INPUTS // 16) * 400 + 1).to(torch.float8_e4m3fn),
    }
    scale = parts["scale"].float()
    if factor is not None:
        parts["per_tensor_scale"] = torch.tensor(factor)
        scale = scale * parts["per_tensor_scale"]
    values = [[(-1.0) ** (n >> 3) * E2M1[n & 7] for n in row] for row in nibbles(parts["qdata"])]
    attributes = {"block_size": 16, "orig_dtype": BF16, "is_swizzled_scales": False}
    wanted = affine(values, scale.tolist(), zeros(scale), (1, 16), torch.bfloat16)
    check(folder(tmp_path, "NVFP4Tensor", parts, attributes), wanted, "packed_weight_mm", 4.6)


def int8() -> tuple[dict[str, Tensor], dict[str, Any]]:
    parts = {"qdata": torch.randint(-8, 8, SHAPE, dtype=torch.int8), "scale": torch.rand(OUTPUTS, 1)}
    return parts, {"block_size": [1, INPUTS], "dtype": BF16}


def test_files_pickles_and_compressed_members(tmp_path: Path) -> None:
    parts, attributes = int8()
    made = folder(tmp_path, "Int8Tensor", parts, attributes)
    wanted = load(made, SHAPE).dequantize()
    entry = {"_type": "Int8Tensor", "_data": attributes}
    metadata = {"tensor_names": json.dumps(["layer.weight"]), "layer.weight": json.dumps(entry)}
    tensors = {f"layer._weight_{name}": part for name, part in parts.items()} | plain_tensors(INPUTS, torch.bfloat16)
    file = write(tmp_path / "alone", tensors, 1, None, metadata) / "model.safetensors"
    assert torch.equal(load_quantized(Layer(*SHAPE), file).layer.weight.dequantize(), wanted)
    assert [path.stem for path in PICKLES] == ["torchao_0.15.0", "torchao_0.9.0"]
    # The machine gives what pickle would, but for calls.
    value = {"a": [1, 2.5, None, True, (), (1,), (1, 2), {"b": "text"}], "c": -(2**40), "d": [7]}
    assert pickled_file.run_pickle(pickle.dumps(value, 2)) == value
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        state = pickled_file.run_pickle(archive.read("archive/data.pkl"))
    assert state["w"].name == "torch._utils._rebuild_tensor_v2"
    assert state["w"].args[2] == (2, 3)
    model = written(tmp_path / "pickled", layer())
    convert_checkpoint(model, tmp_path / "ours", format="transformers")
    (model / "model.safetensors").write_bytes((tmp_path / "ours" / "model.safetensors").read_bytes())
    with sources.open_source(model) as source:
        assert source.format != "torchao pickle"
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}." + b"torchao." * 1000)
    refuses("is compressed", lambda: pickled_file.PickledFile(tmp_path / "x.pt"))


DAMAGE: dict[str, tuple[str, dict[str, Tensor], dict[str, Any], str]] = {
    "a class in the order of a device": ("Int4TilePackedTo4dTensor", {}, {},
        "a Int4TilePackedTo4dTensor of torchao, is"),
    "scales in the order of a device": ("NVFP4Tensor", {}, {"is_swizzled_scales": True}, "has scales in the order of"),
    "a scaled input": ("Int8Tensor", {"act_pre_scale": torch.ones(INPUTS)}, {}, "scales the input of its layer"),
    "no block": ("Int8Tensor", {}, {"block_size": [1]}, r"has the block_size \[1\]"),
    "a block of zero": ("Int8Tensor", {}, {"block_size": [0, 64]}, r"has the block_size \[0, 64\]"),
    "a block that does not divide": ("Int8Tensor", {}, {"block_size": [1, 48]}, "which does not divide"),
    "few scales": ("Int8Tensor", {"scale": torch.ones(OUTPUTS, 2)}, {}, "layer._weight_scale has shape"),
    "another dtype": ("Int8Tensor", {}, {"dtype": {"_data": "int8"}}, "has the dtype 'int8'"),
    "no dtype": ("Int8Tensor", {}, {"dtype": None}, "has the dtype 'None'"),
    "wide codes": ("IntxUnpackedToInt8Tensor", {"zero_point": torch.zeros(OUTPUTS, 1, dtype=torch.int8)},
        {"target_dtype": {"_data": "int3"}}, "qdata reaches from -8 to 7, int3 does not"),
    "another width": ("IntxUnpackedToInt8Tensor", {}, {"target_dtype": "int32"}, "has the target_dtype 'int32'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    kind, more, change, says = DAMAGE[name]
    parts, attributes = int8()
    made = folder(tmp_path, kind, {**parts, **more}, {**attributes, **change})
    refused(made, SHAPE, f"model.*{says}")


@pytest.mark.parametrize("text", ["{", '{"_type": 3}', '{"_type": "Int8Tensor", "_data": []}'])
def test_damaged_metadata_are_named(text: str, tmp_path: Path) -> None:
    tensors = plain_tensors(INPUTS, torch.bfloat16)
    made = write(tmp_path / "model", tensors, 1, quantized_config("torchao"), {"layer.weight": text})
    refused(made, SHAPE, r"model: the metadata of layer\.weight")


PICKLES = sorted((Path(__file__).parent / "torchao_pickles").glob("*.pt"))
PICKLE_OUTPUTS, PICKLE_INPUTS = PICKLE_SHAPE = 32, 64


# --- what torchao wrote ---


@pytest.mark.parametrize("path", PICKLES, ids=lambda path: path.stem)
def test_numbers_are_those_of_torchao(path: Path) -> None:
    """Bit for bit; torchao is not imported."""
    with sources.open_source(path) as source:
        found = {name.removesuffix(".weight") for name in source.names if name.endswith(".weight")}
        assert found >= {"int8", "int8_dynamic", "int4_dynamic", "float8", "tiled"}
        for name in found:
            weight, wanted = source.tensor(f"{name}.weight"), source.tensor(f"{name}.wanted")
            assert isinstance(weight, QuantizedTensor)
            assert weight.scheme == source.contents(f"{name}.weight").scheme
            assert torch.equal(weight.dequantize(), wanted), name
            assert sum(part.nbytes for part in weight.inner_tensors.values()) < 0.8 * wanted.nbytes
    assert "torchao" not in sys.modules


# --- the same, written without torchao ---
def stand_in(full: str) -> Any:
    """A class of this full name, of tensors with attributes, that torch pickles as it does torchao's."""

    def new(cls: Any, dtype: torch.dtype, shape: tuple[int, ...], **attributes: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        vars(made).update(attributes)
        return made

    module, _, name = full.rpartition(".")
    body = {"__new__": new, "__module__": module, "__torch_dispatch__": classmethod(lambda *args, **kwargs: None)}
    return type(name, (Tensor,), body)


AFFINE = stand_in("torchao.dtypes.affine_quantized_tensor.AffineQuantizedTensor")
PLAIN = stand_in("torchao.dtypes.uintx.plain_layout.PlainAQTTensorImpl")
LINEAR = stand_in("torchao.quantization.linear_activation_quantized_tensor.LinearActivationQuantizedTensor")


@contextmanager
def torchao() -> Iterator[None]:
    """With the modules of the stand-ins, in which pickle looks for them."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (AFFINE, PLAIN, LINEAR):
            module = types.ModuleType(kind.__module__)
            setattr(module, kind.__name__, kind)
            patch.setitem(sys.modules, kind.__module__, module)
            parents = kind.__module__.split(".")
            for end in range(1, len(parents)):
                patch.setitem(sys.modules, ".".join(parents[:end]), types.ModuleType(".".join(parents[:end])))
        yield


def layer(around: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A state dict with int4 codes in groups, within an activation that is quantized too."""
    values: dict[str, Any] = {
        "int_data": torch.randint(-8, 8, PICKLE_SHAPE, dtype=torch.int8),
        "scale": torch.rand(PICKLE_OUTPUTS, 2).bfloat16() + 0.01,
        "zero_point": torch.zeros(PICKLE_OUTPUTS, 2).bfloat16(),
        **{"block_size": (1, 32), "quant_min": -8, "quant_max": 7, "zero_point_domain": 1, **changes},
    }
    parts = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    more = {name: value for name, value in values.items() if name not in parts}
    impl = PLAIN(torch.int8, PICKLE_SHAPE, **parts)
    inner = AFFINE(torch.bfloat16, PICKLE_SHAPE, tensor_impl=impl, **more)
    options: dict[str, Any] = {"input_quant_func": "f", "quant_kwargs": {}, **(around or {})}
    outer = LINEAR(torch.bfloat16, PICKLE_SHAPE, original_weight_tensor=inner, **options)
    return {"layer.weight": outer, **plain_tensors(PICKLE_INPUTS, torch.bfloat16)}


def written(folder: Path, state: dict[str, Any], shards: int = 1) -> Path:
    """A folder as transformers writes it without safetensors."""
    folder.mkdir(exist_ok=True)
    names = sorted(state)
    files = [f"pytorch_model-{i:05}-of-{shards:05}.bin" for i in range(shards)]
    with torchao():
        for i, file in enumerate(files if shards > 1 else ["pytorch_model.bin"]):
            torch.save({name: state[name] for name in names[i::shards]}, folder / file)
    if shards > 1:
        weight_map = {name: file for i, file in enumerate(files) for name in names[i::shards]}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(quantized_config("torchao", "bfloat16")))
    return folder


def decoded(state: dict[str, Any]) -> Tensor:
    impl = state["layer.weight"].original_weight_tensor.tensor_impl
    codes, scale, zero = (vars(impl)[name].float() for name in ("int_data", "scale", "zero_point"))
    return ((codes - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)).bfloat16()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("zero", [0.0, 3.0])
def test_a_folder(zero: float, shards: int, tmp_path: Path) -> None:
    state = layer(zero_point=torch.full((PICKLE_OUTPUTS, 2), zero).bfloat16())
    folder = written(tmp_path / "model", state, shards)
    weight = check(folder, decoded(state), "packed_weight_mm", 6)
    assert weight.scheme.weight.has_zero_point == bool(zero)


PICKLE_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "a code": ({"int_data": torch.full(PICKLE_SHAPE, 8, dtype=torch.int8)}, "qdata reaches from 8 to 8, int4 does not"),
    "fractions": ({"zero_point": torch.full((PICKLE_OUTPUTS, 2), 0.5)}, "zero points between its codes"),
    "domain": ({"zero_point_domain": 2}, "in the domain 2; neither is read"),
    "range": ({"quant_min": -300}, "codes from -300 to 7"),
    "text": ({"quant_min": "-8", "block_size": "x"}, "has the block_size 'x'"),
    "blocks": ({"block_size": (1, 48)}, r"has the block_size \[1, 48\], which does not divide"),
    "scales": ({"scale": torch.ones(PICKLE_OUTPUTS, 3)}, "_weight_scale has shape"),
    "codes": ({"int_data": torch.zeros(PICKLE_SHAPE)}, "_weight_int_data has shape"),
    "a view": ({"scale": torch.rand(2, PICKLE_OUTPUTS).t()}, "is a view that is not contiguous"),
    "no scale": ({"scale": None}, "has no scale"),
    "no codes": ({"int_data": None}, "has no qdata"),
    "a factor of the input": ({"around": {"scale": torch.ones(3)}}, "tensors beside its weight"),
}


@pytest.mark.parametrize("name", PICKLE_DAMAGE)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    changes, says = PICKLE_DAMAGE[name]
    refused(written(tmp_path / "model", layer(**changes)), PICKLE_SHAPE, f"model.*{says}")


# --- hostile pickles ---
class Calls:
    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def nested_keys() -> bytes:
    """A dict with a key of 2^60 tuples in each other: a hash of it never ends."""
    deep = b")" + b"".join(b"q%c" % i + b"h%c" % i + b"\x86" for i in range(60))
    return b"\x80\x02}" + deep + b"Ns."


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a call": (lambda: pickle.dumps({"layer.weight": Calls(Path.touch, Path("owned"))}, 2), "not a tensor"),
    "keys": (nested_keys, "a dict has keys that are neither"),
    "memo": (lambda: b"\x80\x02Nr\xff\xff\xff\xff.", "no attribute 'items'"),
    "length": (lambda: b"\x80\x02X\xff\xff\xff\x7f.", "expected 2147483647 bytes"),
    "empty": (lambda: b"\x80\x02.", "its stack is empty"),
    "marks": (lambda: b"\x80\x02(t(.", ""),
    "endless": (lambda: b"\x80\x02N", ""),
    "itself": (lambda: b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "no attribute"),
    "protocol": (lambda: pickle.dumps({"a": 1}, 4), "the operation .* is in no state dict"),
    "instances": (lambda: b"\x80\x02(ios\nsystem\n.", "the operation INST is in no state dict"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, says = HOSTILE[name]
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", make() + b"torchao.")
    refuses(f"x.pt: damaged, or not a state dict.*{says}", lambda: load_quantized(nn.Linear(2, 2), tmp_path / "x.pt"))
    assert not Path("owned").exists()
