"""Chains in the graph of a model: a convolution on codes, and what follows it that one pass over its sums can do.

y = clamp(conv(x) + bias (+ other)),    each step optional
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ...dtypes import ConvWeight
from ...kernels.conv import Window
from ...kernels.cpu.conv import conv_quantizer
from ...kernels.cpu.structs import Quantizer
from ...kernels.registry import lookup

Shapes = Mapping[fx.Node, tuple[int, ...]]
"""Shapes of the fp32 tensors among the nodes' values."""


class Numerics(NamedTuple):
    """How an input is quantized: a static scale and zero point, or a scale of 0 where one is chosen for each image; see
    `cpu_conv` for the quantizer. `shift` leads from codes to bytes without a sign, and the channels of each of `groups`
    are padded one by one (1: none are)."""

    scale: float
    zero: int
    quantizer: Quantizer
    shift: int
    groups: int

    @property
    def static(self) -> bool:
        """Whether the scale is known before the values are."""
        return self.scale > 0


@dataclass(frozen=True)
class Chain:
    """The nodes from a convolution, a module of this name, to the last computed with it: its input, quantized by
    `numerics`, what is added, the bounds of the clamp, and the steps for the report."""

    nodes: tuple[fx.Node, ...]
    name: str
    source: fx.Node
    numerics: Numerics
    window: Window
    other: fx.Node | None
    low: float
    high: float
    steps: tuple[str, ...]

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]


def find_chains(graph: fx.Graph, modules: Mapping[str, Any], shapes: Shapes) -> tuple[list[Chain], dict[str, str]]:
    """The chains of a graph in the order in which they can run, and the convolutions that begin none, with reasons."""
    chains: list[Chain] = []
    skipped: dict[str, str] = {}
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        if reason := _why_not(module) or _why_not_here(node, modules, shapes):
            skipped[str(node.target)] = reason
        else:
            chains.append(_follow(node, module, modules, shapes, taken))
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(chains, key=lambda chain: order[chain.last]), skipped


def _why_not(module: nn.Module) -> str | None:
    """Why a convolution cannot run on codes, or None."""
    weight: Any = module._parameters.get("weight")
    if type(module) is not nn.Conv2d:
        return f"is a {type(module).__name__}, not an nn.Conv2d"
    if not isinstance(weight, ConvWeight) or weight.trains:
        return "its weight is not quantized for inference"
    if weight.scheme.activation is None:
        return "its activation is not quantized"
    kernel = lookup("conv", weight.scheme, weight.scheme.dtype, weight.device.type)
    if kernel.name != "cpu_conv":
        return f"{kernel.name} runs it, and not the compiled kernel for a static scale or one for each image"
    if weight.scheme.dtype is not torch.float32:
        return f"computes in {weight.scheme.dtype}, not in fp32"
    if module.padding_mode != "zeros" or (module.padding == "same" and any(r % 2 for r in _reach(module))):
        return "pads with other numbers than zeros, or more at one end"
    return "has hooks" if module._forward_hooks or module._forward_pre_hooks else None


def _reach(conv: nn.Conv2d) -> list[int]:
    """What `padding="same"` adds at both ends together."""
    return [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]


def _why_not_here(node: fx.Node, modules: Mapping[str, Any], shapes: Shapes) -> str | None:
    source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not isinstance(source, fx.Node) or len(shapes.get(source, ())) != 4:
        return "its input is not a batch of images in fp32"
    if any(len(n.users) > 1 and any(_writes(user, modules) for user in n.users) for n in (node, source)):
        return "its input or its result is written to"
    return None


def _window_of(conv: nn.Conv2d) -> Window:
    """Its window, with paddings in numbers."""
    padding = tuple(conv.padding) if not isinstance(conv.padding, str) else (0, 0)
    if conv.padding == "same":
        padding = tuple(reach // 2 for reach in _reach(conv))
    return Window(tuple(conv.kernel_size), tuple(conv.stride), padding, tuple(conv.dilation), conv.groups)


def _numerics_of(conv: nn.Conv2d) -> Numerics:
    """How its input is quantized."""
    weight: Any = conv.weight
    static = weight.scheme.spec.static
    found = conv_quantizer(weight.scheme.activation, static)
    assert found is not None
    (low, high, asymmetric, given, smallest, largest), shift = found
    quantizer = Quantizer(int(low), int(high), int(asymmetric), int(given), smallest, largest)
    scale = float(weight.act_scale) if static else 0.0
    zero = int(weight.act_zero_point) if static and weight.act_zero_point is not None else 0
    depthwise = conv.groups == conv.in_channels == conv.out_channels
    groups = 1 if depthwise or conv.in_channels // conv.groups % 4 == 0 else conv.groups
    return Numerics(scale, zero, quantizer, shift, groups)


def _follow(node: fx.Node, conv: Any, modules: Mapping[str, Any], shapes: Shapes, taken: set[fx.Node]) -> Chain:
    """The longest chain that begins with a convolution."""
    nodes, other, low, high = [node], None, -math.inf, math.inf
    steps = [] if conv.bias is None else ["bias"]
    clamped = False
    while not clamped and len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        if user in taken or user.op == "output":
            break
        if user.op != "call_module" or type(modules[str(user.target)]) not in IDENTITIES:
            if other is None and (other := _added(user, nodes[-1], shapes)) is not None:
                steps.append("add")
            elif (found := _clamp_of(user, modules)) is not None:
                low, high, word = found
                steps.append(word)
                clamped = True
            else:
                break
        nodes.append(user)
    taken.update(nodes)
    source: Any = node.args[0]
    about = _numerics_of(conv), _window_of(conv), other, low, high, tuple(steps)
    return Chain(tuple(nodes), str(node.target), source, *about)


IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout2d)
"""Modules that return their input in eval mode."""

ADDS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")


def _added(user: fx.Node, last: fx.Node, shapes: Shapes) -> fx.Node | None:
    """The other summand where `user` adds something of the same shape to `last`."""
    if user.target not in ADDS or len(user.args) != 2 or user.kwargs or user.op not in ("call_function", "call_method"):
        return None
    first, second = user.args
    other = second if first is last else first
    if not isinstance(other, fx.Node) or other is last or shapes.get(other) != shapes.get(last):
        return None
    writes = user.target in (operator.iadd, "add_") and first is other
    return None if writes and len(other.users) > 1 else other


def _clamp_of(node: fx.Node, modules: Mapping[str, Any]) -> tuple[float, float, str] | None:
    """(low, high, word) of a node that clamps its one argument."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if type(module) is nn.ReLU:
            return 0.0, math.inf, "relu"
        if isinstance(module, nn.Hardtanh):  # nn.ReLU6 is one
            return float(module.min_val), float(module.max_val), "clamp"
        return None
    if len(node.args) != 1 or set(node.kwargs) - {"inplace"}:
        return None
    if node.target in (functional.relu, torch.relu, torch.relu_, functional.relu_, "relu", "relu_"):
        return 0.0, math.inf, "relu"
    return (0.0, 6.0, "clamp") if node.target is functional.relu6 else None


_WRITERS: tuple[Callable[..., Any], ...] = (operator.iadd, operator.imul, operator.isub, torch.relu_, functional.relu_)


def _writes(node: fx.Node, modules: Mapping[str, Any]) -> bool:
    """Whether a node may write to an argument."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.target in _WRITERS or bool(node.kwargs.get("inplace", False))


def shapes_of(graph_module: fx.GraphModule, inputs: tuple[Any, ...]) -> dict[fx.Node, tuple[int, ...]]:
    """`Shapes`, from one run."""
    shapes: dict[fx.Node, tuple[int, ...]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor) and value.dtype is torch.float32:
                shapes[n] = tuple(value.shape)
            return value

    with torch.no_grad():
        Recorder(graph_module).run(*inputs)
    return shapes
