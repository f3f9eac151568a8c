"""Writing checkpoints in the form of compressed-tensors, weight by weight; see `SaveFormat`.

Every weight gets the scheme that vLLM takes for it, by a copy of vLLM's table (`vllm`); what no scheme serves is
refused. Weights that vLLM joins into one must be quantized alike: the projections of queries, keys and values, and
those of gate and up.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ....dtypes import ConvWeight, QuantizedTensor
from ....primitives import construct, files
from ....primitives.layouts.packed import pack_dense
from ...save_folder import SaveFormat, register_save_format
from ...stacked_experts import expert_names, is_fused, split_experts
from ..blocks import divisor_of
from .config_groups import METHOD, MIXED, VERSION, check_joined, config_groups, ignored
from .scheme import Args, Group, args_of, formats_of
from .vllm import EMBEDDING, EXPERTS, LINEAR, SCALES_IN_THE_DTYPE_OF_THE_MODEL, decide

# The tensors that stand for a weight, in each format.
#
#     pack-quantized            weight_packed int32, weight_scale, weight_shape int64 (2,); with zero points
#                               weight_zero_point int32 (words of O codes, G), packed along the output channels
#     int-, float-, naive-,     weight int8 or float8_e4m3fn, weight_scale; with zero points weight_zero_point int8
#     mxfp8-quantized
#     nvfp4-, mxfp4-pack-       weight_packed uint8 (O, I / 2), weight_scale; NVFP4: weight_global_scale fp32 (1,)
#     quantized
#     static inputs             input_scale (1,), input_zero_point int8 (1,)
#
# Codes and zero points are signed, and packed with an offset of 2^(bits-1). Scales of MX are E8M0 in uint8. The global
# scale of NVFP4 is a divisor: the scale of a group is weight_scale / weight_global_scale, in fp32.


_MAGNITUDE = 7
"""The bits of a code of float4_e2m1 but its sign."""


def encode(tensor: QuantizedTensor, group: Group) -> dict[str, Tensor]:
    """The tensors of a quantized matrix, by the last part of their names, in the format of `group`."""
    codes, others = tensor.canonical()
    weights = group.weights
    assert weights is not None
    found = _floats(codes, others, weights) if weights.type == "float" else _integers(codes, others, group)
    if "act_scale" in others:
        found["input_scale"] = others["act_scale"].reshape(1)
    if "act_zero_point" in others:
        found["input_zero_point"] = others["act_zero_point"].reshape(1).to(torch.int8)
    return found


def _integers(codes: Tensor, others: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    weights = group.weights
    assert weights is not None
    bits, rows = weights.num_bits, codes.shape[0]
    # From codes of either sign to signed ones, and to those that count from zero.
    lowest = 2 ** (bits - 1)
    shift = 0 if codes.dtype is torch.int8 else lowest
    scale, zero_point = others["scale"], others.get("zero_point")
    if weights.strategy == "channel":
        scale = scale.expand(rows, 1)
        zero_point = None if zero_point is None else zero_point.expand(rows, 1)
    signed = (codes.to(torch.int16) - shift).to(torch.int8)
    if zero_point is not None:
        zero_point = zero_point.to(torch.int32) - shift
        if zero_point.numel() and not bool(((zero_point >= -lowest) & (zero_point < lowest)).all()):
            raise ValueError(f"has zero points beyond its codes of {bits} bits")
    if group.format != "pack-quantized":
        found = {"weight": signed, "weight_scale": _scale(scale, weights)}
        return found if zero_point is None else {**found, "weight_zero_point": zero_point.to(torch.int8)}
    found = {
        "weight_packed": pack_dense((signed.to(torch.int16) + lowest).to(torch.uint8), bits),
        "weight_scale": _scale(scale, weights),
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64, device="cpu"),
    }
    if zero_point is not None:
        found["weight_zero_point"] = pack_dense((zero_point.t() + lowest).to(torch.uint8), bits).t().contiguous()
    return found


def _floats(codes: Tensor, others: dict[str, Tensor], weights: Args) -> dict[str, Tensor]:
    scale = others["scale"]
    if weights.strategy == "group":
        # E8M0 is not a dtype that the package knows.
        scale = scale.view(torch.uint8)
    if weights.num_bits == 8:
        return {"weight": codes, "weight_scale": _scale(scale, weights)}
    found = {"weight_packed": pack_dense(codes, 4).view(torch.uint8), "weight_scale": scale}
    if weights.strategy == "tensor_group":
        empty = (scale.view(torch.uint8) == 0).repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        if bool((codes[empty] & _MAGNITUDE).any()):
            raise ValueError("has groups whose scale is zero in float8_e4m3fn; use recipes_for_vllm()")
        found["weight_global_scale"] = divisor_of(others["scale_scale"], scale).reshape(1)
    return found


def _scale(scale: Tensor, weights: Args) -> Tensor:
    return scale.reshape(1) if weights.strategy == "tensor" else scale.contiguous()


_EXPERT = re.compile(r".+\.experts\.\d+\.[^.]+")
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "shared", "embeddings")
"""Last names of modules that are tables of embeddings."""

_HEAD = "lm_head"


@dataclass(frozen=True)
class Saved:
    """What `config()` has to know of a quantized module: `global_scale` is that of NVFP4."""

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
        with files.naming(name):
            saved, tensors = _saved(module, tensor)
        self.quantized[module] = saved
        prefix = f"{module}." if module else ""
        return {f"{prefix}{key}": value for key, value in tensors.items()}

    def alias(self, name: str, original: str) -> None:
        names = [expert_names(self.model_config).in_checkpoint(each).rpartition(".")[0] for each in (name, original)]
        if names[1] in self.quantized:
            raise ValueError(f"{name} is tied to {original}, which is quantized; vLLM ties floats alone: untie them")
        if names[1] in self.floats:
            self.floats.append(names[0])

    def config(self) -> dict[str, Any]:
        check_joined({name: asdict(saved) for name, saved in self.quantized.items()}, self.floats)
        groups = config_groups({name: saved.group for name, saved in self.quantized.items()})
        formats = {saved.group.format for saved in self.quantized.values()}
        # A tied head, which files do not hold.
        is_tied = self.model_config.get("tie_word_embeddings") is True and _HEAD not in self.quantized
        return {
            "quant_method": METHOD,
            "version": VERSION,
            "format": formats.pop() if len(formats) == 1 else MIXED if formats else "dense",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {f"group_{i}": group.to_json(targets) for i, (group, targets) in enumerate(groups)},
            "ignore": ignored([*self.floats, _HEAD] if is_tied else self.floats),
        }

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
    parts = ("weights", "input_activations")
    args = {part: None if group[part] is None else construct(Args, group[part]) for part in parts}
    return construct(Saved, {**data, "group": construct(Group, {**group, **args})})


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
    """The group of a quantized matrix, in the first format that vLLM has a scheme for, and the name of the scheme; the
    name of the module tells experts and embeddings from linear layers."""
    is_embedding = module.rpartition(".")[2] in _EMBEDDINGS
    table = EXPERTS if _EXPERT.fullmatch(module) else EMBEDDING if is_embedding else LINEAR
    weights, inputs = args_of(tensor)
    problems = []
    for format in formats_of(weights, inputs):
        group = Group(weights, inputs, format)
        try:
            return group, decide(group, table)
        except ValueError as error:
            problems.append(error)
    raise problems[-1]


def _with_scales_of_the_model(tensor: QuantizedTensor, scheme: str) -> QuantizedTensor:
    """The tensor with its scales in its logical dtype, to which they must not have to be rounded."""
    codes, others = tensor.canonical()
    scale, dtype = others["scale"], tensor.scheme.dtype
    rounded = scale.to(dtype)
    if not torch.equal(rounded.to(scale.dtype), scale):
        raise ValueError(
            f"has scales in {scale.dtype}, and {scheme} uses them in {dtype}, that of the model: quantize with "
            f"scale_dtype={dtype}, or quantize_(model, recipes_for_vllm(model, recipe))"
        )
    return type(tensor).from_canonical(codes, {**others, "scale": rounded}, tensor.scheme)
