from pathlib import Path

import pytest

from tests.cli.tiny import Command, save_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
