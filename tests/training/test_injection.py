"""inject: every contraction of any code, forward and gradients, by rule; conversion of either side; files."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from qtorch import PerTensor, compute_error, int8_weight_only, quantize_, training
from qtorch.kernels import record_kernels
from qtorch.training import CallSite, GemmSpec, QuantizationSchedule, TrainingSpec, fully_quantized, inject
from tests.movement.holding import through_file
from tests.refusals import refuses

SPEC = fully_quantized(8, 8)
FULL = TrainingSpec()


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


X, W, V = (4, 6, 16), (16, 8), (16,)
attention = functional.scaled_dot_product_attention
# name: (function, shapes of its operands)
CALLS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (functional.linear, [X, (8, 16), (8,)]),
    "linear of a vector": (functional.linear, [V, (8, 16)]),
    "matmul": (torch.matmul, [X, W]),
    "matmul, @": (lambda a, b: a @ b, [X, W]),
    "matmul, method, vector": (lambda a, b: a.matmul(b), [X, V]),
    "matmul, vectors": (torch.matmul, [V, V]),
    "matmul, vector first": (torch.matmul, [V, (3, 16, 5)]),
    "matmul, broadcast": (torch.matmul, [(2, 1, 6, 16), (3, 16, 5)]),
    "mm": (lambda a, b: torch.mm(input=a, mat2=b), [(6, 16), W]),
    "bmm": (lambda a, b: a.bmm(mat2=b), [X, (4, 16, 5)]),
    "mv": (torch.mv, [(6, 16), V]),
    "dot": (torch.dot, [V, V]),
    "inner": (torch.inner, [X, (5, 16)]),
    "addmm": (lambda c, a, b: torch.addmm(c, mat2=b, mat1=a, beta=2, alpha=0.5), [(8,), (6, 16), W]),
    "addmv": (torch.addmv, [(6,), (6, 16), V]),
    "baddbmm": (lambda c, a, b: c.baddbmm(batch1=a, batch2=b), [(4, 6, 5), X, (4, 16, 5)]),
    "addbmm": (torch.addbmm, [(6, 5), X, (4, 16, 5)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), [X, W]),
    "tensordot, axes": (lambda a, b: torch.tensordot(a, b, ([1, 2], [2, 0])), [X, (16, 3, 6)]),
    "einsum": (lambda a, b: torch.einsum("bsk,kn->bsn", a, b), [X, W]),
    "einsum, ellipsis": (lambda a, b: torch.einsum("...k,nk", a, b), [X, (8, 16)]),
    "einsum, broadcast": (lambda a, b: torch.einsum("...ik,...kj->...ij", a, b), [(2, 1, 3, 16), (4, 16, 5)]),
    "einsum, three": (lambda a, b, c: torch.einsum("bsk,kn,nm->bsm", a, b, c), [X, W, (8, 5)]),
    "einsum, list": (lambda a, b: torch.einsum("bsk,btk->bst", [a, b]), [X, X]),
    "einsum, diagonal": (lambda a, b: torch.einsum("kk,kn->n", a, b), [(16, 16), W]),
    "multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [(6, 16), W, (8, 5)]),
    "bilinear": (functional.bilinear, [(6, 16), (6, 8), (5, 16, 8), (5,)]),
    "conv1d": (lambda x, w, b: functional.conv1d(x, w, b, padding=1), [(2, 8, 9), (6, 8, 3), (6,)]),
    "conv2d": (lambda x, w: functional.conv2d(x, w, groups=2), [(2, 8, 9, 7), (6, 4, 3, 3)]),
    "conv3d": (functional.conv3d, [(1, 4, 5, 4, 4), (6, 4, 2, 2, 2)]),
    "conv_transpose1d": (lambda x, w: functional.conv_transpose1d(x, w, stride=2), [(2, 8, 9), (8, 6, 3)]),
    "conv_transpose2d": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, 2, 1, 1, 2),
        [(2, 8, 5, 6), (8, 3, 3, 3), (6,)],
    ),
    "attention": (attention, [(2, 3, 6, 16), (2, 3, 7, 16), (2, 3, 7, 8)]),
    "attention, causal": (lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3), [(2, 6, 16)] * 3),
    "attention, groups, mask": (
        lambda q, k, v, m: attention(q, k, v, attn_mask=m, enable_gqa=True),
        [(2, 4, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16), (6, 6)],
    ),
    "grouped_mm": (
        lambda a, b: functional.grouped_mm(a, b, offs=torch.tensor([2, 2, 6], dtype=torch.int32)),
        [(6, 16), (3, 16, 8)],
    ),
    "grouped_mm, batched": (functional.grouped_mm, [(3, 4, 16), (3, 16, 8)]),
}
TWO_SITES = {
    "attention": [":scores", ":values"], "bilinear": [":bilinear", ":bilinear.1"],
    "einsum, three": [":einsum", ":einsum.1"], "multi_dot": [":multi_dot", ":multi_dot.1"],
}  # fmt: skip
"""Names of call sites that are not the first word of the name above."""


@pytest.mark.parametrize("name", CALLS)
def test_every_function(name: str) -> None:
    """In full precision the gradients and the value of torch; in int8 close to them, and neither is it."""
    function, shapes = CALLS[name]
    first = re.split("[ ,]", name)[0]
    operands = [rand(*shape) for shape in shapes]
    wanted = function(*operands)
    g = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, operands, g)
    for spec, least, most in ((FULL, 100, torch.inf), (SPEC, 18, 70)):
        with inject(spec) as injection, record_kernels() as kernels:
            y = function(*operands)
        assert sorted(injection.counts) == TWO_SITES.get(name, TWO_SITES.get(first, [f":{first}"]))
        assert set(injection.counts.values()) == {1}
        assert least < compute_error(wanted, y) <= most
        assert y.shape == wanted.shape
        assert ("int_matmul" in kernels) is (spec is SPEC)
        with record_kernels() as kernels:
            got = torch.autograd.grad(y, operands, g)
        assert ("int_matmul" in kernels) is (spec is SPEC), "the backward runs in the engine, outside of the context"
        for mine, theirs, shape in zip(got, gradients, shapes, strict=True):
            assert mine.shape == theirs.shape
            if spec is FULL or len(shape) > 1:
                assert min(least, 10 if spec is SPEC else 100) < compute_error(theirs, mine)


def test_it_is_the_engine() -> None:
    """The same bits as the functions, and as the recipe for layers."""
    x, w = rand(300, 16), rand(16, 8)
    with inject(SPEC):
        y = x @ w
    y.sum().backward()
    x2, w2 = (t.detach().requires_grad_() for t in (x, w))
    y2 = training.quantized_matmul(x2, w2, SPEC)
    y2.sum().backward()
    assert torch.equal(y, y2)
    assert torch.equal(x.grad, x2.grad)
    assert torch.equal(w.grad, w2.grad)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    other = copy.deepcopy(model)
    quantize_(other, training.mixed_precision_training(SPEC))
    with inject(SPEC):
        y = model(x)
    y.square().sum().backward()
    other(x).square().sum().backward()
    assert torch.equal(other(x), y)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, torch.as_tensor(b.grad))


class Block(nn.Module):
    """Code with products of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mixed = nn.Parameter(torch.randn(6, 6) / 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 24))
        self.conv = nn.Conv1d(24, 24, 3, padding=1, groups=24)
        self.low = nn.Parameter(torch.randn(24, 4) / 5)
        self.rank = nn.Parameter(torch.randn(4, 8) / 2)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        x = torch.tanh(self.mixed) @ x  # a function of a weight on the left
        x = self.conv(self.normed(x).mT).mT
        return self.head(functional.linear(x, (self.low @ self.rank).mT))


SITES = ["attention:bmm", "attention:bmm.1", "attention:linear", "attention:linear.1"]
SITES += [":matmul", ":matmul.1", "normed:linear", "conv:conv1d", ":linear", "head:linear"]


def test_rules_by_call_site() -> None:
    model, x = Block(), torch.randn(3, 6, 16)
    with inject(SPEC) as injection:
        model(x)
    assert sorted(injection.counts) == sorted(SITES)
    with inject({"head": None, r".*:conv1d": SPEC, r"attention:.*": None, ".*": FULL}) as injection:
        model(x)
    assert sorted(injection.counts) == [":linear", ":matmul", ":matmul.1", "conv:conv1d", "normed:linear"]
    seen: list[CallSite] = []

    def rule(site: CallSite) -> TrainingSpec | None:
        seen.append(site)
        return SPEC if site.module == "head" else None

    with inject(rule) as injection, record_kernels() as kernels:
        y = model(x)
    assert list(injection.counts) == ["head:linear"]
    assert "int_matmul" in kernels
    assert [site.name for site in seen if not site.module] == [":matmul", ":matmul.1", ":linear"]
    assert 30 < compute_error(model(x), y) < 70
    with inject({}) as injection:
        assert torch.equal(model(x), model(x))
    assert not injection.counts


def test_nested_and_scheduled() -> None:
    model, x = Block().eval(), torch.randn(3, 6, 16)
    floats = model(x)
    injection = inject(SPEC)
    with injection:
        y = model(x)
        with inject({".*": None}) as inner:
            model(x)
        assert not inner.counts
        assert torch.equal(model(x), y)
    assert torch.equal(model(x), floats)
    with pytest.raises(AssertionError), injection:
        model(torch.randn(3, 6, 17))
    assert torch.equal(model(x), floats), "an error leaves nothing behind"
    # Floating point until the start; each call site has ranges of its own.
    schedule = QuantizationSchedule(start_step=2, static=("output.lhs",))
    injection = inject(fully_quantized(8, 8, PerTensor()), schedule)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(20, 16)
    equal = []
    for _ in range(4):
        with injection:
            y = model(x)
        equal.append(torch.allclose(y, model(x), rtol=1e-5, atol=1e-6))
    assert equal == [True, True, False, False]
    ranges = [state.ranges["output_lhs"].max_val.item() for state in injection.states.values()]
    assert ranges[0] == pytest.approx(x.abs().max().item(), rel=1e-5) or ranges[0] > 1
    assert ranges[1] <= 1
    assert injection.states["0:linear"].step == 4
    # A backward inside of the context, without a module, is one of the step that runs.
    a, b = torch.randn(300, 64, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    with inject(fully_quantized(8, 8, PerTensor()), QuantizationSchedule()):
        y = a @ b
        with record_kernels() as ran:
            y.sum().backward()
    assert "int_matmul" in ran


def test_converting_either_side() -> None:
    """Codes of w, of T(w), on the left and on the right, at their true size; equal outputs; nothing else is kept."""
    model, x = Block(), torch.randn(3, 6, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    injection = inject(fully_quantized(4, 8))
    for _ in range(3):
        with injection:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), injection:
        trained = model.eval()(x)
    injection.convert(model, x)
    kept = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert kept == {"attention.in_proj_bias", "attention.out_proj.bias", "normed.bias", "conv.bias", "head.bias"}
    with torch.no_grad(), injection:
        served = model(x)
        other = model(x[:2] * 0.5)
    assert torch.equal(trained, served)
    assert torch.isfinite(other).all()
    assert not model.attention.in_proj_weight.requires_grad
    codes = [w.inner_tensors["qdata"] for w in injection.stored.parameters()]
    elements = 48 * 16 + 16 * 16 + 36 + 24 * 16 + 24 * 3 + 8 * 8 + 24 * 4 + 4 * 8 + 24 * 8
    assert sum(t.nbytes for t in codes) <= 0.6 * elements
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        model(x)
    refuses("has stored operands already", lambda: injection.convert(model, x))


def test_a_weight_that_something_else_reads_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 16)
            self.body = nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return functional.linear(self.body(self.table(ids)), self.table.weight)

    model, ids = Tied(), torch.randint(20, (2, 5))
    injection = inject(SPEC)
    with torch.no_grad(), injection:
        trained = model(ids)
    injection.convert(model, ids)
    assert not model.table.weight.is_meta
    assert model.body.weight.is_meta
    with torch.no_grad(), injection:
        assert torch.equal(model(ids), trained)
    assert len(injection.stored) == 2


def test_experts_without_tokens_keep_their_floats() -> None:
    """Code whose way depends on the data: an operand is known by what it is made of, not by its turn."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, 16))
            self.looped = nn.Parameter(torch.randn(4, 8, 16))

        def forward(self, x: Tensor, experts: Tensor) -> Tensor:
            order = experts.argsort()
            offs = torch.bincount(experts, minlength=4).cumsum(0).to(torch.int32)
            y = functional.grouped_mm(x[order], self.weight.mT, offs=offs)
            parts = [functional.linear(x[experts == e], self.looped[e]) for e in range(4) if (experts == e).any()]
            return torch.cat([y, *parts])

    model, x = Experts(), torch.randn(6, 16)
    injection, floats = inject(SPEC), copy.deepcopy(model)
    injection.convert(model, x, torch.tensor([0, 2, 2, 0, 2, 2]))
    assert len(injection.stored) == 4
    assert not model.weight.is_meta
    for index in ([0, 2, 2, 0, 2, 2], [3, 1, 1, 2, 0, 0], [1, 1, 1, 1, 1, 1]):
        with torch.no_grad():
            with inject(SPEC):
                wanted = floats(x, torch.tensor(index))
            with injection:
                assert torch.equal(model(x, torch.tensor(index)), wanted)


@pytest.mark.parametrize("schedule", [None, QuantizationSchedule(0, 3, ("output.lhs", "output.rhs"), ema_updates=2)])
def test_attached_it_is_saved_with_the_model(schedule: QuantizationSchedule | None) -> None:
    """Copies, pickles and state dicts, before and after conversion."""
    spec = fully_quantized(8, 8, PerTensor())

    def build() -> nn.Module:
        torch.manual_seed(0)
        return inject(spec, schedule).attach(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)))

    model, x = build(), torch.randn(20, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.advance_with(optimizer, model)
    for _ in range(2):
        model(torch.randn(20, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if schedule is not None:
        assert {int(state.step) for state in model.injection.states.values()} == {2}
    with torch.no_grad():
        for stage in ("trained", "converted"):
            if stage == "converted":
                model.injection.convert(model, x)
            wanted = model.eval()(x)
            assert model.injection.counts == {"0:linear": 1, "2:linear": 1}
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(other(x), wanted)
                assert other.injection.counts == {"0:linear": 1, "2:linear": 1}
            loaded = build().eval()
            state = through_file(model.state_dict(), weights_only=stage == "trained")
            loaded.load_state_dict(state, assign=True)
            assert torch.equal(loaded(x), wanted)
            if stage == "trained" and schedule is not None:
                assert loaded.injection.states["0:linear"].step == 2
    refuses("the model has 'injection' already", lambda: inject(spec).attach(model))


def test_wrong_rules_and_autocast() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), torch.randn(20, 16)
    quantize_(model, {"0": int8_weight_only(), "1": None})
    with inject(SPEC) as injection:
        model(x)
    assert list(injection.counts) == ["1:linear"]
    with inject(SPEC) as injection:
        torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 2, dtype=torch.int64)
    assert not injection.counts
    with pytest.raises(TypeError, match="takes a TrainingSpec, a mapping"):
        inject(8)  # type: ignore[arg-type]
    refuses("is no regular expression", lambda: inject({"(": None}))
    with pytest.raises(ValueError, match="a rule is a TrainingSpec, or None"):
        inject({".*": 8})  # type: ignore[dict-item]
    # Activations are cast, weights are quantized from their own values; products keep their sums.
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(20, 16)
    other = copy.deepcopy(model)
    quantize_(other, training.int8_mixed_precision_training())
    with torch.autocast("cpu", torch.bfloat16):
        with inject(SPEC):
            y = model(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, other(x))


def test_low_bits_of_gradients_only() -> None:
    """Each of the three products as its spec says."""
    gradient = GemmSpec(training.integer(4), training.integer(4))
    x, w = rand(300, 16), rand(16, 8)
    for spec, quantized in (
        (TrainingSpec(grad_input=gradient), (False, True, False)),
        (TrainingSpec(grad_weight=gradient), (False, False, True)),
    ):
        with inject(spec):
            y = x @ w
        g = torch.randn_like(y)
        results = (y, *torch.autograd.grad(y, (x, w), g))
        exact = (x @ w, g @ w.mT, x.mT @ g)
        for got, float_, is_quantized in zip(results, exact, quantized, strict=True):
            assert bool(compute_error(float_, got) < 40) is is_quantized


def test_checkpointed_activations() -> None:
    """Run again inside of the context, parts have the names that they had, and the gradients are the same."""
    body, head = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, head
            self.checkpoints = False

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
            return self.head(y)

    model, x = Model(), torch.randn(300, 16)
    gradients = []
    for model.checkpoints in (False, True):
        with inject({r"body\.0": SPEC, ".*": None}) as injection:
            model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    assert injection.counts == {"body.0:linear": 2}
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("inside", [True, False])
def test_compiled(inside: bool) -> None:
    """The context is entered in the compiled function, or around it; the same numbers and the same names."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(8, 16)
    injection = inject({"0": None, ".*": SPEC})
    with injection:
        wanted = model(x)

    def run(x: Tensor) -> Tensor:
        with injection:
            return model(x)

    torch._dynamo.reset()
    if inside:
        y = torch.compile(run, backend="aot_eager")(x)
    else:
        with injection:
            y = torch.compile(model, backend="aot_eager")(x)
    assert torch.equal(y, wanted)
    assert injection.counts == {"2:linear": 1}
