"""What a model's outputs say: losses whose gradients measure how sensitive the outputs are, and divergences.

Outputs with logits are distributions: the loss is the cross entropy of labels sampled from them, and the divergence the
Kullback-Leibler one. For other outputs y the loss is sum(r * y) with random signs r, whose gradients' second moment is
that of |dy|^2 / 2, and the divergence is 1 - cosine of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Loss = Callable[[Any, Any], Tensor]
"""(output of the model, batch) -> the sum of the losses of independent samples, a scalar."""


class Rows(NamedTuple):
    """Outputs (M, C) of the tokens that count, and whether they are logits."""

    values: Tensor
    are_logits: bool

    @classmethod
    def of(cls, output: Any, mask: Tensor | None, logits: bool = False) -> Rows:
        """The rows of a model's output.

        Args:
            output: a tensor, or what holds one: `logits` if there are any, else its first tensor in floating point.
            mask: of the tokens that count, if it has the first axes of the output.
            logits: take them for logits, whatever they are called.

        Raises:
            TypeError: there is no tensor in floating point.
        """
        values, named = _logits_of(output), True
        if values is None:
            values, named = _first_tensor(output), False
        if values is None:
            raise TypeError(
                f"allocate: takes a model whose output holds a tensor in floating point, this one gave a "
                f"{type(output).__name__}; give forward=, which returns one"
            )
        if values.dim() == 0:
            values = values.reshape(1, 1)
        if mask is not None and mask.shape == values.shape[:-1]:
            values = values[mask.to(values.device)]
        return cls(values.reshape(-1, values.shape[-1]), named or logits)

    def sampled_loss(self, generator: torch.Generator) -> Tensor:
        """The sum over all rows of the loss of a random sample."""
        values = self.values.float()
        if not self.are_logits:
            signs = torch.randint(0, 2, values.shape, generator=generator, device="cpu").to(values) * 2 - 1
            return (signs * values).sum()
        with torch.no_grad():
            cumulated = values.softmax(-1).cumsum(-1)
            uniform = torch.rand(len(values), 1, generator=generator, dtype=torch.float32, device="cpu").to(values)
            labels = (cumulated < uniform * cumulated[:, -1:]).sum(-1).clamp(max=values.shape[-1] - 1)
        return functional.cross_entropy(values, labels, reduction="sum")

    def divergence(self, other: Rows) -> Tensor:
        """KL(self, other), or 1 - cosine, of each row, (M,)."""
        mine, others = self.values.float(), other.values.float().to(self.values.device)
        if not self.are_logits:
            return 1 - functional.cosine_similarity(mine, others, dim=-1)
        log_p, log_q = mine.log_softmax(-1), others.log_softmax(-1)
        return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def _logits_of(output: Any) -> Tensor | None:
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts: Sequence[Any] = ()
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, tuple | list):
        parts = output
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
