"""Transform: a change of the float weights of a model that leaves its outputs, and makes it easier to quantize.

What transforms share is a `Work`: the model, its graph, its parameters, the data, and the recipes of its weights.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...model.report import TransformReport
from ...primitives.jsonable import call_of
from ...recipes.base import WeightRecipe
from ..data import Data, eval_mode, tensors_of
from .folds import Fold, Parameters, Refusal, find_folds
from .propagation import ExportFailed, ModelGraph

T = TypeVar("T")

HALVES = (torch.bfloat16, torch.float16)

TOLERANCE = 1e-4
"""Largest relative difference of outputs in fp32 and fp64."""


class _InFloat32(torch.overrides.TorchFunctionMode):
    """Operations on 16-bit floats run in fp32, and so do those that would make such tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return _widened(func(*args))
        return tree_map(_widened, func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {})))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():
            return value.float() if value.dtype in HALVES else value
    return torch.float32 if value in HALVES and isinstance(value, torch.dtype) else value


@torch.no_grad()
def outputs(model: nn.Module, data: Data, batch: Any) -> list[Tensor]:
    """All floating-point outputs of a model for a batch, computed in fp32 whatever its dtype (fp64 in fp64)."""
    with eval_mode(model), _InFloat32():
        return tensors_of(data.call(model, batch))


def difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest |a - b| / |a| over the outputs, in Euclidean norms; infinite where only one of both is finite."""
    largest = 0.0
    for a, b in zip(before, after, strict=True):
        finite = a.isfinite()
        if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
            return float("inf")
        a, b = a[finite].double(), b[finite].double()
        largest = max(largest, float((a - b).norm() / a.norm().clamp(min=torch.finfo(torch.float32).tiny)))
    return largest


def find_wrong(items: Sequence[T], differs: Callable[[Sequence[T]], bool]) -> list[T]:
    """The items of which `differs` is true, by bisection; all of them if they are wrong only together."""
    if not items or not differs(items):
        return []
    if len(items) == 1:
        return list(items)
    half = len(items) // 2
    return [*find_wrong(items[:half], differs), *find_wrong(items[half:], differs)] or list(items)


CHUNK_BYTES = 1 << 30
"""Size of the parameters in fp32 that are replaced at a time to verify folds."""


class Work:
    """The model that transforms change, by replacing its parameters, and the recipes of its parameters by name."""

    def __init__(self, model: nn.Module, data: Data, recipes: Mapping[str, WeightRecipe]) -> None:
        self.model, self.data, self.recipes = model, data, recipes
        self.batches: list[Any] = data.checked()
        self.parameters = Parameters(model)

    @cached_property
    def graph(self) -> ModelGraph:
        """Raises `ExportFailed`."""
        return ModelGraph(self.model, self.data, self.batches[0])

    @cached_property
    def reference(self) -> list[Tensor]:
        """The outputs of the model for the first batch, before any transform."""
        found = outputs(self.model, self.data, self.batches[0])
        if not found:
            raise ValueError("the model returns no tensor in floating point, which transforms of weights have to keep")
        return found

    def difference(self) -> float:
        """How far the outputs are from those of the model before any transform."""
        return difference(self.reference, outputs(self.model, self.data, self.batches[0]))

    @cached_property
    def all_folds(self) -> tuple[list[Fold], list[Refusal]]:
        """All folds of the model, not tried, and the places that cannot be scaled."""
        return find_folds(self.graph)

    @cached_property
    def folds(self) -> tuple[list[Fold], list[Fold]]:
        """The folds of weights that will be quantized, which leave the outputs as they are, and those that do not. They
        are tried with random powers of two as scales, which round nothing."""
        folds = [fold for fold in self.all_folds[0] if not fold.consumers.keys().isdisjoint(self.recipes)]
        chunks: list[list[Fold]] = [[]]
        size = 0
        for fold in folds:
            size += sum(4 * self.parameters[name].numel() for name in fold.labels)
            if size > CHUNK_BYTES and chunks[-1]:
                chunks.append([])
                size = 0
            chunks[-1].append(fold)
        wrong = [fold for chunk in chunks for fold in find_wrong(chunk, self._differ)]
        return [fold for fold in folds if fold not in wrong], wrong

    def _differ(self, folds: Sequence[Fold]) -> bool:
        """Whether random scales in these folds change the outputs."""
        _ = self.reference  # before they do
        with ExitStack() as stack:
            for fold in folds:
                scales = probe(fold.scales)
                stack.enter_context(self.parameters.replaced(fold.values(self.parameters, scales)))
            return not self.difference() <= TOLERANCE

    def tolerance(self, names: Sequence[str]) -> float:
        """The difference that rounding new values of these parameters to their dtype may make."""
        eps = max((torch.finfo(self.parameters[name].dtype).eps for name in names), default=0.0)
        return max(TOLERANCE, 8 * eps)


def probe(count: int) -> Tensor:
    """(count,) random scales that make any wrong fold visible: 1/4, 1/2, 2 or 4."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=torch.float64, device="cpu")
    return exponents[torch.randint(4, (count,), generator=generator, device="cpu")].exp2()


class Transform:
    """Base class; a frozen, JSON-able dataclass.

    Attributes:
        name: in reports.
    """

    name: ClassVar[str]

    __repr__ = call_of

    def apply(self, work: Work) -> list[TransformReport]:
        """Replace parameters of the model.

        Raises:
            ExportFailed: the model cannot be exported.
        """
        raise NotImplementedError


def run_transforms(
    transforms: Sequence[Transform], model: nn.Module, data: Data, recipes: Mapping[str, WeightRecipe],
    strict: bool = False,
) -> tuple[TransformReport, ...]:  # fmt: skip
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
