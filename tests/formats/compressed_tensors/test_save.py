"""What a saved folder says, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.checkpoint.save_folder import SAVE_FORMATS, save_format
from qtorch.recipes.base import Recipe
from tests.refusals import refuses

FORMAT = "compressed-tensors"
INT4 = qtorch.intx_weight_only("int4", group_size=32)
INT8 = qtorch.int8_weight_only(scale_dtype=torch.bfloat16)
DYNAMIC = qtorch.int8_dynamic_activation_int8_weight()


class Layer(nn.Module):
    """A layer with the names of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(64, 64, bias=False) for name in "qkvo"})
        self.mlp = nn.ModuleDict({f"{name}_proj": nn.Linear(64, 64, bias=False) for name in ("gate", "up", "down")})
        self.norm = nn.RMSNorm(64)


class Model(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = nn.Linear(64, 32, bias=False)
        self.to(torch.bfloat16)


def saved(model: nn.Module, folder: Path, **options: Any) -> dict[str, Any]:
    qtorch.save_quantized(model, folder, format=FORMAT, **options)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def weights(config: dict[str, Any]) -> list[tuple[list[str], int]]:
    return [(group["targets"], group["weights"]["num_bits"]) for group in config["config_groups"].values()]


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(floats(a), floats(b)) for a, b in pairs)


def check_loads(model: nn.Module, folder: Path) -> Model:
    """What is read again has the same numbers."""
    again = Model(len(model.layers))
    qtorch.load_quantized(again, folder)
    assert same(model, again)
    return again


def quantized(recipe: Any = INT4, layers: int = 1) -> Model:
    """With the layers in this recipe, or by a mapping."""
    model = Model(layers)
    qtorch.quantize_(model, recipe if isinstance(recipe, dict) else {r"layers\..*": recipe})
    return model


def floats(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, qtorch.dtypes.QuantizedTensor) else tensor


@pytest.mark.parametrize("recipe, targets, ignored", [
    ({r"layers\..*": INT4}, ["Linear"], ["embed_tokens", "lm_head"]),
    ({r"layers\..*": INT4, "lm_head": INT4}, ["Linear", "lm_head"], ["embed_tokens"]),  # not a Linear of vLLM
    ({r"layers\..*": INT4, "embed_tokens": INT4}, ["Linear", "embed_tokens"], ["lm_head"]),
])  # fmt: skip
def test_one_scheme_names_the_class_and_what_is_left_out(
    recipe: Any, targets: list[str], ignored: list[str], tmp_path: Path
) -> None:
    model = quantized(recipe)
    config = saved(model, tmp_path / "model")
    assert (weights(config), config["ignore"]) == ([(targets, 4)], ignored)
    assert (config["format"], config["quantization_status"]) == ("pack-quantized", "compressed")
    again = check_loads(model, tmp_path / "model")
    assert isinstance(again.embed_tokens.weight, qtorch.dtypes.QuantizedTensor) == ("embed_tokens" in recipe)


def test_several_schemes_name_every_module(tmp_path: Path) -> None:
    """A class among the targets would take the modules that vLLM joins, whichever group names their parts."""
    model = quantized({r".*mlp.*": INT4, r".*attn.*": qtorch.int8_dynamic_activation_int8_weight()}, layers=2)
    config = saved(model, tmp_path / "model")
    assert config["format"] == "mixed-precision"
    assert sorted(group["format"] for group in config["config_groups"].values()) == ["int-quantized", "pack-quantized"]
    targets = [target for names, _ in weights(config) for target in names]
    assert "Linear" not in targets
    assert set(targets) == {n for n, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    check_loads(model, tmp_path / "model")


@pytest.mark.parametrize("joined", [("self_attn.q_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")])
def test_modules_that_vllm_joins_must_agree(joined: tuple[str, str], tmp_path: Path) -> None:
    first, second = (f"layers.0.{name}" for name in joined)
    model = quantized({second: INT8, r"layers\..*": INT4})
    refuses(f"{first} and {second} differ in their quantization", lambda: saved(model, tmp_path / "model"))
    model = quantized({second: None, r"layers\..*": INT4})
    refuses(f"{first} and {second}: one of them is not quantized", lambda: saved(model, tmp_path / "model"))
    assert not list(tmp_path.iterdir())


STATIC = qtorch.int8_static_activation_int8_weight


@pytest.mark.parametrize("name, one, other, what", [
    ("v_proj", STATIC(0.02), STATIC(0.01), "input"),  # vLLM takes the largest scale; the others would change
    ("up_proj", qtorch.nvfp4_weight_only(2.0**-9), qtorch.nvfp4_weight_only(2.0**-10), "tensor"),
])  # fmt: skip
def test_joined_modules_share_their_scales(name: str, one: Recipe, other: Recipe, what: str, tmp_path: Path) -> None:
    model = quantized({rf".*{name}": one, r"layers\..*": other})
    refuses(rf"_proj and .*{name} differ in their scale of the {what}", lambda: saved(model, tmp_path / "model"))


REFUSED: list[tuple[Recipe, str]] = [
    (qtorch.nf4_weight_only(), "look-up tables"),
    (qtorch.lut_weight_only(), "look-up tables"),
    (qtorch.int4_weight_only(32, qtorch.ZeroPointDomain.FLOAT), "zero points of the domain FLOAT"),
    (qtorch.intx_weight_only("int1", group_size=32), "integers of 2 to 8 bits, these have 1"),
    (qtorch.int8_dynamic_activation_int8_semi_sparse_weight(), "is sparse"),
    (qtorch.fpx_weight_only(3, 2), "codes of float6_e3m2"),
    (qtorch.mxfp6_weight_only(), "codes of float6_e2m3"),
    (qtorch.float8_weight_only(torch.float8_e5m2), "codes of float8_e5m2"),
    (qtorch.nvfp4_dynamic_activation_nvfp4_weight(), "computed from the whole batch; vLLM wants one that was measured"),
    (qtorch.int8_weight_only(), r"quantize with scale_dtype=torch.bfloat16, or quantize_\(model, recipes_for_vllm"),
]


@pytest.mark.parametrize(("recipe", "why"), REFUSED, ids=[str(recipe) for recipe, _ in REFUSED])
def test_what_no_scheme_serves_is_refused_by_name(recipe: Recipe, why: str, tmp_path: Path) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"proj": nn.Linear(64, 64, bias=False)})}).to(torch.bfloat16)
    qtorch.quantize_(model, recipe)
    refuses(rf"block\.proj\.weight: .*{why}", lambda: saved(model, tmp_path / "model"))
    assert not list(tmp_path.iterdir())


def test_convolutions_parameters_and_zero_points_that_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv1d(16, 16, 2))
    qtorch.quantize_(model, {"0": qtorch.int8_weight_only()})
    refuses(r"0\.weight: is the weight of a convolution", lambda: saved(model, tmp_path / "model"))
    bare = nn.Module()
    bare.table = nn.Parameter(torch.randn(4, 16, 16))
    qtorch.quantize_(bare, {"table": qtorch.int8_weight_only()})
    refuses("table is quantized, but not the weight of a module", lambda: saved(bare, tmp_path / "model"))
    spec = qtorch.QuantSpec(torch.int4, mapping=qtorch.MappingType.ASYMMETRIC)  # type: ignore[arg-type]
    weight = qtorch.dtypes.AffineQuantizedTensor.from_float(torch.randn(16, 32), spec)
    codes, scale, zero_point = weight.plain()
    assert zero_point is not None
    far = qtorch.dtypes.AffineQuantizedTensor.from_plain(codes, scale, zero_point + 9, spec, torch.float32)
    with pytest.raises(ValueError, match=r"a\.weight: has zero points beyond its codes of 4 bits"):
        save_format(FORMAT).store("a.weight", far)


@pytest.mark.parametrize("limit", [1, 20_000, 2**30])
def test_shards(limit: int, tmp_path: Path) -> None:
    model = quantized(layers=2)
    folder = tmp_path / "model"
    saved(model, folder, max_shard_size=limit)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (limit == 2**30)
    if limit != 2**30:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(files)
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    check_loads(model, folder)


def test_folders_paths_and_float_models(tmp_path: Path) -> None:
    model = quantized()
    folder = tmp_path / "model"
    saved(model, folder, max_shard_size=1)
    (folder / "tokenizer.json").write_text("{}")
    saved(model, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    check_loads(model, folder)
    saved(model, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refuses("look-up tables", lambda: saved(quantized(qtorch.nf4_weight_only()), folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file; format 'compressed-tensors' is written to a folder"):
        saved(Model(), tmp_path / "file")
    refuses("there is no folder", lambda: saved(Model(), tmp_path / "none" / "model"), FileNotFoundError)
    with pytest.raises(ValueError, match="format 'gguf-ish' is not known; known are 'qtorch', 'awq', 'comp"):
        qtorch.save_quantized(Model(), tmp_path / "model", format="gguf-ish")
    assert FORMAT in SAVE_FORMATS
    model = Model()
    config = saved(model, tmp_path / "floats")
    assert config["config_groups"] == {}
    qtorch.quantize_(model, {r"layers\..*": INT4})
    qtorch.save_quantized(model.state_dict(), tmp_path / "state", format=FORMAT)
    check_loads(model, tmp_path / "state")


def test_tied_weights_and_continued_checkpoints(tmp_path: Path) -> None:
    """A tied head is not stored, and has to be ignored all the same; vLLM ties floats only."""
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight
    qtorch.quantize_(model, {r"layers\..*": INT4})
    assert saved(model, tmp_path / "model")["ignore"] == ["embed_tokens", "lm_head"]
    streamed = save_format(FORMAT, {"tie_word_embeddings": True})
    streamed.store("embed_tokens.weight", model.embed_tokens.weight)
    assert streamed.config()["ignore"] == ["embed_tokens", "lm_head"]
    qtorch.quantize_(model, {"embed_tokens": INT4})
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied to embed_tokens\.weight, which is quantized"):
        saved(model, tmp_path / "tied")
    # As after a kill: another object continues from the progress, which is JSON.
    model = quantized({r"layers\..*mlp.*": INT4, r"layers\..*attn.*": INT8}, layers=2)
    tensors = list(model.state_dict().items())
    whole = save_format(FORMAT)
    for name, tensor in tensors:
        whole.store(name, tensor)
    begun = save_format(FORMAT)
    for name, tensor in tensors[:7]:
        begun.store(name, tensor)
    continued = save_format(FORMAT)
    continued.resume(json.loads(json.dumps(begun.progress())))
    for name, tensor in tensors[7:]:
        continued.store(name, tensor)
    assert continued.config() == whole.config()
    refuses("not the progress of a compressed-tensors checkpoint", lambda: continued.resume({"quantized": 3}))
