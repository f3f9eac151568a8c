"""StoredWeights: the quantized tensors of a folder that `from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint import header, tensor_file
from ...checkpoint.formats.transformers_folder import Index, cast
from ...dtypes import AffineQuantizedTensor, QuantizedTensor, serialize
from ...quantize_api import quantize_
from ...recipes.base import Recipe
from ...training.weights.base import TrainingWeight
from ...training.weights.codes import CodesWeight
from .loading_plan import Plan
from .quantization_config import QtorchConfig

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
