"""Calls of the operators that C++ implements: right ones and wrong ones."""

import torch

from qtorch.kernels import custom_ops
from qtorch.kernels.cpu.embedding import cpu_embedding
from qtorch.kernels.cpu.int8_linear import NO_QUANTIZER, cpu_int8_mm
from qtorch.kernels.cpu.low_rank import cpu_low_rank_mm
from qtorch.kernels.cpu.weight_only import cpu_weight_only_mm
from qtorch.kernels.ops.kv_attention import float_attention

BF16 = torch.bfloat16
DYNAMIC = [-127.0, 127.0, 0.0, 0.0, torch.finfo(torch.float32).tiny, 1e30]
ASYMMETRIC = [-128.0, 127.0, 1.0, *DYNAMIC[3:]]
GIVEN = [-128.0, 127.0, 0.0, 1.0, 0.0, 0.0]
NUMBERS = torch.Generator().manual_seed(0)


def dispatched(name, args):
    """The overload of an operator, and these arguments as torch's dispatcher takes them: numbers in place of names."""
    numbers = custom_ops._replaced(args, custom_ops._names_in(custom_ops._opaque[name]), custom_ops.number_of)
    return getattr(torch.ops.qtorch, name).default, tuple(numbers)


def dispatch(operation, *args):
    """The result of an operator by way of torch's dispatcher."""
    overload, args = dispatched(operation.__name__, args)
    return overload(*args)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=NUMBERS).to(dtype)


def weight(n=48, k=64, groups=2, zero_point=False):
    """(codes, scale, zero point) of an int8 weight."""
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=NUMBERS)
    zero = torch.randint(-9, 9, (n, groups), dtype=torch.int32, generator=NUMBERS) if zero_point else None
    return codes, randn(n, groups).abs() + 0.1, zero


def weight_only(x, codes, scale, zero_point, bias=None, n=48, domain="INT", dtype="int8", packed=False):
    return x, codes, n, scale, zero_point, packed, dtype, -128.0, 127.0, domain, bias


def int8(x, codes, scale, zero_point, xs=None, xz=None, quantizer=DYNAMIC, bias=None, dtype=torch.float32):
    return x, xs, xz, *quantizer, codes, 48, scale, zero_point, False, "int8", dtype, bias


def embedding(ids, codes, scale, zero_point, dtype=torch.float32):
    return ids, codes, 48, 64, scale, zero_point, False, "int8", -128.0, 127.0, "INT", dtype


def attention(mask=None, dtype=torch.float32, rows=1, softcap=0.0, query=None):
    query = randn(2, 4, rows, 20, dtype=dtype) if query is None else query
    return (
        query, randn(2, 2, 70, 20, dtype=dtype), randn(2, 2, 70, 12, dtype=dtype), mask, None, 0.3, softcap,
        mask is None,
    )  # fmt: skip


def branch(y, x, rank=5, half=torch.float16):
    return y, x, randn(rank, x.shape[1], dtype=half), randn(y.shape[1], rank, dtype=half)


def rows(m, value=0.05):
    return torch.full((m, 1), value)


def named(operation, cases):
    return {name: (operation, *(case if isinstance(case[-1], str) else [case])) for name, case in cases.items()}


SEEN = randn(2, 1, 1, 80) > 0
HALF = {"dtype": BF16, "bias": randn(48, dtype=BF16)}
CALLS = {
    **named(cpu_weight_only_mm, {
        "weight-only": weight_only(randn(3, 64), *weight()),
        "weight-only, zero points, bias": weight_only(randn(9, 64), *weight(zero_point=True), bias=randn(48)),
        "weight-only, real zero points": weight_only(randn(2, 64), *weight()[:2], randn(48, 2), domain="FLOAT"),
        "weight-only, bf16, no rows": weight_only(randn(0, 64, dtype=BF16), *weight()),
        "weight-only, fp16, strided rows": weight_only(randn(5, 128, dtype=torch.float16)[:, 64:], *weight()),
        "weight-only, transposed": weight_only(randn(64, 5).t(), *weight()),
        "weight-only, one scale": weight_only(randn(5, 64), weight()[0], rows(1), None),
        "weight-only, NaN": weight_only(randn(5, 64) * torch.nan, *weight()),
    }),
    **named(cpu_int8_mm, {
        "dynamic": int8(randn(3, 64), *weight()),
        "dynamic, bf16, bias": int8(randn(20, 64, dtype=BF16), *weight(), **HALF),
        "dynamic, asymmetric": int8(randn(3, 64), *weight(zero_point=True), quantizer=ASYMMETRIC),
        "static": int8(randn(3, 64), *weight(), xs=rows(1), quantizer=GIVEN),
        "static, zero point": int8(randn(3, 64), *weight(), xs=rows(1), xz=rows(1, 3).int(), quantizer=GIVEN),
        "codes": int8(weight(7)[0], *weight(groups=1), xs=rows(7), quantizer=NO_QUANTIZER),
        "codes, zero points": int8(weight(7)[0], *weight(), xs=rows(7), xz=rows(7, 2).int(), quantizer=NO_QUANTIZER),
    }),
    **named(cpu_embedding, {
        "embedding": embedding(torch.tensor([0, 47, 5]), *weight()),
        "embedding, int32, bf16": embedding(torch.tensor([1, 1]).int(), *weight(zero_point=True), dtype=BF16),
    }),
    **named(cpu_low_rank_mm, {
        "branch": branch(randn(3, 48), randn(3, 64)),
        "branch, bf16, transposed": branch(randn(48, 9, dtype=BF16).t(), randn(64, 9, dtype=BF16).t(), half=BF16),
    }),
    **named(float_attention, {
        "attention": attention(),
        "attention, bf16, mask": attention(SEEN, BF16),
        "attention, fp16, numbers": attention(randn(1, 4, 3, 70), torch.float16, rows=3, softcap=4.0),
        "attention, strided": attention(query=randn(2, 3, 4, 40).transpose(1, 2)[..., 20:]),
    }),
}  # fmt: skip


def resized(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


X, (CODES, SCALE, _) = randn(3, 64), weight()
U8, BIAS = CODES.view(torch.uint8), "takes a contiguous bias"
OF_CODES, OF_SCALE = "the codes of a weight", "the scale of a weight"
WRONG = {
    **named(cpu_weight_only_mm, {
        "x has another width": (weight_only(randn(3, 32), CODES, SCALE, None), OF_CODES),
        "x is a vector": (weight_only(randn(64), CODES, SCALE, None), "x is a matrix"),
        "codes are short": (weight_only(X, CODES[:40], SCALE, None), OF_CODES),
        "codes have another dtype": (weight_only(X, U8, SCALE, None), OF_CODES),
        "n is negative": (weight_only(X, CODES, SCALE, None, n=-1), OF_CODES),
        "codes are said to be packed": (weight_only(X, U8, SCALE, None, dtype="uint4", packed=True), OF_CODES),
        "scales are few": (weight_only(X, CODES, SCALE[:9], None), OF_SCALE),
        "groups do not divide": (weight_only(X, CODES, torch.ones(48, 3), None), OF_SCALE),
        "zero points are few": (weight_only(X, CODES, SCALE, torch.ones(48, 1)), "a zero point has the shape"),
        "the bias is short": (weight_only(X, CODES, SCALE, None, bias=randn(9)), BIAS),
        "the bias is strided": (weight_only(X, CODES, SCALE, None, bias=randn(96)[::2]), BIAS),
        "the bias is wider": (weight_only(X, CODES, SCALE, None, bias=randn(48).double()), BIAS),
        "memory is gone": (weight_only(X, resized(CODES.clone()), SCALE, None), "memory (that )?was given back"),
        "memory of x is gone": (weight_only(resized(X.clone()), CODES, SCALE, None), "memory that was given back"),
    }),
    **named(cpu_int8_mm, {
        "codes without scales": (int8(CODES[:3], CODES, SCALE, None, quantizer=NO_QUANTIZER), "needs xs"),
        "no quantizer": (int8(X, CODES, SCALE, None, quantizer=NO_QUANTIZER), "between -128"),
        "no scales are given": (int8(X, CODES, SCALE, None, quantizer=GIVEN), "takes xs"),
        "codes of nine bits": (int8(X, CODES, SCALE, None, quantizer=[-256.0, 255.0, *DYNAMIC[2:]]), "between -128"),
        "bounds are NaN": (int8(X, CODES, SCALE, None, quantizer=[float("nan")] * 6), "between -128"),
        "small groups": (int8(X, CODES, torch.ones(48, 8), None), "groups of a multiple of 32"),
        "zero points without scales": (int8(X, CODES, SCALE, None, xz=rows(3).int()), "xz needs xs"),
    }),
    **named(cpu_embedding, {
        "ids are a matrix": (embedding(torch.zeros(2, 2, dtype=torch.int64), CODES, SCALE, None), "ids is a vector"),
    }),
    **named(cpu_low_rank_mm, {
        "rows of y are few": (branch(randn(2, 48), X), "takes factors"),
        "ranks differ": ((randn(3, 48), X, randn(5, 64).half(), randn(48, 4).half()), "takes factors"),
        "up is short": ((randn(3, 48), X, randn(5, 64).half(), randn(40, 5).half()), "takes factors"),
        "factors in fp32": ((randn(3, 48), X, randn(5, 64), randn(48, 5)), "takes factors .* in 16 bits"),
    }),
}  # fmt: skip
