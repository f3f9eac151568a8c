"""Budget: what the allocated weights may take, in bits an element, bytes or milliseconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

UNITS = {
    **{"B": 1, "bytes": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}

_NUMBER = r"(?P<number>\d[\d_]*(?:\.\d+)?|\.\d+)\s*"
_BITS = re.compile(_NUMBER + r"bits?(?: an element| a weight)?")
_BYTES = re.compile(_NUMBER + rf"(?P<unit>{'|'.join(UNITS)})(?P<model> model)?")
_TIME = re.compile(_NUMBER + r"(?P<unit>ms|us|s)(?: a token)?")

_NANOSECONDS = {"us": 10**3, "ms": 10**6, "s": 10**9}

FORMS = '"3.5 bits", a number of bytes, "1.2 GB", "1.2 GB model", "12 ms a token"'


@dataclass(frozen=True)
class Budget:
    """A limit.

    Attributes:
        text: as it was given.
        kind: ``"bits"``, ``"bytes"`` or ``"time"``.
        amount: bits an element, bytes, or nanoseconds.
        of_model: bytes of all parameters and buffers of the model, instead of those of the allocated weights.
    """

    text: str
    kind: str
    amount: float
    of_model: bool = False

    @property
    def is_time(self) -> bool:
        return self.kind == "time"

    @classmethod
    def of(cls, budget: Any) -> Budget:
        """The budget that a number of bytes or a text says.

        Raises:
            ValueError: the text is none of these, or not positive.
            TypeError: it is neither a text nor an integer.
        """
        if isinstance(budget, Budget):
            return budget
        if isinstance(budget, int | float) and not isinstance(budget, bool):
            if budget != int(budget) or budget <= 0:
                raise ValueError(
                    f"allocate: a number as budget counts bytes, a positive integer, got {budget}; for bits an element "
                    f'write "{budget} bits"'
                )
            return cls(f"{int(budget):,} bytes", "bytes", int(budget))
        if not isinstance(budget, str):
            raise TypeError(f"allocate: budget is {FORMS}, got {budget!r}")
        text = budget.strip()
        for kind, pattern in (("bits", _BITS), ("bytes", _BYTES), ("time", _TIME)):
            if found := pattern.fullmatch(text):
                number = float(found["number"].replace("_", ""))
                if not number > 0:
                    break
                parts = found.groupdict()
                factor = {"bits": 1, "bytes": UNITS.get(parts.get("unit", ""), 1)}.get(kind)
                factor = _NANOSECONDS[found["unit"]] if factor is None else factor
                return cls(text, kind, number * factor, bool(parts.get("model")))
        raise ValueError(f"allocate: budget is {FORMS}, got {budget!r}")

    def limit(self, elements: int, rest: int) -> int:
        """The largest total cost, in bytes or nanoseconds.

        Args:
            elements: number of elements of the allocated weights.
            rest: bytes of the model beside them.
        """
        if self.kind == "bits":
            # A tolerance for decimals such as 4.15 that binary numbers miss; it is less than a byte.
            return math.floor(self.amount * elements / 8 + 1e-6)
        return math.floor(self.amount) - (rest if self.of_model else 0)
