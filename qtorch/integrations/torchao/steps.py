"""`quantize_` and `sparsify_` of torchao: scripts that calibrate in steps, AWQ and SmoothQuant, run as they are.

quantize_(model, AWQConfig(base, step="prepare"))    # from here on the inputs of the model are kept
for batch in batches:
    model(batch)
quantize_(model, AWQConfig(base, step="convert"))    # calibrated(base, what was kept, transforms=[awq()])
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ... import quantize_api
from ...calibration import Nearest, Transform, awq, calibrated, smooth
from ...model.report import QuantizeReport
from ...recipes.base import FOREIGN, WeightRecipe
from . import configs, training, translate
from .translate import arguments, refuse

__all__ = [
    "AWQConfig", "BlockSparseWeightConfig", "SemiSparseWeightConfig", "SmoothQuantConfig", "block_sparse_weight",
    "equivalent", "quantize_", "semi_sparse_weight", "sparsify_",
]  # fmt: skip

M = TypeVar("M", bound=nn.Module)

BETWEEN = ("prepare_for_smoothquant_smoothing_factor", "prepare_for_smoothquant_activation_scales")
"""Steps between two passes of data, which change nothing: the inputs of both are kept."""


@dataclass(frozen=True)
class CalibrationStep:
    """A step of a calibration with transforms; what `AWQConfig` and `SmoothQuantConfig` return."""

    name: str
    recipe: WeightRecipe
    step: str
    transforms: tuple[Transform, ...]


STEPS = ("prepare", "convert", *BETWEEN)


@arguments(base_config=translate.base, step=translate.step(*STEPS))
def AWQConfig(base_config: Any, step: Any = "prepare", scale_search_space_size: int = 20) -> CalibrationStep:
    """`calibrated` with `awq`, for the `quantize_` of this package."""
    return CalibrationStep("AWQConfig", base_config, step, (awq(ratios=scale_search_space_size),))


@arguments(base_config=translate.base, step=translate.step(*STEPS))
def SmoothQuantConfig(
    base_config: Any, step: Any = "prepare", alpha: float | None = 0.5, use_running_absmax: bool = False
) -> CalibrationStep:
    """`calibrated` with `smooth` of this strength, without it for None, for the `quantize_` of this package.
    `use_running_absmax` says how torchao counts, and changes nothing."""
    transforms = () if alpha is None else (smooth(alphas=(alpha,)),)
    return CalibrationStep("SmoothQuantConfig", base_config, step, transforms)


class _Inputs:
    """A hook that keeps the arguments of each forward."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.batches.append((args, kwargs))


def quantize_(model: nn.Module, config: Any, *args: Any, **kwargs: Any) -> QuantizeReport | None:
    """`qtorch.quantize_`, which also takes the steps of AWQ and SmoothQuant.

    Raises:
        ValueError: the step ``"convert"`` of a model that was not prepared, or has not run since; or as there.
    """
    if not isinstance(config, CalibrationStep):
        return quantize_api.quantize_(model, config, *args, **kwargs)
    hooks = {key: hook for key, hook in model._forward_pre_hooks.items() if isinstance(hook, _Inputs)}
    if config.step == "prepare":
        if not hooks:
            model.register_forward_pre_hook(_Inputs(), with_kwargs=True)
        return None
    if not hooks:
        raise ValueError(f'{config.name}: this {type(model).__name__} has not had step="prepare"')
    if config.step in BETWEEN:
        return None
    (key, hook), *_ = hooks.items()
    if not hook.batches:
        raise ValueError(f'{config.name}: the model has not run since step="prepare"; call it on data before "convert"')
    del model._forward_pre_hooks[key]
    model._forward_pre_hooks_with_kwargs.pop(key, None)
    run = lambda module, batch: module(*batch[0], **batch[1])  # noqa: E731
    recipe = calibrated(config.recipe, hook.batches, None, Nearest(), transforms=config.transforms, forward=run)
    try:
        return quantize_api.quantize_(model, recipe, *args, **kwargs)
    except BaseException:
        model._forward_pre_hooks[key] = hook
        model._forward_pre_hooks_with_kwargs[key] = True
        raise


SEMI = "int8_dynamic_activation_int8_semi_sparse_weight()"
BLOCKS = "qtorch.block_sparse(int8_dynamic_activation_int8_weight(), sparsity, block_size)"


def sparsify_(model: M, config: Any, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> M:
    """`quantize_` by a recipe with sparse weights; returns the model, as torchao does.

    Raises:
        ValueError: the recipe keeps all weights.
    """
    if not (isinstance(config, WeightRecipe) and config.prunes):
        raise refuse("sparsify_", "config", config, f"it is a recipe with sparse weights: {SEMI} or {BLOCKS}")
    quantize_api.quantize_(model, config, filter_fn)
    return model


def SemiSparseWeightConfig(alg_id: int = 0) -> WeightRecipe:
    """Raise `ValueError`: sparse weights are quantized here."""
    raise refuse("SemiSparseWeightConfig", "weight", "float", f"2:4 sparse weights are in int8 or float8: write {SEMI}")


def BlockSparseWeightConfig(blocksize: int = 64) -> WeightRecipe:
    """Raise `ValueError`: sparse weights are quantized here."""
    raise refuse("BlockSparseWeightConfig", "weight", "float", f"blocks are quantized: write {BLOCKS}")


semi_sparse_weight, block_sparse_weight = SemiSparseWeightConfig, BlockSparseWeightConfig
"""Their names in torchao 0.6."""


def equivalent(config: Any) -> Any:
    """The recipe, or mapping, of a configuration object of torchao, of the names and fields of version 0.18; for one of
    fake quantization or of a step, what the function of that name returns.

    Raises:
        ValueError: it has no equivalent.
    """
    kind = type(config).__name__
    known = {**vars(configs), **vars(training), **globals()}
    function = known.get(kind) if kind.endswith("Config") else None
    if function is None:
        raise ValueError(f"{kind} has no equivalent in qtorch")
    fields = dict(vars(config))  # a few are no dataclasses
    if dataclasses.is_dataclass(config):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    for name in ("fqn_to_config", "module_fqn_to_config"):
        if name in fields:
            inner = fields[name].items()
            fields[name] = {key: None if value is None else equivalent(value) for key, value in inner}
    for name in ("base_config", "activation_config", "weight_config"):
        if fields.get(name) is not None:
            fields[name] = equivalent(fields[name])
    return function(**fields)


def describe(config: Any) -> str:
    """The call that makes the equivalent, or why there is none, as a clause of an error message."""
    try:
        found = equivalent(config)
    except (ValueError, TypeError) as error:
        return f"torchao's {type(config).__name__}, which has no equivalent: {error}"
    if isinstance(found, CalibrationStep):
        found = f"that of qtorch.integrations.torchao, for its quantize_, with {found.recipe}"
    if isinstance(found, dict):
        entries = ", ".join(f"{key!r}: {value}" for key, value in found.items())
        return f"torchao's {type(config).__name__}; its equivalent is {{{entries}}}"
    return f"torchao's {type(config).__name__}; its equivalent is {found}"


FOREIGN["torchao"] = describe
