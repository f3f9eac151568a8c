"""Gradients of `DistributedDataParallel` that are averaged in int8, with error feedback.

    c_r  = g_r + e_r                          of rank r of W, in blocks of consecutive elements of a parameter
    e_r <- c_r - Q(c_r)                       codes and scale of Q(c_r) go to the rank that owns the block
    s    = sum_r Q(c_r)                       in fp32; the owner sends Q(s / W) to all ranks: the gradient
    e_o <- e_o + s - W Q(s / W)               of the owner, o

So the sum over r of g_r + e_r is W times the gradient plus the sum of the new e_r: what a step rounds off, later steps
make good, and the error of a sum over steps does not grow with them (Seide et al. 2014, 1-bit SGD; Karimireddy et al.,
arXiv 1901.09847; both roundings: Tang et al., arXiv 1905.05957). Ranks add in one order, and a block and its owner do
not depend on the buckets, so a run that goes on computes the same bits, although DDP divides its buckets anew.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import quantize_int8_rowwise


class Int8GradientState:
    """What `int8_gradient_hook` keeps between steps.

        state = Int8GradientState(model.parameters())
        ddp_model.register_comm_hook(state, int8_gradient_hook)

    `error` (blocks, block_size) fp32 is e_r, zeros at first: as much memory as gradients in fp32. It differs by rank.

    Args:
        parameters: of the model, in the same order on all ranks; those that need no gradient are left out.
        process_group: that of the model; None is all processes.
        block_size: consecutive elements that share an fp32 scale; those of a parameter are padded to whole blocks.
        error_feedback: if False, what is rounded off is lost, and `error` stays zero.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        process_group: dist.ProcessGroup | None = None,
        block_size: int = 256,
        error_feedback: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"Int8GradientState: block_size is 1 or more, got {block_size}")
        self.process_group, self.block_size, self.error_feedback = process_group, block_size, error_feedback
        self._rows: dict[Tensor, range] = {}
        count, device = 0, torch.device("cpu")
        for parameter in parameters:
            if parameter.requires_grad:
                first, count, device = count, count - (-parameter.numel() // block_size), parameter.device
                self._rows[parameter] = range(first, count)
        self.error = torch.zeros(count, block_size, dtype=torch.float32, device=device)
        self._routes: dict[tuple[range, ...], list[Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on exactly."""
        return {"error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank, for the same parameters and block size."""
        found, own = tuple(state["error"].shape), tuple(self.error.shape)
        if found != own:
            raise ValueError(f"Int8GradientState of {own} got {found}: give it the same parameters and block_size")
        self.error.copy_(state["error"])

    def _route(self, parameters: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Of the n blocks of a bucket of these parameters: their rows (n) of `error`, of which rank i % W owns row i;
        slots (W * most), the blocks that each rank is sent, n for none; places (n), where a block is in them; and the
        rows of this rank, in the order of its slots."""
        if any(parameter not in self._rows for parameter in parameters):
            raise ValueError("int8_gradient_hook: a parameter that its Int8GradientState was not made with")
        key = tuple(self._rows[parameter] for parameter in parameters)
        if key not in self._routes:
            rows = torch.tensor([row for each in key for row in each], dtype=torch.int64, device="cpu")
            of_rank = [(rows % group.size() == rank).nonzero().flatten() for rank in range(group.size())]
            slots = torch.nn.utils.rnn.pad_sequence(of_rank, batch_first=True, padding_value=len(rows)).flatten()
            made = (rows, slots, slots.argsort(stable=True)[: len(rows)], rows[of_rank[group.rank()]])
            self._routes[key] = [tensor.to(self.error.device) for tensor in made]
        return self._routes[key]


def int8_gradient_hook(state: Int8GradientState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Hook for `DistributedDataParallel.register_comm_hook`: the mean of gradients, sent as int8 codes and scales.

    A rank sends 2 (1 + 4 / block_size) bytes an element where the all-reduce of fp32 gradients has 8. All ranks get the
    same bits. A block with a NaN or an infinity is NaN on all ranks, and leaves no error.

    Raises:
        ValueError: the state was made without a parameter of the model.
    """
    group: Any = state.process_group or dist.group.WORLD
    gradients, size, ranks = bucket.gradients(), state.block_size, group.size()
    rows, slots, places, owned = state._route(bucket.parameters(), group)
    values = torch.cat([torch.nn.functional.pad(g.flatten().float(), (0, -g.numel() % size)) for g in gradients])
    values = values.reshape(-1, size) + state.error[rows]
    codes = _encoded(values)
    if state.error_feedback:
        state.error[rows] = (values - _decoded(codes)).nan_to_num(0.0, 0.0, 0.0)
    sent = torch.nn.functional.pad(codes, (0, 0, 0, 1))[slots]
    received = torch.empty_like(sent)
    arrival = dist.all_to_all_single(received, sent, group=group, async_op=True).get_future()
    if received.device.type == "cpu":
        arrival.wait()  # else gloo would run `finish` in its threads, and send in an order of their own

    def finish(_: Any) -> Tensor:
        total = sum(_decoded(part) for part in received.chunk(ranks))
        mean = _encoded(total / ranks)
        if state.error_feedback:
            lost = (total - ranks * _decoded(mean)).nan_to_num(0.0, 0.0, 0.0)
            state.error.index_add_(0, owned, lost[: len(owned)])
        gathered = torch.empty_like(received)
        dist.all_gather_into_tensor(gathered, mean, group=group)
        whole = _decoded(gathered)[places].split([-(-g.numel() // size) for g in gradients])
        for gradient, part in zip(gradients, whole, strict=True):
            gradient.copy_(part.flatten()[: gradient.numel()].reshape(gradient.shape))
        return bucket.buffer()

    return arrival.then(finish)


def _encoded(blocks: Tensor) -> Tensor:
    """Codes of blocks (n, B), each with the bytes of its scale behind them: int8 (n, B + 4)."""
    codes, scale = quantize_int8_rowwise(blocks)
    return torch.cat([codes, scale.view(torch.int8)], 1)


def _decoded(codes: Tensor) -> Tensor:
    """The values (n, B) fp32 of what `_encoded` made."""
    scale = codes[:, -4:].contiguous().view(torch.float32)
    return codes[:, :-4] * scale.where(scale.isfinite(), torch.nan)
