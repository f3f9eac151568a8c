"""Experts of transformers' mixtures: the implementation "qtorch", and what the others call.

    model.set_experts_implementation("qtorch")

multiplies all experts of a layer by two calls of `grouped_linear`, without sorting or repeating the tokens. For one
token that takes half as long as "grouped_mm". `from_pretrained` with a `QtorchConfig` chooses it in place of the
default. Layers whose experts are not quantized, or have adapters, run "grouped_mm".

Compiled graphs of "grouped_mm" call transformers' own operator, which is handled here too.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...dtypes import QuantizedTensor, dispatch, products
from ...dtypes.experts import grouped_linear, grouped_linear_call
from ...primitives.tracing import is_compiling

NAME = "qtorch"

DEFAULT = "grouped_mm"
"""The implementation that transformers chooses."""


EXPERTS = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
"""Attributes of a module of experts -> what they are before the version that has them (5.3 the first)."""


def of_experts(module: Any, name: str) -> bool:
    """An attribute of a module of experts."""
    return bool(getattr(module, name, EXPERTS[name]))


def experts_implementations(model: Any) -> dict[str, str | None]:
    """`model.get_experts_implementation()`, where there is that: implementation by the part's config."""
    if hasattr(model, "get_experts_implementation"):
        return dict(model.get_experts_implementation())
    configs = {"": model.config} | {key: getattr(model.config, key, None) for key in model.config.sub_configs}
    return {key: config._experts_implementation for key, config in configs.items() if config is not None}


def takes_experts_implementation(model: Any, name: str) -> bool:
    """Whether the experts of `model` may be run by `name`: before 5.7, only transformers' own ones."""
    if not model._can_set_experts_implementation():
        return False
    try:
        return bool(model.get_correct_experts_implementation(name) == name)
    except ValueError:
        return False


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward (T, H) -> (T, H) of a module of experts that is decorated with `use_experts_implementation`, with the
    experts of each token and their weights, (T, R). An index that names no expert adds nothing."""
    has_gate = of_experts(self, "has_gate")
    up = self.gate_up_proj if has_gate else self.up_proj
    if not (isinstance(up, QuantizedTensor) and isinstance(self.down_proj, QuantizedTensor)):
        return ALL_EXPERTS_FUNCTIONS[DEFAULT](self, hidden_states, top_k_index, top_k_weights)
    experts = top_k_index.reshape(-1, 1)
    # The bias of experts on other devices is read, and multiplied by zero.
    known = experts[:, 0].clamp(0, self.num_experts - 1) if self.has_bias else None
    multiply = grouped_linear_call if is_compiling() else grouped_linear
    y = multiply(hidden_states.to(up.dtype), _stored(up, self), top_k_index)
    if known is not None:
        y = y + (self.gate_up_proj_bias if has_gate else self.up_proj_bias)[known]
    y = self._apply_gate(y) if has_gate else self.act_fn(y)
    y = multiply(y.to(self.down_proj.dtype), _stored(self.down_proj, self), experts)
    if known is not None:
        y = y + self.down_proj_bias[known]
    if of_experts(self, "has_post_expert_norm"):
        y = self.post_expert_norm(y)
    weights = top_k_weights
    if of_experts(self, "_is_expert_parallel"):
        weights = weights.masked_fill((top_k_index < 0) | (top_k_index >= self.num_experts), 0.0)
    y = y.unflatten(0, top_k_index.shape)
    if weights.dtype == y.dtype == hidden_states.dtype:
        return torch.bmm(weights.unsqueeze(1), y).squeeze(1)
    return (y * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _stored(weight: Tensor, experts: Any) -> Tensor:
    """The matrices (E, N, K)."""
    return weight.transpose(1, 2) if experts.is_transposed else weight


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def choose(model: Any) -> None:
    """Let a model with quantized experts run them as above, unless the user has chosen another implementation."""
    if not any(isinstance(p, QuantizedTensor) and p.dim() == 3 for p in model.parameters()):
        return
    now = experts_implementations(model)
    chosen = {key: NAME for key, name in now.items() if name == DEFAULT}
    if chosen and takes_experts_implementation(model, NAME):
        model.set_experts_implementation({**now, **chosen})


# What compiled graphs of "grouped_mm" call; before 5.3 they call torch's operator.
if (_OPERATOR := getattr(torch.ops.transformers, "grouped_mm_fallback", None)) is not None:

    @dispatch.implements_function(_OPERATOR, _OPERATOR.default)
    def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return products.grouped_mm(input, weight, offs)

    @dispatch.implements_aten(_OPERATOR.default)
    def _grouped_mm_below_autograd(func: Any, args: Any, kwargs: Any) -> Tensor:
        return products.grouped_mm(*args, **kwargs)
