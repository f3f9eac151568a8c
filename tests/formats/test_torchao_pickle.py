"""torchao's tensors in files of torch.save: those that it wrote (`torchao_pickles`), and hostile ones."""

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
from qtorch.checkpoint.pickled_file import PickledFile, run_pickle
from qtorch.checkpoint.sources import open_source
from qtorch.checkpoint.streaming.quantize_checkpoint import convert_checkpoint
from qtorch.dtypes import QuantizedTensor
from tests.formats.folders import check, plain_tensors, quantized_config, refused
from tests.refusals import refuses

PICKLES = sorted((Path(__file__).parent / "torchao_pickles").glob("*.pt"))
OUTPUTS, INPUTS = SHAPE = 32, 64

# --- what torchao wrote ---


def test_there_are_pickles_of_two_versions() -> None:
    assert [path.stem for path in PICKLES] == ["torchao_0.15.0", "torchao_0.9.0"]


@pytest.mark.parametrize("path", PICKLES, ids=lambda path: path.stem)
def test_numbers_are_those_of_torchao(path: Path) -> None:
    """Bit for bit; torchao is not imported."""
    with open_source(path) as source:
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
        "int_data": torch.randint(-8, 8, SHAPE, dtype=torch.int8),
        "scale": torch.rand(OUTPUTS, 2).bfloat16() + 0.01,
        "zero_point": torch.zeros(OUTPUTS, 2).bfloat16(),
        **{"block_size": (1, 32), "quant_min": -8, "quant_max": 7, "zero_point_domain": 1, **changes},
    }
    parts = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    more = {name: value for name, value in values.items() if name not in parts}
    impl = PLAIN(torch.int8, SHAPE, **parts)
    inner = AFFINE(torch.bfloat16, SHAPE, tensor_impl=impl, **more)
    options: dict[str, Any] = {"input_quant_func": "f", "quant_kwargs": {}, **(around or {})}
    outer = LINEAR(torch.bfloat16, SHAPE, original_weight_tensor=inner, **options)
    return {"layer.weight": outer, **plain_tensors(INPUTS, torch.bfloat16)}


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
    state = layer(zero_point=torch.full((OUTPUTS, 2), zero).bfloat16())
    folder = written(tmp_path / "model", state, shards)
    weight = check(folder, decoded(state), "packed_weight_mm", 6)
    assert weight.scheme.weight.has_zero_point == bool(zero)


def test_safetensors_beside_it_are_read_instead(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", layer())
    convert_checkpoint(folder, tmp_path / "ours", format="transformers")
    (folder / "model.safetensors").write_bytes((tmp_path / "ours" / "model.safetensors").read_bytes())
    with open_source(folder) as source:
        assert source.format != "torchao pickle"


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "a code": ({"int_data": torch.full(SHAPE, 8, dtype=torch.int8)}, "qdata reaches from 8 to 8, int4 does not"),
    "fractions": ({"zero_point": torch.full((OUTPUTS, 2), 0.5)}, "zero points between its codes"),
    "domain": ({"zero_point_domain": 2}, "in the domain 2; neither is read"),
    "range": ({"quant_min": -300}, "codes from -300 to 7"),
    "text": ({"quant_min": "-8", "block_size": "x"}, "has the block_size 'x'"),
    "blocks": ({"block_size": (1, 48)}, r"has the block_size \[1, 48\], which does not divide"),
    "scales": ({"scale": torch.ones(OUTPUTS, 3)}, "_weight_scale has shape"),
    "codes": ({"int_data": torch.zeros(SHAPE)}, "_weight_int_data has shape"),
    "a view": ({"scale": torch.rand(2, OUTPUTS).t()}, "is a view that is not contiguous"),
    "no scale": ({"scale": None}, "has no scale"),
    "no codes": ({"int_data": None}, "has no qdata"),
    "a factor of the input": ({"around": {"scale": torch.ones(3)}}, "tensors beside its weight"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    changes, says = DAMAGE[name]
    refused(written(tmp_path / "model", layer(**changes)), SHAPE, f"model.*{says}")


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


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}." + b"torchao." * 1000)
    refuses("is compressed", lambda: PickledFile(tmp_path / "x.pt"))


def test_a_plain_state_dict() -> None:
    """The machine gives what pickle would, but for calls."""
    value = {"a": [1, 2.5, None, True, (), (1,), (1, 2), {"b": "text"}], "c": -(2**40), "d": [7]}
    assert run_pickle(pickle.dumps(value, 2)) == value
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        state = run_pickle(archive.read("archive/data.pkl"))
    assert state["w"].name == "torch._utils._rebuild_tensor_v2"
    assert state["w"].args[2] == (2, 3)
