"""Orthogonal matrices that spread outliers over all channels: randomized Hadamard matrices, or random ones.

Hadamard matrices are made by Sylvester's doubling from those of Paley: of size q + 1 for a prime q = 3 mod 4, of size
2 (q + 1) for a prime q = 1 mod 4. Other sizes get the Q of a QR decomposition of a normal matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_orthogonal(size: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """(Q, its name): (size, size) fp64 with Q Q^T = I."""
    matrix = hadamard(size)
    if matrix is not None:
        signs = torch.randint(2, (size,), generator=generator, device="cpu").double() * 2 - 1
        return signs.unsqueeze(1) * matrix / size**0.5, "randomized Hadamard"
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu"))
    return q * r.diagonal().sign(), "random orthogonal"


def hadamard(size: int) -> Tensor | None:
    """A matrix of 1 and -1 with H H^T = size * I, fp64; None where there is no construction here."""
    if size in (1, 2):
        one = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        return one if size == 1 else _doubled(one)
    if size < 1 or size % 4:
        return None
    if _is_prime(size - 1):
        return _paley_one(size - 1)
    if (size // 2 - 1) % 4 == 1 and _is_prime(size // 2 - 1):
        return _paley_two(size // 2 - 1)
    half = hadamard(size // 2)
    return None if half is None else _doubled(half)


def _doubled(matrix: Tensor) -> Tensor:
    return torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _jacobsthal(q: int) -> Tensor:
    """chi(a - b) for a, b modulo a prime q, with chi 1 for squares, -1 for others, 0 for 0."""
    chi = torch.full((q,), -1.0, dtype=torch.float64, device="cpu")
    chi[torch.arange(q, device="cpu").square() % q] = 1
    chi[0] = 0
    index = torch.arange(q, device="cpu")
    return chi[(index.unsqueeze(1) - index) % q]


def _bordered(q: int, sign: float) -> Tensor:
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64, device="cpu")
    matrix[0, 1:], matrix[1:, 0] = 1, sign
    matrix[1:, 1:] = _jacobsthal(q)
    return matrix


def _paley_one(q: int) -> Tensor:
    return torch.eye(q + 1, dtype=torch.float64, device="cpu") + _bordered(q, -1)


def _paley_two(q: int) -> Tensor:
    zero = torch.tensor([[1.0, -1], [-1, -1]], dtype=torch.float64, device="cpu")
    one = torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64, device="cpu")
    return torch.kron(_bordered(q, 1), one) + torch.kron(torch.eye(q + 1, dtype=torch.float64, device="cpu"), zero)
