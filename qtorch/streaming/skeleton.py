"""A model without data that has the tensors of a checkpoint, so that recipes are assigned to it as to any model.

Only names and shapes are known. Tensors called ``*.weight`` with two axes are the weights of `nn.Linear`, except

- tables: the last name of the module contains "embed" or is one of `TABLES`; they become `nn.Embedding`;
- matrices of the transposed linear layer `Conv1D` of transformers, in models of `CONV1D_MODELS`.

Tensors with the experts of a layer get a module that `weight_kinds` knows, and all other tensors are bare parameters,
which get a recipe only by name, as in `quantize_`.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from ..checkpoint.experts import is_fused
from ..checkpoint.source import Contents

TABLES = frozenset({"wte", "wpe", "shared", "relative_attention_bias", "codebook"})
"""Last names of modules that hold a table, beside those with "embed" in them."""

HEADS_AND_ROUTERS = frozenset({"lm_head", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate"})
"""Last names of linear layers that a single recipe leaves alone: heads, and the routers of mixtures of experts."""

CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
"""Values of `model_type` whose linear layers are `Conv1D`, with weights (in features, out features)."""

TRANSPOSED_EXPERTS = frozenset({"aria", "aria_text", "gpt_oss", "llama4", "llama4_text", "openai_privacy_filter"})
"""Values of `model_type` whose experts are stored as (experts, in features, out features)."""

_CONV1D = re.compile(r"(?:.+\.)?(?:c_attn|c_proj|c_fc|q_attn)\.weight")


class Conv1D(nn.Module):
    """Stands for that of transformers, by whose name its weight is known."""


class JetMoeParallelExperts(nn.Module):
    """Experts in one tensor ``weight``."""


class DbrxExpertGLU(nn.Module):
    """Experts in the matrices ``w1``, ``v1`` and ``w2``."""


class FusedExperts(nn.Module):
    """Experts in the tensors ``gate_up_proj``, ``down_proj``, ..., marked as transformers does."""

    is_concatenated = True

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed


def skeleton(tensors: dict[str, Contents], model_type: str | None = None) -> nn.Module:
    """A model on the meta device.

    Args:
        tensors: what is stored under each name.
        model_type: that of config.json.
    """
    root = nn.Module()
    modules: dict[str, nn.Module] = {"": root}
    for name, contents in tensors.items():
        path, _, attribute = name.rpartition(".")
        if path in modules:
            continue
        module = _experts(name, contents, model_type)
        if module is None and attribute == "weight" and path:
            module = _layer(name, contents, model_type)
        if module is not None:
            modules[path] = module
    for path in list(modules):
        _connect(modules, path)
    for name, contents in tensors.items():
        path, _, attribute = name.rpartition(".")
        owner = _connect(modules, path)
        if attribute not in owner._parameters:
            owner._parameters[attribute] = _parameter(contents)
    return root


def is_head_or_router(module_name: str) -> bool:
    """Whether a single recipe leaves the linear layer of this name alone."""
    return module_name.rpartition(".")[2] in HEADS_AND_ROUTERS


def _experts(name: str, contents: Contents, model_type: str | None) -> nn.Module | None:
    """The module of a tensor that holds the experts of a layer, or None."""
    path, _, attribute = name.rpartition(".")
    if len(contents.shape) == 3 and is_fused(name):
        return FusedExperts(model_type in TRANSPOSED_EXPERTS)
    if len(contents.shape) == 3 and attribute == "weight" and path.endswith((".input_linear", ".output_linear")):
        return JetMoeParallelExperts()
    if model_type == "dbrx" and path.endswith(".experts.mlp") and attribute in ("w1", "v1", "w2"):
        return DbrxExpertGLU()
    return None


def _layer(name: str, contents: Contents, model_type: str | None) -> nn.Module | None:
    """The layer whose weight has this name, or None for a bare parameter."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if len(contents.shape) != 2 or not contents.dtype.is_floating_point:
        return None
    if model_type in CONV1D_MODELS and _CONV1D.fullmatch(name):
        return Conv1D()
    rows, columns = contents.shape
    if module not in HEADS_AND_ROUTERS and ("embed" in module or module in TABLES):
        layer: nn.Module = nn.Embedding(rows, columns, device="meta")
    else:
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer._parameters.pop("bias")
    layer._parameters["weight"] = _parameter(contents)
    return layer


def _parameter(contents: Contents) -> nn.Parameter:
    return nn.Parameter(torch.empty(contents.shape, dtype=contents.dtype, device="meta"), requires_grad=False)


def _connect(modules: dict[str, nn.Module], path: str) -> nn.Module:
    """The module at `path`, made and connected with its parents if need be."""
    if path not in modules:
        modules[path] = nn.Module()
    if path:
        parent, _, last = path.rpartition(".")
        # Not by `add_module`, which refuses names such as "type" that are attributes of every module.
        _connect(modules, parent)._modules[last] = modules[path]
    return modules[path]
