"""Which format becomes which. Every folder that is read, and a layer of every recipe, is written in every format: what
is read again has the same numbers, bit for bit, or an error says why it was not written. Both are a page:

    python -m tests.formats.test_conversions
"""

import copy
import functools
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("bitsandbytes")

import gguf
import numpy as np

import qtorch
from qtorch.checkpoint.formats.gguf.block_types import type_of
from qtorch.checkpoint.save_folder import SAVE_FORMATS
from tests.attack.readers import FOLDERS, SHAPES
from tests.every_recipe import K_TYPES, NAMES, make
from tests.formats.folders import Layer

PAGE = Path(__file__).parents[2] / "docs/reference/conversions.md"
EXACT = "exact"
TARGETS = ("qtorch", *sorted(SAVE_FORMATS))
RECIPES = (*NAMES, *K_TYPES)
HEAD = """# Conversions

Made by `python -m tests.formats.test_conversions`, which writes every format and reads it again. "exact": every weight
has the same numbers, bit for bit; a GGUF file says nothing of how inputs are quantized. Everything else is refused by
name, for the reason below; nothing is rounded once more unless you ask for it (`requantize=True` of
[GGUF](../guides/gguf.md)). `qtorch` is one file of [`save_quantized`](../guides/save_load.md), `transformers` a folder
that transformers loads where qtorch is installed. Graphs in ONNX are another thing: [Export](../guides/export.md).
"""


def values(weight: torch.Tensor) -> torch.Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, qtorch.dtypes.QuantizedTensor) else weight.detach()


def as_block(weight: Any) -> torch.Tensor:
    """What the package gguf reads of the blocks that are written for a weight."""
    if not isinstance(weight, qtorch.dtypes.QuantizedTensor):
        return weight.detach()
    kind, blocks = type_of(weight)
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])))


def outcome(weight: torch.Tensor, written: Callable[[], torch.Tensor] | None, folder: Path) -> str:
    """`EXACT`, or what the error says; fails where other numbers are written. None: in blocks of GGUF."""
    try:
        found = written() if written else as_block(weight)
    except ValueError as error:
        text = str(error).replace(str(folder), "").partition("\n")[0]
        return re.sub(r"^(\w+: )*(layer\.)?weight:? ?|^[\w-]+: (layer\.)?weight ", "", text)
    assert torch.equal(found.float(), values(weight))
    return EXACT


def cases(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(what is converted, the format, the outcome) of the folders, then of the recipes."""
    for name, make_folder in FOLDERS.items():
        torch.manual_seed(0)
        source, shape = make_folder(folder / name), SHAPES.get(name, (32, 64))
        weight = qtorch.load_quantized(Layer(*shape), source).layer.weight

        def converted(target: str, source: Path, shape: tuple[int, ...]) -> torch.Tensor:
            place = folder / f"{source.name} {target}{'.safetensors' if target == 'qtorch' else ''}"
            qtorch.convert_checkpoint(source, place, format=target)
            return values(qtorch.load_quantized(Layer(*shape), place).layer.weight)

        for target in TARGETS:
            how = functools.partial(converted, target, source, shape)
            yield f"folder {name}", target, outcome(weight, how if target != "gguf" else None, folder)
    for name in RECIPES:
        torch.manual_seed(0)
        model = Layer(64, 256).bfloat16()
        recipe = make(name, 32)
        qtorch.quantize_(model, recipe)

        def saved(target: str, model: Layer, name: str) -> torch.Tensor:
            place = folder / f"{name} {target}{'.safetensors' if target == 'qtorch' else ''}"
            qtorch.save_quantized(model, place, format=target)
            return values(qtorch.load_quantized(Layer(64, 256).bfloat16(), place).layer.weight)

        weight = model.layer.weight
        for target in TARGETS:
            how = functools.partial(saved, target, copy.deepcopy(model), name)
            yield f"`{recipe}`", target, outcome(weight, how if target != "gguf" else None, folder)


def page() -> str:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {(what, target): cell for what, target, cell in cases(Path(folder))}
    text = [HEAD]
    for title, is_folder in (("Formats that are read", True), ("Recipes", False)):
        rows = [what for what in dict.fromkeys(what for what, _ in found) if what.startswith("folder ") == is_folder]
        text += [f"## {title}\n", f"| from | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
        reasons: dict[str, list[str]] = {}
        for what in rows:
            cells = [found[what, target] for target in TARGETS]
            text.append(f"| {what.removeprefix('folder ')} | {' | '.join(c if c == EXACT else '' for c in cells)} |")
            for target, cell in zip(TARGETS, cells, strict=True):
                if cell != EXACT:
                    reasons.setdefault(f"{target}: {cell}", []).append(what.removeprefix("folder "))
        text += ["", *(f"- {reason} ({', '.join(of)})" for reason, of in reasons.items()), ""]
    return "\n".join(text)


def test_the_page_is_what_conversions_do() -> None:
    assert PAGE.read_text() == page(), "python -m tests.formats.test_conversions"


if __name__ == "__main__":
    PAGE.write_text(page())
