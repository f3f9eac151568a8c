"""One of four ranks of `test_a_mesh_of_two_axes`: two replicas of two shards compute what one process does."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.processes import worker
from tests.movement.across import sharded_like_whole
from tests.movement.kinds import BY_NAME

KINDS = (
    "int8_weight_only",
    "nf4_weight_only",
    "int8, a convolution",
    "int8_mixed_precision_training",
    "bitnet_training",
    "int8_weight_only_quantized_training",
    "qat",
)


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for name in KINDS:
        for rows in BY_NAME[name].rows:
            sharded_like_whole(BY_NAME[name], rows, mesh)


if __name__ == "__main__":
    worker(main)
