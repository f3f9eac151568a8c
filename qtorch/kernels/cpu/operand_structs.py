"""The structs of operands of training products, field for field as src/ declares them; see `structs`."""

from typing import NamedTuple


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
