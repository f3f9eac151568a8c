"""The structs that the compiled kernels take, field for field as src/ declares them.

A call hands over the bytes of a `Weight` and then those of a call, all fields 8 bytes long. A field that is a struct
in C++ is one here.
"""

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints


def declare(name: str, *fields: tuple[str, Any]) -> Any:
    """The type of a struct from (names, type) of its fields, in the order of the C++ struct."""
    return NamedTuple(name, [(field, kind) for names, kind in fields for field in names.split()])


class Weight(NamedTuple):
    """src/weight.h. Pointers are addresses, types are numbers of `compiled_library.TYPES`."""

    codes: int
    row_bytes: int
    bits: int
    center: int
    n: int
    k: int
    group: int
    groups: int
    scale: int
    scale_type: int
    scale_stride: int
    zero: int
    zero_type: int
    zero_is_code: int
    shift: float
    values: int = 0
    values_type: int = 0
    values_stride: int = 0
    values_count: int = 0
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    special: int = 0
    unit: float = 0.0
    unit_center: int = 0
    scale_values: int = 0
    scale_scale: int = 0
    zero_scale: int = 0
    scale_group: int = 0
    first_scale: int = 0
    scale_mean: float = 0.0
    scale_is_positive: int = 0
    vectors: int = 0
    signs: int = 0
    rotation: int = 0


Input = declare("Input", ("data type stride rows", int))
"""src/matrix.h"""

Output = declare("Output", ("data type n bias", int))
"""src/matrix.h"""


class Quantizer(NamedTuple):
    """src/quantize.h"""

    low: int
    high: int
    asymmetric: int
    given: int
    smallest: float
    largest: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Quantizer":
        """From the values of the fields; all zero where nothing is quantized."""
        low, high, asymmetric, given, smallest, largest = numbers or (0, 0, 0, 0, 0.0, 0.0)
        return cls(int(low), int(high), int(asymmetric), int(given), smallest, largest)


Ids = declare("Ids", ("data is_64_bit count", int))
"""src/embed.h"""

Experts = declare("Experts", ("ids rows count share variants steps", int))
"""src/experts.h"""

Blocks = declare("Blocks", ("columns size kept", int))
"""src/block_sparse.h"""

Call = declare("Call", ("x", Input), ("y", Output), ("variant threads", int))
"""src/calls.h, without the weight that comes first; so those below."""

IntCall = declare("IntCall", ("x", Input), ("y", Output), ("quantizer", Quantizer), ("scale zero variant threads", int))
"""For int8 activations."""

BlockCall = declare("BlockCall", ("x", Input), ("y", Output), ("blocks", Blocks), ("k scale zero threads", int))
"""For block-sparse weights."""

EmbedCall = declare("EmbedCall", ("ids", Ids), ("y", Output), ("threads", int))
"""For rows of an embedding."""

ExpertsCall = declare("ExpertsCall", ("experts", Experts), ("x", Input), ("y", Output), ("threads", int))
"""For a weight of several matrices, one below the other."""

ExpertsIntCall = declare(
    "ExpertsIntCall",
    ("experts", Experts), ("x", Input), ("y", Output), ("quantizer", Quantizer), ("scale zero threads", int),
)  # fmt: skip
"""The same for int8 activations."""

Cached = declare(
    "Cached",
    ("codes format width code_batch code_head code_token", int),
    ("scale zero scale_type scale_batch scale_head scale_token block", int),
)
"""src/cached_rows.h. Strides of codes are in bytes, those of scales and zeros in elements."""

Attention = declare(
    "Attention", ("keys values recent_keys recent_values", Cached),
    ("batch heads group rows tokens recent query query_type query_batch query_head query_row", int),
    ("out mask mask_type mask_batch mask_head mask_row sinks causal", int), ("scaling softcap", float),
    ("threads", int),
)  # fmt: skip
"""src/attention.h"""

Tokens = declare(
    "Tokens",
    ("data type step_batch step_head step_token batch heads tokens width format codes scale zero scale_type", int),
    ("smallest largest", float),
    ("threads", int),
)
"""src/quantize_tokens.h"""

Adam = declare(
    "Adam",
    ("weight weight_type grad grad_type rows length block form", int),
    ("first first_scale second second_scale highest highest_scale", int),
    ("beta1 beta2 rest1 rest2 eps decay l2 step_size correction largest", float),
    ("random key first_element threads", int),
)
"""src/adam.h"""

QuantizeMatrix = declare(
    "QuantizeMatrix",
    ("data type row_step column_step rows columns block_rows block_columns format", int),
    ("least most bound smallest largest power", float),
    ("skips_lost scale_of_rows noise noise_row_step noise_column_step codes scale threads", int),
)
"""src/quantize_matrix.h"""

DequantizeMatrix = declare(
    "DequantizeMatrix",
    ("codes row_step rows columns format", int),
    ("scale is_power scale_row_step scale_column_step block_rows block_columns out threads", int),
)
"""src/dequantize_matrix.h"""

BlockProduct = declare(
    "BlockProduct",
    ("x w w_row_step w_column_step m n k group", int),
    ("x_scale x_scale_row_step x_scale_column_step x_rows x_groups", int),
    ("w_scale w_scale_row_step w_scale_column_step w_rows w_groups", int),
    ("out type threads", int),
)
"""src/int_blocks.h"""

LowRank = declare("LowRank", ("down up", Input), ("k", int), ("x", Input), ("y", Output), ("threads", int))
"""src/low_rank.h"""

RmsNorm = declare("RmsNorm", ("x", Input), ("weight y k rounds", int), ("eps offset", float), ("threads", int))
"""src/decoder.h"""

Heads = declare("Heads", ("data batch_step head_step row_step heads out", int))
"""src/decoder.h"""

Rotation = declare(
    "Rotation", ("query key", Heads), ("cos sin cos_batch cos_row sin_batch sin_row type batch rows width threads", int)
)
"""src/decoder.h"""

ScaleSums = declare("ScaleSums", ("sums rows columns x_scale x_step w_scale w_step out type threads", int))
"""src/int_blocks.h"""

NO_INPUT = Input(0, 0, 0, 0)


@functools.cache
def struct_of(kind: Any) -> struct.Struct:
    """The bytes of a struct, from its fields in order."""
    return struct.Struct("=" + _formats(kind))


def pack(values: Any) -> bytes:
    """The bytes of one of the above."""
    of_structs = (value if isinstance(value, tuple) else (value,) for value in values)
    kind: Any = type(values)
    return struct_of(kind).pack(*itertools.chain.from_iterable(of_structs))


def _formats(kind: type) -> str:
    formats = {int: "q", float: "d"}
    return "".join(formats.get(of_field) or _formats(of_field) for of_field in get_type_hints(kind).values())
