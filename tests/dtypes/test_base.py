"""The plumbing of every quantized tensor: pickles, files, copies, other processes, flattening for the compiler."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from qtorch import AffineQuantizedTensor
from qtorch.dtypes.copying import rebuild
from qtorch.kernels.registry import deregister, register
from tests.dtypes.specs import SPECS, quantized
from tests.movement.holding import through_file

all_specs = pytest.mark.parametrize("name", SPECS)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert type(a) is type(b) is AffineQuantizedTensor
    assert a.scheme == b.scheme
    assert (a.requires_grad, isinstance(a, nn.Parameter)) == (b.requires_grad, isinstance(b, nn.Parameter))
    x, y = a.inner_tensors, b.inner_tensors
    assert x.keys() == y.keys()
    assert all(torch.equal(bits(x[k]), bits(y[k])) for k in x)


@pytest.mark.parametrize("make_copy", [through_file, through_pickle, copy.copy, copy.deepcopy])
@all_specs
def test_copies_of_parts(name: str, make_copy: Any) -> None:
    """Of whole tensors: tests/movement."""
    w = quantized(name)
    for tensor in [w[:8], w.t()]:
        tensor.note = {"by": "the user"}
        again = make_copy(tensor)
        assert_same(again, tensor)
        assert again.note == tensor.note


def test_what_copies_share_and_files_hold() -> None:
    w = quantized("int8 row")
    assert copy.copy(w).qdata is w.qdata
    for make_copy in [through_file, through_pickle, copy.deepcopy]:
        assert make_copy(w).qdata.data_ptr() != w.qdata.data_ptr()
    first, second = copy.deepcopy([w, w])
    assert first is second
    model = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)])
    model[0].weight = model[1].weight = nn.Parameter(quantized("uint4 group, packed"), requires_grad=False)
    state = through_file(model.state_dict())
    assert_same(state["0.weight"], model.state_dict()["0.weight"])
    assert state["0.weight"].qdata.data_ptr() == state["1.weight"].qdata.data_ptr()
    assert model.load_state_dict(state, assign=True).missing_keys == []
    text = pickle.dumps(quantized("uint4 group")).decode("latin1")
    assert "AffineQuantizedTensor" in text
    assert text.count("qtorch") == 1
    assert rebuild.__module__ == "qtorch.dtypes.base"
    file = io.BytesIO()
    torch.save(quantized("int8 row", 512, 64), file)
    assert 512 * 64 < len(file.getvalue()) < 1.3 * 512 * 64


# ------------------------------------------------------------------------------ other processes


def double(received: Any, sent: Any) -> None:
    torch.set_num_threads(1)  # a forked process has lost the threads of the pool
    w = received.get()
    sent.put((w.dequantize() * 2, w.scheme.spec, w.is_shared()))
    w.copy_(torch.zeros(w.shape))
    received.get()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_queues(method: str) -> None:
    context = mp.get_context(method)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=double, args=(there, back), daemon=True)
    process.start()
    w = nn.Parameter(quantized("uint4 group, real zero"), requires_grad=False)
    wanted = 2 * w.dequantize()
    there.put(w)
    doubled, spec, shared = back.get(timeout=60)
    there.put(None)
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(doubled, wanted)
    assert (spec, shared) == (w.scheme.spec, True)
    # The memory is shared, as for a plain tensor: the process has overwritten it.
    assert torch.equal(w.dequantize(), torch.zeros(32, 64))


# ------------------------------------------------------------------------------ the compiler


@all_specs
def test_flatten_and_unflatten(name: str) -> None:
    w = quantized(name, dtype=torch.bfloat16)
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(w)
    names, scheme = w.__tensor_flatten__()
    hash(scheme)
    tensors = {name: getattr(w, name) for name in names}
    assert all(type(tensor) is Tensor for tensor in tensors.values())
    assert_same(AffineQuantizedTensor.__tensor_unflatten__(tensors, scheme, w.shape, w.stride()), w)


def test_the_cache_key_is_stable_and_tells_schemes_and_sets_of_kernels_apart() -> None:
    keys = {quantized(name)._stable_hash_for_caching() for name in SPECS for _ in range(2)}
    assert len(keys) == len(SPECS)
    # torch would take a graph from its disk that calls what is not chosen here.
    w = quantized(next(iter(SPECS)))
    before = w._stable_hash_for_caching()
    register("linear", name="of_outside", priority=-9)(lambda x, weight, bias: x)
    try:
        assert w._stable_hash_for_caching() != before
    finally:
        deregister("linear", "of_outside")
    assert w._stable_hash_for_caching() == before


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_composite_operators_in_every_mode(mode: type) -> None:
    # Under inference mode torch hands over aten.flatten, aten.to, ... whole.
    outside = quantized("uint4 group")
    with mode():
        for w in [outside, quantized("uint4 group")]:
            d = w.dequantize()
            for operation in [
                lambda w: w.T.mT,
                lambda w: w.chunk(2)[1].flatten(),
                lambda w: w.unflatten(0, (2, 16)).movedim(0, 1),
                lambda w: torch.hsplit(w, 2)[1].narrow(0, 3, 5),
                lambda w: w.view_as(w).clone(),
            ]:
                assert torch.equal(operation(w).dequantize(), operation(d))
            assert w.half().float().to("meta").is_meta
            assert torch.equal(w[torch.arange(32) > 3].dequantize(), d[4:])
