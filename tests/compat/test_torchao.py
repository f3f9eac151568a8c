"""`qtorch.integrations.torchao`: torchao's names and arguments, and what `quantize_` says to its objects."""

import copy
import dataclasses
import enum
import inspect
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import qtorch
from qtorch import MappingType, PackedLayout, PerAxis, PerGroup, PerRow, PerTensor, quantize_, training
from qtorch.integrations import torchao as ao
from tests.refusals import refuses

FLOAT, ASYMMETRIC = qtorch.ZeroPointDomain.FLOAT, MappingType.ASYMMETRIC
TILED = qtorch.TensorCoreTiledLayout()

INT4 = ao.IntxFakeQuantizeConfig(torch.int4, group_size=32)
TOKENS = ao.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
CHANNELS = ao.IntxFakeQuantizeConfig(torch.int8, "per_channel")
LEARNED = ao.IntxFakeQuantizeConfig(torch.int4, group_size=32, is_dynamic=False, range_learning=True)
FLOAT8 = ao.Float8FakeQuantizeConfig()
HQQ_TILES = {"int4_packing_format": "tile_packed_to_4d", "int4_choose_qparams_algorithm": "hqq"}

EQUIVALENT = [
    (ao.int8_weight_only(), qtorch.int8_weight_only()),
    (ao.int8_weight_only(group_size=32, set_inductor_config=False), qtorch.int8_weight_only(group_size=32)),
    (ao.int4_weight_only(group_size=64), qtorch.int4_weight_only(64, FLOAT, layout=TILED)),
    (ao.int4_weight_only(32, layout_type=PackedLayout(), use_hqq=True),
     qtorch.int4_weight_only(32, FLOAT, layout=PackedLayout(), use_hqq=True)),
    (ao.int8_dynamic_activation_int8_weight(), qtorch.int8_dynamic_activation_int8_weight()),
    (ao.int8_dynamic_activation_int8_weight(layout=ao.SemiSparseLayout()),
     qtorch.int8_dynamic_activation_int8_semi_sparse_weight()),
    (ao.int8_dynamic_activation_int4_weight(64, mapping_type=ASYMMETRIC),
     qtorch.int8_dynamic_activation_int4_weight(64, ASYMMETRIC)),
    (ao.float8_weight_only(torch.float8_e5m2), qtorch.float8_weight_only(torch.float8_e5m2)),
    (ao.float8_dynamic_activation_float8_weight(), qtorch.float8_dynamic_activation_float8_weight(PerTensor())),
    (ao.float8_dynamic_activation_float8_weight(granularity=(PerRow(), PerRow())),
     qtorch.float8_dynamic_activation_float8_weight(PerRow())),
    (ao.float8_static_activation_float8_weight(torch.tensor([0.5])),
     qtorch.float8_static_activation_float8_weight(0.5)),
    (ao.uintx_weight_only(torch.uint3, 32, -1, True), qtorch.uintx_weight_only("uint3", 32, use_hqq=True)),
    (ao.fpx_weight_only(3, 2), qtorch.fpx_weight_only(3, 2)),
    (ao.Int8WeightOnlyConfig(), qtorch.int8_weight_only()),
    (ao.Int8WeightOnlyConfig(granularity=PerGroup(16)), qtorch.int8_weight_only(group_size=16)),
    (ao.Int4WeightOnlyConfig(group_size=32), qtorch.int4_weight_only(32)),
    (ao.Int4WeightOnlyConfig(**HQQ_TILES), qtorch.int4_weight_only(128, FLOAT, layout=TILED, use_hqq=True)),
    (ao.Int8DynamicActivationInt8WeightConfig(version=1), qtorch.int8_dynamic_activation_int8_weight()),
    (ao.Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(64)),
     qtorch.int8_dynamic_activation_int4_weight(64)),
    (ao.Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0)),
     qtorch.int8_dynamic_activation_int8_weight(ASYMMETRIC)),
    (ao.Int8DynamicActivationInt4WeightConfig(64), qtorch.int8_dynamic_activation_int4_weight(64)),
    (ao.Int8StaticActivationInt8WeightConfig(torch.tensor(0.25)), qtorch.int8_static_activation_int8_weight(0.25)),
    (ao.Int8StaticActivationInt8WeightConfig(), qtorch.int8_static_activation_int8_weight()),
    (ao.Float8StaticActivationFloat8WeightConfig(), qtorch.float8_static_activation_float8_weight()),
    (ao.IntxWeightOnlyConfig(torch.int3, PerGroup(64)), qtorch.intx_weight_only("int3", 64)),
    (ao.IntxWeightOnlyConfig(), qtorch.int8_weight_only()),
    (ao.UIntxWeightOnlyConfig(64, 5), qtorch.uintx_weight_only("uint5", 64)),
    (ao.Float8WeightOnlyConfig(), qtorch.float8_weight_only()),
    (ao.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
     qtorch.float8_dynamic_activation_float8_weight()),
    (ao.Float8DynamicActivationFloat8WeightConfig(packing_format="sparse_2d_data_2d_metadata"),
     qtorch.float8_dynamic_activation_float8_semi_sparse_weight()),
    (ao.Float8StaticActivationFloat8WeightConfig(act_quant_scale=torch.tensor(0.5)),
     qtorch.float8_static_activation_float8_weight(0.5)),
    (ao.Float8DynamicActivationInt4WeightConfig(), qtorch.float8_dynamic_activation_int4_weight()),
    (ao.MXDynamicActivationMXWeightConfig(), qtorch.mxfp8_dynamic_activation_mxfp8_weight()),
    (ao.NVFP4DynamicActivationNVFP4WeightConfig(), qtorch.nvfp4_dynamic_activation_nvfp4_weight()),
    (ao.NVFP4WeightOnlyConfig(), qtorch.nvfp4_weight_only()),
    (ao.NF4WeightOnlyConfig(), qtorch.nf4_weight_only()),
    (ao.QATConfig(ao.Int4WeightOnlyConfig()), training.qat(qtorch.int4_weight_only())),
    (ao.QATConfig(step="convert"), training.convert()),
    (ao.QATConfig(weight_config=INT4), training.qat(qtorch.intx_weight_only("int4", 32))),
    (ao.QATConfig(None, TOKENS, INT4), training.qat(qtorch.int8_dynamic_activation_int4_weight(32))),
    (ao.QATConfig(None, TOKENS, CHANNELS), training.qat(qtorch.int8_dynamic_activation_int8_weight(ASYMMETRIC))),
    (ao.QATConfig(weight_config=LEARNED), training.lsq(recipe=qtorch.intx_weight_only("int4", 32))),
    (ao.QATConfig(None, FLOAT8, FLOAT8), training.qat(qtorch.float8_dynamic_activation_float8_weight())),
    (ao.QATConfig(None, FLOAT8, ao.Int4WeightFakeQuantizeConfig(64)),
     training.qat(qtorch.float8_dynamic_activation_int4_weight(group_size=64))),
    (ao.QATConfig(weight_config=ao.Int4WeightFakeQuantizeConfig(64, torch.bfloat16)),
     training.qat(qtorch.int4_weight_only(64))),
    (ao.int8_mixed_precision_training(grad_weight=False),
     training.int8_mixed_precision_training(training.Int8MixedPrecisionTrainingConfig(grad_weight=False))),
    (ao.int8_mixed_precision_training(config=ao.Int8MixedPrecisionTrainingConfig(output=False)),
     training.int8_mixed_precision_training(training.Int8MixedPrecisionTrainingConfig(output=False))),
    (ao.int8_weight_only_quantized_training(), training.int8_weight_only_quantized_training()),
    (ao.BitNetTrainingConfig(), training.bitnet_training()),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), EQUIVALENT, ids=lambda each: str(each))
def test_equivalents(made: qtorch.recipes.base.Recipe, expected: qtorch.recipes.base.Recipe) -> None:
    assert made == expected


def test_names_and_sparsify() -> None:
    each = {"re:.*up": ao.Int8WeightOnlyConfig(), "_default": ao.Int4WeightOnlyConfig(32), "0": None}
    config = ao.FqnToConfig(OrderedDict(each))
    assert config == {"0": None, ".*up": qtorch.int8_weight_only(), ".*": qtorch.int4_weight_only(32)}
    assert list(config) == ["0", ".*up", ".*"]
    model = nn.ModuleDict({"0": nn.Linear(64, 64), "up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})
    ao.quantize_(model, config)
    quantized = [isinstance(model[name].weight, qtorch.AffineQuantizedTensor) for name in model]
    assert quantized == [False, True, True]
    assert ao.ModuleFqnToConfig is ao.FqnToConfig
    model = nn.Sequential(nn.Linear(64, 64))
    assert ao.sparsify_(model, ao.int8_dynamic_activation_int8_semi_sparse_weight()) is model
    assert model[0].weight.scheme.layout.name == "semi_sparse"


REFUSED = [
    (lambda: ao.int8_dynamic_activation_int8_weight(weight_only_decode=True), "weight_only_decode=True has no equi"),
    (lambda: ao.int4_weight_only(layout=ao.SemiSparseLayout()), "layout=SemiSparseLayout.* has no equivalent"),
    (lambda: ao.int4_weight_only(layout=TILED, layout_type=TILED), "layout and layout_type are two names"),
    (lambda: ao.uintx_weight_only("uint4", pack_dim=0), "pack_dim=0 has no equivalent"),
    (lambda: ao.Int4WeightOnlyConfig(int4_packing_format="preshuffled"), "'preshuffled' has no equivalent"),
    (lambda: ao.Int8StaticActivationInt8WeightConfig(torch.rand(4, 1)), "is one number"),
    (lambda: ao.IntxWeightOnlyConfig(scale_dtype=torch.bfloat16), "scale_dtype=torch.bfloat16 has no equivalent"),
    (lambda: ao.IntxWeightOnlyConfig(granularity=PerTensor()), r"granularity=PerTensor\(\) has no equivalent"),
    (lambda: ao.Int8DynamicActivationIntxWeightConfig(torch.int2), "weight_dtype=torch.int2 has no equivalent"),
    (lambda: ao.Float8DynamicActivationFloat8WeightConfig(activation_value_ub=1.0), "activation_value_ub=1.0"),
    (lambda: ao.MXDynamicActivationMXWeightConfig(block_size=16), "block_size=16 has no equivalent"),
    (lambda: ao.QATConfig(activation_config=ao.IntxFakeQuantizeConfig(torch.int8, "per_token")), "give base_config="),
    (lambda: ao.QATConfig(ao.Int4WeightOnlyConfig(), weight_config=INT4), "not both"),
    (lambda: ao.QATConfig(None, INT4, INT4), "no recipe has it"),
    (lambda: ao.IntxFakeQuantizeConfig(torch.int4), "takes a granularity, or group_size"),
    (lambda: ao.IntxFakeQuantizeConfig(torch.int4, group_size=32, is_dynamic=False), "static activations"),
    (lambda: ao.AWQConfig(ao.Int4WeightOnlyConfig(), "prepare_for_loading"), "load_quantized"),
    (lambda: ao.AWQConfig(None, "prepare"), "base_config=None has no equivalent"),
    (lambda: ao.SemiSparseWeightConfig(), "write int8_dynamic_activation_int8_semi_sparse_weight"),
    (lambda: ao.BlockSparseWeightConfig(64), r"write qtorch\.block_sparse\("),
    (lambda: ao.sparsify_(nn.Linear(64, 64), ao.Int8WeightOnlyConfig()), "a recipe with sparse weights"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_has_no_equivalent_says_so(make: Any, message: str) -> None:
    refuses(message, make)


class Int4PackingFormat(str, enum.Enum):
    PLAIN = "plain"
    PRESHUFFLED = "preshuffled"


def of_torchao(name: str, **fields: Any) -> Any:
    """A dataclass with these fields and defaults, as if torchao had defined it."""
    made = dataclasses.make_dataclass(name, [(k, Any, dataclasses.field(default=value)) for k, value in fields.items()])
    made.__module__ = "torchao.quantization.quant_api"
    return made


PLAIN = Int4PackingFormat.PLAIN
Int4WeightOnlyConfig = of_torchao(
    "Int4WeightOnlyConfig", group_size=128, set_inductor_config=True, int4_packing_format=PLAIN
)
FqnToConfig = of_torchao("FqnToConfig", fqn_to_config=None)
AWQConfig = of_torchao("AWQConfig", base_config=None, step="prepare")
GPTQConfig = of_torchao("GPTQConfig", step="observe")


class BitNetTrainingConfig:
    """No dataclass."""

    __module__ = "torchao.quantization.quant_api"


NAMED = [
    (Int4WeightOnlyConfig(32), r"Int4WeightOnlyConfig; its equivalent is int4_weight_only\(group_size=32\)"),
    (FqnToConfig({"re:a": Int4WeightOnlyConfig(), "b": None}),
     r"its equivalent is \{'b': None, 'a': int4_weight_only\(\)\}"),
    (GPTQConfig(), "GPTQConfig, which has no equivalent: GPTQConfig has no equivalent in qtorch"),
    (BitNetTrainingConfig(), r"BitNetTrainingConfig; its equivalent is bitnet_training\(\)"),
    (AWQConfig(Int4WeightOnlyConfig()), r"AWQConfig; its equivalent is that of qtorch\.integrations\.torchao, "),
    ({"0": Int4WeightOnlyConfig(32, int4_packing_format=Int4PackingFormat.PRESHUFFLED)},
     r"int4_packing_format=<Int4PackingFormat\.PRESHUFFLED"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "words"), NAMED, ids=[words for _, words in NAMED])
def test_objects_of_torchao_are_named(config: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    weight = model[0].weight
    refuses(words, lambda: quantize_(model, config), TypeError)
    assert model[0].weight is weight


class Normed(nn.Module):
    """A place for scales: a norm before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x))


@pytest.mark.parametrize(("config", "transform"), [
    (lambda step: ao.AWQConfig(ao.Int4WeightOnlyConfig(32), step), qtorch.calibration.awq(20)),
    (lambda step: ao.SmoothQuantConfig(ao.Int8DynamicActivationInt8WeightConfig(), step, alpha=0.7),
     qtorch.calibration.smooth((0.7,))),
], ids=["awq", "smooth"])  # fmt: skip
def test_steps_of_a_calibration(config: Any, transform: Any) -> None:
    """The three steps are one call of `calibrated` with the same data."""
    model, batches = Normed().eval(), [torch.randn(4, 64) for _ in range(3)]
    nn.init.uniform_(model.norm.weight, 0.1, 9)
    one, norm = copy.deepcopy(model), model.norm.weight.detach().clone()
    refuses(r'has not had step="prepare"', lambda: ao.quantize_(model, config("convert")))
    ao.quantize_(model, config("prepare"))
    refuses("has not run since", lambda: ao.quantize_(model, config("convert")))
    for batch in batches:
        model(x=batch)
    ao.quantize_(model, config("convert"))
    nearest = qtorch.calibration.Nearest()
    recipe = config("convert").recipe
    quantize_(one, qtorch.calibration.calibrated(recipe, batches, None, nearest, transforms=(transform,)))
    assert not torch.equal(model.norm.weight, norm)
    assert torch.equal(model(batches[0]), one(batches[0]))
    assert not model._forward_pre_hooks
    refuses("CalibrationStep", lambda: quantize_(one, config("prepare")), TypeError)


def test_against_torchao() -> None:
    """The package itself: every configuration here has its arguments, and its objects are understood."""
    pytest.importorskip("torchao")
    import torchao.quantization as real
    from torchao import sparsity
    from torchao.prototype import awq, quantized_training, smoothquant
    from torchao.quantization import qat

    missing = []
    for name in ao.__all__:
        places = (real, qat, quantized_training, awq, smoothquant, sparsity)
        theirs = next((vars(place)[name] for place in places if name in vars(place)), None)
        if not name.endswith("Config") or theirs is None:
            continue
        ours = inspect.signature(getattr(ao, name)).parameters
        missing += [f"{name}.{each}" for each in inspect.signature(theirs).parameters if each not in ours]
    assert missing == []
    objects = [
        (real.Int4WeightOnlyConfig(group_size=32), qtorch.int4_weight_only(32)),
        (real.Int8WeightOnlyConfig(), qtorch.int8_weight_only()),
        (real.Int8DynamicActivationInt8WeightConfig(), qtorch.int8_dynamic_activation_int8_weight()),
        (real.IntxWeightOnlyConfig(torch.int3, real.PerGroup(32)), qtorch.intx_weight_only("int3", 32)),
        (real.Float8WeightOnlyConfig(), qtorch.float8_weight_only()),
        (real.Int8DynamicActivationIntxWeightConfig(torch.int4), qtorch.int8_dynamic_activation_int4_weight()),
        (
            quantized_training.Int8MixedPrecisionTrainingConfig(grad_weight=False),
            ao.int8_mixed_precision_training(grad_weight=False),
        ),
        (quantized_training.int8_weight_only_quantized_training(), training.int8_weight_only_quantized_training()),
        (quantized_training.bitnet_training(), training.bitnet_training()),
        (qat.QATConfig(real.Int4WeightOnlyConfig(32)), training.qat(qtorch.int4_weight_only(32))),
        (
            qat.QATConfig(
                activation_config=qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
                weight_config=qat.IntxFakeQuantizeConfig(torch.int4, group_size=32),
            ),
            training.qat(qtorch.int8_dynamic_activation_int4_weight(32)),
        ),
        (awq.AWQConfig(real.Int4WeightOnlyConfig(32), "prepare"), ao.AWQConfig(qtorch.int4_weight_only(32))),
    ]
    for config, recipe in objects:
        assert ao.equivalent(config) == recipe
    mapping = real.FqnToConfig(OrderedDict({"a": real.Int8WeightOnlyConfig(), "re:b": None}))
    assert ao.equivalent(mapping) == {"a": qtorch.int8_weight_only(), "b": None}
