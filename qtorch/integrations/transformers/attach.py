"""attach: a model of transformers that qtorch quantizes after loading knows that it is quantized, as a loaded one does.

So `save_pretrained`, `Trainer` and `model.dequantize()` work for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...formats.transformers_folder.config import read_recipe, recipe_json
from ...recipe import Recipe
from .config import QtorchConfig, name_on_hub
from .quantizer import QtorchHfQuantizer
from .saved_state import in_training


def model_changed(model: nn.Module, recipes: Mapping[str, Recipe]) -> None:
    """Listener of `quantize_`, `load_quantized` and `dequantize_`."""
    modeling = sys.modules.get("transformers.modeling_utils")
    pretrained = getattr(modeling, "PreTrainedModel", None)
    if pretrained is not None and isinstance(model, pretrained):
        attach(model, recipes)


def attach(model: Any, recipes: Mapping[str, Recipe]) -> None:
    """Give the model a quantizer, or update or remove the one that it has, by what its weights are now.

    A quantizer of another package is left alone.
    """
    from .stored_weights import is_quantized

    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, QtorchHfQuantizer):
        return
    if not is_quantized(model) and not in_training(model):
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
