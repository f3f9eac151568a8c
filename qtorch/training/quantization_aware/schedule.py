"""Schedules: from which step on a layer in training is quantized, and from which on its scales stay as they are."""

from typing import Any

import torch

from ...calibration.observers import Observer, moving_average, observer_of
from ...model.install import QuantizationState, check_model
from ...primitives import tracing
from ...primitives.jsonable import jsonable
from ..engine.gemm_spec import TrainingSpec

OPERANDS = tuple(f"{gemm}.{side}" for gemm in ("output", "grad_input", "grad_weight") for side in ("lhs", "rhs"))
"""The operands of the three matmuls."""

_TOKENS = {"output.lhs": 0, "grad_input.lhs": 0, "grad_weight.lhs": 1, "grad_weight.rhs": 1}
"""Operand -> its axis of tokens."""


@jsonable
class QuantizationSchedule:
    """When and how operands are quantized.

        step < start_step      floating point; ranges of static operands follow the data already
        step < freeze_step     quantized; these ranges follow the data
        step >= freeze_step    quantized, with the ranges of the last step before it

    Steps are forward passes in training mode, or those of an optimizer (`advance_with`).

    Args:
        static: operands whose scale comes from a range that is kept, of `OPERANDS`; all others are dynamic: their scale
            is that of each call.
        observer: how a range follows: one that follows in training, or its name. None is ``moving_average()`` over
            `ema_updates` batches; with 1, each batch has its own range.
        ema_updates: batches that the moving average remembers.

    Raises:
        ValueError: steps that make no sense, an unknown operand, an observer that does not follow.
    """

    start_step: int = 0
    freeze_step: int | None = None
    static: tuple[str, ...] = ()
    observer: Observer | str | None = None
    ema_updates: float = 100

    def __post_init__(self) -> None:
        check_steps(self.start_step, self.freeze_step)
        object.__setattr__(self, "static", tuple(self.static))
        if unknown := [name for name in self.static if name not in OPERANDS]:
            raise ValueError(f"QuantizationSchedule: static names {unknown}; operands are {', '.join(OPERANDS)}")
        if self.ema_updates < 1:
            raise ValueError(f"QuantizationSchedule: ema_updates is at least 1, got {self.ema_updates}")
        if self.observer is not None:
            object.__setattr__(self, "observer", observer_of(self.observer, "QuantizationSchedule"))
            if not self.following.follows:
                raise ValueError(f"QuantizationSchedule: {self.observer!r} does not follow batches in training")

    @property
    def following(self) -> Observer:
        """The observer of static operands."""
        if self.observer is None:
            return moving_average(1 / self.ema_updates)
        assert isinstance(self.observer, Observer)
        return self.observer

    def check(self, spec: TrainingSpec) -> None:
        """Raise `ValueError` where `spec` cannot have these static operands."""
        for name in self.static:
            gemm, side = name.split(".")
            operand = getattr(getattr(spec, gemm), side)
            if operand is None:
                raise ValueError(f"QuantizationSchedule: {name} is static, and the spec does not quantize it")
            if name in _TOKENS and operand.granularity.pattern(2)[_TOKENS[name]] != -1:
                raise ValueError(
                    f"QuantizationSchedule: {name} is static, and {operand.granularity} has a scale for each token, or "
                    "for some; tokens of other batches are others: share the scale among tokens, by PerTensor() say"
                )


class Schedule(QuantizationState):
    """Counts the steps of its layer in a buffer, so that a compiled graph does not change with it, and a file of the
    model has it: its forward passes in training mode, or the steps of an optimizer (`advance_with`).

    In eval mode the layer computes what the converted layer would, whatever the step. Passes that are run again for
    checkpointed activations are those of their step; each batch of several whose gradients are added up counts.

    Args:
        start_step: steps in floating point before quantization begins.
        freeze_step: steps after which scales and observed ranges are held; None for never.

    Raises:
        ValueError: a step below zero, or scales that freeze before they are used.
    """

    step: torch.Tensor
    counts_passes: bool = True

    def __init__(self, start_step: int = 0, freeze_step: int | None = None) -> None:
        super().__init__()
        check_steps(start_step, freeze_step)
        self.start_step, self.freeze_step = start_step, freeze_step
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device="cpu"))

    def of_pass(self, step: Any) -> Any:
        """`step`, the count, as that of the pass that runs: in a backward, its forward has been counted."""
        return step - 1 if self.training and self.counts_passes and tracing.in_backward() else step

    @property
    def active(self) -> torch.Tensor:
        """Whether the layer is quantized."""
        return self.of_pass(self.step) >= self.start_step

    @property
    def frozen(self) -> torch.Tensor | None:
        """Whether scales are held; None if they never are."""
        return None if self.freeze_step is None else self.of_pass(self.step) >= self.freeze_step

    def advance(self) -> None:
        """A pass is done."""
        if self.counts_passes and not tracing.in_backward():
            self.count()

    def count(self) -> None:
        """One step is done."""
        self.step.add_(1)


def advance_with(optimizer: torch.optim.Optimizer, *modules: torch.nn.Module) -> Any:
    """Count the steps of `optimizer` in all schedules of these modules, in place of their forward passes: batches whose
    gradients are added up then count once.

    Call it again for a model or an optimizer that was loaded or copied; the counts are in the state of the model.

    Returns:
        A handle; ``handle.remove()`` ends it.

    Raises:
        ValueError: there is no schedule in the modules.
    """
    for module in modules:
        check_model("advance_with", module)
    counting = [each for module in modules for each in module.modules() if hasattr(each, "counts_passes")]
    if not counting:
        raise ValueError("advance_with: the modules have no schedule; prepare them with one first")
    for each in counting:
        setattr(each, "counts_passes", False)  # noqa: B010

    def count(*_: Any) -> None:
        for module in modules:
            for schedule in module.modules():
                if isinstance(schedule, Schedule):
                    schedule.count()

    return optimizer.register_step_post_hook(count)


def check_steps(start_step: int, freeze_step: int | None) -> None:
    """Raise `ValueError` if a step is negative, or scales freeze before they are used."""
    if start_step < 0:
        raise ValueError(f"start_step is {start_step}; it must not be negative")
    if freeze_step is not None and freeze_step <= start_step:
        raise ValueError(f"freeze_step is {freeze_step}, start_step {start_step}: scales would never be in use")
