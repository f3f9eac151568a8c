"""Reading files that may be untrusted: regular files only, and JSON of bounded size, depth and number of values.

All JSON that a user, a file or the environment can give is parsed here.
"""

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Any

from typing_extensions import Self

MAX_JSON = 100_000_000
"""Bytes of a JSON file, the limit of the safetensors library for a header."""

MAX_DEPTH = 128
"""Nesting of lists and objects: what walks through them calls itself for each."""

MAX_VALUES = 6_000_000
"""An empty list takes 3 bytes of text and 80 of memory."""

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Closable:
    """What holds files: a context manager that ends by `close`."""

    def close(self) -> None:
        """Close the files."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """Close after an error, and after that alone."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for reading, without a buffer; never waits, as opening a pipe would. `FileNotFoundError` if there is
    none of this name, `ValueError` for a folder, a pipe or a device."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # a name with a null byte, or with half a character
        raise FileNotFoundError(f"{os.fspath(path)!r}: no such file ({error})") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            why = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
            raise FileNotFoundError(f"{path}: no such file{why}") from error
        if error.errno in (errno.ENXIO, errno.ENODEV) or os.path.isdir(path):
            raise ValueError(f"{path}: it is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError(f"{path}: it is not a regular file")
    return FileIO(number, "rb")


@contextmanager
def naming(*where: object) -> Iterator[None]:
    """What a block finds wrong with a file, as `ValueError` that begins with `where`: the file, the tensor."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(": ".join(map(str, (*where, error)))) from error


def read_json(path: str | os.PathLike[str], most: int = MAX_JSON, values: int = MAX_VALUES) -> Any:
    """The data of a JSON file of at most `most` bytes and about `values` values; errors, as of `open_regular` and
    `parse_json`, name the file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path}: it has {size} bytes; a JSON file has at most {most}")
        data = file.read(size)
    with naming(path, "it is not JSON"):
        return parse_json(data, values)


def parse_json(text: str | bytes, values: int = MAX_VALUES) -> Any:
    """Parse JSON text; `ValueError` if it is not JSON in UTF-8, is nested deeper than `MAX_DEPTH`, has more than about
    `values` values, or an object has a key twice."""
    comma, bracket, brace = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if len(text) > values and sum(map(text.count, (comma, bracket, brace))) > values:  # type: ignore[arg-type]
        raise ValueError(f"the JSON has more than {values} values")
    try:
        data = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return data
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    raise ValueError("the JSON is nested too deep")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r:.80} occurs twice")
    return found
