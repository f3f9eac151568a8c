"""Names and arguments of other packages, for their users: `qtorch.compat.torchao`."""

from . import torchao

__all__ = ["torchao"]
