"""CanonicalSource: base of sources whose quantized tensors are stored in canonical form (see `dtypes.serialize`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ..dtypes.serialize import Entry, from_canonical, scheme_of
from .source import Contents, Source
from .tensor_file import Stored


class CanonicalSource(Source):
    """A `Source` with an entry of `to_canonical` for each quantized tensor.

    Attributes:
        entries: by name of the quantized tensor; all stored names that they give exist.
    """

    entries: Mapping[str, Entry]

    @abstractmethod
    def stored(self, key: str) -> Stored:
        """Dtype, shape and place of what is stored under `key`."""

    @abstractmethod
    def read(self, key: str) -> Tensor:
        """Read what is stored under `key`."""

    def contents(self, name: str) -> Contents:
        entry = self.entries.get(name)
        parts = [self.stored(key) for key in ([name] if entry is None else entry["tensors"].values())]
        nbytes = sum(part.stop - part.start for part in parts)
        if entry is None:
            return Contents(parts[0].shape, parts[0].dtype, nbytes)
        try:
            scheme = scheme_of(entry)
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error
        return Contents(scheme.shape, scheme.dtype, nbytes, scheme)

    def tensor(self, name: str) -> Tensor:
        entry = self.entries.get(name)
        if entry is None:
            return self.read(name)
        # Errors of `read` name the file and the tensor already.
        parts = {key: self.read(key) for key in entry["tensors"].values()}
        try:
            return from_canonical(entry, parts.pop)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error
