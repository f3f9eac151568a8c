"""The subcommands, in this process."""

import json
import math
from pathlib import Path

import pytest
import torch

import qtorch
from tests.cli.tiny import WORDS, Command
from tests.float_checkpoints import decoder, save_shards

INT4 = ("--recipe", "int4_weight_only", "--set", "group_size=32")


def text_file(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    words = [WORDS[int(i)] for i in torch.randint(0, len(WORDS), (150,), generator=generator)]
    path = folder / "text.txt"
    path.write_text(" ".join(words))
    return path


def test_folders_shards_and_dry_runs(llama: Path, tmp_path: Path, command: Command) -> None:
    said = command("quantize", llama, "--dry-run", *INT4)
    assert said.startswith("would quantize 14 of 16 weights")
    said = command("quantize", llama, tmp_path / "q", "--dry-run", *INT4, "--json")
    assert json.loads(said)["dry_run"] is True
    assert not list(tmp_path.iterdir())
    said = command("quantize", llama, tmp_path / "q", *INT4)
    assert said.startswith("quantized 14 of 16 weights")
    assert "model.layers.0.self_attn.q_proj.weight" in said
    names = {path.name for path in (tmp_path / "q").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "qtorch"
    said = command("quantize", llama, tmp_path / "all", *INT4, "--targets", "linear,embedding")
    assert said.startswith("quantized 15 of 16 weights")
    wide = ("--recipe", "int4_weight_only", "--set", "group_size=48")
    said = command("quantize", llama, tmp_path / "p.safetensors", *wide, "--on-misfit", "pad", "--format", "qtorch")
    assert "padded(recipe=int4_weight_only(group_size=48), padding=" in said
    command("quantize", llama, tmp_path / "shards", *INT4, "--max-shard-size", "20kB")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 1


def test_quantize_files_and_tables(llama: Path, tmp_path: Path, command: Command) -> None:
    qtorch.save_quantized(decoder(), tmp_path / "float.safetensors")
    data = json.loads(command("quantize", tmp_path / "float.safetensors", tmp_path / "q.safetensors", *INT4, "--json"))
    assert data["format"] == "qtorch"
    assert data["dry_run"] is False
    assert data["model_bytes_after"] < data["model_bytes_before"]
    model = qtorch.load_quantized(decoder(), tmp_path / "q.safetensors")
    assert isinstance(model.layers[0].q_proj.weight, qtorch.dtypes.QuantizedTensor)
    recipes = {
        "lm_head": None,
        r".*\.q_proj": {"recipe": "int4_weight_only", "group_size": 32},
        r".*_proj": "int8_weight_only()",
    }
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    data = json.loads(command("quantize", llama, tmp_path / "q", "--config", tmp_path / "recipes.json", "--json"))
    by_name = {layer["name"]: layer["detail"] for layer in data["layers"]}
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == "int4_weight_only(group_size=32)"
    assert by_name["model.layers.0.self_attn.k_proj.weight"] == "int8_weight_only()"


@pytest.mark.parametrize("method", ["gptq", pytest.param("auto", marks=pytest.mark.slow)])
def test_quantize_calibrated(method: str, llama: Path, tmp_path: Path, command: Command) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    from qtorch.calibration.data import token_batches
    from qtorch.calibration.methods import METHODS

    text = text_file(tmp_path)
    data = ("--calibrate", text, "--method", method, "--calibrate-length", "32", "--calibrate-tokens", "100")
    said = json.loads(command("quantize", llama, tmp_path / "q", *INT4, *data, "--json"))
    rows = [row for row in said["layers"] if row["action"] == "quantized"]
    assert len(rows) == 14
    assert {row["calibration"]["tokens"] for row in rows} == {100}
    tokenizer = AutoTokenizer.from_pretrained(llama)
    batches = token_batches([text.read_text()], tokenizer, length=32, tokens=100)
    wanted = LlamaForCausalLM.from_pretrained(llama)
    qtorch.quantize_(wanted, {"lm_head": None, ".*": METHODS[method](qtorch.int4_weight_only(group_size=32), batches)})
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "q")
    for name, parameter in loaded.named_parameters():
        theirs = wanted.get_parameter(name)
        if isinstance(parameter, qtorch.dtypes.QuantizedTensor):
            assert torch.equal(parameter.dequantize(), theirs.dequantize())
    ids = torch.arange(3, 40)[None]
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)


def test_calibrated_for_vllm_and_from_a_folder_of_texts(llama: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "texts").mkdir()
    text_file(tmp_path / "texts")
    (tmp_path / "texts" / "more.md").write_text("w1 w2 w3")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89")
    data = ("--calibrate", tmp_path / "texts", "--method", "gptq")
    said = command("quantize", llama, tmp_path / "q", *INT4, *data, "--format", "compressed-tensors")
    assert said.startswith("quantized 14 of 16 weights")
    said = json.loads(command("quantize", llama, "--dry-run", *INT4, *data, "--json"))
    assert said["dry_run"]
    assert len([row for row in said["layers"] if row["action"] == "quantized"]) == 14


def test_what_calibration_needs(llama: Path, tmp_path: Path, command: Command) -> None:
    text = text_file(tmp_path)
    qtorch.save_quantized(decoder(), tmp_path / "float.safetensors")
    for source, path, words in (
        (tmp_path / "float.safetensors", text, "no folder of transformers"),
        (llama, tmp_path / "nowhere", "no such file or folder"),
        (llama, tmp_path / "empty.txt", "there is no text"),
    ):
        (tmp_path / "empty.txt").write_text(" ")
        assert words in command("quantize", source, tmp_path / "q", *INT4, "--calibrate", path, status=2)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((llama / "config.json").read_text())
    (tmp_path / "bare" / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    assert "has no tokenizer" in command(
        "quantize", tmp_path / "bare", tmp_path / "q", *INT4, "--calibrate", text, status=2
    )
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("name", ["model.safetensors", ""])
def test_inspect_floats(name: str, llama: Path, command: Command) -> None:
    said = command("inspect", llama / name)
    assert "transformers: 21 tensors, 0 of them quantized" in said


def test_inspect_ties_too(llama: Path, tmp_path: Path, command: Command) -> None:
    model = decoder()
    model.lm_head.weight = model.embed_tokens.weight
    qtorch.save_quantized(model, tmp_path / "tied.safetensors")
    assert "lm_head.weight = embed_tokens.weight" in command("inspect", tmp_path / "tied.safetensors")
    command("quantize", llama, tmp_path / "q", *INT4)
    said = command("inspect", tmp_path / "q")
    assert "uint4 PerGroup(group_size=32)" in said
    assert "21 tensors, 14 of them quantized" in said
    data = json.loads(command("inspect", tmp_path / "q", "--json"))
    rows = {row["name"]: row for row in data["tensors"]}
    row = rows["model.layers.0.mlp.down_proj.weight"]
    assert (row["shape"], row["dtype"]) == ([64, 128], "bfloat16")
    assert row["scheme"].startswith("weight uint4")
    assert rows["model.norm.weight"]["scheme"] is None
    assert data["bytes"] == sum(row["bytes"] for row in data["tensors"])


def test_convert(llama: Path, tmp_path: Path, command: Command) -> None:
    command("quantize", llama, tmp_path / "q", *INT4)
    said = command("convert", tmp_path / "q", tmp_path / "own.safetensors", "--format", "qtorch")
    assert said.startswith(f"wrote {tmp_path / 'own.safetensors'}: qtorch, ")
    command("convert", tmp_path / "q", tmp_path / "ct", "--format", "compressed-tensors")
    numbers = []
    for path in (tmp_path / "q", tmp_path / "own.safetensors", tmp_path / "ct"):
        from qtorch.checkpoint.sources import open_source

        with open_source(path) as source:
            numbers.append(source.tensor("model.layers.1.mlp.up_proj.weight").dequantize())
    assert torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[0], numbers[2])


def test_eval(llama: Path, tmp_path: Path, command: Command) -> None:
    text = text_file(tmp_path)
    arguments = ("--text", text, "--length", 32, "--dtype", "float32", "--json")
    plain = json.loads(command("eval", llama, *arguments))
    assert plain["tokens"] == 150 - 5
    assert math.exp(math.log(64) - 1) < plain["perplexity"] < math.exp(math.log(64) + 1)
    # Quantized here, in a folder, and in a file: the same model.
    command("quantize", llama, tmp_path / "q", "--recipe", "int8_weight_only")
    command("convert", tmp_path / "q", tmp_path / "own.safetensors", "--format", "qtorch")
    found = [
        json.loads(command("eval", *of, "--text", text, "--length", 32, "--json"))["perplexity"]
        for of in ((tmp_path / "q",), (tmp_path / "own.safetensors", "--model", tmp_path / "q"))
    ]
    assert found[0] == found[1]
    assert found[0] != plain["perplexity"]
    assert found[0] == pytest.approx(plain["perplexity"], rel=0.05)
    by_recipe = command("eval", llama, "--recipe", "int8_weight_only", "--text", text, "--limit", 40)
    assert by_recipe.startswith("perplexity ")
    assert by_recipe.endswith(" over 39 tokens\n")


def test_eval_by_hand(llama: Path, tmp_path: Path, command: Command) -> None:
    transformers, text = pytest.importorskip("transformers"), text_file(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(llama)(text.read_text(), return_tensors="pt")["input_ids"][:, :40]
    with torch.no_grad():
        wanted = float(model(ids, labels=ids).loss.exp())
    said = command("eval", llama, "--text", text, "--length", 64, "--limit", 40, "--dtype", "float32", "--json")
    assert json.loads(said)["perplexity"] == pytest.approx(wanted, rel=1e-5)


def test_compare(llama: Path, tmp_path: Path, command: Command) -> None:
    arguments = ("--text", text_file(tmp_path), "--length", 32, "--json")
    command("quantize", llama, tmp_path / "q", "--recipe", "int8_weight_only")
    by_folder = json.loads(command("compare", tmp_path / "q", "--reference", llama, *arguments))
    by_recipe = json.loads(command("compare", llama, "--recipe", "int8_weight_only", "--shares", *arguments))
    names = [module["name"] for module in by_recipe["modules"]]
    # quantize_checkpoint leaves the head in floating point.
    assert [name for name in names if name != "lm_head"] == [module["name"] for module in by_folder["modules"]]
    assert "model.layers.1.mlp.down_proj" in names
    assert by_recipe["divergence"] > 0
    assert by_recipe["rest"] == pytest.approx(0, abs=1e-3)
    assert 0 < by_folder["divergence"] < 2 * by_recipe["divergence"]
    command("compare", llama, "--recipe", "int8_weight_only", *arguments[:-1], "--save", tmp_path / "report")
    assert (tmp_path / "report" / "comparison.json").is_file()
    assert "--reference" in command("compare", llama, *arguments, status=2)
    (tmp_path / "texts").mkdir()
    (tmp_path / "text.txt").rename(tmp_path / "texts" / "one.txt")
    folder = ("--text", tmp_path / "texts", *arguments[2:])
    assert json.loads(command("compare", llama, "--recipe", "int8_weight_only", "--shares", *folder)) == by_recipe


def test_lm_eval_is_named(llama: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install lm-eval" in command("eval", llama, "--tasks", "hellaswag", status=1)


def test_explain(llama: Path, tmp_path: Path, command: Command) -> None:
    command("quantize", llama, tmp_path / "q", *INT4)
    data = json.loads(command("explain", tmp_path / "q", "--json"))
    assert sum(len(row["weights"]) for row in data) == 14
    model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    qtorch.quantize_(model, qtorch.int4_weight_only(group_size=32))
    wanted = qtorch.explain(model)[0]
    row = next(row for row in data if row["shape"] == [64, 64])
    assert (row["kernel"], row["note"]) == (wanted.kernel, wanted.note)
    assert row["rejected"] == dict(wanted.rejected)
    # The same, of the float checkpoint.
    assert json.loads(command("explain", llama, *INT4, "--json")) == data
    assert f"runs {row['kernel']}" in command("explain", llama, *INT4)


def test_bench(llama: Path, command: Command) -> None:
    arguments = ("bench", llama, "--recipe", "int8_weight_only", "--rows", 1, 5, "--seconds", 0.001)
    data = json.loads(command(*arguments, "--json"))
    assert {(tuple(row["shape"]), row["rows"]) for row in data} == {
        (shape, rows) for shape in ((64, 64), (32, 64), (128, 64), (64, 128)) for rows in (1, 5)
    }
    assert sum(row["weights"] for row in data if row["rows"] == 1) == 14
    assert all(row["float_us"] > 0 and row["quantized_us"] > 0 for row in data)
    assert "speed" in command(*arguments).splitlines()[0]


@pytest.mark.parametrize(("arguments", "status", "error"), [
    ((), 2, "required: command"),
    (("quantise",), 2, "invalid choice"),
    (("quantize", "SRC", "DST"), 2, "one of the arguments --recipe --config is required"),
    (("quantize", "SRC", "DST", "--recipe", "int5"), 2, "there is no recipe 'int5'; did you mean int"),
    (("quantize", "SRC", "--recipe", "int8_weight_only"), 2, "DST is missing"),
    (("quantize", "SRC", "DST", "--recipe", "int4_weight_only", "--set", "group=3"), 2, "argument 'group'"),
    (("quantize", "SRC", "DST", "--recipe", "int4_weight_only", "--set", "x"), 2, "--set takes NAME=VALUE"),
    (("quantize", "SRC", "DST", "--config", "none.json"), 2, "none.json: no such file"),
    (("quantize", "SRC", "DST", "--recipe", "int8_weight_only", "--format", "ggml"), 2, "invalid choice"),
    (("quantize", "SRC", "DST", "--recipe", "int8_weight_only", "--max-shard-size", "big"), 2, "not a size"),
    (("quantize", "none", "DST", "--recipe", "int8_weight_only"), 2, "none: no such file"),
    (("quantize", "SRC", "SRC", "--recipe", "int8_weight_only"), 1, "exists; remove it"),
    (("quantize", "SRC", "GGUF", "--recipe", "int8_weight_only", "--format", "transformers"), 1, "written to a folder"),
    (("quantize", "SRC", "DST", "--recipe", "int4_weight_only(group_size=48)"), 1, "does not divide"),
    (("quantize", "SRC", "DST", "--recipe", "int4_weight_onyl"), 2, "did you mean int4_weight_only"),
    (("inspect", "none"), 2, "none: no such file"),
    (("inspect", "EMPTY"), 2, "the folder is empty"),
    (("bench", "SRC", "--rows", "0"), 2, "--rows: takes a positive number, got '0'"),
    (("eval", "SRC", "--text", "TEXT"), 2, "eval: SRC has no tokenizer: 'added_tokens'"),
    (("eval", "SRC", "--model", "BARE", "--text", "TEXT"), 2, "has no tokenizer, no file such as tokenizer.json"),
    (("explain", "SRC"), 2, "no weight is quantized; give a --recipe"),
    (("eval", "SRC", "--text", "none"), 2, "none: no such file"),
    (("eval", "LLAMA", "--text", "EMPTY"), 2, "there is no text; a folder of texts has files"),
], ids=lambda value: "-".join(map(str, value))[:40] if isinstance(value, tuple) else None)  # fmt: skip
def test_errors(
    arguments: tuple[str, ...], status: int, error: str, tmp_path: Path, llama: Path, command: Command
) -> None:
    source = save_shards(decoder().state_dict(), tmp_path / "float", 1)
    for name in ("empty", "bare"):
        (tmp_path / name).mkdir()
    for path in (tmp_path / "bare" / "config.json", tmp_path / "text.txt"):
        path.write_text("{}")
    places = {"SRC": source, "DST": tmp_path / "q", "GGUF": tmp_path / "q.gguf", "TEXT": tmp_path / "text.txt"}
    places["LLAMA"] = llama
    places |= {name.upper(): tmp_path / name for name in ("empty", "bare")}
    said = command(*[places.get(argument, argument) for argument in arguments], status=status)
    assert error.replace("SRC", str(source)) in said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("qtorch")
    assert not (tmp_path / "q").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    from qtorch.cli import main

    (tmp_path / "none").write_text("no checkpoint")
    with pytest.raises(ValueError, match="truncated, or not a safetensors file"):
        main(["inspect", str(tmp_path / "none"), "--debug"])
