"""How compressed-tensors describes a layer, and the specs of this package that mean the same.

`Args` are its `QuantizationArgs`: how the weight or the input of a layer is quantized. A `Group` is an entry of
`config_groups` without its targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....dtypes import ConvWeight, LowRankWeight, PackedLayout, PaddedWeight, QuantizedTensor, TransposedWeight
from ....primitives import CodebookSpec, LinearSpec, MappingType, QuantSpec, ZeroPointDomain, qdtype
from ....primitives.granularity import Granularity, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from ....primitives.spec import NVFP4_BLOCK, mx_spec, nvfp4_spec
from ..blocks import integer_spec, symmetric_spec

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
"""The formats that are read."""

STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
SCALE_DTYPES = ("torch.uint8", "torch.float8_e4m3fn", "torch.float16", "torch.bfloat16", "torch.float32")

_IGNORED = ("observer", "observer_kwargs", "zp_dtype", "actorder")
"""Fields that say how scales were chosen, or in which dtype zero points are kept: they follow from the tensors."""


@dataclass(frozen=True)
class Args:
    """How a tensor is quantized, in the fields of the package. `strategy` says which elements share a scale:
    ``"tensor"``, ``"channel"`` (a row of the weight), ``"group"`` (of `group_size` columns), ``"block"`` (of
    `block_structure`), ``"token"`` (a row of the input) or ``"tensor_group"``, groups whose scales are quantized too,
    with one scale for the tensor. A `dynamic` scale is computed on each call; ``"local"``, only that of the groups.
    `scale_dtype` None is floating point of 16 or 32 bits."""

    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool | str = False
    scale_dtype: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which both versions of the package accept: unknown fields are an error there."""
        always = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
        data: dict[str, Any] = {name: getattr(self, name) for name in always}
        if self.block_structure is not None:
            data["block_structure"] = list(self.block_structure)
        if self.scale_dtype is not None:
            data["scale_dtype"] = self.scale_dtype
        return data

    @classmethod
    def parse(cls, data: Any) -> "Args":
        """The arguments in config.json, which may be untrusted."""
        if not isinstance(data, Mapping):
            raise ValueError(f"quantization arguments are an object, got {data!r:.80}")
        fields = {field: data[field] for field in data if field not in _IGNORED}
        if unknown := sorted(fields.keys() - cls.__dataclass_fields__.keys()):
            raise ValueError(f"quantization arguments have no field {', '.join(map(repr, unknown))}")
        bits = fields.get("num_bits", 8)
        _require(type(bits) is int and 1 <= bits <= 16, f"num_bits is {bits!r:.40}")
        kind = fields.get("type", "int")
        _require(kind in ("int", "float"), f"type is {kind!r:.40}; known are int, float")
        group_size = fields.get("group_size")
        is_size = group_size is None or (type(group_size) is int and group_size >= -1)
        _require(is_size, f"group_size is {group_size!r:.40}")
        by_size = "tensor" if group_size is None else "group" if group_size > 0 else "channel"
        strategy = fields.get("strategy") or by_size
        _require(strategy in STRATEGIES, f"strategy is {strategy!r:.40}; known are {', '.join(STRATEGIES)}")
        if strategy in ("group", "tensor_group"):
            _require(group_size is not None and group_size > 0, f"strategy {strategy} has group_size {group_size}")
        symmetric, dynamic = fields.get("symmetric", True), fields.get("dynamic", False)
        _require(isinstance(symmetric, bool), f"symmetric is {symmetric!r:.40}")
        _require(isinstance(dynamic, bool) or dynamic == "local", f"dynamic is {dynamic!r:.40}")
        scale_dtype = fields.get("scale_dtype")
        if isinstance(scale_dtype, str) and not scale_dtype.startswith("torch."):
            scale_dtype = f"torch.{scale_dtype}"
        _require(scale_dtype is None or scale_dtype in SCALE_DTYPES, f"scale_dtype is {scale_dtype!r:.40}")
        if data.get("strategy") in (None, "group") and data.get("actorder") in ("group", "dynamic", True):
            raise ValueError("actorder 'group', columns sorted by their activations, has no representation here")
        group_size = group_size if strategy in ("group", "tensor_group") else None
        block = _block_structure(fields.get("block_structure")) if strategy == "block" else None
        return cls(bits, kind, symmetric, strategy, group_size, block, dynamic, scale_dtype)


@dataclass(frozen=True)
class Group:
    """How the layers of a group are quantized (None for what stays in floating point), and in which of `FORMATS`."""

    weights: Args | None
    input_activations: Args | None = None
    format: str | None = None

    def to_json(self, targets: list[str]) -> dict[str, Any]:
        """The entry of `config_groups`."""
        return {
            "targets": targets,
            "weights": None if self.weights is None else self.weights.to_json(),
            "input_activations": None if self.input_activations is None else self.input_activations.to_json(),
            "output_activations": None,
            "format": self.format,
        }


def _block_structure(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
    sizes = list(value) if isinstance(value, list | tuple) else []
    are_sizes = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    _require(are_sizes, f"block_structure {value!r:.40}")
    return sizes[0], sizes[1]


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"quantization arguments are not valid: {problem}")


# The specs of this package that mean the same as the arguments of compressed-tensors, in both directions.


_E8M0 = torch.float8_e8m0fnu
_E8M0_NAME = "torch.uint8"
_E4M3_NAME = "torch.float8_e4m3fn"
MX_GROUP = 32


# from this package


def args_of(tensor: QuantizedTensor) -> tuple[Args, Args | None]:
    """How the weight and the input of a quantized matrix are described."""
    if isinstance(tensor, ConvWeight):
        raise ValueError("is the weight of a convolution; the schemes are for linear layers and embeddings")
    if isinstance(tensor, LowRankWeight):
        raise ValueError("has a branch of low rank, which no scheme has; save_quantized(model, path) keeps it")
    if isinstance(tensor, PaddedWeight):
        how = "stored as (inputs, outputs)" if isinstance(tensor, TransposedWeight) else "held with a padded last group"
        raise ValueError(f"is {how}; the schemes are for weights (outputs, inputs) that groups divide")
    scheme = tensor.scheme
    if isinstance(scheme.weight, CodebookSpec):
        raise ValueError(f"is quantized with look-up tables of {scheme.weight.dtype}; no scheme has any")
    if tensor.trains or not isinstance(scheme.weight, QuantSpec):
        raise ValueError(f"is a {type(tensor).__name__}; finish the training by convert() first")
    if scheme.weight.rotation:
        raise ValueError(f"has rotated blocks ({scheme.weight}); no scheme has a rotation of blocks in its kernel")
    if not scheme.layout.any_codes:
        raise ValueError(f"is sparse, {scheme.layout}; no scheme of vLLM serves sparse weights")
    inputs = None if scheme.activation is None else _of_activation(scheme.activation, scheme.spec.static)
    return _of_weight(scheme.weight, scheme.shape, inputs is None), inputs


def formats_of(weights: Args, inputs: Args | None) -> tuple[str, ...]:
    """The formats that can hold a layer, the one in which most of its schemes are served first."""
    if weights.type == "float":
        if weights.num_bits == 4:
            return ("nvfp4-pack-quantized" if weights.strategy == "tensor_group" else "mxfp4-pack-quantized",)
        return ("mxfp8-quantized" if weights.strategy == "group" else "float-quantized",)
    if inputs is None or inputs.type == "float":
        return ("pack-quantized",)
    # With a byte per code, vLLM has schemes for codes of 8 and 4 bits; the others run on packed ones.
    return ("int-quantized", "pack-quantized")


def _of_weight(spec: QuantSpec, shape: Sequence[int], weight_only: bool) -> Args:
    dtype, name = spec.dtype, spec.dtype.name
    strategy, group_size, block = _strategy(spec.granularity, spec.block_size(shape), shape)
    if dtype.is_floating_point:
        if spec.scale_spec is not None:
            if (name, group_size) != ("float4_e2m1", NVFP4_BLOCK) or spec.scale_spec.dtype.name != "float8_e4m3fn":
                raise ValueError(f"has quantized scales ({spec}); the schemes have those of NVFP4 only")
            return Args(4, "float", True, "tensor_group", NVFP4_BLOCK, scale_dtype=_E4M3_NAME)
        is_mx = spec.scale_dtype is _E8M0 and group_size == MX_GROUP
        if name not in ("float8_e4m3fn", "float4_e2m1"):
            raise ValueError(f"has codes of {name}; the schemes have float8_e4m3fn, and float4_e2m1 in MXFP4 and NVFP4")
        if name == "float4_e2m1" and not is_mx:
            raise ValueError(f"is {spec}; the schemes have float4_e2m1 as mxfp4_weight_only() and nvfp4_weight_only()")
        return Args(dtype.bits, "float", True, strategy, group_size, block, scale_dtype=_E8M0_NAME if is_mx else None)
    if spec.scale_spec is not None:
        raise ValueError(f"has quantized scales ({spec}); the schemes have those of NVFP4 only")
    if dtype.bits > 8:
        raise ValueError(f"has codes of {name}; the schemes have integers of 2 to 8 bits")
    if spec.has_zero_point and spec.zero_point_domain is not ZeroPointDomain.INT:
        raise ValueError(f"has zero points of the domain {spec.zero_point_domain.name}; the schemes have those of INT")
    if not spec.has_zero_point and not dtype.is_signed:
        raise ValueError(f"has codes of {name} without zero points; the schemes have signed codes, int{dtype.bits}")
    if strategy == "tensor" and weight_only:
        strategy = "channel"  # the same scale for every row, as the scheme wants it
    return Args(dtype.bits, "int", not spec.has_zero_point, strategy, group_size, block)


def _strategy(
    granularity: Granularity, block: Sequence[int], shape: Sequence[int]
) -> tuple[str, int | None, tuple[int, int] | None]:
    """(strategy, group size, block) of a matrix in blocks."""
    rows, columns = shape
    if tuple(block) == (rows, columns) and (rows > 1 or isinstance(granularity, PerTensor)):
        return "tensor", None, None
    if block[0] == 1:
        # A group that fills the row is still a group where the format has fixed groups, as MX.
        if isinstance(granularity, PerGroup) and granularity.group_size == columns:
            return "group", columns, None
        return ("channel", None, None) if block[1] == columns else ("group", block[1], None)
    return "block", None, (block[0], block[1])


def _of_activation(spec: QuantSpec, static: bool) -> Args:
    granularity, dtype = spec.granularity, spec.dtype
    kind = "float" if dtype.is_floating_point else "int"
    if spec.scale_spec is not None:
        raise ValueError(
            f"has inputs in {spec} whose scale is computed from the whole batch; vLLM wants one that was measured: use "
            "nvfp4_weight_only()"
        )
    if dtype.name not in ("float8_e4m3fn", "float4_e2m1") and (kind == "float" or not dtype.is_signed):
        raise ValueError(f"has inputs in {dtype.name}; the schemes have int8, int4 and float8_e4m3fn")
    if spec.has_zero_point and spec.zero_point_domain is not ZeroPointDomain.INT:
        raise ValueError(f"has inputs with zero points of the domain {spec.zero_point_domain.name}, not INT")
    if not static and not spec.preserve_max_val:
        raise ValueError("has inputs with preserve_max_val=False; vLLM's scales have the maximum at the outermost code")
    strategy, group_size = None, None
    if isinstance(granularity, PerTensor):
        strategy = "tensor"
    elif isinstance(granularity, PerRow) and not static:
        strategy = "token"
    elif isinstance(granularity, PerGroup) and not static:
        strategy, group_size = ("token", None) if granularity.group_size == -1 else ("group", granularity.group_size)
        if kind == "float" and spec.scale_dtype not in (torch.float32, _E8M0):
            raise ValueError(f"has inputs in {spec} with scales in their dtype; engines have them in fp32: scale_dtype")
    if strategy is None:
        raise ValueError(f"has inputs in {spec}; the schemes have scales per token, tensor or group")
    scale_dtype = _E8M0_NAME if spec.scale_dtype is _E8M0 else None
    symmetric = not spec.has_zero_point
    return Args(dtype.bits, kind, symmetric, strategy, group_size, dynamic=not static, scale_dtype=scale_dtype)


# to this package


def weight_spec(args: Args, shape: tuple[int, int]) -> QuantSpec:
    """The spec of a weight; integers with zero points become unsigned, which is what the fast kernels know."""
    granularity = _granularity(args, shape)
    if args.dynamic:
        raise ValueError("weights with scales that are computed on each call have no data to read")
    if args.type == "float":
        if not args.symmetric:
            raise ValueError("floating-point weights with zero points are not represented exactly")
        if (args.num_bits, args.strategy, args.group_size) == (4, "tensor_group", NVFP4_BLOCK):
            return nvfp4_spec()
        is_mx = args.strategy == "group" and args.group_size == MX_GROUP
        if args.num_bits == 4 and is_mx:
            return mx_spec("float4_e2m1")
        if args.num_bits == 8 and args.strategy != "tensor_group":
            scale_dtype = _E8M0 if is_mx and args.scale_dtype == _E8M0_NAME else None
            return symmetric_spec("float8_e4m3fn", granularity, scale_dtype)
        raise ValueError(f"weights of {args.num_bits} floating-point bits by {args.strategy} are not known")
    if args.num_bits > 8 or args.strategy == "tensor_group":
        raise ValueError(f"weights of {args.num_bits} integer bits by {args.strategy} are not known")
    if args.symmetric:
        return QuantSpec(qdtype(f"int{args.num_bits}"), granularity)
    return integer_spec(args.num_bits, granularity, None)


def _granularity(args: Args, shape: tuple[int, int]) -> Granularity:
    if args.strategy == "tensor":
        return PerTensor()
    if args.strategy == "channel":
        return PerRow()
    if args.group_size is not None:
        if shape[1] % args.group_size:
            raise ValueError(f"groups of {args.group_size} do not divide {shape[1]} columns")
        return PerGroup(args.group_size)
    if args.block_structure is not None:
        return PerBlock(args.block_structure)
    raise ValueError(f"weights by {args.strategy} are not known")


def activation_spec(args: Args | None, columns: int) -> tuple[QuantSpec | None, bool, str]:
    """(spec of the input of a layer, whose rows have `columns` elements; whether it is static; what is left out).

    An input whose quantization has no equal here stays in floating point; the third item says so, else it is empty.
    """
    if args is None:
        return None, False, ""
    left_out = f"{args.type}{args.num_bits} by {args.strategy}"
    dtype = _ACTIVATION_DTYPES.get((args.type, args.num_bits))
    granularity = _activation_granularity(args, columns)
    static = not args.dynamic
    if dtype is None or granularity is None or (static and args.strategy != "tensor"):
        return None, False, left_out
    if args.type == "float":
        if not args.symmetric:
            return None, False, f"{left_out}, asymmetric"
        is_mx = args.strategy == "group" and args.group_size == MX_GROUP and args.scale_dtype == _E8M0_NAME
        if args.num_bits == 4 and not is_mx:
            return None, False, left_out
        # Engines compute the scales of groups in fp32.
        in_groups = torch.float32 if args.strategy == "group" else None
        return symmetric_spec(dtype, granularity, _E8M0 if is_mx else in_groups), static, ""
    if args.symmetric:
        return QuantSpec(qdtype(dtype), granularity, quant_min=-127), static, ""
    return QuantSpec(qdtype(dtype), granularity, MappingType.ASYMMETRIC), static, ""


_ACTIVATION_DTYPES = {("int", 8): "int8", ("float", 8): "float8_e4m3fn", ("float", 4): "float4_e2m1"}


def _activation_granularity(args: Args, columns: int) -> Granularity | None:
    if args.dynamic == "local":
        return None  # a part of the scale was measured
    if args.strategy == "token":
        return PerToken() if args.type == "int" else PerRow()
    if args.strategy == "tensor":
        return PerTensor()
    if args.strategy == "group" and args.group_size is not None and columns % args.group_size == 0:
        return PerGroup(args.group_size)
    return None


def linear_spec(weight: QuantSpec, activation: QuantSpec | None, static: bool) -> LinearSpec:
    """The spec of a layer; codes of less than 8 bits stay packed."""
    layout: Any = PackedLayout() if weight.dtype.bits < 8 else None
    return LinearSpec(weight, activation, static, layout)
