"""How the functions of this library meet `torch.compile`, `torch.jit` and the transforms of `torch.func`."""
