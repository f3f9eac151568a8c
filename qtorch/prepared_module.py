"""Modules in training: float modules whose class was replaced by one that fake-quantizes.

What training adds to it (learned scales, observed ranges, adapters) are ordinary parameters and buffers of it and of
its submodules; `weight` keeps its name and is a plain parameter. `convert()` gives it the weight for inference and
its class back.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; the package that defines them is not imported for that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class PreparedModule(nn.Module):
    """Base class of the classes that replace those of float modules during training.

    Attributes:
        float_class: the class of the float module.
    """

    float_class: ClassVar[type[nn.Module]]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of `nn.Module`.

        Raises:
            NotImplementedError: a DTensor, by which the styles of torch's tensor parallelism replace a parameter.
        """
        if is_sharded(param):
            raise NotImplementedError(
                f"{name} of a {type(self).__name__}: a layer in training cannot be parallelized by the styles of "
                "torch; convert() the model first, or train it under FSDP2 or DistributedDataParallel"
            )
        super().register_parameter(name, param)

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
