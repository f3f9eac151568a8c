"""GGUF as a `Source`: tensors by the names that transformers has for them, quantized ones kept packed.

Each architecture has a table of names, and of what llama.cpp did to the tensors when it wrote the file. It permutes the
rows of q and k in some, and adds 1 to the norms of gemma, which transformers adds when it computes. It keeps the
experts of a layer in three tensors, transformers in two: gate and up are joined. Every number equals what
`gguf.quants.dequantize` gives in fp32. What the file says beside tensors (the vocabulary, the config) is not read.

Source: `convert_hf_to_gguf.py` of llama.cpp, and `modeling_gguf_pytorch_utils.py` of transformers, with which the tests
compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.files import naming, open_regular
from ...sources import Contents, Source, register_source
from .block_types import TYPES, BlockType
from .container import MAGIC, GgufFile

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

_FUSED = ("ffn_gate_exps", "ffn_up_exps")
"""The experts that transformers has in one parameter, gate first, joined along the rows."""

_JOINED = ".experts.gate_up_proj"

_DERIVED = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that transformers computes from its config."""


@dataclass(frozen=True)
class Architecture:
    """Names within a layer, of llama.cpp -> of transformers, without ".weight" and ".bias"; whether the rows of q and k
    are permuted, and what was added to the weights of norms."""

    layer: Mapping[str, str]
    permutes: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture(_LLAMA | _EXPERTS, permutes=True),  # mistral and mixtral too
    "qwen2": Architecture(_LLAMA),
    "qwen2moe": Architecture(_LLAMA | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Architecture(_LLAMA | _NORMS_OF_HEADS),
    "qwen3moe": Architecture(_LLAMA | _NORMS_OF_HEADS | _EXPERTS),
    "gemma": Architecture(_LLAMA, norm_offset=1.0),
    "gemma2": Architecture(_GEMMA2, norm_offset=1.0),
    "gemma3": Architecture(_GEMMA2 | _NORMS_OF_HEADS, norm_offset=1.0),
    "phi3": Architecture(_PHI3),
}


class Parameter(NamedTuple):
    """A parameter of transformers, made from stored tensors, which are joined along their rows. The rows may be
    permuted in the order of `heads`, `subtract` was added to each element, and a matrix of one row may be a vector in
    the file (`is_row`)."""

    stored: tuple[str, ...]
    heads: int = 0
    subtract: float = 0.0
    is_row: bool = False


def names_of(metadata: Mapping[str, Any], stored: Iterable[str]) -> tuple[dict[str, Parameter], dict[str, str], str]:
    """The parameters of a file, further names of some, and what to know where a model has other names."""
    stored = [name for name in stored if not _DERIVED.fullmatch(name)]
    called = metadata.get("general.architecture")
    known = ARCHITECTURES.get(called) if isinstance(called, str) else None
    if known is None:
        note = (
            f"tensors have their names of llama.cpp, since the architecture {called!r:.40} is not one of "
            f"{', '.join(ARCHITECTURES)}"
        )
        return {name: Parameter((name,)) for name in stored}, {}, note
    parameters: dict[str, Parameter] = {}
    for name in stored:
        new, parameter = _parameter(name, known, metadata)
        if new in parameters:
            if not new.endswith(_JOINED):
                raise ValueError(f"{name} and {', '.join(parameters[new].stored)} are both {new}")
            parameter = parameter._replace(stored=tuple(sorted(parameters[new].stored + parameter.stored)))
        parameters[new] = parameter
    for new, parameter in parameters.items():
        if new.endswith(_JOINED) and len(parameter.stored) != len(_FUSED):
            raise ValueError(f"{new} needs the gate and the up of the experts, got {', '.join(parameter.stored)}")
    aliases = {}
    if "lm_head.weight" not in parameters and "model.embed_tokens.weight" in parameters:
        # llama.cpp stores tied weights once.
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
    note = f"names are those that transformers has for the architecture {called}; others are as llama.cpp has them"
    return parameters, aliases, note


def _parameter(name: str, known: Architecture, metadata: Mapping[str, Any]) -> tuple[str, Parameter]:
    """(name in transformers, how it is made)."""
    stem, _, kind = name.rpartition(".")
    subtract = known.norm_offset if stem.endswith("norm") and kind == "weight" else 0.0
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}", Parameter((name,), subtract=subtract)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None:
        return name, Parameter((name,))
    layer, part = match.groups()
    if kind == "weight" and "ffn_gate_inp" in known.layer and part.endswith("_exps"):
        # Parameters, not modules: their names have no ".weight".
        of_experts = "gate_up_proj" if part in _FUSED else "down_proj"
        return f"model.layers.{layer}.mlp.experts.{of_experts}", Parameter((name,))
    if part not in known.layer:
        return name, Parameter((name,))
    heads = _heads(metadata, int(layer), part) if known.permutes and part in ("attn_q", "attn_k") else 0
    is_row = part == "ffn_gate_inp_shexp"
    return f"model.layers.{layer}.{known.layer[part]}.{kind}", Parameter((name,), heads, subtract, is_row)


def _heads(metadata: Mapping[str, Any], layer: int, part: str) -> int:
    """The number of attention heads of q or k in a layer."""
    called = metadata["general.architecture"]
    value = metadata.get(key := f"{called}.attention.head_count")
    if part == "attn_k":
        value = metadata.get(other := f"{called}.attention.head_count_kv", value)
        key = other
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else None
    if type(value) is not int or value < 1:
        raise ValueError(f"the rows of {part} are permuted by heads, whose number {key} is {value!r:.40}")
    return value


def undo_permutation(rows: Tensor, heads: int) -> Tensor:
    """Rows (N, ...) of `heads` heads from the order of llama.cpp to that of transformers.

    Rotary embeddings turn pairs of elements of a head: in transformers i and i + d/2, in llama.cpp 2 i and 2 i + 1. So
    llama.cpp stores the rows of a head, d of them, as 0, d/2, 1, d/2 + 1, ... A row of blocks moves as it is.
    """
    if rows.shape[0] % (2 * heads):
        raise ValueError(f"{rows.shape[0]} rows are not an even number for each of {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


@register_source
class GgufSource(Source):
    """An open GGUF file."""

    format = "gguf"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        if not path.is_file():
            return False
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC

    @classmethod
    def open(cls, path: Path, *, verify: bool, mmap: bool) -> GgufSource:
        """Open a file; GGUF has no checksums, and no tensor that needs no change, so both options have no effect."""
        return cls(GgufFile(path))

    def __init__(self, file: GgufFile) -> None:
        self.path, self.file = file.path, file
        self.metadata = file.metadata
        try:
            with naming(self.path):
                self.parameters, self.aliases, self.note = names_of(file.metadata, file.tensors)
        except ValueError:
            file.close()
            raise
        self.names = self.parameters.keys() | self.aliases.keys()

    def close(self) -> None:
        self.file.close()

    def contents(self, name: str) -> Contents:
        with self._naming(name):
            kind, shape = self._form(self.parameters[name])
            return Contents(shape, kind.dtype or torch.float32, kind.tensor_bytes(shape), kind.scheme(shape))

    def tensor(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        with self._naming(name):
            kind, shape = self._form(parameter)
            kind.scheme(shape)  # an error before anything is read
            parts = []
            for stored in parameter.stored:
                of_part = self.file.tensors[stored].shape
                rows = self.file.read(stored, 0, kind.tensor_bytes(of_part))
                parts.append(rows.reshape(*of_part[:-1], kind.row_bytes(of_part)))
            data = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
            if parameter.heads:
                # The rows of a bias are numbers.
                data = undo_permutation(data.reshape(shape[0], -1), parameter.heads)
            tensor = kind.tensor(data.reshape(-1), shape)
            return tensor - parameter.subtract if parameter.subtract else tensor

    def _form(self, parameter: Parameter) -> tuple[BlockType, tuple[int, ...]]:
        """(type, shape) of a parameter."""
        infos = [self.file.tensors[stored] for stored in parameter.stored]
        first = infos[0]
        kind, shape = _type(first.type), first.shape
        kind.row_bytes(shape)
        if len(infos) > 1:
            kinds = [_type(info.type).name for info in infos]
            if len(set(kinds)) > 1 or any(info.shape != shape for info in infos) or len(shape) < 2:
                shapes = " and ".join(f"{name} {info.shape}" for name, info in zip(kinds, infos, strict=True))
                raise ValueError(f"{' and '.join(parameter.stored)} become one tensor, but are {shapes}")
            shape = (*shape[:-2], len(infos) * shape[-2], shape[-1])
        if parameter.is_row and len(shape) == 1:
            shape = (1, *shape)
        if parameter.subtract and kind.dtype is not torch.float32:
            raise ValueError(f"{parameter.subtract} is subtracted from it, which takes F32, got {kind.name}")
        return kind, shape

    def _naming(self, name: str) -> AbstractContextManager[None]:
        return naming(self.path, f"{name} ({' and '.join(self.parameters[name].stored)})")


def _type(number: int) -> BlockType:
    if number not in TYPES:
        raise ValueError(f"it has the type {number}; known are {', '.join(kind.name for kind in TYPES.values())}")
    return TYPES[number]
