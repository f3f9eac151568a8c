"""The subspace of GaLore: a few orthonormal directions of a gradient, held in 4 bits.

    G (a, n) ~ R P,    R = G P^T (a, r),    P (r, n) = the r eigenvectors of G^T G with the largest eigenvalues

P is stored in INT4, in blocks of 256 with a scale and an offset that is a real number, so that blocks which do not
straddle zero keep all of their 16 values. What is read back is not orthonormal any more: it is made so, P <- L^-1 P
with L L^T = P P^T, which keeps the direction of the first row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dtypes.blocked_tensor import BlockedScheme, BlockedTensor
from ...layouts.plain import smallest_layout
from ...primitives import LinearSpec, MappingType, PerRow, QuantSpec, ZeroPointDomain, qdtype

BLOCK = 256

SPEC = QuantSpec(
    qdtype("uint4"),
    PerRow(),
    mapping=MappingType.ASYMMETRIC,
    zero_point_domain=ZeroPointDomain.OFFSET,
    scale_dtype=torch.float32,
    preserve_zero=False,
)


def gram(gradient: Tensor) -> Tensor:
    """G^T G in fp32; of shards along the first axis the parts of it add up."""
    gradient = gradient.float()
    return gradient.T @ gradient


def top_directions(gram: Tensor, rank: int) -> Tensor:
    """(rank, n): the eigenvectors of G^T G with the largest eigenvalues, the largest first."""
    _, vectors = torch.linalg.eigh(gram)
    return vectors[:, -rank:].flip(1).T.contiguous()


def stored(basis: Tensor) -> BlockedTensor:
    """The basis in 4 bits."""
    shape = tuple(basis.shape)
    block = max(1, min(BLOCK, math.prod(shape)))
    linear = LinearSpec(SPEC, layout=smallest_layout(SPEC.dtype))
    return BlockedTensor.quantized(basis, BlockedScheme(linear, shape, torch.float32, block, True))


def orthonormal(projector: BlockedTensor) -> Tensor:
    """The basis that a stored one stands for, fp32."""
    basis = projector.dequantize(torch.float32)
    lower = torch.linalg.cholesky(basis @ basis.T)
    return torch.linalg.solve_triangular(lower, basis, upper=False)


def rotated(moment: Tensor, squares: bool, old: Tensor, new: Tensor) -> Tensor:
    """A moment (a, r) along the directions `old` as one along `new`, both orthonormal.

    The mean of g is linear in it. That of g^2 is taken as if the coordinates were uncorrelated: variances of a sum add
    up, weighted by the squares of its coefficients.
    """
    turn = old @ new.T
    return moment @ (turn * turn if squares else turn)
