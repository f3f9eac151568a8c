"""Why a cell of docs/reference/movement.md is not "yes": the words of the error, and the sentence on the page."""

import re
from typing import NamedTuple

CLEAR = (ValueError, TypeError, RuntimeError, NotImplementedError)
"""Kinds of errors that say something to the caller."""


class Reason(NamedTuple):
    """What the error says (a regular expression), and what the page says."""

    words: str
    sentence: str


REASONS = {
    "blocks": Reason(
        r"cuts blocks of|a view that cuts the contracted axis of",
        "A block of elements with one scale is not cut: parts begin and end with blocks. A padded last group is not "
        "cut off either, nor are the blocks of an optimizer's state along another axis than the first.",
    ),
    "kernel": Reason(
        r"weight of a convolution, which can be sliced along its first axis only",
        "The weight of a convolution is held as a matrix, with all kernel positions of an output in one row, so it is "
        "cut along its outputs alone.",
    ),
    "inputs first": Reason(
        r"a TransposedWeight of shape .* cannot be sharded along its first axis",
        "The weight of a `Conv1D` is (inputs, outputs) to its module and is held as (outputs, inputs); FSDP2 and "
        "DTensor gather rows, which here are parts of all scales. Exchange the module for `nn.Linear`.",
    ),
    "tiles": Reason(
        r"TensorCoreTiledLayout.* cannot be sharded along its first axis",
        "Tiles of several rows are not gathered; FSDP2 shards such a weight in another layout.",
    ),
    "factors": Reason(
        r"differ in their down, so that they cannot be gathered along its rows",
        "A shard of the columns has columns of `down`, a factor of the branch of low rank, and DTensor gathers rows; "
        "cut along the outputs.",
    ),
    "scales of scales": Reason(
        r"would not change that tensor: its scales are quantized, or its codes packed, with the rest",
        "Shards have the scales of NF4 and NVFP4 in fp32, tiles and sparse blocks in a plain layout, and one process "
        "would have to quantize and pack them anew, part by part. Such a checkpoint loads into any number of shards.",
    ),
    "in training": Reason(
        r"in training (that )?is not converted yet|is in training: quantize_\(model, convert",
        "Files are of weights that serve: `quantize_(model, convert())`, or `torch.save`.",
    ),
    "no floats": Reason(r"files are of floats; torch.save it", "Files are of floats; `torch.save` it."),
    "views of training": Reason(
        r"torch.export cannot follow a view of a weight in training",
        "In its non-strict mode torch.export does not see views of such a weight: `convert()` first, or `strict=True`.",
    ),
    "styles": Reason(
        r"ColwiseParallel currently only support nn.Linear and nn.Embedding",
        "The styles of torch are for `nn.Linear` and `nn.Embedding`. `distribute_tensor` cuts the weight.",
    ),
    "whole rows": Reason(
        r"whose scales depend on more than the extremes of a row|has scales that are quantized themselves",
        "Scales of NVFP4 have a scale of the whole, which no rank has; in serving, `ColwiseParallel` alone works.",
    ),
    "whole layer": Reason(
        r"chooses codes and scales anew from whole rows|of its own are those of the whole layer|"
        r"quantized by the whole of its rows",
        "Its codes or ranges are chosen anew while it trains, from the whole layer (weights in codes, LSQ, schedules, "
        "adapters, embeddings in training): train under FSDP2 or DDP, and cut the converted model.",
    ),
}


def reason_of(error: BaseException) -> str:
    """The name of the reason that an error gives, or "wrong: ..."."""
    if isinstance(error, CLEAR):
        for name, reason in REASONS.items():
            if re.search(reason.words, str(error)):
                return name
    return f"wrong: {type(error).__name__}: {str(error).strip()[:300]}"
