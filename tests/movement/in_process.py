"""Movements inside one process."""

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from qtorch import load_quantized, save_quantized
from qtorch.dtypes import QuantizedTensor
from tests.movement import holding
from tests.movement.holding import bits, equal, output, parts, same_bits, same_module, same_tensor, state
from tests.movement.movements import Case, movement

MOVES, FILES, PIECES, TRANSFORMS = "Copies and moves", "Files", "Parts", "Compiler and function transforms"


def _same(made: nn.Module, case: Case, what: str) -> None:
    """The same parameters, outputs and gradients."""
    same_module(made, case.module, what)
    equal(output(made, case.kind), case.output, what)
    holding.same_gradients(holding.gradients(made, case.kind), holding.gradients(case.module, case.kind), what)


def _writes_do_not_reach(made: Tensor, original: Tensor, what: str) -> None:
    before = bits(original)
    with torch.no_grad():
        for part in parts(made).values():
            part.zero_()
    same_bits(original, before, what)


def _addresses(tensor: Tensor) -> dict[str, int]:
    return {name: part.data_ptr() for name, part in parts(tensor).items()}


@movement(MOVES, "`to`")
def to(case: Case) -> None:
    """Another device and back is a copy of every part; so is `copy=True`."""
    meta = copy.deepcopy(case.module).to("meta")
    for name, tensor in state(case.module).items():
        moved = state(meta)[name]
        assert type(moved) is type(tensor), f"on meta {name} is a {type(moved).__name__}"
        assert all(part.is_meta for part in parts(moved).values()), f"{name} is not on meta"
        made = tensor.detach().to("cpu", copy=True)
        same_tensor(made, tensor.detach(), f"a copy of {name}")
        _writes_do_not_reach(made, tensor, f"writing to a copy of {name}")
    _same(copy.deepcopy(case.module).to("cpu"), case, "to('cpu')")


@movement(MOVES, "`half`")
def half(case: Case) -> None:
    """The logical dtype changes; codes and scales do not. Weights that train in floats are rounded."""
    for dtype in (torch.float16, torch.bfloat16):
        made = copy.deepcopy(case.module).to(dtype)
        for name, tensor in state(case.module).items():
            if not isinstance(tensor, QuantizedTensor) or "master" in tensor.inner_tensors:
                continue
            assert type(state(made)[name]) is type(tensor)
            wanted = tensor.dtype if not tensor.is_floating_point() else dtype
            assert state(made)[name].dtype == wanted, f"{name} is {state(made)[name].dtype}"
        y = output(made, case.kind, dtype)
        assert y.dtype == dtype, f"the output is {y.dtype}"
        equal(y.float(), case.output, f"in {dtype}", 0.3 if case.kind.trains else 0.05)
        back = made.float()
        for name, tensor in state(case.module).items():
            if isinstance(tensor, QuantizedTensor) and "master" not in tensor.inner_tensors:
                same_tensor(state(back)[name].detach(), tensor.detach(), f"{name}, there and back")


@contextmanager
def _memory_that_can_be_pinned() -> Iterator[None]:
    """Without a GPU torch can pin nothing: then a copy counts as pinned."""
    if torch.cuda.is_available():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    pinned: set[int] = set()

    def pin(tensor: Tensor, device: object = None) -> Tensor:
        made = tensor.clone()
        pinned.add(made.data_ptr())
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_pin_memory", pin, "CPU")
        library.impl("is_pinned", lambda tensor, device=None: tensor.data_ptr() in pinned, "CPU")
    try:
        yield
    finally:
        library._destroy()


@movement(MOVES, "`pin_memory`")
def pin(case: Case) -> None:
    with _memory_that_can_be_pinned():
        assert not case.weight.is_pinned()
        made = case.weight.detach().pin_memory()
        assert made.is_pinned()
        assert all(part.is_pinned() for part in parts(made).values())
        same_tensor(made, case.weight.detach(), "pinned")
        assert not case.weight.is_pinned()


@movement(MOVES, "`share_memory_`")
def share(case: Case) -> None:
    """And what another process gets."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    made = copy.deepcopy(case.module)
    made.share_memory()
    assert made.weight.is_shared()
    _same(made, case, "in shared memory")
    buffer = io.BytesIO()
    ForkingPickler(buffer, 2).dump(made.state_dict())
    other = copy.deepcopy(case.other)
    other.load_state_dict(pickle.loads(buffer.getvalue()), assign=True)
    _same(other, case, "sent")
    with torch.no_grad():
        for part in parts(other.weight).values():
            part.zero_()
    same_bits(made.weight, other.weight, "written by the other process")


@movement(MOVES, "`deepcopy`")
def deepcopy(case: Case) -> None:
    made = copy.deepcopy(case.module)
    _same(made, case, "a copy")
    assert isinstance(made.weight, nn.Parameter)
    _writes_do_not_reach(made.weight, case.weight, "writing to a copy")


@movement(MOVES, "`copy`")
def shallow_copy(case: Case) -> None:
    """It shares the memory."""
    made = copy.copy(case.weight)
    same_tensor(made, case.weight, "a copy")
    assert made.requires_grad == case.weight.requires_grad
    assert isinstance(made, nn.Parameter)
    assert _addresses(made) == _addresses(case.weight), "other memory"


@movement(MOVES, "`detach`")
def detach(case: Case) -> None:
    made = case.weight.detach()
    assert not made.requires_grad
    same_tensor(made, case.weight, "detached")
    assert _addresses(made) == _addresses(case.weight), "other memory"


@movement(MOVES, "`copy_`")
def copy_(case: Case) -> None:
    """Of another tensor of the same kind: its codes."""
    target = copy.deepcopy(case.module)
    output(target, case.kind)
    with torch.no_grad():
        for name, tensor in state(target).items():
            tensor.copy_(state(case.other)[name])
    same_module(target, case.other, "copied")
    equal(output(target, case.kind), output(case.other, case.kind), "copied")


@movement(MOVES, "`swap_tensors`")
def swap_tensors(case: Case) -> None:
    one, two = copy.deepcopy(case.module), copy.deepcopy(case.other)
    torch.utils.swap_tensors(one.weight, two.weight)
    same_tensor(one.weight, case.other.weight, "swapped")
    same_tensor(two.weight, case.weight, "swapped")
    one_, two_ = copy.deepcopy(case.module), copy.deepcopy(case.other)
    one_.weight, two_.weight = two_.weight, one_.weight
    equal(output(one, case.kind), output(one_, case.kind), "swapped")
    equal(output(two, case.kind), output(two_, case.kind), "swapped")
    assert isinstance(one.weight, nn.Parameter)


@movement(FILES, "`pickle`")
def pickled(case: Case) -> None:
    made = pickle.loads(pickle.dumps(case.module.weight))
    assert isinstance(made, nn.Parameter)
    assert made.requires_grad == case.weight.requires_grad
    same_tensor(made, case.weight, "a pickle")
    _same(pickle.loads(pickle.dumps(case.module)), case, "a pickle of the module")


@movement(FILES, "`torch.save`")
def torch_save(case: Case) -> None:
    """And `torch.load` with its defaults."""
    for how in ({"assign": True}, {}):
        made = copy.deepcopy(case.other)
        made.load_state_dict(holding.through_file(case.module.state_dict()), **how)
        _same(made, case, f"what was loaded, {how}")


@movement(FILES, "`save_quantized`")
def safetensors(case: Case) -> None:
    """Into another model of the same kind."""
    with tempfile.TemporaryDirectory() as folder:
        save_quantized(case.module, Path(folder) / "model.safetensors")
        made = copy.deepcopy(case.other)
        load_quantized(made, Path(folder) / "model.safetensors")
    for name, tensor in state(made).items():
        same_bits(tensor, state(case.module)[name], name)
    equal(output(made, case.kind), case.output, "what was loaded")


def _pieces(weight: Tensor, axis: int) -> None:
    weight = weight.detach()
    whole = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    size = -(-weight.shape[axis] // 2)
    for cut, wanted in (
        (weight.chunk(2, axis), whole.chunk(2, axis)),
        (weight.split(size, axis), whole.split(size, axis)),
        (torch.split(weight, [size, weight.shape[axis] - size], axis), whole.split(size, axis)),
    ):
        for part, values in zip(cut, wanted, strict=True):
            assert type(part) is type(weight), f"a part is a {type(part).__name__}"
            found = part.dequantize() if isinstance(part, QuantizedTensor) else part
            assert torch.equal(found, values), "a part has other numbers"


@movement(PIECES, "`chunk`, `split` of rows")
def rows(case: Case) -> None:
    """Also into parts of different sizes."""
    _pieces(case.weight, 0)
    _pieces(case.kind.make(rows=case.kind.rows[1]).weight, 0)  # type: ignore[arg-type]


@movement(PIECES, "`chunk`, `split` of columns")
def columns(case: Case) -> None:
    _pieces(case.weight, case.weight.dim() - 1)


@movement(TRANSFORMS, "`torch.compile`")
def compiled(case: Case) -> None:
    """One graph, forward and backward."""
    torch.compiler.reset()
    run = torch.compile(case.module.eval(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        equal(run(case.kind.inputs()), case.output, "compiled", 1e-6)
    case.module.train()


@movement(TRANSFORMS, "`torch.export`")
def exported(case: Case) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(copy.deepcopy(case.module).eval(), (case.kind.inputs(),))
        equal(program.module()(case.kind.inputs()), case.output, "exported", 1e-6)


@movement(TRANSFORMS, "`functional_call`")
def functional_call(case: Case) -> None:
    module, x = copy.deepcopy(case.module).eval(), case.kind.inputs()
    with torch.no_grad():
        equal(torch.func.functional_call(module, state(case.other), (x,)), output(case.other, case.kind), "with others")
    same_module(module, case.module, "after the call")


@movement(TRANSFORMS, "`vmap` of inputs")
def vmap(case: Case) -> None:
    """Over inputs gives what a loop over them gives."""
    module, x = copy.deepcopy(case.module).eval(), case.kind.inputs()
    batch = torch.stack([x, x.flip(-1)])
    with torch.no_grad():
        got, wanted = torch.func.vmap(module)(batch), torch.stack([module(part) for part in batch])
    equal(got, wanted, "by vmap", 1e-6)
