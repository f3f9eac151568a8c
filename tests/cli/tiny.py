"""A tiny Llama with a tokenizer in a folder, and the command line in this process."""

from pathlib import Path

import pytest
import torch

from qtorch.cli import main

WORDS = [f"w{i}" for i in range(60)]


def save_llama(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.zoo.architectures import built

    model, _ = built("llama", hidden_size=64, intermediate_size=128, num_attention_heads=4, max_position_embeddings=64)
    model.to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


class Command:
    """The command line in this process, and what it has printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> str:
        """Run it; what it prints, which is its error if a status is expected."""
        self.capsys.readouterr()
        try:
            found = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            found = int(error.code or 0)
        out, err = self.capsys.readouterr()
        assert found == status, f"{found}: {out}{err}"
        return err if status else out
