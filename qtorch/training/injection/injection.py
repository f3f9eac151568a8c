"""Injection: inside of a context, every contraction of any code runs in the engine, forward and both gradients.

    with inject(fully_quantized(8, 8)):
        loss = model(x).sum()
    loss.backward()

A function mode of torch sees all products that the code asks torch for (`contractions`): nothing is rewritten, no
module and no parameter is changed. Which spec a product has is decided by its call site (`mode`).

`convert` freezes what the products make of parameters alone, on either side, as codes: w, but also T(w), the weight of
a parametrized layer. A parameter that nothing else needs is then dropped.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...model.install import QuantizationState
from ...primitives.tracing import plain_name
from ..engine.contraction import contraction
from ..engine.gemm_spec import TrainingSpec
from ..engine.operand import STATELESS, ContractionState
from ..quantization_aware.schedule import QuantizationSchedule
from ..recipes.scheduled import ScheduledContraction
from .mode import CallSite, Constants, InjectionMode, ModuleStack
from .stored import StoredOperands

Rules = TrainingSpec | Mapping[str, "TrainingSpec | None"] | Callable[[CallSite], "TrainingSpec | None"]
"""One spec for all; or by name, the first key whose regular expression matches the whole name of the site, ``"module"``
or ``"module:function"``; or a function of the site. None is full precision."""


def rule_of(rules: Any) -> Callable[[CallSite], TrainingSpec | None]:
    """The function of the site that `rules` stand for."""
    if isinstance(rules, TrainingSpec):
        return lambda site: rules
    if isinstance(rules, Mapping):
        compiled = []
        for key, value in rules.items():
            if value is not None and not isinstance(value, TrainingSpec):
                raise ValueError(f"inject: {key!r} has {value!r}; a rule is a TrainingSpec, or None for full precision")
            try:
                compiled.append((re.compile(key), value))
            except re.error as error:
                raise ValueError(f"inject: {key!r} is no regular expression: {error}") from error

        def find(site: CallSite) -> TrainingSpec | None:
            for pattern, spec in compiled:
                if pattern.fullmatch(site.name) or pattern.fullmatch(site.module):
                    return spec
            return None

        return find
    if callable(rules):
        return rules
    raise TypeError(f"inject takes a TrainingSpec, a mapping of names to specs, or a function, got {rules!r}")


class Injection(QuantizationState):
    """The context that `inject` makes. As a module it holds the state of call sites and stored codes, for files.

    Attributes:
        counts: name of a call site -> how often it was quantized since the last `with`.
        counts_passes: the schedules of call sites count forward passes, until `advance_with` has an optimizer do so.
    """

    counts_passes: bool = True

    def __init__(self, rules: Rules, schedule: QuantizationSchedule | None = None) -> None:
        super().__init__()
        self.rules, self.schedule = rules, schedule
        self.rule = rule_of(rules)
        self.states = nn.ModuleDict()
        self.stored = StoredOperands()
        self.counts: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._contexts: list[ExitStack] = []
        self._sites = ModuleStack(self._begin, self._end)
        self._constants: Constants | None = None
        self._converting = False

    def __getstate__(self) -> dict[str, Any]:
        own = {"rule", "_contexts", "_sites", "_constants", "_converting"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rule = rule_of(self.rules)
        self._reset()

    def __enter__(self) -> "Injection":
        stack = ExitStack()
        if not self._contexts:
            self.counts.clear()
            self._sites.start()
            stack.callback(self._sites.stop)
            self._constants = Constants() if self.stored or self._converting else None
            if self._constants is not None:
                stack.enter_context(self._constants)
            stack.enter_context(InjectionMode(self))  # once: a second one would see the products of the first
        self._contexts.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    def attach(self, model: nn.Module, name: str = "injection") -> nn.Module:
        """Let every call of `model` run inside of this context, and its state dict, copies and files have the state.

        Raises:
            ValueError: `model` has a submodule of this name.
        """
        if hasattr(model, name):
            raise ValueError(f"attach: the model has {name!r} already; give another name")
        model.add_module(name, self)
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, always_call=True)
        return model

    def forward(self, *args: Any) -> Any:
        """Its input: attached to an `nn.Sequential`, it is run as one of its modules."""
        return args[0] if args else None

    def _before(self, model: nn.Module, _: Any) -> None:
        self.__enter__()
        if self._sites.root is None:
            self._sites.enter(model)

    def _after(self, *_: Any) -> None:
        if self._contexts:
            self.__exit__(None, None, None)

    def _begin(self, root: nn.Module) -> None:
        if self._constants is not None:
            self._constants.begin(root)

    def _end(self) -> None:
        for state in self.states.values():
            assert isinstance(state, ScheduledContraction)
            if state.training and state.is_used:
                state.advance()
            state.is_used = False

    def rule_at(self, function: str) -> tuple[CallSite, TrainingSpec | None]:
        """The site of the next call of `function`, and its spec."""
        site = self._sites.site(function)
        spec = self.rule(site)
        if spec is not None:
            self.counts[site.name] += 1
        return site, spec

    def multiply(self, site: CallSite, spec: TrainingSpec, lhs: Tensor, rhs: Tensor) -> Tensor:
        """c[a, b] = sum_c lhs[a, c] rhs[b, c], as `spec` says, or with what is stored."""
        state, constants = self._state(site), self._constants
        if constants is None:
            return contraction(lhs, rhs, spec, state)
        of_lhs, of_rhs = constants.known.get(lhs), constants.known.get(rhs)
        operands, made_of = (lhs, rhs), (of_lhs, of_rhs)
        with constants.pause():
            if self._converting:
                y, frozen = self.stored.freeze(operands, made_of, spec, state)
                for constant, operand, stored in zip(made_of, operands, frozen, strict=True):
                    for name in () if constant is None else constant.roots:
                        constants.stored[name] += operand.numel() if stored else 0
                    if constant is not None and not stored:
                        constants.needed |= constant.roots
            else:
                y = self.stored.multiply(site.name, operands, made_of, spec, state)
        if of_lhs is not None and of_rhs is not None:
            constants.make(y, of_lhs, of_rhs)
        return y

    def _state(self, site: CallSite) -> ContractionState:
        if self.schedule is None:
            return STATELESS
        state = self._state_of(site.name.replace(".", "/"))
        root = self._sites.root
        training = self.training if root is None else root.training
        if state.training is not training:
            state.train(training)
        state.is_used = True
        return state

    def _state_of(self, key: str) -> ScheduledContraction:
        """That of a call site, made when it is first seen."""
        if key not in self.states:
            assert self.schedule is not None
            self.states[key] = made = ScheduledContraction(self.schedule)
            made.counts_passes = self.counts_passes
        state = self.states[key]
        assert isinstance(state, ScheduledContraction)
        return state

    @torch.no_grad()
    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Run ``model(*args, **kwargs)`` in eval mode, store the codes of all operands that depend on parameters alone,
        and drop the parameters that nothing else reads, whose place is taken by tensors of the meta device.

        Inside of this context the model then computes what it did before, in eval mode. What the call does not reach,
        such as an expert without tokens, keeps its floats and is quantized on each call.

        Raises:
            ValueError: it is converted already.
        """
        if self.stored:
            raise ValueError("convert: this injection has stored operands already")
        training = model.training
        model.eval()
        self._converting = True
        try:
            with self:
                model(*args, **kwargs)
            constants = self._constants
            assert constants is not None
        finally:
            self._converting = False
            model.train(training)
        self.stored.publish()
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        dropped = {
            id(parameter)
            for name, parameter in named
            if name not in constants.needed and constants.stored[name] >= parameter.numel() > 0
        }
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in dropped:
                    empty = torch.empty_like(parameter, device="meta")
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        return model

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.schedule is not None:
            for key in state_dict:
                if key.startswith(f"{prefix}states.") and key.endswith(".step"):
                    self._state_of(key.removeprefix(f"{prefix}states.").removesuffix(".step"))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{len(self.states)} call sites, {len(self.stored)} stored operands"


def inject(rules: Rules, schedule: QuantizationSchedule | None = None) -> Injection:
    """A context inside of which contractions of any code run in the engine: `linear`, `matmul` and its kin, `einsum`,
    `tensordot`, convolutions and transposed ones, `scaled_dot_product_attention`, `multi_head_attention_forward`,
    `grouped_mm`, `bilinear`, called by whatever module.

    Gradients run in the engine too, wherever `backward` is called; where it runs parts of the forward again, for
    checkpointed activations, it has to be called inside of the context, or these parts are in full precision.

    Not seen are recurrent layers, which run fused kernels, and operators that other packages have compiled. Weights
    that are quantized or in training already keep what they do. With torch.compile the context may be entered inside or
    outside of what is compiled.

    Args:
        rules: a spec for all, or by call site; see `Rules`.
        schedule: from which step on, and which operands are static; each call site has a state.

    Raises:
        TypeError, ValueError: the rules are none.

    Example::

        with inject({r"lm_head": None, r".*:(scores|values)": int8_attention, r".*": fully_quantized(8, 8)}):
            loss = model(x).loss
        loss.backward()
    """
    return Injection(rules, schedule)
