"""Linear with an integer weight and a floating-point activation, compiled.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

The kernels read the codes as the layout stores them and accumulate in fp32. Which variant of src/ runs depends on the
number of rows, the size of the weight and the machine (`variants.py`). Where F.linear is faster than all of them, it
runs on the dequantized weight: a slice at a time, or a copy that `float_copies` keeps.

Where the weights of a model stream through the caches, they evict the Python code that layers run, which then takes
five to ten times as long as in a loop. So from the second call of a layer on, `F.linear` calls `CompiledLinear.linear`
at once, which checks the input and little else.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...primitives import CodebookSpec, is_compiling, qdtype
from ..custom_ops import Name, Size, implement, note, opaque, portable, recording
from ..linear import codebooks, scaled
from ..linear.weight_only import packed_weight_mm
from ..ops.quantize import error_norms
from ..ops.weight_only_mm import multiply_slices, slice_length, weight_only_mm
from ..registry import Problem, can_add, choose, from_rows, needs_floats, split_bias, to_rows
from . import float_copies, variants, weight
from .code_values import FLOATS, TABLE, QuantizedScales
from .compiled_library import TYPES, Library, threads
from .memory import address, empty, empty_at
from .structs import NO_INPUT, Call, Input, Output, Weight, pack, struct_of
from .variants import VARIANTS
from .weight import CompiledWeight, register_compiled

Numerics = tuple[float, ...]

FEW_ROWS = 64  # for which the variant is cached, not for every length of a prompt
PLAIN = (Tensor, nn.Parameter)  # types of a bias that kernels read directly
SLICE_BYTES = 8 << 20  # of a weight, dequantized at a time: enough for a fast product, and few enough to stay in cache


def where_finite(y: Tensor, x: Tensor, product: Callable[[], Tensor], share: int = 1) -> Tensor:
    """`y` (M * share, N), with rows of `product()` for those that are not finite although the row of x (M, K) is:
    scales that are multiplied last, or first, may make what lies between infinite."""
    rows = torch.isfinite(x).all(1, keepdim=True).repeat_interleave(share, 0) & ~torch.isfinite(y).all(1, keepdim=True)
    return torch.where(rows, product(), y) if bool(rows.any()) else y


class CompiledLinear(CompiledWeight):
    """y (M, N) for inputs x (M, K) of one dtype; one subclass per compiled function.

    A subclass has the function's `name` in `Library`, and `call`, the struct that the function takes after the weight:
    `x`, `y`, the values of `numerics`, `variant` and `threads`.

    Attributes:
        source, dtype: dtypes of x and y.
        numerics: fields of the struct that say how x is quantized.
    """

    name: ClassVar[str]
    call: ClassVar[type]

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, *about: Any, **more: Any) -> None:
        """See `of`; the last of `about` are the dtypes of x and y, the name of x in `variants`, and numerics."""
        super().__init__(codes, scale, zero_point, *about, **more)
        n, k, *_, self.source, self.dtype, kind, self.numerics = about
        if self.compiled is not None:
            self._call, self._weight = getattr(self.compiled, self.name), pack(self.fields)
        self._pack = struct_of(self.call).pack
        self._types = TYPES[self.source], TYPES[self.dtype]
        self._n, self._row = n, (k,)
        self._key = self.key(kind)
        self._variants: dict[int, str] = {}

    def variant(self, rows: int) -> str:
        """The variant for this many rows."""
        variant = self._variants.get(rows)
        if variant is None:
            variant = self.find_variant(rows)
            if rows <= FEW_ROWS:
                self._variants[rows] = variant
        return variant

    def find_variant(self, rows: int) -> str:
        """The variant for this many rows, looked up."""
        return self.choose(rows)

    def choose(self, rows: int, suffix: str = "") -> str:
        """As `variants` has it for this kind of weight, with a suffix to its name; "torch" if nothing is compiled."""
        compiled = self.compiled
        return "torch" if compiled is None else variants.choose(compiled.instruction_set, self._key + suffix, rows)

    def run(
        self, x: Tensor, stride: int, rows: int, shape: Sequence[int], bias: Tensor | None, variant: str, of_x: Numerics
    ) -> tuple[Tensor, bool]:
        """y in this shape, and whether all of it is finite, from x whose rows are `stride` elements apart."""
        y, y_address = empty_at(shape, self.dtype)
        x_type, y_type = self._types
        # By position, in the order of the struct's fields: making the named tuple would take four times as long.
        of_call = self._pack(
            address(x), x_type, stride, rows, y_address, y_type, self._n, address(bias), *of_x, VARIANTS[variant],
            threads(),
        )  # fmt: skip
        return y, not self._call(self._weight + of_call)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None, numerics: Numerics | None = None) -> Tensor | None:
        """`F.linear` of x (..., K) with the weight that this was made from; None if one compiled call cannot do it."""
        shape = x.shape
        if (
            x.dtype is not self.dtype
            or shape[-1:] != self._row
            or not x.is_cpu
            or not x.is_contiguous()
            or not self.is_of(*self.tensors_of(weight))
            or not (bias is None or (type(bias) in PLAIN and can_add(bias, self.dtype, self._n)))
        ):
            return None
        k = shape[-1]
        rows = x.numel() // k
        variant = self.variant(rows)
        if variant not in VARIANTS:
            return None
        y, finite = self.run(x, k, rows, (*shape[:-1], self._n), bias, variant, numerics or self.numerics)
        return y if finite else None

    @classmethod
    def prepare(cls, weight: Any) -> None:
        """Let the next `F.linear` with this weight call `linear` of what the last one made at once."""
        made = cls.made_of(weight.qdata)
        # Only under autocast may the dtype of the input differ from that of the weight.
        if made is not None and made.source is made.dtype is weight.scheme.dtype:
            vars(weight)["fast_linear"] = made.linear


class WeightOnlyLinear(CompiledLinear):
    """Of `cpu_weight_only_mm` and the operators like it."""

    name, call = "weight_only_mm", Call

    def find_variant(self, rows: int) -> str:
        """Also "copy": F.linear on a dequantized copy, if copies are allowed."""
        suffix = " copied" if self._key.partition(" ")[0] not in ("values", "units", "vectors") else ""
        return "copy" if float_copies.wanted() and self.choose(rows, suffix) == "float" else self.choose(rows)

    def rotated(self, x: Tensor) -> Tensor:
        """x as it meets the weight in floating point: rotated if that is."""
        return codebooks.rotated_input(x, self.fields.rotation if self.fields else 0)

    def finite(self, y: Tensor, x: Tensor, in_torch: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
        """y with rows of `in_torch`, which rotates large ones as smaller ones, where a rotation made them infinite."""
        rotates = self.fields is not None and self.fields.rotation
        return where_finite(y, x, lambda: _add(in_torch(), bias)) if rotates else y


@opaque(lambda x, codes, n, *_: x.new_empty(x.shape[0], n))
def cpu_weight_only_mm(
    x: Tensor, codes: Tensor, n: Size,
    scale: Tensor, zero_point: Tensor | None, packed: bool, dtype: Name,
    low: float, high: float, domain: Name, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equation above, (M, N) in the dtype of x.

    Args:
        x: (M, K) fp32, bf16 or fp16.
        codes: (N, K) in the storage dtype of `dtype`, the name of a `QDType`; or packed along K.
        scale, zero_point: (N, G), G groups of a row, or (1, 1).
        low, high: bounds of the codes.
        domain: name of a `ZeroPointDomain`.
        bias: (N) in the dtype of x, or None.
    """

    form = (packed, dtype, low, high, domain)
    about = (n, x.shape[1], dtype, packed, domain, (low + high + 1) / 2)
    in_torch = lambda: _in_torch(x, codes, n, scale, zero_point, *form)  # noqa: E731
    return multiply("cpu_weight_only_mm", x, (codes, scale, zero_point), about, bias, in_torch)


def _in_torch(
    x: Tensor, codes: Tensor, n: int,
    scale: Tensor, zero_point: Tensor | None, packed: bool, dtype: str, low: float, high: float, domain: str,
) -> Tensor:  # fmt: skip
    if packed:
        return packed_weight_mm(x, codes, n, -1, scale, zero_point, dtype, low, high, domain)
    return weight_only_mm(x, codes, scale, zero_point, dtype, low, high, domain)


def multiply(
    name: str, x: Tensor, tensors: tuple[Tensor, Tensor, Tensor | None], about: tuple[Any, ...], bias: Tensor | None,
    in_torch: Callable[[], Tensor], scales: QuantizedScales | None = None,
) -> Tensor:  # fmt: skip
    """The product of x (M, K) with the weight of `CompiledWeight.of(*tensors, *about, scales=scales)`, recorded under
    this name.

    Args:
        in_torch: the product without bias, in torch operators.
    """
    (m, k), n = x.shape, about[0]
    weight.check_bias(bias, x.dtype, n)
    layer = WeightOnlyLinear.of(*tensors, *about, x.dtype, x.dtype, x.dtype, (), scales=scales)
    compiled, variant = layer.compiled, layer.variant(m)
    if compiled is not None and variant == "copy":
        made = Dequantized(compiled, layer.fields, n, k, x.dtype)
        copy = float_copies.float_copy((*tensors, *layer._of_scales), x.dtype, made.rows, n * k * x.element_size())
        if copy is not None:
            note(f"{name}.float_copy")
            return layer.finite(_add(nn.functional.linear(layer.rotated(x), copy), bias), x, in_torch, bias)
        variant = layer.choose(m)
    if compiled is None or variant == "torch":
        note(f"{name}.torch")
        return _add(in_torch(), bias)
    if recording():
        note(f"{name}.{compiled.instruction_set}.{variant}")
    made = Dequantized(compiled, layer.fields, n, k, x.dtype)
    if variant == "float":
        return layer.finite(multiply_dequantized(layer.rotated(x), made, bias), x, in_torch, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    y, finite = layer.run(x, x.stride(0), m, (m, n), bias, variant, ())
    if finite:
        return y
    y = where_finite(y, x, lambda: multiply_dequantized(layer.rotated(x), made, bias))
    return layer.finite(y, x, in_torch, bias)


class Dequantized(NamedTuple):
    """A weight (n, k), described by `fields`, as floating-point numbers."""

    library: Library
    fields: Weight | None
    n: int
    k: int
    dtype: torch.dtype

    def rows(self, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        """Rows `start` to `stop`, by default all, written into `out` if given."""
        stop = self.n if stop is None else stop
        out = empty((stop - start, self.k), self.dtype) if out is None else out
        output = Output(address(out), TYPES[self.dtype], self.k, bias=0)
        assert self.fields is not None
        call = Call(x=NO_INPUT, y=output, variant=0, threads=threads())
        self.library.dequantize(pack(weight.part(self.fields, start, stop)) + pack(call))
        return out


@implement("error_norms", "cpu")
def _error_norms(floats: Tensor, quantized: Any) -> Tensor:
    """See `error_norms`: a row at a time, while it is in the cache."""
    scheme, stored = quantized.scheme, None
    alone = replace(scheme, spec=replace(scheme.spec, activation=None, static=False))
    kernel = choose(Problem("linear", alone, floats.dtype, "cpu")).name
    if kernel in ("cpu_weight_only_mm", "cpu_lut_mm") and scheme.dtype in TYPES:
        (n, k), (packed, dtype, low, high, domain) = scheme.shape, weight.form(scheme)
        about = n, k, dtype, packed, domain, (low + high + 1) / 2
        # Held until the call: the struct has their addresses.
        scale = quantized.dense_scale()
        third = quantized.table if kernel == "cpu_lut_mm" else quantized.dense_zero_point()
        stored = CompiledWeight(quantized.qdata, scale, third, *about)
    compiled = None if stored is None else stored.compiled
    if stored is None or compiled is None:
        note("error_norms.torch")
        return portable(error_norms)(floats, quantized)
    note(f"error_norms.{compiled.instruction_set}")
    sums = empty((n, 2), torch.float64)
    of_x, output = Input(address(floats), TYPES[floats.dtype], k, n), Output(address(sums), TYPES[scheme.dtype], 2, 0)
    compiled.sum_squared_errors(pack(stored.fields) + pack(Call(of_x, output, 0, threads())))
    return sums.sum(0).sqrt().float()


def _add(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias after y was rounded, as compiled kernels and layers in training add it; torch's `linear` rounds once."""
    return y if bias is None else y.add_(bias)


def multiply_dequantized(x: Tensor, made: Dequantized, bias: Tensor | None) -> Tensor:
    """The variant "float": slices that stay in cache are dequantized, and multiplied by torch."""
    n, k = made.n, made.k
    step = slice_length(x, k, limit=SLICE_BYTES)
    if n <= step:
        return _add(nn.functional.linear(x, made.rows()), bias)
    memory = x.new_empty(step, k)
    return _add(multiply_slices(x, n, step, lambda start, stop: made.rows(start, stop, memory[: stop - start])), bias)


def supports(problem: Problem) -> str | None:
    """Why the kernel does not take the problem, or None."""
    return needs_floats(problem) or weight.supports(problem)


@register_compiled(
    "linear", weight=(*scaled.INTEGERS, *FLOATS), activation=(), supports=supports, checks_memory=True,
    note="for many rows F.linear on the dequantized weight, where that is faster: made on each call, or kept "
    "within qtorch.config.float_copy_bytes", advice=variants.advice, name="cpu_weight_only_mm",
)  # fmt: skip
def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    n, form = quantized.scheme.shape[0], weight.form(quantized.scheme)
    added, bias = split_bias(bias, x, n)
    of_scales = quantized.scheme.weight.scale_spec
    if of_scales and not (is_compiling() and (torch.compiler.is_exporting() or not of_scales.dtype.is_floating_point)):
        y = _with_quantized_scales(to_rows(x), quantized, quantized.zero_point, None, added)
    else:
        scale, zero_point = quantized.dense_scale(), quantized.dense_zero_point()
        y = cpu_weight_only_mm(to_rows(x), quantized.qdata, n, scale, zero_point, *form, added)
    if not is_compiling():
        WeightOnlyLinear.prepare(quantized)
    return from_rows(y, x, bias)


# Weights of look-up tables: one table for the whole weight, such as NF4, or one for each group of a row.


@opaque(lambda x, codes, n, *_: x.new_empty(x.shape[0], n))
def cpu_lut_mm(
    x: Tensor, codes: Tensor, n: int, scale: Tensor, table: Tensor, bits: int, packed: bool, bias: Tensor | None
) -> Tensor:
    """y[m, n] = sum_k x[m, k] * table[codes[n, k]] * scale[n, g] + bias[n], (M, N) in the dtype of x.

    Args:
        x: (M, K) fp32, bf16 or fp16.
        codes: (N, K) uint8; or of `bits` bits, packed along K.
        scale: (N, G), G groups of a row, or (1, 1), in floating point.
        table: (L,), or (N, G, L).
        bias: (N) in the dtype of x, or None.
    """
    about = (n, x.shape[1], f"uint{bits}", packed, TABLE, 0.0)
    in_torch = lambda: codebooks.lut_weight_mm(x, codes, scale, table, bits if packed else 8, 1, n)  # noqa: E731
    return multiply("cpu_lut_mm", x, (codes, scale, table), about, bias, in_torch)


@register_compiled("linear", spec=CodebookSpec, weight=None, activation=(), supports=supports, name="cpu_lut_mm")
def _lut_linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    scheme = quantized.scheme
    packed, n, bits = scheme.layout.packed_axis is not None, scheme.shape[0], scheme.weight.dtype.bits
    added, bias = split_bias(bias, x, n)
    if quantized.scale_scale is not None:
        y = _with_quantized_scales(to_rows(x), quantized, None, quantized.table, added)
    else:
        y = cpu_lut_mm(to_rows(x), quantized.qdata, n, quantized.dense_scale(), quantized.table, bits, packed, added)
    if not is_compiling():
        WeightOnlyLinear.prepare(quantized)
    return from_rows(y, x, bias)


# Scales that are quantized themselves are read as codes. Compiled graphs make numbers of those of integers, whose
# kernel they call without Python; not of float8, as in NVFP4, which takes longer than the product, but when exported.


@opaque(lambda x, codes, n, *_: x.new_empty(x.shape[0], n))
def cpu_double_quantized_mm(
    x: Tensor, codes: Tensor, n: int, scale: Tensor, zero_point: Tensor | None, table: Tensor | None,
    packed: bool, dtype: Name, low: float, high: float, domain: Name, scale_dtype: Name, scale_group: int,
    scale_is_positive: bool, scale_scale: Tensor, scale_mean: Tensor | None, zero_point_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """`cpu_weight_only_mm`, or with a table `cpu_lut_mm`, with the codes of scales and of zero points (N, G) in place
    of numbers; the further arguments are the fields of `QuantizedScales`."""
    scales = QuantizedScales(scale_dtype, scale_group, scale_is_positive, scale_scale, scale_mean, zero_point_scale)
    about = (n, x.shape[1], dtype, packed, domain, (low + high + 1) / 2)

    def in_torch() -> Tensor:
        dense, zeros = scales.numbers(scale, zero_point)
        if table is None:
            return _in_torch(x, codes, n, dense, zeros, packed, dtype, low, high, domain)
        return codebooks.lut_weight_mm(x, codes, dense, table, qdtype(dtype).bits if packed else 8, 1, n)

    third = zero_point if table is None else table
    return multiply("cpu_double_quantized_mm", x, (codes, scale, third), about, bias, in_torch, scales)


def _with_quantized_scales(
    x: Tensor, quantized: Any, zeros: Tensor | None, table: Tensor | None, bias: Tensor | None
) -> Tensor:
    scales = QuantizedScales.of(quantized)
    assert scales is not None
    tensors = quantized.qdata, quantized.scheme.shape[0], quantized.scale, zeros, table
    arguments: tuple[Any, ...] = (*tensors, *weight.form(quantized.scheme), *scales, bias)
    return cpu_double_quantized_mm(x, *arguments)
