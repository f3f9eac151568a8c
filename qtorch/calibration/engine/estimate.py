"""Estimate: how much memory and time a calibration in the order of the model will take, before it starts.

It runs the model on the first batch, and calibrates one weight of the first block that has any on it. Memory is counted
from shapes; time is what that weight took, scaled by the operations of the others:

    rounding        4 N K^2 + 2 K^3 for each matrix (N, K): a column at a time, and three factorizations of (K, K)
    statistics      K^2 for each distinct input and batch, in which the part of the block before it runs too
    the model       once on every batch, for the outputs of its blocks
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ...model.report import CalibrationEstimate
from ...model.targets import Target
from ..data import Data
from ..statistics import SecondMoment
from . import float_weights, trace
from .in_order import InOrder
from .streams import Stream, needed_outputs

_WORK = 2
"""Matrices (K, K) that a refinement holds beside the moment: damped, and that permuted. GPTQ holds one, its factor."""

_COPIES = 5
"""Matrices (N, K) in fp32: the target, the weight as rows, its values, codes, errors."""


def estimate(
    model: nn.Module, targets: Sequence[Target[Any]], data: Data, weights: float_weights.Weights | None = None
) -> CalibrationEstimate:
    """The estimate for `InOrder` with these arguments and the recipes of the targets; the model is not changed."""
    with InOrder[Any](model, targets, data, weights=weights) as run:
        begun = time.perf_counter()
        run.forward(0)
        of_forward = time.perf_counter() - begun
        units = run.units()
        blocks = [unit.block for unit in units if unit.block is not None]
        keep = needed_outputs(model, run.forward, blocks)
        output = _output_bytes(run, blocks)
        of_rounding, of_statistics = _sample(run, units, blocks)
    parameters = [target.parameter for target in targets]
    stages = [stage for unit in units for stage in unit.stages]
    pairs = 2 if run.paired else 1
    counted = sum(_nbytes(batch) for batch in run.batches) / max(1, _nbytes(run.batches[0]))
    # The outputs of the block before, the arguments made of them, and the new outputs; then those that stay.
    streams = int(pairs * counted * output * (3 + max(0, len(keep) - 1)))
    seconds = of_forward * counted * pairs
    seconds += of_rounding * sum(_rounding(weight) for weight in parameters)
    seconds += of_statistics * counted * sum(_columns(stage.weights[0]) ** 2 for stage in stages)
    return CalibrationEstimate(
        batches=len(run.batches), blocks=len(blocks),
        statistics_bytes=max((_statistics_bytes(stage, run) for stage in stages), default=0),
        work_bytes=max((4 * (_WORK * k**2 + _COPIES * n * k) for _, n, k in map(_shape, parameters)), default=0),
        stream_bytes=streams, seconds=seconds,
    )  # fmt: skip


def _sample(run: InOrder[Any], units: Sequence[trace.Unit], blocks: Sequence[nn.Module]) -> tuple[float, float]:
    """Seconds of rounding for an operation, and of statistics for an element, of a weight of the first unit."""
    unit = next((unit for unit in units if unit.block is not None and unit.stages), units[0] if units else None)
    if unit is None:
        return 0.0, 0.0
    stage = max(unit.stages, key=lambda stage: max(map(_rounding, stage.weights)))
    weight = max(stage.weights, key=_rounding)
    run.quantized, run.of_float = (Stream(run.forward, blocks, 1, ()) for _ in range(2))
    before = blocks[: blocks.index(unit.block)] if unit.block is not None else []
    for block in before:  # blocks without weights to quantize
        for stream in (run.quantized, run.of_float):
            stream.finish(block, stream.calls(block))
    calls = None if unit.block is None else run.quantized.calls(unit.block)
    every, run.batches = run.batches, run.batches[:1]
    with run.weights.loaded(unit.block):
        begun = time.perf_counter()
        found = run.statistics(stage, unit.block, calls, calls if run.paired else None)
        of_statistics = (time.perf_counter() - begun) / _columns(weight) ** 2
        begun = time.perf_counter()
        target, recipe = run.targets[id(weight)], run.recipes[id(weight)]
        recipe.make_in_order(target, weight.detach(), run.of_matrices(found, weight))
        of_rounding = (time.perf_counter() - begun) / max(1, _rounding(weight))
    run.batches = every
    return of_rounding, of_statistics


def _shape(weight: Tensor) -> tuple[int, int, int]:
    """(matrices, rows, columns): of experts, or of a weight that is one matrix."""
    if weight.dim() == 3:
        return weight.shape[0], weight.shape[1], weight.shape[2]
    return 1, weight.shape[0], weight[0].numel()


def _rounding(weight: Tensor) -> float:
    matrices, rows, columns = _shape(weight)
    return float(matrices * (4 * rows * columns**2 + 2 * columns**3))


def _columns(weight: Tensor) -> int:
    return _shape(weight)[2]


def _statistics_bytes(stage: trace.Stage, run: InOrder[Any]) -> int:
    """The statistics of a stage: of one input if its weights share it, else of each weight and expert."""
    of_each = []
    for weight in stage.weights:
        moments = [kind for kind in run.recipes[id(weight)].statistics if issubclass(kind, SecondMoment)]
        size = sum(4 * _columns(weight) ** 2 * (2 if kind.paired else 1) for kind in moments)
        of_each.append(size * (weight.shape[0] if weight.dim() == 3 else 1))
    return max(of_each) if stage.once else sum(of_each)


def _output_bytes(run: InOrder[Any], blocks: Sequence[nn.Module]) -> int:
    """Bytes of the largest output of a block on the first batch."""
    largest = 0

    def seen(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal largest
        largest = max(largest, _nbytes(output))

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(seen))
        run.forward(0)
    return largest


def _nbytes(value: Any) -> int:
    leaves: Iterable[Any] = tree_flatten(dict(value) if hasattr(value, "keys") else value)[0]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
