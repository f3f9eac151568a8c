"""Propagation: what multiplying the channels of a parameter by scales does to the rest of a graph.

It starts from a parameter whose elements are multiplied by unknown scales (see `labels`) and follows the tensors that
depend on it. The rule of each operation (`rules`) says how its output is scaled, which parameter has to be divided by
the same scales for the output to be unchanged, or which scales would change it: those are blocked, which makes them 1.
A parameter that is divided is followed in turn, so that all its uses, tied or shared, have to agree. The process is
repeated until nothing changes. Then the outputs of the model do not depend on the scales that are left.
"""

import contextlib
import heapq
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, fx, nn

from ..data import Data, eval_mode, tensors_of


class ExportFailed(Exception):
    """`torch.export` does not take the model; the message is its first line."""


class _Call(nn.Module):
    """A call of a model with a batch, as a module: what `torch.export` takes."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        super().__init__()
        self.model, self.data = model, data

    def forward(self, batch: Any) -> list[Tensor]:
        return tensors_of(self.data.call(self.model, batch))


class ModelGraph:
    """The operations of a model between its parameters, inputs and outputs, as `torch.export` finds them, in the order
    in which they run. `parameters` has the name of each placeholder of a parameter, tied ones one name, and `uses` is
    the inverse.

    The export runs the model on tensors without data, so that it needs no memory, whatever the size of the model.
    """

    def __init__(self, model: nn.Module, data: Data, batch: Any) -> None:
        """Export the model with one batch."""
        given = dict(batch) if isinstance(batch, Mapping) else batch
        try:
            # Of a model that branches on values it prints all that it has traced so far.
            with eval_mode(model), torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
                program: Any = torch.export.export(_Call(model, data), (given,), strict=False)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise ExportFailed(f"{type(error).__name__}: {lines[0]}") from error
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        first: dict[int, str] = {}  # all names of a parameter -> its first one
        names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
        stored: Mapping[str, str] = program.graph_signature.inputs_to_parameters
        self.parameters: dict[fx.Node, str] = {}
        self.uses: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            if node.op == "placeholder" and node.name in stored:
                name = names[stored[node.name].removeprefix("model.")]
                self.parameters[node] = name
                self.uses.setdefault(name, []).append(node)


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of the tensor that a node computes; None if it is no tensor, or has no fixed shape."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


# A label says by which of the unknown scales s_1 .. s_n an element is multiplied: i stands for a factor s_i, -i for
# 1 / s_i, and 0 for 1. Labels are int32 tensors that broadcast to the shape of the tensor: an axis along which all
# labels are equal has size 1.


def compact(labels: Tensor) -> Tensor:
    """The same labels with size 1 along each axis that they do not depend on."""
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, 1) if labels.shape[axis] else labels
        if labels.shape[axis] > 1 and (labels.stride(axis) == 0 or bool((labels == first).all())):
            labels = first
    return labels.contiguous()


def axis_labels(shape: Sequence[int], axis: int) -> Tensor:
    """Labels 1, 2, ... along one axis."""
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return torch.arange(1, shape[axis] + 1, dtype=torch.int32, device="cpu").reshape(sizes)


def aligned(labels: Tensor, dim: int) -> Tensor | None:
    """Labels with `dim` axes, as broadcasting aligns them; None if axes that are left out have several labels."""
    while labels.dim() > dim:
        if labels.shape[0] != 1:
            return None
        labels = labels.squeeze(0)
    return labels.reshape((1,) * (dim - labels.dim()) + tuple(labels.shape))


def ids(labels: Tensor) -> set[int]:
    """The scales that occur."""
    return set(labels.abs().unique().tolist()) - {0}


def factors(labels: Tensor, scales: Tensor) -> Tensor:
    """What elements with these labels are multiplied by, given s_1 .. s_n."""
    padded = torch.cat([scales.new_ones(1), scales])
    found = padded[labels.abs().long().to(scales.device)]
    return torch.where(labels.to(scales.device) < 0, 1 / found, found)


Labels = Tensor | list["Tensor | None"] | None
"""Labels of the output of a node; of several outputs; or None where nothing is scaled."""

Rule = Callable[["Propagation", fx.Node], Labels]


class Propagation:
    """Scales of the channels of one parameter: the labels of all parameters that they scale, by name (`scaled`), c
    where the model multiplies by (c + parameter) (`shifts`), and why scales have to be 1 (`blocked`)."""

    def __init__(self, graph: ModelGraph, rule: Callable[[fx.Node], Rule], name: str, labels: Tensor) -> None:
        self.graph, self.rule = graph, rule
        self.scaled: dict[str, Tensor] = {name: labels}
        self.shifts: dict[str, float] = {}
        self.blocked: dict[int, str] = {}
        self.at: dict[fx.Node, Labels] = {}
        self.changed = True
        self.all = ids(labels)

    def run(self) -> "Propagation":
        """Propagate until nothing changes."""
        while self.changed and self.free:
            self.changed = False
            self._pass()
        return self

    @property
    def free(self) -> set[int]:
        """The scales that may have any value."""
        return self.all - set(self.blocked)

    def _pass(self) -> None:
        """Follow the scaled parameters once."""
        self.at = {}
        waiting: list[int] = []
        known: set[int] = set()

        def add(users: Any) -> None:
            for user in users:
                if (index := self.graph.order[user]) not in known:
                    known.add(index)
                    heapq.heappush(waiting, index)

        for name, labels in list(self.scaled.items()):
            for node in self.graph.uses.get(name, ()):
                self.at[node] = self.unblocked(labels)
                add(node.users)
        while waiting:
            node = self.graph.nodes[heapq.heappop(waiting)]
            if not any(self.at.get(source) is not None for source in node.all_input_nodes):
                continue
            result = self.unblocked(self.rule(node)(self, node))
            if result is not None:
                self.at[node] = result
                add(node.users)

    @overload
    def unblocked(self, labels: Tensor) -> Tensor | None: ...

    @overload
    def unblocked(self, labels: Labels) -> Labels: ...

    def unblocked(self, labels: Labels) -> Labels:
        """Labels without those that are blocked; None if none is left."""
        if labels is None:
            return None
        if isinstance(labels, list):
            each = [None if part is None else self.unblocked(part) for part in labels]
            return None if all(part is None for part in each) else each
        if self.blocked:
            stopped = labels.new_tensor(sorted(self.blocked))
            labels = torch.where(torch.isin(labels.abs(), stopped), torch.zeros_like(labels), labels)
        return compact(labels) if bool(labels.any()) else None

    # What rules call.

    def labels(self, argument: Any) -> Tensor | None:
        """The labels of an argument of a node."""
        found = self.at.get(argument) if isinstance(argument, fx.Node) else None
        return None if isinstance(found, list) else found

    def block(self, labels: Labels, reason: str) -> None:
        """These scales change the outputs of the model."""
        for part in labels if isinstance(labels, list) else [labels]:
            if part is not None:
                for index in ids(part) - set(self.blocked):
                    self.blocked[index] = reason
                    self.changed = True

    def require(self, operand: Any, have: Tensor | None, required: Tensor | None, reason: str) -> None:
        """Have an operand scaled as `required`: by scaling the parameter that it is a view of, or else by blocking."""
        if have is None:
            if required is not None and not self.request(operand, required):
                self.block(required, reason)
            return
        have, required = torch.broadcast_tensors(have, torch.zeros_like(have) if required is None else required)
        differ = have != required
        if bool(differ.any()):
            missing = torch.where(differ & (have == 0), required, torch.zeros_like(required))
            if bool((differ & (have != 0)).any()) or not self.request(operand, compact(missing)):
                self.block(torch.where(differ, have, torch.zeros_like(have)), reason)
                self.block(torch.where(differ, required, torch.zeros_like(required)), reason)

    def request(self, node: Any, labels: Tensor) -> bool:
        """Scale the parameter that a node is a view of; False if it is none."""
        shape = shape_of(node)
        fitting = None if shape is None else aligned(labels, len(shape))
        if fitting is None or not self.is_parameter(node):
            return False
        while node not in self.graph.parameters:
            fitting = VIEWS[name_of(node)](fitting, *node.args[1:])
            node = node.args[0]
        shape = shape_of(node)
        if shape is None or any(a not in (1, b) for a, b in zip(fitting.shape, shape)):
            return False
        name = self.graph.parameters[node]
        if (old := self.scaled.get(name)) is not None:
            a, b = torch.broadcast_tensors(old, fitting)
            if bool(((a != 0) & (b != 0) & (a != b)).any()):
                return False
            fitting = torch.where(a == 0, b, a)
        self.scaled[name] = compact(fitting)
        self.changed = True
        return True

    def is_parameter(self, node: Any) -> bool:
        """Whether a node is a parameter, or a view of one."""
        while isinstance(node, fx.Node) and node not in self.graph.parameters:
            if name_of(node) not in VIEWS:
                return False
            node = node.args[0]
        return isinstance(node, fx.Node)

    def shift(self, node: fx.Node, value: float) -> bool:
        """Note that the model adds a number to a parameter before it multiplies by it; False if it is none."""
        if not self.is_parameter(node):
            return False
        while node not in self.graph.parameters:
            node = node.args[0]  # type: ignore[assignment]
        return self.shifts.setdefault(self.graph.parameters[node], value) == value


def name_of(node: Any) -> str:
    """The name of the operation of a node; empty for other values."""
    return str(node.target) if isinstance(node, fx.Node) else ""


def _permuted(labels: Tensor, axes: Any) -> Tensor:
    order = [axis % len(axes) for axis in axes]
    return labels.permute([order.index(axis) for axis in range(len(order))])


SAME = {f"aten.{name}.default" for name in ("clone", "contiguous", "detach", "alias", "type_as")}
SAME |= {f"aten.to.{name}" for name in ("dtype", "dtype_layout", "device")}
"""Operations whose result has the elements of their first argument, in their order."""

VIEWS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(SAME, lambda labels, *_, **__: labels),
    "aten.t.default": lambda labels: labels.t(),
    "aten.transpose.int": lambda labels, a, b: labels.transpose(a, b),
    "aten.permute.default": _permuted,
    "aten.unsqueeze.default": lambda labels, axis: labels.squeeze(axis),
}
"""Operation that makes a view of a parameter -> (labels of the view, its other arguments) -> those of the parameter."""
