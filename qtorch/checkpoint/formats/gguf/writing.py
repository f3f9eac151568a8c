"""GGUF as a `SaveFormat`: a file that llama.cpp runs, which the package `gguf` writes.

A quantized weight that is of a type of GGUF is written code for code (`block_types`). Weights in floating point stay
so, or get the type that the user names: the blocks are those of `gguf.quants.quantize`, and of types that it does not
make, those of this package's own rounding to nearest.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....dtypes import QuantizedTensor, quantized_type
from ....primitives import LinearSpec, MappingType, QuantSpec, files
from ....primitives.layouts.plain import smallest_layout
from ....recipes.gguf import SMALLEST
from ... import save_folder, sources, tensor_file
from ...stacked_experts import fuse_experts
from .architectures import ARCHITECTURES, parameter_of, permute, stored_names
from .block_types import ENCODED, NUMBERS, encode, type_of
from .metadata import derived_tensors, metadata_of, write_vocabulary

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_FLOATS = {dtype: name for name, dtype in FLOATS.items()}
WRITTEN = (*FLOATS, *ENCODED)
"""The types that are written."""

REQUANTIZED = "Q8_0"
"""Of weights whose numbers no type of GGUF has, unless another is asked for."""

_AS_NUMBERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
"""Matrices that llama.cpp takes in fp32 only."""

_RECIPES = {8: "gguf_q8_0()", 5: "gguf_q5_0()", 4: "gguf_q4_0()"}


@save_folder.register_save_format
class GgufFormat(save_folder.SaveFormat):
    """A file of llama.cpp; the options are those of `save_gguf`, `tokenizer` a folder."""

    name = "gguf"
    suffix = ".gguf"

    def __init__(
        self, config: Mapping[str, Any] | None = None, *, types: str | Mapping[str, str] | None = None,
        requantize: bool = False, tokenizer: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config)
        check_gguf()
        self.types = {".*": types} if isinstance(types, str) else dict(types or {})
        for key, name in self.types.items():
            if name not in WRITTEN:
                raise ValueError(f"gguf: {key!r} has the type {name!r}; known are {', '.join(WRITTEN)}")
        self.requantize, self.tokenizer = requantize, tokenizer
        self.metadata_of_model = metadata_of(self.model_config) if config is not None else {}
        self.written: dict[str, str] = {}
        self.requantized: list[str] = []
        self.unused = {key for key in self.types if key != ".*"}

    @classmethod
    def prepare(cls, source: sources.Source, config: Mapping[str, Any]) -> sources.Source:
        layers = range(int(config.get("num_hidden_layers") or 0))
        parts = ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
        return fuse_experts(source, [f"model.layers.{layer}.mlp.{part}" for layer in layers for part in parts])

    def store(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        metadata = self.metadata_of_model
        known = ARCHITECTURES[metadata["general.architecture"]]
        if name == "lm_head.weight" and self.model_config.get("tie_word_embeddings"):
            return {}
        with files.naming("gguf"):
            stored = stored_names(name, known)
        if not stored:
            return {}
        _, parameter = parameter_of(stored[0], known, metadata)
        with files.naming("gguf", name):
            if parameter.subtract:
                tensor = tensor.float() + parameter.subtract
            kind, data = self._blocks(name, stored[0], tensor)
        if parameter.heads:
            data = permute(data, parameter.heads)
        if parameter.is_row:
            data = data.reshape(-1)
        self.written |= dict.fromkeys(stored, kind)
        return dict(zip(stored, data.chunk(len(stored), -2) if len(stored) > 1 else [data], strict=True))

    def _blocks(self, name: str, stored: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """(type, data as it is stored): numbers, or bytes (..., bytes of a row)."""
        is_matrix = tensor.dim() > 1 and stored.split(".")[-2] not in _AS_NUMBERS
        asked = self._asked(name) if is_matrix else "F32"
        if not isinstance(tensor, QuantizedTensor):
            return quantize(tensor, asked or _OF_FLOATS.get(tensor.dtype, "F32"))
        problem = None
        try:
            if asked is None:
                return type_of(tensor)
            if asked in ENCODED:
                return asked, encode(tensor, asked)
        except ValueError as error:
            problem = error
        if not self.requantize:
            bits = tensor.scheme.weight.dtype.bits
            recipe = f"the recipe of {asked}" if asked else next(r for n, r in reversed(_RECIPES.items()) if bits <= n)
            reason = problem or f"it is asked for in {asked}"
            raise ValueError(f"{reason}; quantize with {recipe}, or write requantize=True to round once more")
        self.requantized.append(name)
        return quantize(tensor.dequantize(torch.float32), asked or REQUANTIZED)

    def _asked(self, name: str) -> str | None:
        """The type of the first entry that matches the parameter or its module."""
        module = name.rpartition(".")[0]
        for key, kind in self.types.items():
            if key in (name, module) or re.fullmatch(key, name) or re.fullmatch(key, module):
                self.unused.discard(key)
                return kind
        return None

    def config(self) -> dict[str, Any]:
        return {}

    def progress(self) -> Any:
        return {"written": self.written, "requantized": self.requantized, "unused": sorted(self.unused)}

    def resume(self, progress: Any) -> None:
        written, requantized, unused = dict(progress["written"]), progress["requantized"], set(progress["unused"])
        names = type(requantized) is list and all(type(name) is str for name in requantized)
        if not names or not set(written.values()) <= set(WRITTEN) or not unused <= self.types.keys():
            raise ValueError(f"not the progress of a {self.name} checkpoint")
        self.written, self.requantized, self.unused = written, requantized, unused

    def write(self, parts: Sequence[Path], path: Path, source: Path) -> None:
        import gguf

        if self.unused:
            raise ValueError(f"gguf: {sorted(self.unused)[0]!r} in types matches no matrix of the model")
        if self.requantized:
            some = ", ".join(self.requantized[:3]) + (", ..." if len(self.requantized) > 3 else "")
            warnings.warn(f"gguf: {len(self.requantized)} weights are rounded once more: {some}", stacklevel=4)
        metadata = self.metadata_of_model
        writer = gguf.GGUFWriter(path, metadata["general.architecture"])
        with ExitStack() as stack:
            stack.callback(writer.close)
            add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            for key, value in metadata.items():
                if key != "general.architecture":  # the writer's own
                    add[type(value)](key, value)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            folder = source if self.tokenizer is None else Path(self.tokenizer)
            write_vocabulary(writer, folder, self.model_config)
            tensors = derived_tensors(self.model_config)
            for part in parts:
                file = stack.enter_context(tensor_file.TensorFile(part))
                tensors |= {name: file.map(name) for name in file.stored}
            arrays = [(t.view(torch.uint8) if t.dtype is torch.bfloat16 else t).numpy() for t in tensors.values()]
            for name, array in zip(tensors, arrays, strict=True):
                number = gguf.GGMLQuantizationType(NUMBERS[self.written.get(name, "F32")])
                writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, raw_dtype=number)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for array in arrays:
                writer.write_tensor_data(array)


def quantize(tensor: torch.Tensor, name: str) -> tuple[str, torch.Tensor]:
    """(type, data) of a plain tensor in the type `name`."""
    import gguf

    if name in FLOATS:
        return name, tensor.to(FLOATS[name])
    ENCODED[name].row_bytes(tensor.shape)
    try:
        blocks = gguf.quants.quantize(tensor.float().cpu().numpy(), gguf.GGMLQuantizationType[name])
        return name, torch.from_numpy(blocks)
    except NotImplementedError:
        spec: Any = ENCODED[name].spec
        if spec.scale_spec is not None:
            spec = replace(spec, scale_spec=replace(spec.scale_spec, eps=SMALLEST))
        if isinstance(spec, QuantSpec):
            # Offsets are not positive, and codes of scales divide by the largest of both ends.
            has_offset = spec.mapping is MappingType.ASYMMETRIC
            mapping = spec.mapping if has_offset else MappingType.SYMMETRIC_NO_CLIPPING_ERR
            spec = replace(spec, preserve_zero=True, mapping=mapping)
        else:  # the tables have no 0, so that only a scale of 0 keeps zeros
            spec = replace(spec, eps=0.0)
        linear = LinearSpec(spec, layout=smallest_layout(spec.dtype))
        return name, encode(quantized_type(spec).from_float(tensor.float(), linear), name)


def check_gguf() -> None:
    """Raise `ImportError` without the package `gguf`."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("save_gguf needs the package gguf: pip install 'qtorch[gguf]'") from error
