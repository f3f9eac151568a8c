"""Steps of a decoder in one call each: fuse_projections joins linear layers of one input, fuse_decoder also what
surrounds the products."""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.formats.compressed_tensors.config_groups import JOINED
from ...dtypes import QuantizedTensor
from ...dtypes.linear import others_take_part
from ...kernels.cpu.decoder import rms_norm, rotate_halves
from ...kernels.custom_ops import TENSORS
from ...kernels.registry import FLOATS
from ...model.install import check_model
from ...primitives.tracing import is_compiling

GROUPS = (*JOINED, ("query", "key", "value"), ("q", "k", "v"))
"""Names of layers that read one input, in the order in which they are called: attention, gated layers."""

ROTATION = "apply_rotary_pos_emb"
"""The function that files of transformers call for rotary embeddings."""

FORMS = ((0.0, True), (0.0, False), (1.0, False))
"""Of norms: what is added to the weight, and whether x is rounded before it is multiplied with it."""

_rotations: set[Any] = set()  # that have taken the place of those of transformers


@dataclass(frozen=True)
class ProjectionReport:
    """What `fuse_projections` has done.

    Attributes:
        fused: names of the first layers of the groups that are one product now.
        skipped: (name, reason) of those that stay apart.
    """

    fused: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return _told("groups of layers are one product", self.fused, self.skipped)


def _told(what: str, fused: Sequence[str], skipped: Sequence[tuple[str, str]]) -> str:
    lines = [f"{len(fused)} of {len(fused) + len(skipped)} {what}"]
    return "\n".join(lines + [f"  {name}: not fused: {reason}" for name, reason in skipped])


class FirstProjection(nn.Linear):
    """The first layer of a group, which has the rows of all. It leaves the outputs of the others with the input, where
    `OtherProjection` finds them; once one was called with another input, each multiplies its own rows."""

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Linear], weight: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layers[0].in_features, layers[0].out_features
        stops = list(itertools.accumulate(layer.out_features for layer in layers))
        self.parts = {name: slice(start, stop) for name, start, stop in zip(names, [0, *stops], stops, strict=False)}
        self.apart = False
        trains = layers[0].weight.requires_grad
        self.weight = nn.Parameter(weight, requires_grad=trains)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.register_parameter("bias", nn.Parameter(torch.cat(biases), requires_grad=trains) if biases else None)
        self.train(layers[0].training)

    def forward(self, input: Tensor) -> Tensor:
        first, *others = self.parts.values()
        if self.apart:
            return self.of_part(first, input)
        y = nn.functional.linear(input, self.weight, self.bias)
        input._projections = self, [y[..., part] for part in others]  # type: ignore[attr-defined]
        return y[..., first]

    def of_part(self, part: slice, input: Tensor) -> Tensor:
        """The product with these rows alone."""
        return nn.functional.linear(input, self.weight[part], None if self.bias is None else self.bias[part])

    def parts_of_state(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """The tensors of the layers under their own names, from that of all, which has this name."""
        path, _, key = name.rpartition(".")
        parent = path.removesuffix(next(iter(self.parts)))
        return {f"{parent}{layer}.{key}": whole[part] for layer, part in self.parts.items()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in (f"{prefix}weight", f"{prefix}bias"):
            if name in destination:
                destination.update(self.parts_of_state(name, destination.pop(name)))


def _join_loaded(parent: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `parent` loads a state: the weights of the layers of each group as one."""
    for first in parent.children():
        for key in ("weight", "bias") if isinstance(first, FirstProjection) else ():
            names = [f"{prefix}{name}.{key}" for name in first.parts]  # type: ignore[union-attr]
            if all(name in state_dict for name in names):
                state_dict[names[0]] = torch.cat([state_dict.pop(name) for name in names])


class OtherProjection(nn.Module):
    """Another layer of a group: its output was computed by the first."""

    def __init__(self, first: FirstProjection, name: str, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.name, self.index = name, list(first.parts).index(name) - 1
        self._first = (first,)  # not a child: it is one of the parent's
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        (first,) = self._first
        owner, outputs = getattr(input, "_projections", None) or (None, [])
        if owner is not first:
            first.apart = True
            return first.of_part(first.parts[self.name], input)
        if self.index == len(outputs) - 1:
            input._projections = None  # type: ignore[attr-defined]
        return outputs[self.index]

    @property
    def weight(self) -> Tensor:
        """The rows of this layer, a view."""
        return self._first[0].weight[self._first[0].parts[self.name]]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, fused"


def fuse_projections(model: nn.Module, groups: Sequence[Sequence[str]] = GROUPS) -> ProjectionReport:
    """Make linear layers that read the same input one product: queries, keys and values; gate and up. Call it after
    `quantize_` or `load_quantized`.

        quantize_(model, int4_weight_only())
        print(fuse_projections(model))

    A layer quantized in rows or groups keeps its bits: the rows of the joined weight are those of the parts. A token of
    1.1B parameters takes 2 to 7% less time. `state_dict` and saved files have the layers as they were. The outputs are
    views of one tensor. If the layers of a group turn out to be called with different inputs, as in cross-attention,
    they go on apart.

    Args:
        model: changed in place.
        groups: names of layers in one parent, in the order in which they are called.

    Returns:
        A report, which names the groups that were left as they are, and why.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has no such group.
    """
    check_model("fuse_projections", model)
    report = _join(model, groups)
    if not (report.fused or report.skipped):
        raise ValueError(f"fuse_projections: {type(model).__name__} has no layers {' or '.join(map(str, groups))}")
    return report


def _join(model: nn.Module, groups: Sequence[Sequence[str]]) -> ProjectionReport:
    """`fuse_projections` of a model that may have none."""
    fused, skipped = [], []
    found = [
        (f"{path}.{group[0]}".lstrip("."), parent, tuple(group))
        for path, parent in list(model.named_modules())
        for group in groups
        if all(isinstance(getattr(parent, name, None), nn.Module) for name in group)
    ]
    for path, parent, names in found:
        layers: list[Any] = [getattr(parent, name) for name in names]
        if (reason := _why_not(layers)) is not None:
            skipped.append((path, reason))
            continue
        try:
            weight = torch.cat([layer.weight.detach() for layer in layers])
        except ValueError as error:  # scales of whole weights, which differ
            skipped.append((path, str(error)))
            continue
        if weight.nbytes > sum(layer.weight.nbytes for layer in layers):
            skipped.append((path, "their scales are quantized in groups that cannot be joined"))
            continue
        first = FirstProjection(names, layers, weight)
        others = [OtherProjection(first, name, layer) for name, layer in zip(names[1:], layers[1:], strict=True)]
        if not any(isinstance(layer, FirstProjection) for layer in parent.children()):
            parent.register_load_state_dict_pre_hook(_join_loaded)
        for name, layer in zip(names, [first, *others], strict=True):
            setattr(parent, name, layer)
        fused.append(path)
    return ProjectionReport(tuple(fused), tuple(skipped))


def _why_not(layers: Sequence[Any]) -> str | None:
    """Why layers cannot be one product, or None."""
    for layer in layers:
        if type(layer) is not nn.Linear:
            return f"{type(layer).__name__} is not a plain nn.Linear"
        if _has_hooks(layer):
            return "a layer has hooks"
        if isinstance(layer.weight, QuantizedTensor) and layer.weight.trains:
            return "the weights are in training"
    kinds = {(type(y.weight), y.weight.dtype, y.weight.device, y.in_features, y.bias is None) for y in layers}
    return None if len(kinds) == 1 else "the layers differ in kind, dtype, device, width or bias"


def _has_hooks(layer: nn.Module) -> bool:
    """Whether something runs around the layer's forward or backward, or in its place."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or "forward" in vars(layer))


@dataclass(frozen=True)
class DecoderReport:
    """What `fuse_decoder` has done.

    Attributes:
        projections: see `fuse_projections`.
        fused: names of the norms, and of the functions for rotary embeddings, that are one kernel now.
        skipped: (name, reason) of those that stay as they were.
    """

    projections: ProjectionReport
    fused: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.projections}\n" + _told("norms and rotary embeddings are one kernel", self.fused, self.skipped)


def _one_call(*tensors: Tensor) -> bool:
    """Whether a kernel may read these: in eager mode, without a gradient, and nothing else looks at operators."""
    if is_compiling() or others_take_part(tensors[0]) or torch._C._len_torch_dispatch_stack():
        return False
    records = torch.is_grad_enabled()
    return all(type(x) in TENSORS and not (records and x.requires_grad) for x in tensors)


class FusedNorm(nn.Module):
    """A norm over the last axis in one kernel; in graphs, on other devices and where gradients are recorded in torch's
    operators, with the bits of the norm that it replaces.

    y = x / sqrt(mean(x^2) + eps) * (weight + offset)
    """

    def __init__(self, weight: nn.Parameter, eps: float, form: tuple[float, bool]) -> None:
        super().__init__()
        self.weight, self.eps, (self.offset, self.rounds) = weight, eps, form

    def forward(self, input: Tensor) -> Tensor:
        if _one_call(input, self.weight):
            y = rms_norm(input, self.weight, self.eps, self.offset, self.rounds)
            if y is not None:
                return y
        return self.in_torch(input)

    def in_torch(self, input: Tensor) -> Tensor:
        """The same in torch's operators."""
        x = input.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounds:
            x = x.to(input.dtype)
            return self.weight * x
        return ((self.offset + self.weight.float()) * x).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


def fuse_decoder(model: nn.Module) -> DecoderReport:
    """Make what every layer of a decoder does around its products one call each, for tokens generated on a CPU without
    `torch.compile`. Call it after `quantize_` or `load_quantized`.

        quantize_(model, int4_weight_only())
        print(fuse_decoder(model))

    - Projections: see `fuse_projections`.
    - Norms over the root mean square (Zhang and Sennrich, 2019), y = x / sqrt(mean(x^2) + eps) * w. The mean adds in
      another order than that of torch's operators: in fp32 a result is within (K / 128 + 8) 2^-24 of the exact one, for
      K channels; in bf16 and fp16 a unit in the last place may differ.
    - Rotary embeddings (Su et al., 2021), with the same bits. They are a function of the model's file,
      `apply_rotary_pos_emb`, which is replaced there: for all models of that file.

    A norm or function that gives other numbers than these equations stays as it is. Compiled graphs, other devices and
    training run torch's operators as before. `state_dict` and saved files have the layers as they were. A token of 1.1B
    parameters takes 6 to 11% less time.

    Args:
        model: changed in place.

    Returns:
        A report, which names what was left as it is, and why.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has none of these.
    """
    check_model("fuse_decoder", model)
    joined = _join(model, GROUPS)
    reasons = _fuse_norms(model)
    for name in sorted({type(module).__module__ for module in model.modules()}):
        if hasattr(file := sys.modules.get(name), ROTATION):
            reasons[f"{name}.{ROTATION}"] = _fuse_rotation(file)
    fused = tuple(name for name, reason in reasons.items() if not reason)
    skipped = tuple((name, reason) for name, reason in reasons.items() if reason)
    if not (reasons or joined.fused or joined.skipped):
        raise ValueError(
            f"fuse_decoder: {type(model).__name__} has no projections of one input, no norms over the root mean square "
            "and no rotary embeddings"
        )
    return DecoderReport(joined, fused, skipped)


def _fuse_norms(model: nn.Module) -> dict[str, str]:
    """By name, why a norm stays as it is; empty if it is fused."""
    reasons: dict[str, str] = {}
    made: dict[nn.Module, FusedNorm] = {}  # a norm may stand in several places
    for path, parent in list(model.named_modules()):
        for name, norm in parent._modules.items():
            if _eps_of(norm) is not None:
                reason = reasons[f"{path}.{name}".lstrip(".")] = "" if norm in made else _fuse_norm(norm, made)
                if not reason:
                    setattr(parent, name, made[norm])
    return reasons


def _eps_of(norm: Any) -> float | None:
    """Of a module that may be such a norm: its only parameter is a weight."""
    if norm is None or type(norm) is FusedNorm or [*norm._parameters] != ["weight"] or norm.weight is None:
        return None
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def _fuse_norm(norm: Any, made: dict[nn.Module, FusedNorm]) -> str:
    weight, eps = norm.weight, _eps_of(norm) or 0.0
    if _has_hooks(norm) or len(inspect.signature(norm.forward).parameters) != 1:
        return "it has hooks, or takes other arguments"
    if type(weight) not in TENSORS or weight.dim() != 1 or not weight.is_cpu or weight.dtype not in FLOATS:
        return f"its weight is a {type(weight).__name__} {tuple(weight.shape)} in {weight.dtype} on {weight.device}"
    x = torch.linspace(-3, 3, 2 * len(weight), dtype=torch.float32, device="cpu").sin().to(weight.dtype).reshape(2, -1)
    for form in FORMS:
        own = FusedNorm(weight, eps, form).train(norm.training)
        if _gives([own.in_torch(x)], lambda: [norm(x)]):
            made[norm] = own
            return ""
    return f"{type(norm).__name__} computes something else"


def _gives(wanted: Sequence[Tensor], function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function of a model, which may be any, gives these bits."""
    try:
        return all(map(torch.equal, wanted, function(*arguments)))
    except (RuntimeError, TypeError, ValueError):
        return False


@torch.no_grad()
def _fuse_rotation(file: Any) -> str:
    own = getattr(file, ROTATION)
    if own in _rotations:
        return ""
    if [*inspect.signature(own).parameters] != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return "it takes other arguments"
    numbers = torch.linspace(-3, 3, 1024, dtype=torch.float32, device="cpu").sin()
    query, key = numbers.reshape(2, 8, 4, 16), numbers[:256].reshape(2, 2, 4, 16)
    cos, sin = numbers[300:428].reshape(2, 4, 16), numbers[600:728].reshape(2, 4, 16)
    if (got := rotate_halves(query, key, cos, sin)) is None:
        return "the CPU kernels are not compiled"
    if not _gives(got, own, query, key, cos, sin):
        return "it computes something else"

    @functools.wraps(own)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        turned = rotate_halves(q, k, cos, sin) if unsqueeze_dim == 1 and _one_call(q, k, cos, sin) else None
        return own(q, k, cos, sin, unsqueeze_dim) if turned is None else turned

    _rotations.add(rotate)
    setattr(file, ROTATION, rotate)
    return ""
