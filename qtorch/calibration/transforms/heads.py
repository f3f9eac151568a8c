"""The heads of attention: which scales of a fold are the channels of one head of values."""

from __future__ import annotations

from torch import Tensor, fx

from .folds import Fold
from .graph import ModelGraph
from .propagation import Propagation
from .rules import MOVES_VALUES, rule_of

PRODUCTS = {"aten.scaled_dot_product_attention.default": 2, "aten.matmul.default": 1, "aten.bmm.default": 1}
"""Operation that multiplies values by weights of attention -> the place of the values in its arguments."""

SOURCES = ("aten.linear.default", "aten.addmm.default", "aten.matmul.default")


def heads_of(graph: ModelGraph, fold: Fold) -> list[list[int]]:
    """For each head, the scales of its channels in order; empty if the fold does not go through attention.

    A rotation of channels passes attention and what moves elements; anything else on the way gives no heads.
    """
    found = Propagation(graph, rule_of, fold.name, fold.labels[fold.name]).run()
    heads: dict[tuple[int, ...], None] = {}
    for node, labels in found.at.items():
        if node.op == "placeholder" or str(node.target) in MOVES_VALUES:
            continue
        place = PRODUCTS.get(str(node.target))
        values = found.labels(node.args[place]) if place is not None else None
        if values is not None:
            for head in values.reshape(-1, values.shape[-1]).tolist():
                if any(head):
                    heads.setdefault(tuple(head))
        elif not _is_source(graph, node, labels):
            return []
    free = (fold.free.nonzero().flatten() + 1).tolist()
    channels = [channel for head in heads for channel in head]
    return [list(head) for head in heads] if sorted(channels) == free else []


def _is_source(graph: ModelGraph, node: fx.Node, labels: object) -> bool:
    """Whether a node is the product with the parameter whose rows are scaled."""
    operands = [source for source in node.all_input_nodes if source in graph.parameters]
    return isinstance(labels, Tensor) and bool(operands) and str(node.target) in SOURCES
