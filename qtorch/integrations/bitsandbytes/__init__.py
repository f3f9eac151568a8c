"""For users of bitsandbytes: the names and arguments of version 0.50 that have an equivalent.

    import qtorch.integrations.bitsandbytes as bnb
    layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4")
    optimizer = bnb.optim.AdamW8bit(parameters)

What has none raises a `ValueError`, or an `AttributeError` for a name. bitsandbytes need not be installed.
"""

from . import nn, optim

__all__ = ["nn", "optim"]
