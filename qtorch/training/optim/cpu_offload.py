"""CPUOffloadOptimizer: states, and the step, on the CPU; parameters on CUDA.

For each parameter the CPU has a pinned copy and an optimizer of its own. A step is a pipeline: the gradient of one
parameter comes over a stream while the CPU updates another and the new values of a third go back over a second stream.
Gradients are read when `step` is called, so that they can be clipped and accumulated before. Parameters that lie on the
CPU are updated where they are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...primitives.tracing import is_sharded, outside_graphs


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """An optimizer whose states lie on the CPU, where it computes its steps.

    Learning rate schedulers, gradient clipping and accumulation work as with any optimizer. With `offload_gradients`
    they use the gradients on the CPU: `clip_grad_norm_` of this class in place of torch's.

    Args:
        params: parameters on CUDA or on the CPU, or groups of them.
        optimizer_class: of the optimizer on the CPU; `AdamW8bit` holds a quarter of the memory of torch's AdamW.
        offload_gradients: move each gradient to the CPU as soon as the backward has it, and free it on the GPU; it is
            added to what is there from earlier backwards.
        minimal_size: parameters of fewer elements stay with an optimizer on their own device.
        kwargs: arguments of `optimizer_class`; torch's AdamW gets `fused=True` where it is not given.

    Raises:
        ValueError: `minimal_size` is negative.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
        offload_gradients: bool = False, minimal_size: int = 4096, **kwargs: Any,
    ) -> None:  # fmt: skip
        if minimal_size < 0:
            raise ValueError(f"CPUOffloadOptimizer: minimal_size is a number of elements, got {minimal_size}")
        if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and not kwargs.keys() & {"fused", "foreach"}:
            kwargs = {**kwargs, "fused": True}
        self._class, self._arguments = optimizer_class, kwargs
        self._offload_gradients, self._minimal_size = offload_gradients, minimal_size
        self._inner: dict[Tensor, torch.optim.Optimizer] = {}
        self._copies: dict[Tensor, Tensor] = {}
        self._ready: dict[Tensor, Any] = {}  # events after which gradients are on the CPU
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        probe = optimizer_class([torch.zeros(1, 1, requires_grad=True, dtype=torch.float32, device="cpu")], **kwargs)
        super().__init__(params, dict(probe.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get optimizers and, from CUDA, copies."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            target = parameter
            if self._offloads(parameter):
                copy = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=parameter.is_cuda)
                target = copy.copy_(parameter.detach()).requires_grad_()
                self._copies[parameter] = target
                if self._offload_gradients:
                    parameter.register_post_accumulate_grad_hook(self._take_gradient)
            self._inner[parameter] = self._class([{**_options(group), "params": [target]}], **self._arguments)

    @outside_graphs("the step of an optimizer on the CPU runs outside of graphs")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; arguments as of any optimizer."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        updated = [p for group in self.param_groups for p in group["params"] if self._fetch(p, group)]
        for parameter in updated:
            if parameter in self._ready:
                self._ready.pop(parameter).synchronize()
            self._inner[parameter].step()
            if parameter in self._copies:
                self._send(parameter)
        for device, (_, back) in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(back)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those on the CPU too."""
        super().zero_grad(set_to_none)
        self._ready.clear()
        for copy in self._copies.values():
            copy.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all parameters, wherever their gradients are; the norm, on the CPU."""
        for event in self._ready.values():
            event.synchronize()
        gradients = [grad for p in self._inner if (grad := self._gradient(p)) is not None]
        norms = [torch.linalg.vector_norm(grad.float(), norm_type).cpu() for grad in gradients]
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        if norms:
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        factor = float((max_norm / (total + 1e-6)).clamp(max=1.0))
        for grad in gradients:
            grad.mul_(factor)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The states as of one optimizer of the inner class, on the CPU; groups are those of this optimizer."""
        order = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        of_each = {index: self._inner[parameter].state_dict()["state"] for parameter, index in order.items()}
        state = {index: of_one[0] for index, of_one in of_each.items() if of_one}
        groups = [{**group, "params": [order[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or the state of one optimizer of the inner class; copies are read again from the
        parameters, which are loaded by the model.

        Raises:
            ValueError: the groups differ.
        """
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("CPUOffloadOptimizer: the checkpoint has other parameter groups than this optimizer")
        for group, of_saved in zip(self.param_groups, saved, strict=True):
            options = _options(of_saved)
            group.update(options)
            for parameter, key in zip(group["params"], of_saved["params"], strict=True):
                inner = self._inner[parameter]
                of_one = {0: state_dict["state"][key]} if key in state_dict["state"] else {}
                inner.load_state_dict({"state": of_one, "param_groups": [{**options, "params": [0]}]})
                if parameter in self._copies:
                    self._copies[parameter].copy_(parameter)

    def _offloads(self, parameter: Tensor) -> bool:
        """Whether a parameter is updated on the CPU, in a copy."""
        if is_sharded(parameter):
            raise ValueError(
                "CPUOffloadOptimizer takes no DTensors; FSDP2 has CPUOffloadPolicy, with which an optimizer of "
                "qtorch.training.optim runs on the CPU"
            )
        return parameter.device.type != "cpu" and parameter.numel() >= self._minimal_size

    def _fetch(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Start to bring the gradient of a parameter; whether there is one."""
        self._inner[parameter].param_groups[0].update(_options(group))
        copy = self._copies.get(parameter)
        if copy is not None and parameter.grad is not None:
            self._bring(parameter)
        return (parameter if copy is None else copy).grad is not None

    def _bring(self, parameter: Tensor) -> None:
        """Copy the gradient, or add it to those that were offloaded before."""
        copy, grad = self._copies[parameter], parameter.grad
        assert grad is not None
        target = torch.empty(grad.shape, dtype=copy.dtype, device="cpu", pin_memory=grad.is_cuda)
        if grad.is_cuda:
            down, _ = self._streams_of(grad.device)
            down.wait_stream(torch.cuda.current_stream(grad.device))
            with torch.cuda.stream(down):
                target.copy_(grad, non_blocking=True)
                grad.record_stream(down)
                self._ready[parameter] = down.record_event()
        else:
            target.copy_(grad)
        if copy.grad is None:
            copy.grad = target
            return
        if parameter in self._ready:
            self._ready[parameter].synchronize()
        copy.grad.add_(target)

    def _take_gradient(self, parameter: Tensor) -> None:
        with torch.no_grad():
            self._bring(parameter)
        parameter.grad = None

    def _send(self, parameter: Tensor) -> None:
        """Start to copy new values to the device."""
        copy = self._copies[parameter]
        if parameter.is_cuda:
            _, back = self._streams_of(parameter.device)
            back.wait_stream(torch.cuda.current_stream(parameter.device))
            with torch.cuda.stream(back):
                parameter.copy_(copy, non_blocking=True)
        else:
            parameter.copy_(copy)
        if not self._offload_gradients:
            copy.grad = None  # that of the device is still there

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        copy = self._copies.get(parameter)
        return copy.grad if self._offload_gradients and copy is not None else parameter.grad

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError(
            "CPUOffloadOptimizer can't be copied or pickled: it holds copies of its parameters in pinned memory; make "
            "another one and load_state_dict() the state of this one"
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says beside its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
