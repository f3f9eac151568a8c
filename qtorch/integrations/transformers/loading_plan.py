"""QtorchConfig, the argument `quantization_config` of `from_pretrained`; and which weights are quantized as they are
loaded, decided on the model without values, or found quantized in the files.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...calibration.data import are_texts, on_device, token_batches
from ...calibration.methods import Method, with_data
from ...checkpoint import header, tensor_file
from ...checkpoint.formats import transformers_folder
from ...checkpoint.formats.transformers_folder import QUANT_METHOD, VERSION, Index, quantization_config, read_recipe
from ...dtypes import QuantizedTensor, serialize
from ...kernels.registry import choose
from ...model import explain, misfit, module_repr
from ...model.report import QuantizeReport, skipped_row
from ...model.targets import Target, find_targets, is_asked_by_name, named_errors
from ...quantize_api import check_targets, instead_of, place, quantize_
from ...recipes.base import Recipe, WeightRecipe
from ...training.weights.base import TrainingWeight
from ...training.weights.codes import in_training

AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)  # the entry of `qtorch_autoload`


@register_quantization_config(QUANT_METHOD)
class QtorchConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantizes a model while it loads it.

    Args:
        recipe: as in `quantize_`: one recipe, or an ordered mapping from names to recipes.
        targets: what the recipe reaches, a word or some as for `quantize_`.
        on_misfit: as for `quantize_`.
        modules_to_not_convert: names of modules that stay in floating point, as transformers matches them: from the
            start of a name, as a regular expression, or as its end. None: the output layer, tied weights and the last
            module, unless the mapping asks for them by name.
        calibration: data on which the weights are calibrated when all are loaded, in floating point: batches that the
            model takes, or a list of texts, for which the tokenizer of the model is loaded. It is not saved.
        calibration_method: ``"auto"``, ``"gptq"``, or a function (recipe, batches) -> recipe.
        calibration_length: tokens of a piece of a text.
        names, model_dtype, base_model, training, version: written by `save_pretrained`, and read again.

    Raises:
        TypeError: `recipe` is neither a recipe nor a mapping to recipes, or there is an unknown argument.
        ValueError: the folder was written by a newer version of qtorch.
    """

    quant_method: Any

    def __init__(
        self, recipe: Recipe | Mapping[str, Recipe | None] | Any = None,
        modules_to_not_convert: Sequence[str] | None = None, *, targets: str | Sequence[str] = "linear",
        on_misfit: misfit.OnMisfit = "error", calibration: Iterable[Any] | None = None,
        calibration_method: Method = "auto", calibration_length: int = 512, names: transformers_folder.Names = "model",
        model_dtype: str | None = None, base_model: str | None = None, training: Sequence[Any] = (),
        version: int = VERSION, quant_method: str = QUANT_METHOD,
    ) -> None:  # fmt: skip
        if version != VERSION:
            raise ValueError(f"the folder has version {version!r:.40} of the format; this qtorch reads {VERSION}")
        self.quant_method = quant_method
        self.recipe = dict(recipe) if isinstance(recipe, Mapping) and "type" not in recipe else read_recipe(recipe)
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.targets = targets if isinstance(targets, str) else list(targets)
        self.on_misfit: misfit.OnMisfit = on_misfit
        self.calibration, self.calibration_method = calibration, calibration_method
        self.calibration_length, self.names = calibration_length, names
        # Not "dtype": transformers turns the values of keys of that name into dtypes.
        self.model_dtype = model_dtype
        self.base_model = None if base_model is None else name_on_hub(base_model)
        # JSON data until it is used: recipes in files of newer versions must not keep others from loading.
        self.training: list[tuple[Any, list[str]]] = [(each, list(of)) for each, of in training]

    def calibrated(self, batches: Iterable[Any]) -> Any:
        """The recipe, or the mapping, that is calibrated on `batches` if there is data for it."""
        return self.recipe if self.calibration is None else with_data(self.recipe, batches, self.calibration_method)

    def trained(self) -> dict[str, Recipe]:
        """Name of each weight in training -> its recipe."""
        found: dict[str, Recipe] = {}
        for data, names in self.training:
            recipe = read_recipe(data)
            if not isinstance(recipe, Recipe):
                raise ValueError(f"the weights {', '.join(names[:4])} are in training by {data!r:.200}, not known")
            found |= dict.fromkeys(names, recipe)
        return found

    def to_dict(self) -> dict[str, Any]:
        more: dict[str, Any] = {"modules_to_not_convert": self.modules_to_not_convert, "model_dtype": self.model_dtype}
        if self.targets != "linear":
            more["targets"] = self.targets
        if self.on_misfit != "error":
            more["on_misfit"] = self.on_misfit
        if self.base_model:
            more["base_model"] = self.base_model
        if self.training:
            more["training"] = [[recipe, names] for recipe, names in self.training]
        return quantization_config(self.recipe, self.names, **more)


def name_on_hub(name: str | None) -> str | None:
    """`name` if it is the name of a model on the Hub, "organization/model"; None for folders."""
    is_name = name is not None and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None
    return name if is_name and not Path(str(name)).exists() else None


class Plan:
    """The weights of a model on the meta device with their recipes, as `quantize_` would assign them: `targets`, by
    every name that they have, are quantized while they are loaded; those that are to be `trained`, or `calibrated` on
    data, are loaded in floating point. `batches` of `QtorchConfig(calibration=...)` are filled in when the model is
    loaded."""

    @named_errors("QtorchConfig")
    def __init__(self, model: Any, config: QtorchConfig) -> None:
        known = list(config.recipe.values()) if isinstance(config.recipe, dict) else [config.recipe]
        if not known or not all(isinstance(each, Recipe) or (each is None and len(known) > 1) for each in known):
            got = f"{config.recipe!r:.80}{instead_of(config.recipe)}"
            raise ValueError(f"QtorchConfig: takes a recipe, or a mapping from names to recipes; got {got}")
        self.batches: list[Any] = []
        given = config.calibrated(self.batches)
        for recipe in filter(None, given.values() if isinstance(given, dict) else [given]):
            recipe.check_complete()
            if recipe.selects:
                raise ValueError(f"QtorchConfig: {recipe} changes quantized weights: call quantize_ after loading")
        self._all = _tied(find_targets(model, given, None, config.targets), model)
        in_fp32 = sorted(model._keep_in_fp32_modules or ())
        skipped = HfQuantizer.get_modules_to_not_convert(model, config.modules_to_not_convert, in_fp32)
        for target in self._all:
            _skip(target, skipped, config)
        misfit.choose(self._all, config.on_misfit, _check_form)
        asked = [target for target in self._all if target.recipe is not None]
        if not asked:
            raise ValueError(f"QtorchConfig: no weight of {type(model).__name__} is left to quantize")
        place(asked)
        check_targets(asked, _check_form)
        recipes = {target.slot.name: target.recipe for target in asked if target.recipe is not None}
        self.trained = {name: recipe for name, recipe in recipes.items() if recipe.trains}
        self.calibrated = {name: recipe for name, recipe in recipes.items() if recipe.data is not None}
        later = self.trained.keys() | self.calibrated.keys()
        self.targets = {slot.name: target for target in asked if target.slot.name not in later for slot in target.slots}
        self._rows = {id(target): skipped_row(target) for target in self._all}

    def quantize(self, name: str, weight: Tensor) -> Tensor:
        """The quantized tensor that takes the place of `weight`."""
        target = self.targets[name]
        recipe = target.recipe
        assert recipe is not None
        loaded = replace(target.slot, parameter=nn.Parameter(weight, requires_grad=False))
        recipe.check_target(Target([loaded]))
        made: Tensor = recipe.make(Target([loaded]), weight)
        kernel = choose(explain.problem_of(made, loaded.module, weight.dtype, weight.device.type)).name  # type: ignore[arg-type]
        self._rows[id(target)] = replace(
            self._rows[id(target)], action="quantized", detail=str(recipe), bytes_before=weight.nbytes,
            bytes_after=made.nbytes, kernel=kernel,
        )  # fmt: skip
        return made

    def calibrate(self, model: Any, config: QtorchConfig) -> None:
        """Quantize the weights whose recipes run the model on data; it is loaded."""
        if not self.calibrated:
            return
        if config.calibration is not None:
            batches = config.calibration
            if are_texts(batches):
                batches = batches_of(model, batches, config.calibration_length)
            self.batches[:] = [on_device(batch, model.device) for batch in batches]
        done = {row.name: row for row in quantize_(model, self.calibrated).quantized}
        for key, row in self._rows.items():
            self._rows[key] = done.get(row.name, row)

    def report(self, model: nn.Module) -> QuantizeReport:
        """What has been done; weights quantized while loading have no SQNR, since the float weights are gone."""
        rows = tuple(self._rows.values())
        size = module_repr.get_model_size_in_bytes(model)
        saved = sum(row.bytes_before - row.bytes_after for row in rows if row.action == "quantized")
        elements = sum(parameter.numel() for parameter in model.parameters())
        return QuantizeReport(rows, False, elements, 0, size + saved, size)


def batches_of(model: Any, data: Iterable[Any], length: int) -> Iterable[Any]:
    """Batches for a model, of texts with the tokenizer of its folder."""
    if getattr(model.config, "is_encoder_decoder", False) or model.main_input_name != "input_ids":
        raise ValueError(f"QtorchConfig: {type(model).__name__} takes more than a text; give calibration= batches")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"QtorchConfig: {model.name_or_path} has no tokenizer; give batches: {error}") from error
    return token_batches(data, tokenizer, length=length)


def _tied(targets: list[Target[Recipe]], model: Any) -> list[Target[Recipe]]:
    """The targets with those joined that transformers will tie after loading."""
    by_name = {slot.name: target for target in targets for slot in target.slots}
    for alias, name in model.all_tied_weights_keys.items():
        one, other = by_name.get(name), by_name.get(alias)
        if one is not None and other is not None and one is not other:
            one.slots += other.slots
            by_name |= {slot.name: one for slot in other.slots}
    return list({id(target): target for target in by_name.values()}.values())


def _skip(target: Target[Recipe], skipped: Sequence[str], config: QtorchConfig) -> None:
    """Take the recipe from what `skipped` names, unless the mapping asks for what is skipped by default by its name."""
    names = [name for slot in target.slots for name in (slot.name, slot.label)]
    if target.recipe is None or all(should_convert_module(name, list(skipped)) for name in names):
        return
    by_default = config.modules_to_not_convert is None
    left = "left by default: output layer, tied or last module" if by_default else "modules_to_not_convert"
    keys = config.recipe if isinstance(config.recipe, dict) else ()
    for slot in target.slots:
        if slot.recipe is not None and not (by_default and any(is_asked_by_name(key, slot) for key in keys)):
            slot.recipe, slot.refused = None, True
            slot.reason = left
    asked = {str(slot.recipe): slot.label for slot in target.slots if slot.recipe is not None}
    if len(asked) > 1:
        what = ", ".join(f"{label}: {recipe}" for recipe, label in asked.items())
        raise ValueError(f"QtorchConfig: a tied weight takes one recipe, got different ones: {what}")


def _check_form(recipe: Recipe, target: Target[Recipe]) -> None:
    """Raise `ValueError` or `TypeError` for a recipe for inference that does not fit the shape of a weight."""
    if isinstance(recipe, WeightRecipe) and not recipe.trains:
        recipe.check_form(target.kind.view(target.parameter.detach()))


MARKER = "marker"
"""The part that stands for the marker, which is no tensor of the entry."""


class StoredWeights:
    """What the headers of the files say: the entries of all files (`index`), (name of the parameter, part) by key in a
    file (`owners`), every part that one of them has, and the files of all other keys (`others`)."""

    def __init__(self, files: Sequence[str], config: QtorchConfig, dtype: torch.dtype) -> None:
        self.index = Index()
        self.config, self.dtype = config, dtype
        keys: dict[str, Path] = {}
        for path in map(Path, files):
            file = tensor_file.TensorFile(path)
            file.close()
            keys |= dict.fromkeys(file.stored, path)
            try:
                self.index.add(Index.parse(file.metadata))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        parts = self.index.owners()
        if missing := sorted(parts.keys() - keys.keys()):
            raise ValueError(f"{files[0]}: missing key {', '.join(missing[:4])}")
        markers = {name: (name, MARKER) for name in self.index.quantized if name not in parts}
        self.owners: dict[str, tuple[str, str]] = {**markers, **parts}
        self.parts = sorted({part for _, part in parts.values()})
        self.others = {key: path for key, path in keys.items() if key not in self.owners}

    def tensor(self, name: str, parts: Mapping[str, Tensor]) -> QuantizedTensor:
        """The quantized tensor that the files call `name` from its stored parts."""
        entry = self.index.quantized[name]
        by_key = {key: parts[part] for part, key in entry["tensors"].items() if part in parts}
        for key, part in by_key.items():
            # Files of other packages do not align tensors as torch does, and products depend on it.
            if part.device.type == "cpu" and part.data_ptr() % tensor_file.ALIGNMENT:
                by_key[key] = part.clone()
        tensor = serialize.from_canonical(entry, by_key.__getitem__)
        # Weights of another dtype than the saved model had keep theirs.
        if self.config.model_dtype in (None, str(tensor.dtype).removeprefix("torch.")):
            tensor = transformers_folder.cast(tensor, self.dtype)
        return in_training(tensor) if name in self.config.trained() else tensor


def placed(tensor: QuantizedTensor, model: nn.Module, place: str) -> nn.Parameter:
    """The tensor as the parameter `place` of `model`."""
    path, _, attribute = place.rpartition(".")
    module: Any = model.get_submodule(path)
    header.check_fits(Path(place), place, (module, attribute, module._parameters[attribute]), tensor)
    return nn.Parameter(tensor, requires_grad=tensor.trains)


# Weights in training: a folder holds their floats, or codes, and what their recipe has added to the model.
# They are loaded in three steps: the floats by transformers; then the recipes prepare the model, as in `quantize_`;
# then what they have added (learned scales, observed ranges, adapters) is read from the files.


def prepare(model: Any, plan: Plan | None, stored: StoredWeights | None, config: QtorchConfig) -> dict[str, Recipe]:
    """Prepare the weights in training of a model that is loaded; their recipes by name."""
    recipes = dict(plan.trained) if plan is not None else config.trained()
    if not recipes:
        return {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    floats = {name: recipe for name, recipe in recipes.items() if not isinstance(parameters.get(name), TrainingWeight)}
    if floats:
        quantize_(model, floats)
    if stored is not None:
        # The state that was not there when the weights were loaded.
        missing = model.state_dict().keys() - parameters.keys()
        state: dict[str, Tensor] = {}
        for path in set(stored.others.values()):
            with tensor_file.TensorFile(path) as file:
                state |= {name: file.read(name) for name in missing & file.stored.keys() & stored.others.keys()}
        model.load_state_dict(state, strict=False)
    return recipes
