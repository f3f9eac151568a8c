"""`quantization_config` of config.json, as compressed-tensors writes it; it may be untrusted."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ....primitives.files import naming
from .scheme import FORMATS, Args, Group

METHOD = "compressed-tensors"

MIXED = "mixed-precision"

VERSION = "0.20.0"
"""The version of the package whose files those of this package equal; from 0.18 on codes are packed densely."""

_DENSE_SINCE = (0, 18)
_MAX_PATTERN = 2000
"""Length of a regular expression in a file."""


@dataclass
class Config:
    """How the layers of a checkpoint are quantized: groups with their targets in the order of the file, the version of
    the package that wrote it, if it is known, and notes on what is left out. A target is the name of a module, a
    regular expression after ``re:``, which matches from the beginning of the name, or the name of a class of
    modules."""

    groups: list[tuple[list[str], Group]] = field(default_factory=list)
    version: tuple[int, ...] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def packs_densely(self) -> bool | None:
        """Whether codes may straddle words, by the version; None if it is not known."""
        return None if self.version is None else self.version >= _DENSE_SINCE

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "Config":
        """From the contents of config.json, which must be valid, and nothing that this package cannot represent."""
        made = cls(version=_version(data.get("version")))
        sparsity, transforms = data.get("sparsity_config") or {}, data.get("transform_config") or {}
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") not in (None, "dense"):
            raise ValueError(f"sparsity_config has the format {sparsity['format']!r:.40}; sparse files are not read")
        if isinstance(transforms, Mapping) and transforms.get("config_groups"):
            raise ValueError("transform_config rotates the activations, which layers here do not; the file is not read")
        overall = data.get("format")
        groups = data.get("config_groups")
        if not isinstance(groups, Mapping):
            raise ValueError(f"config_groups is {groups!r:.80}, not an object")
        for name, entry in groups.items():
            with naming(f"config_groups, {name}"):
                made.groups.append(_group(entry, overall))
            if entry.get("output_activations") is not None:
                made.notes.append(f"the outputs of {name}, which stay in floating point")
        return made

    def group_of(self, module: str) -> list[Group]:
        """The groups that a module may be in: the one that names it, or else all that name a class of modules."""
        if module in self._named:
            return [self._named[module]]
        for pattern, group in self._patterns:
            if pattern.match(module):
                return [group]
        return self._of_classes

    @cached_property
    def _named(self) -> dict[str, Group]:
        """By target; the first group that names it wins. A file may name each of its modules."""
        return {target: group for targets, group in reversed(self.groups) for target in targets}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Group]]:
        return [(re.compile(each[3:]), group) for names, group in self.groups for each in names if each[:3] == "re:"]

    @cached_property
    def _of_classes(self) -> list[Group]:
        return [group for names, group in self.groups if any(n.isidentifier() and n[0].isupper() for n in names)]


def _version(value: Any) -> tuple[int, ...] | None:
    found = re.match(r"(\d{1,6})\.(\d{1,6})", value) if isinstance(value, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def _group(entry: Any, overall: Any) -> tuple[list[str], Group]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"is {entry!r:.80}, not an object with targets and weights")
    targets = entry.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"targets is {targets!r:.80}, not a list of names")
    for pattern in [target[3:] for target in targets if target.startswith("re:")]:
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"a target is a regular expression of {len(pattern)} characters")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"the target {pattern!r:.80} is not a regular expression: {error}") from error
    format = entry.get("format")
    if format is None and overall != MIXED:
        format = overall
    if format not in (None, "dense", *FORMATS):
        raise ValueError(f"the format {format!r:.40} is not read; known are {', '.join((*FORMATS, MIXED))}")
    given = [entry.get(part) for part in ("weights", "input_activations")]
    weights, inputs = (None if part is None else Args.parse(part) for part in given)
    return targets, Group(weights, inputs, format)


# `config_groups` and `ignore`: which modules are quantized how, in words that vLLM and the package read alike.
#
# Traps: vLLM joins some modules, and then looks for the *joined* name (``qkv_proj``) in the targets, next for the class
# of the module, and only then for the names of the parts. So a group that names a class would take the modules of all
# other groups: with several groups, all modules are named.


JOINED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
)  # fmt: skip
"""Last names of modules that read one input, in the order of their calls; vLLM joins them into one."""

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<projection>[^.]+)")

LINEAR_CLASS = "Linear"


def config_groups(modules: Mapping[str, Group]) -> list[tuple[Group, list[str]]]:
    """The groups of all quantized modules, with their targets."""
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
    """Check that modules that vLLM joins are quantized alike, in the fields of `_WORDS`, or all not."""
    problems = []
    for names, fields in _joined_sets(dict.fromkeys([*quantized, *floats])):
        first = quantized.get(names[0])
        for name in names[1:]:
            kind = quantized.get(name)
            if (first is None) != (kind is None):
                problems.append(f"{names[0]} and {name}: one of them is not quantized")
            elif first is not None and kind is not None:
                differing = [_WORDS[field] for field in fields if first[field] != kind[field]]
                if differing:
                    problems.append(f"{names[0]} and {name} differ in their {', '.join(differing)}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"vLLM joins modules that are quantized in different ways: {'; '.join(problems[:4])}{more}. Give them one "
            "recipe; recipes_for_vllm(model, recipe) shares the scales of NVFP4"
        )


_WORDS = {"group": "quantization", "global_scale": "scale of the tensor", "input_scale": "scale of the input"}
"""Fields of `write.Saved`, as messages call them."""


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
                yield present, tuple(_WORDS)
    yield from ((names, ("group",)) for names in experts.values())
