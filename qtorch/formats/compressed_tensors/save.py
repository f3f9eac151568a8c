"""Writing checkpoints in the form of compressed-tensors, weight by weight; see `SaveFormat`.

Every weight gets the scheme that vLLM takes for it, by a copy of vLLM's table (`vllm`); what no scheme serves is
refused. Weights that vLLM joins into one must be quantized alike: the projections of queries, keys and values, and
those of gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.experts import expert_names, is_fused, split_experts
from ...checkpoint.save_format import SaveFormat, register_save_format
from ...dtypes import ConvWeight, QuantizedTensor
from ...primitives.jsonable import construct
from .config import METHOD, MIXED, VERSION
from .encode import encode
from .groups import check_joined, config_groups, ignored
from .scheme import Args, Group
from .specs import args_of, formats_of
from .vllm import EMBEDDING, EXPERTS, LINEAR, SCALES_IN_THE_DTYPE_OF_THE_MODEL, Decision, decide

_EXPERT = re.compile(r".+\.experts\.\d+\.[^.]+")
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "shared", "embeddings")
"""Last names of modules that are tables of embeddings."""

_HEAD = "lm_head"


@dataclass(frozen=True)
class Saved:
    """What `config()` has to know of a quantized module.

    Attributes:
        scheme: that vLLM takes for it.
        global_scale, input_scale: those of NVFP4 and of a static input, None without.
    """

    group: Group
    scheme: str
    global_scale: float | None = None
    input_scale: float | None = None


@register_save_format
class CompressedTensorsFormat(SaveFormat):
    """A checkpoint of compressed-tensors that vLLM serves."""

    name = METHOD

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.quantized: dict[str, Saved] = {}
        self.floats: list[str] = []

    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if is_fused(name) and (isinstance(tensor, QuantizedTensor) or tensor.dim() == 3):
            parts = split_experts(name, tensor, self.model_config)
            return {key: value for part, matrix in parts.items() for key, value in self._store(part, matrix).items()}
        return self._store(expert_names(self.model_config).in_checkpoint(name), tensor)

    def _store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        module, _, attribute = name.rpartition(".")
        if not isinstance(tensor, QuantizedTensor):
            if attribute == "weight" and tensor.dim() == 2 and tensor.is_floating_point():
                self.floats.append(module)
            return {name: tensor}
        if attribute != "weight":
            raise ValueError(f"{name} is quantized, but not the weight of a module; vLLM has a scheme for weights only")
        try:
            saved, tensors = _saved(module, tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self.quantized[module] = saved
        prefix = f"{module}." if module else ""
        return {f"{prefix}{key}": value for key, value in tensors.items()}

    def alias(self, name: str, original: str) -> None:
        names = [expert_names(self.model_config).in_checkpoint(each).rpartition(".")[0] for each in (name, original)]
        if names[1] in self.quantized:
            raise ValueError(
                f"{name} is tied to {original}, which is quantized; vLLM ties weights in floating point only: quantize "
                "neither, or untie them"
            )
        if names[1] in self.floats:
            self.floats.append(names[0])

    def config(self) -> dict[str, Any]:
        check_joined({name: asdict(saved) for name, saved in self.quantized.items()}, self.floats)
        groups = config_groups({name: saved.group for name, saved in self.quantized.items()})
        formats = {saved.group.format for saved in self.quantized.values()}
        return {
            "quant_method": METHOD,
            "version": VERSION,
            "format": formats.pop() if len(formats) == 1 else MIXED if formats else "dense",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {
                f"group_{index}": group.to_json(targets) for index, (group, targets) in enumerate(groups)
            },
            "ignore": ignored([*self.floats, *self._tied_head()]),
        }

    def _tied_head(self) -> list[str]:
        """The head of a model whose files do not hold it."""
        is_tied = self.model_config.get("tie_word_embeddings") is True and _HEAD not in self.quantized
        return [_HEAD] if is_tied else []

    def progress(self) -> Any:
        return {"quantized": {name: asdict(saved) for name, saved in self.quantized.items()}, "floats": self.floats}

    def resume(self, progress: Any) -> None:
        try:
            quantized = {name: _from_json(saved) for name, saved in progress["quantized"].items()}
            floats = [str(name) for name in progress["floats"]]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not the progress of a {self.name} checkpoint: {error}") from error
        self.quantized, self.floats = quantized, floats


def _from_json(data: Mapping[str, Any]) -> Saved:
    group = data["group"]
    weights, inputs = (None if args is None else _args(args) for args in (group["weights"], group["input_activations"]))
    return construct(
        Saved, {**data, "group": construct(Group, {**group, "weights": weights, "input_activations": inputs})}
    )


def _args(data: Mapping[str, Any]) -> Args:
    return construct(Args, data)


def _saved(module: str, tensor: QuantizedTensor) -> tuple[Saved, dict[str, Tensor]]:
    if tensor.dim() != 2 and not isinstance(tensor, ConvWeight):
        raise ValueError(f"has shape {tuple(tensor.shape)}; the schemes are for matrices")
    group, scheme = serve(module, tensor)
    if scheme in SCALES_IN_THE_DTYPE_OF_THE_MODEL:
        tensor = _with_scales_of_the_model(tensor, scheme)
    tensors = encode(tensor, group)
    known = {name: float(tensors[name]) if name in tensors else None for name in ("weight_global_scale", "input_scale")}
    return Saved(group, scheme, known["weight_global_scale"], known["input_scale"]), tensors


def serve(module: str, tensor: QuantizedTensor) -> tuple[Group, str]:
    """The group of a quantized matrix, in the first format that vLLM has a scheme for, and the name of the scheme.

    Args:
        module: the name of the module, which tells experts and embeddings from linear layers.

    Raises:
        ValueError: vLLM has no scheme for it.
    """
    weights, inputs = args_of(tensor)
    problems = []
    for format in formats_of(weights, inputs):
        group = Group(weights, inputs, format)
        try:
            return group, decide(group, table_of(module))
        except ValueError as error:
            problems.append(error)
    raise problems[-1]


def table_of(module: str) -> tuple[Decision, ...]:
    """The table in which vLLM looks for the scheme of a module, judged from its name."""
    if _EXPERT.fullmatch(module):
        return EXPERTS
    return EMBEDDING if module.rpartition(".")[2] in _EMBEDDINGS else LINEAR


def _with_scales_of_the_model(tensor: QuantizedTensor, scheme: str) -> QuantizedTensor:
    """The tensor with its scales in its logical dtype.

    Raises:
        ValueError: some of them would be rounded.
    """
    codes, others = tensor.canonical()
    scale, dtype = others["scale"], tensor.scheme.dtype
    rounded = scale.to(dtype)
    if not torch.equal(rounded.to(scale.dtype), scale):
        raise ValueError(
            f"has scales in {scale.dtype}, and {scheme} uses them in {dtype}, the dtype of the model, to which they "
            f"must be rounded before the codes are chosen: quantize with scale_dtype={dtype}, or "
            "quantize_(model, recipes_for_vllm(model, recipe))"
        )
    return type(tensor).from_canonical(codes, {**others, "scale": rounded}, tensor.scheme)
