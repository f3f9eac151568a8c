"""Rules: how an operation passes on the scales of its inputs, in the form that `Propagation` takes.

An operation without a rule blocks all scales that reach it. A rule may be wrong for an unusual model: folds are
verified numerically before they are used (see `work`).
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from .propagation import SAME, Labels, Propagation, Rule, aligned, compact, shape_of


def rule_of(node: fx.Node) -> Rule:
    """The rule of the operation of a node."""
    name = str(node.target).replace("_.", ".", 1) if in_place(node) else str(node.target)
    if name in RULES:
        return _checked(RULES[name]) if in_place(node) else RULES[name]
    if "grouped_mm" in name:
        return _grouped_mm
    return _item if node.target is getitem else _unknown


def in_place(node: fx.Node) -> bool:
    """Whether an operation writes into its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _checked(rule: Rule) -> Rule:
    """A rule for the operation in place: the scales of what is written into must not change."""

    def checked(p: Propagation, node: fx.Node) -> Labels:
        result = rule(p, node)
        before = p.labels(node.args[0])
        if before is not None and isinstance(result, Tensor):
            fitting = aligned(before, result.dim())
            if fitting is not None and bool((fitting == result).all()):
                return result
        p.block(before, _feeds(node))
        p.block(result, _feeds(node))
        return None

    return checked


def _feeds(node: fx.Node) -> str:
    """The reason of a block."""
    if node.op == "output":
        return "is an output of the model"
    return f"feeds {getattr(node.target, '__name__', node.target)} ({node.name})"


def _unknown(p: Propagation, node: fx.Node) -> Labels:
    _block_all_but(p, node)
    return None


def _ignored(p: Propagation, node: fx.Node) -> None:
    """Nothing depends on the values of the inputs."""


def _block_all_but(p: Propagation, node: fx.Node, *passed: Any) -> None:
    for source in node.all_input_nodes:
        if source not in passed:
            p.block(p.at.get(source), _feeds(node))


def _same(p: Propagation, node: fx.Node) -> Labels:
    """A homogeneous function, f(s x) = s f(x), of each element; other arguments are not scaled."""
    _block_all_but(p, node, node.args[0])
    return p.labels(node.args[0])


def _moved(p: Propagation, node: fx.Node) -> Labels:
    """An operation that moves elements: it moves their labels."""
    if any(shape_of(source) is None for source in node.all_input_nodes):
        return _unknown(p, node)

    def full(source: fx.Node) -> Tensor:
        shape, labels = shape_of(source), p.labels(source)
        assert shape is not None
        if labels is None:
            labels = torch.zeros((), dtype=torch.int32, device="cpu")
        return labels.expand(shape)

    function: Any = torch.reshape if "view" in str(node.target) else node.target
    moved = function(*torch.fx.node.map_arg(node.args, full), **torch.fx.node.map_arg(node.kwargs, full))
    if isinstance(moved, tuple | list):
        return [compact(part) if bool(part.any()) else None for part in moved]
    return compact(moved)


def _item(p: Propagation, node: fx.Node) -> Labels:
    parts, index = p.at.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
    return parts[index] if isinstance(parts, list) and isinstance(index, int) else None


def _multiplied(p: Propagation, node: fx.Node) -> Labels:
    a, b = p.labels(node.args[0]), p.labels(node.args[1])
    if a is not None and b is not None:
        p.block([a, b], _feeds(node))
        return None
    return _fitting(p, node, b if a is None else a)


def _divided(p: Propagation, node: fx.Node) -> Labels:
    p.block(p.labels(node.args[1]), _feeds(node))
    return _fitting(p, node, p.labels(node.args[0]))


def _fitting(p: Propagation, node: fx.Node, labels: Tensor | None) -> Labels:
    """Labels broadcast to the output of a node."""
    shape = shape_of(node)
    if labels is None or shape is None:
        p.block(labels, _feeds(node))
        return None
    return aligned(labels, len(shape))


def _added(p: Propagation, node: fx.Node) -> Labels:
    a, b = node.args[0], node.args[1]
    of_a, of_b = p.labels(a), p.labels(b)
    if of_a is None:
        a, b, of_a, of_b = b, a, of_b, of_a
    if not isinstance(b, fx.Node):
        if b == 0 or (isinstance(b, int | float) and "add" in str(node.target) and p.shift(a, float(b))):  # type: ignore[arg-type]
            return _fitting(p, node, of_a)
        p.block(of_a, _feeds(node))
        return None
    labels = _fitting(p, node, of_a)
    p.require(b, of_b, labels, _feeds(node))  # type: ignore[arg-type]
    return labels


def _indexed(p: Propagation, node: fx.Node) -> Labels:
    """Some rows: x[index], or x[:, index], with labels that the indexed axes have nothing to do with."""
    labels, shape = p.labels(node.args[0]), shape_of(node)
    indexes: Any = node.args[1]
    where = [axis for axis, index in enumerate(indexes) if index is not None]
    if labels is None or shape is None or any(labels.shape[axis] != 1 for axis in where):
        return _unknown(p, node)
    if where != list(range(where[0], where[-1] + 1)):
        return _unknown(p, node)
    after = labels.shape[where[-1] + 1 :]
    before = labels.shape[: where[0]]
    return labels.reshape(*before, *(1,) * (len(shape) - len(before) - len(after)), *after)


def _normalized(p: Propagation, node: fx.Node) -> Labels:
    """A norm with a weight: its output is scaled as the weight; its bias has to be, too."""
    x, weight = node.args[0], _argument(node, 2)
    bias = _argument(node, 3) if "layer_norm" in str(node.target) else None
    p.block(p.labels(x), _feeds(node))
    labels = p.labels(weight)
    if isinstance(bias, fx.Node):
        p.require(bias, p.labels(bias), labels, _feeds(node))
    return None if labels is None else _fitting(p, node, labels)


def _argument(node: fx.Node, index: int) -> Any:
    return node.args[index] if len(node.args) > index else None


def _linear(p: Propagation, node: fx.Node) -> Labels:
    return _product(p, node, node.args[0], node.args[1], _argument(node, 2), transposed=False)


def _addmm(p: Propagation, node: fx.Node) -> Labels:
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return _unknown(p, node)
    return _product(p, node, node.args[1], node.args[2], node.args[0], transposed=True)


def _grouped_mm(p: Propagation, node: fx.Node) -> Labels:
    _block_all_but(p, node, node.args[0], node.args[1])
    return _product(p, node, node.args[0], node.args[1], None, transposed=True)


def _matmul(p: Propagation, node: fx.Node) -> Labels:
    a, b = node.args[0], node.args[1]
    if p.is_parameter(b):
        return _product(p, node, a, b, None, transposed=True)
    of_a, of_b = p.labels(a), p.labels(b)
    shape = shape_of(node)
    summed = (of_a is not None and of_a.shape[-1] != 1) or (of_b is not None and of_b.shape[-2:-1] != (1,))
    if shape is None or summed or (of_a is not None and of_b is not None):
        return _unknown(p, node)
    return _fitting(p, node, of_b if of_a is None else of_a)


def _product(p: Propagation, node: fx.Node, x: Any, weight: Any, bias: Any, transposed: bool) -> Labels:
    """x W^T + b: columns of W, given as W^T where `transposed`, are divided by what x is multiplied by; the rows of W
    and b scale the output."""

    def turned(labels: Tensor | None) -> Tensor | None:
        return labels if labels is None or not transposed else labels.transpose(-1, -2)

    reason = _feeds(node)
    of_x, of_weight, shape = p.labels(x), turned(p.labels(weight)), shape_of(weight)
    if shape is None or (of_x is not None and any(size != 1 for size in of_x.shape[:-1])):
        return _unknown(p, node)
    required = None if of_x is None else -of_x.reshape((1,) * (len(shape) - 1) + (of_x.shape[-1],))
    of_rows = of_columns = None
    if of_weight is not None:
        rows, columns = of_weight.shape[-2:]
        if (columns != 1 and rows != 1) or any(size != 1 for size in of_weight.shape[:-2]):
            p.block(of_weight, reason)
            return None
        if columns == 1:
            of_rows = of_weight
        else:
            of_columns = of_weight
    if of_rows is not None and required is not None:
        p.block([required, of_rows], reason)
        return None
    p.require(weight, turned(of_columns), turned(required), reason)
    labels = None if of_rows is None else of_rows.reshape(-1)
    if isinstance(bias, fx.Node):
        p.require(bias, p.labels(bias), labels, reason)
    return None if labels is None else _fitting(p, node, labels)


def _attention(p: Propagation, node: fx.Node) -> Labels:
    """softmax(q k^T) v: scales of the channels of v pass."""
    _block_all_but(p, node, node.args[2])
    labels, shape = p.labels(node.args[2]), shape_of(node)
    if labels is None or shape is None or labels.dim() < 2 or labels.shape[-2] != 1:
        return _unknown(p, node)
    if node.kwargs.get("enable_gqa") and labels.dim() > 2 and labels.shape[-3] != 1:
        labels = labels.repeat_interleave(shape[-3] // labels.shape[-3], -3)
    return _fitting(p, node, labels)


def _table(rules: dict[Callable[..., Any], str]) -> dict[str, Rule]:
    return {f"aten.{name}": rule for rule, names in rules.items() for name in names.split()}


RULES: dict[str, Rule] = {
    "output": _unknown,
    **_table(
        {
            _ignored: "_assert_tensor_metadata.default empty_like.default zeros_like.default ones_like.default "
            "new_zeros.default new_ones.default new_empty.default sym_size.int",
            _same: "relu.default leaky_relu.default neg.default abs.default dropout.default clone.default "
            "contiguous.default detach.default alias.default lift_fresh_copy.default to.dtype to.dtype_layout "
            "to.device type_as.default mul.Scalar div.Scalar",
            _moved: "view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int t.default "
            "transpose.int permute.default movedim.int unsqueeze.default squeeze.dim squeeze.default expand.default "
            "repeat.default repeat_interleave.self_int slice.Tensor select.int split.Tensor split_with_sizes.default "
            "chunk.default unbind.int cat.default stack.default narrow.default expand_as.default",
            _multiplied: "mul.Tensor",
            _divided: "div.Tensor",
            _added: "add.Tensor sub.Tensor",
            lambda p, node: (_unknown if node.args[2] else _same)(p, node): "masked_fill.Scalar",
            _indexed: "index.Tensor",
            _normalized: "layer_norm.default rms_norm.default",
            _linear: "linear.default",
            _addmm: "addmm.default",
            _matmul: "matmul.default mm.default bmm.default",
            _attention: "scaled_dot_product_attention.default",
        }
    ),
}
"""Name of an operation -> its rule."""

MOVES_VALUES = {*(name for name, rule in RULES.items() if rule is _moved), *SAME, "aten.dropout.default", str(getitem)}
"""Operations that change no element."""
