"""The experts of a mixture: one parameter in a model of transformers, one tensor per expert and projection in files.

    model        model.layers.0.mlp.experts.gate_up_proj                   (experts, 2 * intermediate, hidden)
    checkpoint   model.layers.0.mlp.experts.7.gate_proj.weight             (intermediate, hidden)
                 model.layers.0.mlp.experts.7.up_proj.weight

`fuse_experts` wraps a `Source` so that it has the names of a model; `split_experts` is the inverse, for saving. The
names are those of `transformers.conversion_mapping`.
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..dtypes.joining import cut, join, joined_weight
from ..primitives.files import naming
from .sources import Contents, Source

_FUSED = re.compile(r"(?P<module>.+)\.experts\.(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj)")


@dataclass(frozen=True)
class ExpertNames:
    """How the checkpoints of a family of models name the projections of one expert, and (last name of the module with
    the experts in the model, its name in the checkpoint) if they differ, which applies to every tensor of that module,
    such as the router."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[str, str] | None = None

    def projections(self, fused: str) -> tuple[str, ...]:
        """The projections of an expert that a parameter holds, in the order of its rows."""
        return {
            "gate_up_proj": (self.gate, self.up),
            "gate_proj": (self.gate,),
            "up_proj": (self.up,),
            "down_proj": (self.down,),
        }[fused]

    def in_checkpoint(self, name: str) -> str:
        """The name in a checkpoint of a tensor that is called `name` in a model."""
        if self.renamed is None:
            return name
        old, new = self.renamed
        return ".".join(new if part == old else part for part in name.split("."))


QWEN_MOE = ExpertNames()
"""Qwen2-MoE, Qwen3-MoE, DeepSeek, GLM-4-MoE, OLMoE, Ernie 4.5, ..."""

MIXTRAL = ExpertNames("w1", "w3", "w2", renamed=("mlp", "block_sparse_moe"))

W1_W3_W2 = ExpertNames("w1", "w3", "w2")
"""LFM2-MoE and others."""

CONVENTIONS = (QWEN_MOE, MIXTRAL, W1_W3_W2)

OF_MODEL_TYPE: dict[str, ExpertNames] = {
    "mixtral": MIXTRAL, "minimax": MIXTRAL, "minimax_m2": MIXTRAL, "phimoe": MIXTRAL, "lfm2_moe": W1_W3_W2,
}  # fmt: skip
"""Conventions by the `model_type` of config.json; all others are named like `QWEN_MOE`."""

FUSED_IN_FILES = frozenset({"gpt_oss", "llama4", "llama4_text", "dbrx", "granitemoe", "granitemoeshared", "jetmoe"})
"""Model types whose checkpoints hold the experts of a layer in one tensor, often with rows and columns exchanged."""


def expert_names(config: Mapping[str, Any]) -> ExpertNames:
    """The convention of the model with this config.json."""
    return OF_MODEL_TYPE.get(str(config.get("model_type")), QWEN_MOE)


def is_fused(name: str) -> bool:
    """Whether a parameter of this name holds the experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def split_experts(name: str, tensor: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The matrices, by their names in a checkpoint, of a parameter (experts, rows, columns), plain or quantized, whose
    name in the model `is_fused`; exact."""
    found = _FUSED.fullmatch(name)
    model_type = config.get("model_type")
    if found is None or tensor.dim() != 3:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not hold the experts of a layer")
    if model_type in FUSED_IN_FILES:
        raise ValueError(f"{name}: checkpoints of {model_type} have no matrix per expert")
    names = expert_names(config)
    projections = names.projections(found["projection"])
    module = names.in_checkpoint(found["module"])
    with naming(name):
        matrices = cut(tensor, len(projections))
    return {
        f"{module}.experts.{index}.{projection}.weight": matrix
        for index, row in enumerate(matrices)
        for projection, matrix in zip(projections, row, strict=True)
    }


def fuse_experts(source: Source, wanted: Iterable[str]) -> Source:
    """`source` with the names that a model wants, where it has the same tensors under the names of a checkpoint; itself
    if nothing has to be fused or renamed. Such tensors have their new names only, and closing it closes `source`."""
    fused: dict[str, list[list[str]]] = {}
    renamed: dict[str, str] = {}
    for name in wanted:
        if name in source.names:
            continue
        for convention in CONVENTIONS:
            if matrices := _matrices_of(name, convention, source.names):
                fused[name] = matrices
                break
            if (other := convention.in_checkpoint(name)) != name and other in source.names:
                renamed[name] = other
                break
    return FusedSource(source, fused, renamed) if fused or renamed else source


def _matrices_of(name: str, convention: ExpertNames, stored: Set[str]) -> list[list[str]]:
    """Names of the matrices of each expert of a fused parameter; empty if they are not stored by this convention."""
    found = _FUSED.fullmatch(name)
    if found is None:
        return []
    module = convention.in_checkpoint(found["module"])
    matrices: list[list[str]] = []
    while True:
        prefix = f"{module}.experts.{len(matrices)}"
        row = [f"{prefix}.{projection}.weight" for projection in convention.projections(found["projection"])]
        if not all(name in stored for name in row):
            return matrices
        matrices.append(row)


_MATRIX = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<projection>\w+)\.weight")


def joined_in_models(stored: Iterable[str]) -> list[list[str]]:
    """Stored names of the matrices of experts, grouped by the parameters that models of transformers join them in."""
    groups: dict[tuple[str, bool], list[str]] = {}
    down = {names.down for names in CONVENTIONS}
    for name in stored:
        if found := _MATRIX.fullmatch(name):
            groups.setdefault((found["experts"], found["projection"] in down), []).append(name)
    return list(groups.values())


class FusedSource(Source):
    """A Source with fused experts: the stored names of the matrices of each, by the name in the model."""

    def __init__(self, source: Source, fused: Mapping[str, list[list[str]]], renamed: Mapping[str, str]) -> None:
        self.source = source
        self.format = source.format  # type: ignore[misc]
        self.path, self.fused, self.renamed = source.path, fused, renamed
        used = {*renamed.values(), *(name for rows in fused.values() for row in rows for name in row)}
        self.names = {*fused, *renamed, *(source.names - used)}
        self.aliases, self.note = source.aliases, source.note

    def optional(self) -> Set[str]:
        return self.source.optional()

    def contents(self, name: str) -> Contents:
        if name not in self.fused:
            return self.source.contents(self.renamed.get(name, name))
        rows = [[self.source.contents(stored) for stored in row] for row in self.fused[name]]
        first = rows[0][0]
        shape = (len(rows), sum(part.shape[0] for part in rows[0]), *first.shape[1:])
        nbytes = sum(part.nbytes for row in rows for part in row)
        scheme = first.scheme
        if scheme is not None:
            weight = joined_weight(scheme.weight, [first.shape])
            scheme = replace(scheme, shape=shape, spec=replace(scheme.spec, weight=weight))
        return Contents(shape, first.dtype, nbytes, scheme)

    def tensor(self, name: str) -> Tensor:
        if name not in self.fused:
            return self.source.tensor(self.renamed.get(name, name))
        stored = self.fused[name]
        matrices = [[self.source.tensor(self.source.aliases.get(part, part)) for part in row] for row in stored]
        try:
            return join(matrices)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.path}: {name} cannot be made of {stored[0][0]} ...: {error}") from error

    def close(self) -> None:
        self.source.close()
