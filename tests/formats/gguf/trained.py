"""Small models of transformers that have learned a text, so that their next tokens are clear; and their tokenizer."""

import functools
from pathlib import Path
from typing import Any

import torch

TEXT = "the quick brown fox jumps over the lazy dog and runs into the deep dark wood where the river bends. " * 4
PROMPT = "the quick brown fox"
SIZES = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False}, "Qwen3": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "Mistral": {}, "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 256}, "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh"}, "Gemma2": {"query_pre_attn_scalar": 64},
    "Gemma3": {"query_pre_attn_scalar": 64, "sliding_window": 64}, "Phi3": {},
}  # fmt: skip


def built(name: str, **options: Any) -> Any:
    """A model with random weights."""
    import transformers

    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config(**(SIZES | MODELS[name] | options))).eval()


def train(model: Any, steps: int = 50, lr: float = 2e-3) -> float:
    """Train a model on the text; the last loss."""
    ids = tokenizer()(TEXT, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        part = ids[:, step % 7 : step % 7 + 60]
        loss = model(part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@functools.cache
def tokenizer() -> Any:
    """Byte pairs as in GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", bos_token="<|end|>")


def continuation(model: Any, tokens: int = 24) -> str:
    """The prompt and the most probable tokens after it."""
    ids = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    return tokenizer().decode(model.generate(ids, max_new_tokens=tokens, do_sample=False)[0])


def save_folder(model: Any, folder: Path) -> Path:
    """The model and the tokenizer as transformers saves them."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
