"""Which weights a recipe, or a mapping of names to recipes, reaches."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from qtorch import int4_weight_only, int8_weight_only, quantize_
from qtorch.model.targets import Refused, find_targets

INT8, INT4 = int8_weight_only(), int4_weight_only(group_size=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))


class Model(nn.Module):
    """An embedding, two blocks with bare 3-d parameters, a convolution, and a head tied to the embedding or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 16)
        if tied:
            self.head.weight = self.embed.weight


def asked(recipe: object, filter_fn: object = None, model: nn.Module | None = None) -> str:
    """One line for each weight that a recipe was found for."""
    targets = find_targets(model or Model(), recipe, filter_fn)
    return "\n".join(
        f"{' = '.join(slot.name for slot in target.slots)}: {target.recipe}" for target in targets if target.recipe
    )


def names(recipe: object, filter_fn: object = None, model: nn.Module | None = None) -> list[str]:
    return [line.partition(":")[0] for line in asked(recipe, filter_fn, model).splitlines()]


def error(recipe: object, model: nn.Module | None = None) -> str:
    with pytest.raises(Refused) as caught:
        find_targets(model or Model(), recipe, None)
    return str(caught.value)


LINEAR = [*(f"blocks.{i}.{name}_proj.weight" for i in (0, 1) for name in "qk"), "head.weight"]


def test_every_other_weight_says_why_not() -> None:
    skipped = [target.slots[0] for target in find_targets(Model(), INT8, None) if target.recipe is None]
    assert_expected_inline(
        "\n".join(f"{slot.name}: {slot.reason}" for slot in skipped),
        """\
embed.weight: an embedding; ask for it by name, or with targets="all"
blocks.0.experts: a bare parameter of Block; ask for it by name
blocks.1.experts: a bare parameter of Block; ask for it by name
conv.weight: a convolution; ask for it by name, or with targets="all"
""".rstrip(),
    )


def test_first_key_that_matches_wins() -> None:
    assert_expected_inline(
        asked({"blocks.1.k_proj": INT4, r"blocks\.\d+\.k_proj": None, r"blocks\..*": INT8, "head": INT4}),
        """\
blocks.0.q_proj.weight: int8_weight_only()
blocks.1.q_proj.weight: int8_weight_only()
blocks.1.k_proj.weight: int4_weight_only(group_size=8)
head.weight: int4_weight_only(group_size=8)""",
    )


def test_none_says_which_key_it_was() -> None:
    targets = find_targets(Model(), {"head": None, ".*": INT8}, None)
    assert next(t for t in targets if t.slots[0].name == "head.weight").slots[0].reason == "None for 'head'"


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("embed", ["embed.weight"]),
        ("embed.weight", ["embed.weight"]),
        (r"emb.*", ["embed.weight"]),
        (r".*embed\.weight", ["embed.weight"]),
        ("blocks.0.experts", ["blocks.0.experts"]),
        (r"blocks\.\d\.experts", ["blocks.0.experts", "blocks.1.experts"]),
        (r".*\.experts", ["blocks.0.experts", "blocks.1.experts"]),
        (r".*exp.*", ["blocks.0.experts", "blocks.1.experts"]),
        ("head.weight", ["head.weight"]),
        (r".*q_proj", ["blocks.0.q_proj.weight", "blocks.1.q_proj.weight"]),
        *((key, ["conv.weight"]) for key in ("conv", "conv.weight", r".*conv", r"c\w+v")),
        # Wildcards reach linear layers only.
        *((key, LINEAR) for key in (".*", r".*\.weight", r".*weight", r"(.*\.)?\w+", r"[a-z0-9._]+", ".*|.*")),
    ],
)
def test_names_reach_what_they_name(key: str, found: list[str]) -> None:
    assert names({key: INT8}) == found


MATCHES_NO = "matches no linear layer, embedding, convolution or parameter of two or more dimensions. "


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ({"proj": INT8}, f"'proj' {MATCHES_NO}The model has embed, "),
        ({r"blocks\.0": INT8}, rf"'blocks\\.0' {MATCHES_NO}The model has embed, "),  # not the whole name
        ({"head": INT8, "haed": INT8}, f"'haed' {MATCHES_NO}The model has embed, blocks.0.experts, blocks.0.q_proj, "),
        (
            {"blocks.0": INT8},
            f"'blocks.0' {MATCHES_NO}For what is inside it, write 'blocks.0.*' as a regular expression",
        ),
        (
            {r"blocks\..*": INT8, r"blocks\.0\.q_proj": INT4},
            r"'blocks\\.0\\.q_proj': all that it matches is taken by entries before it; the first that matches wins",
        ),
        ({"*.q_proj": INT8}, "'*.q_proj' is neither a name nor a regular expression: nothing to repeat at position 0"),
    ],
)
def test_keys_that_select_nothing(recipes: dict, message: str) -> None:
    assert error(recipes).startswith(message)
    assert error({"weight": INT8}, nn.LayerNorm(8)).endswith(f"{MATCHES_NO}The model has no such weight")


def test_filter_fn_is_asked_for_layers() -> None:
    seen = []

    def only_heads(module: nn.Module, name: str) -> bool:
        seen.append(name)
        return name == "head" or isinstance(module, nn.Embedding | nn.Conv1d)

    assert names(INT8, only_heads) == ["embed.weight", "conv.weight", "head.weight"]
    layers = [name.removesuffix(".weight") for name in LINEAR]
    assert seen == ["embed", *layers[:-1], "conv", layers[-1]]


def test_filter_fn_narrows_a_mapping() -> None:
    found = names({r"blocks.*": INT8, "head": None}, lambda module, name: name.endswith("q_proj"))
    assert found == ["blocks.0.q_proj.weight", "blocks.1.q_proj.weight"]


def test_tied_weights_are_one_target() -> None:
    assert names(INT8, model=Model(tied=True))[0] == "embed.weight = head.weight"
    assert names({"embed": INT8}, model=Model(tied=True)) == ["embed.weight = head.weight"]
    assert names({"embed": INT8, "head": INT8}, model=Model(tied=True)) == ["embed.weight = head.weight"]


@pytest.mark.parametrize("other", [INT4, None], ids=str)
def test_tied_weights_asked_for_differently(other: object) -> None:
    wanted = f"a tied weight takes one recipe, got different ones: embed: int8_weight_only(), head: {other}"
    assert error({"embed": INT8, "head": other}, Model(tied=True)) == wanted


def test_a_module_under_two_names() -> None:
    model = nn.Module()
    model.first = model.second = nn.Linear(8, 8)
    for key in ("first", "second", "second.weight"):
        assert names({key: INT8}, model=model) == ["first.weight = second.weight"]
    assert "first: int8_weight_only(), second: None" in error({"first": INT8, "second": None}, model)


def test_parametrized_layer() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    assert names(INT8, model=model) == ["1.weight"]
    assert_expected_inline(
        error({"0": INT8}, model),
        "'0' matches no linear layer, embedding, convolution or parameter of two or more dimensions. "
        "0.parametrizations.weight.original0 is parametrized; "
        "call torch.nn.utils.parametrize.remove_parametrizations first",
    )
    with pytest.raises(ValueError, match=r"nothing to quantize: .*original0: is parametrized; call torch"):
        quantize_(model[:1], INT8)


class Rescaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("model", "recipe", "found"),
    [
        (Model(), INT8, LINEAR),
        (nn.Sequential(Rescaled(8, 8)), INT8, ["0.weight"]),
        (nn.ModuleDict({"b": nn.Linear(8, 8), "a(": nn.Linear(8, 8)}), {"a(": INT8}, ["a(.weight"]),
        (nn.Linear(8, 8), INT8, ["weight"]),
        (nn.Linear(8, 8), {"weight": INT8}, ["weight"]),
        (nn.Embedding(8, 8), {"weight": INT8}, ["weight"]),
    ],
)
def test_names_of_weights(model: nn.Module, recipe: object, found: list[str]) -> None:
    """Of subclasses, of what is no regular expression, and of a layer alone, which has no name as a module."""
    assert names(recipe, model=model) == found
    assert "'.*' matches weight by a wildcard alone" in error({".*": INT8}, nn.Embedding(8, 8))
