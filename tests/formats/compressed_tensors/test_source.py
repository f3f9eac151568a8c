"""Reading folders, which may be untrusted, as a `Source`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtorch import explain, int4_weight_only, load_quantized, quantize_, save_quantized
from qtorch.checkpoint.formats.blocks import multiplier_of
from qtorch.checkpoint.sources import open_source
from qtorch.dtypes import QuantizedTensor
from tests.formats.compressed_tensors import judge
from tests.formats.compressed_tensors.test_against_package import config_of

pytest.importorskip("compressed_tensors")

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Change = Callable[[Tensors, Config], object]

INT4 = "asymmetric int4 in groups"


def write(folder: Path, word: str, change: Change = lambda tensors, config: None) -> Path:
    """A folder that the package has written, after a change; two modules, a and b."""
    torch.manual_seed(0)
    judge.compress({"a.weight": torch.randn(32, 64), "b.weight": torch.randn(64, 32)}, config_of(word), folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def model() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"a": torch.nn.Linear(64, 32, bias=False), "b": torch.nn.Linear(32, 64, bias=False)})


def test_contents_groups_and_zero_points(tmp_path: Path) -> None:
    folder = write(tmp_path, INT4)
    stored = load_file(folder / "model.safetensors")
    with open_source(folder) as source:
        assert source.format == "compressed-tensors"
        assert set(source.names) == {"a.weight", "b.weight"}
        contents = source.contents("a.weight")
        assert (contents.shape, contents.dtype) == ((32, 64), torch.float32)
        assert contents.nbytes == sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("a."))
        assert contents.scheme is not None
        assert str(contents.scheme.spec) == "weight uint4 PerGroup(group_size=32) asymmetric"
        assert source.tensor("a.weight").scheme == contents.scheme  # type: ignore[attr-defined]

    # Old files have zero points that are all zero.
    def change(tensors: Tensors, config: Config, value: int = 0) -> None:
        tensors["a.weight_zero_point"] = torch.full((32, 2), value, dtype=torch.int8)

    load_quantized(model(), write(tmp_path, "int4 in groups", change))
    with pytest.raises(ValueError, match=r"a\.weight: is symmetric, but has zero points that are not zero"):
        load_quantized(model(), write(tmp_path, "int4 in groups", lambda tensors, config: change(tensors, config, 3)))
    folder = write(tmp_path, INT4)
    loaded, other = model(), model()
    load_quantized(loaded, folder)
    load_quantized(other, folder / "model.safetensors")
    assert torch.equal(loaded["a"].weight.dequantize(), other["a"].weight.dequantize())


@pytest.mark.parametrize("mmap", [False, True])
def test_a_loaded_weight_runs_the_kernel_of_its_recipe(mmap: bool, tmp_path: Path) -> None:
    loaded, ours = model(), model()
    load_quantized(loaded, write(tmp_path, INT4), mmap=mmap)
    quantize_(ours, int4_weight_only(group_size=32))
    assert explain(loaded)[0].kernel == explain(ours)[0].kernel
    assert isinstance(loaded["a"].weight, QuantizedTensor)
    assert isinstance(ours["a"].weight, QuantizedTensor)
    assert loaded["a"].weight.nbytes == ours["a"].weight.nbytes
    x = torch.randn(2, 64)
    assert torch.allclose(loaded["a"](x), x @ loaded["a"].weight.dequantize().T, atol=1e-5)


def test_groups_by_name_pattern_and_class(tmp_path: Path) -> None:
    """A name comes before a pattern, a pattern before a class; the format of a group before that of the file."""

    def change(tensors: Tensors, config: Config) -> None:
        (group,) = config["config_groups"].values()
        other = {**group["weights"], "num_bits": 8}
        config["format"] = "mixed-precision"
        config["config_groups"] = {
            "class": {**group, "targets": ["Linear"], "weights": other},
            "pattern": {**group, "targets": ["re:[ab]$"], "weights": other},
            "a": {**group, "targets": ["a"]},
            "b": {**group, "targets": ["b"]},
        }

    load_quantized(model(), write(tmp_path, INT4, change))

    def with_pattern(tensors: Tensors, config: Config) -> None:
        change(tensors, config)
        del config["config_groups"]["b"]

    with pytest.raises(ValueError, match=r"b: its rows of 32 codes of 8 bits do not take 4 words"):
        load_quantized(model(), write(tmp_path, INT4, with_pattern))


def test_what_is_left_out_and_written_again(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: Config) -> None:
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        tensors["self_attn.k_scale"] = torch.ones(1)
        tensors["a.input_global_scale"] = torch.ones(1)
        (group,) = config["config_groups"].values()
        group["input_activations"] = {**group["weights"], "dynamic": "local"}

    with pytest.warns(UserWarning, match="not read: 1 scales of the KV cache.*; the inputs of some layers"):
        load_quantized(model(), write(tmp_path, "NVFP4", change))
    # Another packing, another version: the same numbers.
    loaded, again = model(), model()
    load_quantized(loaded, write(tmp_path, INT4))
    save_quantized(loaded, tmp_path / "again", format="compressed-tensors")
    load_quantized(again, tmp_path / "again")
    for name in ("a", "b"):
        assert torch.equal(loaded[name].weight.dequantize(), again[name].weight.dequantize())


def test_scales_and_groups_out_of_order(tmp_path: Path) -> None:
    """A divisor with an exact inverse keeps the scales quantized, another gives the scales in fp32."""
    for divisor, is_kept in ((512.0, True), (1000.1, False)):

        def change(tensors: Tensors, config: Config, divisor: float = divisor) -> None:
            for name in ("a", "b"):
                tensors[f"{name}.weight_global_scale"] = torch.tensor([divisor])

        folder = write(tmp_path, "NVFP4", change)
        loaded = model()
        load_quantized(loaded, folder)
        for name, weight in judge.decompress(folder).items():
            mine = loaded[name[0]].weight
            assert isinstance(mine, QuantizedTensor)
            assert torch.equal(mine.dequantize(weight.dtype), weight)
            assert (mine.scheme.weight.scale_spec is not None) == is_kept
    zero = torch.zeros(2, dtype=torch.float8_e4m3fn)
    assert multiplier_of(torch.tensor(2.0), zero) is None

    def change(tensors: Tensors, config: Config) -> None:
        tensors["a.weight_g_idx"] = (torch.arange(64) // 32).to(torch.int32)
        tensors["b.weight_g_idx"] = torch.zeros(32, dtype=torch.int32)

    load_quantized(model(), write(tmp_path, "int4 in groups", change))

    def unsorted(tensors: Tensors, config: Config) -> None:
        change(tensors, config)
        tensors["a.weight_g_idx"] = tensors["a.weight_g_idx"].flip(0)

    with pytest.raises(ValueError, match=r"a\.weight: has a weight_g_idx whose groups are not consecutive columns"):
        load_quantized(model(), write(tmp_path, "int4 in groups", unsorted))


def set_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, config: tensors.update({name: make(tensors[name]).contiguous()})


def drop(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def set_config(**values: Any) -> Change:
    return lambda tensors, config: config.update(values)


def set_group(**values: Any) -> Change:
    return lambda tensors, config: [group.update(values) for group in config["config_groups"].values()]


def set_args(**values: Any) -> Change:
    return lambda tensors, config: [group["weights"].update(values) for group in config["config_groups"].values()]


DAMAGED: list[tuple[str, Change, str]] = [
    (INT4, set_tensor("a.weight_shape", lambda t: t.flip(0)), "its weight_shape is (64, 32)"),
    (INT4, set_tensor("a.weight_shape", lambda t: t * 0 - 5), "its weight_shape is (-5, -5)"),
    (INT4, set_tensor("a.weight_shape", lambda t: t.float()), "its weight_shape is torch.float32"),
    (INT4, set_tensor("a.weight_shape", lambda t: t + torch.tensor([0, 2**40])), "do not take 8 words"),
    (INT4, set_tensor("a.weight_packed", lambda t: t.float()), "its packed codes are torch.float32"),
    (INT4, set_tensor("a.weight_packed", lambda t: t[:, 1:]), "its rows of 64 codes of 4 bits do not take 7 words"),
    (INT4, set_tensor("a.weight_packed", lambda t: t[0]), "not that of a matrix"),
    (INT4, set_tensor("a.weight_scale", lambda t: t[:, :1]), "its weight_scale has shape (32, 1)"),
    (INT4, set_tensor("a.weight_scale", lambda t: t.double()), "its weight_scale is torch.float64"),
    (INT4, set_tensor("a.weight_zero_point", lambda t: t[:2]), "its weight_zero_point is torch.int32 of shape (2, 2)"),
    (INT4, set_tensor("a.weight_zero_point", lambda t: torch.zeros(32, 2, dtype=torch.int8)), "not int32 words"),
    (INT4, drop("a.weight_zero_point"), "has no weight_zero_point"),
    (INT4, drop("a.weight_scale"), "has weight_packed, but no weight_scale"),
    (INT4, drop("a.weight_packed"), "has no weight"),
    (INT4, set_args(num_bits=True), "num_bits is True"),
    (INT4, set_args(num_bits=99), "num_bits is 99"),
    (INT4, set_args(group_size=-7), "group_size is -7"),
    (INT4, set_args(group_size=48), "groups of 48 do not divide 64 columns"),
    (INT4, set_args(strategy="spiral"), "strategy is 'spiral'"),
    (INT4, set_args(type="complex"), "type is 'complex'"),
    (INT4, set_args(symmetric="yes"), "symmetric is 'yes'"),
    (INT4, set_args(colour="red"), "quantization arguments have no field 'colour'"),
    (INT4, set_args(actorder="group"), "actorder 'group'"),
    (INT4, set_config(config_groups=[]), "config_groups is [], not an object"),
    (INT4, set_config(config_groups={"W4A16": ["Linear"]}), "is ['Linear'], not an object with targets"),
    (INT4, set_group(format="marlin-24"), "config_groups, group_0: the format 'marlin-24' is not read"),
    (INT4, set_config(sparsity_config={"format": "sparse-24-bitmask"}), "sparse files are not read"),
    (INT4, set_config(transform_config={"config_groups": {"R1": {}}}), "transform_config rotates the activations"),
    (INT4, set_group(targets=["re:("]), "is not a regular expression"),
    (INT4, set_group(targets=["re:" + "a" * 5000]), "is a regular expression of 5000 characters"),
    (INT4, set_group(targets=[7]), "targets is [7], not a list of names"),
    (INT4, set_group(targets=["c"]), "is quantized, but in no group of config_groups with weights"),
    (INT4, set_group(weights=None), "is quantized, but in no group of config_groups with weights"),
    ("MXFP4", set_tensor("a.weight_scale", lambda t: t * 0 + 255), "has scales that are NaN in E8M0"),
    ("MXFP4", set_tensor("a.weight_scale", lambda t: t.float()), "its weight_scale is torch.float32"),
    ("NVFP4", set_tensor("a.weight_global_scale", lambda t: t * 0), "its weight_global_scale is 0.0"),
    ("NVFP4", set_tensor("a.weight_global_scale", lambda t: t * torch.nan), "its weight_global_scale is nan"),
    ("NVFP4", set_tensor("a.weight_global_scale", lambda t: t.expand(2)), "more than one element"),
    ("NVFP4", drop("a.weight_global_scale"), "has no weight_global_scale"),
    ("int8 per channel, in bytes", set_tensor("a.weight", lambda t: t.float()), "its codes are torch.float32"),
    ("int4 in groups, in bytes", set_tensor("a.weight", lambda t: t * 0 + 8), "has codes beyond -8 to 7"),
    ("float8 per channel", set_args(symmetric=False), "floating-point weights with zero points"),
]


@pytest.mark.parametrize(("word", "change", "why"), DAMAGED, ids=[f"{word}, {why}" for word, _, why in DAMAGED])
def test_damage_is_an_error_that_names_file_and_module(word: str, change: Change, why: str, tmp_path: Path) -> None:
    folder = write(tmp_path, word, change)
    loaded = model()
    before = [parameter.clone() for parameter in loaded.parameters()]
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        load_quantized(loaded, folder)
    assert str(folder) in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, loaded.parameters(), strict=True))
