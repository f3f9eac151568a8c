"""collect: run a model on batches and pass the inputs of its weights to the requested statistics.

A function mode sees each `F.linear` and convolution whose weight is one of the requested parameters, in any module, so
a layer that is shared or called in a loop gets the inputs of all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..kernels.im2col import input_rows, prepare_conv
from .base import Statistic, Statistics
from .batches import run_batches

_NDIM = {functional.conv1d: 1, functional.conv2d: 2, functional.conv3d: 3}


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    wanted: Mapping[Tensor, Sequence[type[Statistic]]],
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[Tensor, Statistics]:
    """Statistics of the inputs of weights, over all batches.

    Args:
        model: run in eval mode, without gradients; it is not changed.
        batches, forward: see `run_batches`.
        wanted: the statistics to collect for each parameter of `model`.

    Returns:
        For each parameter, its statistics by class.

    Raises:
        ValueError: there is no batch, or no `F.linear` and no convolution with one of the weights ran.
    """
    found: dict[Tensor, Statistics] = {p: {kind: kind() for kind in kinds} for p, kinds in wanted.items()}
    with _Recorder(found):
        run_batches(model, batches, forward)
    unseen = {p for p, statistics in found.items() if any(not s.rows for s in statistics.values())}
    if unseen:
        names = [name for name, p in model.named_parameters() if p in unseen]
        raise ValueError(
            f"calibration: no input of {', '.join(names)} was seen; only those of F.linear and convolutions are. Use a "
            "recipe that needs no data for these weights"
        )
    return found


class _Recorder(TorchFunctionMode):
    def __init__(self, found: Mapping[Tensor, Statistics]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear or func in _NDIM:
            self._record(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any) -> None:
        statistics = self.found.get(weight)
        if not statistics:
            return
        input = input.detach()
        if func is functional.linear:
            parts: Iterable[Tensor] = [input.reshape(-1, input.shape[-1])]
        else:
            parts = _windows(func, input, weight, *args, **kwargs)
        for rows in parts:
            for statistic in statistics.values():
                statistic.update(rows)


def _windows(
    func: Any,
    input: Tensor,
    weight: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Iterator[Tensor]:
    """The windows of a convolution as rows, of all groups, in the order of its weight viewed as a matrix."""
    ndim = _NDIM[func]
    batched = input if input.dim() == ndim + 2 else input.unsqueeze(0)
    return input_rows(*prepare_conv(ndim, batched, weight.shape, stride, padding, dilation, groups, func.__name__))
