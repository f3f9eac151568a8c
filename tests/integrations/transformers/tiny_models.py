"""Tiny random models of transformers, with mappings that quantize more than their linear layers."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf

from qtorch import int4_weight_only, int8_weight_only
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.transformers import QtorchConfig
from tests.quantize_model import assert_same
from tests.zoo.architectures import ARCHITECTURES, built

__all__ = ["CASES", "EXPERTS", "I4", "I8", "TEXT", "assert_same", "build", "load", "quantized_names", "run"]

I8 = int8_weight_only()
I4 = int4_weight_only(group_size=32)
EXPERTS = r".*\.experts\.(gate_up_proj|down_proj)"

TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


class Case(NamedTuple):
    """A model of the zoo, the mapping that is used on the fly, and what `quantize_` needs to do the same."""

    architecture: str
    recipe: dict[str, Any]
    left: dict[str, Any] = {}
    options: dict[str, Any] = {}

    @property
    def kind(self) -> Any:
        return getattr(hf, ARCHITECTURES[self.architecture].model)


CASES: dict[str, Case] = {
    "llama": Case("llama", {r".*": I4}, {"lm_head": None}, TEXT),
    "tied_llama": Case(
        "llama", {"model.embed_tokens": I8, r".*": I4}, {"lm_head": I8}, {**TEXT, "tie_word_embeddings": True}
    ),
    "qwen3_moe": Case("qwen3_moe", {EXPERTS: I8, r".*": I4}, {"lm_head": None}, TEXT),
    "mixtral_float_experts": Case("mixtral", {r".*": I8}, {"lm_head": None}, TEXT),
    "mixtral": Case("mixtral", {EXPERTS: I4, r".*": I8}, {"lm_head": None}, TEXT),
    "gpt2": Case("gpt2", {"transformer.wpe": I8, "lm_head": I4}),
    # transformers keeps `wo` in fp32; the head is tied to `shared`.
    "t5": Case("t5", {"shared": I8, r".*": I4}, {"lm_head": I8, r".*\.wo": None}),
    "marian": Case("marian", {r".*": I4}, {"lm_head": None}),
    "vit": Case("vit", {r".*\.projection": I8, r".*": I4}),
    "whisper": Case("whisper", {r".*\.conv\d": I8, r".*": I4}, {"proj_out": None}),
}


def load(folder: Path, *args: Any, name: str = "llama", **kwargs: Any) -> Any:
    """The model in `folder`, quantized while it is loaded as `QtorchConfig` says with these arguments."""
    return CASES[name].kind.from_pretrained(folder, quantization_config=QtorchConfig(*args, **kwargs))


def build(name: str) -> Any:
    return built(CASES[name].architecture, **CASES[name].options)[0]


def run(name: str, model: Any) -> torch.Tensor:
    """What the model generates; the logits of one that does not."""
    if name == "vit":
        return model(torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)).logits
    given = torch.linspace(-1, 1, 16 * 32).view(1, 16, 32) if name == "whisper" else torch.arange(3, 9)[None]
    return model.generate(given, max_new_tokens=5, do_sample=False)


def quantized_names(model: torch.nn.Module) -> set[str]:
    return {n for n, tensor in model.named_parameters(remove_duplicate=False) if isinstance(tensor, QuantizedTensor)}
