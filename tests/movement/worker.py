"""One of two ranks: python -m torch.distributed.run ... worker.py RESULT MOVEMENT ...

Rank 0 writes the outcomes of all kinds to the file RESULT.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

from tests.distributed.processes import worker
from tests.movement.across import run_all
from tests.movement.kinds import BY_NAME, KINDS


def main(result: str, *names: str) -> None:
    wanted = os.environ.get("MOVEMENT_KINDS")
    kinds = [BY_NAME[name] for name in wanted.split(";")] if wanted else KINDS
    found = run_all(list(names), kinds)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(main)
