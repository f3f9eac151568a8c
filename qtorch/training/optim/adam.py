"""LowBitAdam: Adam and AdamW with moments in codes, the base of the optimizers of this folder.

Names and arguments are torchao's. One fused step for each parameter (`kernels.ops.adam`, which has the equations), in
C++ on CPU and in Triton on CUDA.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...dtypes import QuantizedTensor
from ...kernels.ops.adam import AdamStep, adam_step, key_of
from ...primitives.tracing import is_sharded, outside_graphs
from ..weights.master import MasterWeight
from .moment_form import BITS, as_moment, converted, first_element, flat_blocks, form_of, local_of, zeros

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Params = Iterable[Any]

OF_TORCH = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Keys of torch's groups that mean nothing here."""

OWN = ("optim_bits", "block_size", "bf16_stochastic_round")
"""Keys that say how moments are held and parameters rounded: those of this optimizer, whatever the checkpoint says."""


@dataclass(eq=False)
class _Uncast:
    """A state that `Optimizer.load_state_dict` does not cast."""

    value: Any


class LowBitAdam(torch.optim.Optimizer):
    """Adam whose moments are held in codes.

    Args:
        params: parameters, or groups, as for any optimizer; each of these arguments may differ by group.
        lr: a float, or a tensor of one element, which is read at each step.
        betas, eps, weight_decay, amsgrad: as of `torch.optim.Adam` and `AdamW`; by default the weight decay of Adam is
            0, that of AdamW 1e-2.
        block_size: most elements that share a scale; by default `default_block_size`.
        bf16_stochastic_round: round bf16 parameters stochastically, so that updates smaller than their step add up in
            expectation. The random bits follow from the number of the step and of the parameter.
        optim_bits: 8, 4, "fp8" or 32, see `moment_form.BITS`, by default `default_bits`; moments of parameters of fewer
            than 4096 elements are in fp32 always.
        of_subclass: the arguments of `of_group`.

    Attributes:
        decoupled: whether weight decay is AdamW's, apart from the gradient.
        of_group, of_state: more arguments and states that a subclass may have.

    Raises:
        TypeError: an argument is not known.
        ValueError: an argument is out of its range, or a parameter is not in fp32, bf16 or fp16.
    """

    decoupled: ClassVar[bool] = True
    default_bits: ClassVar[int | str] = 8
    default_block_size: ClassVar[int] = 256
    of_group: ClassVar[tuple[str, ...]] = ()
    of_state: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float | None = None, amsgrad: bool = False, *, block_size: int | None = None,
        bf16_stochastic_round: bool = False, optim_bits: int | str | None = None, **of_subclass: Any,
    ) -> None:  # fmt: skip
        for name in of_subclass.keys() - set(self.of_group):
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
        if weight_decay is None:
            weight_decay = 1e-2 if self.decoupled else 0.0
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"{type(self).__name__}: a tensor lr has one element, got shape {tuple(lr.shape)}")
        for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{type(self).__name__}: {name} is not negative, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{type(self).__name__}: betas are at least 0 and less than 1, got {betas}")
        of_torch = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        # In the groups, where copies and pickles of an optimizer keep it.
        held = {
            "block_size": self.default_block_size if block_size is None else block_size,
            "optim_bits": self.default_bits if optim_bits is None else optim_bits,
            "bf16_stochastic_round": bf16_stochastic_round,
        }
        super().__init__(params, {**of_torch, **held, **of_subclass})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have arguments of its own.

        Raises:
            ValueError: one is out of its range, or a parameter is not in fp32, bf16 or fp16, or for `Muon8bit` no
                matrix.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1], type(self).__name__)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any], name: str) -> None:
        if group["optim_bits"] not in BITS:
            raise ValueError(f"{name}: optim_bits is {', '.join(map(repr, BITS))}, got {group['optim_bits']!r}")
        if not isinstance(group["block_size"], int) or group["block_size"] < 1:
            raise ValueError(f"{name}: block_size is a positive number of elements, got {group['block_size']!r}")
        for parameter in group["params"]:
            if parameter.dtype not in DTYPES:
                found = f"one of shape {tuple(parameter.shape)} in {parameter.dtype}"
                raise ValueError(f"{name}: parameters are in fp32, bf16 or fp16, got {found}")

    @outside_graphs("a step of a low-bit optimizer is one fused kernel a parameter, which runs outside of graphs")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss once more, with gradients; its value is returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        index = 0
        for group in self.param_groups:
            lr = float(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, index, group, lr)
                index += 1
        return loss

    def _update(self, parameter: Tensor, index: int, group: dict[str, Any], lr: float) -> None:
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients; use torch.optim.SparseAdam")
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        state, local = self.state[parameter], local_of(parameter)
        number = count_step(state)
        add_moments(state, parameter, group, names)
        if not local.numel():
            return
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        rounds = group["bf16_stochastic_round"] and local.dtype == torch.bfloat16
        shrink, l2 = (1 - lr * decay, 0.0) if self.decoupled else (1.0, decay)
        step_size, correction = lr / (1 - beta1**number), (1 - beta2**number) ** -0.5
        key, first = (key_of(number, index), first_element(parameter)) if rounds else (None, 0)
        form, eps = form_of(parameter, group), group["eps"]
        step = AdamStep(form, beta1, beta2, eps, shrink, l2, step_size, correction, key, first)
        blocks = flat_blocks(parameter.shape, local, group["block_size"])
        moments = [as_moment(state[name]) for name in names]
        if is_sharded(grad):
            grad = local_of(grad)
        grad = (grad if grad.dtype in DTYPES else grad.float()).contiguous().resolve_neg()
        with Writable(local) as weight:
            adam_step(weight, grad, moments, blocks, step)
        if weight is not parameter and not parameter.is_inference():
            torch.autograd.graph.increment_version(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, of another one of this folder (its moments are quantized anew), or of
        `torch.optim.Adam` or `AdamW`. torch's own method casts states to the dtype of their parameter, which would
        round fp32 moments of bf16 parameters; here they arrive as they were saved.

        Raises:
            ValueError: the groups differ, a group maximizes, or a state is of another optimizer or does not fit its
                parameter.
        """
        state_dict = dict(state_dict)
        hooks, self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_pre_hooks, OrderedDict()
        try:
            for hook in hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            known = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", *self.of_state}
            if unknown := sorted({*itertools.chain(*state_dict["state"].values())} - known):
                raise ValueError(f"{type(self).__name__} has no {unknown[0]}: the checkpoint is of another optimizer")
            groups = [dict(group) for group in state_dict["param_groups"]]
            for group, own in zip(groups, self.param_groups, strict=False):
                if group.get("maximize"):
                    raise ValueError(f"{type(self).__name__} has no maximize=True, which the checkpoint has")
                for name in OF_TORCH:
                    group.pop(name, None)
                defaults = {name: value for name, value in own.items() if name not in ("params", "param_names")}
                group.update({**defaults, **group, **{name: own[name] for name in OWN}})
            state = {
                key: {name: _Uncast(value) for name, value in of_one.items()}
                for key, of_one in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for parameter in group["params"]:
                found = self.state.get(parameter, {})
                if any(isinstance(value, _Uncast) for value in found.values()):
                    values = {name: uncast.value for name, uncast in found.items()}
                    self.state[parameter] = self._read(parameter, group, values)

    def _read(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, as it was saved, in the form in which it is held here."""
        moments = dict(state)
        step = moments.pop("step", torch.zeros((), dtype=torch.float32, device="cpu"))  # Muon of torch counts none
        step = step.detach().to("cpu", torch.float32).reshape(()).clone()
        return {"step": step, **{name: converted(parameter, group, name, value) for name, value in moments.items()}}


def count_step(state: dict[str, Any]) -> int:
    """Count one more step in the state of a parameter, in fp32 on the CPU as torch's optimizers do; its number."""
    state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
    state["step"] += 1
    return int(state["step"].item())


def add_moments(state: dict[str, Any], whole: Tensor, group: dict[str, Any], names: Iterable[str]) -> None:
    """Moments of these names, zeros of the shape of `whole`, where the state has none."""
    for name in names:
        if name not in state:
            state[name] = zeros(whole, group, name)


class Writable:
    """The weight as a plain contiguous tensor that is changed in place, and written back where it is a copy."""

    def __init__(self, local: Tensor) -> None:
        self.target: Any = local.master if isinstance(local, MasterWeight) else local

    def __enter__(self) -> Tensor:
        target = self.target
        self.in_codes = isinstance(target, QuantizedTensor)  # the write rounds as their recipe says
        self.weight = target.dequantize(torch.float32) if self.in_codes else target.detach().contiguous()
        return self.weight

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None and (self.in_codes or self.weight.data_ptr() != self.target.data_ptr()):
            self.target.copy_(self.weight)


class Adam4bit(LowBitAdam):
    """Adam with moments of 4 bits, the square of equidistant numbers: 1.06 bytes a parameter in place of 8."""

    decoupled = False
    default_bits = 4
    default_block_size = 128


class AdamW4bit(Adam4bit):
    """AdamW with the moments of `Adam4bit`."""

    decoupled = True


class Adam8bit(LowBitAdam):
    """Adam with moments of 8 bits, the fourth power of equidistant numbers: 2.03 bytes a parameter in place of 8."""

    decoupled = False


class AdamW8bit(Adam8bit):
    """AdamW with the moments of `Adam8bit`."""

    decoupled = True


class AdamFp8(LowBitAdam):
    """Adam with moments in float8 e4m3: 2.03 bytes a parameter in place of 8."""

    decoupled = False
    default_bits = "fp8"


class AdamWFp8(AdamFp8):
    """AdamW with the moments of `AdamFp8`."""

    decoupled = True


class _AdamW(LowBitAdam):
    """AdamW in fp32, with one rounding of the parameter a step. For bf16 models: their moments keep their precision,
    and `bf16_stochastic_round` that of their updates."""

    default_bits = 32
