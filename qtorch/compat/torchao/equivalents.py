"""What a configuration object of torchao is in qtorch: for the error of `quantize_` that is given one."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...recipe import FOREIGN
from . import configs, steps, training


def equivalent(config: Any) -> Any:
    """The recipe, or mapping, of a configuration object of torchao, of the names and fields of version 0.18; for one of
    fake quantization or of a step, what the function of that name returns.

    Raises:
        ValueError: it has no equivalent.
    """
    kind = type(config).__name__
    known = {**vars(configs), **vars(training), **vars(steps)}
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
    if isinstance(found, steps.CalibrationStep):
        found = f"that of qtorch.compat.torchao, for its quantize_, with {found.recipe}"
    if isinstance(found, dict):
        entries = ", ".join(f"{key!r}: {value}" for key, value in found.items())
        return f"torchao's {type(config).__name__}; its equivalent is {{{entries}}}"
    return f"torchao's {type(config).__name__}; its equivalent is {found}"


FOREIGN["torchao"] = describe
