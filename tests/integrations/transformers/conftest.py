"""What several of these tests start from."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small Llama in floating point."""
    from tests.integrations.transformers.tiny_models import build

    build("llama").save_pretrained(tmp_path)
    return tmp_path
