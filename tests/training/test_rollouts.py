"""Rollouts: log-probabilities of sampled tokens, in any batch, are those of the trainer, bit for bit."""

import contextlib
import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn import functional

from qtorch import int8_dynamic_activation_int4_weight, int8_dynamic_activation_int8_weight, quantize_
from qtorch.kernels.cpu import compiled_library
from qtorch.training import batch_invariant, qat, sync_codes
from tests.kernels.cpu.builds import BUILDS
from tests.zoo.architectures import built

RECIPES = {"w8a8": int8_dynamic_activation_int8_weight(), "w4a8": int8_dynamic_activation_int4_weight(group_size=32)}


def both(recipe: str, name: str = "llama", implementation: str = "sdpa", **options: Any) -> tuple[Any, Any]:
    """A trainer in quantization-aware training and a sampler of the same weights."""
    model = built(name, vocab_size=128, **options)[0]
    model.set_attn_implementation(implementation)
    sampler = copy.deepcopy(model).eval()
    quantize_(model, qat(RECIPES[recipe]))
    quantize_(sampler, RECIPES[recipe])
    return model.eval(), sampler


def difference(trainer: Any, sampler: Any, lengths: list[int], tokens: int, seed: int) -> float:
    """Between log-probabilities of a batch, padded on the left, sampled with a cache, and of each sequence alone."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    ids = torch.randint(1, 100, mask.shape, generator=generator) * mask
    torch.manual_seed(seed)
    out = sampler.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True,
        output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    sampled = torch.stack([functional.log_softmax(logits, -1) for logits in out.logits], 1)
    largest = 0.0
    for row, length in enumerate(lengths):
        sequence = out.sequences[row, width - length :][None]
        y = functional.log_softmax(trainer(input_ids=sequence, use_cache=False).logits, -1)[0, length - 1 : -1]
        largest = max(largest, float((y.detach() - sampled[row]).abs().max()))
    return largest


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_over_1000_tokens_are_those_of_the_trainer_before_and_after_updates(recipe: str, implementation: str) -> None:
    check_over_1000_tokens(recipe, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", [*BUILDS, None])
def test_on_every_instruction_set(build: str | None, recipe: str) -> None:
    """That runs here, and without compiled kernels."""
    with compiled_library.use(build):
        check_over_1000_tokens(recipe, "sdpa")


def check_over_1000_tokens(recipe: str, implementation: str) -> None:
    trainer, sampler = both(recipe, implementation=implementation)
    ids = torch.randint(1, 100, (4, 12))
    pointers = {name: p.qdata.data_ptr() for name, p in sampler.named_parameters() if hasattr(p, "qdata")}
    with batch_invariant():
        for step in range(2):
            for size in (1, 2, 7, 16):
                lengths = [1 + (5 * row + step) % 11 for row in range(size)]
                assert difference(trainer, sampler, lengths, 20, seed=size) == 0.0
            trainer.train()
            trainer(input_ids=ids, labels=ids).loss.backward()
            before = sampler(input_ids=ids).logits
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter -= 0.05 * parameter.grad
            trainer.zero_grad()
            trainer.eval()
            sync_codes(trainer, sampler)
            assert not torch.equal(sampler(input_ids=ids).logits, before)
    assert pointers == {name: p.qdata.data_ptr() for name, p in sampler.named_parameters() if hasattr(p, "qdata")}


def test_functions_are_those_of_torch_and_do_not_depend_on_the_batch() -> None:
    x, w = torch.randn(5, 7, 33), torch.randn(9, 33)
    functions = {
        "sum": lambda x: x.sum(-1, keepdim=True), "mean": lambda x: torch.mean(input=x, axis=-1, keepdims=True),
        "softmax": lambda x: functional.softmax(x, -1), "log_softmax": lambda x: torch.log_softmax(x, dim=-1),
        "logsumexp": lambda x: x.logsumexp(-1, keepdim=True), "linear": lambda x: functional.linear(x, w, w[:, 0]),
        "matmul": lambda x: torch.matmul(input=x, other=w.T), "rms_norm": lambda x: functional.rms_norm(x, (33,), w[0]),
        "layer_norm": lambda x: functional.layer_norm(x, (33,), w[0], w[1]), "silu": functional.silu,
        "sigmoid": torch.sigmoid, "gelu": functional.gelu,
        "gelu of tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }  # fmt: skip
    for name, function in functions.items():
        ours = x.clone().requires_grad_()
        with batch_invariant():
            y = function(ours)
            rows = torch.stack([torch.stack([function(row[None])[0] for row in rows]) for rows in x])
        theirs = x.clone().requires_grad_()
        expected = function(theirs)
        assert torch.equal(y.detach(), rows), name
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    with batch_invariant():
        y = functional.scaled_dot_product_attention(q, k, k, **options)
    torch.testing.assert_close(y, functional.scaled_dot_product_attention(q, k, k, **options))


def test_zeros_and_errors() -> None:
    x = torch.randn(4, 33)
    padded = torch.cat([torch.zeros(4, 5), x[:, :10], torch.zeros(4, 3), x[:, 10:], torch.zeros(4, 40)], -1)
    with batch_invariant():
        assert torch.equal(padded.sum(-1), x.sum(-1))
    trainer, sampler = both("w8a8")
    found = [difference(trainer, sampler, [3, 9, 1, 6, 4], 12, seed) for seed in range(3)]
    assert 0 < max(found) < 1e-4
    trainer, sampler = both("w8a8")
    with pytest.raises(ValueError, match="trainer has no parameter"):
        sync_codes(trainer.model, sampler)
    q = torch.randn(1, 1, 2, 4)
    with batch_invariant(), pytest.raises(ValueError, match="dropout"):
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with batch_invariant(), pytest.raises(ValueError, match="of a vector"):
        torch.matmul(q[0, 0], q[0, 0, 0])
    with batch_invariant(), contextlib.suppress(NotImplementedError), pytest.raises(ValueError, match="CPU"):
        q.to("meta").sum(-1)
