"""What vLLM serves: its choice of a scheme by the arguments of a layer, as a table.

A copy of the decisions of vLLM 0.33.0: `CompressedTensorsConfig._get_scheme_from_parts` for linear layers,
`CompressedTensorsMoEMethod.get_moe_method` for experts, `CompressedTensorsEmbeddingWNA16Int` for embeddings, with the
conditions that the constructors of the schemes add. The first entry that matches wins; its name is that of the class.
Which kernel a scheme then runs is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .scheme import Args, Group

_CHANNEL_GROUP = ("channel", "group")
_ACTIVATION_FORMATS = (
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_BITS = range(2, 9)
_BITS_WITH_ZERO_POINT = (4, 8)
_SM90 = 90


class Layer(NamedTuple):
    """What the choice depends on.

    Attributes:
        weights, inputs: how they are quantized; None for an input in floating point.
        format: of the group.
        capability: of the GPU, 90 for Hopper; None if it is not known.
    """

    weights: Args
    inputs: Args | None
    format: str | None
    capability: int | None = None


class Decision(NamedTuple):
    """An entry of a table.

    Attributes:
        scheme: name of the class.
        matches: whether vLLM takes it.
        problem: why its constructor refuses the layer all the same, or None.
    """

    scheme: str
    matches: Callable[[Layer], bool]
    problem: Callable[[Args], str | None] = lambda weights: None


def _nvfp4(args: Args | None) -> bool:
    wanted = ("tensor_group", 16, "float", 4, True)
    return args is not None and (args.strategy, args.group_size, args.type, args.num_bits, args.symmetric) == wanted


def _mx(args: Args, bits: int) -> bool:
    wanted = ("group", 32, "float", bits, True)
    found = (args.strategy, args.group_size, args.type, args.num_bits, args.symmetric)
    return found == wanted and (bits == 4 or args.scale_dtype == "torch.uint8")


def _mxfp4_fp8(layer: Layer) -> bool:
    inputs = layer.inputs
    return _mx(layer.weights, 4) and inputs is not None and (inputs.type, inputs.num_bits) == ("float", 8)


def _w4a8_fp8(layer: Layer) -> bool:
    weights, inputs = layer.weights, layer.inputs
    return (
        inputs is not None
        and (weights.num_bits, inputs.num_bits) == (4, 8)
        and (weights.strategy, inputs.strategy) == ("group", "token")
        and weights.symmetric
        and inputs.symmetric
        and not weights.dynamic
        and inputs.dynamic is True
        # vLLM asks for the GPU, and not for the type of the input.
        and (layer.capability == _SM90 if layer.capability is not None else inputs.type == "float")
    )


def _wna(bits: int) -> Callable[[Layer], bool]:
    def matches(layer: Layer) -> bool:
        weights, inputs = layer.weights, layer.inputs
        return (
            inputs is not None
            and inputs.num_bits == bits
            and weights.type == inputs.type == "int"
            and not weights.dynamic
            and weights.strategy in _CHANNEL_GROUP
            and layer.format == "pack-quantized"
            and inputs.symmetric
            and bool(inputs.dynamic)
            and inputs.strategy in ("token", "group")
        )

    return matches


def _wna16(layer: Layer) -> bool:
    weights = layer.weights
    group_channel = weights.strategy in _CHANNEL_GROUP and not weights.dynamic
    return layer.inputs is None and group_channel and layer.format == "pack-quantized"


def _fp8_w8a16(layer: Layer) -> bool:
    weights = layer.weights
    return (
        layer.format in _ACTIVATION_FORMATS
        and weights.type == "float"
        and weights.symmetric
        and not weights.dynamic
        and weights.strategy in ("tensor", "channel", "block")
    )


def _fp8_w8a8(layer: Layer) -> bool:
    inputs = layer.inputs
    if inputs is None or inputs.type != "float" or not _fp8_w8a16(layer):
        return False
    return bool(inputs.dynamic) or (inputs.symmetric and inputs.strategy == "tensor")


def _int8_w8a8(strategy: str, dynamic: bool) -> Callable[[Layer], bool]:
    def matches(layer: Layer) -> bool:
        weights, inputs = layer.weights, layer.inputs
        return (
            layer.format in _ACTIVATION_FORMATS
            and inputs is not None
            and weights.num_bits == inputs.num_bits == 8
            and weights.strategy in ("tensor", "channel")
            and weights.symmetric
            and not weights.dynamic
            and (inputs.strategy, bool(inputs.dynamic)) == (strategy, dynamic)
        )

    return matches


def _int_w4a8(layer: Layer) -> bool:
    weights, inputs = layer.weights, layer.inputs
    return (
        layer.format in _ACTIVATION_FORMATS
        and inputs is not None
        and (weights.num_bits, inputs.num_bits) == (4, 8)
        and weights.strategy in _CHANNEL_GROUP
        and (inputs.strategy, bool(inputs.dynamic)) == ("token", True)
        and weights.symmetric
        and not weights.dynamic
    )


def _bits(weights: Args) -> str | None:
    if weights.num_bits not in _BITS:
        return f"vLLM has kernels for integers of 2 to 8 bits, these have {weights.num_bits}"
    if not weights.symmetric and weights.num_bits not in _BITS_WITH_ZERO_POINT:
        return f"vLLM has zero points for codes of 4 and 8 bits only, these have {weights.num_bits}"
    return None


LINEAR = (
    Decision("CompressedTensorsW4A4Fp4(use_a16=True)", lambda layer: _nvfp4(layer.weights) and layer.inputs is None),
    Decision("CompressedTensorsW4A4Fp4", lambda layer: _nvfp4(layer.weights) and _nvfp4(layer.inputs)),
    Decision("CompressedTensorsW4A8Mxfp4", _mxfp4_fp8),
    Decision("CompressedTensorsW4A4Mxfp4", lambda layer: _mx(layer.weights, 4)),
    Decision("CompressedTensorsW8A8Mxfp8", lambda layer: _mx(layer.weights, 8)),
    Decision("CompressedTensorsW4A8Fp8", _w4a8_fp8),
    Decision("CompressedTensorsWNA8Int", _wna(8), _bits),
    Decision("CompressedTensorsWNA4Int", _wna(4), _bits),
    Decision("CompressedTensorsWNA16", _wna16, _bits),
    Decision("CompressedTensorsW8A8Fp8", _fp8_w8a8),
    Decision("CompressedTensorsW8A16Fp8", _fp8_w8a16),
    Decision("CompressedTensorsW8A8Int8(is_static_input_scheme=True)", _int8_w8a8("tensor", False)),
    Decision("CompressedTensorsW8A8Int8", _int8_w8a8("token", True)),
    Decision("CompressedTensorsW4A8Int", _int_w4a8),
)
"""Linear layers. CompressedTensorsWNA8O8Int, which comes before WNA8Int, needs quantized outputs and is left out."""

EXPERTS = (
    Decision("CompressedTensorsW4A8Mxfp4MoEMethod", _mxfp4_fp8),
    Decision("CompressedTensorsW4A4Mxfp4MoEMethod", lambda layer: _mx(layer.weights, 4)),
    Decision("CompressedTensorsW8A8Mxfp8MoEMethod", lambda layer: _mx(layer.weights, 8)),
    Decision("CompressedTensorsWNA16MoEMethod", _wna16, _bits),
    Decision(
        "CompressedTensorsW4A4Nvfp4MoEMethod",
        lambda layer: _nvfp4(layer.weights) and (layer.inputs is None or _nvfp4(layer.inputs)),
    ),
    Decision("CompressedTensorsW8A8Fp8MoEMethod", _fp8_w8a8),
    Decision("CompressedTensorsW8A8Int8MoEMethod", _int8_w8a8("token", True)),
    Decision("CompressedTensorsW4A8Fp8MoEMethod", _w4a8_fp8),
    Decision("CompressedTensorsW4A8Int8MoEMethod", _int_w4a8),
)
"""The experts of a mixture."""

EMBEDDING = (
    Decision(
        "CompressedTensorsEmbeddingWNA16Int",
        lambda layer: _wna16(layer) and layer.weights.symmetric and layer.weights.type == "int",
        _bits,
    ),
)
"""Tables of embeddings."""

SCALES_IN_THE_DTYPE_OF_THE_MODEL = frozenset(
    {
        "CompressedTensorsWNA16",
        "CompressedTensorsWNA16MoEMethod",
        "CompressedTensorsWNA8Int",
        "CompressedTensorsWNA4Int",
        "CompressedTensorsW4A8Int",
        "CompressedTensorsW4A8Int8MoEMethod",
        "CompressedTensorsW4A8Fp8",
        "CompressedTensorsW4A8Fp8MoEMethod",
        "CompressedTensorsEmbeddingWNA16Int",
    }
)
"""Schemes that hold the scales of the weight in the dtype of the model; the others hold them as they are stored."""


def decide(group: Group, table: tuple[Decision, ...] = LINEAR, capability: int | None = None) -> str:
    """The scheme that vLLM takes for the layers of a group.

    Args:
        capability: of the GPU, if the choice for one is asked for; 90 is Hopper.

    Raises:
        ValueError: it takes none, where it raises NotImplementedError; or the scheme cannot be constructed.
    """
    weights, inputs = group.weights, group.input_activations
    if weights is not None:
        layer = Layer(weights, inputs, group.format, capability)
        for decision in table:
            if decision.matches(layer):
                if problem := decision.problem(weights):
                    raise ValueError(f"{decision.scheme}: {problem}")
                return decision.scheme
    raise ValueError(f"vLLM has no scheme for weights {_word(weights)} with inputs {_word(inputs)}")


def _word(args: Args | None) -> str:
    if args is None:
        return "in floating point"
    of_groups = args.strategy in ("group", "tensor_group")
    where = f"in groups of {args.group_size}" if of_groups else f"per {args.strategy}"
    kind = "" if args.symmetric else "asymmetric "
    return f"{kind}{args.type}{args.num_bits} {where}{' computed on each call' if args.dynamic else ''}"
