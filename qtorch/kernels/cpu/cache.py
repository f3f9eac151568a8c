"""The user's cache of compiled kernels: built at first use if the package has no library, and kept for later processes.

    $XDG_CACHE_HOME/qtorch/cpu-<platform>-<fingerprint>/libqtorch_<instruction set>.so        (~/.cache by default)

Loading a library runs its code: the folders are created with mode 0700, and nothing is loaded from a place that another
user could have written to.
"""

import logging
import os
import shutil
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .build import accepts, build, find_compiler, fingerprint, instruction_sets, library_path

_log = logging.getLogger(__name__)


def folder() -> Path:
    """The folder of this user's libraries of these sources; a `RuntimeError` if the user has no home directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "qtorch" / f"cpu-{sysconfig.get_platform()}-{fingerprint()}"


def find(instruction_set: str) -> tuple[Path | None, str]:
    """(path, reason): the library of an instruction set; or None and why, empty if it was never built."""
    try:
        path = library_path(instruction_set, folder())
    except RuntimeError:
        return None, ""
    if not os.path.lexists(path):
        return None, ""
    reason = distrust(path.parent, path)
    return (None, reason) if reason else (path, "")


def find_or_compile(instruction_set: str) -> tuple[Path | None, str]:
    """`find`, but compile a library that was never built, in this process or by waiting for another that does."""
    found, reason = find(instruction_set)
    if found or reason:
        return found, reason
    if os.environ.get("QTORCH_CPU_BUILD") == "0":
        return None, "it is not built, and QTORCH_CPU_BUILD=0 forbids it"
    compiler = find_compiler()
    if compiler is None:
        return None, "it is not built, and there is no C++ compiler on the PATH"
    if not accepts(compiler, instruction_sets()[instruction_set]):
        return None, f"it is not built, and {compiler[0]} does not know its instructions"
    try:
        directory = folder()
        if reason := prepare(directory):
            return None, reason
        with _lock(directory / f"{instruction_set}.lock"):
            found, reason = find(instruction_set)  # the process that held the lock may have compiled it
            if found or reason:
                return found, reason
            for leftover in directory.glob(f"{library_path(instruction_set).stem}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
            _log.warning(
                "qtorch: compiling the CPU kernels for %s into %s, which is done once and takes about half a minute; "
                "QTORCH_CPU_BUILD=0 forbids it",
                instruction_set,
                directory,
            )
            errors = build(directory, names=(instruction_set,), say=_log.info)
    except (OSError, RuntimeError) as error:
        return None, str(error)
    return (None, errors[instruction_set]) if instruction_set in errors else find(instruction_set)


def prepare(directory: Path) -> str:
    """Create the folder. Returns why it cannot be created or used, empty if it can."""
    if not hasattr(os, "geteuid"):
        return "compiled kernels cannot be kept for a user on this system"
    try:
        for path in (directory.parent.parent, directory.parent, directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return distrust(directory) or ("" if os.access(directory, os.W_OK) else f"{directory} cannot be written to")


def distrust(directory: Path, *files: Path) -> str:
    """Why libraries in the folder may not be loaded; empty if they may.

    The folder, the one above it and the files have to be this user's own and writable by nobody else. The folders
    above these, in which another user could exchange them, have to be this user's or root's, and writable by nobody
    else, unless only owners may rename there (the sticky bit of /tmp).
    """
    if not hasattr(os, "geteuid"):
        return "the owners of files are not known on this system"
    user, base = os.geteuid(), directory.parent.parent.absolute()
    real = base.resolve()
    try:
        for path in (directory.parent, directory, *files):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) or status.st_uid != user or status.st_mode & 0o022:
                return f"{path} is not trusted: it has to be this user's own, and writable by nobody else"
        for path in (base, *base.parents, real, *real.parents):
            status = path.stat()
            if status.st_uid not in (0, user) or (_shared(status) and not status.st_mode & stat.S_ISVTX):
                return f"{path} is not trusted: other users can exchange what is in it"
    except OSError as error:
        return str(error)
    return ""


def _shared(status: os.stat_result) -> bool:
    """Whether other users can write to it. A group whose only member is the user does not count as others."""
    if status.st_mode & 0o002 or not status.st_mode & 0o020:
        return bool(status.st_mode & 0o002)
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return group.gr_name != user.pw_name or any(member != user.pw_name for member in group.gr_mem)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file, which the system releases when a process dies. Where files cannot be locked, two processes
    may compile the same library; the last one replaces the file atomically."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("qtorch: waiting for another process that compiles the CPU kernels (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _log.info("%s cannot be locked: %s", path, error)
        yield
