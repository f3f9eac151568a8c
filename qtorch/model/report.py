"""QuantizeReport: what `quantize_` did to each layer, or why it did nothing; and its rows, made from targets."""

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from ..dtypes import MatrixWeight, QuantizedTensor, TransposedWeight
from ..kernels.ops.quantize import error_norms
from ..kernels.registry import choose
from ..primitives import compute_error, slices
from ..primitives.sqnr import sqnr
from . import explain, install
from .targets import Target


@dataclass(frozen=True)
class CalibrationReport:
    """How a weight was calibrated.

    The errors are |X (W - Q)^T|^2 / |X W^T|^2 on the calibration inputs X.

    Attributes:
        method: the algorithm that chose the codes, or why it was not used.
        tokens: number of input rows seen; of experts, the smallest.
        error: of the quantized weight; None if it was not measured.
        nearest_error: of rounding to nearest; None if it was not measured.
        damping: the largest that was used.
        seconds: time for the weight, without running the model.
        input_range: (low, high) that the codes of a static activation represent, if data chose it.
        inputs: numbers in a row of inputs; 0 if no error was measured.
    """

    method: str
    tokens: int
    error: float | None
    nearest_error: float | None
    damping: float
    seconds: float
    input_range: tuple[float, float] | None = None
    inputs: int = 0

    @property
    def is_short(self) -> bool:
        """Whether the weight was rounded on fewer tokens than it has inputs."""
        return self.error is not None and self.tokens < self.inputs


@dataclass(frozen=True)
class TransformReport:
    """What a transform did in one place of the model.

    The errors are |X W^T - Q(X) Q(W)^T|^2 / |X W^T|^2 with weights rounded to nearest, the mean over the layers there.

    Attributes:
        transform: its name.
        name: of the parameter whose channels were to be changed; empty for the whole model.
        action: ``"scaled"``, ``"rotated"``, ``"clipped"``, ``"unchanged"``, ``"not done"`` or ``"reverted"``, after
            the outputs of the model turned out to change.
        detail: how it was changed, or why not.
        consumers: the parameters that make up for it.
        error_before, error_after: None where no error was computed.
    """

    transform: str
    name: str
    action: str
    detail: str
    consumers: tuple[str, ...] = ()
    error_before: float | None = None
    error_after: float | None = None


@dataclass(frozen=True)
class CalibrationEstimate:
    """What a calibration in the order of the model will take, beside the model and its new weights.

    Attributes:
        batches, blocks: of the data and the model; without blocks the whole model runs for each group of weights.
        statistics_bytes: the largest statistics at a time: (K, K) fp32 for each distinct input, twice with the target.
        work_bytes: what rounding the largest weight takes.
        stream_bytes: inputs and outputs of a block on all batches; on disk with ``resume=``.
        seconds: on this machine as it is now, from one weight; right within a factor of about two.
    """

    batches: int
    blocks: int
    statistics_bytes: int
    work_bytes: int
    stream_bytes: int
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """All of these together. What one forward of a block takes in between is not counted."""
        return self.statistics_bytes + self.work_bytes + self.stream_bytes

    def __str__(self) -> str:
        return (
            f"calibration on {self.batches} batches in {self.blocks} blocks: about {self.peak_bytes:,} bytes beside "
            f"the model ({self.statistics_bytes:,} statistics, {self.work_bytes:,} rounding, {self.stream_bytes:,} "
            f"inputs and outputs of blocks), about {self.seconds:.0f} s"
        )


@dataclass(frozen=True)
class LayerReport:
    """The report on one weight.

    Attributes:
        name: fully-qualified name of the parameter; `also` has the other names of a tied one.
        shape: logical shape.
        action: ``"quantized"`` or ``"skipped"``.
        detail: the recipe, or why it was skipped.
        bytes_before, bytes_after: size of the weight, scales included.
        sqnr: SQNR of the quantized weight against the float one, in dB; None if skipped, or without values (meta).
        kernel: name of the kernel that will run; None if skipped, or on the meta device.
        calibration: for recipes that quantize with data in the order of the model.
    """

    name: str
    shape: tuple[int, ...]
    action: str
    detail: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None
    kernel: str | None = None
    also: tuple[str, ...] = ()
    calibration: CalibrationReport | None = None


def warn_of_few_tokens(function: str, layers: Sequence[LayerReport], stacklevel: int = 4) -> None:
    """Say which weights were rounded on fewer tokens than they have inputs, to the caller of a public function."""
    short = [(of.tokens / of.inputs, layer) for layer in layers if (of := layer.calibration) and of.is_short]
    if short:
        _, worst = min(short, key=lambda pair: pair[0])
        assert worst.calibration is not None
        warnings.warn(
            f"{function}: {len(short)} of {sum(layer.calibration is not None for layer in layers)} weights were "
            f"calibrated on fewer tokens than they have inputs ({worst.name}: {worst.calibration.tokens} for "
            f"{worst.calibration.inputs}), which gains little over rounding to nearest; give more batches, or for "
            "experts all_experts=True",
            stacklevel=stacklevel,
        )


QUANTIZED_BEFORE = "is quantized already"
"""Reason for skipping a weight that was quantized before."""


@dataclass(frozen=True)
class QuantizeReport:
    """Result of `quantize_`, printed as a summary of the model and a table; `to_json()` exports it.

    Attributes:
        layers: reports on all weights of two or more dimensions.
        parameters: number of elements of all parameters of the model.
        quantized_before: number of elements of weights that were quantized before the call and not changed by it.
        model_bytes_before, model_bytes_after: size of all parameters and buffers of the model.
        transforms: what was changed in the float weights before they were quantized.
        estimate: of a dry run with recipes that calibrate in the order of the model; then bytes and SQNRs are those of
            rounding to nearest.
        advice: what could make the kernels that will run faster on this machine.
    """

    layers: tuple[LayerReport, ...]
    dry_run: bool = False
    parameters: int = 0
    quantized_before: int = 0
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    transforms: tuple[TransformReport, ...] = ()
    estimate: CalibrationEstimate | None = None
    advice: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        near = "" if name.startswith("__") else "; the model is changed in place: use the model itself"
        raise AttributeError(f"the report that quantize_ returns has no attribute {name!r}{near}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `TypeError`: whoever calls the report means the model."""
        raise TypeError("quantize_ returns a report, and changes the model in place: call the model itself")

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.action == "quantized")

    @property
    def skipped(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.action == "skipped")

    @property
    def bytes_before(self) -> int:
        """Size of the quantized weights before the call."""
        return sum(layer.bytes_before for layer in self.quantized)

    @property
    def bytes_after(self) -> int:
        """Size of the quantized weights after the call."""
        return sum(layer.bytes_after for layer in self.quantized)

    @property
    def quantized_parameters(self) -> int:
        """Number of elements of the model's parameters that are quantized now."""
        return self.quantized_before + sum(math.prod(layer.shape) for layer in self.quantized)

    def to_json(self) -> dict[str, Any]:
        """JSON data: the fields of all layers, and the totals.

        An SQNR that is not finite (of an exact or all-zero weight) is None, since JSON has no such numbers.
        """
        more = {} if self.estimate is None else {"estimate": asdict(self.estimate)}
        sizes = ("bytes_before", "bytes_after", "model_bytes_before", "model_bytes_after")
        totals = {name: getattr(self, name) for name in ("dry_run", *sizes, "parameters", "quantized_parameters")}
        return {
            **more,
            **totals,
            "layers": [_json_of(layer) for layer in self.layers],
            "transforms": [{**asdict(item), "consumers": list(item.consumers)} for item in self.transforms],
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        rows = [_row(layer) for layer in self.layers]
        table = format_table(("weight", "shape", "what", "bytes before", "after", "SQNR dB", "kernel"), rows)
        estimate = "" if self.estimate is None else f"\n{self.estimate}"
        advice = "".join(f"\n{line}" for line in self.advice)
        totals = f"these {len(self.quantized)} weights: {_change(self.bytes_before, self.bytes_after)}"
        return f"{self._summary()}{estimate}\n\n{table}\n{totals}{self._transformed()}{advice}"

    def __repr__(self) -> str:
        return f"<QuantizeReport: {self._summary()}>"

    def _summary(self) -> str:
        share = f", {self.quantized_parameters / self.parameters:.1%} of all parameters" if self.parameters else ""
        before = sum(layer.detail == QUANTIZED_BEFORE for layer in self.skipped)
        share += f", {before} already quantized" if before else ""
        left = f"; left in floating point: {', '.join(found)}" if (found := self._largest_left()) else ""
        return (
            f"{'would quantize' if self.dry_run else 'quantized'} {len(self.quantized)} of {len(self.layers)} weights"
            f"{share}; the model: {_change(self.model_bytes_before, self.model_bytes_after)}{left}"
        )

    def _transformed(self) -> str:
        if not self.transforms:
            return ""
        rows = []
        for item in self.transforms:
            errors = ["" if each is None else f"{each:.3g}" for each in (item.error_before, item.error_after)]
            rows.append((item.transform, item.name, f"{item.action}: {item.detail}", *errors))
        return "\n\n" + format_table(("transform", "of", "what", "error before", "after"), rows)

    def _largest_left(self) -> list[str]:
        """The largest weights left in floating point, and why; weights of the same name in all blocks count as one."""
        sizes: dict[tuple[str, str], int] = {}
        for layer in self.skipped:
            if layer.detail != QUANTIZED_BEFORE:
                key = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name), layer.detail
                sizes[key] = sizes.get(key, 0) + math.prod(layer.shape)
        large = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        return [
            f"{name} ({size / self.parameters:.1%}: {reason})"
            for (name, reason), size in large
            if self.parameters and size >= self.parameters / 100
        ]


def _change(before: int, after: int) -> str:
    share = f" ({after / before:.1%})" if before else ""
    return f"{before:,} -> {after:,} bytes{share}"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A text table with columns padded to their widest cell and a line under the header."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def _json_of(layer: LayerReport) -> dict[str, Any]:
    finite = layer.sqnr if layer.sqnr is not None and math.isfinite(layer.sqnr) else None
    return {**asdict(layer), "shape": list(layer.shape), "also": list(layer.also), "sqnr": finite}


def _row(layer: LayerReport) -> tuple[str, ...]:
    quantized = layer.action == "quantized"
    return (
        " = ".join((layer.name, *layer.also)),
        "x".join(map(str, layer.shape)),
        layer.detail if quantized else f"skipped: {layer.detail}",
        f"{layer.bytes_before:,}",
        f"{layer.bytes_after:,}" if quantized else "",
        f"{layer.sqnr:.1f}" if layer.sqnr is not None else "",
        layer.kernel or "",
    )


def quantization_error(weight: Tensor, quantized: Any) -> float:
    """`compute_error` of ``quantized.dequantize()``, which is computed a slice of rows at a time if it is large."""
    if isinstance(quantized, TransposedWeight) and not quantized.scheme.padding:
        weight, quantized = weight.mT, quantized.matrix
    if isinstance(weight, QuantizedTensor) and not weight.trains:
        weight = weight.dequantize()
    plain = isinstance(quantized, QuantizedTensor) and not quantized.trains and not isinstance(quantized, MatrixWeight)
    if not plain or not slices.is_plain_on_cpu(weight) or not weight.numel():
        return float(compute_error(weight, quantized.dequantize()))
    return float(sqnr(error_norms(weight.detach(), quantized)))


def quantized_row(target: Target[Any], weight: Tensor, quantized: Any) -> LayerReport:
    """The report on `weight`, of which `quantized` was made."""
    slot = target.slot
    kernel = None
    has_kernel = isinstance(quantized, QuantizedTensor) and quantized.scheme.spec is not None
    if has_kernel and not weight.is_meta:
        kernel = choose(explain.problem_of(quantized, slot.module, weight.dtype, weight.device.type)).name
    error = None if weight.is_meta else quantization_error(weight, quantized)
    also = tuple(other.name for other in target.slots if other is not slot)
    sizes = weight.nbytes, quantized.nbytes
    return LayerReport(slot.name, tuple(weight.shape), "quantized", f"{target.recipe}", *sizes, error, kernel, also)


def skipped_row(target: Target[Any]) -> LayerReport:
    """The report on a weight that is left alone."""
    slot, parameter = target.slot, target.parameter
    shape, size = ((), 0) if nn.parameter.is_lazy(parameter) else (tuple(parameter.shape), parameter.nbytes)
    also = tuple(other.name for other in target.slots if other is not slot)
    done = isinstance(parameter, QuantizedTensor) or isinstance(slot.module, install.PreparedModule)
    return LayerReport(slot.name, shape, "skipped", QUANTIZED_BEFORE if done else slot.reason, size, size, also=also)


def why_nothing(targets: list[Target[Any]]) -> str:
    """Why none of these weights is quantized."""
    slots = [target.slot for target in targets]
    if not slots:
        return "the model has no weight of two or more dimensions"
    return "; ".join(f"{slot.name}: {slot.reason}" for slot in slots[:4]) + ("; ..." if len(slots) > 4 else "")
