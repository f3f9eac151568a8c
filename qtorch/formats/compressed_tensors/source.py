"""A checkpoint of compressed-tensors, as a `Source`: weights stay packed, and their numbers are those of the package.

What the tensors are is in `encode`. A module is quantized if it has a `weight_scale`; `config.Config` says how.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...checkpoint.folder_source import FolderSource, Parts, StoredWeight
from ...checkpoint.source import register_source
from ...dtypes import AffineQuantizedTensor
from ...primitives.scheme import Scheme
from .config import METHOD, Config
from .decode import Read, Stored, decode
from .scheme import Group
from .specs import activation_spec, linear_spec

OF_WEIGHT = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
)
OF_INPUT = ("input_scale", "input_zero_point", "input_global_scale")
OF_OUTPUT = ("output_scale", "output_zero_point", "output_global_scale")
OF_KV_CACHE = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point")


@register_source
class CompressedTensorsSource(FolderSource):
    """A folder that vLLM and transformers read by ``quant_method: compressed-tensors``."""

    format = "compressed-tensors"
    methods = (METHOD,)

    def find_weights(self) -> dict[str, StoredWeight]:
        self._ignored: set[str] = set()
        try:
            config = Config.parse(self.folder.quantization_config)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        found, left_out = {}, set()
        for module in self._quantized_modules():
            try:
                found[f"{module}.weight" if module else "weight"], note = self._weight(module, config)
            except ValueError as error:
                raise ValueError(f"{self.path}: {module}: {error}") from error
            left_out |= {f"the inputs of some layers ({note}), which stay in floating point"} if note else set()
        cache = {name for name in self.folder.stored if name.rpartition(".")[2] in (*OF_KV_CACHE, *OF_OUTPUT)}
        if cache:
            self._ignored |= cache
            left_out.add(f"{len(cache)} scales of the KV cache or of outputs")
        if notes := sorted({*left_out, *config.notes}):
            warnings.warn(f"{self.path}: not read: {'; '.join(notes)}", stacklevel=2)
        return found

    def ignored(self) -> set[str]:
        return self._ignored

    def dtype_of(self, scale: torch.dtype) -> torch.dtype:
        """The dtype of config.json, else that in which the package computes: of the scale, bfloat16 for 8 bits."""
        return self.folder.dtype or (scale if scale.itemsize > 1 else torch.bfloat16)

    def tensor(self, name: str) -> Tensor:
        stored = self.weights.get(name)
        if stored is None or stored.scheme.weight.scale_spec is None:
            return super().tensor(name)
        try:
            codes, others = stored.read()
            scheme = stored.scheme
            if "scale_scale" not in others:
                # The scales of the groups, in fp32, where no scale for the tensor gives the same numbers.
                weight = replace(scheme.weight, scale_spec=None, scale_dtype=torch.float32)
                scheme = replace(scheme, spec=replace(scheme.spec, weight=weight))
            return AffineQuantizedTensor.from_canonical(codes, others, scheme)
        except ValueError as error:
            raise ValueError(f"{self.folder.file_of(stored.tensors[0])}: {name}: {error}") from error

    def _quantized_modules(self) -> Iterator[str]:
        """Names of the modules with a quantized weight."""
        for name in self.folder.stored:
            module, _, last = name.rpartition(".")
            if last == "weight_scale":
                yield module
            elif last == "weight_packed" and f"{name[: -len('packed')]}scale" not in self.folder.stored:
                raise ValueError(f"{self.path}: {module}: has weight_packed, but no weight_scale")

    def _weight(self, module: str, config: Config) -> tuple[StoredWeight, str]:
        prefix = f"{module}." if module else ""
        stored = Stored(self.folder, prefix, self.mmap)
        groups = [group for group in config.group_of(module) if group.weights is not None]
        if not groups:
            raise ValueError("is quantized, but in no group of config_groups with weights")
        errors = []
        for group in groups:
            try:
                return self._of_group(stored, group, config)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _of_group(self, stored: Stored, group: Group, config: Config) -> tuple[StoredWeight, str]:
        weight, shape, read = decode(stored, group, config.packs_densely)
        activation, static, note = activation_spec(group.input_activations, shape[1])
        asymmetric = static and activation is not None and activation.has_zero_point
        used = ["input_scale"] * static + ["input_zero_point"] * asymmetric
        if missing := [name for name in used if name not in stored]:
            raise ValueError(f"its inputs are quantized with a fixed scale, but there is no {missing[0]}")
        spec = linear_spec(weight, activation, static)
        scheme = Scheme(spec, shape, self.dtype_of(stored.info("weight_scale").dtype))
        self._ignored |= {stored.full(name) for name in OF_INPUT if name in stored and name not in used}
        tensors = tuple(stored.full(name) for name in (*OF_WEIGHT, *used) if name in stored)
        return StoredWeight(tensors, scheme, partial(_read, stored, read, used)), note


def _read(stored: Stored, read: Read, inputs: list[str]) -> Parts:
    codes, others = read()
    for name in inputs:
        value = stored.read(name)
        if value.numel() != 1:
            raise ValueError(f"its {name} has shape {tuple(value.shape)}, not one element")
        part = {"input_scale": "act_scale", "input_zero_point": "act_zero_point"}[name]
        others[part] = value.reshape(1, 1).float() if name == "input_scale" else value.reshape(1, 1)
    return codes, others
