"""awq: scale up the weights of input channels that are large on average, so that rounding hurts them less (AWQ).

    s_k = E|x_k|^r    or    s_k = E|x_k|^r / w_k^(1 - r),    x_k / s_k,    w_k s_k

with w_k the mean of |w| relative to the largest of its group. The division is folded into what makes the input: a norm,
or the layer before. r, and which of both forms, are searched for each fold.

Source: AWQ, arXiv 2306.00978, section 3.2; the second form ("duo scaling") is that of its reference implementation's
successors. There r = 0 is not the identity, which is tried in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ...primitives.jsonable import jsonable
from ...report import TransformReport
from .base import Transform
from .inputs import TOKENS
from .search import Candidate, Group, search_scales
from .work import Work


@jsonable
@dataclass(frozen=True, repr=False)
class Awq(Transform):
    """AWQ's scales, searched for each place on the error of the layers; see `Clip` for the ranges of the weights.

    Args:
        ratios: number of exponents r to try, evenly spaced in [0, 1).
        tokens: number of input rows that the search computes with.

    Raises:
        ValueError: `ratios` is not positive.
    """

    ratios: int = 20
    tokens: int = TOKENS
    name: ClassVar[str] = "awq"

    def __post_init__(self) -> None:
        if self.ratios < 1:
            raise ValueError(f"awq: ratios is a positive number, got {self.ratios}")

    def apply(self, work: Work) -> list[TransformReport]:
        return search_scales(work, self.name, self._candidates, self.tokens)

    def _candidates(self, group: Group) -> Iterator[Candidate]:
        x = group.of_scales(lambda consumer: consumer.inputs.mean, "mean").clamp(min=1e-4)
        w = group.of_scales(lambda consumer: consumer.relative_magnitude(), "mean").clamp(min=1e-4)
        for step in range(self.ratios):
            r = step / self.ratios
            if step:  # r = 0 is the identity here
                yield Candidate(f"r {r:g}", group.normalized(1 / x**r))
            yield Candidate(f"r {r:g}, with weights", group.normalized(w ** (1 - r) / x**r))


awq = Awq
