"""QtorchHfQuantizer: what transformers asks about a quantized model while it loads, saves and trains it; and the two
`ConversionOps` of its loading: one quantizes a weight, one reads stored ones.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import core_model_loading
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ...checkpoint.formats.transformers_folder import QUANT_METHOD, Index, is_marker, read_recipe, recipe_json
from ...dtypes import QuantizedTensor, serialize
from ...model import module_repr, report
from ...model.install import PreparedModule, QuantizationState
from ...quantize_api import dequantize_
from ...recipes.base import Recipe
from ...training.weights import codes, master
from ...training.weights.base import TrainingWeight
from ..plain_state import plain_state
from . import experts_interface
from .loading_plan import Plan, QtorchConfig, StoredWeights, name_on_hub, placed, prepare


class Origin(NamedTuple):
    """What a parameter is made of: by a converter of the model, which fuses or splits, of stored names by its source
    pattern, in the order in which it takes them; or, without one, of a weight as it is stored."""

    converter: WeightConverter | None
    names: dict[str, list[str]]


def origins(stored: Iterable[str], others: Iterable[str], conversions: list[Any], model: Any) -> dict[str, Origin]:
    """Name of a parameter in the model -> what it is made of, as transformers renames and fuses it while loading. A
    converter that makes several parameters of one is under the name of the first one."""
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    found: dict[str, Origin] = {}
    rename = core_model_loading.rename_source_key
    for name in sorted(stored, key=core_model_loading.dot_natural_key):
        place, _ = rename(name, renamings, [], model.base_model_prefix, state)
        fused, pattern = rename(name, renamings, converters, model.base_model_prefix, state)
        if place in state or pattern is None or fused not in state:
            found[place] = Origin(None, {"": [name]})
        else:
            found.setdefault(fused, Origin(by_pattern[pattern], {})).names.setdefault(pattern, []).append(name)
    for name in others:
        fused, _ = core_model_loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if fused in found and found[fused].converter is not None:
            one = next(iter(found[fused].names.values()))[0]
            raise ValueError(f"qtorch: {one} is stored quantized, {name} not, both are in {fused}; quantize all of it")
    return found


PREFIX = "qtorch:"
"""Begins the source patterns of `StoredNames`, which no other converter has."""


class Quantize(ConversionOps):
    """Quantizes one weight, right after it has been read (and its experts fused) and before the next one is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        # A converter of the model that makes several parameters calls this once for all of them.
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {
            name: [nn.Parameter(self.plan.quantize(name, value), requires_grad=False)]
            if name in self.plan.targets
            else [value]
            for name, value in found.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantize:
        return self


class Deserialize(ConversionOps):
    """Makes quantized tensors from their stored parts, and lets the converter of the model fuse or split them."""

    hf_quantizer = True
    """Tells transformers not to cast the parts to the dtype of the model."""

    def __init__(self, stored: StoredWeights, origins: Mapping[str, Origin]) -> None:
        self.stored, self.origins = stored, origins

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        place, model = kwargs["full_layer_name"], kwargs["model"]
        converter, names = self.origins[place]
        tensors = {
            pattern: self._tensors(of, {part: input_dict.get(_key(index, part)) for part in self.stored.parts})
            for index, (pattern, of) in enumerate(names.items())
        }
        if converter is None:
            return {place: [placed(tensors[""][0], model, place)]}
        run: Any = deepcopy(converter)
        run.collected_tensors = tensors
        made = run.convert(place, model=model, config=model.config)
        firsts = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {name: [placed(value, model, name)] for name, value in firsts.items()}

    def _tensors(self, names: list[str], parts: dict[str, Any]) -> list[QuantizedTensor]:
        """The tensors of these names, of each part a list in the same order."""
        given = {part: found for part, found in parts.items() if found}
        if any(len(found) != len(names) for found in given.values()):
            raise ValueError(f"{names[0]} to {names[-1]} are not quantized alike")
        return [self.stored.tensor(name, {part: of[at] for part, of in given.items()}) for at, name in enumerate(names)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Deserialize:
        return self


class StoredNames(WeightConverter):
    """Collects the stored parts of each parameter. It looks names up, where others match patterns: it takes a key if
    and only if it is a part, or the marker, of a quantized parameter; all others pass it."""

    __slots__ = ("owners",)

    def __init__(self, stored: StoredWeights, conversions: list[Any], model: Any) -> None:
        found = origins(stored.index.quantized, stored.others, conversions, model)
        places = {
            name: (place, index)
            for place, origin in found.items()
            for index, names in enumerate(origin.names.values())
            for name in names
        }
        # transformers renames keys before it asks a converter.
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self.owners = {
            apply_renamings(key, renamings): (places[name][0], _key(places[name][1], part))
            for key, (name, part) in stored.owners.items()
        }
        patterns = sorted({pattern for _, pattern in self.owners.values()})
        super().__init__(patterns, "qtorch", operations=[Deserialize(stored, found)])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.owners.get(source_key, (source_key, None))

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredNames:
        # transformers copies a converter for every key that it takes: the names are not copied with it.
        new = copy(self)
        new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
        return new


def apply_renamings(key: str, renamings: list[Any]) -> str:
    """`core_model_loading.apply_renamings`, which 5.21 added."""
    if hasattr(core_model_loading, "apply_renamings"):
        return str(core_model_loading.apply_renamings(key, renamings))
    for renaming in renamings:
        key, _ = renaming.rename_source_key(key)
    return key


def _key(index: int, part: str) -> str:
    """The source pattern of a part of what the converter of the model calls its source number `index`."""
    return f"{PREFIX}{index}:{part}"


def state_to_save(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(plain tensors by stored name, metadata). Of tied weights one is stored, the one whose name transformers does not
    derive from another; so is the state that their layers share."""
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    index = Index()
    first: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        original = first.setdefault(id(state[name]), name)
        if original == name:
            continue
        # transformers refuses to save what is shared for reasons that it does not know.
        parts = name.split(".")
        holders = (model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))
        if name in tied or any(isinstance(module, QuantizationState) for module in holders):
            index.aliases[name] = original
    found = plain_state({name: tensor for name, tensor in state.items() if name not in index.aliases}, index.quantized)
    return found, index.to_metadata()


def in_training(model: nn.Module) -> list[str]:
    """Names of the weights that are in training, by their tensor or by their module."""
    return [
        f"{prefix}.{attribute}" if prefix else attribute
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if isinstance(parameter, TrainingWeight) or (isinstance(module, PreparedModule) and attribute == "weight")
    ]


def still_trained(model: nn.Module, recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Those of `recipes` whose weights are in training."""
    return {name: recipes[name] for name in in_training(model) if name in recipes}


def read_stored(model: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Hook before `load_state_dict`: join the stored parts of quantized weights, as `Trainer` reads them from a file.
    Each weight takes the scheme of the model, which must be quantized as the saved one was."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = prefix + name
        if not isinstance(parameter, QuantizedTensor) or isinstance(parameter, master.MasterWeight):
            continue
        if key not in state or not is_marker(state[key].shape):
            continue
        _, entry = serialize.to_canonical(key, parameter)
        parts = {part: f"{key}_codes" if old == key else old for part, old in entry["tensors"].items()}
        if missing := sorted(set(parts.values()) - state.keys()):
            raise ValueError(f"{key} is stored in another way than the model holds it: there is no {missing[0]}")
        try:
            tensor = serialize.from_canonical({**entry, "tensors": parts}, state.pop)
        except ValueError as error:
            raise ValueError(f"{key} is stored in another way than the model holds it: {error}") from error
        in_codes = isinstance(parameter, codes.WeightInCodes)
        state[key] = codes.in_training(tensor) if in_codes else tensor


logger = logging.getLogger(__name__)

_DISK = (
    "qtorch: device_map puts a part of the model on 'disk', where transformers keeps floats alone; load without 'disk' "
    "(device_map='cpu'), which takes the memory of the quantized weights, and then call "
    "qtorch.integrations.accelerate.dispatch_model(model, device_map, offload_dir=...)"
)


@register_quantizer(QUANT_METHOD)
class QtorchHfQuantizer(HfQuantizer):
    """See the top of the file.

    Attributes:
        report: what on-the-fly quantization has done; None for a model that was loaded quantized.
        trained: recipe of each weight in training, by name.
    """

    requires_calibration = False
    is_trainable = True  # every kernel passes the gradient on to the input, so that adapters train
    quantization_config: QtorchConfig

    def __init__(self, quantization_config: QtorchConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: report.QuantizeReport | None = None
        self.trained: dict[str, Recipe] = {}
        self._plan: Plan | None = None
        self._stored: StoredWeights | None = None
        self._in_training = False
        self._compiles = True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in map(str, device_map.values()):
            raise ValueError(_DISK)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        if not self.pre_quantized:
            self.quantization_config.base_model = name_on_hub(model.name_or_path)
            self._plan = Plan(model, self.quantization_config)
            return model
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise ValueError(
                "qtorch: a quantized model is loaded from the safetensors files of its folder, not from a state dict: "
                "their headers say how its weights are quantized"
            )
        self._stored = StoredWeights(checkpoint_files, self.quantization_config, model.dtype)
        if self.quantization_config.training:
            # What recipes have added to the model is read later.
            state = model.state_dict()
            patterns = [f"^{re.escape(key)}$" for key in self._stored.others if key not in state]
            now = model._keys_to_ignore_on_load_unexpected  # a list before 5.10, then a set
            both: Any = now | set(patterns) if isinstance(now, set) else [*(now or ()), *patterns]
            model._keys_to_ignore_on_load_unexpected = both
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._plan is not None and param_name in self._plan.targets

    def get_quantize_ops(self) -> Any:
        assert self._plan is not None
        return Quantize(self._plan)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Put the converter of stored weights first; names that `save_pretrained` wrote are those of the model."""
        if self._stored is None:
            return weight_conversions
        if self.quantization_config.names == "model":
            from transformers.conversion_mapping import get_model_conversion_mapping

            # Those of the argument `key_mapping` come before those of the model.
            of_model = len(get_model_conversion_mapping(model))
            weight_conversions = weight_conversions[: len(weight_conversions) - of_model]
        return [StoredNames(self._stored, weight_conversions, model), *weight_conversions]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if "disk" in map(str, (getattr(model, "hf_device_map", None) or {}).values()):
            raise ValueError(_DISK)
        self.trained = prepare(model, self._plan, self._stored, self.quantization_config)
        if self._plan is not None:
            self._plan.calibrate(model, self.quantization_config)
            self.quantization_config = model.config.quantization_config = copy(self.quantization_config)
            self.quantization_config.calibration = None
            self.report = self._plan.report(model)
            logger.info(str(self.report))
        self._plan = self._stored = None
        self.watch(model)
        experts_interface.choose(model)
        for module in model.modules():
            module_repr.show_quantized(module)
        return model

    def watch(self, model: Any) -> None:
        """Prepare a model that is quantized now to be saved, trained and compiled."""
        # Stored names are those of the model: its converters must not split codes as they split float experts.
        model._weight_conversions = []
        if not any(getattr(hook, "hook", None) is read_stored for hook in model._load_state_dict_pre_hooks.values()):
            model.register_load_state_dict_pre_hook(read_stored)
        self.trained = still_trained(model, self.trained)
        self._in_training = bool(in_training(model))
        # Experts in training run one after the other, as many as the router chooses: no graph holds them.
        stacks = [p for p in model.parameters() if isinstance(p, QuantizedTensor) and p.dim() == 3]
        self._compiles = not any(stack.trains for stack in stacks)

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        config = self.quantization_config
        config.names = "model"
        config.model_dtype = str(model.dtype).removeprefix("torch.")
        model.config.quantization_config = config
        groups: dict[Recipe, list[str]] = {}
        for name, recipe in still_trained(model, self.trained).items():
            groups.setdefault(recipe, []).append(name)
        config.training = [(recipe_json(recipe), names) for recipe, names in groups.items()]
        return state_to_save(model)

    @property
    def is_qat_trainable(self) -> bool:
        """Whether weights of the model themselves are in training."""
        return self._in_training

    @property
    def is_compileable(self) -> bool:
        return self._compiles

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # A model that was saved has the name of its dtype in its config.
        return dequantize_(model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


# attach: a model of transformers that qtorch quantizes after loading knows that it is quantized, as a loaded one does.
# So `save_pretrained`, `Trainer` and `model.dequantize()` work for it.


def model_changed(model: nn.Module, recipes: Mapping[str, Recipe]) -> None:
    """Listener of `quantize_`, `load_quantized` and `dequantize_`."""
    modeling = sys.modules.get("transformers.modeling_utils")
    pretrained = getattr(modeling, "PreTrainedModel", None)
    if pretrained is not None and isinstance(model, pretrained):
        attach(model, recipes)


def attach(model: Any, recipes: Mapping[str, Recipe]) -> None:
    """Give the model a quantizer, or update or remove the one that it has, by what its weights are now; a quantizer of
    another package is left alone."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, QtorchHfQuantizer):
        return
    if not any(isinstance(p, QuantizedTensor) for p in model.parameters()) and not in_training(model):
        # Also without a quantizer of its own: models that are built from one config share it.
        if quantizer is not None or isinstance(getattr(model.config, "quantization_config", None), QtorchConfig):
            quantizer = quantizer or QtorchHfQuantizer(QtorchConfig())
            quantizer.remove_quantization_config(model)
            model.config._is_quantized = False
        return
    if quantizer is None:
        config = QtorchConfig(base_model=name_on_hub(model.name_or_path))
        quantizer = QtorchHfQuantizer(config, pre_quantized=True)
        model.hf_quantizer = quantizer
        model.is_quantized = True
        model.quantization_method = quantizer.quantization_config.quant_method
        model.config.quantization_config = quantizer.quantization_config
        model.config._is_quantized = True
    quantizer.quantization_config.recipe = _shown(quantizer.quantization_config.recipe, recipes)
    quantizer.trained |= {name: recipe for name, recipe in recipes.items() if recipe.trains}
    quantizer.watch(model)


def _shown(before: Any, recipes: Mapping[str, Recipe]) -> Any:
    """The recipes of the config after another call of `quantize_`: one, or a mapping whose first match counts."""
    # `convert` is left out: what it makes is said by the recipe of the training. And batches and functions of a recipe
    # do not belong into a config, which is copied and written.
    now = {name: read_recipe(recipe_json(each)) for name, each in recipes.items() if not each.selects}
    if not now:
        return before
    if before is None and len({str(each) for each in now.values()}) == 1:
        return next(iter(now.values()))
    older = before if isinstance(before, dict) else {} if before is None else {r".*": before}
    return {**now, **{name: each for name, each in older.items() if name not in now}}
