"""One rank of `test_resharding`: FSDP2 with bf16 parameters, and a checkpoint of 2 ranks read by 1 and by 2.

Each action runs for every optimizer, in a folder of its own. Actions, in the order in which the test calls them:
    start (2)      trains, saves to FOLDER/two, trains on, and leaves the final parameters in FOLDER/final.pt
    resume (2)     loads FOLDER/two and trains on: the final parameters are those of `start`
    whole (1)      loads FOLDER/two, without FSDP: all states are those of `start` as they were saved; saves FOLDER/one
    back (2)       loads FOLDER/one and trains on: the final parameters are those of `start`
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qtorch.dtypes.blocked_tensor import BlockedTensor
from tests.distributed.processes import worker
from tests.training.small_model import ALL, muon, train

CUT, STEPS = 3, 6

OPTIMIZERS = {name: cls for name, cls in ALL.items() if "W" in name} | {"muon": muon}


def make(name: str, shard: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    # 97 rows: uneven shards; 4224 elements of one axis: flat blocks, which the shards do not cut.
    model = nn.Sequential(nn.Linear(64, 97), nn.GELU(), nn.Linear(97, 64), Scale(64, 66)).bfloat16()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, OPTIMIZERS[name](model.parameters(), lr=1e-2, bf16_stochastic_round=True)


class Scale(nn.Module):
    """A parameter of one axis."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width * times))
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.reshape(-1, self.width).mean(0)


def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that may be sharded, from all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.dequantize() if isinstance(tensor, BlockedTensor) else tensor.detach().clone()
    local = tensor.to_local()
    plain = local.dequantize() if isinstance(local, BlockedTensor) else local
    again = DTensor.from_local(
        plain.detach(), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
    return again.full_tensor()


def states_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def run(action: str, name: str, folder: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = make(name, action != "whole")
    if action == "start":
        train(model, optimizer, range(CUT))
        if name != "_AdamW":
            held = optimizer.state[model[0].weight]["momentum_buffer" if name == "muon" else "exp_avg"]
            assert isinstance(held, DTensor)
            assert isinstance(held.to_local(), BlockedTensor)
        save(model, optimizer, folder / "two")
        saved = states_of(model, optimizer)
        if rank == 0:
            torch.save(saved, folder / "states.pt")
    else:
        load(model, optimizer, folder / ("one" if action == "back" else "two"))
    if action == "whole":
        expected = torch.load(folder / "states.pt")
        found = states_of(model, optimizer)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
        save(model, optimizer, folder / "one")
        return
    train(model, optimizer, range(CUT, STEPS))
    final = [whole(parameter) for parameter in model.parameters()]
    if action != "start":
        assert all(map(torch.equal, final, torch.load(folder / "final.pt")))
    elif rank == 0:
        torch.save(final, folder / "final.pt")


def main(action: str, folder: str) -> None:
    for name in OPTIMIZERS:
        (Path(folder) / name).mkdir(exist_ok=True)
        run(action, name, Path(folder) / name)
    dist.barrier()


if __name__ == "__main__":
    worker(main)
