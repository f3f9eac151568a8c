"""A checkpoint of compressed-tensors, as a `Source`: weights stay packed, and their numbers are those of the package.

What the tensors are is in `encode`. A module is quantized if it has a `weight_scale`; `config.Config` says how.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....dtypes import AffineQuantizedTensor
from ....primitives import QuantSpec
from ....primitives.spec import Scheme
from ...folder_source import FolderSource, Parts, StoredWeight
from ...hf_folder import HFFolder
from ...sources import register_source
from ...tensor_file import Stored as Info
from .config_groups import METHOD, Config
from .packing import dense_words, multiplier_of, padded_words, unpack_either, unpack_nibbles
from .scheme import Args, Group, activation_spec, linear_spec, weight_spec

# --------------------------------------------------------------------------------------------------
# Reading the tensors that stand for a weight; they are described in `encode`.


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NAN_E8M0 = 255

Read = Callable[[], Parts]


@dataclass(frozen=True)
class Stored:
    """The tensors of one module in a folder."""

    folder: HFFolder
    prefix: str
    mmap: bool = False

    def __contains__(self, name: str) -> bool:
        return self.full(name) in self.folder.stored

    def full(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def info(self, name: str) -> Info:
        """
        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self:
            raise ValueError(f"has no {name}")
        return self.folder.stored[self.full(name)]

    def read(self, name: str) -> Tensor:
        return self.folder.read(self.full(name), mmap=self.mmap)


def decode(stored: Stored, group: Group, dense: bool | None) -> tuple[QuantSpec, tuple[int, int], Read]:
    """The spec and the shape of a weight, from headers, and the function that reads it.

    Args:
        dense: the packing of codes whose shape allows both; see `packing.unpack_either`.

    Raises:
        ValueError: the tensors do not fit the group, or have no exact representation; names no module.
    """
    args = group.weights
    assert args is not None
    packed = "weight_packed" in stored
    shape = _shape(stored, args, packed)
    spec = weight_spec(args, shape)
    if args.strategy == "block":
        spec = weight_spec(replace(args, block_structure=_block(args, shape)), shape)
    _check_scale(stored, args, shape)
    if not args.symmetric:
        _check_zero_point(stored, args, shape, packed)
    if spec.scale_spec is not None and math.prod(stored.info("weight_global_scale").shape) != 1:
        raise ValueError("its weight_global_scale has more than one element")
    return spec, shape, lambda: _read_parts(stored, args, spec, shape, dense, packed)


def _shape(stored: Stored, args: Args, packed: bool) -> tuple[int, int]:
    info = stored.info("weight_packed" if packed else "weight")
    if len(info.shape) != 2:
        raise ValueError(f"its codes have shape {info.shape}, not that of a matrix")
    rows, columns = info.shape
    if not packed:
        wanted = torch.float8_e4m3fn if args.type == "float" else torch.int8
        if info.dtype is not wanted:
            raise ValueError(f"its codes are {info.dtype}, those of {args.type}{args.num_bits} are {wanted}")
        return rows, columns
    if args.type == "float":
        if info.dtype is not torch.uint8:
            raise ValueError(f"its packed codes are {info.dtype}, those of float4 are uint8")
        return rows, 2 * columns
    if info.dtype is not torch.int32:
        raise ValueError(f"its packed codes are {info.dtype}, those of int{args.num_bits} are int32")
    length = _columns(stored, args)
    if columns not in (dense_words(length, args.num_bits), padded_words(length, args.num_bits)):
        raise ValueError(f"its rows of {length} codes of {args.num_bits} bits do not take {columns} words")
    return rows, length


def _columns(stored: Stored, args: Args) -> int:
    """Number of columns of a weight whose codes are packed in int32."""
    if "weight_shape" in stored:
        info = stored.info("weight_shape")
        if info.shape != (2,) or info.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"its weight_shape is {info.dtype} of shape {info.shape}, not two integers")
        rows, columns = map(int, stored.read("weight_shape"))
        if rows != stored.info("weight_packed").shape[0] or columns < 1:
            raise ValueError(f"its weight_shape is {(rows, columns)}, its packed codes have other rows")
        return columns
    if args.strategy == "group" and args.group_size is not None and len(stored.info("weight_scale").shape) == 2:
        return stored.info("weight_scale").shape[1] * args.group_size
    raise ValueError("has no weight_shape")


def _scale_shape(args: Args, shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = shape
    if args.strategy == "tensor":
        return 1, 1
    if args.strategy == "channel":
        return rows, 1
    if args.strategy == "block":
        assert args.block_structure is not None
        return -(-rows // args.block_structure[0]), -(-columns // args.block_structure[1])
    assert args.group_size is not None
    return rows, columns // args.group_size


def _check_scale(stored: Stored, args: Args, shape: tuple[int, int]) -> None:
    info, wanted = stored.info("weight_scale"), _scale_shape(args, shape)
    if math.prod(info.shape) != math.prod(wanted) or (len(info.shape) > 1 and info.shape != wanted):
        raise ValueError(f"its weight_scale has shape {info.shape}, that of a weight {shape} has {wanted}")
    if info.dtype not in _scale_dtypes(args):
        raise ValueError(f"its weight_scale is {info.dtype}, not {' or '.join(map(str, _scale_dtypes(args)))}")


def _scale_dtypes(args: Args) -> tuple[torch.dtype, ...]:
    if args.strategy == "tensor_group":
        return (torch.float8_e4m3fn,)
    return (torch.uint8, torch.float8_e8m0fnu) if _is_mx(args) else _FLOATS


def _is_mx(args: Args) -> bool:
    is_group = args.type == "float" and args.strategy == "group"
    return is_group and (args.num_bits == 4 or args.scale_dtype == "torch.uint8")


def _check_zero_point(stored: Stored, args: Args, shape: tuple[int, int], packed: bool) -> None:
    info = stored.info("weight_zero_point")
    rows, groups = _scale_shape(args, shape)
    if not packed or args.strategy not in ("group", "channel"):
        if info.dtype is not torch.int8 or math.prod(info.shape) != rows * groups:
            raise ValueError(f"its weight_zero_point is {info.dtype} of shape {info.shape}, not int8 {(rows, groups)}")
        return
    words = (dense_words(rows, args.num_bits), padded_words(rows, args.num_bits))
    if info.dtype is not torch.int32 or len(info.shape) != 2 or info.shape[0] not in words or info.shape[1] != groups:
        raise ValueError(
            f"its weight_zero_point is {info.dtype} of shape {info.shape}, not int32 words along the {rows} rows"
        )


def _block(args: Args, shape: tuple[int, int]) -> tuple[int, int]:
    """Blocks that divide the weight: a block that the edge cuts off becomes several with the same scale."""
    assert args.block_structure is not None
    rows, columns = args.block_structure
    return math.gcd(rows, shape[0]), math.gcd(columns, shape[1])


def _read_parts(
    stored: Stored, args: Args, spec: QuantSpec, shape: tuple[int, int], dense: bool | None, packed: bool
) -> Parts:
    _check_order(stored, args, shape)
    scale = _read_scale(stored, args, spec, shape)
    others = {"scale": scale}
    if args.type == "float":
        codes = unpack_nibbles(stored.read("weight_packed")) if packed else stored.read("weight")
        if spec.scale_spec is None:
            return codes, others
        divisor = stored.read("weight_global_scale").float().reshape(())
        if not bool(torch.isfinite(divisor)) or float(divisor) <= 0:
            raise ValueError(f"its weight_global_scale is {float(divisor)}, which is no positive number")
        multiplier = multiplier_of(divisor, scale)
        if multiplier is None:
            return codes, {"scale": scale.float() / divisor}
        return codes, {**others, "scale_scale": multiplier.reshape(1)}
    bits, lowest = args.num_bits, 2 ** (args.num_bits - 1)
    rows, columns = shape
    # Signed codes, or with zero points those that count from zero.
    if packed:
        unsigned = unpack_either(stored.read("weight_packed"), bits, columns, dense)
        codes = (unsigned.to(torch.int16) - lowest).to(torch.int8) if args.symmetric else unsigned
    else:
        codes = _in_range(stored.read("weight"), lowest, "codes")
        codes = codes if args.symmetric else (codes.to(torch.int16) + lowest).to(torch.uint8)
    if args.symmetric:
        if "weight_zero_point" in stored and bool(stored.read("weight_zero_point").any()):
            raise ValueError("is symmetric, but has zero points that are not zero")
        return codes, others
    zero_point = stored.read("weight_zero_point")
    if zero_point.dtype is torch.int32:
        zero_point = unpack_either(zero_point.t(), bits, rows, dense).t().contiguous()
    else:
        zero_point = (_in_range(zero_point, lowest, "zero points").to(torch.int16) + lowest).to(torch.uint8)
    return codes, {**others, "zero_point": zero_point.reshape(scale.shape)}


def _in_range(values: Tensor, lowest: int, what: str) -> Tensor:
    if values.numel() and (int(values.min()) < -lowest or int(values.max()) >= lowest):
        raise ValueError(f"has {what} beyond {-lowest} to {lowest - 1}")
    return values


def _read_scale(stored: Stored, args: Args, spec: QuantSpec, shape: tuple[int, int]) -> Tensor:
    scale = stored.read("weight_scale").reshape(_scale_shape(args, shape))
    if _is_mx(args):
        exponents = scale.view(torch.uint8)
        if bool((exponents == _NAN_E8M0).any()):
            raise ValueError("has scales that are NaN in E8M0")
        return exponents.view(torch.float8_e8m0fnu)
    if args.strategy != "block":
        return scale
    assert args.block_structure is not None
    block = spec.block_size(shape)
    for axis in (0, 1):
        times = args.block_structure[axis] // block[axis]
        scale = scale.repeat_interleave(times, axis).narrow(axis, 0, shape[axis] // block[axis])
    return scale.contiguous()


def _check_order(stored: Stored, args: Args, shape: tuple[int, int]) -> None:
    """Columns that were sorted by their activations have groups that are not consecutive, unless they were sorted back.

    Raises:
        ValueError: the groups are not consecutive.
    """
    if "weight_g_idx" not in stored:
        return
    order = stored.read("weight_g_idx")
    size = args.group_size or shape[1]
    if not torch.equal(order.to(torch.int64), torch.arange(shape[1], device="cpu") // size):
        raise ValueError("has a weight_g_idx whose groups are not consecutive columns (actorder 'group')")


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
