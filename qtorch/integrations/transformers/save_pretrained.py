"""`PreTrainedModel.save_pretrained` with a model card, and for models whose parts have been quantized one by one; the
size of quantized models; and an error where a quantized table would get rows.

transformers gives a quantizer no hooks for these. So importing this module, which happens right after
``transformers.modeling_utils`` is imported, puts one step around four methods: models of other packages pass through.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import modeling_utils
from transformers.modeling_utils import PreTrainedModel

from ...dtypes import QuantizedTensor
from ...model_size import with_codes_counted
from .attach import attach
from .model_card import is_generic, model_card
from .quantizer import QtorchHfQuantizer
from .versions import give_conversions

README = "README.md"


def _with_card(save: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(save)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        attach(self, {})
        result = save(self, save_directory, *args, **kwargs)
        card = Path(save_directory) / README
        is_main = args[0] if args else kwargs.get("is_main_process", True)
        if _is_ours(self) and is_main and card.parent.is_dir() and not card.exists():
            card.write_text(model_card(self), encoding="utf-8")
        return result

    return save_pretrained


def _with_card_uploaded(upload: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(upload)
    def _upload_modified_files(self: Any, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        # A card that comes from the Hub is the user's; one from transformers' template says nothing.
        card = Path(working_dir) / README
        if _is_ours(self) and (not card.exists() or is_generic(card.read_text(encoding="utf-8"))):
            card.write_text(model_card(self), encoding="utf-8")
        return upload(self, working_dir, *args, **kwargs)

    return _upload_modified_files


def _with_tables_checked(resize: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(resize)
    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        tables = (self.get_input_embeddings(), self.get_output_embeddings())
        if any(isinstance(getattr(table, "weight", None), QuantizedTensor) for table in tables):
            rows = len(tables[0].weight)
            wanted = (new_num_tokens or rows) + -(new_num_tokens or rows) % (pad_to_multiple_of or 1)
            if wanted != rows:
                raise ValueError(
                    f"resize_token_embeddings: the embedding or the head of this {type(self).__name__} is quantized, "
                    f"and its {rows} rows cannot become {wanted}; resize before quantize_, or call "
                    "qtorch.dequantize_(model), resize, and quantize_ again"
                )
        return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    return resize_token_embeddings


def _is_ours(model: Any) -> bool:
    adapters_only = getattr(model, "_hf_peft_config_loaded", False)
    return isinstance(getattr(model, "hf_quantizer", None), QtorchHfQuantizer) and not adapters_only


for _name, _wrap in {
    "save_pretrained": _with_card,
    "_upload_modified_files": _with_card_uploaded,
    "get_memory_footprint": with_codes_counted,
    "resize_token_embeddings": _with_tables_checked,
}.items():
    setattr(PreTrainedModel, _name, _wrap(getattr(PreTrainedModel, _name)))
give_conversions(modeling_utils, QtorchHfQuantizer)
