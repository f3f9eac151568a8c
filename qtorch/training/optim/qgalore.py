"""QGaLoreAdamW8bit: AdamW in a subspace of each gradient, for weights that are held in INT8.

    R = G P^T,    W <- (1 - lr weight_decay) W - lr scale Adam(R) P        (G.T and W.T where W is wider than high)

P, the directions in which the gradient is largest, is in 4 bits (`projection`) and computed anew every
`update_proj_gap` steps; a matrix whose first direction has hardly turned, |cos| of at least `cos_threshold` on average
over `queue_size` times, gets a gap `gamma_proj` times as long. Moments are of rank r, in 8 bits, and turn with P.

Sources: GaLore, arXiv 2403.03507; Q-GaLore, arXiv 2407.08296. Weights in INT8 come from
`int8_weight_only_quantized_training()`, which rounds their updates stochastically.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...dtypes.blocked_tensor import BlockedScheme, BlockedTensor
from ...kernels.ops.adam import AdamStep, adam_step
from ...primitives import LinearSpec, MappingType, PerRow, QuantSpec, ZeroPointDomain, qdtype, tracing
from ...primitives.layouts import smallest_layout
from .adam import LowBitAdam, Params, Writable, add_moments, count_step
from .moment_form import as_moment, flat_blocks, form_of, like, local_of

# The subspace of GaLore: a few orthonormal directions of a gradient, held in 4 bits.
#
#     G (a, n) ~ R P,    R = G P^T (a, r),    P (r, n) = the r eigenvectors of G^T G with the largest eigenvalues
#
# P is stored in INT4, in blocks of 256 with a scale and an offset that is a real number, so that blocks which do not
# straddle zero keep all of their 16 values. What is read back is not orthonormal any more: it is made so, P <- L^-1 P
# with L L^T = P P^T, which keeps the direction of the first row.


BLOCK = 256

SPEC = QuantSpec(
    qdtype("uint4"), PerRow(), mapping=MappingType.ASYMMETRIC, zero_point_domain=ZeroPointDomain.OFFSET,
    scale_dtype=torch.float32, preserve_zero=False,
)  # fmt: skip


def top_directions(gram: Tensor, rank: int) -> Tensor:
    """(rank, n): the eigenvectors of G^T G with the largest eigenvalues, the largest first."""
    _, vectors = torch.linalg.eigh(gram.double())  # fp32 fails, or gives NaN, where many eigenvalues are zero
    return vectors[:, -rank:].flip(1).T.to(gram.dtype).contiguous()


def stored(basis: Tensor) -> BlockedTensor:
    """The basis in 4 bits."""
    shape = tuple(basis.shape)
    block = max(1, min(BLOCK, math.prod(shape)))
    linear = LinearSpec(SPEC, layout=smallest_layout(SPEC.dtype))
    return BlockedTensor.quantized(basis, BlockedScheme(linear, shape, torch.float32, block, True))


def orthonormal(projector: BlockedTensor) -> Tensor:
    """The basis that a stored one stands for, fp32."""
    basis = projector.dequantize(torch.float32)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(basis @ basis.T), basis, upper=False)


def rotated(moment: Tensor, squares: bool, old: Tensor, new: Tensor) -> Tensor:
    """A moment (a, r) along the directions `old` as one along `new`, both orthonormal. The mean of g is linear in it.
    That of g^2 is taken as if the coordinates were uncorrelated: variances of a sum add up, weighted by the squares of
    its coefficients."""
    turn = old @ new.T
    return moment @ (turn * turn if squares else turn)


class QGaLoreAdamW8bit(LowBitAdam):
    """AdamW with 8-bit moments in a subspace of the gradients; see the top of the file.

    Matrices in groups with a `rank` smaller than both of their sizes are updated in a subspace, all other parameters as
    by `AdamW8bit`. FSDP2 shards along the first axis; the subspace is that of the whole gradient.

    Args:
        params, lr, betas, eps, weight_decay, block_size, optim_bits: as of `LowBitAdam`.
        rank: directions of a gradient, None for all of them; usually in the group of the matrices, as in
            ``[{"params": matrices, "rank": 128}, {"params": others}]``. A quarter of the width is a good start.
        scale: of the update, alpha in the paper.
        update_proj_gap: steps for which the directions are kept.
        cos_threshold, queue_size, gamma_proj: see the top of the file; `gamma_proj=1` keeps all gaps as they are.

    Raises:
        ValueError: an argument is out of its range.
    """

    of_group = ("rank", "scale", "update_proj_gap", "cos_threshold", "queue_size", "gamma_proj")
    of_state = ("projector", "next_update", "gap", "similarity")

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, rank: int | None = None, scale: float = 0.25, update_proj_gap: int = 200,
        cos_threshold: float = 0.4, queue_size: int = 5, gamma_proj: float = 2.0, block_size: int = 256,
        optim_bits: int | str = 8,
    ) -> None:  # fmt: skip
        values = (rank, scale, update_proj_gap, cos_threshold, queue_size, gamma_proj)
        of_group: dict[str, Any] = dict(zip(self.of_group, values, strict=True))
        super().__init__(params, lr, betas, eps, weight_decay, block_size=block_size, optim_bits=optim_bits, **of_group)

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        super()._check_group(group, name)
        for each in ("update_proj_gap", "queue_size", "gamma_proj", "rank"):
            if group[each] is not None and not group[each] >= 1:
                raise ValueError(f"{name}: {each} is at least 1, got {group[each]}")

    def _update(self, parameter: Tensor, index: int, group: dict[str, Any], lr: float) -> None:
        rank = group["rank"]
        if rank is None or parameter.dim() != 2 or rank >= min(parameter.shape):
            super()._update(parameter, index, group, lr)
            return
        assert parameter.grad is not None
        state = self.state[parameter]
        number = count_step(state)
        wide = parameter.shape[0] < parameter.shape[1] and not tracing.is_sharded(parameter)
        grad = local_of(parameter.grad).float()
        grad = grad.T if wide else grad
        basis = self._directions(parameter, grad, state, group, number)
        reduced = grad @ basis.T
        direction = torch.zeros_like(reduced)
        whole = like(parameter, direction, (parameter.shape[0], direction.shape[1]))
        add_moments(state, whole, group, ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        if reduced.numel():
            blocks = flat_blocks(whole.shape, reduced, group["block_size"])
            corrections = 1 / (1 - beta1**number), (1 - beta2**number) ** -0.5
            step = AdamStep(form_of(whole, group), beta1, beta2, group["eps"], 1.0, 0.0, *corrections)
            moments = [as_moment(state[name]) for name in ("exp_avg", "exp_avg_sq")]
            adam_step(direction, reduced.contiguous(), moments, blocks, step)
        update = direction @ basis
        with Writable(local_of(parameter)) as weight:
            change = (update.T if wide else update) * (lr * group["scale"])
            weight.copy_(weight.float() * (1 - lr * group["weight_decay"]) + change)
        torch.autograd.graph.increment_version(parameter)

    def _directions(
        self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
    ) -> Tensor:
        """The basis (rank, n) of this step, orthonormal; the moments turn where it is a new one."""
        old = orthonormal(state["projector"]) if "projector" in state else None
        if old is not None and number < int(state["next_update"]):
            return old
        products = grad.T @ grad  # of shards along the first axis these add up
        if tracing.is_sharded(parameter):
            torch.distributed.all_reduce(products, group=parameter.device_mesh.get_group())  # type: ignore[attr-defined]
        state["projector"] = stored(top_directions(products, group["rank"]))
        new = orthonormal(state["projector"])
        if old is None:
            state["gap"] = _number(group["update_proj_gap"])
            state["similarity"] = torch.zeros(0, dtype=torch.float32, device="cpu")
        else:
            self._compare(old, new, state, group)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _turned(state[name], name != "exp_avg", old, new)
        state["next_update"] = _number(number + int(state["gap"]))
        return new

    def _compare(self, old: Tensor, new: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Make the gap longer where the first direction, whose sign means nothing, has hardly turned for a while."""
        cosine = (old[0] @ new[0]).abs().cpu().reshape(1)
        state["similarity"] = torch.cat([state["similarity"], cosine])[-group["queue_size"] :]
        if len(state["similarity"]) == group["queue_size"] and state["similarity"].mean() >= group["cos_threshold"]:
            state["gap"] = _number(int(state["gap"] * group["gamma_proj"]))
            state["similarity"] = torch.zeros(0, dtype=torch.float32, device="cpu")

    def _read(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        if "projector" not in state:
            return super()._read(parameter, group, state)
        device = local_of(parameter).device
        on_device = ("projector", "exp_avg", "exp_avg_sq")
        return {name: value.to(device if name in on_device else "cpu") for name, value in state.items()}


def _number(value: float) -> Tensor:
    """In fp32 on the CPU, as torch's optimizers hold their steps."""
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")


def _turned(moment: Tensor, squares: bool, old: Tensor, new: Tensor) -> Tensor:
    """A moment in the new directions, in the form that it has."""
    local = local_of(moment)
    values = local.dequantize(torch.float32) if isinstance(local, BlockedTensor) else local
    local.copy_(rotated(values, squares, old, new))
    return moment
