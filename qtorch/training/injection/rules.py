"""Rules: which contraction is quantized how, by its call site."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..engine.spec import TrainingSpec
from .sites import CallSite

Rules = TrainingSpec | Mapping[str, "TrainingSpec | None"] | Callable[[CallSite], "TrainingSpec | None"]
"""One spec for all; or by name, the first key whose regular expression matches the whole name of the site, ``"module"``
or ``"module:function"``; or a function of the site. None is full precision."""


def rule_of(rules: Any) -> Callable[[CallSite], TrainingSpec | None]:
    """The function of the site that `rules` stand for.

    Raises:
        TypeError: they are none.
        ValueError: a key is no regular expression, or a value is neither a spec nor None.
    """
    if isinstance(rules, TrainingSpec):
        return lambda site: rules
    if isinstance(rules, Mapping):
        compiled = [(_compiled(key), _checked(key, value)) for key, value in rules.items()]

        def find(site: CallSite) -> TrainingSpec | None:
            for pattern, spec in compiled:
                if pattern.fullmatch(site.name) or pattern.fullmatch(site.module):
                    return spec
            return None

        return find
    if callable(rules):
        return rules
    raise TypeError(f"inject takes a TrainingSpec, a mapping of names to specs, or a function, got {rules!r}")


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except re.error as error:
        raise ValueError(f"inject: {key!r} is no regular expression: {error}") from error


def _checked(key: str, value: Any) -> TrainingSpec | None:
    if value is not None and not isinstance(value, TrainingSpec):
        raise ValueError(f"inject: {key!r} has {value!r}; a rule is a TrainingSpec, or None for full precision")
    return value
