"""Random bytes that are valid blocks of each type of GGUF, and a writer of files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from qtorch.checkpoint.formats.gguf.block_types import TYPES, BlockType

QUANTIZED = {kind.name: (number, kind) for number, kind in TYPES.items() if kind.spec is not None}

HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (),
}  # fmt: skip
"""Where blocks have numbers in fp16; (0,) where not said."""


def random_bytes(kind: BlockType, shape: tuple[int, ...], seed: int = 0, scale: float | None = None) -> np.ndarray:
    """Bytes (*shape[:-1], bytes of a row) of any blocks without NaN and infinities; fp16 numbers of at most `scale`."""
    rng = np.random.default_rng(seed)
    rows = int(np.prod(shape[:-1]))
    blocks = rng.integers(0, 256, (rows * shape[-1] // kind.size, kind.nbytes), dtype=np.uint8)
    for at in HALVES.get(kind.name, (0,)):
        if scale is None:
            blocks[:, at + 1] &= 0xBF  # not the largest exponent
        else:
            halves = rng.uniform(-scale, scale, (len(blocks), 1)).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 250) if scale is None else 127 + int(np.log2(scale))
    return blocks.reshape(*shape[:-1], kind.row_bytes(shape))


def write(
    path: Path, tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType | None]], architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A file of these tensors, by gguf's own writer; quantized ones as bytes with their type.

    Args:
        metadata: further entries; integers, floats, strings or lists of them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
