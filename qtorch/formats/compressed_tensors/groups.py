"""`config_groups` and `ignore`: which modules are quantized how, in words that vLLM and the package read alike.

Traps: vLLM joins some modules, and then looks for the *joined* name (``qkv_proj``) in the targets, next for the class
of the module, and only then for the names of the parts. So a group that names a class would take the modules of all
other groups: with several groups, all modules are named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .scheme import Group

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Last names of modules that vLLM joins into one."""

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<projection>[^.]+)")

LINEAR_CLASS = "Linear"


def config_groups(modules: Mapping[str, Group]) -> list[tuple[Group, list[str]]]:
    """The groups with their targets.

    Args:
        modules: every quantized module.
    """
    groups: dict[Group, list[str]] = {}
    for name, group in modules.items():
        groups.setdefault(group, []).append(name)
    if len(groups) == 1:
        # What is not in a numbered layer, such as lm_head, need not have the class that vLLM looks for.
        outside = [name for name in modules if not any(part.isdecimal() for part in name.split("."))]
        return [(group, [LINEAR_CLASS, *outside]) for group in groups]
    return [(group, _names(names)) for group, names in groups.items()]


def _names(modules: Iterable[str]) -> list[str]:
    """Names of modules, the experts of a layer as one regular expression."""
    named: dict[str, None] = {}
    projections: dict[str, dict[str, None]] = {}
    for name in modules:
        found = _EXPERT.fullmatch(name)
        if found is None:
            named[name] = None
        else:
            projections.setdefault(found["experts"], {})[found["projection"]] = None
    experts = [rf"re:^{re.escape(name)}\.\d+\.(?:{'|'.join(last)})$" for name, last in projections.items()]
    return [*named, *experts]


def ignored(floats: Iterable[str]) -> list[str]:
    """Modules that are not quantized; the experts of a layer as one regular expression, which matches their module."""
    found: dict[str, None] = {}
    for name in floats:
        expert = _EXPERT.fullmatch(name)
        found[name if expert is None else rf"re:^{re.escape(expert['experts'])}(?:\..+)?$"] = None
    return list(found)


def check_joined(quantized: Mapping[str, Mapping[str, Any]], floats: Collection[str]) -> None:
    """Check that modules that vLLM joins are quantized alike, or all not.

    Args:
        quantized: what has to agree, by the name of the module: the group, and scales that parts share.
        floats: modules that are not quantized.

    Raises:
        ValueError: some are not; the message names them all.
    """
    problems = []
    for names, fields in _joined_sets(dict.fromkeys([*quantized, *floats])):
        first = quantized.get(names[0])
        for name in names[1:]:
            kind = quantized.get(name)
            if (first is None) != (kind is None):
                problems.append(f"{names[0]} and {name}: one of them is not quantized")
            elif first is not None and kind is not None:
                differing = [_word(field) for field in fields if first[field] != kind[field]]
                if differing:
                    problems.append(f"{names[0]} and {name} differ in their {', '.join(differing)}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"vLLM joins modules that are quantized in different ways: {'; '.join(problems[:4])}{more}. Give them one "
            "recipe; recipes_for_vllm(model, recipe) shares the scales of NVFP4"
        )


_OF_ALL_EXPERTS = ("group",)
_OF_JOINED = ("group", "global_scale", "input_scale")


def _word(field: str) -> str:
    words = {"group": "quantization", "global_scale": "scale of the tensor", "input_scale": "scale of the input"}
    return words[field]


def _joined_sets(modules: Iterable[str]) -> Iterable[tuple[list[str], tuple[str, ...]]]:
    """(modules that vLLM joins, what has to agree): those of `JOINED` with one parent, and all experts of a layer."""
    parents: dict[str, dict[str, str]] = {}
    experts: dict[str, list[str]] = {}
    for name in modules:
        parent, _, last = name.rpartition(".")
        parents.setdefault(parent, {})[last] = name
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(found["experts"], []).append(name)
    for children in parents.values():
        for joined in JOINED:
            present = [children[last] for last in joined if last in children]
            if len(present) > 1:
                yield present, _OF_JOINED
    yield from ((names, _OF_ALL_EXPERTS) for names in experts.values())
