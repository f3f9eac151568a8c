"""The plug-ins of vLLM and SGLang on the layers of their own sources, where they are installed, and on stand-ins with
the interface that both declare: outputs are those of the model in transformers, bit for bit."""

import sys
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from qtorch import int4_weight_only, int8_dynamic_activation_int8_weight, int8_weight_only, quantize_
from qtorch.integrations import serving_engines
from tests.integrations.transformers.tiny_models import build
from tests.refusals import refuses

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
BLOCK = "model.layers.0"


class StandInConfig(ABC):  # noqa: B024
    """What `QuantizationConfig` of both engines asks for."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    get_name = get_supported_act_dtypes = get_min_capability = abstractmethod(lambda self: None)
    get_config_filenames = from_config = get_quant_method = abstractmethod(lambda self: None)


class StandInLinear(torch.nn.Module):
    """What `LinearBase` and its kin do with a method."""

    def __init__(self, inputs: int, sizes: list[int], config: Any, prefix: str, *, rows: bool) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = self.tp_group = RANKS
        self.quant_method = config.get_quant_method(self, prefix)
        own = [size if rows else size // self.tp_size for size in sizes]
        cut = inputs // self.tp_size if rows else inputs
        self.quant_method.create_weights(self, cut, own, inputs, sum(sizes), torch.float32, weight_loader=None)


RANKS = (0, 1)


class Engine:
    """One engine: its registered class of configurations, and its linear layers."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        self.name, self.patch = name, patch
        root = {"vllm": "vllm.model_executor.layers", "sglang": "sglang.srt.layers"}[name.removeprefix("stand-in ")]
        if name.startswith("stand-in"):
            unquantized = type("UnquantizedLinearMethod", (), {})
            linear = {"LinearBase": StandInLinear, "LinearMethodBase": ABC, "UnquantizedLinearMethod": unquantized}
            linear |= {"get_group_rank_size": lambda group: group}
            quantization: dict[str, Any] = {"QuantizationConfig": StandInConfig, "QUANTIZATION_METHODS": []}
            if "vllm" in name:
                methods = quantization["QUANTIZATION_METHODS"]
                quantization["get_quantization_config"] = lambda method: self.found[method]
                quantization["register_quantization_config"] = lambda method: (
                    lambda cls: (methods.append(method), self.found.__setitem__(method, cls))
                )
            else:
                quantization |= {"QUANTIZATION_METHODS": self.found, "CPU_QUANTIZATION_METHODS": {}}
                quantization["get_quantization_config"] = lambda method: self.found[method]
            for path, content in {
                "linear": linear,
                "quantization": quantization,
                "quantization.base_config": linear,
                "quantization.unquant": linear,
            }.items():
                module = ModuleType(f"{root}.{path}")
                vars(module).update(content)
                patch.setitem(sys.modules, module.__name__, module)
        else:
            pytest.importorskip(name)
        try:
            self.linear = import_module(f"{root}.linear")
        except ImportError as error:
            pytest.skip(f"{name} does not import here: {error}")
        register = getattr(serving_engines, f"register_{name.removeprefix('stand-in ')}")
        register(), register()
        self.config_class = import_module(f"{root}.quantization").get_quantization_config("qtorch")

    found: dict[str, Any]

    def config(self, folder: Path) -> Any:
        if "sglang" in self.name:
            named = SimpleNamespace(name_or_path=str(folder))
            return self.config_class.from_config({"hf_config": named, "packed_modules_mapping": PACKED})
        made = self.config_class.from_config({"quant_method": "qtorch"})
        made.maybe_update_config(str(folder), hf_config=None, revision=None)
        made.packed_modules_mapping = PACKED
        return made

    def layer(self, inputs: int, sizes: list[int], config: Any, prefix: str, ranks: tuple[int, int], rows: bool) -> Any:
        rank, size = ranks
        if self.name.startswith("stand-in"):
            self.patch.setitem(globals(), "RANKS", ranks)
            return StandInLinear(inputs, sizes, config, prefix, rows=rows)
        more: dict[str, Any] = {"bias": False, "quant_config": config, "prefix": prefix}
        more["params_dtype"] = torch.float32
        if self.name == "sglang":
            self.patch.setattr(self.linear, "_resolve_linear_group", lambda group: ranks)
            self.patch.setattr(self.linear, "get_group_rank_size", lambda group: group)
        else:
            self.patch.setattr(self.linear, "get_tensor_model_parallel_rank", lambda: rank)
            self.patch.setattr(self.linear, "get_tensor_model_parallel_world_size", lambda: size)
        if rows:
            return self.linear.RowParallelLinear(inputs, sizes[0], **more)
        return self.linear.MergedColumnParallelLinear(inputs, sizes, **more)


@pytest.fixture(params=["stand-in vllm", "stand-in sglang", "vllm", "sglang"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(Engine, "found", {}, raising=False)
    return Engine(request.param, monkeypatch)


RECIPES = {
    "int8": int8_weight_only(),
    "int4": int4_weight_only(group_size=32),
    "dynamic": int8_dynamic_activation_int8_weight(),
}


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_those_of_transformers(engine: Engine, recipe: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    model = build("llama")
    quantize_(model, {"lm_head": None, r".*": RECIPES[recipe]})
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = engine.config(tmp_path)
    assert config.get_name() == "qtorch"
    assert torch.bfloat16 in config.get_supported_act_dtypes()
    rank, size = ranks
    mlp = model.model.layers[0].mlp
    inputs, outputs = mlp.gate_proj.in_features, mlp.gate_proj.out_features
    for joined, names, rows in (("gate_up_proj", ["gate_proj", "up_proj"], False), ("down_proj", ["down_proj"], True)):
        sizes = [mlp.get_submodule(name).out_features for name in names]
        ins = mlp.get_submodule(names[0]).in_features
        layer = engine.layer(ins, sizes, config, f"{BLOCK}.mlp.{joined}", ranks, rows)
        for number, name in enumerate(names):
            for key, tensor in stored.items():
                if key.startswith(f"{BLOCK}.mlp.{name}."):
                    parameter = layer.get_parameter(key.rpartition(".")[2])
                    parameter.weight_loader(parameter, tensor, *([] if rows else [number]))
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(3, ins)
        bias = None if rows else torch.randn(sum(sizes) // size)
        if rows and size == 2:
            weight = mlp.down_proj.weight
            own = weight.narrow(1, rank * ins // 2, ins // 2)
            x = x[:, : ins // 2].contiguous()
            wanted = torch.nn.functional.linear(x, own)
            dense = weight.dequantize()[:, rank * ins // 2 :][:, : ins // 2]
            assert torch.equal(layer.weight_0.dequantize(), dense)
        else:
            wanted = torch.cat([mlp.get_submodule(name)(x).chunk(size, -1)[rank] for name in names], -1)
        found = layer.quant_method.apply(layer, x)
        assert torch.equal(found, wanted)
        if bias is not None:
            torch.testing.assert_close(layer.quant_method.apply(layer, x, bias), wanted + bias)
    assert (inputs, outputs) == (mlp.down_proj.out_features, mlp.down_proj.in_features)


def test_what_is_refused(engine: Engine, tmp_path: Path) -> None:
    model = build("llama")
    quantize_(model, {"lm_head": RECIPES["int8"], r".*\.gate_proj": RECIPES["int8"], r".*": None})
    model.save_pretrained(tmp_path)
    config = engine.config(tmp_path)
    with pytest.raises(ValueError, match=r"joins .*gate_proj, .*up_proj, but .*up_proj are floats"):
        engine.layer(64, [64, 64], config, f"{BLOCK}.mlp.gate_up_proj", (0, 1), False)
    with pytest.raises(ValueError, match="lm_head is a Embedding with quantized weights"):
        config.get_quant_method(torch.nn.Embedding(4, 4), "lm_head")
    assert config.get_quant_method(torch.nn.Identity(), f"{BLOCK}.input_layernorm") is None
    refuses("has no weights of qtorch", lambda: serving_engines.read_entries(str(tmp_path / "..")))
    refuses("weights in training", lambda: engine.config_class.from_config({"training": [1]}))
