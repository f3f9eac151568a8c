"""Triton kernels for CUDA: the kernel and its launcher, one operation per file.

`import qtorch` imports nothing here. A file of `qtorch.kernels.cuda` imports the launcher when the operation first runs
on CUDA. With ``TRITON_INTERPRET=1`` set before triton is imported, the launchers take CPU tensors.
"""
