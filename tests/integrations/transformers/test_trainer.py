"""`Trainer` saves, resumes and loads models in training; losses of a resumed run are those of an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from qtorch import int8_dynamic_activation_int4_weight, int8_weight_only, quantize_, training
from tests.fast_part import slow_but
from tests.integrations.transformers.tiny_models import I8, assert_same, build

INT4 = int8_dynamic_activation_int4_weight(group_size=32)
RECIPES: dict[str, Any] = {
    "int8_mixed_precision": training.int8_mixed_precision_training(),
    "int8_weights": training.int8_weight_only_quantized_training(),
    "qat": training.qat(INT4),
    "scheduled_qat": training.scheduled_qat(INT4, start_step=1, freeze_step=5),
    "lora_qat": training.lora_qat(INT4, rank=2),
    "lsq": training.lsq(weight_bits=4, activation_bits=8),
}


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def prepared(recipe: Any, tied: bool) -> LlamaForCausalLM:
    model = build("tied_llama" if tied else "llama")
    quantize_(model, recipe)
    return model


def trainer_of(model: Any, folder: Path) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=6, save_steps=3, logging_steps=1, per_device_train_batch_size=4, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Sentences())


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


UNTIED = ("scheduled_qat", "lora_qat")
CASES = [(name, tied) for name in RECIPES for tied in (False, True) if not tied or name not in UNTIED]
"""The adapters of LoRA are not for embeddings, so its head is untied."""


@pytest.mark.parametrize(("name", "tied"), slow_but([("int8_weights", True)], CASES))
def test_train_resume_load_convert(tmp_path: Path, name: str, tied: bool) -> None:
    whole = trainer_of(prepared(RECIPES[name], tied), tmp_path / "run")
    whole.train()
    assert len(set(losses(whole))) == 6

    resumed = trainer_of(prepared(RECIPES[name], tied), tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    model: Any = resumed.model
    assert_same(model, whole.model)  # type: ignore[arg-type]

    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    x = torch.arange(6)[None]
    assert_same(loaded, model)
    assert torch.equal(loaded(x).logits, model.eval()(x).logits)
    assert loaded.hf_quantizer.is_qat_trainable
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }

    for each in (loaded, model):
        quantize_(each, training.convert())
    assert_same(loaded, model)
    loaded.save_pretrained(tmp_path / "served")
    served = LlamaForCausalLM.from_pretrained(tmp_path / "served")
    assert_same(served, loaded)
    assert not served.hf_quantizer.is_qat_trainable


def test_inference_models_and_converted_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="purely quantized"):
        trainer_of(prepared(I8, False), tmp_path)
    model = prepared(training.qat(int8_weight_only()), False)
    quantize_(model, training.convert())
    assert model.config.quantization_config.recipe == training.qat(int8_weight_only())


@pytest.mark.slow
def test_a_checkpoint_does_not_load_into_another_model(tmp_path: Path) -> None:
    """In floating point, or quantized otherwise."""
    recipe = training.int8_weight_only_quantized_training()
    trainer_of(prepared(recipe, False), tmp_path).train()
    for model in (build("llama"), prepared({r".*\.mlp\..*": recipe}, False)):
        with pytest.raises(RuntimeError, match="size mismatch"):
            trainer_of(model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
