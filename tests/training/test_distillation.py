"""A teacher whose weights are the student's until training changes them; the losses; scales trained alone."""

import copy

import pytest
import torch

import qtorch
from qtorch import quantize_, training
from qtorch.training import Distillation, DistillationMixin, Teacher, TopLogits, convert, distill, distillation_loss
from tests.refusals import refuses

INT4 = qtorch.int4_weight_only(group_size=32)
W8A8 = qtorch.int8_dynamic_activation_int8_weight()
# recipe: names of the parameters that the teacher has in common with the student
SHARED = {
    training.qat(INT4): set(), training.lsq(recipe=INT4): set(), training.lora_qat(INT4, 4): {"0.weight", "2.weight"},
    training.nvfp4_training(): set(),
}  # fmt: skip


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64, bias=False))


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("recipe", SHARED, ids=str)
@pytest.mark.filterwarnings("ignore:(?s)qtorch")
def test_the_teacher_stays_what_it_was(recipe: object) -> None:
    model = mlp()
    before, teacher, x = copy.deepcopy(model.state_dict()), Teacher(model, r"0|1"), torch.randn(64, 64)
    owned = {name: memory(p) for name, p in model.named_parameters()}
    assert {name: memory(p) for name, p in teacher.model.named_parameters()} == owned
    quantize_(model, recipe)
    optimizer, losses = torch.optim.AdamW(training.parameter_groups(model, 1e-4)), []
    for _ in range(8):
        loss, output = distill(model, teacher, Distillation(hidden=1.0), x)
        assert output.shape == x.shape
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = teacher.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    shared = {name for name, p in teacher.model.named_parameters() if memory(p) in {memory(q) for q in plain(model)}}
    assert shared == SHARED[recipe]
    model.eval()
    trained = model(x)
    quantize_(model, convert())
    torch.testing.assert_close(model(x), trained, rtol=1e-5, atol=1e-5)


def plain(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if type(p) is torch.nn.Parameter]


def test_losses_and_what_does_not_fit() -> None:
    student, teacher = torch.randn(3, 5, 11, dtype=torch.bfloat16, requires_grad=True), torch.randn(3, 5, 11)
    p, q = (torch.nn.functional.softmax(z.double() / 2, -1) for z in (teacher, student))
    each = 4 * (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(distillation_loss(student, teacher, 2.0).double(), each.mean(), rtol=1e-5, atol=1e-6)
    mask = torch.tensor([[1, 1, 0, 0, 1]] * 3)
    wanted = (each * mask).sum() / 9
    torch.testing.assert_close(distillation_loss(student, teacher, 2.0, mask).double(), wanted, rtol=1e-5, atol=1e-6)
    assert distillation_loss(teacher, teacher).abs() < 1e-6
    refuses("logits of one shape", lambda: distillation_loss(student, teacher[..., :4]))
    model = mlp()
    for wrong in ({"logits": 0.0}, {"hidden": -1.0}, {"temperature": 0.0}):
        refuses("Distillation: weights", lambda wrong=wrong: Distillation(**wrong))
    refuses("matches no module", lambda: Teacher(model, "block"))
    with pytest.raises(ValueError, match=r"hidden states need Teacher\(model, layers="):
        distill(model, Teacher(model), Distillation(hidden=1.0), torch.randn(2, 64))
    refuses("Teacher: takes a model", lambda: Teacher(None), TypeError)


def test_the_most_likely_tokens_of_a_teacher() -> None:
    """All but one of them are the whole divergence and its gradient, fewer at most that; fp16 keeps three digits."""
    student, teacher, mask = torch.randn(2, 3, 11, requires_grad=True), torch.randn(2, 3, 11), torch.ones(2, 3)
    whole = distillation_loss(student, teacher, 2.0)
    (wanted,) = torch.autograd.grad(whole, student)
    most = distillation_loss(student, TopLogits.of(teacher, 10, 2.0, torch.float32), 2.0, mask)
    torch.testing.assert_close(most, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(most, student)[0], wanted, rtol=1e-4, atol=1e-6)
    losses = [distillation_loss(student, TopLogits.of(teacher, k, 2.0), 2.0).item() for k in (1, 3, 6, 10)]
    assert losses == sorted(losses)
    assert 0 < losses[0] < 0.8 * whole.item() < 0.9 * losses[-1]
    few = TopLogits.of(teacher, 3)
    assert (few.indices.dtype, few.log_probs.dtype, few.indices.shape) == (torch.int32, torch.float16, (2, 3, 3))
    sure = TopLogits.of(torch.eye(11) * 60, 10)
    assert distillation_loss(torch.eye(11) * 60, sure).abs() < 1e-5
    assert torch.isfinite(distillation_loss(torch.zeros(11, 11), sure))
    refuses("k is 1 to 10, one less than logits, got 11", lambda: TopLogits.of(teacher, 11))
    refuses("logits of one shape", lambda: distillation_loss(student[:1], few))
    model, x = mlp(), torch.randn(5, 64)
    with pytest.raises(ValueError, match="hidden states need Teacher"):
        distill(model, TopLogits.of(model(x), 4), Distillation(hidden=1.0), x)
    assert distill(model, TopLogits.of(model(x), 63), Distillation(), x)[0].abs() < 1e-5


def test_a_trainer_of_transformers(tmp_path: object) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(DistillationMixin, transformers.Trainer):
        pass

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    teacher = Teacher(model, r"model\.layers\.\d+")
    quantize_(model, training.qat(qtorch.intx_weight_only("int3", group_size=32)))
    other = copy.deepcopy(model)
    ids = torch.randint(64, (16, 12))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    start = distill(model.eval(), teacher, Distillation(hidden=1.0), input_ids=ids)[0].item()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=40, learning_rate=3e-4, report_to=[], use_cpu=True, save_strategy="no"
    )
    Trainer(model, arguments, train_dataset=data, teacher=teacher, distillation=Distillation(hidden=1.0)).train()
    end = distill(model.eval(), teacher, Distillation(hidden=1.0), input_ids=ids)[0].item()
    assert 0 < end < 0.6 * start
    top = TopLogits.of(teacher(input_ids=ids)[0].logits, 16)
    columns = {"teacher_indices": top.indices, "teacher_log_probs": top.log_probs}
    data = [row | {name: column[i] for name, column in columns.items()} for i, row in enumerate(data)]
    arguments.remove_unused_columns = False
    start = distill(other.eval(), teacher, Distillation(), input_ids=ids)[0].item()
    Trainer(other, arguments, train_dataset=data, teacher=None).train()
    assert 0 < distill(other.eval(), teacher, Distillation(), input_ids=ids)[0].item() < 0.9 * start
