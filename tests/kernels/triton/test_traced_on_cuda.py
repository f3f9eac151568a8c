"""`F.linear` of quantized weights on CUDA, as a compiler sees it: one graph, with the kernels meant for CUDA in it.

Tensors are fake, so that no GPU is needed; what the kernels compute is tested by running them.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import qtorch
from qtorch.kernels import features

KERNELS = {
    qtorch.int8_weight_only(): ["cuda_weight_mm"],
    qtorch.int4_weight_only(): ["cuda_weight_mm"],
    qtorch.int4_weight_only(zero_point_domain=qtorch.ZeroPointDomain.FLOAT): ["cuda_weight_mm"],
    qtorch.uintx_weight_only(torch.uint3, group_size=64): ["cuda_weight_mm"],
    qtorch.int8_dynamic_activation_int8_weight(): ["cuda_quantize_rowwise", "cuda_int8_mm"],
    qtorch.int8_dynamic_activation_int4_weight(): ["cuda_quantize_asymmetric", "cuda_int8_mm"],
    qtorch.int8_static_activation_int8_weight(scale=0.1): ["cuda_int8_mm"],
    qtorch.float8_dynamic_activation_float8_weight(): ["cuda_quantize_rowwise", "float8_scaled_mm"],
}


def on_cuda(weight: Tensor) -> Tensor:
    """The quantized weight with fake tensors on CUDA in it; called in a `FakeTensorMode`."""
    inner = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        for name, tensor in weight.inner_tensors.items()
    }
    return type(weight)(inner, weight.scheme)


@pytest.mark.skipif(features.cuda_lacks("triton") is not None, reason="needs triton")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", KERNELS, ids=str)
def test_linear_is_one_graph_with_the_kernels_for_cuda(recipe, dynamic):
    layer = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    qtorch.quantize_(layer, recipe)
    ran: list[str] = []

    def keep(graph, _inputs):
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        ran.extend(str(target).split(".")[1] for target in targets if str(target).startswith("qtorch."))
        return make_boxed_func(lambda *_: [torch.empty(7, 128)])

    torch._dynamo.reset()
    with FakeTensorMode():
        weight = on_cuda(layer.weight.detach())
        x = torch.empty(7, 256, dtype=torch.bfloat16, device="cuda")
        torch.compile(functional.linear, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=dynamic)(
            x, weight
        )
    assert ran == KERNELS[recipe]
