"""saved_state: what `save_pretrained` writes for a model, and what `load_state_dict` of such a model reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...dtypes import QuantizedTensor
from ...dtypes.serialize import from_canonical, to_canonical
from ...formats.transformers_folder import Index
from ...formats.transformers_folder.names import is_marker
from ...prepared_module import PreparedModule, QuantizationState
from ...recipe import Recipe
from ...training.weights.base import TrainingWeight
from ...training.weights.codes import CodesWeight
from ...training.weights.master import MasterWeight
from ..plain_state import plain_state


def state_to_save(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(plain tensors by stored name, metadata).

    Of tied weights one is stored, the one whose name transformers does not derive from another; so is the state that
    their layers share.
    """
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    index = Index()
    first: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        original = first.setdefault(id(state[name]), name)
        # transformers refuses to save what is shared for reasons that it does not know.
        if original != name and (name in tied or _is_of_quantizer(model, name)):
            index.aliases[name] = original
    found = plain_state({name: tensor for name, tensor in state.items() if name not in index.aliases}, index)
    return found, index.to_metadata()


def _is_of_quantizer(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to what quantization has added to a layer."""
    parts = name.split(".")[:-1]
    return any(
        isinstance(model.get_submodule(".".join(parts[:end])), QuantizationState) for end in range(1, len(parts) + 1)
    )


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

    Each weight takes the scheme of the model, which must be quantized as the saved one was.

    Raises:
        ValueError: a weight is not stored as the model's is.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = prefix + name
        if not isinstance(parameter, QuantizedTensor) or isinstance(parameter, MasterWeight):
            continue
        if key not in state or not is_marker(state[key].shape):
            continue
        _, entry = to_canonical(key, parameter)
        parts = {part: f"{key}_codes" if old == key else old for part, old in entry["tensors"].items()}
        if missing := sorted(set(parts.values()) - state.keys()):
            raise ValueError(f"{key} is stored in another way than the model holds it: there is no {missing[0]}")
        try:
            tensor = from_canonical({**entry, "tensors": parts}, state.pop)
        except ValueError as error:
            raise ValueError(f"{key} is stored in another way than the model holds it: {error}") from error
        is_codes = isinstance(parameter, CodesWeight)
        state[key] = CodesWeight(tensor.inner_tensors, tensor.scheme) if is_codes else tensor
