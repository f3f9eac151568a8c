"""smooth: move the size of input channels with outliers into the weights (SmoothQuant).

    s_k = max|x_k|^a / max|w_k|^(1 - a),    x_k / s_k,    w_k s_k

The division is folded into what makes the input: a norm, or the layer before. a is searched for each fold.

Source: SmoothQuant, arXiv 2211.10438, equation 4.
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
class Smooth(Transform):
    """SmoothQuant with a strength searched for each place on the error of the layers; the identity is tried, too.

    Args:
        alphas: the strengths to try, in [0, 1].
        tokens: number of input rows that the search computes with.

    Raises:
        ValueError: a strength is not in [0, 1], or there is none.
    """

    alphas: tuple[float, ...] = tuple(step / 20 for step in range(2, 20))
    tokens: int = TOKENS
    name: ClassVar[str] = "smooth"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alphas", tuple(self.alphas))
        if not self.alphas or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise ValueError(f"smooth: alphas are numbers in [0, 1], got {self.alphas}")

    def apply(self, work: Work) -> list[TransformReport]:
        return search_scales(work, self.name, self._candidates, self.tokens)

    def _candidates(self, group: Group) -> Iterator[Candidate]:
        x = group.of_scales(lambda consumer: consumer.inputs.largest, "amax")
        w = group.of_scales(lambda consumer: consumer.magnitude(), "amax")
        for alpha in self.alphas:
            yield Candidate(f"alpha {alpha:g}", group.normalized(w ** (1 - alpha) / x**alpha))


smooth = Smooth
