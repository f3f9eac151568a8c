"""ModelGraph: the operations of a model between its parameters, inputs and outputs, as `torch.export` finds them.

The export runs the model on tensors without data, so that it needs no memory, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ...statistics import Data
from ...statistics.batches import eval_mode


class ExportFailed(Exception):
    """`torch.export` does not take the model; the message is its first line."""


class _Call(nn.Module):
    """A call of a model with a batch, as a module: what `torch.export` takes."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        super().__init__()
        self.model = model
        self.data = data

    def forward(self, batch: Any) -> list[Tensor]:
        return tensors_of(self.data.call(self.model, batch))


class ModelGraph:
    """The graph of a model.

    Attributes:
        nodes: in the order in which they run.
        order: the index of each node.
        parameters: placeholder -> name of the parameter; tied parameters have one name.
        uses: name of a parameter -> its placeholders.
    """

    def __init__(self, model: nn.Module, data: Data, batch: Any) -> None:
        """Export the model with one batch.

        Raises:
            ExportFailed: the model, or the batch, cannot be exported.
        """
        program = _exported(model, data, dict(batch) if isinstance(batch, Mapping) else batch)
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        names = canonical_names(model)
        stored: Mapping[str, str] = program.graph_signature.inputs_to_parameters
        self.parameters: dict[fx.Node, str] = {}
        self.uses: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            if node.op == "placeholder" and node.name in stored:
                name = names[stored[node.name].removeprefix("model.")]
                self.parameters[node] = name
                self.uses.setdefault(name, []).append(node)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """All names of the parameters of a model -> the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of the output of a model, in floating point."""
    leaves: list[Any] = []
    for leaf in tree_leaves(output):
        leaves += tree_leaves(dict(leaf)) if isinstance(leaf, Mapping) else [leaf]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _exported(model: nn.Module, data: Data, batch: Any) -> Any:
    try:
        with eval_mode(model), torch.no_grad():
            return torch.export.export(_Call(model, data), (batch,), strict=False)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ExportFailed(f"{type(error).__name__}: {lines[0]}") from error


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of the tensor that a node computes; None if it is no tensor, or has no fixed shape."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)
