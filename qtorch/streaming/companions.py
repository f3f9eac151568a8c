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

TEMPLATES = "additional_chat_templates"

MAX_BYTES = 1 << 30
"""Of a file that is copied."""


def find_companions(source: Path) -> list[Path]:
    """The files of the folder `source` that its weights need, as paths in it; config.json is left to the caller.

    Their contents are published with the weights, so a link may not lead to a file that has nothing to do with the
    model: only to one of the same folder, or, in the cache of Hugging Face, of the ``blobs`` of the same repository.

    Raises:
        ValueError: one of them, or config.json, is a link to somewhere else, or is too large.
    """
    if not source.is_dir():
        return []
    found = [
        path
        for path in sorted(source.iterdir())
        if path.suffix in SUFFIXES
        and path.name not in {CONFIG, *CONFIGS_OF_QUANTIZATION}
        and not path.name.endswith((INDEX_SUFFIX, ".bin.index.json"))
        and path.is_file()
    ]
    found += sorted(path for path in (source / TEMPLATES).rglob("*") if path.is_file())
    for path in [source / CONFIG, *found]:
        _check(path, source)
    return [path.relative_to(source) for path in found]


def _check(path: Path, source: Path) -> None:
    allowed = [source.resolve()]
    # models--<owner>--<name>/snapshots/<commit>/<file> -> ../../blobs/<hash>
    repository = allowed[0].parent.parent
    if allowed[0].parent.name == "snapshots" and repository.name.startswith("models--"):
        allowed.append(repository / "blobs")
    if not path.is_file():
        return
    target = path.resolve()
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise ValueError(
            f"{path} is a link to {target}, outside of the folder, and would be copied from there: put the file "
            "itself in its place, or remove the link"
        )
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{path}: it has {path.stat().st_size} bytes; files beside the weights have at most {MAX_BYTES}"
        )


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy `find_companions` of the folder `source`.

    Returns:
        The names in `target`, of files and of a folder.
    """
    found = find_companions(source)
    for path in found:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)
    return list(dict.fromkeys(path.parts[0] for path in found))
