"""The residual stream of a model: what has to be rotated so that all its readers and writers see rotated vectors.

A tensor x is rotated if it is replaced by x Q along its last axis. Starting from the embedding, everything that a
rotated tensor is added to has to be rotated, too, back to the parameter that writes it; norms of x by its mean square
pass a rotation if they have no weights of their own; linear layers take it back. Anything else cannot be rotated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from . import propagation
from .propagation import VIEWS, ModelGraph, axis_labels, name_of, shape_of

Handler = Callable[["ResidualStream", fx.Node], bool]


class CannotRotate(Exception):
    """The residual stream cannot be rotated; the message says why."""


class ResidualStream:
    """The residual stream, of `size` channels, that starts at the first embedding: the `axes` along which each
    parameter is rotated, and the weights of `norms`, which have to be 1."""

    def __init__(self, graph: ModelGraph) -> None:
        """Raises `CannotRotate`."""
        self.graph = graph
        self.rotated: set[fx.Node] = set()
        self.norms: dict[str, None] = {}
        self.seen: dict[str, dict[fx.Node, set[int]]] = {}
        self.waiting: list[fx.Node] = []
        first = next((node for node in graph.nodes if str(node.target) == "aten.embedding.default"), None)
        shape = shape_of(first)
        if first is None or shape is None:
            raise CannotRotate("the model has no embedding")
        self.size = shape[-1]
        self.require(first)
        while self.waiting:
            for user in list(self.waiting.pop().users):
                read = READERS.get(name_of(user))
                if read is None or not read(self, user):
                    raise CannotRotate(f"{user.name} ({name_of(user)}) reads it")
        self.axes = {name: self._agreed(name) for name in self.seen}

    def require(self, node: Any) -> None:
        """Have a tensor rotated, by rotating what writes it."""
        if node in self.rotated:
            return
        if not isinstance(node, fx.Node) or (shape_of(node) or (0,))[-1] != self.size:
            raise CannotRotate(f"{node} is added to it")
        self.rotated.add(node)
        self.waiting.append(node)
        if self._parameter(node, -1, node):
            return
        write = WRITERS.get(name_of(node))
        if write is None or not write(self, node):
            raise CannotRotate(f"{node.name} ({name_of(node)}) writes into it")

    def _pass(self, node: fx.Node) -> bool:
        """The output of a node is rotated as its inputs are."""
        if node not in self.rotated:
            self.rotated.add(node)
            self.waiting.append(node)
        return True

    def _parameter(self, node: Any, axis: int, user: fx.Node) -> bool:
        """Rotate the parameter that a node is a view of, along an axis of the view; False if it is none."""
        shape = shape_of(node)
        if shape is None:
            return False
        labels = axis_labels(shape, axis)
        while node not in self.graph.parameters:
            inverse = VIEWS.get(name_of(node)) if isinstance(node, fx.Node) else None
            if inverse is None:
                return False
            labels, node = inverse(labels, *node.args[1:]), node.args[0]
        (found,) = [index for index, size in enumerate(labels.shape) if size > 1]
        self.seen.setdefault(self.graph.parameters[node], {}).setdefault(user, set()).add(found)
        return True

    def _agreed(self, name: str) -> set[int]:
        """The axes along which all uses of a parameter rotate it."""
        uses: set[fx.Node] = set()
        for node in self.graph.uses[name]:
            pending = list(node.users)
            while pending:
                user = pending.pop()
                if name_of(user) in VIEWS and user not in self.seen[name]:
                    pending += user.users
                elif name_of(user) not in IGNORED:
                    uses.add(user)
        of_uses = list(self.seen[name].values())
        if uses != set(self.seen[name]) or any(axes != of_uses[0] for axes in of_uses):
            raise CannotRotate(f"{name} is also used where it is not rotated")
        return of_uses[0]

    def neutral(self, node: Any) -> bool:
        """Whether a node is the weight of a norm, which then has to be folded away."""
        while isinstance(node, fx.Node) and node not in self.graph.parameters:
            scalar = name_of(node) == "aten.add.Tensor" and not isinstance(node.args[1], fx.Node)
            if not scalar and name_of(node) not in VIEWS:
                return False
            node = node.args[0]
        if not isinstance(node, fx.Node) or shape_of(node) != (self.size,):
            return False
        self.norms[self.graph.parameters[node]] = None
        return True


def _is_scale(node: Any) -> bool:
    """Whether a factor is one number for each vector."""
    shape = shape_of(node)
    return not isinstance(node, fx.Node) or (shape is not None and (not shape or shape[-1] == 1))


# What the operations need, of which False says that the stream cannot be rotated.


def _write_product(weight: int, bias: int, transposed: bool) -> Handler:
    """A product with a parameter, given by the places of the weight and the bias in the arguments."""

    def write(s: ResidualStream, node: fx.Node) -> bool:
        given = node.args[bias] if 0 <= bias < len(node.args) else None
        of_weight = s._parameter(node.args[weight], -1 if transposed else -2, node)
        return of_weight and (given is None or s._parameter(given, -1, node))

    return write


def _read_product(input: int, weight: int, transposed: bool) -> Handler:
    def read(s: ResidualStream, node: fx.Node) -> bool:
        return node.args[input] in s.rotated and s._parameter(node.args[weight], -2 if transposed else -1, node)

    return read


def _write_sum(s: ResidualStream, node: fx.Node) -> bool:
    for operand in node.args[:2]:
        if operand != 0:
            s.require(operand)
    return True


def _write_scaled(s: ResidualStream, node: fx.Node) -> bool:
    a, b = node.args[:2]
    if not _is_scale(b):
        a, b = b, a
    if not _is_scale(b) or ("div" in name_of(node) and a is not node.args[0]):
        return False
    s.require(a)
    return True


def _write_moved(s: ResidualStream, node: fx.Node) -> bool:
    moves = _keeps_vectors(node)
    if moves:
        s.require(node.args[0])
    return moves


def _read_scaled(s: ResidualStream, node: fx.Node) -> bool:
    a, b = node.args[:2]
    if a is b and "mul" in name_of(node):
        return _only_summed(node)
    if b in s.rotated:
        a, b = b, a
    divides_by = "div" in name_of(node) and a is not node.args[0]
    if divides_by or b in s.rotated or not (_is_scale(b) or s.neutral(b)):
        return False
    return s._pass(node)


def _read_power(s: ResidualStream, node: fx.Node) -> bool:
    return ("pow" not in name_of(node) or bool(node.args[1] == 2)) and _only_summed(node)


def _only_summed(node: fx.Node) -> bool:
    """Squares are summed over the last axis, and nothing else is done with them."""
    sums = ("aten.mean.dim", "aten.sum.dim_IntList")
    users = [user for user in node.users if name_of(user) not in IGNORED]
    return all(name_of(user) in sums and _is_last(user.args[1:2], user) for user in users)


def _is_last(axes: Any, node: fx.Node) -> bool:
    """Whether `axes`, an argument if there is one, are the last axis of the input."""
    shape = shape_of(node.args[0])
    if shape is None or not axes or not isinstance(axes[0], list | tuple):
        return False
    return [axis % len(shape) for axis in axes[0]] == [len(shape) - 1]


def _read_norm(s: ResidualStream, node: fx.Node) -> bool:
    weight = node.args[2] if len(node.args) > 2 else None
    return list(node.args[1]) == [s.size] and (weight is None or s.neutral(weight)) and s._pass(node)  # type: ignore[arg-type]


def _keeps_vectors(node: fx.Node) -> bool:
    """Whether an operation on a tensor leaves the vectors along its last axis as they are, or sums them."""
    source, shape, after = node.args[0], shape_of(node.args[0]), shape_of(node)
    if shape is None or after is None or name_of(node) in SAME:
        return shape is not None and after == shape
    if name_of(node) == "aten.sum.dim_IntList":
        axes: Any = node.args[1]
        return all(axis % len(shape) != len(shape) - 1 for axis in axes)
    if name_of(node) == "aten.index.Tensor":
        indexes: Any = node.args[1]
        return len(indexes) < len(shape) and all(isinstance(index, fx.Node | None) for index in indexes)
    labels = axis_labels(shape, -1).expand(shape)
    function: Any = torch.reshape if "view" in name_of(node) else node.target
    if any(other is not source for other in node.all_input_nodes):
        return False
    moved = function(labels, *node.args[1:], **node.kwargs)
    return tuple(moved.shape) == after and bool((moved == axis_labels(after, -1)).all())


IGNORED = {f"aten.{name}" for name in ("_assert_tensor_metadata.default", "zeros_like.default", "empty_like.default")}
IGNORED |= {f"aten.{name}" for name in ("new_zeros.default", "new_ones.default", "new_empty.default", "sym_size.int")}
SAME = {*propagation.SAME, "aten.dropout.default"}
MOVES = {f"aten.{name}.default" for name in ("view", "reshape", "expand", "unsqueeze", "permute")}
MOVES |= {"aten.slice.Tensor", "aten.select.int", "aten.transpose.int", "aten.sum.dim_IntList", "aten.index.Tensor"}
MOVES |= {"aten.flatten.using_ints", "aten.squeeze.dim"}
SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.add_.Tensor")
SCALED = ("aten.mul.Tensor", "aten.div.Tensor")
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")

WRITERS: dict[str, Handler] = {
    "aten.embedding.default": lambda s, node: s._parameter(node.args[0], -1, node),
    "aten.linear.default": _write_product(1, 2, False),
    "aten.addmm.default": _write_product(2, 0, True),
    "aten.matmul.default": _write_product(1, -1, True),
    **dict.fromkeys(GROUPED, _write_product(1, -1, True)),
    **dict.fromkeys(SUMS, _write_sum),
    **dict.fromkeys(SCALED, _write_scaled),
    **dict.fromkeys(SAME | MOVES, _write_moved),
}
"""Name of an operation -> what has to be rotated for its output to be."""

READERS: dict[str, Handler] = {
    "aten.linear.default": _read_product(0, 1, False),
    "aten.addmm.default": _read_product(1, 2, True),
    "aten.matmul.default": _read_product(0, 1, True),
    **dict.fromkeys(GROUPED, _read_product(0, 1, True)),
    **dict.fromkeys(SUMS, lambda s, node: _write_sum(s, node) and s._pass(node)),
    **dict.fromkeys(SCALED, _read_scaled),
    "aten.pow.Tensor_Scalar": _read_power,
    "aten.square.default": _read_power,
    "aten.linalg_vector_norm.default": lambda s, n: n.args[1:2] in ((), (2,), (2.0,)) and _is_last(n.args[2:3], n),
    "aten.rms_norm.default": _read_norm,
    **dict.fromkeys(SAME | MOVES, lambda s, node: node.args[0] in s.rotated and _keeps_vectors(node) and s._pass(node)),
    # x.type_as(y) does not read the values of y.
    "aten.type_as.default": lambda s, node: node.args[0] not in s.rotated or s._pass(node),
    **dict.fromkeys(IGNORED, lambda s, node: True),
}
"""Name of an operation -> what becomes of a rotated input."""
