"""The canonical form: plain tensors and JSON that give back exactly what was stored."""

import json
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch.profiler import profile

from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, PerTensor, QuantSpec
from qtorch.dtypes.serialize import Entry, from_canonical, pack_to_int32, to_canonical, unpack_from_int32
from qtorch.primitives import QDType, from_json, qdtype
from tests.dtypes.specs import ASYMMETRIC, DTYPES, SPECS, quantized


def assert_round_trip(w: AffineQuantizedTensor) -> None:
    tensors, entry = to_canonical("layer.weight", w)
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    again = from_canonical(json.loads(json.dumps(entry)), tensors.__getitem__)
    assert again.scheme == w.scheme
    x, y = again.inner_tensors, w.inner_tensors
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype
        assert torch.equal(x[name].float(), y[name].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_round_trip(name: str, dtype: torch.dtype) -> None:
    w = quantized(name, dtype=dtype)
    for tensor in [w, w[8:16], w.t(), w[:, None], w[3], w[:0], quantized(name, 2, 32, 64, dtype=dtype)]:
        assert_round_trip(tensor)


@pytest.mark.parametrize("columns", [1, 5, 8, 31, 33])
@pytest.mark.parametrize("dtype", [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)])
def test_round_trip_of_every_width_and_odd_sizes(dtype: str, columns: int) -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(3, columns), QuantSpec(dtype, mapping=ASYMMETRIC))
    assert_round_trip(w)


@pytest.mark.parametrize("bits", range(1, 8))
def test_packed_codes_take_their_bits(bits: int) -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(8, 64), QuantSpec(f"uint{bits}", PerGroup(32), ASYMMETRIC))
    tensors, _ = to_canonical("w", w)
    assert tensors["w_packed"].nbytes == 8 * 64 * bits // 8
    # int32 where compressed-tensors has a format.
    assert tensors["w_packed"].dtype == (torch.int32 if bits in (1, 2, 4) else torch.uint8)


WORDS = [qdtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (1, 2, 4, 8)]


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_the_first_code_is_in_the_lowest_bits(dtype: QDType) -> None:
    count = 32 // dtype.bits
    codes = torch.randint(int(dtype.quant_min), int(dtype.quant_max) + 1, (5, count)).to(dtype.storage)
    words = pack_to_int32(codes, dtype)
    for row, word in zip(codes.tolist(), words.flatten().tolist()):
        number = sum((code - int(dtype.quant_min)) << (dtype.bits * i) for i, code in enumerate(row))
        assert word % 2**32 == number


def test_names_are_those_of_compressed_tensors() -> None:
    activation = QuantSpec("int8", PerTensor(), ASYMMETRIC)
    spec = LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC), activation, static=True)
    one = torch.ones(1, 1)
    static = AffineQuantizedTensor.from_float(torch.randn(4, 64), spec, one, one.to(torch.int8))
    assert_round_trip(static)
    lines = []
    for name, w in [
        ("layer.weight", static),
        ("layer.weight", quantized("int8 row", 4, 64)),
        ("layer.weight", quantized("float8 row", 4, 64)),
    ]:
        tensors, _ = to_canonical(name, w)
        lines += [f"{k}: {str(v.dtype)[6:]} {tuple(v.shape)}" for k, v in tensors.items()] + [""]
    lines += [" ".join(to_canonical(name, static)[0]) for name in ("weight", "experts.w1")]
    assert_expected_inline(
        "\n".join(lines),
        """\
layer.weight_packed: int32 (4, 8)
layer.weight_scale: float32 (4, 2)
layer.weight_zero_point: uint8 (4, 2)
layer.input_scale: float32 (1, 1)
layer.input_zero_point: int8 (1, 1)

layer.weight: int8 (4, 64)
layer.weight_scale: float32 (4, 1)

layer.weight: float8_e4m3fn (4, 64)
layer.weight_scale: float32 (4, 1)

weight_packed weight_scale weight_zero_point input_scale input_zero_point
experts.w1_packed experts.w1_scale experts.w1_zero_point experts.w1_input_scale experts.w1_input_zero_point""",
    )


def test_the_entry_is_json_and_words_are_padded() -> None:
    w = quantized("uint4 group", 4, 64)
    _, entry = to_canonical("layer.weight", w)
    assert entry.keys() == {"scheme", "tensors"}
    assert from_json(json.loads(json.dumps(entry["scheme"]))) == w.scheme
    assert entry["tensors"] == {
        "packed": "layer.weight_packed",
        "scale": "layer.weight_scale",
        "zero_point": "layer.weight_zero_point",
    }
    codes = torch.tensor([-8, -7, -6, -5, -4, -3, -2, 7], dtype=torch.int8)
    assert pack_to_int32(codes, qdtype("int4")).item() == 0xF6543210 - 2**32
    assert pack_to_int32(codes[:3], qdtype("int4")).item() == 0x210
    packed = pack_to_int32(torch.full((1, 3), 7, dtype=torch.int8), qdtype("int4"))
    with profile(profile_memory=True) as seen:
        padding = unpack_from_int32(packed.expand(1024, 1), qdtype("int4"), 8)[0, 3:]
    assert torch.equal(padding, torch.full((5,), -8, dtype=torch.int8))
    assert max(event.self_cpu_memory_usage for event in seen.events()) <= 8 * 1024  # one byte a code


def broken(change: dict[str, torch.Tensor], entry: Entry | None = None) -> str:
    tensors, whole = to_canonical("w", quantized("uint4 group", 4, 64))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        from_canonical(entry or whole, {**tensors, **change}.__getitem__)
    return str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    _, entry = to_canonical("w", quantized("uint4 group", 4, 64))
    without = {part: name for part, name in entry["tensors"].items() if part != "zero_point"}
    texts = [
        broken({"w_packed": torch.zeros(3, 8, dtype=torch.int32)}),
        broken({"w_packed": torch.zeros(4, 2, dtype=torch.int32)}),
        broken({"w_scale": torch.zeros(4, 1)}),
        broken({"w_zero_point": torch.zeros(4, 4)}),
        broken({}, {**entry, "tensors": without}),
        broken({}, {**entry, "scheme": entry["scheme"]["spec"]["weight"]["granularity"]}),
        broken({}, {**entry, "scheme": {**entry["scheme"], "later": 1}}),
    ]
    assert_expected_inline(
        re.sub(r" with weight .*Layout\(\)", "", "\n".join(texts)),
        """\
the codes have shape (3, 64), the scheme (4, 64)
the codes have shape (4, 16), the scheme (4, 64)
scale of a tensor of shape (4, 64) has shape (4, 2) of floating point, got (4, 1) of torch.float32
zero_point of a tensor of shape (4, 64) has shape (4, 2) of integers, got (4, 4) of torch.float32
zero_point is missing: a tensor of shape (4, 64) has one
expected a Scheme, got PerGroup(group_size=32)
from_json: Scheme has no field later; the data was written by a newer version of qtorch""",
    )
