"""Compiled kernels of another processor, run by an emulator of its instructions.

An `EmulatedLibrary` stands in for a loaded one. It sends the struct of each call, with the memory of all tensors that
the struct points to, to a program that `qemu-aarch64` runs (`emulated_call.cpp`), and writes back what comes out. So
the layers, and the Python code above the kernels, are those that run on such a processor.
"""

import bisect
import ctypes
import fcntl
import functools
import gc
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import qtorch
from qtorch.kernels.cpu import build, compiled_library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")
"""Where the C library of that machine is."""

MISSING = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
INSTRUCTION_SETS = tuple(build.FLAGS["aarch64"])

PROCESSORS = {"portable": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}
"""What is emulated for each instruction set: no more than it, where there is such a processor."""


@functools.cache
def built() -> Path:
    """The folder with the libraries and the program, compiled once for these sources, which takes a minute or more."""
    folder = Path(qtorch.__file__).parents[1] / "build" / "arm" / build.fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("CXX", COMPILER)
        absent = [name for name in INSTRUCTION_SETS if not build.library_path(name, folder).exists()]
        if absent and (errors := build.build(folder, names=absent, machine="aarch64")):
            raise RuntimeError(f"{COMPILER}: {errors}")
        program = Path(__file__).with_name("emulated_call.cpp")
        # With OpenMP, which the libraries are linked without.
        flags = ["-std=c++17", "-O1", "-fopenmp", "-rdynamic"]
        draft = folder / f"call.{os.getpid()}"
        subprocess.run([COMPILER, *flags, str(program), "-ldl", "-o", str(draft)], check=True)
        draft.replace(folder / "call")  # in one step: other processes run it meanwhile
    return folder


class EmulatedLibrary(compiled_library.Library):
    """The library of an instruction set of Arm."""

    def __init__(self, instruction_set: str, processor: str = "") -> None:
        self.instruction_set, self.processor = instruction_set, processor or PROCESSORS[instruction_set]
        self.path = build.library_path(instruction_set, built())
        self.calls: list[str] = []
        for name in (*compiled_library.RUN, *compiled_library.COUNT):
            setattr(self, name, functools.partial(self._call, name))

    def _call(self, name: str, packed: bytes) -> int:
        self.calls.append(name)
        buffers, pointers = _memory_of(packed)
        request = struct.pack("<q", len(buffers))
        for start, size in buffers:
            request += struct.pack("<q", size) + ctypes.string_at(start, size)
        request += struct.pack("<q", len(packed)) + packed + struct.pack("<q", len(pointers))
        request += b"".join(struct.pack("<3q", *pointer) for pointer in pointers)
        emulator = [EMULATOR, "-cpu", self.processor, "-L", str(SYSTEM)]
        command = [*emulator, str(built() / "call"), str(self.path), f"qtorch_{name}"]
        done = subprocess.run(command, input=request, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} on {self.instruction_set}: rc {done.returncode}: {done.stderr.decode()}")
        answer, at = done.stdout, 8
        for start, size in buffers:
            ctypes.memmove(start, answer[at : at + size], size)
            at += size
        assert at == len(answer)
        return struct.unpack_from("<q", answer)[0]


def _memory_of(packed: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """([(address, size) of a buffer], [(place in the struct, buffer, offset in it)]) of what the struct points to."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu"]
    known: list[tuple[int, int]] = sorted({found for found in map(_storage_of, tensors) if found[1]})
    starts = [start for start, _ in known]
    buffers: list[tuple[int, int]] = []
    pointers = []
    for i, (word,) in enumerate(struct.iter_unpack("<Q", packed)):
        found = known[bisect.bisect_right(starts, word) - 1] if known else (0, 0)
        if found[0] <= word < sum(found):
            if found not in buffers:
                buffers.append(found)
            pointers.append((8 * i, buffers.index(found), word - found[0]))
        elif 1 << 32 < word < 1 << 48:
            raise AssertionError(f"word {i} of the struct, {word:#x}, is an address that is of no tensor")
    return buffers, pointers


def _storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, size) of its storage; (0, 0) where it has none, as what other tests have left may."""
    try:
        return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0, 0


@contextmanager
def emulate(instruction_set: str, processor: str = "") -> Iterator[EmulatedLibrary]:
    """Let compiled kernels be those of an instruction set of Arm inside the ``with`` block."""
    library = EmulatedLibrary(instruction_set, processor)
    with compiled_library.use(None), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_library, "_forced", [library])
        compiled_library.forget_choices()
        yield library
