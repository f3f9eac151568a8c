"""find_uses: what a model does with each of its parameters, seen in one forward.

`weight_kinds` knows the modules of torch and transformers. For any other model, this is how it is found out which
parameters take part in products, and which of their axes the products sum over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..calibration import captures, data
from ..primitives.tracing import plain_name
from .install import check_model
from .weight_kinds import CONVOLUTION, EXPERTS, EXPERTS_IN_OUT, LINEAR, LINEAR_IN_OUT, WeightKind


@dataclass(frozen=True)
class Contraction:
    """The products of one function that sum over one axis of a parameter.

    Attributes:
        function: of torch, such as ``"linear"``.
        axis: -1 or -2, the axis of the parameter that the products sum over; None for a convolution, which sums over
            all axes but the first.
        rows: the number of inputs that were multiplied, all calls together.
    """

    function: str
    axis: int | None
    rows: int


@dataclass
class ParameterUses:
    """What a model did with a parameter.

    Attributes:
        shape: of the parameter.
        contractions: the products it took part in.
        lookups: how often rows of it were looked up, as an embedding.
        others: the other functions of torch that took it, or a view of it.
    """

    shape: tuple[int, ...]
    contractions: list[Contraction] = field(default_factory=list)
    lookups: int = 0
    others: list[str] = field(default_factory=list)

    @property
    def axis(self) -> int | None:
        """The axis that all products sum over, or None."""
        axes = {each.axis for each in self.contractions}
        return axes.pop() if len(axes) == 1 else None

    @property
    def is_convolution(self) -> bool:
        return {each.axis for each in self.contractions} == {None}

    @property
    def obstacle(self) -> str | None:
        """Why it is not quantized, or None."""
        if not self.contractions:
            what = f"it took part in {', '.join(self.others)}" if self.others else "nothing was done with it"
            return f"is not multiplied: {'its rows were looked up' if self.lookups and not self.others else what}"
        if self.others:
            return f"took part in {', '.join(self.others)}, which quantized weights do not have"
        if len({each.axis for each in self.contractions}) > 1:
            return "took part in products that sum over different axes of it"
        if (self.is_convolution and len(self.shape) == 2) or (not self.is_convolution and len(self.shape) > 3):
            return f"has shape {self.shape} and is multiplied as a view of another one"
        return None

    @property
    def kind(self) -> WeightKind:
        """The kind of such a weight, of whose module nothing is known."""
        if self.is_convolution:
            return CONVOLUTION
        matrix = len(self.shape) == 2
        if self.axis == -2:
            return WeightKind(LINEAR.name, LINEAR_IN_OUT.held) if matrix else EXPERTS_IN_OUT
        return WeightKind(LINEAR.name) if matrix else EXPERTS

    def __str__(self) -> str:
        products = [
            f"{each.function} over axis {'1, ...' if each.axis is None else each.axis}, {each.rows} rows"
            for each in self.contractions
        ]
        lookups = [f"{self.lookups} rows looked up"] if self.lookups else []
        return "; ".join([*products, *lookups, *self.others]) or "not used"


class Uses(dict[str, ParameterUses]):
    """The uses of all parameters of two or more axes, by name; print it, or pass it to `quantize_` as `targets`."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name.ljust(width)}  {uses}" for name, uses in self.items())


@torch.no_grad()
def find_uses(model: torch.nn.Module, *inputs: Any, **named: Any) -> Uses:
    """Run a model once, in eval mode, and see what it does with each parameter.

    A parameter is recognized by its memory, so that views of it (an expert, the transpose, some rows) are uses of it;
    copies, such as a cast, are not. Only what this forward uses is seen: of experts, those that get tokens.

    Args:
        model: in floating point; it is not changed.
        inputs, named: the arguments of its forward.

    Returns:
        The uses of each parameter of two or more axes, by every name that it has.

    Raises:
        TypeError: `model` is not a module.
    """
    check_model("find_uses", model)
    parameters = {id(p): p for p in model.parameters() if not torch.nn.parameter.is_lazy(p) and p.dim() >= 2}
    recorder = _Recorder(parameters.values())
    with data.eval_mode(model), recorder:
        model(*inputs, **named)
    found = {key: recorder.uses_of(parameter) for key, parameter in parameters.items()}
    names = model.named_parameters(remove_duplicate=False)
    return Uses({plain_name(name): found[id(parameter)] for name, parameter in names if id(parameter) in found})


class _Recorder(captures.UseRecorder):
    """Counts the products with each weight, and notes every other function that takes one."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__(weights, self._count)
        self.function = ""
        self.rows: dict[int, dict[tuple[str, int | None], int]] = {}
        self.lookups: dict[int, int] = {}
        self.others: dict[int, dict[str, None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.function = _name(func)
        before = self.count
        result = super().__torch_function__(func, types, args, kwargs)
        results = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        if func in captures.INLINED or self.count > before or not results:
            return result
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            owner = self.owner(value)
            if owner is None or any(self.owner(other) is owner for other in results):  # a view
                continue
            if func is torch.nn.functional.embedding:
                self.lookups[id(owner)] = self.lookups.get(id(owner), 0) + args[0].numel()
            else:
                self.others.setdefault(id(owner), {})[_name(func)] = None
        return result

    def _count(self, use: captures.Use) -> None:
        of_convolution = self.function.startswith("conv")
        axis = None if of_convolution else -2 if use.transposed else -1
        counts = self.rows.setdefault(id(use.weight), {})
        rows = sum(len(part) for part in use.rows())
        counts[self.function, axis] = counts.get((self.function, axis), 0) + rows

    def uses_of(self, parameter: torch.Tensor) -> ParameterUses:
        counts = self.rows.get(id(parameter), {})
        return ParameterUses(
            tuple(parameter.shape),
            [Contraction(function, axis, rows) for (function, axis), rows in counts.items()],
            self.lookups.get(id(parameter), 0),
            list(self.others.get(id(parameter), {})),
        )


def _name(function: Any) -> str:
    """``"matmul"`` for `torch.matmul`, `Tensor.matmul` and `Tensor.__matmul__`."""
    return str(getattr(function, "__name__", function)).strip("_")
