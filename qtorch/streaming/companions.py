"""The files beside the weights of a folder of transformers: configuration, tokenizer, code."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..checkpoint.hf_folder import CONFIG, INDEX_SUFFIX

SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm", ".vocab", ".bpe", ".merges"})
"""Names of files that are copied end in one of these; weights, pictures and the card of the model do not."""

CONFIGS_OF_QUANTIZATION = frozenset(
    {"quantize_config.json", "quant_config.json", "hf_quant_config.json", "qmodel.json"}
)
"""What says how the weights of the source are quantized, which the written ones are not."""


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the files of the folder `source` that its weights need; config.json is left to the caller.

    Returns:
        Their names.
    """
    if not source.is_dir():
        return []
    copied = []
    for path in sorted(source.iterdir()):
        if path.suffix not in SUFFIXES or path.name in {CONFIG, *CONFIGS_OF_QUANTIZATION} or not path.is_file():
            continue
        if path.name.endswith(INDEX_SUFFIX) or path.name.endswith(".bin.index.json"):
            continue
        shutil.copyfile(path, target / path.name)
        copied.append(path.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)
        copied.append(templates.name)
    return copied
