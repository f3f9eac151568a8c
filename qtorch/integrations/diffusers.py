"""diffusers: `from_pretrained` and `save_pretrained` of models that qtorch quantizes.

    model = UNet2DModel.from_pretrained(path, quantization_config=QtorchConfig(int8_weight_only()))

This file registers the method "qtorch" in the tables of diffusers, which has no other way; `import qtorch` has it
imported after diffusers. Each weight is quantized as soon as it is read, so that the float model is never in memory as
a whole. Files hold plain tensors (see `dtypes.serialize`) and JSON in the metadata of each shard.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from ..primitives import files, supported_versions

supported_versions.check_version("diffusers")

from diffusers import ModelMixin
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from safetensors import safe_open
from torch import Tensor, nn

from ..checkpoint.formats.transformers_folder import read_recipe, recipe_json
from ..dtypes import QuantizedTensor, serialize
from ..model.module_repr import show_quantized, with_codes_counted
from ..model.targets import Target, find_targets, named_errors
from ..quantize_api import dequantize_
from ..recipes.base import Recipe
from .plain_state import plain_state

METADATA = "qtorch.tensors"
"""Key of the metadata of a file: JSON of the entries of its quantized tensors, by name."""


class Method(str, Enum):
    """The name of the method, an enum because diffusers reads its `value`."""

    QTORCH = "qtorch"


class QtorchConfig(QuantizationConfigMixin):
    """The argument `quantization_config` of `from_pretrained`, and the entry of that name in config.json.

    Args:
        recipe: as in `quantize_`: a recipe for every `nn.Linear`, or an ordered mapping from names to recipes, which
            also reaches convolutions and embeddings.
        modules_to_not_convert: parts of names; a weight whose name has one of them stays in floating point.

    Raises:
        TypeError: `recipe` is neither.
    """

    def __init__(
        self, recipe: Recipe | Mapping[str, Recipe | None] | Any = None, modules_to_not_convert: Sequence[str] = (),
        quant_method: str = Method.QTORCH.value,
    ) -> None:  # fmt: skip
        self.quant_method: Any = Method(quant_method)
        self.recipe = dict(recipe) if isinstance(recipe, Mapping) and "type" not in recipe else read_recipe(recipe)
        for each in self.recipe.values() if isinstance(self.recipe, dict) else [self.recipe]:
            if not isinstance(each, Recipe | None):
                raise TypeError(f"QtorchConfig takes a recipe (int8_weight_only()) or a mapping, got {each!r:.80}")
        self.modules_to_not_convert = list(modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json; a mapping becomes a list of pairs, whose order counts."""
        skipped = self.modules_to_not_convert
        recipe = recipe_json(self.recipe)
        return {"quant_method": Method.QTORCH.value, "recipe": recipe, "modules_to_not_convert": skipped}

    to_diff_dict = to_dict  # what diffusers shows


class QtorchQuantizer(DiffusersQuantizer):
    """What diffusers calls while it loads and saves a model."""

    use_keep_in_fp32_modules = is_serializable = is_trainable = is_compileable = True
    supports_parallel_loading = False  # the tensors of a weight may be in two shards

    def __init__(self, quantization_config: QtorchConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.targets: dict[str, Target[Recipe]] = {}
        self.entries: dict[str, serialize.Entry] = {}
        self.waiting: dict[str, Tensor] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise `ValueError` for weights on disk, which are read as one tensor each."""
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("qtorch: quantized weights cannot be offloaded to disk; use a device_map without 'disk'")

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        return torch.int8

    @named_errors("QtorchConfig")
    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        if self.pre_quantized:
            return
        if config.recipe is None:
            raise ValueError("QtorchConfig: a model in floating point needs a recipe: QtorchConfig(int8_weight_only())")
        kept = [*config.modules_to_not_convert, *(kwargs.get("keep_in_fp32_modules") or ())]
        for target in find_targets(model, config.recipe, None):
            names = [slot.name for slot in target.slots]
            if target.recipe is None or any(part in name for part in kept for name in names):
                continue
            if target.recipe.data is not None or target.recipe.trains:
                raise ValueError(
                    f"QtorchConfig: {target.recipe} cannot be applied while loading: load the model in floating point, "
                    "then call quantize_"
                )
            self.targets.update(dict.fromkeys(names, target))
        if not self.targets:
            raise ValueError(f"QtorchConfig: no weight of {type(model).__name__} is left to quantize")

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, state_dict: dict[str, Any], **kwargs: Any
    ) -> bool:
        return param_name in (self.entries if self.pre_quantized else self.targets)

    def create_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, target_device: torch.device, *args: Any, **kwargs: Any
    ) -> nn.Parameter:
        """Install a weight, which is quantized here unless the file holds it so."""
        weight = param_value.to(target_device)
        if not isinstance(weight, QuantizedTensor):
            slot = replace(self.targets[param_name].slot, parameter=nn.Parameter(weight, False))
            target, recipe = Target([slot]), slot.recipe
            assert recipe is not None
            try:
                recipe.check_target(target)
            except (ValueError, TypeError) as error:
                raise type(error)(f"QtorchConfig: {param_name}: {error}") from error
            weight = recipe.make(target, weight)
        parent, _, attribute = param_name.rpartition(".")
        parameter = nn.Parameter(weight, requires_grad=False)
        model.get_submodule(parent)._parameters[attribute] = parameter
        return parameter

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for module in model.modules():
            show_quantized(module)

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain tensors, and the metadata that describes them."""
        if not safe_serialization:
            raise ValueError("qtorch: a quantized model is saved as safetensors: safe_serialization=True")
        for name, tensor in state_dict.items():
            if isinstance(tensor, QuantizedTensor) and tensor.trains:
                raise ValueError(f"qtorch: {name} is in training; call quantize_(model, convert()) first")
        entries: dict[str, serialize.Entry] = {}
        return plain_state(state_dict, entries, serialize.to_canonical), {METADATA: json.dumps(entries)}

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """The names of the parameters, given those of the tensors in the files."""
        if not self.pre_quantized:
            return loaded_keys
        for path in checkpoint_files:
            with safe_open(path, framework="pt") as file:
                self.entries |= files.parse_json((file.metadata() or {}).get(METADATA, "{}"))
        for entry in self.entries.values():
            serialize.check_entry(entry)
        if not self.entries:
            raise ValueError(f"{checkpoint_files[0]}: config.json says it is quantized by qtorch, its metadata not")
        parts = self._parts()
        return [*(key for key in loaded_keys if key not in parts), *self.entries]

    def _parts(self) -> set[str]:
        return {stored for entry in self.entries.values() for stored in entry["tensors"].values()}

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors of one file, those of a weight put together; they wait for those that are in another file."""
        if not self.entries:
            return state_dict
        parts = self._parts()
        found = {key: tensor for key, tensor in state_dict.items() if key not in parts}
        self.waiting.update({key: tensor for key, tensor in state_dict.items() if key in parts})
        for name, entry in self.entries.items():
            if all(stored in self.waiting for stored in entry["tensors"].values()):
                found[name] = serialize.from_canonical(entry, self.waiting.pop)
        return found

    def _dequantize(self, model: Any) -> Any:
        dequantize_(model)
        # register_to_config can add entries, not remove one.
        kept = {name: value for name, value in model._internal_dict.items() if name != "quantization_config"}
        model._internal_dict = type(model._internal_dict)(kept)
        return model


def attach(model: Any) -> Any:
    """Let `model`, which `quantize_` has quantized, save itself by `save_pretrained`.

    Models that `from_pretrained` has quantized do not need it.

    Raises:
        TypeError: `model` is not a model of diffusers.
        ValueError: no weight of the model is quantized.
    """
    if not isinstance(model, ModelMixin):
        raise TypeError(f"attach takes a model of diffusers, got a {type(model).__name__}")
    own: Any = model
    if not any(isinstance(parameter, QuantizedTensor) for parameter in own.parameters()):
        raise ValueError(f"attach: no weight of this {type(model).__name__} is quantized; call quantize_ first")
    config = QtorchConfig()
    own.hf_quantizer = QtorchQuantizer(config, pre_quantized=True)
    own.is_quantized = True
    own.quantization_method = config.quant_method
    own.register_to_config(quantization_config=config)
    return own


auto.AUTO_QUANTIZER_MAPPING[Method.QTORCH.value] = QtorchQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[Method.QTORCH.value] = QtorchConfig

ModelMixin.get_memory_footprint = with_codes_counted(ModelMixin.get_memory_footprint)  # type: ignore[attr-defined]
