"""lsq: its steps start and move as papers say, and are parameters like others; a model of 2 bits learns."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import PackedLayout, PerGroup, float8_weight_only, int4_weight_only, int8_weight_only, quantize_
from qtorch.primitives import MinMaxRule
from qtorch.training import calibrate, clip_penalty, convert, lsq, pact, parameter_groups
from qtorch.training.quantization_aware.layers import FakeQuantizedLinear
from qtorch.training.quantization_aware.learned import LearnedClip, LearnedStep
from tests.movement.holding import through_file
from tests.refusals import refuses
from tests.training.small_model import fit, mlp


def test_starts_and_zeros() -> None:
    for recipe in (int4_weight_only(group_size=32), qtorch.int8_dynamic_activation_int4_weight(), int8_weight_only()):
        model = mlp()
        twin = copy.deepcopy(model)
        quantize_(twin, recipe)
        for weights in ("step", "clip", "chosen"):
            prepared = copy.deepcopy(model)
            quantize_(prepared, lsq(recipe=recipe, weights=weights))
            quantize_(prepared, convert())
            for ours, theirs in zip(prepared[0].weight.plain(), twin[0].weight.plain()):
                assert (ours is None and theirs is None) or torch.equal(ours, theirs)
            assert prepared[0].weight.scheme == twin[0].weight.scheme
    layer = nn.Linear(64, 32)
    with torch.no_grad():
        layer.weight[:16].zero_()
    quantize_(layer, lsq(4, None))
    scale = layer.weight_quantizer.initial_scale
    torch.testing.assert_close(scale[:16], scale[16:].mean().expand(16, 1))
    for recipe in (lsq(4, None), lsq(recipe=int8_weight_only())):
        model = nn.Sequential(nn.Linear(64, 64))
        nn.init.zeros_(model[0].weight)
        quantize_(model, recipe)
        fit(model)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        quantize_(model, convert())
        assert model[0].weight.dequantize().count_nonzero() > 0 or recipe.recipe is None


def test_steps_are_moved_as_the_paper_moves_them() -> None:
    """One step of plain gradient descent with a small rate, against s <- s - lr g dL/ds of the papers."""
    from qtorch.primitives import learned_step_fake_quantize

    x = torch.randn(32, 64)
    for offset in (False, True):
        layer = nn.Linear(64, 16)
        quantize_(layer, lsq(4, 4, activation_offset=offset))
        calibrate(layer, [x])
        q = layer.input_quantizer
        scale, zero_point = (None if t is None else t.detach().clone() for t in q.qparams(x, False))
        upstream = torch.randn(32, 64)
        s = scale.clone().requires_grad_()
        # The offset of LSQ+ is beta = -z s; x_hat = s q + beta.
        beta = (-zero_point * scale).requires_grad_()
        y = learned_step_fake_quantize(x, (-1, -1), s, -beta / s if offset else zero_point, "int8", -8, 7)
        of_s, of_beta = torch.autograd.grad((y * upstream).sum(), (s, beta), allow_unused=True)
        g = (64 * float(7 - zero_point)) ** -0.5
        rate = 1e-4
        (q(x).values * upstream).sum().backward()
        optimizer = torch.optim.SGD(q.parameters(), rate)
        optimizer.step()
        new_scale, new_zero_point = q.qparams(x, False)
        torch.testing.assert_close(new_scale - scale, -rate * g * of_s, rtol=2e-2, atol=1e-9)
        if offset:
            new_beta = -new_zero_point * new_scale
            torch.testing.assert_close(new_beta - beta, -rate * g * of_beta, rtol=2e-2, atol=1e-8)


def test_an_input_without_negative_values_has_unsigned_codes() -> None:
    model, x = mlp(), torch.randn(64, 64)
    quantize_(model, lsq(4, 4))
    calibrate(model, [x])
    first, second = (model[i].input_quantizer for i in (0, 2))
    assert first.initial_zero_point.item() == 0
    assert second.initial_zero_point.item() == -8
    with torch.no_grad():
        assert len(second(model[1](model[0](x))).values.unique()) > 9
    quantize_(model, convert())
    specs = [model[i].weight.scheme.activation for i in (0, 2)]
    assert [spec.code_range for spec in specs] == [(-8, 7), (0, 15)]
    # Where int8 has room, no zero point is served.
    assert all(model[i].weight.act_zero_point is None for i in (0, 2))
    model = mlp()
    quantize_(model, lsq(8, 8))
    calibrate(model, [x])
    quantize_(model, convert())
    assert model[0].weight.act_zero_point is None
    assert model[2].weight.act_zero_point.item() == -128


def test_the_first_batch_or_calibration_starts_activations() -> None:
    batches = [torch.randn(64, 64) * scale for scale in (1, 3)]
    calibrated, other = mlp(), mlp()
    other.load_state_dict(calibrated.state_dict())
    for model in (calibrated, other):
        quantize_(model, lsq())
        refuses("no scale yet: train on a batch, or call", lambda model=model: model.eval()(batches[0]))
        refuses("0: no input has been seen", lambda model=model: quantize_(model, convert()))
        model.train()
    assert calibrate(calibrated, batches) == 2
    other(batches[0])
    spec = other[0].input_quantizer.spec
    ranges = [spec.choose_range(x)[1] for x in batches]
    for model, high in ((calibrated, sum(ranges) / 2), (other, ranges[0])):
        torch.testing.assert_close(model[0].input_quantizer.initial_scale, high * 2 / 15)
    start = other[0].input_quantizer.initial_scale.clone()
    other(batches[1])
    assert torch.equal(other[0].input_quantizer.initial_scale, start), "the first batch only"
    refuses("there is no batch", lambda: calibrate(calibrated, []))
    refuses("no layer of the model is prepared", lambda: calibrate(mlp(), batches))


def test_states_and_learned_clips() -> None:
    first, second = mlp(), mlp()
    for model in (first, second):
        quantize_(model, lsq())
    fit(first)
    with torch.no_grad():
        for ours, theirs in zip(second.state_dict().values(), first.state_dict().values()):
            ours.copy_(theirs)
    x = torch.randn(5, 64)
    assert torch.equal(second.train()(x), first.train()(x))
    layer = nn.Linear(64, 8)
    quantize_(layer, lsq(recipe=qtorch.uintx_weight_only("uint4", 32), weights="clip"))
    quantizer = layer.weight_quantizer
    assert isinstance(quantizer, LearnedClip)
    scale, zero_point = quantizer.converted_qparams(layer.weight)
    doubled, same = quantizer.converted_qparams(layer.weight.detach() * 2)
    torch.testing.assert_close(doubled, 2 * scale)
    assert torch.equal(same, zero_point)
    with torch.no_grad():
        quantizer.log_clip.fill_(-0.5)
        quantizer.log_clip_low.fill_(-0.25)
    low, high = layer.weight.detach().view(8, 2, 32).aminmax(dim=-1)
    wanted = (high * math.exp(-0.5) - low * math.exp(-0.25)) / 15
    torch.testing.assert_close(quantizer.converted_qparams(layer.weight)[0], wanted)
    layer(torch.randn(4, 64)).square().sum().backward()
    assert quantizer.log_clip.grad.count_nonzero() > 12
    assert quantizer.log_clip_low.grad.count_nonzero() > 12


def test_edges_and_tied_weights() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    report = quantize_(model, lsq(2, 3, edge_bits=8))
    specs = [layer.linear_spec for layer in model]
    assert [spec.weight.dtype.bits for spec in specs] == [8, 2, 2, 8]
    assert [spec.activation.code_range for spec in specs] == [(-128, 127), (-4, 3), (-4, 3), (-128, 127)]
    assert [row.detail for row in report.quantized][:2] == [
        "lsq(weight_bits=8, activation_bits=8)",
        "lsq(weight_bits=2, activation_bits=3)",
    ]
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize_(model, lsq(2, None, edge_bits=8))
    assert [(layer.linear_spec.weight.dtype.bits, layer.linear_spec.activation) for layer in model] == [(8, None)] * 2
    model = nn.ModuleDict({"embed": nn.Embedding(40, 64), "head": nn.Linear(64, 40, bias=False)})
    model["head"].weight = model["embed"].weight
    report = quantize_(model, lsq())
    assert [row.also for row in report.quantized] == [("embed.weight",)]
    assert model["embed"].weight_quantizer is model["head"].weight_quantizer
    model = mlp()
    model.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    quantize_(model, lsq(2, 2))
    fit(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model[0].weight_quantizer.log_scale.count_nonzero() > 90


def test_groups_scales_and_names() -> None:
    model = mlp()
    quantize_(model, lsq(activation_offset=True))
    own, scales = parameter_groups(model, lr=0.1, weight_decay=0.2, scale_lr=0.01)
    assert (own["lr"], own["weight_decay"]) == (0.1, 0.2)
    assert (scales["lr"], scales["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in own["params"]} == {"0.weight", "0.bias", "2.weight"}
    learned = ("weight_quantizer.log_scale", "input_quantizer.log_scale", "input_quantizer.shift")
    assert {names[id(p)] for p in scales["params"]} == {f"{i}.{name}" for i in (0, 2) for name in learned}
    assert len(parameter_groups(mlp(), lr=0.1)) == 1
    model = mlp()
    quantize_(model, lsq())
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert {t.dtype for name, t in model.state_dict().items() if "quantizer" in name} == {torch.float32}
    fit(model)
    assert str(lsq(recipe=int4_weight_only(group_size=32))) == "lsq(recipe=int4_weight_only(group_size=32))"


def test_training_continues_exactly_after_load_state_dict(tmp_path: Path) -> None:
    first = mlp()
    quantize_(first, lsq(2, 2, activation_offset=True))
    fit(first, 3)
    state = through_file(first.state_dict())
    second, third = mlp(), None
    quantize_(second, lsq(2, 2, activation_offset=True))
    second.load_state_dict(state)
    with torch.device("meta"):
        third = mlp()
    third.to_empty(device="cpu")
    for p in third.parameters():
        nn.init.zeros_(p)
    quantize_(third, lsq(2, 2, activation_offset=True))
    third.load_state_dict(copy.deepcopy(state), assign=True)
    whole = copy.deepcopy(first)
    for model in (first, second, third, whole):
        fit(model, 3, seed=1)
    for other in (second, third, whole):
        assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), other.state_dict().values()))
    assert not torch.equal(first.state_dict()["0.weight"], state["0.weight"])
    qtorch.save_quantized(first, tmp_path / "prepared.safetensors")
    qtorch.load_quantized(second, tmp_path / "prepared.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))


def test_embeddings_and_what_is_refused() -> None:
    model, ids = nn.Sequential(nn.Embedding(40, 64, padding_idx=3), nn.Linear(64, 8)), torch.arange(40)
    quantize_(model, {"0": lsq(4, 8), "1": lsq(2, 2)})
    assert model[0].linear_spec.activation is None
    loss = model(ids).square().mean()
    loss.backward()
    assert model[0].weight.grad[3].count_nonzero() == 0
    assert model[0].weight_quantizer.log_scale.grad.count_nonzero() > 30
    model.eval()
    wanted = model[0](ids)
    quantize_(model, convert())
    assert torch.equal(model[0](ids), wanted)
    assert model[0].weight.scheme.activation is None
    for bits in ((1, 4), (4, 9), (16, 4)):
        refuses("is 2 to 8", lambda bits=bits: lsq(*bits))
    for recipe, message in (
        (float8_weight_only(), "are not integers"),
        (qtorch.nf4_weight_only(), "are not integers"),
        (qtorch.nvfp4_weight_only(), "are not integers"),
        (qtorch.int8_dynamic_activation_int8_semi_sparse_weight(), "prunes its weights"),
    ):
        refuses(message, lambda recipe=recipe: lsq(recipe=recipe))
    refuses(r"weight_bits is what int8_weight_only\(\) says; leave it out", lambda: lsq(8, recipe=int8_weight_only()))
    refuses("weights is one of step, clip, chosen, got 'lsq'", lambda: lsq(weights="lsq"))
    layer = nn.Embedding(8, 64, sparse=True)
    refuses("sparse=True", lambda: quantize_(nn.Sequential(layer), {"0": lsq()}))


def test_the_model_is_unchanged_after_a_dry_run_or_an_error() -> None:
    class Subclass(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Subclass(64, 64), nn.Linear(64, 48))
    before = [type(m) for m in model], [id(p) for p in model.parameters()], list(model.state_dict())

    def check() -> None:
        assert before == ([type(m) for m in model], [id(p) for p in model.parameters()], list(model.state_dict()))

    refuses(r"1: takes the weights of nn.Linear, nn.Embedding.*Subclass\n.*unchanged", lambda: quantize_(model, lsq()))
    check()
    report = quantize_(model, lsq(), lambda module, name: name != "1", dry_run=True)
    check()
    assert [row.name for row in report.quantized] == ["0.weight", "2.weight"]
    with pytest.raises(ValueError, match=r"0: block_size \(1, 48\) does not divide shape"):
        quantize_(model, {"0": lsq(granularity=PerGroup(48)), "2": lsq()})
    check()
    quantize_(model, {"0": lsq()})
    refuses(r"0: is in training; finish it by convert\(\) first", lambda: quantize_(model, {"0": int8_weight_only()}))
    refuses(r"0: is in training; finish it by convert\(\) first", lambda: quantize_(model, {"0": lsq(weight_bits=3)}))
    assert not quantize_(model, {"0": lsq()}).quantized
    calibrate(model, [torch.randn(8, 64)])
    dry = quantize_(model, convert(), dry_run=True)
    assert type(model[0]) is FakeQuantizedLinear
    assert model[0].input_quantizer.training
    assert quantize_(model, convert()).layers == dry.layers
    check_after = [type(m) for m in model]
    assert check_after == before[0]
    assert model[0].weight.scheme.layout == PackedLayout()


def test_pact_clips_less_of_what_is_penalized() -> None:
    model, x = mlp(), torch.randn(64, 64)
    quantize_(model, pact(activation_init=MinMaxRule()))
    calibrate(model, [x])
    quantizer = model[0].input_quantizer
    assert isinstance(quantizer, LearnedStep)
    assert not quantizer.through_rounding
    torch.testing.assert_close(quantizer.largest().item(), x.abs().max().item() * 7 / 7.5)
    total = clip_penalty(model)
    torch.testing.assert_close(total, sum(model[i].input_quantizer.largest().square().sum() for i in (0, 2)).squeeze())
    before = quantizer.largest().item()
    total.backward()
    torch.optim.SGD(quantizer.parameters(), 1e-3).step()
    assert quantizer.largest().item() < before
    refuses("prepared by pact", lambda: clip_penalty(mlp()))


def test_two_bits_learn() -> None:
    """Sixty clusters in ten classes: after training, LSQ is near the float model; minima and maxima are far from it."""
    centers = torch.randn(60, 64)

    def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        cluster = torch.randint(60, (count,), generator=g)
        return centers[cluster] + torch.randn(count, 64, generator=g) * 0.8, cluster % 10

    def fit(model: nn.Module, steps: int) -> None:
        optimizer = torch.optim.AdamW(parameter_groups(model.train(), 2e-3, scale_lr=1e-2))
        for step in range(steps):
            x, y = batch(128, step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    def accuracy(model: nn.Module) -> float:
        x, y = batch(2000, 10**6)
        with torch.no_grad():
            return (model(x).argmax(1) == y).float().mean().item()

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fit(model, 200)
    after_training, learned = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(after_training, lsq(2, 2, weight_init=MinMaxRule(), activation_init=MinMaxRule()))
    calibrate(after_training, [batch(128, step)[0] for step in range(8)])
    quantize_(after_training, convert())
    quantize_(learned, lsq(2, 2))
    calibrate(learned, [batch(128, step)[0] for step in range(8)])
    fit(learned, 150)
    before = accuracy(learned)
    quantize_(learned, convert())
    results = accuracy(model), accuracy(after_training), accuracy(learned)
    assert results[2] == before
    assert results[2] > results[1] + 0.15, results
    assert results[2] > results[0] - 0.1, results
