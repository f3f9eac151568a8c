"""`compile_generate`: one graph for all tokens, the same tokens, and what it refuses."""

import pytest
import torch
import transformers

import qtorch
from qtorch.integrations.transformers import compile_generate
from qtorch.kernels import record_kernels
from tests.refusals import refuses

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 96,
}  # fmt: skip
TOKENS = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 8, "max_new_tokens": 8}


def llama(attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval()


def prompt(length, sequences=1):
    ids = torch.randint(0, 96, (sequences, length))
    return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32)], ids=str)
def test_one_graph_writes_the_same_tokens(recipe):
    model = llama()
    if recipe is not None:
        qtorch.quantize_(model, recipe)
    wanted = [model.generate(**prompt(length, 2), **TOKENS) for length in map(seeded, (5, 11))]
    settings = compile_generate(model, 40, sequences=2, progress=False)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with record_kernels() as ran:
        got = [model.generate(**prompt(length, 2), **TOKENS, **settings) for length in map(seeded, (5, 11))]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert all(map(torch.equal, got, wanted))
    assert ran.count("float_attention") == 2 * 7 * SHAPE["num_hidden_layers"]  # the first token is the prompt's
    # What was chosen for this process is not saved.
    assert model.generation_config.cache_implementation is model.generation_config.compile_config is None


def seeded(length):
    torch.manual_seed(length)
    return length


def test_attention_that_the_user_chose_stays():
    assert attention_of(compiled(llama("eager"))) == "eager"
    assert attention_of(compiled(llama())) == "qtorch"


def compiled(model):
    """Without a compiler."""
    before = torch.compile
    torch.compile = lambda call, **options: call
    try:
        compile_generate(model, 16, progress=False)
    finally:
        torch.compile = before
    return model


def attention_of(model):
    return model.config._attn_implementation


def test_refusals():
    with pytest.raises(TypeError, match="compile_generate takes a model of transformers, got Linear"):
        compile_generate(torch.nn.Linear(2, 2), 16)
    refuses("LlamaModel does not generate from ids", lambda: compile_generate(llama().model, 16))
    refuses("got max_length=4 and sequences=1, want more than 4 tokens", lambda: compile_generate(llama(), 4))
    model = llama()
    model._supports_default_dynamic_cache = lambda: False
    refuses("transformers does not compile LlamaForCausalLM", lambda: compile_generate(model, 16, progress=False))
