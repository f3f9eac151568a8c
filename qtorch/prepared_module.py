"""Modules in training: a float module whose class was exchanged for one that fake-quantizes.

What training adds to it (learned scales, observed ranges, adapters) are ordinary parameters and buffers of it and of
its submodules; `weight` keeps its name and is a plain parameter. `convert()` gives it the weight for inference and
its class back.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn


class PreparedModule(nn.Module):
    """Base of the classes that stand in for float ones.

    Attributes:
        float_class: what it was, and will be again.
    """

    float_class: ClassVar[type[nn.Module]]

    def check_convert(self) -> None:
        """Raise `ValueError` where `convert` could not do its work."""

    def convert(self) -> Tensor:
        """The weight for inference, codes and scales as the forward has them."""
        raise NotImplementedError

    def restore(self) -> None:
        """Remove what training has added, and take the float class back."""
        self.__class__ = self.float_class  # type: ignore[assignment]


class QuantizationState(nn.Module):
    """Parameters and buffers that belong to quantization, not to the model: no recipe reaches them."""
