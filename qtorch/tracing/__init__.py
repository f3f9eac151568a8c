"""Support for `torch.compile`, `torch.jit` and the transforms of `torch.func`."""
