"""FlatBlocks: the elements of a tensor of any size and shape as a matrix, a row for each block.

The elements, in row-major order, are `rows` runs of `length`. No block crosses the end of a run; the last one of each
is completed with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional


class FlatBlocks(NamedTuple):
    """How elements are divided into blocks."""

    rows: int
    length: int
    block: int

    @property
    def of_row(self) -> int:
        """Blocks of a run."""
        return -(-self.length // self.block)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.rows * self.of_row, self.block

    def split(self, x: Tensor) -> Tensor:
        """The matrix of a tensor."""
        return functional.pad(x.reshape(self.rows, self.length), (0, self._padding)).reshape(self.shape)

    def merge(self, matrix: Tensor) -> Tensor:
        """Inverse of `split`: the elements (rows, length)."""
        return matrix.reshape(self.rows, self.of_row * self.block)[:, : self.length]

    @property
    def _padding(self) -> int:
        return self.of_row * self.block - self.length
