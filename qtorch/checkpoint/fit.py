"""Checks that a checkpoint fits a model; errors name the file and the parameter or buffer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from torch import Tensor, nn

from ..dtypes import ConvWeight, QuantizedTensor, TransposedWeight
from ..prepared_module import PreparedModule
from ..weight_kinds import UNKNOWN, kind_of
from .file_format import Place

FLOAT_ONLY: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.batchnorm._NormBase,
    nn.modules.conv._ConvTransposeNd,
)
"""Modules without a kernel for quantized parameters."""


def check_names(path: Path, places: Mapping[str, Place], found: Set[str], note: str = "") -> None:
    """Raise `ValueError` where the model misses a name of the file, or the file one of the model.

    Args:
        note: where the names of the file come from; the message ends with it.
    """
    problems = []
    # A buffer that is not in the file keeps its value, if it has one.
    missing = [
        name
        for name, (_, _, tensor) in places.items()
        if name not in found and (isinstance(tensor, nn.Parameter) or tensor.is_meta)
    ]
    if missing:
        problems.append(f"missing key {', '.join(missing[:4])}" + (", ..." if len(missing) > 4 else ""))
    if unexpected := sorted(found - places.keys()):
        problems.append(f"unexpected key {', '.join(unexpected[:4])}" + (", ..." if len(unexpected) > 4 else ""))
    if problems:
        problems.append("the model is unchanged")
        raise ValueError(f"{path}: {'; '.join(problems + [note] * bool(note))}")


def check_shape(path: Path, name: str, place: Place, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` where no tensor of this shape can take the place called `name`."""
    if nn.parameter.is_lazy(place[2]):
        raise ValueError(f"{path}: {name} of the model is not initialized yet; run the model once")
    if tuple(place[2].shape) != shape:
        what = f"has shape {shape}, the model's has {tuple(place[2].shape)}"
        raise ValueError(f"{path}: {name} {what}; the model is unchanged")


def check_fits(path: Path, name: str, place: Place, new: Tensor) -> None:
    """Raise `ValueError` where `new` cannot take the place called `name`."""
    check_shape(path, name, place, tuple(new.shape))
    if problem := _problem(place, new):
        raise ValueError(f"{path}: {name} {problem}; the model is unchanged")


def _problem(place: Place, new: Tensor) -> str | None:
    module, attribute, old = place
    if not isinstance(old, nn.Parameter):
        return "is quantized, but a buffer of the model" if isinstance(new, QuantizedTensor) else None
    if not isinstance(new, QuantizedTensor):
        kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (new, old)]
        return None if kinds[0] == kinds[1] else f"is {new.dtype}, the model's is {old.dtype}"
    kind = kind_of(module, attribute)
    if isinstance(new, ConvWeight) != kind.is_conv:
        what = "of a convolution" if isinstance(new, ConvWeight) else "of a linear layer"
        return f"is quantized as the weight {what}, but the {attribute} of a {type(module).__name__}"
    if isinstance(new, TransposedWeight) and not kind.is_transposed and kind is not UNKNOWN:
        what = "a weight that is stored as (inputs, outputs)"
        return f"is quantized as {what}, but the {attribute} of a {type(module).__name__}"
    if isinstance(module, FLOAT_ONLY) or old.dim() < 2:
        return f"is quantized, but the {attribute} of a {type(module).__name__}, which has no quantized kernel"
    if isinstance(module, PreparedModule):
        return "is quantized, but its layer is in training; finish that by convert() first, or build the model anew"
    activation = new.scheme.activation
    if activation is not None and (kind.is_layer or isinstance(new, TransposedWeight)):
        rows = max(activation.granularity.pattern(2)[0], 1)  # those of a block: a last one is completed
        try:
            activation.block_size((rows, new.scheme.codes_shape[-1]))
        except ValueError as error:
            return f"asks for an input quantized as {activation}, which it cannot be: {error}"
    return None
