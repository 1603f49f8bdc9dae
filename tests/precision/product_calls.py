"""Products of every kind, and how to call one under a policy."""

import torch
import torch.nn.functional as F
from precision_models import CPU
from torch import nn

from harness.precision.execution import applied


def randn(*shape, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(requires_grad)


def run(policy, call, *leaves, backend="auto"):
    """Return the result of `call(*leaves)`, and the gradients of the leaves for `grad_out`."""
    with applied(policy, nn.Linear(1, 1), device=CPU, backend=backend) as execution:
        with execution.forward():
            result = call(*leaves)
        grad_out = randn(*result.shape, seed=9, requires_grad=False)
        gradients = torch.autograd.grad(result, leaves, grad_out.to(result.dtype))
    return result, gradients, grad_out


PRODUCTS = {
    "matmul": (torch.matmul, (4, 5), (5, 3)),
    "bmm": (torch.bmm, (2, 4, 5), (2, 5, 3)),
    "linear": (F.linear, (4, 5), (3, 5)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 4, 5), (2, 5, 3)),
    "mv": (torch.mv, (4, 5), (5,)),
    "conv2d": (F.conv2d, (2, 3, 6, 6), (4, 3, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, (2, 3, 6), (3, 4, 3)),
}
