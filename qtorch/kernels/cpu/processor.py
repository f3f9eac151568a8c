"""The kind of processor that measurements hold for."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from .build import instruction_sets
from .compiled_library import runs_here

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def kind() -> str:
    """Vendor and family, and the best instruction set, which tells apart what a vendor sells under one family number:
    ``"AuthenticAMD family 26 with avx512_vnni"``."""
    best = next((name for name in reversed(instruction_sets()) if runs_here(name)), "portable")
    return f"{_vendor_and_family()} with {best}"


def vendor(of: str) -> str:
    """The first word of a kind."""
    return of.partition(" ")[0]


def _vendor_and_family() -> str:
    try:
        lines = CPUINFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    for of_vendor, of_family in (("vendor_id", "cpu family"), ("CPU implementer", "CPU part")):
        if of_vendor in fields and of_family in fields:
            return f"{fields[of_vendor]} family {fields[of_family]}"
    return platform.processor() or platform.machine() or "unknown"
