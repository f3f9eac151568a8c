"""A checkpoint of compressed-tensors, as a `Source`: weights stay packed, and their numbers are those of the package.

What the tensors are is in `scheme`. A module is quantized if it has a `weight_scale`; `config_groups` says how.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ....primitives.files import naming
from ....primitives.spec import Scheme
from ... import sources, tensor_file
from ...hf_folder import FolderSource, HFFolder, Parts, StoredWeight
from ..blocks import FLOATS, dense_words, multiplier_of, padded_words, unpack_either, unpack_nibbles
from .config_groups import METHOD, Config
from .scheme import Args, Group, activation_spec, linear_spec, weight_spec

_NAN_E8M0 = 255


class StoredModule:
    """The tensors of one module in a folder, called `prefix` and a name that `write` describes; only their headers are
    read until `read`. `dense` is the packing of codes whose shape allows both; see `packing.unpack_either`."""

    def __init__(self, folder: HFFolder, prefix: str, mmap: bool, args: Args, dense: bool | None) -> None:
        self.folder, self.prefix, self.mmap, self.args, self.dense = folder, prefix, mmap, args, dense
        self.is_packed = "weight_packed" in self
        self.shape = rows, columns = self._shape()
        self.spec = weight_spec(args, self.shape)
        self.scale_shape = (1, 1)
        if args.strategy == "channel":
            self.scale_shape = (rows, 1)
        elif args.block_structure is not None:
            block = args.block_structure
            self.scale_shape = -(-rows // block[0]), -(-columns // block[1])
            # A block that the edge cuts off becomes several with the same scale.
            divisors = math.gcd(block[0], rows), math.gcd(block[1], columns)
            self.spec = weight_spec(replace(args, block_structure=divisors), self.shape)
        elif args.group_size is not None:
            self.scale_shape = rows, columns // args.group_size
        is_group = args.type == "float" and args.strategy == "group"
        self.is_mx = is_group and (args.num_bits == 4 or args.scale_dtype == "torch.uint8")
        self._check_scale()
        if not args.symmetric:
            self._check_zero_point()
        if self.spec.scale_spec is not None and math.prod(self.info("weight_global_scale").shape) != 1:
            raise ValueError("its weight_global_scale has more than one element")

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.folder.stored

    def info(self, name: str) -> tensor_file.Stored:
        """What the header says of a tensor."""
        if name not in self:
            raise ValueError(f"has no {name}")
        return self.folder.stored[f"{self.prefix}{name}"]

    def tensor(self, name: str) -> torch.Tensor:
        return self.folder.read(f"{self.prefix}{name}", mmap=self.mmap)

    def _shape(self) -> tuple[int, int]:
        args = self.args
        info = self.info("weight_packed" if self.is_packed else "weight")
        if len(info.shape) != 2:
            raise ValueError(f"its codes have shape {info.shape}, not that of a matrix")
        rows, columns = info.shape
        plain = torch.float8_e4m3fn if args.type == "float" else torch.int8
        packed = torch.uint8 if args.type == "float" else torch.int32
        dtype = packed if self.is_packed else plain
        if info.dtype is not dtype:
            kind = "packed codes" if self.is_packed else "codes"
            raise ValueError(f"its {kind} are {info.dtype}, those of {args.type}{args.num_bits} are {dtype}")
        if not self.is_packed:
            return rows, columns
        if args.type == "float":
            return rows, 2 * columns
        length = self._columns()
        if columns not in (dense_words(length, args.num_bits), padded_words(length, args.num_bits)):
            raise ValueError(f"its rows of {length} codes of {args.num_bits} bits do not take {columns} words")
        return rows, length

    def _columns(self) -> int:
        """Number of columns of a weight whose codes are packed in int32."""
        if "weight_shape" in self:
            info = self.info("weight_shape")
            if info.shape != (2,) or info.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"its weight_shape is {info.dtype} of shape {info.shape}, not two integers")
            rows, columns = map(int, self.tensor("weight_shape"))
            if rows != self.info("weight_packed").shape[0] or columns < 1:
                raise ValueError(f"its weight_shape is {(rows, columns)}, its packed codes have other rows")
            return columns
        scale = self.info("weight_scale").shape
        if self.args.strategy == "group" and self.args.group_size is not None and len(scale) == 2:
            return scale[1] * self.args.group_size
        raise ValueError("has no weight_shape")

    def _check_scale(self) -> None:
        info = self.info("weight_scale")
        if math.prod(info.shape) != math.prod(self.scale_shape) or (
            len(info.shape) > 1 and info.shape != self.scale_shape
        ):
            raise ValueError(f"its weight_scale has shape {info.shape}, a weight {self.shape} has {self.scale_shape}")
        dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.float8_e8m0fnu) if self.is_mx else FLOATS
        if self.args.strategy == "tensor_group":
            dtypes = (torch.float8_e4m3fn,)
        if info.dtype not in dtypes:
            raise ValueError(f"its weight_scale is {info.dtype}, not {' or '.join(map(str, dtypes))}")

    def _check_zero_point(self) -> None:
        info, bits = self.info("weight_zero_point"), self.args.num_bits
        rows, groups = self.scale_shape
        found = f"its weight_zero_point is {info.dtype} of shape {info.shape}"
        if not self.is_packed or self.args.strategy not in ("group", "channel"):
            if info.dtype is not torch.int8 or math.prod(info.shape) != rows * groups:
                raise ValueError(f"{found}, not int8 {(rows, groups)}")
        elif info.dtype is not torch.int32 or info.shape not in (
            (dense_words(rows, bits), groups),
            (padded_words(rows, bits), groups),
        ):
            raise ValueError(f"{found}, not int32 words along the {rows} rows")

    def read(self) -> Parts:
        """The codes and the other parts of the weight."""
        args, lowest = self.args, 2 ** (self.args.num_bits - 1)
        self._check_order()
        scale = self._scale()
        if args.type == "float":
            codes = unpack_nibbles(self.tensor("weight_packed")) if self.is_packed else self.tensor("weight")
            if self.spec.scale_spec is None:
                return codes, {"scale": scale}
            divisor = self.tensor("weight_global_scale").float().reshape(())
            if not bool(torch.isfinite(divisor)) or float(divisor) <= 0:
                raise ValueError(f"its weight_global_scale is {float(divisor)}, which is no positive number")
            multiplier = multiplier_of(divisor, scale)
            if multiplier is None:
                return codes, {"scale": scale.float() / divisor}
            return codes, {"scale": scale, "scale_scale": multiplier.reshape(1)}
        # Signed codes, or with zero points those that count from zero.
        if self.is_packed:
            unsigned = unpack_either(self.tensor("weight_packed"), args.num_bits, self.shape[1], self.dense)
            codes = (unsigned.to(torch.int16) - lowest).to(torch.int8) if args.symmetric else unsigned
        else:
            codes = self._in_range("weight", "codes")
            codes = codes if args.symmetric else (codes.to(torch.int16) + lowest).to(torch.uint8)
        if args.symmetric:
            if "weight_zero_point" in self and bool(self.tensor("weight_zero_point").any()):
                raise ValueError("is symmetric, but has zero points that are not zero")
            return codes, {"scale": scale}
        if self.info("weight_zero_point").dtype is torch.int32:
            words = self.tensor("weight_zero_point").t()
            zero_point = unpack_either(words, args.num_bits, self.shape[0], self.dense).t().contiguous()
        else:
            zero_point = self._in_range("weight_zero_point", "zero points")
            zero_point = (zero_point.to(torch.int16) + lowest).to(torch.uint8)
        return codes, {"scale": scale, "zero_point": zero_point.reshape(scale.shape)}

    def _in_range(self, name: str, what: str) -> torch.Tensor:
        values, lowest = self.tensor(name), 2 ** (self.args.num_bits - 1)
        if values.numel() and (int(values.min()) < -lowest or int(values.max()) >= lowest):
            raise ValueError(f"has {what} beyond {-lowest} to {lowest - 1}")
        return values

    def _scale(self) -> torch.Tensor:
        scale = self.tensor("weight_scale").reshape(self.scale_shape)
        if self.is_mx:
            exponents = scale.view(torch.uint8)
            if bool((exponents == _NAN_E8M0).any()):
                raise ValueError("has scales that are NaN in E8M0")
            return exponents.view(torch.float8_e8m0fnu)
        if self.args.block_structure is None:
            return scale
        block = self.spec.block_size(self.shape)
        for axis in (0, 1):
            times = self.args.block_structure[axis] // block[axis]
            scale = scale.repeat_interleave(times, axis).narrow(axis, 0, self.shape[axis] // block[axis])
        return scale.contiguous()

    def _check_order(self) -> None:
        """Columns sorted by their activations have groups that are not consecutive, unless they were sorted back."""
        if "weight_g_idx" not in self:
            return
        order, size = self.tensor("weight_g_idx"), self.args.group_size or self.shape[1]
        if not torch.equal(order.to(torch.int64), torch.arange(self.shape[1], device="cpu") // size):
            raise ValueError("has a weight_g_idx whose groups are not consecutive columns (actorder 'group')")


OF_WEIGHT = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale",
    "weight_g_idx",
)  # fmt: skip
OF_INPUT = ("input_scale", "input_zero_point", "input_global_scale")
OF_OUTPUT = ("output_scale", "output_zero_point", "output_global_scale")
OF_KV_CACHE = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point")


@sources.register_source
class CompressedTensorsSource(FolderSource):
    """A folder that vLLM and transformers read by ``quant_method: compressed-tensors``."""

    format = "compressed-tensors"
    methods = (METHOD,)

    def find_weights(self) -> dict[str, StoredWeight]:
        self._ignored: set[str] = set()
        with naming(self.path):
            config = Config.parse(self.folder.quantization_config)
        found, left_out = {}, set()
        for module in self._quantized_modules():
            with naming(self.path, module):
                found[f"{module}.weight" if module else "weight"], note = self._weight(module, config)
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

    def scheme_of(self, weight: StoredWeight, others: Mapping[str, torch.Tensor]) -> Scheme:
        """With the scales of the groups in fp32, where no scale for the tensor gives the same numbers."""
        scheme = weight.scheme
        if scheme.weight.scale_spec is None or "scale_scale" in others:
            return scheme
        spec = replace(scheme.weight, scale_spec=None, scale_dtype=torch.float32)
        return replace(scheme, spec=replace(scheme.spec, weight=spec))

    def _quantized_modules(self) -> Iterator[str]:
        """Names of the modules with a quantized weight."""
        for name in self.folder.stored:
            module, _, last = name.rpartition(".")
            if last == "weight_scale":
                yield module
            elif last == "weight_packed" and f"{name[: -len('packed')]}scale" not in self.folder.stored:
                raise ValueError(f"{self.path}: {module}: has weight_packed, but no weight_scale")

    def _weight(self, module: str, config: Config) -> tuple[StoredWeight, str]:
        groups = [group for group in config.group_of(module) if group.weights is not None]
        if not groups:
            raise ValueError("is quantized, but in no group of config_groups with weights")
        errors = []
        for group in groups:
            try:
                return self._of_group(f"{module}." if module else "", group, config)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _of_group(self, prefix: str, group: Group, config: Config) -> tuple[StoredWeight, str]:
        assert group.weights is not None
        module = StoredModule(self.folder, prefix, self.mmap, group.weights, config.packs_densely)
        activation, static, note = activation_spec(group.input_activations, module.shape[1])
        asymmetric = static and activation is not None and activation.has_zero_point
        used = ["input_scale"] * static + ["input_zero_point"] * asymmetric
        if missing := [name for name in used if name not in module]:
            raise ValueError(f"its inputs are quantized with a fixed scale, but there is no {missing[0]}")
        spec = linear_spec(module.spec, activation, static)
        scheme = Scheme(spec, module.shape, self.dtype_of(module.info("weight_scale").dtype))
        self._ignored |= {f"{prefix}{name}" for name in OF_INPUT if name in module and name not in used}
        tensors = tuple(f"{prefix}{name}" for name in (*OF_WEIGHT, *used) if name in module)

        def read() -> Parts:
            codes, others = module.read()
            for name in used:
                value = module.tensor(name)
                if value.numel() != 1:
                    raise ValueError(f"its {name} has shape {tuple(value.shape)}, not one element")
                value = value.reshape(1, 1)
                others[name.replace("input", "act")] = value.float() if name == "input_scale" else value
            return codes, others

        return StoredWeight(tensors, scheme, read), note
