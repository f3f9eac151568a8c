"""SaveFormat: a format of other packages in which quantized weights are saved, tensor by tensor.

A format is added by one file: a subclass with `@register_save_format`. Then ``save_quantized(model, folder,
format=name)`` writes it, and so does `quantize_checkpoint`, which never has the whole model in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from torch import Tensor

SAVE_FORMATS: dict[str, type[SaveFormat]] = {}
"""Every registered format by its name."""

C = TypeVar("C", bound="type[SaveFormat]")


class SaveFormat(ABC):
    """One checkpoint that is being written in a format.

    The caller passes every parameter and buffer to `store` once, in any order, and further names of it to `alias`,
    writes what `store` returns to safetensors files, and at the end puts `config()` into config.json as
    `quantization_config`.

    Args:
        config: contents of the config.json of the model; empty for a model without.

    Attributes:
        name: what `save_quantized(format=...)` takes.
    """

    name: ClassVar[str]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.model_config: Mapping[str, Any] = config or {}

    @abstractmethod
    def store(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The plain tensors, by stored name, that stand for the parameter or buffer `name`.

        Raises:
            ValueError: the format cannot hold the tensor; the message names it and says what to write instead.
        """

    def alias(self, name: str, original: str) -> None:  # noqa: B027 (optional)
        """Take note that `name` is another name of the tensor that was stored as `original`, and is not stored itself.

        Raises:
            ValueError: the format cannot say so.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The `quantization_config` for config.json, from everything that was stored.

        Raises:
            ValueError: weights that have to be quantized alike are not; the message names them.
        """

    def metadata(self, keys: Iterable[str]) -> dict[str, str]:
        """Metadata of a file with the stored tensors `keys`; by default none."""
        return {}

    @abstractmethod
    def progress(self) -> Any:
        """JSON data of what was stored so far, for `resume`."""

    @abstractmethod
    def resume(self, progress: Any) -> None:
        """Continue a checkpoint that another object of this class has begun, from its `progress`.

        The next tensor that `store` gets may be one that it had got already.

        Raises:
            ValueError: `progress` is not of this format.
        """


def register_save_format(cls: C) -> C:
    """Class decorator: register a format under its name.

    Raises:
        ValueError: another format has the same name.
    """
    if SAVE_FORMATS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"register_save_format: the name {cls.name!r} is taken by {SAVE_FORMATS[cls.name]!r}")
    return cls


def save_format(name: str, config: Mapping[str, Any] | None = None) -> SaveFormat:
    """A new checkpoint in the format `name`, for a model with this config.json.

    Raises:
        ValueError: there is no such format.
    """
    if name not in SAVE_FORMATS:
        known = ", ".join(repr(known) for known in ["qtorch", *sorted(SAVE_FORMATS)])
        raise ValueError(f"format {name!r} is not known; known are {known}")
    return SAVE_FORMATS[name](config)
