"""What serves CUDA: Triton kernels for shared operations and for `F.linear`, one a file."""

from ...discovery import import_modules

import_modules(__name__, __path__)
