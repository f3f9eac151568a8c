"""``make fuzz ARGS="COUNT FIRST"``: damaged files of every reader, and pickles: any number of each, from seed FIRST."""

import argparse
import sys
import time

from tests.attack import workers
from tests.attack.readers import READERS

MODULES = ["tests.attack.checkpoints", "tests.attack.pickles", *(f"tests.attack.readers:{name}" for name in READERS)]
CHUNK = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=5000, help="cases of each kind")
    parser.add_argument("first", type=int, nargs="?", default=100_000, help="seed of the first")
    parser.add_argument("--only", choices=[name.rpartition(".")[2].rpartition(":")[2] for name in MODULES])
    options = parser.parse_args()
    failed = 0
    for module in MODULES:
        kind = module.rpartition(".")[2].rpartition(":")[2]
        if options.only in (None, kind):
            failed += attack(module, kind, options.first, options.count)
    return min(failed, 1)


def attack(module: str, kind: str, first: int, count: int) -> int:
    start, failed = time.monotonic(), 0
    for chunk in range(first, first + count, CHUNK):
        found = workers.failures(module, chunk, min(CHUNK, first + count - chunk))
        failed += len(found)
        print(*found, sep="\n", end="\n" if found else "")
        done = min(chunk + CHUNK, first + count) - first
        print(f"{kind}: {done} of {count}, {failed} failed, {time.monotonic() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
