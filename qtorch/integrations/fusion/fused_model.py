"""fuse_convolutions: a quantized model whose convolutions hand codes to each other, by a `Plan` of steps.

A value has a real form, and codes for each way in which convolutions quantize it. A convolution writes the codes of its
first consumer as it finishes its sums, and the reals only where something else reads them.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...kernels.conv import is_channels_last
from ...kernels.cpu import compiled_library, conv_codes
from ...model.install import check_model
from ...primitives.tracing import is_compiling
from .chains import Chain, Numerics, Shapes, find_chains, shapes_of
from .fused_steps import ConvStep, EncodeStep, NotFinite, PlainStep, PoolStep, Run, Step, Workspace, as_pair


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


def _readers(chains: Sequence[Chain]) -> dict[fx.Node, dict[Numerics, conv_codes.Border]]:
    """By value: the numerics by which convolutions quantize it, with the widest padding that such codes have."""
    readers: dict[fx.Node, dict[Numerics, conv_codes.Border]] = {}
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


WORKSPACES = 4
"""Most shapes of inputs whose memory is kept."""


class FusedModel(nn.Module):
    """A model whose convolutions hand codes to each other; `fuse_convolutions` makes it.

    It holds the model that it was made from, `model`, and shares its parameters. It computes as that one does where
    nothing can be fused: under autocast, a compiler or gradients of the inputs, for other dtypes and devices, for
    inputs that hold a NaN or an infinity.

    Attributes:
        model: the unfused model.
        report: `FusionReport`.
    """

    report: FusionReport

    def __init__(self, model: nn.Module, examples: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self._examples = model, examples
        self._forget()

    def _forget(self) -> None:
        self._plan: Plan | None = None
        self._stamp: Any = None
        self._workspaces: dict[Any, list[Workspace]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_plan", "_stamp", "_workspaces", "_lock")  # made again at the first call
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or is_compiling() or not self._takes(args):
            return self.model(*args, **kwargs)
        plan = self._current_plan()
        if plan is None or len(args) != len(plan.placeholders):
            return self.model(*args)
        tensors = [a for a in args if isinstance(a, Tensor)]
        last = any(is_channels_last(a) for a in tensors)
        key = (tuple(tuple(a.shape) if isinstance(a, Tensor) else a for a in args), last, compiled_library.threads())
        # A workspace that no other thread uses.
        with self._lock:
            idle = self._workspaces.get(key)
            work = idle.pop() if idle else None
        if work is None:
            compiled = compiled_library.library()
            assert compiled is not None, compiled_library.missing()
            work = Workspace(compiled, last)
        try:
            run = Run(work, dict(zip(plan.placeholders, args, strict=True)), self._modules_by_name)
            with torch.no_grad():
                for step, done in zip(plan.steps, plan.last_reads, strict=True):
                    step.run(run)
                    work.release(done)
            return fx.node.map_arg(plan.output, lambda node: run.values[node])
        except NotFinite:
            return self.model(*args)
        finally:
            with self._lock:
                if key not in self._workspaces and len(self._workspaces) >= WORKSPACES:
                    self._workspaces.pop(next(iter(self._workspaces)))
                self._workspaces.setdefault(key, []).append(work)

    def _takes(self, args: tuple[Any, ...]) -> bool:
        """Whether the fused part can run."""
        if self.training or torch.is_autocast_enabled("cpu"):
            return False
        for a in args:
            if isinstance(a, Tensor):
                plain = type(a) is Tensor or type(a) is nn.Parameter
                if not plain or a.dtype is not torch.float32 or not a.is_cpu or not a.numel() or a.is_neg():
                    return False
                if a.requires_grad and torch.is_grad_enabled():
                    return False
            elif not isinstance(a, int | float | bool | str | None):
                return False
        return True

    def _current_plan(self) -> Plan | None:
        """The plan, made anew after weights were exchanged or written to."""
        if self._plan is not None and self._stamp == self._stamp_of(self._plan.names):
            return self._plan
        with self._lock:
            self._workspaces.clear()
            self._modules_by_name = dict(self.model.named_modules())
            plan = self._plan = _plan_of(self.model, self._examples) if compiled_library.library() is not None else None
            if plan is not None:
                self._stamp = self._stamp_of(plan.names)
            return plan

    def _stamp_of(self, names: tuple[str, ...]) -> Any:
        stamp: list[Any] = [compiled_library.library()]
        for name in names:
            parameters = self._modules_by_name[name]._parameters
            weight, bias = vars(parameters["weight"]), parameters["bias"]
            stamp.append(id(weight["qdata"]))
            for tensor in (weight["qdata"], weight["scale"], weight["act_scale"], weight["act_zero_point"], bias):
                if tensor is not None:
                    stamp.append(tensor.data_ptr())
                    stamp.append(0 if tensor.is_inference() else tensor._version)
        return stamp


def _plan_of(model: nn.Module, examples: tuple[Any, ...]) -> Plan:
    """The plan of a model, of which torch.fx makes a graph."""
    try:
        graph = fx.Tracer().trace(model)
        traced = fx.GraphModule(model, graph)
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise ValueError(f"fuse_convolutions: torch.fx cannot trace this {type(model).__name__}: {line}") from error
    return Plan(graph, dict(model.named_modules()), shapes_of(traced, examples))


def fuse_convolutions(model: nn.Module, *example_inputs: Any) -> FusedModel:
    """A model whose convolutions hand codes to each other, for inference on CPU.

    It takes convolutions with activations in 8 bits: static ones (`int8_static_activation_int8_weight`), or with a
    scale for each image (`int8_dynamic_activation_int8_weight(act_granularity=PerAxis(0))`). Bias, addition of a
    shortcut, ReLU or clamp, and for static ones the codes of the next convolution, are one pass over the sums.
    The codes are those that the next convolution would make of its input, and what is added stays in floating point:
    the outputs are those of the unfused model, bit for bit.

    Fold batch normalization before `quantize_`, by `qtorch.training.fold_batch_norm`.

    Args:
        model: quantized, in eval mode; it is not changed, and the result shares its parameters.
        example_inputs: of its forward. Inputs of other shapes can follow.

    Returns:
        A `FusedModel`; print its `report`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it is in training mode, torch.fx cannot trace it, no convolution can be fused, or the outputs for
            the examples are not those of the model.
    """
    check_model("fuse_convolutions", model)
    if model.training:
        raise ValueError("fuse_convolutions: the model is in training mode; call model.eval() first")
    if not any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(example_inputs)):
        raise ValueError("fuse_convolutions: give example inputs of the model's forward")
    if reason := compiled_library.missing():
        raise ValueError(f"fuse_convolutions: needs the compiled CPU kernels: {reason}")
    plan = _plan_of(model, example_inputs)
    if not plan.fused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.skipped) or "it has no nn.Conv2d"
        raise ValueError(f"fuse_convolutions: nothing to fuse: {reasons}")
    fused = FusedModel(model, example_inputs).eval()
    with torch.no_grad():
        wanted, got = (torch.utils._pytree.tree_leaves(m(*example_inputs)) for m in (model, fused))
    exact = all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(wanted, got, strict=True))
    close = exact or all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(wanted, got, strict=True)
        if isinstance(a, Tensor)
    )
    if not close:
        raise ValueError("fuse_convolutions: the outputs for the examples changed; please report the model")
    fused.report = FusionReport(plan.fused, plan.skipped, exact)
    return fused
