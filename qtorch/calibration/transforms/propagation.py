"""Propagation: what multiplying the channels of a parameter by scales does to the rest of a graph.

It starts from a parameter whose elements are multiplied by unknown scales (see `labels`) and follows the tensors that
depend on it. The rule of each operation (`rules`) says how its output is scaled, which parameter has to be divided by
the same scales for the output to be unchanged, or which scales would change it: those are blocked, which makes them 1.
A parameter that is divided is followed in turn, so that all its uses, tied or shared, have to agree. The process is
repeated until nothing changes. Then the outputs of the model do not depend on the scales that are left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .graph import ModelGraph, shape_of
from .labels import aligned, compact, ids

Labels = Tensor | list["Tensor | None"] | None
"""Labels of the output of a node; of several outputs; or None where nothing is scaled."""

Rule = Callable[["Propagation", fx.Node], Labels]


class Propagation:
    """Scales of the channels of one parameter.

    Attributes:
        scaled: name of a parameter -> its labels.
        shifts: name of a parameter -> c where the model multiplies by (c + parameter).
        blocked: scale -> why it has to be 1.
    """

    def __init__(self, graph: ModelGraph, rule: Callable[[fx.Node], Rule], name: str, labels: Tensor) -> None:
        self.graph = graph
        self.rule = rule
        self.scaled: dict[str, Tensor] = {name: labels}
        self.shifts: dict[str, float] = {}
        self.blocked: dict[int, str] = {}
        self.at: dict[fx.Node, Labels] = {}
        self.changed = True
        self.all = ids(labels)

    def run(self) -> Propagation:
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
                self.at[node] = self._kept(labels)
                add(node.users)
        while waiting:
            node = self.graph.nodes[heapq.heappop(waiting)]
            if not any(self.at.get(source) is not None for source in node.all_input_nodes):
                continue
            result = self._kept(self.rule(node)(self, node))
            if result is not None:
                self.at[node] = result
                add(node.users)

    def _kept(self, labels: Labels) -> Labels:
        if isinstance(labels, list):
            each = [None if part is None else self.kept(part) for part in labels]
            return None if all(part is None for part in each) else each
        return None if labels is None else self.kept(labels)

    def kept(self, labels: Tensor) -> Tensor | None:
        """Labels without those that are blocked; None if none is left."""
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

    def want(self, operand: Any, have: Tensor | None, wanted: Tensor | None, reason: str) -> None:
        """Have an operand scaled as `wanted`: by scaling the parameter that it is a view of, or else by blocking."""
        if have is None and wanted is None:
            return
        if have is None:
            assert wanted is not None
            if not self.request(operand, wanted):
                self.block(wanted, reason)
            return
        have, wanted = torch.broadcast_tensors(have, torch.zeros_like(have) if wanted is None else wanted)
        differ = have != wanted
        if bool(differ.any()):
            missing = torch.where(differ & (have == 0), wanted, torch.zeros_like(wanted))
            if bool((differ & (have != 0)).any()) or not self.request(operand, compact(missing)):
                self.block(torch.where(differ, have, torch.zeros_like(have)), reason)
                self.block(torch.where(differ, wanted, torch.zeros_like(wanted)), reason)

    def request(self, node: Any, labels: Tensor) -> bool:
        """Scale the parameter that a node is a view of; False if it is none."""
        shape = shape_of(node)
        fitting = None if shape is None else aligned(labels, len(shape))
        if fitting is None:
            return False
        while isinstance(node, fx.Node) and node not in self.graph.parameters:
            inverse = VIEWS.get(_name(node))
            if inverse is None:
                return False
            fitting = inverse(fitting, *node.args[1:])
            node = node.args[0]
        shape = shape_of(node)
        if shape is None or node not in self.graph.parameters:
            return False
        if any(a not in (1, b) for a, b in zip(fitting.shape, shape)):
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
            if _name(node) not in VIEWS:
                return False
            node = node.args[0]
        return isinstance(node, fx.Node)

    def shift(self, node: fx.Node, value: float) -> bool:
        """Note that the model adds a number to a parameter before it multiplies by it; False if it is none."""
        while node not in self.graph.parameters:
            if _name(node) not in VIEWS or not isinstance(node.args[0], fx.Node):
                return False
            node = node.args[0]
        return self.shifts.setdefault(self.graph.parameters[node], value) == value


def _name(node: fx.Node) -> str:
    return str(node.target)


def _same(labels: Tensor, *_: Any, **__: Any) -> Tensor:
    return labels


def _permuted(labels: Tensor, axes: Any) -> Tensor:
    order = [axis % len(axes) for axis in axes]
    return labels.permute([order.index(axis) for axis in range(len(order))])


VIEWS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(
        ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default", "aten.alias.default"), _same
    ),
    **dict.fromkeys(("aten.detach.default", "aten.contiguous.default", "aten.clone.default"), _same),
    "aten.t.default": lambda labels: labels.t(),
    "aten.transpose.int": lambda labels, a, b: labels.transpose(a, b),
    "aten.permute.default": _permuted,
    "aten.unsqueeze.default": lambda labels, axis: labels.squeeze(axis),
}
"""Operation that makes a view of a parameter -> (labels of the view, its other arguments) -> those of the parameter."""
