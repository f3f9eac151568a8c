"""The C++ source: its fields are those that Python declares, and sanitizers find nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from qtorch.kernels.cpu import build, compiled_library, conv_codes, structs
from tests.kernels.cpu.builds import NEEDS_LIBRARY

SIZE = 8
DECLARED = "".join(re.sub(r"//.*", "", path.read_text()) for path in build.SOURCES.glob("*.[ch]*"))


def declared(name: str) -> list[tuple[str, str]]:
    """(name, type) of the fields of a C++ struct; its methods come last."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", DECLARED, re.S).group(1)
    fields = []
    for statement in body.split(";"):
        if "(" in statement:
            break
        statement = re.sub(r" \*(\w+), \*", r"* \1, ", statement)
        if found := re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (\w+(?:, \w+)*)\s*", statement):
            kind, pointer, names = found.groups()
            fields += [(field, "pointer" if pointer else kind) for field in names.split(", ")]
        else:
            assert not statement.strip(), statement
    return fields


OURS = {
    name: kind
    for module in (structs, conv_codes)
    for name, kind in vars(module).items()
    if hasattr(kind, "_fields") and name != "CodesForm" and name != "NO_INPUT"
}


@pytest.mark.parametrize("name", OURS)
def test_fields_are_those_of_the_source(name):
    fields = declared(name)
    if name.endswith("Call") and not name.startswith("Conv"):
        assert fields.pop(0) == ("weight", "Weight")
    ours = get_type_hints(OURS[name])
    assert [field for field, _ in fields] == list(ours)
    for field, kind in fields:
        expected = {"int64_t": int, "double": float, "pointer": int}.get(kind) or OURS[kind]
        assert ours[field] is expected, field
    assert structs.struct_of(OURS[name]).size == SIZE * len(list(flat(ours)))


def flat(hints):
    for hint in hints.values():
        yield from flat(get_type_hints(hint)) if hasattr(hint, "_fields") else [hint]


def test_bytes():
    call = structs.Call(structs.Input(1, 2, 3, 4), structs.Output(5, 6, 7, 8), 9, 10)
    assert structs.pack(call) == b"".join(i.to_bytes(8, "little") for i in range(1, 11))


def has_sanitizers() -> bool:
    """Whether the compiler is gcc, and its address sanitizer is installed."""
    compiler = build.find_compiler()
    if compiler is None:
        return False
    found = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()).is_absolute()


@pytest.mark.slow
@NEEDS_LIBRARY
@pytest.mark.skipif(not has_sanitizers(), reason="needs gcc and its address sanitizer")
def test_no_errors():
    script = Path(__file__).with_name("sanitize.sh")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings |= {"SANITIZE_SETS": compiled_library.library().instruction_set, "SANITIZE_ONCE": "1"}
    settings["SANITIZE_SECONDS"] = "2400"
    done = subprocess.run(["bash", script, sys.executable], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
