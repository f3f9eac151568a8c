"""Movements between two processes. Each function runs on both ranks; what it compares with is made on each.

`table` starts this file on each rank: python -m torch.distributed.run ... across.py RESULT MOVEMENT ...
"""

import copy
import functools
import itertools
import json
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from qtorch import quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.integrations.tensor_parallel import ColwiseParallel, RowwiseParallel
from qtorch.training import MasterWeight
from qtorch.training.weights.gathered import GatheredWeight
from tests.distributed.processes import worker
from tests.movement.holding import as_bytes, equal, parts, same_bits, same_module, same_tensor, snapshot, state
from tests.movement.kinds import KINDS, LAYOUT, Kind
from tests.movement.movements import Movement, cell

PROCESSES = "Several processes"

ACROSS: dict[str, Movement] = {}


class Model(nn.Module):
    """A module, and a parameter that trains, whatever it is."""

    def __init__(self, kind: Kind, seed: int, rows: int | None = None) -> None:
        super().__init__()
        self.inner = kind.make(seed, rows)
        self.gain = nn.Parameter(torch.full((2,), 1.0 + seed))

    @property
    def weight(self) -> Tensor:
        return self.inner.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain.sum()


def across(name: str) -> Any:
    """Decorator: make a function of a kind a column."""

    def decorate(function: Any) -> Any:
        ACROSS[name] = Movement(name, PROCESSES, function)
        return function

    return decorate


def _inputs(kind: Kind) -> list[Tensor]:
    """One for each rank."""
    x = kind.inputs()
    return [x, x.flip(0)]


def _backward(module: nn.Module, x: Tensor) -> Tensor:
    """The output; gradients add up. Rounding has the same noise each time."""
    torch.manual_seed(11)
    y: Tensor = module(x)
    y.float().square().mean().backward()
    return y.detach()


def _mean_gradients(
    whole: nn.Module, kind: Kind, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The outputs for the inputs of both ranks, and the mean of the gradients."""
    outputs, found = [], []
    buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    for x in _inputs(kind):
        with torch.no_grad():
            for name, buffer in whole.named_buffers():
                buffer.copy_(buffers[name])
        whole.zero_grad()
        outputs.append(_backward(whole, x.to(dtype) if x.is_floating_point() else x))
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in whole.named_parameters()})
    one, two = found
    mean = {name: None if grad is None else (grad + two[name]) / 2 for name, grad in one.items()}
    return outputs, mean


def _same_gradients(model: nn.Module, wanted: dict[str, Tensor | None], bound: float = 0.0) -> None:
    for name, parameter in model.named_parameters():
        grad, expected = parameter.grad, wanted[name]
        assert (grad is None) is (expected is None), f"{name} has {'no' if grad is None else 'a'} gradient"
        if grad is not None and expected is not None:
            got = grad.full_tensor() if isinstance(grad, DTensor) else grad
            equal(got, expected, f"the gradient of {name}", bound)


def _on_both(tensor: Tensor, what: str) -> None:
    """Assert that both ranks have the same bytes."""
    for name, part in parts(tensor).items():
        mine = as_bytes(part)
        both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(both, mine)
        assert all(torch.equal(both[0], other) for other in both), f"{what}: {name or 'it'} differs between ranks"


@across("`DistributedDataParallel`")
def ddp(kind: Kind) -> None:
    """All ranks get the weights of rank 0, the mean of the gradients, and stay equal in a step."""
    rank = dist.get_rank()
    model, whole = Model(kind, seed=rank), Model(kind, seed=0)
    replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    same_module(model, whole, "at the start")
    outputs, gradients = _mean_gradients(whole, kind)
    equal(_backward(replica, _inputs(kind)[rank]), outputs[rank], "the output")
    _same_gradients(model, {name: gradients[name] for name in gradients}, 1e-6)
    torch.manual_seed(rank)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01).step()
    for name, parameter in model.named_parameters():
        _on_both(parameter, f"{name} after a step")


def _shard(model: Model, mesh: DeviceMesh | None = None, dtype: torch.dtype | None = None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model.inner, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _bound(kind: Kind) -> float:
    """Of results that are not those of one process bit for bit: other kernels, sums over ranks."""
    return 1e-5 if kind.family == LAYOUT or kind.name == "bitnet_training" else 0.0


def sharded_like_whole(kind: Kind, rows: int, mesh: DeviceMesh | None = None) -> None:
    """A sharded model computes what it does in one process."""
    rank = dist.get_rank()
    model, whole = Model(kind, 0, rows), Model(kind, 0, rows)
    weight = whole.weight
    _shard(model, mesh)
    local = model.weight.to_local()  # type: ignore[attr-defined]
    assert type(local) is type(weight.detach()), f"a shard is a {type(local).__name__}"
    outputs, gradients = _mean_gradients(whole, kind)
    x = _inputs(kind)[rank % 2]
    equal(_backward(model, x), outputs[rank % 2], "the output", _bound(kind))
    _same_gradients(model, gradients, max(1e-6, _bound(kind)))
    with torch.no_grad():
        equal(model(x), outputs[rank % 2], "the second output", _bound(kind))
    _is_gathered(model, weight, kind)


def _is_gathered(model: Model, weight: Tensor, kind: Kind) -> None:
    assert isinstance(model.inner, FSDPModule)
    model.inner.unshard()
    got, wanted = model.weight.detach(), weight.detach()
    codes = isinstance(got, GatheredWeight)
    if codes or kind.name == "bitnet_training":  # whose scale is a mean over all shards
        converted = wanted.convert()  # type: ignore[attr-defined]
        equal(_floats(got), _floats(converted), "what is gathered", 0.0 if codes else 1e-6)
    elif not _is_exact(kind, wanted):
        assert type(got) is type(wanted)
        equal(_floats(got), _floats(wanted), "what is gathered")
    else:
        same_tensor(got, wanted, "what is gathered")
    model.inner.reshard()


def _is_exact(kind: Kind, weight: Any) -> bool:
    """Whether shards have the codes and scales of the whole; else another layout, or scales of scales as floats: the
    same numbers."""
    spec = weight.scheme.weight if isinstance(weight, QuantizedTensor) else None
    return kind.family != LAYOUT and getattr(spec, "scale_spec", None) is None


def _floats(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


@across("FSDP2")
def fsdp(kind: Kind) -> None:
    """Outputs and gradients are those of one process, and the gathered weight is the one that was sharded."""
    sharded_like_whole(kind, kind.rows[0])


@across("FSDP2, uneven rows")
def fsdp_uneven(kind: Kind) -> None:
    sharded_like_whole(kind, kind.rows[1])


@across("FSDP2, `param_dtype`")
def fsdp_param_dtype(kind: Kind) -> None:
    """With `param_dtype=torch.bfloat16` codes are those of one process in fp32: only what is not quantized is rounded.

    Layers that learn ranges hold plain parameters, which FSDP2 rounds itself: they compute as ``layer.bfloat16()``.
    """
    model, whole, wanted = Model(kind, 0), Model(kind, 0), kind.make(0).weight
    _shard(model, dtype=torch.bfloat16)
    weight = whole.weight.detach()
    whole.bfloat16()
    if isinstance(weight, MasterWeight):
        held = type(weight).of(weight.master, weight.scheme.training, torch.bfloat16)  # type: ignore[attr-defined]
        whole.inner._parameters["weight"] = nn.Parameter(held)
    outputs, gradients = _mean_gradients(whole, kind, torch.bfloat16)
    rank = dist.get_rank()
    y = _backward(model, _inputs(kind)[rank])
    assert y.dtype == torch.bfloat16
    equal(y, outputs[rank], "the output", 0.01 if _bound(kind) else 0.0)
    _same_gradients(model, {name: None if g is None else g.float() for name, g in gradients.items()}, 0.01)
    assert isinstance(model.inner, FSDPModule)
    model.inner.unshard()
    got = model.weight
    assert got.dtype == torch.bfloat16 or not weight.is_floating_point()
    if isinstance(wanted, QuantizedTensor) and type(got) is type(wanted) and _is_exact(kind, wanted):
        same_bits(got, wanted, "what is gathered")
    model.inner.reshard()


@across("DTensor, `Shard(0)`")
def dtensor(kind: Kind) -> None:
    """Cut, replicated and put together again: the tensor of rank 0."""
    _dtensor(kind, Shard(0))
    _dtensor(kind, Replicate())


@across("DTensor, `Shard(1)`")
def dtensor_columns(kind: Kind) -> None:
    weight: Tensor = kind.make().weight  # type: ignore[assignment]
    _dtensor(kind, Shard(1 if weight.dim() == 4 else weight.dim() - 1))


def _dtensor(kind: Kind, placement: Any) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    wanted: Any = kind.make(0).weight.detach()  # type: ignore[operator]
    mine: Any = kind.make(rank).weight.detach()  # type: ignore[operator]
    sharded: Any = distribute_tensor(mine, mesh, [placement])
    local = sharded.to_local()
    assert type(local) is type(wanted), f"a part is a {type(local).__name__}"
    assert torch.equal(_floats(sharded.full_tensor()), _floats(wanted)), "put together it has other numbers"
    if isinstance(placement, Shard):
        part = _floats(wanted).chunk(2, placement.dim)[rank]
        assert torch.equal(_floats(local), part), "a part has other numbers"
        if placement.dim:
            rows = sharded.redistribute(mesh, [Shard(0)]).to_local()
            assert torch.equal(_floats(rows), _floats(wanted).chunk(2)[rank]), "cut anew it has other numbers"


@across("Tensor parallelism")
def tensor_parallel(kind: Kind) -> None:
    """A column-wise layer and a row-wise one: the order of a sum differs from one process."""
    mesh = init_device_mesh("cpu", (2,))
    if kind.recipe is None:
        module = kind.make()
        whole = copy.deepcopy(module)
        parallelize_module(
            nn.ModuleDict({"layer": module}), mesh, {"layer": ColwiseParallel(output_layouts=Replicate())}
        )
        with torch.no_grad():
            equal(module(kind.inputs()), whole(kind.inputs()), "column-wise", 1e-6)
        return
    model, whole = _pair(kind), _pair(kind)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    outputs = [_backward(module, kind.inputs()) for module in (model, whole)]
    equal(*outputs, "the output", 1e-6)
    _same_gradients(model, {name: p.grad for name, p in whole.named_parameters()}, 1e-5)


def _pair(kind: Kind) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(kind.trains)
    quantize_(model, kind.recipe)
    with torch.no_grad():
        model(kind.inputs())
    return model


@across("DCP, 2 → 1 → 2 ranks")
def checkpoint(kind: Kind) -> None:
    """Saved by two ranks, loaded and saved by one, loaded by two."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    (path,) = folder
    rows = kind.rows[1]
    try:
        model, wanted = Model(kind, 1, rows), Model(kind, 1, rows)
        _shard(model)
    except (ValueError, NotImplementedError):
        rows = kind.rows[0]
        model, wanted = Model(kind, 1, rows), Model(kind, 1, rows)
        _shard(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{path}/two")
    whole = Model(kind, 2, rows)  # on both ranks, which may look at one range together
    raised = ["", ""]
    if dist.get_rank() == 0:
        try:
            _by_one_rank(kind, whole, path, wanted)
        except (Exception, CheckpointException) as error:
            raised = [type(error).__name__, str(error)]
    dist.broadcast_object_list(raised)
    if raised[0]:
        raise (AssertionError if raised[0] == "AssertionError" else ValueError)(": ".join(raised))
    again = Model(kind, 3, rows)
    _shard(again)
    loaded = get_model_state_dict(again)
    dcp.load(loaded, checkpoint_id=f"{path}/one")
    set_model_state_dict(again, loaded)
    for name, tensor in state(again).items():
        mine, first = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, state(model)[name]))
        same_bits(mine, first, f"{name} of two ranks again")
    _is_gathered(again, wanted.weight, kind)


def _by_one_rank(kind: Kind, whole: Model, path: str, wanted: Model) -> None:
    before = snapshot(whole.inner)
    loaded = whole.state_dict()
    try:
        dcp.load(loaded, checkpoint_id=f"{path}/two", no_dist=True)
    except CheckpointException as error:
        # Tensors are loaded one after the other; a bias may have been.
        assert type(whole.weight) is type(wanted.weight)
        same_bits(whole.weight, before["weight"][1], "after the error")
        raise next(iter(error.failures.values()))[0] from error
    whole.load_state_dict(loaded)
    for name, tensor in state(whole).items():
        equal(_floats(tensor), _floats(state(wanted)[name]), f"{name} in one process")
    if kind.family != LAYOUT:
        same_module(whole, wanted, "what one process has loaded")
    dcp.save(whole.state_dict(), checkpoint_id=f"{path}/one", no_dist=True)


def run_all(names: list[str]) -> dict[str, dict[str, str]]:
    """The outcomes by movement and kind, which both ranks must agree on."""
    control = dist.new_group(timeout=timedelta(seconds=200))
    found: dict[str, dict[str, str]] = {}
    for name, kind in itertools.product(names, KINDS):
        mine = cell(functools.partial(ACROSS[name].run, kind))
        both: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(both, mine, group=control)
        agree = len(set(both)) == 1
        found.setdefault(name, {})[kind.name] = mine if agree else f"wrong: rank 0: {both[0]}, rank 1: {both[1]}"
        if not agree:  # a rank may have left the other in a collective: what follows would not meet
            break
    return found


def main(result: str, *names: str) -> None:
    """Rank 0 writes the outcomes to the file `result`."""
    found = run_all(list(names))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(main)
