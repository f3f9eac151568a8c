"""Transform: a change of the float weights of a model that leaves its outputs, and makes it easier to quantize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import ClassVar

from torch import nn

from ...model.report import TransformReport
from ...recipes.base import WeightRecipe
from ..data import Data
from .propagation import ExportFailed
from .work import Work


class Transform:
    """Base class; a frozen, JSON-able dataclass.

    Attributes:
        name: in reports.
    """

    name: ClassVar[str]

    def __repr__(self) -> str:
        """The call that makes it, without default arguments."""
        shown = [f.name for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{self.name}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def apply(self, work: Work) -> list[TransformReport]:
        """Replace parameters of the model.

        Raises:
            ExportFailed: the model cannot be exported.
        """
        raise NotImplementedError


def run_transforms(
    transforms: Sequence[Transform],
    model: nn.Module,
    data: Data,
    recipes: Mapping[str, WeightRecipe],
    strict: bool = False,
) -> tuple[TransformReport, ...]:
    """Apply transforms one after the other; parameters of the model are replaced. If `strict`, a model that cannot be
    exported and a change of weights that turned out to be wrong are errors."""
    work = Work(model, data, recipes)
    reports: list[TransformReport] = []
    for transform in transforms:
        try:
            reports += transform.apply(work)
        except ExportFailed as error:
            if strict:
                raise ValueError(f"{transform.name}: torch.export does not take the model: {error}") from error
            detail = f"torch.export does not take the model: {error}"
            reports.append(TransformReport(transform.name, "", "not done", detail))
    if strict and (failed := [report for report in reports if report.action == "reverted"]):
        raise ValueError(f"{failed[0].transform}: {failed[0].name}: {failed[0].detail}; the model is unchanged")
    return tuple(reports)
