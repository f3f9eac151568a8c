"""Triton kernels for CUDA: the kernel and its launcher, one operation a file.

Nothing here is imported with qtorch. The operation's file in `qtorch.kernels` imports the launcher when it first runs
on CUDA. With ``TRITON_INTERPRET=1`` set before triton is imported, the launchers take CPU tensors.
"""
