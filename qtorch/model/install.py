"""Atomic changes of a model: after an exception at any point, also Ctrl-C, the model is the old one or the new one.

`install` replaces entries of tables (parameters, buffers, attributes of modules). Other changes, such as replacing the
class of a module, run inside `all_or_nothing`. Create all new values before installing them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import delitem, setitem
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..primitives.tracing import is_sharded

T = TypeVar("T", bound=Tensor)

REMOVED: Any = object()
"""Value of a `Change` that removes the entry."""


class Change(NamedTuple):
    """``table[key] = value``; a table is ``module._parameters``, ``module._buffers``, ``vars(module)``, ..."""

    table: MutableMapping[str, Any]
    key: str
    value: Any


def install(changes: Iterable[Change]) -> None:
    """Make all changes, or none. They run as one call into C code of the interpreter, which handles no signals: Ctrl-C
    takes effect before or after."""
    changes = list(changes)
    tables = {id(table): table for table, _, _ in changes}
    steps = [
        partial(delitem, table, key) if value is REMOVED else partial(setitem, table, key, value)
        for table, key, value in changes
    ]
    with _RolledBack([_contents(table) for table in tables.values()]):
        _run(steps)


def all_or_nothing(modules: Iterable[nn.Module]) -> "_RolledBack":
    """Context manager that restores these modules if an exception leaves the block: their classes, attributes,
    parameters, buffers and submodules, but not what was changed inside those, such as the data of a tensor."""
    return _RolledBack([undo for module in dict.fromkeys(modules) for undo in _states(module)])


@contextmanager
def restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore these modules in any case, as `all_or_nothing` does after an exception."""
    undo = all_or_nothing(modules).undo
    try:
        yield
    finally:
        _run(undo)


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Attributes that the user or a framework has set on a parameter or buffer."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        return dict(vars(tensor))
    # Attributes of other subclasses may be internal; quantized tensors know which ones the user has set.
    own: Callable[[], dict[str, Any]] = getattr(tensor, "_extra_state", dict)
    return own()


def keep_attributes(new: T, old: Tensor) -> T:
    """Copy the `user_attributes` of `old` to `new`, which replaces it, except those that `new` has itself."""
    vars(new).update({name: value for name, value in user_attributes(old).items() if not hasattr(new, name)})
    return new


class _RolledBack:
    """Context manager that runs `undo` if an exception leaves its block."""

    def __init__(self, undo: Sequence[Sequence[partial[Any]]]) -> None:
        self.undo = [step for steps in undo for step in steps]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            _run(self.undo)


def _run(steps: list[partial[Any]]) -> None:
    deque(map(partial.__call__, steps), 0)


def _contents(table: Any) -> list[partial[Any]]:
    """Steps that restore the entries of a dict or set, in their order."""
    return [partial(table.clear), partial(table.update, table.copy())]


def _states(module: nn.Module) -> list[list[partial[Any]]]:
    tables = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    own_class = [partial(object.__setattr__, module, "__class__", type(module))]
    return [own_class, _contents(vars(module)), *[_contents(vars(module)[name]) for name in tables]]


# Modules in training: float modules whose class was replaced by one that fake-quantizes.
# What training adds to it (learned scales, observed ranges, adapters) are ordinary parameters and buffers of it and of
# its submodules; `weight` keeps its name and is a plain parameter. `convert()` gives it the weight for inference and
# its class back.


class PreparedModule(nn.Module):
    """Base class of the classes that replace those of float modules, `float_class`, during training."""

    float_class: ClassVar[type[nn.Module]]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of `nn.Module`; the styles of torch's tensor parallelism would replace a parameter by a DTensor."""
        if is_sharded(param):
            raise NotImplementedError(
                f"{name} of a {type(self).__name__}: a layer in training cannot be parallelized by the styles of "
                "torch; convert() the model first, or train it under FSDP2 or DistributedDataParallel"
            )
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this first and would compile the forward with none of its state."""
        raise TypeError("torch.jit.script cannot compile a layer in training; convert() the model, use torch.export")

    def check_convert(self) -> None:
        """Raise `ValueError` where `convert` could not do its work."""

    def convert(self) -> Tensor:
        """The weight for inference, codes and scales as the forward has them."""
        raise NotImplementedError

    def restore(self) -> None:
        """Remove what training has added, and restore the float class."""
        self.__class__ = self.float_class  # type: ignore[assignment]


class QuantizationState(nn.Module):
    """Module of parameters and buffers that belong to quantization; recipes do not quantize them."""


# Functions that are told when the weights of a model have been quantized, loaded or dequantized.
# Integrations add one to `LISTENERS` when the package that they are for is imported, so that a model of that package
# knows that it is quantized.

Listener = Callable[[nn.Module, Mapping[str, Any]], None]
"""(model, recipe by name of parameter); the mapping is empty after `load_quantized` and `dequantize_`."""


def _avoid_fused_encoders(model: nn.Module, _recipes: Mapping[str, Any]) -> None:
    """Keep encoder layers of torch that are quantized from their fused kernel, which reads the weights itself."""
    for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder | nn.TransformerEncoderLayer)):
        parts = (*encoder.parameters(), *encoder.modules())
        if any(isinstance(part, QuantizedTensor | PreparedModule) for part in parts):
            vars(encoder).update(activation_relu_or_gelu=0, use_nested_tensor=False)


LISTENERS: list[Listener] = [_avoid_fused_encoders]


def tell(model: nn.Module, recipes: Mapping[str, Any] | None = None) -> None:
    """Call all listeners."""
    for listener in LISTENERS:
        listener(model, recipes or {})


def check_model(function: str, model: Any) -> None:
    """Raise `TypeError` if `model` is not a module; the message names `function`."""
    if isinstance(model, nn.Module):
        return
    what, hint = f"a {type(model).__name__}", ""
    if model is None:
        what, hint = "None", "; methods such as model.eval() return the model, functions that change it may not"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        what, hint = f"the class {model.__name__}", f"; make one: {model.__name__}(...)"
    elif isinstance(model, Mapping):
        what, hint = f"{what}, a state dict it seems", "; load it into its model first: model.load_state_dict(...)"
    elif isinstance(model, list | tuple):
        hint = "; give one model at a time, or nn.ModuleList(models)"
    elif isinstance(model, str):
        what, hint = repr(model), "; build the model first"
    raise TypeError(f"{function}: takes a model, an nn.Module, got {what}{hint}")
