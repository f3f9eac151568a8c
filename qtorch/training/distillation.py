"""Distillation: a quantized student learns from a frozen teacher, mostly the float model that it was.

    loss = a T^2 KL(softmax(z_teacher / T) || softmax(z_student / T))           logits z, mean over tokens
         + b mean over layers of |h_student - h_teacher|^2 / |h_teacher|^2      outputs h of layers

(Hinton et al., arXiv 1503.02531, for the first.)

teacher = Teacher(model)  # before quantize_: the weights of both are the same memory until training changes them
quantize_(model, qat(recipe))
loss, output = distill(model, teacher, Distillation(), input_ids=ids)

Of a teacher that ran before, `TopLogits` keeps the most likely tokens: 384 bytes a token for 64 of them.
"""

import copy
import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import QuantizedTensor
from ..model.install import check_model
from ..primitives.affine import check_tensors


@dataclass(frozen=True)
class Distillation:
    """Weights of the loss; see the top of the file.

    Args:
        logits: a.
        hidden: b; the layers are those of the teacher's `layers`.
        temperature: T.

    Raises:
        ValueError: a negative weight, none at all, or a temperature that is not positive.
    """

    logits: float = 1.0
    hidden: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if min(self.logits, self.hidden) < 0 or self.logits == self.hidden == 0 or not self.temperature > 0:
            raise ValueError(f"Distillation: weights are 0 or more, one of them more, and temperature > 0, got {self}")


@dataclass(frozen=True)
class TopLogits:
    """The k most likely tokens of a teacher, to be kept beside the data and used in place of the teacher. All other
    tokens count as one, whose probability is what remains: the divergence is that of these k + 1 probabilities, at most
    the whole one, and all of it with k = V - 1.

    Args:
        indices: (..., k) integers.
        log_probs: (..., k), natural logarithms of their probabilities at the temperature of the loss.
    """

    indices: Tensor
    log_probs: Tensor

    @staticmethod
    def of(logits: Tensor, k: int = 64, temperature: float = 1.0, dtype: torch.dtype = torch.float16) -> "TopLogits":
        """Of a teacher's logits (..., V): int32, and log_probs in `dtype`.

        Raises:
            ValueError: `k` is not 1 to V - 1.
        """
        if not 1 <= k < logits.shape[-1]:
            raise ValueError(f"TopLogits.of: k is 1 to {logits.shape[-1] - 1}, one less than logits, got {k}")
        log_probs, indices = torch.log_softmax(logits.detach().float() / temperature, -1).topk(k, -1)
        return TopLogits(indices.int(), log_probs.to(dtype))


def distillation_loss(
    student: Tensor, teacher: Tensor | TopLogits, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """T^2 KL(teacher || student), the mean over tokens, in fp32.

    Args:
        student: logits (..., V).
        teacher: logits (..., V), or the most likely tokens at this temperature.
        mask: (...), true for the tokens that count; None: all.

    Raises:
        ValueError: teacher and student have other shapes.
    """
    check_tensors("distillation_loss", student, teacher.indices if isinstance(teacher, TopLogits) else teacher)
    shape = teacher.shape if isinstance(teacher, Tensor) else (*teacher.indices.shape[:-1], student.shape[-1])
    if student.shape != shape:
        shapes = f"{tuple(shape)} and {tuple(student.shape)}"
        raise ValueError(f"distillation_loss: teacher and student have logits of one shape, got {shapes}")
    log_q = torch.log_softmax(student.float() / temperature, -1)
    if isinstance(teacher, TopLogits):
        log_q, log_p = _with_rest(log_q.gather(-1, teacher.indices.long())), _with_rest(teacher.log_probs.float())
    else:
        log_p = torch.log_softmax(teacher.float() / temperature, -1)
    divergence = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return _mean(divergence, mask) * temperature**2


def _with_rest(log_probs: Tensor) -> Tensor:
    """And the logarithm of 1 - sum of these probabilities, of at least 2^-23: below, fp32 has only rounding errors."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=2.0**-23)
    return torch.cat((log_probs, rest.log()), -1)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    return values.mean() if mask is None else (values * mask).sum() / mask.sum().clamp(min=1)


class Teacher:
    """A frozen copy of a float model, in eval mode, whose parameters are those of the model, in the same memory. What a
    student trains is copied before its first step, by the first `distill`: a teacher of adapters, of scales, or of
    a model whose embedding and head do not train has no copies of these. Buffers are copies.

    Args:
        model: before `quantize_`; another model may teach as well.
        layers: a regular expression for the full names of the modules whose outputs are `Distillation.hidden`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `layers` matches no module.
    """

    def __init__(self, model: nn.Module, layers: str | None = None) -> None:
        check_model("Teacher", model)
        shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        self.model = copy.deepcopy(model, shared).eval()
        names = [name for name, _ in model.named_modules()]
        self.layers = [] if layers is None else [name for name in names if re.fullmatch(layers, name)]
        if layers is not None and not self.layers:
            raise ValueError(f"Teacher: layers={layers!r} matches no module, such as {names[-1]!r}")

    def keep(self, student: nn.Module) -> None:
        """Copy the parameters that training `student` would change here too."""
        trained = {_memory(part) for p in student.parameters() if p.requires_grad for part in _parts(p)}
        for parameter in self.model.parameters():
            if any(_memory(part) in trained for part in _parts(parameter)):
                parameter.data = parameter.data.clone()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        """The output of the model, and those of `layers`."""
        return _run(self.model, self.layers, args, kwargs)


def _parts(parameter: Tensor) -> list[Tensor]:
    if isinstance(parameter, QuantizedTensor):
        return [part for part in parameter.inner_tensors.values() if part is not None]
    return [parameter]


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _run(model: nn.Module, layers: list[str], args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """The output of a model, and those of some of its modules."""
    seen: dict[str, Tensor] = {}
    wrapped: Any = getattr(model, "module", None)
    inner = wrapped if isinstance(wrapped, nn.Module) else model
    with ExitStack() as hooks:
        for name in layers:

            def see(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                seen[name] = output[0] if isinstance(output, tuple) else output

            hooks.callback(inner.get_submodule(name).register_forward_hook(see).remove)
        output = model(*args, **kwargs)
    return output, [seen[name] for name in layers]


def distill(
    student: nn.Module,
    teacher: Teacher | TopLogits,
    distillation: Distillation = Distillation(),
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Run both models on the same inputs: the loss at the top of the file, to be differentiated, and the output of the
    student.

    Args:
        student: made of the teacher's model by `quantize_` with a training recipe, or any other with such outputs.
        teacher: runs too; or what it found for these inputs.
        args, kwargs: inputs of the models; ``labels`` are for the student, whose output has their loss, to be added.
            Tokens whose ``attention_mask`` is zero do not count.

    Raises:
        ValueError: hidden states without `Teacher.layers`.
    """
    layers = teacher.layers if isinstance(teacher, Teacher) and distillation.hidden else []
    if distillation.hidden and not layers:
        raise ValueError('distill: hidden states need Teacher(model, layers=r"model\\.layers\\.\\d+")')
    wanted: Any = teacher
    targets: list[Tensor] = []
    if isinstance(teacher, Teacher):
        teacher.keep(student)
        given = {name: value for name, value in kwargs.items() if name != "labels"}
        wanted, targets = teacher(*args, **given)
        wanted = _logits(wanted)
    output, states = _run(student, layers, args, kwargs)
    mask = kwargs.get("attention_mask")
    loss: Any = 0.0
    if distillation.logits:
        of_logits = distillation_loss(_logits(output), wanted, distillation.temperature, mask)
        loss = loss + distillation.logits * of_logits
    for state, target in zip(states, targets if layers else [], strict=True):
        error = (state.float() - target.float()).square().mean(-1)
        size = _mean(target.float().square().mean(-1), mask)
        loss = loss + distillation.hidden / len(layers) * _mean(error, mask) / size
    return loss, output


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    return found[0] if isinstance(found, tuple) else found


class DistillationMixin:
    """For a trainer of transformers: ``class MyTrainer(DistillationMixin, transformers.Trainer)``.

    Args:
        teacher, distillation: of `distill`; the rest is the trainer's. Without a teacher the data have columns
            ``teacher_indices`` and ``teacher_log_probs``, those of `TopLogits`.
    """

    def __init__(self, *args: Any, teacher: Teacher | None, distillation: Distillation = Distillation(), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.teacher, self.distillation = teacher, distillation
        self.model_accepts_loss_kwargs = False  # the loss is a mean, also of a part of a batch

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
        """Of the trainer, which calls it."""
        inputs = dict(inputs)
        teacher = self.teacher or TopLogits(inputs.pop("teacher_indices"), inputs.pop("teacher_log_probs"))
        loss, output = distill(model, teacher, self.distillation, **inputs)
        return (loss, output) if return_outputs else loss
