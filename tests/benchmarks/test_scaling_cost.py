"""benchmarks/scaling_cost.py: numbers computed by hand, bytes that weights really send, and the tables of its page."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks import scaling_cost
from benchmarks.scaling_cost import CLUSTERS, MODELS, WIDTHS, Model
from qtorch import quantize_
from qtorch.training import bitnet_training, int8_mixed_precision_training, int8_weight_only_quantized_training

NDR, ETHERNET = CLUSTERS
SMALL = Model("small", hidden=4, intermediate=8, layers=2, keys=2, vocabulary=10)


def test_collectives() -> None:
    # 7 steps in the node; 7/8 of the data at 450 GB/s
    assert scaling_cost.ring(8e9, 8, NDR) == pytest.approx(7 * 3.4e-6 + 7e9 / 450e9)
    assert scaling_cost.tree(8e9, 8, NDR) == pytest.approx(3 * 3.4e-6 + 7e9 / 450e9)
    # two nodes: 14 steps in them and 1 between; the cards of a node have 8 x 50 GB/s
    assert scaling_cost.ring(16e9, 16, NDR) == pytest.approx(14 * 3.4e-6 + 14e-6 + 15e9 / 400e9)
    # half of 2 GB for each rank comes by its card, then seven times 2 GB from its node
    assert scaling_cost.tree(16e9, 16, NDR) == pytest.approx(3 * 3.4e-6 + 14e-6 + 1e9 / 50e9 + 14e9 / 450e9)
    assert scaling_cost.ring(16e9, 16, ETHERNET) == pytest.approx(14 * 3.4e-6 + 14e-6 + 15e9 / 12.5e9)
    assert scaling_cost.tree(4096e6, 4096, ETHERNET) == pytest.approx(
        3 * 3.4e-6 + 9 * 14e-6 + 511e6 / 1.5625e9 + 7 * 512e6 / 450e9
    )


def test_bytes() -> None:
    # a layer has 144 elements in matrices of 32 rows, and norms of 8; the rest 84
    assert (SMALL.in_layer, SMALL.norms, SMALL.rest, SMALL.parameters) == (144, 8, 84, 388)
    wanted = {
        "float32": (4 * (4 * 144 + 32) + 4 * 84 + 4 * 388) / 2,
        "bfloat16": (4 * (2 * 144 + 16) + 2 * 84 + 2 * 388) / 2,
        "INT8 weights": (4 * (144 + 4 * 32 + 16) + 2 * 84 + 2 * 388) / 2,
        "BitNet, 2 bits": (4 * (36 + 16) + 2 * 84 + 2 * 388) / 2,
    }
    assert {width.name: scaling_cost.sent(SMALL, width, 2) for width in WIDTHS} == wanted
    # on 2 ranks each sends all of what it reduces: y and dx of 4 elements in int32, and two times two scales
    assert scaling_cost.tensor_parallel_bytes(4, 2, 4, 4) == 2 * 4 * 4 + 4 * 4


def test_times() -> None:
    width = WIDTHS[0]
    one_layer = 2 * scaling_cost.ring(608, 8, NDR) + scaling_cost.ring(608, 8, NDR)
    assert scaling_cost.communication(SMALL, width, 8, NDR, scaling_cost.ring) == pytest.approx(
        2 * one_layer + 2 * scaling_cost.ring(4 * 84, 8, NDR)
    )
    assert scaling_cost.computation(SMALL) == pytest.approx(6 * 388 * 8192 / 395.76e12)


def test_models() -> None:
    pytest.importorskip("transformers")
    from benchmarks.pretrain_llama import make_model

    with torch.device("meta"):
        model = make_model("1B", 128, False)
    assert MODELS[0].parameters == sum(p.numel() for p in model.parameters())
    assert MODELS[1].parameters == 8_030_261_248  # as published


class TwoRanks:
    """The first rank of a mesh of two."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    "recipe, dtype, width",
    [
        (int8_mixed_precision_training(), torch.float32, WIDTHS[0]),
        (int8_mixed_precision_training(), torch.bfloat16, WIDTHS[0]),  # codes are chosen after the gather
        (int8_weight_only_quantized_training(), torch.bfloat16, WIDTHS[2]),
        (bitnet_training(), torch.bfloat16, WIDTHS[3]),
    ],
)
def test_widths_are_those_of_the_weights(recipe: Any, dtype: torch.dtype, width: Any) -> None:
    layer = nn.Linear(64, 96)
    quantize_(layer, recipe)
    weight: Any = layer.weight.detach()
    if hasattr(weight, "master"):
        vars(weight)["_precomputed"] = (weight.master._version, weight.master.abs().mean())
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    sent, _ = weight.fsdp_pre_all_gather(TwoRanks(), torch.Size((192, 64)), (64, 1), layer, policy)
    assert sum(tensor.nbytes for tensor in sent) == width.matrix(96, 64)


def test_the_page_has_these_tables() -> None:
    page = scaling_cost.DOCS.read_text()
    for name, text in scaling_cost.pages().items():
        written = page.split(f"<!-- {name}: begin -->\n")[1].split(f"\n<!-- {name}: end -->")[0]
        assert written == text, "run python -m benchmarks.scaling_cost --write-docs"
