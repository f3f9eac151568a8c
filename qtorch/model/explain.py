"""explain: which kernel runs for a quantized weight, and why the others do not."""

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..dtypes import ConvWeight, LowRankWeight, PaddedWeight, QuantizedTensor, conv, embedding
from ..kernels.registry import Problem, advice, candidates, choose
from ..primitives.tracing import plain_name
from .install import check_model


@dataclass(frozen=True)
class Explanation:
    """The kernel that runs for one weight.

    Attributes:
        name: name of the weight within the module; empty for a bare weight.
        problem: the problem for which a kernel was looked up.
        kernel: name of the kernel that runs.
        note: remarks on the kernel.
        rejected: (kernel, reason) for every other kernel.
    """

    name: str
    problem: Problem
    kernel: str
    note: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *advice({self.kernel})])

    def lines(self) -> list[str]:
        """What is printed, without advice."""
        op, scheme, dtype, device = self.problem
        where = f"{self.name}: " if self.name else ""
        lines = [
            f"{where}{op}, {str(dtype).removeprefix('torch.')} input on {device}, {scheme.spec}, {scheme.layout}",
            f"  runs {self.kernel}" + (f" ({self.note})" if self.note else ""),
        ]
        return lines + [f"  not {name}: {reason}" for name, reason in self.rejected]


class Explanations(tuple[Explanation, ...]):
    """The explanations of all quantized weights of a module, printed one after the other."""

    def __str__(self) -> str:
        lines = [line for explanation in self for line in explanation.lines()]
        return "\n".join([*lines, *advice({explanation.kernel for explanation in self})])


@overload
def explain(module_or_weight: Tensor, x: Tensor | None = None) -> Explanation: ...


@overload
def explain(module_or_weight: nn.Module, x: Tensor | None = None) -> Explanations: ...


def explain(module_or_weight: nn.Module | Tensor, x: Tensor | None = None) -> Explanation | Explanations:
    """Explain which kernel runs for a quantized weight, and why the others do not.

    Args:
        module_or_weight: a quantized weight, a layer that holds one, or a whole model.
        x: an example input, for its dtype and device; by default the weight's own.

    Returns:
        An `Explanation` for a weight, `Explanations` for a module; print it.

    Raises:
        TypeError: the argument is neither a module nor a tensor.
        ValueError: no weight of it is quantized.
    """
    if isinstance(module_or_weight, Tensor):
        if not isinstance(module_or_weight, QuantizedTensor):
            kind = type(module_or_weight).__name__
            raise ValueError(f"explain: the weight is a plain {kind}, not a quantized tensor")
        return _explain_weight("", module_or_weight, x, None)
    check_model("explain", module_or_weight)
    found = []
    for prefix, module in module_or_weight.named_modules():
        for name, weight in module.named_parameters(plain_name(prefix), recurse=False):
            if isinstance(weight, QuantizedTensor):
                found.append(_explain_weight(name, weight, x, module))
    if not found:
        raise ValueError(f"explain: no weight of this {type(module_or_weight).__name__} is quantized")
    return Explanations(found)


def problem_of(weight: QuantizedTensor, module: nn.Module | None, dtype: torch.dtype, device: str) -> Problem:
    """The problem that is looked up for a weight of `module`."""
    if isinstance(weight, ConvWeight) or (isinstance(module, conv.CONVS) and weight.trains):
        return conv.conv_problem(weight.scheme, getattr(module, "groups", 1), dtype, device)
    matrix: Any = weight.matrix if isinstance(weight, PaddedWeight | LowRankWeight) else weight
    if len(weight.scheme.shape) == 3 and not weight.trains:
        pattern = matrix.scheme.weight.granularity.pattern(3)
        # Matrices of experts are multiplied as (E, N, K): transposed if their blocks lie along K of (E, K, N).
        experts = matrix.transpose(1, 2) if pattern[2] == 1 != pattern[1] else matrix
        return Problem("grouped_linear", experts.scheme, dtype, device)
    op = "embedding" if isinstance(module, embedding.EMBEDDINGS) else "linear"
    while len(matrix.scheme.shape) > 2:
        matrix = matrix.select(0, 0)
    return Problem(op, matrix.scheme, dtype, device)


def _explain_weight(name: str, weight: QuantizedTensor, x: Tensor | None, module: nn.Module | None) -> Explanation:
    dtype, device = weight.scheme.dtype, weight.device.type
    if x is not None:
        device = x.device.type
        dtype = x.dtype if x.is_floating_point() else dtype
    problem = problem_of(weight, module, dtype, device)
    remark = conv.WINDOWS_NOTE if isinstance(weight, ConvWeight) and problem.op == "linear" else ""
    if isinstance(weight, LowRankWeight):
        remark = f"beside a branch of rank {weight.scheme.rank} in {weight.up.dtype}"
    return explain_problem(problem, name, remark)


def explain_problem(problem: Problem, name: str = "", remark: str = "") -> Explanation:
    """The explanation for a problem, without a weight; `remark` precedes the note of the kernel."""
    kernel = choose(problem)
    rejected = [(k.name, r or "comes after it") for k, r in candidates(problem) if k is not kernel]
    note = "; ".join(filter(None, [remark, kernel.note]))
    return Explanation(name, problem, kernel.name, note, tuple(rejected))
