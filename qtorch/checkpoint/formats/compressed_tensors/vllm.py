"""What vLLM serves: recipes whose weights it serves with the same numbers, and its choice of a scheme, as a table.

The table is a copy of the decisions of vLLM 0.33.0: `CompressedTensorsConfig._get_scheme_from_parts` for linear layers,
`CompressedTensorsMoEMethod.get_moe_method` for experts, `CompressedTensorsEmbeddingWNA16Int` for embeddings, with the
conditions that the constructors of the schemes add. The first entry that matches wins; its name is that of the class.
Which kernel a scheme then runs is not in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch

from ....model.install import check_model
from ....model.targets import Target, find_targets, named_errors
from ....recipes.base import Recipe
from ....recipes.mx import Nvfp4WeightOnly, shared_tensor_scale
from ...stacked_experts import is_fused
from .config_groups import JOINED
from .scheme import Args, Group

NOT_QUANTIZED = ("gate", "router", "shared_expert_gate", "lm_head", "embed_out", "score")
"""Last names of linear layers that a single recipe leaves alone: routers, which vLLM does not quantize, and heads."""

_HALVES = (torch.bfloat16, torch.float16)


@named_errors("recipes_for_vllm")
def recipes_for_vllm(model: torch.nn.Module, recipe: Recipe | Mapping[str, Recipe | None]) -> dict[str, Recipe]:
    """Recipes for `quantize_`, by name, that make weights which vLLM serves with exactly these numbers.

    - Scales per channel get the dtype of the model, to which vLLM rounds them, where the recipe has a `scale_dtype`.
    - The scales of NVFP4 tensors become powers of two, which files hold exactly, and layers that vLLM joins share one.
    - The fused experts of a mixture are quantized too; routers and the head are not.

    Args:
        model: with weights in floating point; nothing of it is changed.
        recipe: one recipe, or a mapping of names to recipes, whose choice of layers is kept.

    Returns:
        A mapping with the name of every weight that is to be quantized.

    Raises:
        ValueError: a key of the mapping has no effect.
        TypeError: `model` is not a module.
    """
    check_model("recipes_for_vllm", model)
    targets: list[Target[Recipe]] = find_targets(model, recipe, None)
    chosen: dict[str, tuple[Recipe, torch.Tensor]] = {}
    for target in targets:
        asked = target.slot
        given = asked.recipe
        if not isinstance(recipe, Mapping):
            if _is_left_out(model, target):
                continue
            given = recipe if given is None and is_fused(asked.name) and target.parameter.dim() == 3 else given
        if given is not None:
            name = asked.module_name if asked.kind.is_layer and asked.module_name else asked.name
            chosen[name] = given, target.parameter
    scales = tensor_scales(chosen)
    return {name: adapted(given, weight.dtype, scales.get(name)) for name, (given, weight) in chosen.items()}


def _is_left_out(model: torch.nn.Module, target: Target[Recipe]) -> bool:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    linear = [slot for slot in target.slots if slot.kind.name == "linear"]
    return any(slot.module is head or slot.module_name.rpartition(".")[2] in NOT_QUANTIZED for slot in linear)


def adapted(recipe: Recipe, dtype: torch.dtype, tensor_scale: float | None) -> Recipe:
    """The recipe, and those that it holds, with the options that make its weights exact."""
    changes: dict[str, Any] = {}
    for name in [field.name for field in fields(recipe)]:  # type: ignore[arg-type]
        value = getattr(recipe, name)
        if isinstance(value, Recipe):
            changes[name] = adapted(value, dtype, tensor_scale)
        elif name == "scale_dtype" and value is None and dtype in _HALVES:
            changes[name] = dtype
        elif name == "tensor_scale" and value is None and tensor_scale is not None:
            changes[name] = tensor_scale
    changes = {name: value for name, value in changes.items() if value != getattr(recipe, name)}
    return replace(recipe, **changes) if changes else recipe  # type: ignore[type-var]


def tensor_scales(chosen: Mapping[str, tuple[Recipe, torch.Tensor]]) -> dict[str, float]:
    """The scale of every tensor in NVFP4, shared by those that vLLM joins."""
    absmax = {
        name: float(weight.detach().abs().max()) if weight.numel() else 0.0
        for name, (recipe, weight) in chosen.items()
        if is_nvfp4(recipe) and not weight.is_meta
    }
    return {name: shared_tensor_scale(max(absmax.get(other, 0.0) for other in _joined_with(name))) for name in absmax}


def is_nvfp4(recipe: Any) -> bool:
    """Whether a recipe, or one that it holds, makes NVFP4 weights."""
    if isinstance(recipe, Nvfp4WeightOnly):
        return True
    return is_dataclass(recipe) and any(is_nvfp4(getattr(recipe, field.name)) for field in fields(recipe))


def _joined_with(module: str) -> Iterable[str]:
    """Names of the modules that vLLM may join with a module, itself included."""
    parent, dot, last = module.rpartition(".")
    for names in JOINED:
        if last in names:
            return [f"{parent}{dot}{name}" for name in names]
    return [module]


Pattern = Mapping[str, Any]
"""Fields of `Args`, each with its value or a tuple of values."""

_SM90 = 90


class Decision(NamedTuple):
    """An entry of a table: the class of a scheme, which takes groups in some formats (empty for all) whose weights
    match a pattern and whose inputs match one of several (None: inputs in floating point). Its constructor may refuse
    some numbers of bits; where it `needs_hopper`, vLLM asks for the GPU, and not for the type of the input."""

    scheme: str
    weights: Pattern
    inputs: tuple[Pattern | None, ...] = (None, {})
    formats: tuple[str, ...] = ()
    checks_bits: bool = False
    needs_hopper: bool = False

    def matches(self, group: Group, capability: int | None) -> bool:
        """Whether vLLM takes the scheme for a group, on a GPU of this capability if it is given."""
        inputs = group.input_activations
        if self.needs_hopper and inputs is not None:
            served = inputs.type == "float" if capability is None else capability == _SM90
            if not served:
                return False
        return (
            _is_like(group.weights, self.weights)
            and any(_is_like(inputs, pattern) for pattern in self.inputs)
            and (not self.formats or group.format in self.formats)
        )


def _is_like(args: Args | None, pattern: Pattern | None) -> bool:
    if args is None or pattern is None:
        return args is None and pattern is None
    return all(getattr(args, name) in (of if isinstance(of, tuple) else (of,)) for name, of in pattern.items())


_DYNAMIC = (True, "local")
_NVFP4 = {"strategy": "tensor_group", "group_size": 16, "type": "float", "num_bits": 4, "symmetric": True}
_MXFP4 = {"strategy": "group", "group_size": 32, "type": "float", "num_bits": 4, "symmetric": True}
_MXFP8 = {**_MXFP4, "num_bits": 8, "scale_dtype": "torch.uint8"}
_FP8 = {"type": "float", "symmetric": True, "dynamic": False, "strategy": ("tensor", "channel", "block")}
_FP8_INPUTS = (
    {"type": "float", "dynamic": _DYNAMIC},
    {"type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"},
)
_INT8 = {"num_bits": 8, "strategy": ("tensor", "channel"), "symmetric": True, "dynamic": False}
_INT4 = {"num_bits": 4, "strategy": ("channel", "group"), "symmetric": True, "dynamic": False}
_FEW_BITS = {"strategy": ("channel", "group"), "dynamic": False}
_INTEGERS = {**_FEW_BITS, "type": "int"}
_INT_INPUTS = {"type": "int", "symmetric": True, "dynamic": _DYNAMIC, "strategy": ("token", "group")}
_PER_TENSOR = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
_PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": _DYNAMIC}

_PACKED = ("pack-quantized",)
_WITH_INPUTS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


def _mxfp4_fp8(scheme: str) -> Decision:
    return Decision(scheme, _MXFP4, ({"type": "float", "num_bits": 8},))


def _w4a8_fp8(scheme: str) -> Decision:
    inputs = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    return Decision(scheme, {**_INT4, "strategy": "group"}, (inputs,), needs_hopper=True)


def _wna16(scheme: str) -> Decision:
    return Decision(scheme, _FEW_BITS, (None,), _PACKED, checks_bits=True)


def _wna_int(bits: int) -> Decision:
    inputs = {**_INT_INPUTS, "num_bits": bits}
    return Decision(f"CompressedTensorsWNA{bits}Int", _INTEGERS, (inputs,), _PACKED, checks_bits=True)


LINEAR = (
    Decision("CompressedTensorsW4A4Fp4(use_a16=True)", _NVFP4, (None,)),
    Decision("CompressedTensorsW4A4Fp4", _NVFP4, (_NVFP4,)),
    _mxfp4_fp8("CompressedTensorsW4A8Mxfp4"),
    Decision("CompressedTensorsW4A4Mxfp4", _MXFP4),
    Decision("CompressedTensorsW8A8Mxfp8", _MXFP8),
    _w4a8_fp8("CompressedTensorsW4A8Fp8"),
    _wna_int(8),
    _wna_int(4),
    _wna16("CompressedTensorsWNA16"),
    Decision("CompressedTensorsW8A8Fp8", _FP8, _FP8_INPUTS, _WITH_INPUTS),
    Decision("CompressedTensorsW8A16Fp8", _FP8, formats=_WITH_INPUTS),
    Decision("CompressedTensorsW8A8Int8(is_static_input_scheme=True)", _INT8, (_PER_TENSOR,), _WITH_INPUTS),
    Decision("CompressedTensorsW8A8Int8", _INT8, (_PER_TOKEN,), _WITH_INPUTS),
    Decision("CompressedTensorsW4A8Int", _INT4, (_PER_TOKEN,), _WITH_INPUTS),
)
"""Linear layers. CompressedTensorsWNA8O8Int, which comes before WNA8Int, needs quantized outputs and is left out."""

EXPERTS = (
    _mxfp4_fp8("CompressedTensorsW4A8Mxfp4MoEMethod"),
    Decision("CompressedTensorsW4A4Mxfp4MoEMethod", _MXFP4),
    Decision("CompressedTensorsW8A8Mxfp8MoEMethod", _MXFP8),
    _wna16("CompressedTensorsWNA16MoEMethod"),
    Decision("CompressedTensorsW4A4Nvfp4MoEMethod", _NVFP4, (None, _NVFP4)),
    Decision("CompressedTensorsW8A8Fp8MoEMethod", _FP8, _FP8_INPUTS, _WITH_INPUTS),
    Decision("CompressedTensorsW8A8Int8MoEMethod", _INT8, (_PER_TOKEN,), _WITH_INPUTS),
    _w4a8_fp8("CompressedTensorsW4A8Fp8MoEMethod"),
    Decision("CompressedTensorsW4A8Int8MoEMethod", _INT4, (_PER_TOKEN,), _WITH_INPUTS),
)
"""The experts of a mixture."""

_OF_TABLES = {**_INTEGERS, "symmetric": True}
EMBEDDING = (Decision("CompressedTensorsEmbeddingWNA16Int", _OF_TABLES, (None,), _PACKED, checks_bits=True),)
"""Tables of embeddings."""

_ROUNDED = "WNA16 WNA16MoEMethod WNA8Int WNA4Int W4A8Int W4A8Int8MoEMethod W4A8Fp8 W4A8Fp8MoEMethod EmbeddingWNA16Int"
SCALES_IN_THE_DTYPE_OF_THE_MODEL = frozenset(f"CompressedTensors{name}" for name in _ROUNDED.split())
"""Schemes that hold the scales of the weight in the dtype of the model; the others hold them as they are stored."""


def decide(group: Group, table: tuple[Decision, ...] = LINEAR, capability: int | None = None) -> str:
    """The scheme that vLLM takes for the layers of a group; on a GPU of a capability, if given (90 is Hopper)."""
    weights = group.weights
    decision = next((decision for decision in table if decision.matches(group, capability)), None)
    if decision is None or weights is None:
        inputs = _word(group.input_activations)
        raise ValueError(f"vLLM has no scheme for weights {_word(weights)} with inputs {inputs}")
    if decision.checks_bits:
        bits, scheme = weights.num_bits, decision.scheme
        if not 2 <= bits <= 8:
            raise ValueError(f"{scheme}: vLLM has kernels for integers of 2 to 8 bits, these have {bits}")
        if not weights.symmetric and bits not in (4, 8):
            raise ValueError(f"{scheme}: vLLM has zero points for codes of 4 and 8 bits only, these have {bits}")
    return decision.scheme


def _word(args: Args | None) -> str:
    if args is None:
        return "in floating point"
    of_groups = args.strategy in ("group", "tensor_group")
    where = f"in groups of {args.group_size}" if of_groups else f"per {args.strategy}"
    kind = "" if args.symmetric else "asymmetric "
    return f"{kind}{args.type}{args.num_bits} {where}{' computed on each call' if args.dynamic else ''}"
