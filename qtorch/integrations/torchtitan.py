"""TorchTitan: a converter that lets its trainer train a model by a recipe of qtorch. Written for TorchTitan 0.3.

    model_registry("8B", converters=[QtorchConverter.Config(recipe=int8_mixed_precision_training())])

TorchTitan converts the configuration of a model before it builds it on the meta device, shards it and initializes it.
The converter wraps the class of the model in one that calls `quantize_` at the end of its construction.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.protocols.model import ModelConfigConverter

from ..quantize_api import quantize_


class QtorchConverter(ModelConfigConverter):
    """Quantizes a model for training, as `quantize_(model, recipe, **options)` does."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """`recipe`: one recipe, or an ordered mapping from names to recipes; `options`: more arguments of `quantize_`.

        Raises:
            TypeError, ValueError: those of `quantize_`, when the model is built.
        """

        recipe: Any
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The configuration of the same model, quantized when it is built."""
        base, recipe, options = model_config._owner, self.config.recipe, self.config.options

        class Quantized(base):  # type: ignore[misc, valid-type]
            @dataclass(kw_only=True, slots=True)
            class Config(type(model_config)):  # type: ignore[misc]
                pass

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                quantize_(self, recipe, **options)

        Quantized.__name__ = Quantized.__qualname__ = base.__name__
        return Quantized.Config(**{each.name: getattr(model_config, each.name) for each in fields(model_config)})
