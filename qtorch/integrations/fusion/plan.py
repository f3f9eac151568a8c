"""Plan: the steps of a model whose convolutions hand codes to each other, in the order in which they run.

A value has a real form, and codes for each way in which convolutions quantize it. A convolution writes the codes of its
first consumer as it finishes its sums, and the reals only where something else reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...kernels.cpu.conv_codes import Border
from .chains import Chain, Numerics, Shapes, find_chains
from .fused_steps import ConvStep, EncodeStep, PlainStep, PoolStep, Step, as_pair


@dataclass(frozen=True)
class FusedConvolution:
    """One convolution that runs on codes.

    Attributes:
        name: of the module.
        steps: what follows the sums, in one pass: ``("bias", "add", "relu")``.
        result: ``"codes"``, ``"floats"`` or ``"codes and floats"``.
    """

    name: str
    steps: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class FusionReport:
    """What `fuse_convolutions` has done.

    Attributes:
        fused: the convolutions that run on codes, in order.
        skipped: (name, reason) of those that run as before.
        exact: whether the outputs for the example inputs are those of the unfused model, bit for bit.
    """

    fused: tuple[FusedConvolution, ...]
    skipped: tuple[tuple[str, str], ...]
    exact: bool

    def __str__(self) -> str:
        count = len(self.fused) + len(self.skipped)
        equal = "equal to those of the unfused model bit for bit" if self.exact else "not equal to the unfused model's"
        lines = [f"{len(self.fused)} of {count} convolutions run on codes; outputs are {equal}"]
        lines += [f"  {f.name}: {' + '.join(('conv', *f.steps))}, gives {f.result}" for f in self.fused]
        lines += [f"  {name}: not fused: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


class Plan:
    """The steps of a graph in order, and for each the values whose reals nothing reads after it; nodes of the inputs,
    the arguments of the output, and the names of the convolutions that run on codes."""

    def __init__(self, graph: fx.Graph, modules: Mapping[str, Any], shapes: Shapes) -> None:
        chains, skipped = find_chains(graph, modules, shapes)
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        (self.output,) = (node.args[0] for node in graph.nodes if node.op == "output")
        self.skipped = tuple(skipped.items())
        self.names = tuple(chain.name for chain in chains)
        inside = {node for chain in chains for node in chain.nodes}
        ends = {chain.last: chain for chain in chains}
        pools = _pools(graph, modules, ends, inside)
        readers = _readers(chains)
        others = [node for node in graph.nodes if node not in inside and node not in pools]
        # Values that plain operations read, and values that fused ones read as reals.
        plain = {argument for node in others for argument in node.all_input_nodes}
        reals = {chain.other for chain in chains if chain.other is not None}
        reals.update(argument for node in pools for argument in node.all_input_nodes)
        self.steps: list[Step] = []
        fused: list[FusedConvolution] = []
        for node in graph.nodes:
            if node in ends:
                chain, to_encode = ends[node], dict(readers.get(node, {}))
                # The first static reader gets its codes at once; other codes are made from the reals.
                written = next((n for n in to_encode if n.static and n.groups == 1), None)
                border = to_encode.pop(written) if written else (0, 0)
                real = node in reals or bool(to_encode)
                self.steps.append(ConvStep(chain, written, border, real, node in plain))
                words = (["codes"] if written else []) + (["floats"] if real or node in plain else [])
                fused.append(FusedConvolution(chain.name, chain.steps, " and ".join(words) or "nothing"))
            elif node in inside or node.op == "output":
                continue
            else:
                to_encode = readers.get(node, {})
                if node in pools:
                    self.steps.append(PoolStep(node, pools[node], node in plain))
                elif node.op != "placeholder":
                    self.steps.append(PlainStep(node))
            self.steps += [EncodeStep(node, numerics, border) for numerics, border in to_encode.items()]
        self.fused = tuple(fused)
        last = {node: i for i, step in enumerate(self.steps) for node in step.reads}
        self.last_reads = [[node for node, at in last.items() if at == i] for i in range(len(self.steps))]


def _readers(chains: Sequence[Chain]) -> dict[fx.Node, dict[Numerics, Border]]:
    """By value: the numerics by which convolutions quantize it, with the widest padding that such codes have."""
    readers: dict[fx.Node, dict[Numerics, Border]] = {}
    for chain in chains:
        borders, (height, width) = readers.setdefault(chain.source, {}), chain.window.padding
        known = borders.get(chain.numerics, (0, 0))
        borders[chain.numerics] = max(known[0], height), max(known[1], width)
    return readers


def _pools(
    graph: fx.Graph, modules: Mapping[str, Any], ends: Mapping[fx.Node, Chain], inside: set[fx.Node]
) -> dict[fx.Node, nn.MaxPool2d]:
    """Max-pooling of the result of a chain."""
    found = {}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(module) is nn.MaxPool2d and node not in inside and len(node.args) == 1 and node.args[0] in ends:
            whole = as_pair(module.dilation) == (1, 1) and not module.ceil_mode and not module.return_indices
            if whole and not module._forward_hooks:
                found[node] = module
    return found
