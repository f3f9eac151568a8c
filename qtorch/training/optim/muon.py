"""Muon8bit: steps along an orthogonal matrix, with momentum held in 8 bits.

    B <- momentum B + (1 - momentum) G,    U = momentum B + (1 - momentum) G  (Nesterov; otherwise U = B)
    W <- (1 - lr weight_decay) W - lr a orthogonal(U)

orthogonal(U) is the matrix U V^T of the singular value decomposition, roughly: five Newton-Schulz steps in bf16, or
with their products in int8 (`ns_int8`), bring all singular values near 1. a = sqrt(max(1, rows / columns)). Numbers in
bf16 are those of `torch.optim.Muon` but for the codes of B, which are made after they were used.

Source: Jordan, https://kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982 (`match_rms_adamw`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...kernels.ops import adam, int8_grouped_mm
from ...primitives import PerRow, QuantSpec, qdtype, tracing
from .adam import LowBitAdam, Params, Writable, add_moments, count_step
from .moment_form import first_element, like, local_of


class Muon8bit(LowBitAdam):
    """Muon with momentum in codes, for matrices; other parameters, and embeddings and heads, go in groups with
    ``"use_muon": False``, which are updated as by `AdamW8bit`, with the group's `betas`, `eps` and `weight_decay`.

    Under FSDP2 momentum is sharded as its parameter; each update of a matrix is gathered in bf16, and every process
    computes all of its Newton-Schulz steps: the numbers of one process.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as of `torch.optim.Muon`.
        adjust_lr_fn: ``"original"`` or None, a as above; ``"match_rms_adamw"``, a = 0.2 sqrt(max(rows, columns)).
        ns_int8: sum the products of the Newton-Schulz steps in integers; see `orthogonal`.
        betas, block_size, bf16_stochastic_round, optim_bits: as of `LowBitAdam`.

    Raises:
        ValueError: an argument is out of its range, or a parameter of a group for Muon is no matrix.
    """

    of_group = ("use_muon", "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "ns_int8")
    of_state = ("momentum_buffer",)

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: str | None = None, ns_int8: bool = False, **of_adam: Any,
    ) -> None:  # fmt: skip
        values = (True, momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn, ns_int8)
        of_group: dict[str, Any] = dict(zip(self.of_group, values, strict=True))
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay, **of_group, **of_adam)

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        super()._check_group(group, name)
        wrong = [tuple(p.shape) for p in group["params"] if group["use_muon"] and p.dim() != 2]
        if wrong:
            raise ValueError(f'{name} takes matrices, others in a group of "use_muon": False, got shape {wrong[0]}')
        if not 0 <= group["momentum"] < 1 or group["adjust_lr_fn"] not in (None, *ADJUSTMENTS):
            raise ValueError(
                f"{name}: momentum is at least 0 and less than 1, adjust_lr_fn None, "
                f"{', '.join(map(repr, ADJUSTMENTS))}, got {group['momentum']} and {group['adjust_lr_fn']!r}"
            )

    def _update(self, parameter: Tensor, index: int, group: dict[str, Any], lr: float) -> None:
        if not group["use_muon"]:
            super()._update(parameter, index, group, lr)
            return
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients")
        state = self.state[parameter]
        number = count_step(state)
        add_moments(state, parameter, group, ["momentum_buffer"])
        update, held, momentum = local_of(parameter.grad).float(), local_of(state["momentum_buffer"]), group["momentum"]
        if update.numel():
            buffer = held.dequantize().lerp(update, 1 - momentum)
            held.copy_(buffer)
            update = update.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = update.bfloat16()
        if tracing.is_sharded(parameter):
            from torch.distributed.tensor import distribute_tensor

            place: Any = parameter
            whole = orthogonal(like(parameter, update).full_tensor(), group)  # type: ignore[attr-defined]
            update = local_of(distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None))
        else:
            update = orthogonal(update, group)
        step_size = lr * ADJUSTMENTS[group["adjust_lr_fn"] or "original"](*parameter.shape)
        with Writable(local_of(parameter)) as weight:
            new = (weight.float() * (1 - lr * group["weight_decay"])).add_(update, alpha=-step_size)
            if group["bf16_stochastic_round"] and weight.dtype == torch.bfloat16:
                new = adam.rounded_up_at_random(new, adam.key_of(number, index), first_element(parameter))
            weight.copy_(new)
        if not parameter.is_inference():
            torch.autograd.graph.increment_version(parameter)


ADJUSTMENTS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / max(1, columns))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""`adjust_lr_fn`: what the learning rate of a matrix is multiplied by."""


def orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    """X (rows, columns) bf16 with singular values near 1: X <- a X + (b X X^T + c (X X^T)^2) X, `ns_steps` times.

    With `ns_int8`, products are those of rows in int8, each with a scale. The diagonals of the two symmetric matrices,
    which grow to many times the rest, stay in floating point, or rounding would hide the rest:

        X X^T = D + R,    (X X^T)^2 = D^2 + D R + R D + R^2
    """
    (a, b, c), high = group["ns_coefficients"], x.shape[0] > x.shape[1]
    x = x.T if high else x
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        if group["ns_int8"]:
            d, rest = diagonal_and_rest(int8_product(x, x))
            square = int8_product(rest, rest) + (d[:, None] + d) * rest + torch.diag(d * d)
            d, rest = diagonal_and_rest(b * (rest + torch.diag(d)) + c * square)
            x = (a + d)[:, None] * x + int8_product(rest, x.T)
            continue
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if high else x


def int8_product(x: Tensor, w: Tensor) -> Tensor:
    """x w^T, (M, N) in the dtype of x (M, K), of rows in int8."""
    return int8_grouped_mm.int8_rows_product(x, INT8, w, INT8, x.dtype)


def diagonal_and_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    """D (N,) and R (N, N) of a matrix D + R."""
    return x.diagonal(), x - torch.diag(x.diagonal())


INT8 = QuantSpec(qdtype("int8"), PerRow(), quant_min=-127)
