"""Which weights `from_pretrained` quantizes as it loads them, decided on the model without values, and which it finds
quantized in the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ...calibration.texts import are_texts, on_device, token_batches
from ...checkpoint import header, tensor_file
from ...checkpoint.formats.transformers_folder import Index, cast
from ...dtypes import AffineQuantizedTensor, QuantizedTensor, serialize
from ...kernels.registry import choose
from ...model.explain import problem_of
from ...model.misfit import choose as choose_fitting
from ...model.module_repr import get_model_size_in_bytes
from ...model.report import QuantizeReport, skipped_row
from ...model.targets import Target, find_targets, is_asked_by_name, named_errors
from ...quantize_api import check_targets, instead_of, place, quantize_
from ...recipes.base import Recipe, WeightRecipe
from ...training.weights.base import TrainingWeight
from ...training.weights.codes import CodesWeight
from .quantization_config import QtorchConfig


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
        skipped = HfQuantizer.get_modules_to_not_convert(
            model, config.modules_to_not_convert, sorted(model._keep_in_fp32_modules or ())
        )
        for target in self._all:
            _skip(target, skipped, config)
        choose_fitting(self._all, config.on_misfit, _check_form)
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
        kernel = choose(problem_of(made, loaded.module, weight.dtype, weight.device.type)).name  # type: ignore[arg-type]
        self._rows[id(target)] = replace(
            self._rows[id(target)],
            action="quantized",
            detail=str(recipe),
            bytes_before=weight.nbytes,
            bytes_after=made.nbytes,
            kernel=kernel,
        )
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
        size = get_model_size_in_bytes(model)
        saved = sum(row.bytes_before - row.bytes_after for row in rows if row.action == "quantized")
        elements = sum(parameter.numel() for parameter in model.parameters())
        return QuantizeReport(rows, False, elements, 0, size + saved, size)


def batches_of(model: Any, data: Iterable[Any], length: int) -> Iterable[Any]:
    """Batches for a model, of texts with the tokenizer of its folder."""
    if getattr(model.config, "is_encoder_decoder", False) or model.main_input_name != "input_ids":
        raise ValueError(
            f"QtorchConfig: {type(model).__name__} takes more than a text; give calibration= batches, such as "
            "[dict(input_ids=..., decoder_input_ids=...)]"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"QtorchConfig: calibration= is texts, and {model.name_or_path} has no tokenizer; give batches of tokens: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
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
    keys = config.recipe if isinstance(config.recipe, dict) else ()
    for slot in target.slots:
        if slot.recipe is not None and not (by_default and any(is_asked_by_name(key, slot) for key in keys)):
            slot.recipe, slot.refused = None, True
            slot.reason = (
                "left by default: output layer, tied or last module" if by_default else "modules_to_not_convert"
            )
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
        self.config = config
        self.dtype = dtype
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
            tensor = cast(tensor, self.dtype)
        trains = name in self.config.trained() and isinstance(tensor, AffineQuantizedTensor)
        return CodesWeight(tensor.inner_tensors, tensor.scheme) if trains else tensor


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
            file = tensor_file.TensorFile(path)
            state |= {name: file.read(name) for name in missing & file.stored.keys() & stored.others.keys()}
            file.close()
        model.load_state_dict(state, strict=False)
    return recipes
