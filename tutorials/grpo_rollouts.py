"""GRPO on a toy task, in int8: the sampler's log-probabilities are those of the trainer, bit for bit.

    python -m tutorials.grpo_rollouts              60 steps; some minutes
    python -m tutorials.grpo_rollouts --short      3 steps, to see that it runs

A small Llama is rewarded for each token that it has not sampled before. The trainer is in quantization-aware training,
the sampler holds int8 codes, which each step writes again in place. Each prompt, of another length, is answered by a
group of samples, token by token with a KV cache; the advantage of a sample is its reward beside those of its group
(Shao et al., arXiv 2402.03300). In other engines the two log-probabilities of a token differ by the order of sums, and
the ratio between them is not 1 at the first update of a batch. Here it is 1.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qtorch import int8_dynamic_activation_int8_weight, quantize_
from qtorch.training import batch_invariant, qat, sync_codes

TOKENS, GROUP, NEW = 32, 8, 10


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # needed by a run alone

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, pad_token_id=0, eos_token_id=None, **sizes)).eval()


def rollout(sampler: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sampled tokens (B, NEW), their log-probabilities), by the sampler."""
    options: dict[str, Any] = {"do_sample": True, "output_logits": True, "return_dict_in_generate": True}
    out = sampler.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, top_k=0, **options)
    sampled = out.sequences[:, ids.shape[1] :]
    return sampled, log_probabilities(torch.stack(out.logits, 1), sampled)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float]]:
    """(mean reward, largest difference of a log-probability) of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    steps = 3 if parser.parse_args(arguments).short else 60

    recipe = int8_dynamic_activation_int8_weight()
    trainer = model()
    sampler = copy.deepcopy(trainer)
    quantize_(sampler, recipe)
    quantize_(trainer, qat(recipe))
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    rows = []
    for step in range(steps):
        lengths = torch.randint(1, 7, (2,)).repeat_interleave(GROUP)
        width = int(lengths.max())
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        ids = torch.randint(1, TOKENS, (2, width)).repeat_interleave(GROUP, 0) * mask
        with batch_invariant():
            sampled, of_sampler = rollout(sampler, ids, mask)
            rewards = torch.tensor([len(set(row)) / NEW for row in sampled.tolist()])
            groups = rewards.unflatten(0, (-1, GROUP))
            advantages = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
            loss, difference = torch.zeros(()), 0.0
            for row, length in enumerate(lengths.tolist()):
                sequence = torch.cat([ids[row, width - length :], sampled[row]])[None]
                logits = trainer(input_ids=sequence, use_cache=False).logits[:, length - 1 : -1]
                of_trainer = log_probabilities(logits, sampled[row : row + 1])[0]
                difference = max(difference, float((of_trainer.detach() - of_sampler[row]).abs().max()))
                ratio = (of_trainer - of_sampler[row]).exp()
                loss = loss - (ratio * advantages[row]).sum() / len(lengths) / NEW
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync_codes(trainer, sampler)
        rows.append((float(rewards.mean()), difference))
        print(f"step {step + 1:2}: mean reward {rows[-1][0]:.3f}, largest difference of a log-probability {difference}")
    return rows


if __name__ == "__main__":
    main()
