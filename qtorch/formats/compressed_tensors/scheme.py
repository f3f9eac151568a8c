"""How compressed-tensors describes a layer, and the specs of this package that mean the same.

`Args` are its `QuantizationArgs`: how the weight or the input of a layer is quantized. A `Group` is an entry of
`config_groups` without its targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
"""The formats that are read."""

TYPES = ("int", "float")
STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
SCALE_DTYPES = ("torch.uint8", "torch.float8_e4m3fn", "torch.float16", "torch.bfloat16", "torch.float32")

_IGNORED = ("observer", "observer_kwargs", "zp_dtype", "actorder")
"""Fields that say how scales were chosen, or in which dtype zero points are kept: they follow from the tensors."""


@dataclass(frozen=True)
class Args:
    """How a tensor is quantized.

    Args:
        num_bits: of a code.
        type: ``"int"`` or ``"float"``.
        symmetric: there is no zero point.
        strategy: which elements share a scale: ``"tensor"``, ``"channel"`` (a row of the weight), ``"group"`` (of
            `group_size` columns), ``"block"`` (of `block_structure`), ``"token"`` (a row of the input) or
            ``"tensor_group"``, groups whose scales are quantized too, with one scale for the tensor.
        dynamic: the scale is computed on each call; ``"local"``, only that of the groups.
        scale_dtype: dtype in which scales are stored, None for floating point of 16 or 32 bits.
    """

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
        data: dict[str, Any] = {
            "num_bits": self.num_bits,
            "type": self.type,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size,
            "dynamic": self.dynamic,
        }
        if self.block_structure is not None:
            data["block_structure"] = list(self.block_structure)
        if self.scale_dtype is not None:
            data["scale_dtype"] = self.scale_dtype
        return data

    @classmethod
    def parse(cls, data: Any) -> Args:
        """The arguments in config.json, which may be untrusted.

        Raises:
            ValueError: they are not valid, or are not known to this version.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"quantization arguments are an object, got {data!r:.80}")
        fields = {field: data[field] for field in data if field not in _IGNORED}
        if unknown := sorted(fields.keys() - cls.__dataclass_fields__.keys()):
            raise ValueError(f"quantization arguments have no field {', '.join(map(repr, unknown))}")
        bits = fields.get("num_bits", 8)
        _require(type(bits) is int and 1 <= bits <= 16, f"num_bits is {bits!r:.40}")
        kind = fields.get("type", "int")
        _require(kind in TYPES, f"type is {kind!r:.40}; known are {', '.join(TYPES)}")
        group_size = fields.get("group_size")
        _require(
            group_size is None or (type(group_size) is int and group_size >= -1), f"group_size is {group_size!r:.40}"
        )
        strategy = fields.get("strategy") or _strategy_of(group_size)
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
        if _of_group(data) and data.get("actorder") in ("group", "dynamic", True):
            raise ValueError("actorder 'group', columns sorted by their activations, has no representation here")
        return cls(
            bits,
            kind,
            symmetric,
            strategy,
            group_size if strategy in ("group", "tensor_group") else None,
            _block_structure(fields.get("block_structure")) if strategy == "block" else None,
            dynamic,
            scale_dtype,
        )


def _of_group(data: Mapping[str, Any]) -> bool:
    return data.get("strategy") in (None, "group")


@dataclass(frozen=True)
class Group:
    """How the layers of a group are quantized and stored.

    Args:
        weights: None if the weights are not quantized.
        input_activations: None if the input stays in floating point.
        format: one of `FORMATS`; None if config.json does not say.
    """

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


def _strategy_of(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"


def _block_structure(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
    sizes = list(value) if isinstance(value, list | tuple) else []
    _require(
        len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes), f"block_structure {value!r:.40}"
    )
    return sizes[0], sizes[1]


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"quantization arguments are not valid: {problem}")
