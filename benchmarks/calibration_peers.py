"""Other packages that calibrate, for `bench_calibration`: each quantizes the linear layers of a small Llama, not its
head, and leaves the dequantized weights in the model.

auto-round     its own defaults, 200 iterations a block.
torchao gptq   torchao's `GPTQConfig`, its own defaults, block by block as in its example. It asserts CUDA, takes the
               quantizer from `mslk` and knows 4 bits: its source is run here without the assertion, with that quantizer
               written in torch, and with the number of bits given.

`pip install --target DIR --no-deps PACKAGE` and PYTHONPATH bring one without touching the environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def auto_round(model: nn.Module, bits: int, group_size: int, batches: Sequence[Any]) -> float:
    """Returns the bits of a weight with everything, of its GPTQ format: scales in 16 bits, zero points as codes."""
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({chr(byte): byte for byte in range(256)}, unk_token=chr(0)))
    ids = torch.cat([batch["input_ids"] for batch in batches])
    AutoRound(
        model,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=chr(0)),  # required, and not used
        scheme="W4A16",
        bits=bits,
        group_size=group_size,
        sym=False,
        iters=200,
        dataset=torch.utils.data.DataLoader([{"input_ids": row} for row in ids], batch_size=8),  # type: ignore[arg-type]
        seqlen=ids.shape[1],
        nsamples=len(ids),
        device_map="cpu",
        layer_config={"lm_head": {"bits": 16}},
    ).quantize()
    return bits + (16 + bits) / group_size


def torchao_gptq(model: nn.Module, bits: int, group_size: int, batches: Sequence[Any]) -> float:
    """Returns the bits of a weight with everything, of its `Int4Tensor` in a model of 16 bits: scales and zero points
    are numbers of that dtype."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    api = _torchao_gptq(bits)
    layers: Any = model.model.layers  # type: ignore[union-attr]
    base = Int4WeightOnlyConfig(group_size=group_size)
    with contextlib.redirect_stdout(io.StringIO()):
        for block in layers:
            quantize_(block, api["GPTQConfig"](step="observe", base_config=base))
            for batch in batches:
                model(**batch)
            quantize_(block, api["GPTQConfig"](step="convert", base_config=base))
    return bits + 32 / group_size


def _torchao_gptq(bits: int) -> dict[str, Any]:
    """The names of torchao's module of GPTQ, for codes of so many bits on a CPU."""
    from torchao.prototype.gptq import api

    source = inspect.getsource(api)
    for old, new in {
        'assert device.type == "cuda", "GPTQ only supports CUDA currently"': "pass",
        "torch.cuda.synchronize()": "pass",
        "n_bit = 4": f"n_bit = {bits}",
    }.items():
        assert old in source, old
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": api.__name__, "__package__": api.__package__}
    exec(compile(source, str(api.__file__), "exec"), names)

    def row_quantize_zp(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scales and zero points (G, N) from the least and the largest value, as in mslk; the codes are not used."""
        low, high = x.unflatten(1, (-1, group_size)).float().aminmax(dim=2)
        scales = (high - low).clamp(min=1e-6) / (2**bits - 1)
        return x, scales.t().contiguous(), (low + scales * 2 ** (bits - 1)).t().contiguous()

    def dequantized(qdata: Tensor, scale: Tensor, zero_point: Tensor, block_size: Sequence[int], **_: Any) -> Tensor:
        values: Tensor = names["_int4_row_dequantize_zp"](qdata, scale, zero_point, block_size[1])
        return values

    names |= {"int4_row_quantize_zp": row_quantize_zp, "pack_int4": lambda codes: codes, "Int4Tensor": dequantized}
    return names


PEERS: dict[str, tuple[str, Callable[[nn.Module, int, int, Sequence[Any]], float]]] = {
    "auto-round": ("auto_round", auto_round),
    "torchao gptq": ("torchao", torchao_gptq),
}
"""Name -> (what has to be importable, (model, bits, group_size, batches) -> bits of a weight with everything)."""


def importable(peer: str) -> bool:
    return importlib.util.find_spec(PEERS[peer][0]) is not None
