"""`compile_generate`: the step of a token in transformers' `generate`, compiled."""

import contextlib
from typing import Any

import torch
from tqdm import tqdm

from ...kv_cache import use_quantized_attention

IN_CPP = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True, "size_asserts": False, "cpp.min_chunk_size": 4096}
"""Options of Inductor: all of a graph is in C++. Guards have checked its inputs, and kernels check what they read. Few
elements, such as the norm of a token, take less time than threads to start: each gets as many as the last option."""

WARM_UP = 4
"""Tokens of the warm-up: the first is the prompt's, the second compiles, and the third may do so again."""


def compile_generate(
    model: Any, max_length: int, sequences: int = 1, progress: bool = True, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Compile the step of a token, and return the arguments of `generate` that use it:

        settings = compile_generate(model, max_length=1024)
        model.generate(ids, max_new_tokens=200, **settings)

    The cache has a fixed length, and the step of most models is one graph, which calls kernels without Python; a prompt
    is read as ever. On a CPU, a model whose attention is ``"sdpa"`` gets ``"qtorch"``, see `use_quantized_attention`:
    torch's repeats the keys for all heads of queries. Another number of sequences, a longer cache or other weights
    compile anew, when they first occur.

    Args:
        model: a model of transformers that generates from ids, quantized or not.
        max_length: tokens of a sequence, with its prompt, for which the cache has room.
        sequences: how many are generated together, times beams.
        progress: show how far the warm-up is; it takes as long as compiling the float model, up to a minute or two.
        options: of Inductor, as for `torch.compile`; None: `IN_CPP` on a CPU, and none on other devices.

    Raises:
        TypeError: `model` is not a model of transformers.
        ValueError: it cannot generate, or not with a compiled step; or the lengths are too small.
    """
    from transformers import CompileConfig, PreTrainedModel  # not yet complete when this file is imported

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"compile_generate takes a model of transformers, got {type(model).__name__}")
    if not model.can_generate() or model.main_input_name != "input_ids":
        raise ValueError(f"compile_generate: {type(model).__name__} does not generate from ids")
    if max_length <= WARM_UP or sequences < 1:
        raise ValueError(
            f"compile_generate: got {max_length=} and {sequences=}, want more than {WARM_UP} tokens and a sequence"
        )
    if model.device.type == "cpu" and model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
        with contextlib.suppress(ValueError):  # a model with attention of its own keeps it
            use_quantized_attention(model)
    options = IN_CPP if options is None and model.device.type == "cpu" else options
    mode: Any = None if options else "default"  # torch takes one of the two
    config = CompileConfig(fullgraph=False, dynamic=False, mode=mode, options=options or None)
    config._compile_all_devices = True  # type: ignore[assignment]
    settings = {"cache_implementation": "static", "compile_config": config}
    vars(model).pop("_compiled_call", None)
    run: Any = model.generate
    ids = torch.ones(sequences, 1, dtype=torch.int64, device=model.device)
    with tqdm(total=WARM_UP, desc="compile_generate", unit="token", disable=not progress) as bar:

        def enough(given: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            bar.update()
            return torch.full((len(given),), given.shape[1] > WARM_UP, dtype=torch.bool, device=given.device)

        run(
            ids, attention_mask=torch.ones_like(ids), max_length=max_length, min_new_tokens=WARM_UP, pad_token_id=0,
            do_sample=False, stopping_criteria=[enough], **settings,
        )  # fmt: skip
    if "_compiled_call" not in vars(model):
        raise ValueError(f"compile_generate: transformers does not compile {type(model).__name__}; generate without")
    return settings
