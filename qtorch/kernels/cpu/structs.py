"""The structs that the compiled kernels take, field for field as src/ declares them.

A call hands over the bytes of a `Weight` and then those of a call, all fields 8 bytes long. A field that is a struct
in C++ is one here.
"""

import functools
import struct
from typing import Any, NamedTuple, get_type_hints


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


class Input(NamedTuple):
    """src/matrix.h"""

    data: int
    type: int
    stride: int
    rows: int


class Output(NamedTuple):
    """src/matrix.h"""

    data: int
    type: int
    n: int
    bias: int


class Quantizer(NamedTuple):
    """src/quantize.h"""

    low: int
    high: int
    asymmetric: int
    given: int
    smallest: float
    largest: float


class Ids(NamedTuple):
    """src/embed.h"""

    data: int
    is_64_bit: int
    count: int  # type: ignore[assignment]  # hides a method of tuples


class Experts(NamedTuple):
    """src/experts.h"""

    ids: int
    rows: int
    count: int  # type: ignore[assignment]  # hides a method of tuples
    share: int
    ways: int
    steps: int


class Call(NamedTuple):
    """src/kernels.cpp, without the weight that comes first; so those below."""

    x: Input
    y: Output
    way: int
    threads: int


class IntCall(NamedTuple):
    """For int8 activations."""

    x: Input
    y: Output
    quantizer: Quantizer
    scale: int
    zero: int
    way: int
    threads: int


class Blocks(NamedTuple):
    """src/block_sparse.h"""

    columns: int
    size: int
    kept: int


class BlockCall(NamedTuple):
    """For block-sparse weights."""

    x: Input
    y: Output
    blocks: Blocks
    k: int
    scale: int
    zero: int
    threads: int


class EmbedCall(NamedTuple):
    """For rows of an embedding."""

    ids: Ids
    y: Output
    threads: int


class Cached(NamedTuple):
    """src/cached_rows.h. Strides of codes are in bytes, those of scales and zeros in elements."""

    codes: int
    format: int
    width: int
    code_batch: int
    code_head: int
    code_token: int
    scale: int
    zero: int
    scale_type: int
    scale_batch: int
    scale_head: int
    scale_token: int
    block: int


class Attention(NamedTuple):
    """src/attention.h"""

    keys: Cached
    values: Cached
    recent_keys: Cached
    recent_values: Cached
    batch: int
    heads: int
    group: int
    rows: int
    tokens: int
    recent: int
    query: int
    query_type: int
    query_batch: int
    query_head: int
    query_row: int
    out: int
    mask: int
    mask_type: int
    mask_batch: int
    mask_head: int
    mask_row: int
    sinks: int
    causal: int
    scaling: float
    softcap: float
    threads: int


class Tokens(NamedTuple):
    """src/quantize_tokens.h"""

    data: int
    type: int
    step_batch: int
    step_head: int
    step_token: int
    batch: int
    heads: int
    tokens: int
    width: int
    format: int
    codes: int
    scale: int
    zero: int
    scale_type: int
    smallest: float
    largest: float
    threads: int


class Adam(NamedTuple):
    """src/adam.h"""

    weight: int
    weight_type: int
    grad: int
    grad_type: int
    rows: int
    length: int
    block: int
    form: int
    first: int
    first_scale: int
    second: int
    second_scale: int
    highest: int
    highest_scale: int
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    eps: float
    decay: float
    l2: float
    step_size: float
    correction: float
    largest: float
    random: int
    key: int
    first_element: int
    threads: int


class ExpertsCall(NamedTuple):
    """For a weight of several matrices, one below the other."""

    experts: Experts
    x: Input
    y: Output
    threads: int


class ExpertsIntCall(NamedTuple):
    """The same for int8 activations."""

    experts: Experts
    x: Input
    y: Output
    quantizer: Quantizer
    scale: int
    zero: int
    threads: int


NO_INPUT = Input(0, 0, 0, 0)


@functools.cache
def struct_of(kind: Any) -> struct.Struct:
    """The bytes of a struct, from its fields in order."""
    return struct.Struct("=" + _formats(kind))


def pack(values: Any) -> bytes:
    """The bytes of one of the above."""
    kind: Any = type(values)
    return struct_of(kind).pack(*_flat(values))


def _formats(kind: type) -> str:
    formats = {int: "q", float: "d"}
    return "".join(formats.get(of_field) or _formats(of_field) for of_field in get_type_hints(kind).values())


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


# --------------------------------------------------------------------------------------------------
# The structs of operands of training products, field for field as src/ declares them; see `structs`.


class QuantizeMatrix(NamedTuple):
    """src/quantize_matrix.h"""

    data: int
    type: int
    row_step: int
    column_step: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int
    format: int
    least: float
    most: float
    bound: float
    smallest: float
    largest: float
    power: float
    skips_lost: int
    scale_of_rows: int
    noise: int
    noise_row_step: int
    noise_column_step: int
    codes: int
    scale: int
    threads: int


class DequantizeMatrix(NamedTuple):
    """src/dequantize_matrix.h"""

    codes: int
    row_step: int
    rows: int
    columns: int
    format: int
    scale: int
    is_power: int
    scale_row_step: int
    scale_column_step: int
    block_rows: int
    block_columns: int
    out: int
    threads: int


class BlockProduct(NamedTuple):
    """src/int_blocks.h"""

    x: int
    w: int
    w_row_step: int
    w_column_step: int
    m: int
    n: int
    k: int
    group: int
    x_scale: int
    x_scale_row_step: int
    x_scale_column_step: int
    x_rows: int
    x_groups: int
    w_scale: int
    w_scale_row_step: int
    w_scale_column_step: int
    w_rows: int
    w_groups: int
    out: int
    type: int
    threads: int


class ScaleSums(NamedTuple):
    """src/int_blocks.h"""

    sums: int
    rows: int
    columns: int
    x_scale: int
    x_step: int
    w_scale: int
    w_step: int
    out: int
    type: int
    threads: int
