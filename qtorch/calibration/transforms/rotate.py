"""rotate: rotate the residual stream of a model, and the values of its attention heads, by orthogonal matrices.

    R1: x -> x Q        for all writers W -> Q^T W and readers W -> W Q of the residual stream
    R2: v -> v Q_h      for the rows of the value layer and the columns of the output layer, head by head

Outliers of single channels are spread over all channels. The weights of norms are folded into the layers that follow
before, since a norm without weights passes a rotation.

Source: QuaRot, arXiv 2404.00456, section 4; names of SpinQuant, arXiv 2405.16406.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...model.report import TransformReport
from ...primitives.jsonable import jsonable
from .folds import Fold, computing_dtype
from .propagation import ModelGraph, Propagation, factors
from .residual import CannotRotate, ResidualStream
from .rules import MOVES_VALUES, rule_of
from .work import Transform, Work


def random_orthogonal(size: int, generator: torch.Generator) -> tuple[Tensor, str]:
    """(Q, its name): (size, size) fp64 with Q Q^T = I, a randomized Hadamard matrix or the Q of a normal matrix."""
    matrix = hadamard(size)
    if matrix is not None:
        signs = torch.randint(2, (size,), generator=generator, device="cpu").double() * 2 - 1
        return signs.unsqueeze(1) * matrix / size**0.5, "randomized Hadamard"
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu"))
    return q * r.diagonal().sign(), "random orthogonal"


def hadamard(size: int) -> Tensor | None:
    """A matrix of 1 and -1 with H H^T = size * I, fp64; None where there is no construction here.

    They are made by Sylvester's doubling from those of Paley: of size q + 1 for a prime q = 3 mod 4, of size 2 (q + 1)
    for a prime q = 1 mod 4.
    """
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    if size < 1 or (size % 4 and size != 2):
        return None
    if size != 2 and _is_prime(size - 1):
        return torch.eye(size, dtype=torch.float64, device="cpu") + _bordered(size - 1, -1)
    q = size // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        zero = torch.tensor([[1.0, -1], [-1, -1]], dtype=torch.float64, device="cpu")
        one = torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64, device="cpu")
        return torch.kron(_bordered(q, 1), one) + torch.kron(torch.eye(q + 1, dtype=torch.float64, device="cpu"), zero)
    half = hadamard(size // 2)
    return None if half is None else torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _bordered(q: int, sign: float) -> Tensor:
    """chi(a - b) for a, b modulo a prime q, with a border; chi is 1 for squares, -1 for others, 0 for 0."""
    index = torch.arange(q, device="cpu")
    chi = torch.full((q,), -1.0, dtype=torch.float64, device="cpu")
    chi[index.square() % q] = 1
    chi[0] = 0
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64, device="cpu")
    matrix[0, 1:], matrix[1:, 0] = 1, sign
    matrix[1:, 1:] = chi[(index.unsqueeze(1) - index) % q]
    return matrix


PRODUCTS = {"aten.scaled_dot_product_attention.default": 2, "aten.matmul.default": 1, "aten.bmm.default": 1}
"""Operation that multiplies values by weights of attention -> the place of the values in its arguments."""

SOURCES = ("aten.linear.default", "aten.addmm.default", "aten.matmul.default")


def heads_of(graph: ModelGraph, fold: Fold) -> list[list[int]]:
    """For each head, the scales of its channels in order; empty if the fold does not go through attention: a rotation
    of channels passes that and what moves elements alone."""
    found = Propagation(graph, rule_of, fold.name, fold.labels[fold.name]).run()
    heads: dict[tuple[int, ...], None] = {}
    for node, labels in found.at.items():
        if node.op == "placeholder" or str(node.target) in MOVES_VALUES:
            continue
        place = PRODUCTS.get(str(node.target))
        values = found.labels(node.args[place]) if place is not None else None
        if values is not None:
            for head in values.reshape(-1, values.shape[-1]).tolist():
                if any(head):
                    heads.setdefault(tuple(head))
        else:
            # The product with the parameter whose rows are scaled.
            operands = [source for source in node.all_input_nodes if source in graph.parameters]
            if not isinstance(labels, Tensor) or not operands or str(node.target) not in SOURCES:
                return []
    free = (fold.free.nonzero().flatten() + 1).tolist()
    channels = [channel for head in heads for channel in head]
    return [list(head) for head in heads] if sorted(channels) == free else []


@jsonable
@dataclass(frozen=True, repr=False)
class Rotate(Transform):
    """Rotations that are folded into the weights: no operation is added to the model.

    A model takes the rotation of its residual stream if it normalizes by the mean square before each layer, and its
    head is not tied to its embedding; others are reported. Sizes without a Hadamard matrix get a random orthogonal one.

    Args:
        residual: rotate the residual stream (R1).
        values: rotate the values of attention heads (R2).
        seed: of the random signs and matrices.

    Raises:
        ValueError: nothing is to be rotated.
    """

    residual: bool = True
    values: bool = True
    seed: int = 0
    name: ClassVar[str] = "rotate"

    def __post_init__(self) -> None:
        if not (self.residual or self.values):
            raise ValueError("rotate: one of residual and values has to be True")

    def apply(self, work: Work) -> list[TransformReport]:
        generator = torch.Generator().manual_seed(self.seed)
        reports = []
        if self.residual:
            reports.append(self._residual(work, generator))
        if self.values:
            reports += [self._heads(work, fold, generator) for fold in work.all_folds[0] if heads_of(work.graph, fold)]
        return reports

    def _residual(self, work: Work, generator: torch.Generator) -> TransformReport:
        what = "residual stream"
        try:
            stream = ResidualStream(work.graph)
            folds = _norms(work, stream)
        except CannotRotate as error:
            return TransformReport(self.name, what, "not done", str(error))
        q, kind = random_orthogonal(stream.size, generator)
        before = {name: work.parameters[name] for name in {*stream.axes, *(n for fold in folds for n in fold.labels)}}
        for fold in folds:
            work.parameters.replace(_without_weight(work, fold))
        for name, axes in stream.axes.items():
            value = work.parameters[name].detach()
            work.parameters.replace({name: _turned(value, dict.fromkeys(axes, q))})
        return self._checked(work, before, what, f"{stream.size} channels: {kind}", tuple(stream.axes))

    def _heads(self, work: Work, fold: Fold, generator: torch.Generator) -> TransformReport:
        heads = heads_of(work.graph, fold)
        q, kind = random_orthogonal(len(heads[0]), generator)
        before = {name: work.parameters[name] for name in fold.labels}
        for name, labels in fold.labels.items():
            work.parameters.replace({name: _turned_heads(work.parameters[name].detach(), labels, heads, q)})
        detail = f"{len(heads)} heads of {len(heads[0])} channels: {kind}"
        return self._checked(work, before, fold.name, detail, tuple(fold.consumers))

    def _checked(
        self, work: Work, before: Mapping[str, Any], name: str, detail: str, consumers: tuple[str, ...]
    ) -> TransformReport:
        difference = work.difference()
        if difference <= work.tolerance(list(before)):
            return TransformReport(self.name, name, "rotated", detail, consumers)
        work.parameters.put(before)
        why = f"the outputs of the model change by {difference:.2g}"
        return TransformReport(self.name, name, "reverted", why, consumers)


def _norms(work: Work, stream: ResidualStream) -> list[Fold]:
    """The folds of the weights of the norms of a residual stream."""
    by_name = {fold.name: fold for fold in work.all_folds[0]}
    found = []
    for name in stream.norms:
        fold = by_name.get(name)
        if fold is None or not bool(fold.free.all()) or len(fold.labels) != 1 + len(fold.consumers):
            reason = next((item.reason for item in work.all_folds[1] if item.name == name), "not all channels are free")
            raise CannotRotate(f"the weight of the norm {name} cannot be folded into the layers after it: {reason}")
        found.append(fold)
    return found


def _without_weight(work: Work, fold: Fold) -> dict[str, Tensor]:
    """The norm with a weight of 1, and what follows times the old weight; it may have zeros."""
    old = work.parameters[fold.name].detach()
    shift = fold.shifts.get(fold.name, 0.0)
    weight = old.to(computing_dtype(old.dtype)) + shift
    made = {fold.name: torch.full_like(weight, 1 - shift)}
    for name, labels in fold.consumers.items():
        value = work.parameters[name].detach()
        made[name] = value.to(computing_dtype(value.dtype)) * factors(labels.abs(), weight.cpu()).to(value.device)
    return made


def _turned(value: Tensor, by: Mapping[int, Tensor]) -> Tensor:
    """A parameter times Q along some axes, computed in fp64."""
    result = value.double()
    for axis, q in by.items():
        result = (result.movedim(axis, -1) @ q.to(result.device)).movedim(-1, axis)
    return result.contiguous()


def _turned_heads(value: Tensor, labels: Tensor, heads: list[list[int]], q: Tensor) -> Tensor:
    """A parameter whose channels, given by their labels, are rotated head by head, wherever a head is repeated."""
    (axis,) = [index for index, size in enumerate(labels.shape) if size > 1]
    flat = labels.abs().flatten()
    result = value.double().movedim(axis, -1).clone()
    for head in heads:
        places = torch.stack([(flat == channel).nonzero().flatten() for channel in head])  # (channels, repeats)
        for where in places.t().to(value.device):
            result[..., where] = result[..., where] @ q.to(value.device)
    return result.movedim(-1, axis).contiguous()
