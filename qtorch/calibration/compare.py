"""compare_models: where a quantized model departs from its float model, module by module.

A module that holds quantized weights has two errors. Its own one is that of its output for the input that it has in the
float model: what is wrong there is wrong in this module. The accumulated one is that of its output in the quantized
model as it runs, which modules before it have a part in. Batches are compared one after the other, and of each only
the outputs of one batch are kept.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..model.install import PreparedModule, check_model
from ..model.report import format_table, quantization_error
from .allocation import allocation, scores
from .captures import without_padding
from .data import Data, eval_mode, tensors_of
from .engine.streams import replaced_forwards

WORST = 3
"""Channels and tokens that are named."""


@dataclass(frozen=True)
class OutputError:
    """How far outputs are from those of the float model, over all tokens that count.

    Attributes:
        sqnr: 10 log10(|y|^2 / |y - y'|^2), dB; -inf if y' holds a NaN or an infinity, inf if there is no error.
        cosine: of y and y', the mean over tokens.
        channels: (channel, its share of |y - y'|^2), the three largest.
        tokens: (batch, row of the output as a matrix of tokens, its share of |y - y'|^2), the three largest.
    """

    sqnr: float
    cosine: float
    channels: tuple[tuple[int, float], ...]
    tokens: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class ModuleError:
    """The errors of one module.

    Attributes:
        spec: how the first weight that it holds is quantized.
        own, accumulated: errors of its output; None if the data does not use the module, or, for the accumulated one,
            if its calls in the two models have other shapes, as where other tokens come to an expert.
        weight_sqnr: the lowest SQNR of its weights, dB; None if it holds none of the shape in the float model.
        outliers: the largest magnitude in a channel of the input, relative to the median of those of all channels.
        clipped: the share of the inputs outside the range of a static activation; None for other ones.
        share: of the divergence of the outputs of the model, what goes away when this module alone is put back to
            float; shares need not sum up to one. None if it was not asked for.
    """

    name: str
    spec: str
    own: OutputError | None
    accumulated: OutputError | None
    weight_sqnr: float | None
    outliers: float | None = None
    clipped: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What `compare_models` returns; print it, or `save` it.

    Attributes:
        modules: in the order of the model; `ranked` has the worst first.
        divergence: of the outputs, the mean over tokens of KL(float, quantized) in nats for logits, of 1 - cosine for
            other outputs; `measure` says which.
        rest: the share of it that stays with all these modules put back to float: that of a quantized KV cache, or of
            weights that were changed otherwise; None without shares.
        tokens: rows of the outputs that were compared.
        advice: what to try, from these figures.
    """

    modules: tuple[ModuleError, ...]
    divergence: float
    measure: str
    rest: float | None
    tokens: int
    advice: tuple[str, ...]

    @property
    def ranked(self) -> list[ModuleError]:
        """By the share in the divergence, or without shares by their own error, the largest first."""
        return sorted(self.modules, key=_badness, reverse=True)

    def to_json(self) -> dict[str, Any]:
        """JSON data: all fields. A number that is not finite is None."""
        data: dict[str, Any] = asdict(self)
        return torch.utils._pytree.tree_map(lambda x: x if not isinstance(x, float) or math.isfinite(x) else None, data)

    def __str__(self) -> str:
        header = ("module", "own dB", "accumulated", "weight", "cosine", "share", "channels", "tokens", "weights")
        table = format_table(header, [_row(module) for module in self.ranked])
        rest = "" if self.rest is None else f"; {self.rest:.1%} of it is not of these modules"
        title = f"{self.measure} of the outputs {self.divergence:.4g} over {self.tokens:,} tokens{rest}"
        return "\n".join([title, "", table, *self.advice])

    def save(self, folder: str | os.PathLike[str], *, png: bool | None = None) -> Path:
        """Write ``comparison.json`` and, where matplotlib is installed, ``errors.png`` to a folder, which is made; with
        `png` an ImportError says that matplotlib is missing."""
        return allocation.write_report(folder, self.to_json(), ("comparison.json", "errors.png"), self._draw, png)

    def _draw(self, path: Path) -> None:
        with allocation.canvas(path, 2 + len(self.modules) / 6) as axes:
            for error in ("own", "accumulated"):
                found = [(m.name, getattr(m, error).sqnr) for m in self.modules if getattr(m, error) is not None]
                axes.plot([sqnr for _, sqnr in found], [name for name, _ in found], "o", label=error)
            axes.invert_yaxis()
            axes.tick_params(axis="y", labelsize=6)
            axes.set_xlabel("SQNR of the output, dB")


class _Sums:
    """Of one module and one of its errors, over batches; `axis` is that of channels."""

    def __init__(self, axis: int) -> None:
        self.axis, self.count = axis, 0
        self.signal = self.cosine = 0.0
        self.channels: Tensor | None = None
        self.worst: list[tuple[float, int, int]] = []

    def add(self, batch: int, mask: Tensor | None, wanted: Tensor, found: Tensor) -> None:
        """The outputs of one call."""
        y, other = (x.float().movedim(self.axis, -1).reshape(-1, x.shape[self.axis]) for x in (wanted, found))
        rows = without_padding(torch.arange(len(y), device=y.device), mask)
        y, other = y[rows], other.to(y.device)[rows]
        squares = (y - other).square()
        self.signal += float(y.square().sum())
        self.cosine += float(nn.functional.cosine_similarity(y, other, dim=-1).sum())
        self.count += len(y)
        of_channels = squares.sum(0).double()
        self.channels = of_channels if self.channels is None else self.channels + of_channels
        noise, index = squares.sum(1).topk(min(WORST, len(y)))
        self.worst += [(value, batch, row) for value, row in zip(noise.tolist(), rows[index].tolist(), strict=True)]
        self.worst = sorted(self.worst, reverse=True)[:WORST]

    def error(self) -> OutputError | None:
        """The sums as an error; None if nothing was added."""
        if self.channels is None or not self.count:
            return None
        noise = float(self.channels.sum())
        sqnr = float(10 * torch.tensor(self.signal / (noise or 1e-300), dtype=torch.float64, device="cpu").log10())
        shares, index = self.channels.div(noise or 1.0).topk(min(WORST, len(self.channels)))
        return OutputError(
            (sqnr if noise else math.inf) if math.isfinite(noise) else -math.inf,
            self.cosine / self.count,
            tuple(zip(index.tolist(), shares.tolist(), strict=True)),
            tuple((batch, row, value / (noise or 1.0)) for value, batch, row in self.worst),
        )


class _Unit:
    """A module that holds quantized weights, the one of the float model, and what is found of them."""

    def __init__(self, name: str, module: nn.Module, reference: nn.Module) -> None:
        self.name, self.module, self.reference = name, module, reference
        self.axis = -1 - len(reference.kernel_size) if isinstance(reference, nn.modules.conv._ConvNd) else -1
        self.own, self.accumulated = _Sums(self.axis), _Sums(self.axis)
        self.outputs: list[Tensor] = []
        self.largest: Tensor | None = None
        self.inputs = self.outside = 0
        weights = {key: weight for key, weight in module.named_parameters() if isinstance(weight, QuantizedTensor)}
        both = [(of.detach(), weights[key]) for key, of in reference.named_parameters() if key in weights]
        self.weight_sqnr = min((quantization_error(of, w) for of, w in both if of.shape == w.shape), default=None)
        self.weight: Any = next(iter(weights.values()), None)
        self.range = _static_range(self.weight)

    @contextmanager
    def watched(self, batch: int, mask: Tensor | None, quantized: bool) -> Iterator[None]:
        """Take note of all calls in one of the two models; the float one runs first."""

        def called(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            y = tensors_of(output)[0]
            if not quantized:
                self.own.add(batch, mask, y, tensors_of(self.module(*args, **kwargs))[0])
                self.outputs.append(y)
                self._see_inputs(tensors_of((args, kwargs))[:1])
            elif self.outputs and self.outputs[0].shape == y.shape:
                self.accumulated.add(batch, mask, self.outputs.pop(0), y)

        with (self.module if quantized else self.reference).register_forward_hook(called, with_kwargs=True):
            yield

    def _see_inputs(self, inputs: Sequence[Tensor]) -> None:
        for x in inputs:
            largest = x.float().abs().movedim(self.axis, -1).reshape(-1, x.shape[self.axis]).amax(0)
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
            if self.range is not None:
                self.outside += int(((x < self.range[0]) | (x > self.range[1])).sum())
                self.inputs += x.numel()

    def error(self, share: float | None) -> ModuleError:
        """What was found."""
        return ModuleError(
            self.name,
            type(self.module).__name__ if self.weight is None else str(self.weight.scheme.spec or type(self.weight)),
            self.own.error(), self.accumulated.error(), self.weight_sqnr,
            None if self.largest is None else float(self.largest.max() / self.largest.median().clamp(min=1e-30)),
            self.outside / self.inputs if self.inputs else None, share,
        )  # fmt: skip


@torch.no_grad()
def compare_models(
    model: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    mask: Callable[[Any], Tensor] | None = None,
    shares: bool = False,
) -> Comparison:
    """Find the modules in which a quantized model departs from its float model.

    The models may be quantized in any way: weights alone, dynamic or static activations, in training. Weights that a
    transform has changed are not those of `reference`: compare with a float model that has the same transform. Both
    models run on each batch, and each module once more.

    Args:
        model: quantized; both models run in eval mode and are not changed.
        reference: the float model, with the same names of modules.
        batches, forward, mask: see `calibrated`; `forward` may give a quantized KV cache to `model` alone.
        shares: also run `model` with each module put back to float, and with all of them: so many forwards more.

    Raises:
        TypeError: `model` or `reference` is not a module, or an output holds no tensor in floating point.
        ValueError: nothing in `model` is quantized, `reference` lacks one of its modules, or see `calibrated`.
    """
    check_model("compare_models", model)
    check_model("compare_models", reference)
    data, units = Data(batches, forward, mask), _units(model, reference)
    forwards = {unit.module: unit.reference.forward for unit in units}
    # What is put back to float: nothing, and for the shares each module, and all of them.
    swaps: list[dict[nn.Module, Any]] = [{}]
    if shares:
        swaps += [*({module: forward} for module, forward in forwards.items()), forwards]
    sums = [0.0] * len(swaps)
    tokens, logits = 0, False
    with eval_mode(model), eval_mode(reference):
        for index, batch in enumerate(data.checked()):
            of_batch = data.mask_of(batch)
            with ExitStack() as stack:
                for unit in units:
                    stack.enter_context(unit.watched(index, of_batch, quantized=False))
                wanted = scores.Rows.of(data.call(reference, batch), of_batch)
            tokens, logits = tokens + len(wanted.values), wanted.are_logits
            for number, swap in enumerate(swaps):
                with ExitStack() as stack, replaced_forwards(swap):
                    for unit in units if number == 0 else ():
                        stack.enter_context(unit.watched(index, of_batch, quantized=True))
                    found = scores.Rows.of(data.call(model, batch), of_batch)
                sums[number] += float(wanted.divergence(found).sum())
            for unit in units:
                unit.outputs.clear()
    *removed, rest = [of_swap / (sums[0] or 1.0) for of_swap in sums[1:]] if shares else [None] * (len(units) + 1)
    errors = tuple(unit.error(left if left is None else 1 - left) for unit, left in zip(units, removed, strict=True))
    measure = "KL divergence" if logits else "1 - cosine"
    return Comparison(errors, sums[0] / max(1, tokens), measure, rest, tokens, tuple(_advice(errors)))


def _units(model: nn.Module, reference: nn.Module) -> list[_Unit]:
    modules, units = dict(model.named_modules()), dict[str, _Unit]()
    for name, module in modules.items():
        held = module._parameters.values()
        if not isinstance(module, PreparedModule) and not any(isinstance(each, QuantizedTensor) for each in held):
            continue
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            name = name.rpartition(".")[0]  # attention of torch multiplies with its weight and does not call it
        try:
            units.setdefault(name, _Unit(name, modules[name], reference.get_submodule(name)))
        except AttributeError as error:
            raise ValueError(f"compare_models: the reference has no module {name}; give the float model") from error
    if not units:
        raise ValueError(f"compare_models: no weight of this {type(model).__name__} is quantized; call quantize_ first")
    return list(units.values())


def _static_range(weight: Any) -> tuple[float, float] | None:
    """(low, high) of the reals that a static activation of one scale represents."""
    scale = getattr(weight, "act_scale", None)
    if scale is None or scale.numel() != 1:
        return None
    spec = weight.scheme.activation
    codes = torch.tensor([spec.code_range], device=scale.device, dtype=torch.float32).to(spec.dtype.storage)
    low, high = spec.dequantize(codes, scale, weight.act_zero_point)[0].tolist()
    return low, high


def _badness(module: ModuleError) -> tuple[float, float]:
    own = -math.inf if module.own is None else -module.own.sqnr
    return (own if module.share is None else module.share), own


def _fault(module: ModuleError, usual: float) -> str | None:
    """What is wrong with a module by itself; `usual` is the SQNR of most weights of its spec."""
    if module.own is not None and module.own.sqnr == -math.inf:
        return "its output holds a NaN or an infinity, that of the reference does not"
    if module.weight_sqnr is not None and module.weight_sqnr < max(3.0, usual - 15):
        found = f"its weight has {module.weight_sqnr:.1f} dB, most of its kind have {usual:.1f}"
        return f"{found}: it is not the float one, by its scales or the order of its channels"
    if module.clipped is not None and module.clipped > 1e-3:
        found = f"{module.clipped:.1%} of its inputs are outside its static range"
        return f'{found}: choose it on more data, or by observer="min_max"'
    return None


def _advice(modules: Iterable[ModuleError]) -> Iterable[str]:
    """Lines on what to try; with a fault in a module, that comes first."""
    used = sorted((module for module in modules if module.own is not None), key=_badness, reverse=True)
    of_spec: dict[str, list[float]] = {}
    for module in used:
        of_spec.setdefault(module.spec, []).append(module.weight_sqnr or 0.0)
    usual = {spec: median(found) for spec, found in of_spec.items()}
    faults = [f"{module.name}: {fault}" for module in used if (fault := _fault(module, usual[module.spec])) is not None]
    if faults or not used:
        yield from faults
        return
    # Where an output is further off than the weight, the input is what is quantized badly.
    of_input = [m for m in used if m.own is not None and m.weight_sqnr is not None and m.own.sqnr + 3 < m.weight_sqnr]
    outliers = [module for module in of_input if (module.outliers or 0.0) > 10]
    if outliers:
        yield (
            f"{outliers[0].name} and {len(outliers) - 1} more: a channel of the input is {outliers[0].outliers:.0f} "
            "times as large as the median, and costs more than the weights: transforms=[smooth()], or weights alone"
        )
    parts = [10 ** (-m.own.sqnr / 10) if m.share is None else max(0.0, m.share) for m in used if m.own is not None]
    few = max(1, len(parts) // 10)
    if len(parts) > 1 and sum(parts[:few]) > sum(parts) / 2:
        names, share = ", ".join(module.name for module in used[:few][:4]), sum(parts[:few]) / sum(parts)
        yield f"{share:.0%} of the error is of {few} of {len(parts)} modules: 8 bits for {names}"
    else:
        yield "the error is spread over all modules: smaller groups, or codes chosen on data by auto(recipe, batches)"


def _row(module: ModuleError) -> tuple[str, ...]:
    own = module.own
    values = (own and own.sqnr, module.accumulated and module.accumulated.sqnr, module.weight_sqnr)
    return (
        module.name,
        *("" if value is None else f"{value:.1f}" for value in values),
        "not used" if own is None else f"{own.cosine:.4f}",
        "" if module.share is None else f"{module.share:.1%}",
        "" if own is None else " ".join(f"{channel}:{share:.0%}" for channel, share in own.channels),
        "" if own is None else " ".join(f"{batch}/{row}:{share:.0%}" for batch, row, share in own.tokens),
        module.spec,
    )
