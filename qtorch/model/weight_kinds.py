"""Kinds of weights: what a parameter is to the module that holds it, and which of its axes products contract.

Products are y = sum_k x[..., k] w[n, k]: most modules store their weights as (N, K), some as (K, N). A weight is always
quantized as the matrix, or matrices, (..., N, K), so that a scale belongs to an output and a group lies along the sum.

`register_weight_kind` adds a rule for modules of other packages.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..dtypes import ConvWeight, MatrixWeight, QuantizedTensor, TransposedWeight, conv, embedding


@dataclass(frozen=True)
class WeightKind:
    """What a parameter is to its module.

    Attributes:
        name: the kind: ``"linear"``, ``"experts"``, ``"attention"``, ``"embedding"``, ``"convolution"``, ``"router"``;
            ``""`` for a parameter of which nothing is known.
        held: how the quantized weight is held, if not with its own axes: `TransposedWeight` for a weight (..., K, N),
            which products contract along the last axis but one; `ConvWeight` for one of a convolution.
        is_layer: whether it is the weight of a module of torch, which is called by the name of the module.
        obstacle: why no recipe can quantize it, or None.
    """

    name: str
    held: type[MatrixWeight] | None = None
    is_layer: bool = False
    obstacle: str | None = None

    @property
    def is_transposed(self) -> bool:
        """Whether products contract the last axis but one."""
        return self.held is TransposedWeight

    @property
    def is_conv(self) -> bool:
        """Whether it is the weight of a convolution, seen as a matrix (N, kernel positions * input channels)."""
        return self.held is ConvWeight

    def to_matrix(self, weight: Tensor) -> Tensor:
        """The weight as it is quantized, (..., N, K): a copy if it is stored in another order."""
        if self.held is None:
            return weight
        if isinstance(weight, MatrixWeight):
            return weight.matrix
        # A weight in training knows how it is viewed, and a view of it needs no copy.
        return weight.mT if self.is_transposed and isinstance(weight, QuantizedTensor) else self.held.to_matrix(weight)

    def view(self, weight: Tensor) -> Tensor:
        """`to_matrix` of a float weight, without a copy where the order of its elements allows it."""
        return weight.mT if self.is_transposed else self.to_matrix(weight)

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `to_matrix` of a weight of this shape."""
        return tuple(self.view(torch.empty(tuple(shape), device="meta", dtype=torch.float32)).shape)

    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """The parameter of shape `shape` of which `matrix`, quantized, in training or float, is `to_matrix`."""
        if self.held is None:
            return matrix
        if isinstance(matrix, QuantizedTensor) and not matrix.trains:
            return self.held.of(matrix, shape)
        if self.is_transposed and isinstance(matrix, QuantizedTensor):
            return matrix.mT.detach()  # in training: a view, so that the order in memory is that of the matrix
        return self.held.from_matrix(matrix, shape).contiguous()


UNKNOWN = WeightKind("")
LINEAR = WeightKind("linear", is_layer=True)
LINEAR_IN_OUT = WeightKind("linear", TransposedWeight, is_layer=True)
"""Of a linear layer that stores its weight as (inputs, outputs)."""
BLOCKS_IN_OUT = WeightKind("linear", TransposedWeight)
"""Of a linear layer with a block-diagonal matrix, whose blocks are (blocks, inputs, outputs)."""
EXPERTS = WeightKind("experts")
"""Of all experts of a layer, (E, N, K), or (E * N, K)."""
EXPERTS_IN_OUT = WeightKind("experts", TransposedWeight)
"""Of all experts of a layer, (E, K, N)."""
ATTENTION = WeightKind("attention")
"""Projections of attention in one parameter, (3 * N, K)."""
EMBEDDING = WeightKind("embedding", is_layer=True)
CONVOLUTION = WeightKind("convolution", ConvWeight, is_layer=True)

LINEAR_KINDS = frozenset({"linear", "experts", "attention"})
"""What multiplies like a linear layer: ``targets="linear"``."""

KINDS = LINEAR_KINDS | {"convolution", "embedding", "router"}
"""Every kind that can be quantized: ``targets="all"``."""

Rule = Callable[[nn.Module, str], "WeightKind | None"]
"""(module, attribute) -> the kind of that parameter, or None if the rule does not know the module."""

RULES: list[Rule] = []


def register_weight_kind(rule: Rule) -> Rule:
    """Decorator: ask ``rule(module, attribute)`` for the kind of a parameter, before the rules registered earlier.

    Example::

        @qtorch.register_weight_kind
        def mine(module, attribute):
            if type(module).__name__ == "MyLinear" and attribute == "kernel":
                return qtorch.model.weight_kinds.LINEAR_IN_OUT
    """
    if not callable(rule):
        raise TypeError(
            f"register_weight_kind: takes a function (module, attribute) -> WeightKind or None, got {rule!r}"
        )
    RULES.insert(0, rule)
    return rule


def kind_of(module: nn.Module, attribute: str) -> WeightKind:
    """The kind of the parameter `attribute` of `module`."""
    for rule in RULES:
        if (kind := rule(module, attribute)) is not None:
            return kind
    return UNKNOWN


BY_CLASS_NAME: Mapping[str, Mapping[str, WeightKind]] = {
    "Conv1D": {"weight": LINEAR_IN_OUT},
    "Llama4TextExperts": {"gate_up_proj": EXPERTS_IN_OUT, "down_proj": EXPERTS_IN_OUT},
    "JetMoeParallelExperts": {"weight": EXPERTS},
    "DbrxExpertGLU": {"w1": EXPERTS, "v1": EXPERTS, "w2": EXPERTS_IN_OUT},
    "LongcatFlashExperts": {"gate_up_proj": EXPERTS, "down_proj": EXPERTS},
    "Step3p7Experts": {"gate_up_proj": EXPERTS, "down_proj": EXPERTS},
    "RecurrentGemmaRglru": {"input_gate_weight": BLOCKS_IN_OUT, "recurrent_gate_weight": BLOCKS_IN_OUT},
    "GroupedLinearLayer": {"weight": BLOCKS_IN_OUT},
    "WhisperPositionalEmbedding": {"weight": WeightKind("", is_layer=True, obstacle="is a table that is indexed")},
}
"""Modules of transformers that store weights as (inputs, outputs), or the experts of a layer in one parameter, without
saying so, or that use a table in a way of their own: name of the class -> parameter -> kind."""

PROJECTIONS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of the modules that the decorator `use_experts_implementation` of transformers has marked."""


WITHOUT_KERNEL: tuple[type[nn.Module], ...] = (nn.modules.conv._ConvTransposeNd, nn.Bilinear, nn.RNNBase)
"""Modules whose parameters cannot be quantized; the recurrent ones run fused kernels on all their weights (single cells
multiply as linear layers do, and are quantized by name)."""


@register_weight_kind
def _of_torch(module: nn.Module, attribute: str) -> WeightKind | None:
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        why = "is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
        return WeightKind("", obstacle=why)
    own, _, suffix = attribute.rpartition("_")
    if suffix in ("orig", "v", "g") and isinstance(vars(module).get(own), Tensor):
        undone = "prune.remove, remove_weight_norm or remove_spectral_norm of torch.nn.utils"
        why = f"is what a hook makes the {own} from at each call; call {undone} first"
        return WeightKind("", is_layer=suffix != "g", obstacle=why)
    if isinstance(module, WITHOUT_KERNEL):
        return WeightKind("", obstacle=f"is a parameter of {type(module).__name__}, which has no quantized kernel")
    if isinstance(module, nn.MultiheadAttention) and attribute.endswith("proj_weight"):
        return ATTENTION
    if attribute != "weight":
        return None
    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, embedding.EMBEDDINGS):
        if module.max_norm is None:
            return EMBEDDING
        why = f"is the table of an {type(module).__name__} with max_norm, which rewrites the table"
        return WeightKind("embedding", is_layer=True, obstacle=why)
    return CONVOLUTION if isinstance(module, conv.CONVS) else None


@register_weight_kind
def _of_transformers(module: nn.Module, attribute: str) -> WeightKind | None:
    for cls in type(module).__mro__:
        if cls.__name__ in BY_CLASS_NAME and not cls.__module__.startswith("torch."):
            return BY_CLASS_NAME[cls.__name__].get(attribute)
    transposed = getattr(module, "is_transposed", None)
    # The second one came with transformers 5.6; in 5.0 there is the first.
    others = (getattr(module, "has_bias", None), getattr(module, "is_concatenated", None))
    marked = isinstance(transposed, bool) and any(isinstance(each, bool) for each in others)
    if marked and attribute in PROJECTIONS:
        return EXPERTS_IN_OUT if transposed else EXPERTS
    return None


ROUTERS = frozenset({"router", "shared_expert_gate"})
"""Names of modules that choose among the experts of a mixture; so does a ``gate`` that has ``experts`` beside it."""


def is_router(name: str, modules: Container[str]) -> bool:
    """Whether the module called `name`, or one that it is in, chooses among experts; `modules` are all names."""
    parts = name.split(".")
    gates = [index for index, part in enumerate(parts) if part == "gate"]
    return not ROUTERS.isdisjoint(parts) or any(".".join([*parts[:at], "experts"]) in modules for at in gates)


def kind_in(module: nn.Module, name: str, attribute: str, modules: Container[str]) -> WeightKind:
    """`kind_of` a parameter of the module called `name`; those of routers are of the kind ``"router"``."""
    kind = kind_of(module, attribute)
    parameter = getattr(module, attribute)
    lazy = nn.parameter.is_lazy(parameter)
    if kind is UNKNOWN and not lazy and parameter.dim() > 2 and parameter.numel() == max(parameter.shape):
        return replace(kind, obstacle=f"has shape {tuple(parameter.shape)}, a vector: it scales elements one by one")
    multiplied = kind.name == "linear" or (kind is UNKNOWN and attribute == "weight")
    return replace(kind, name="router") if multiplied and is_router(name, modules) else kind
