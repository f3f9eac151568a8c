"""Whether a compiler traces, and decorators for functions that `torch.compile` leaves out of its graphs.

After a graph break, such as a `print` in a loop, the compiler runs the rest of the function in Python and starts a new
graph at each function that it calls. It must not start one at `__torch_function__`: all weights share that function,
which would be recompiled for each of them until the recompilation limit is reached. So products of quantized weights
run in eager mode there, like those of plain `F.linear`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

F = TypeVar("F", bound=Callable[..., Any])


def _is_compiling() -> bool:
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


is_compiling = torch.compiler.is_compiling if TorchVersion(torch.__version__) >= "2.13" else _is_compiling
"""Whether a compiler traces, or runs what it has traced on fake tensors; before 2.13 torch does not tell the second."""


def starts_no_graph(function: F) -> F:
    """Decorator: called outside a graph, the function and all that it calls run in eager mode; inside a graph it is
    traced like any other."""
    # As torch._dynamo.skip_code does, extended to the functions called; importing that takes 0.7 s.
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def plain_name(name: str) -> str:
    """The name of a module or parameter without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; the package that defines them is not imported for that."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # another thread may be importing it
    return kind is not None and isinstance(tensor, kind)


def refuse_jit_trace() -> None:
    """Raise `TypeError` inside `torch.jit.trace`, which would record the result of a quantized layer as a constant."""
    if not is_compiling() and torch._C._get_tracing_state() is not None:
        raise TypeError(
            "torch.jit.trace would record the result of a quantized layer as a constant; use torch.export, or "
            "dequantize_(model) first"
        )


def outside_graphs(reason: str) -> Callable[[F], F]:
    """Decorator: the function runs in eager mode; a graph that calls it breaks, or under ``fullgraph=True`` raises an
    error with `reason`."""

    def decorate(function: F) -> F:
        # As torch.compiler.disable does, without importing the compiler.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return starts_no_graph(function)

    return decorate


# Support of torch.func transforms (vmap, grad, vjp, jacrev) for the functions of this library.
# torch can transform an `autograd.Function` only if it has a `setup_context`, which costs 20 us on each eager call, and
# it cannot see into kernels that read memory. So functions are written without one, and while a transform is active
# `apply` and `run_whole` pass them to torch as one opaque function:
#
#     vmap        runs one example at a time, so that the result is that of a loop even if all rows share a scale
#     gradient    runs the function once more under autograd
#
# Second derivatives and forward mode (jvp, jacfwd) raise an error that says so.


def are_active() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active; for eager mode."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _are_active_constant() -> bool:
    """`are_active`, which a compiler evaluates while it traces; its guards cover the active transforms."""
    return are_active()


# As torch.compiler.assume_constant_result does; calling that function would leave a node in every graph.
_are_active_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transforms_active() -> bool:
    """`are_active`, in eager mode and while a compiler traces."""
    return _are_active_constant() if is_compiling() else are_active()


def modes_active() -> bool:
    """Whether a `TorchDispatchMode` sees, records (make_fx, checkpointing) or fakes what operators run in eager mode:
    what reads memory then goes through torch's dispatcher."""
    return torch._C._len_torch_dispatch_stack() > 0


def see_operators() -> bool:
    """Whether a compiler, a trace, a transform or a mode has to see operators, so that none may be left out."""
    return is_compiling() or torch._C._get_tracing_state() is not None or are_active() or modes_active()


def in_backward() -> bool:
    """Whether a backward pass runs, in eager mode: a forward in it computes checkpointed activations again."""
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, which also works under transforms."""
    return run_whole(function.apply, *args) if transforms_active() else function.apply(*args)


def run_whole(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, a tensor or a tuple of tensors, as one opaque function under transforms; see the comment
    above. It is differentiable by autograd in the tensors of `args`; tensors inside other values are constants."""
    return _Whole.apply(function, *args)


def run_on_constants(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``function(*args, **kwargs)``, whose tensors no transform has wrapped, outside of all transforms, so that its
    result is not wrapped either."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return function(*args, **kwargs)


def one_by_one(info: Any, in_dims: Sequence[Any], function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """The return value of the `vmap` of a `Function`, computed as ``function(*args)`` for each example."""
    batched = [isinstance(arg, torch.Tensor) and dim is not None for arg, dim in zip(args, in_dims, strict=True)]
    results = []
    for i in range(info.batch_size):
        zipped = zip(args, in_dims, batched, strict=True)
        results.append(function(*(arg.select(dim, i) if is_batched else arg for arg, dim, is_batched in zipped)))
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if part is None else 0 for part in stacked)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Any], *args: Any) -> Any:
        # torch disables `__torch_function__` inside `_Whole.apply`; the function needs it.
        with torch._C._EnableTorchFunction():
            return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        inputs = tuple(map(unwrapped_subclass, inputs))
        ctx.save_for_backward(*(arg for arg in inputs if _is_plain(arg)))
        ctx.others = [None if _is_plain(arg) else (arg,) for arg in inputs]

    @staticmethod
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        function, *args = [next(tensors) if other is None else other[0] for other in ctx.others]
        needed = tuple(ctx.needs_input_grad[1:])
        return None, *_Gradients.apply(function, needed, len(grad_outputs), *grad_outputs, *args)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        return one_by_one(info, in_dims[1:], lambda *example: _Whole.apply(function, *example), args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, jacfwd) of a layer in training: its derivative is defined "
            "backwards, with quantized gradients; use torch.func.vjp or jacrev"
        )


def _is_plain(arg: Any) -> bool:
    # A compiler's fake tensors are plain.
    return isinstance(arg, torch.Tensor) and not hasattr(type(arg), "__tensor_flatten__")


def unwrapped_subclass(arg: Any) -> Any:
    """A tensor subclass without the wrappers of transforms; other values are returned as is. An autograd context has to
    hold it as an attribute, since `saved_tensors` would wrap it again."""
    inner = arg
    while isinstance(inner, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    return arg if _is_plain(inner) else inner


class _Gradients(torch.autograd.Function):
    """The gradients of ``function(*args)`` for each of `args`, None for those that are not `needed`."""

    @staticmethod
    def forward(
        function: Callable[..., Any], needed: tuple[bool, ...], count: int, *tensors: Any
    ) -> tuple[torch.Tensor | None, ...]:
        grad_outputs, args = tensors[:count], tensors[count:]
        with torch.enable_grad(), torch._C._EnableTorchFunction():
            leaves = [arg.detach().requires_grad_() if need else arg for arg, need in zip(args, needed, strict=True)]
            y = function(*leaves)
        outputs = (y,) if isinstance(y, torch.Tensor) else y
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        found = iter(torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True))
        return tuple(next(found) if need else None for need in needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError(
            "the second derivative of a layer in training is not defined (torch.func.hessian, grad of grad): its "
            "gradient is computed by quantized products, which are differentiable once. torch.compile of "
            "torch.func.grad requests it if parameters require a gradient: call that under torch.no_grad()"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: Callable[..., Any], needed: tuple[bool, ...], *rest: Any
    ) -> tuple[Any, Any]:
        return one_by_one(info, in_dims[2:], lambda *example: _Gradients.apply(function, needed, *example), rest)
