"""`PreTrainedModel.save_pretrained` with a model card, and for models whose parts have been quantized one by one; the
size of quantized models; and an error where a quantized table would get rows.

transformers gives a quantizer no hooks for these. So importing this module, which happens right after
``transformers.modeling_utils`` is imported, puts one step around four methods: models of other packages pass through.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import modeling_utils
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from ...dtypes import QuantizedTensor
from ...model.module_repr import get_model_size_in_bytes, with_codes_counted
from ..wrappers import around
from .quantizer import QtorchHfQuantizer, attach

# The model card, README.md, of a quantized model: what it was made from, how, and what that has saved.

_CODE = """```python
import qtorch  # lets transformers read the quantized weights
from transformers import {name}

model = {name}.from_pretrained("path or name of this folder")
```"""

TEMPLATE = ("This model card has been automatically generated.", "[More Information Needed]")
"""Words of transformers' template that nobody has filled in."""

README = "README.md"


def model_card(model: Any) -> str:
    """Markdown with a YAML header that the Hub reads."""
    config = model.hf_quantizer.quantization_config
    base, recipe = config.base_model, config.recipe
    if isinstance(recipe, dict):
        lines = [f'    r"{name}": {each},' for name, each in recipe.items()]
        recipe = "\n".join(["{", *lines[:32], *(["    ..."] if len(lines) > 32 else []), "}"])
    name = base.rpartition("/")[2] if base else type(model).__name__
    header = ["library_name: transformers", "tags:", "- qtorch", "- quantized"]
    if base:
        header = [f"base_model: {base}", "base_model_relation: quantized", *header]
    made_from = f" of [{base}](https://huggingface.co/{base})" if base else ""
    parts = [
        "\n".join(["---", *header, "---"]),
        f"# {name}, quantized",
        f"A {type(model).__name__}{made_from}, quantized by qtorch.",
        _CODE.format(name=type(model).__name__),
        "## Recipe",
        f"```python\n{recipe}\n```",
        "## Report",
        _report(model),
    ]
    return "\n\n".join(parts) + "\n"


def _report(model: nn.Module) -> str:
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    by_spec: dict[str, list[Any]] = {}
    for parameter in parameters.values():
        if isinstance(parameter, QuantizedTensor):
            what = parameter.scheme.spec if not hasattr(parameter.scheme, "training") else "in training"
            by_spec.setdefault(f"{what}", []).append(parameter)
    quantized = [parameter for group in by_spec.values() for parameter in group]
    total, now = sum(parameter.numel() for parameter in parameters.values()), get_model_size_in_bytes(model)
    before = now + sum(parameter.numel() * parameter.dtype.itemsize - parameter.nbytes for parameter in quantized)
    share = sum(parameter.numel() for parameter in quantized) / max(total, 1)
    rows = [
        f"| {spec} | {len(group)} | {sum(p.numel() for p in group):,} | {sum(p.nbytes for p in group):,} |"
        for spec, group in by_spec.items()
    ]
    summary = (
        f"- {share:.1%} of {total:,} parameters are quantized.\n"
        f"- Size of the weights: {before:,} bytes before, {now:,} bytes now ({now / max(before, 1):.1%}).\n"
    )
    return "\n".join([summary, "| quantized as | weights | parameters | bytes |", "|---|---|---|---|", *rows])


@around(PreTrainedModel, "save_pretrained")
def _save_with_card(
    save: Callable[..., Any], self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> Any:
    attach(self, {})
    result = save(self, save_directory, *args, **kwargs)
    card = Path(save_directory) / README
    is_main = args[0] if args else kwargs.get("is_main_process", True)
    if _is_ours(self) and is_main and card.parent.is_dir() and not card.exists():
        card.write_text(model_card(self), encoding="utf-8")
    return result


@around(PreTrainedModel, "_upload_modified_files")
def _upload_with_card(
    upload: Callable[..., Any], self: Any, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> Any:
    # A card that comes from the Hub is the user's; one from transformers' template, not filled in, says nothing.
    card = Path(working_dir) / README
    if _is_ours(self) and (not card.exists() or all(words in card.read_text("utf-8") for words in TEMPLATE)):
        card.write_text(model_card(self), encoding="utf-8")
    return upload(self, working_dir, *args, **kwargs)


@around(PreTrainedModel, "resize_token_embeddings")
def _resize_checked(
    resize: Callable[..., Any], self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    tables = (self.get_input_embeddings(), self.get_output_embeddings())
    if any(isinstance(getattr(table, "weight", None), QuantizedTensor) for table in tables):
        rows = len(tables[0].weight)
        new_rows = (new_num_tokens or rows) + -(new_num_tokens or rows) % (pad_to_multiple_of or 1)
        if new_rows != rows:
            raise ValueError(
                f"resize_token_embeddings: a table of this {type(self).__name__} is quantized, and its {rows} rows "
                f"cannot become {new_rows}; resize before quantize_, or dequantize_(model) first"
            )
    return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)


def _is_ours(model: Any) -> bool:
    adapters_only = getattr(model, "_hf_peft_config_loaded", False)
    return isinstance(getattr(model, "hf_quantizer", None), QtorchHfQuantizer) and not adapters_only


def give_conversions(modeling: Any, quantizer_class: type[Any]) -> None:
    """Let quantizers of a class change the conversions of a model that is loaded, as 5.21 does. Before,
    `update_weight_conversions` is not given the model, or (before 5.8) not called."""
    update = getattr(HfQuantizer, "update_weight_conversions", None)
    if update is not None and "model" in inspect.signature(update).parameters:
        return

    @around(modeling, "get_model_conversion_mapping")
    def with_model(
        get: Any, model: Any, key_mapping: Any = None, hf_quantizer: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(hf_quantizer, quantizer_class):
            return get(model, key_mapping, hf_quantizer, *args, **kwargs)
        return hf_quantizer.update_weight_conversions(get(model, key_mapping, None, *args, **kwargs), model)


PreTrainedModel.get_memory_footprint = with_codes_counted(PreTrainedModel.get_memory_footprint)  # type: ignore[method-assign]
give_conversions(modeling_utils, QtorchHfQuantizer)
