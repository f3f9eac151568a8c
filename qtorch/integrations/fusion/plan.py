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
from .fused_steps import ConvStep, EncodeStep, PlainStep, PoolStep, Step


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
    """Attributes:
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
    """Attributes:
    placeholders: nodes of the inputs.
    output: the arguments of the output.
    steps: in order.
    last_reads: by step, the values whose reals nothing reads after it.
    fused, skipped: see `FusionReport`.
    """

    def __init__(self, graph: fx.Graph, modules: Mapping[str, Any], shapes: Shapes) -> None:
        chains, skipped = find_chains(graph, modules, shapes)
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        (self.output,) = (node.args[0] for node in graph.nodes if node.op == "output")
        self.skipped = tuple(skipped.items())
        self.names = tuple(chain.name for chain in chains)
        inside = {node for chain in chains for node in _nodes_of(chain)}
        ends = {chain.last: chain for chain in chains}
        pools = _pools(graph, modules, ends, inside)
        readers = _readers(chains)
        plain, reals = _read_as_reals(graph, chains, inside, pools)
        borders = _borders(chains)
        self.steps: list[Step] = []
        fused: list[FusedConvolution] = []
        for node in graph.nodes:
            if node in ends:
                chain = ends[node]
                # The first static reader gets its codes at once; other codes are made from the reals.
                written = next((n for n in readers.get(node, ()) if n.static and n.groups == 1), None)
                others = [n for n in readers.get(node, ()) if n != written]
                real = node in reals or bool(others)
                border = borders[node, written] if written else (0, 0)
                self.steps.append(ConvStep(chain, written, border, real, node in plain))
                self.steps += [EncodeStep(node, n, borders[node, n]) for n in others]
                words = (["codes"] if written else []) + (["floats"] if real or node in plain else [])
                fused.append(FusedConvolution(chain.name, chain.steps, " and ".join(words) or "nothing"))
                continue
            if node in inside or node.op == "output":
                continue
            if node in pools:
                self.steps.append(PoolStep(node, pools[node], node in plain))
            elif node.op != "placeholder":
                self.steps.append(PlainStep(node, modules))
            self.steps += [EncodeStep(node, n, borders[node, n]) for n in readers.get(node, ())]
        self.fused = tuple(fused)
        self.last_reads = _last_reads(self.steps)


def _last_reads(steps: Sequence[Step]) -> list[list[fx.Node]]:
    """By step: the values whose reals nothing reads after it."""
    last = {node: i for i, step in enumerate(steps) for node in step.reads()}
    found: list[list[fx.Node]] = [[] for _ in steps]
    for node, i in last.items():
        found[i].append(node)
    return found


def _nodes_of(chain: Chain) -> list[fx.Node]:
    nodes = [chain.conv]
    while nodes[-1] is not chain.last:
        nodes.append(next(iter(nodes[-1].users)))
    return nodes


def _readers(chains: Sequence[Chain]) -> dict[fx.Node, list[Numerics]]:
    """By value: the ways in which convolutions quantize it."""
    readers: dict[fx.Node, list[Numerics]] = {}
    for chain in chains:
        found = readers.setdefault(chain.source, [])
        if chain.numerics not in found:
            found.append(chain.numerics)
    return readers


def _borders(chains: Sequence[Chain]) -> dict[tuple[fx.Node, Numerics], Border]:
    """The widest padding of the convolutions that read the same codes."""
    borders: dict[tuple[fx.Node, Numerics], Border] = {}
    for chain in chains:
        key, (height, width) = (chain.source, chain.numerics), chain.window.padding
        known = borders.get(key, (0, 0))
        borders[key] = max(known[0], height), max(known[1], width)
    return borders


def _pools(
    graph: fx.Graph, modules: Mapping[str, Any], ends: Mapping[fx.Node, Chain], inside: set[fx.Node]
) -> dict[fx.Node, nn.MaxPool2d]:
    """Max-pooling of the result of a chain."""
    found = {}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(module) is nn.MaxPool2d and node not in inside and len(node.args) == 1 and node.args[0] in ends:
            whole = _pair(module.dilation) == (1, 1) and not module.ceil_mode and not module.return_indices
            if whole and not module._forward_hooks:
                found[node] = module
    return found


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _read_as_reals(
    graph: fx.Graph, chains: Sequence[Chain], inside: set[fx.Node], pools: Mapping[fx.Node, Any]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """(values that plain operations read, values that fused ones read as reals)."""
    plain: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in inside and node not in pools:
            plain.update(node.all_input_nodes)
    reals = {chain.other for chain in chains if chain.other is not None}
    reals.update(argument for node in pools for argument in node.all_input_nodes)
    return plain, reals
