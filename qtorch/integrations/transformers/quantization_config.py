"""QtorchConfig: the argument `quantization_config` of `from_pretrained`, and the entry of that name in config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...calibration.methods import Method, with_data
from ...checkpoint.formats.transformers_folder import QUANT_METHOD, VERSION, Names, quantization_config, read_recipe
from ...model.misfit import OnMisfit
from ...recipes.base import Recipe

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
        self,
        recipe: Recipe | Mapping[str, Recipe | None] | Any = None,
        modules_to_not_convert: Sequence[str] | None = None,
        *,
        targets: str | Sequence[str] = "linear",
        on_misfit: OnMisfit = "error",
        calibration: Iterable[Any] | None = None,
        calibration_method: Method = "auto",
        calibration_length: int = 512,
        names: Names = "model",
        model_dtype: str | None = None,
        base_model: str | None = None,
        training: Sequence[Any] = (),
        version: int = VERSION,
        quant_method: str = QUANT_METHOD,
    ) -> None:
        if version != VERSION:
            raise ValueError(f"the folder has version {version!r:.40} of the format; this qtorch reads {VERSION}")
        self.quant_method = quant_method
        self.recipe = dict(recipe) if isinstance(recipe, Mapping) and "type" not in recipe else read_recipe(recipe)
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.targets = targets if isinstance(targets, str) else list(targets)
        self.on_misfit: OnMisfit = on_misfit
        self.calibration = calibration
        self.calibration_method = calibration_method
        self.calibration_length = calibration_length
        self.names = names
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
