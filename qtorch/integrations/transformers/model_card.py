"""The model card, README.md, of a quantized model: what it was made from, how, and what that has saved."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...dtypes import QuantizedTensor
from ...model_size import get_model_size_in_bytes

_CODE = """```python
import qtorch  # lets transformers read the quantized weights
from transformers import {name}

model = {name}.from_pretrained("path or name of this folder")
```"""

GENERIC = "This model card has been automatically generated."


def is_generic(text: str) -> bool:
    """Whether a card is transformers' template, which nobody has filled in."""
    return GENERIC in text and "[More Information Needed]" in text


def model_card(model: Any) -> str:
    """Markdown with a YAML header that the Hub reads."""
    config = model.hf_quantizer.quantization_config
    base = config.base_model
    name = base.rpartition("/")[2] if base else type(model).__name__
    header = ["library_name: transformers", "tags:", *(f"- {tag}" for tag in ("qtorch", "quantized"))]
    if base:
        header = [f"base_model: {base}", "base_model_relation: quantized", *header]
    made_from = f" of [{base}](https://huggingface.co/{base})" if base else ""
    parts = [
        "\n".join(["---", *header, "---"]),
        f"# {name}, quantized",
        f"A {type(model).__name__}{made_from}, quantized by qtorch.",
        _CODE.format(name=type(model).__name__),
        "## Recipe",
        _recipe(config.recipe),
        "## Report",
        _report(model),
    ]
    return "\n\n".join(parts) + "\n"


def _recipe(recipe: Any) -> str:
    if isinstance(recipe, dict):
        lines = [f'    r"{name}": {each},' for name, each in recipe.items()]
        recipe = "\n".join(["{", *lines[:_MOST], *(["    ..."] if len(lines) > _MOST else []), "}"])
    return f"```python\n{recipe}\n```"


_MOST = 32
"""Entries of a mapping that a card shows."""


def _report(model: nn.Module) -> str:
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    by_spec: dict[str, list[Any]] = {}
    for parameter in parameters.values():
        if isinstance(parameter, QuantizedTensor):
            what = parameter.scheme.spec if not hasattr(parameter.scheme, "training") else "in training"
            by_spec.setdefault(f"{what}", []).append(parameter)
    quantized = [parameter for group in by_spec.values() for parameter in group]
    total = sum(parameter.numel() for parameter in parameters.values())
    now = get_model_size_in_bytes(model)
    before = now + sum(parameter.numel() * parameter.dtype.itemsize - parameter.nbytes for parameter in quantized)
    share = sum(parameter.numel() for parameter in quantized) / max(total, 1)
    rows = [
        f"| {spec} | {len(group)} | {sum(p.numel() for p in group):,} | {sum(p.nbytes for p in group):,} |"
        for spec, group in by_spec.items()
    ]
    return "\n".join(
        [
            f"- {share:.1%} of {total:,} parameters are quantized.",
            f"- Size of the weights: {before:,} bytes before, {now:,} bytes now ({now / max(before, 1):.1%}).",
            "",
            "| quantized as | weights | parameters | bytes |",
            "|---|---|---|---|",
            *rows,
        ]
    )
