"""Functions of this library under torch.func: vmap, grad, vjp, jacrev.

torch transforms an `autograd.Function` that has a `setup_context`, which binds its arguments anew on each call, 20 us
of eager mode; and it cannot see into kernels that read memory. So functions are written without one, and where a
transform is active `apply` and `run_whole` hand them over as one opaque function:

    vmap        one example at a time, so that the result is that of a loop, also where a scale is shared by all rows
    gradient    by autograd, of the function run once more

A second derivative, and forward mode (jvp, jacfwd), is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import Function

from .outside_graphs import starts_no_graph


def are_active() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is active, in eager mode."""
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _are_active_constant() -> bool:
    """`are_active`, run by a compiler when it traces; it guards on the transforms itself."""
    return are_active()


# As torch.compiler.assume_constant_result does: called by name, it would leave a node in every graph.
_are_active_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transforms_active() -> bool:
    """`are_active`, in eager mode and when a compiler traces."""
    return _are_active_constant() if torch.compiler.is_compiling() else are_active()


def apply(function: type[Function], *args: Any) -> Any:
    """``function.apply(*args)``, under transforms too."""
    return run_whole(function.apply, *args) if transforms_active() else function.apply(*args)


def run_whole(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` under transforms: see the top of the file.

    Args:
        function: differentiable by autograd; it returns a tensor, or a tuple of tensors.
        args: tensors, of which those in floating point may be differentiated, and other values; a tensor within one of
            these is a constant.
    """
    return _Whole.apply(function, *args)


def run_on_constants(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` of tensors that no transform has wrapped, outside of all transforms, which would
    wrap its result."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return function(*args, **kwargs)


def one_by_one(info: Any, in_dims: Sequence[Any], function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """What the `vmap` of a `Function` returns, from ``function(*args)`` of each example."""
    batched = [isinstance(arg, Tensor) and dim is not None for arg, dim in zip(args, in_dims, strict=True)]
    results = []
    for i in range(info.batch_size):
        zipped = zip(args, in_dims, batched, strict=True)
        results.append(function(*(arg.select(dim, i) if is_batched else arg for arg, dim, is_batched in zipped)))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if part is None else 0 for part in stacked)


class _Whole(Function):
    @staticmethod
    def forward(function: Callable[..., Any], *args: Any) -> Any:
        # `_Whole.apply` is itself a function of subclasses, and what it calls is past their `__torch_function__`.
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
    return isinstance(arg, Tensor) and not hasattr(
        type(arg), "__tensor_flatten__"
    )  # a compiler's fake tensors are plain


def unwrapped_subclass(arg: Any) -> Any:
    """A tensor subclass without what transforms wrap around it, whose class is `Tensor`; all else as it is. A context
    has to hold it as an attribute: `saved_tensors` would wrap it."""
    inner = arg
    while isinstance(inner, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    return arg if _is_plain(inner) else inner


class _Gradients(Function):
    """Of ``function(*args)`` in each of `args`, or None where that is not `needed`."""

    @staticmethod
    def forward(
        function: Callable[..., Any], needed: tuple[bool, ...], count: int, *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        grad_outputs, args = tensors[:count], tensors[count:]
        with torch.enable_grad(), torch._C._EnableTorchFunction():
            leaves = [arg.detach().requires_grad_() if need else arg for arg, need in zip(args, needed, strict=True)]
            y = function(*leaves)
        outputs = (y,) if isinstance(y, Tensor) else y
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
            "the second derivative of a layer in training was asked for (torch.func.hessian, grad of grad; "
            "torch.compile of torch.func.grad asks for it where parameters require a gradient: call that under "
            "torch.no_grad()): its gradient is computed by quantized products, which are differentiable once"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: Callable[..., Any], needed: tuple[bool, ...], *rest: Any
    ) -> tuple[Any, Any]:
        return one_by_one(info, in_dims[2:], lambda *example: _Gradients.apply(function, needed, *example), rest)
