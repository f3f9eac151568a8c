"""Compile the C++ kernels: ``python -m qtorch.kernels.cpu``."""

import sys

from .build import main

if __name__ == "__main__":
    sys.exit(main())
