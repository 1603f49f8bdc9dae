"""Crashes of ops that cannot run in the format a policy asks for name module and op."""

from __future__ import annotations

import pytest
import torch
from tiny_workloads import FP32, TinyWorkload, run
from torch import Tensor, nn

from harness.precision.policy import PrecisionPolicy
from harness.runs.failed_op import find_failed_op


class Whitened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x.t() @ x + torch.eye(x.shape[1]))


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad.double() @ w.t(), x.t() @ grad


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.w)


class Joint(nn.Module):
    """A layer, then the part under test, then the logits."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.inner, self.part, self.out = nn.Linear(12, 8), part, nn.LazyLinear(4)
        self.out(torch.zeros(1, 8) if not isinstance(part, Spectrum) else torch.zeros(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        extra = self.part(h)
        if isinstance(self.part, Spectrum):
            return self.out(extra)
        if isinstance(self.part, HandWritten):
            return extra
        return self.out(h @ extra)


def policy(**fields) -> PrecisionPolicy:
    return PrecisionPolicy(name="p", compute_format="bf16", **fields)


@pytest.mark.parametrize(
    ("part", "asked", "op"),
    [
        (Whitened, policy(low_precision_ops=("linalg_cholesky",)), "`linalg_cholesky_ex` of bf16"),
        (Spectrum, policy(low_precision_ops=("fft_rfft",)), "`torch.fft.rfft` of bf16"),
    ],
)
def test_an_op_that_cannot_run_in_the_asked_format_is_named(part, asked, op) -> None:
    workload = TinyWorkload(model=lambda: Joint(part()))
    record = run(workload, asked, crash_expected=True)
    assert record.crash is not None
    assert record.crash.module == "part"
    assert f"module `part`, op {op} tensors" in record.crash.sentence
    assert "\n" not in record.crash.sentence
    assert run(workload, FP32).crash is None


def test_an_op_that_fails_in_backward_is_named() -> None:
    workload = TinyWorkload(model=lambda: Joint(HandWritten()))
    crash = run(workload, policy(fp32_modules=("part",)), crash_expected=True).crash
    assert crash is not None
    assert crash.module == "part"
    assert "in the backward pass at step 0, module `part`, op `mm` of fp64 and fp32" in (
        crash.sentence
    )


def test_what_no_op_raised_and_what_does_not_repeat_is_not_named() -> None:
    model, calls = nn.Linear(2, 2), []

    def once() -> None:
        calls.append(1)
        if len(calls) == 1:
            torch.mm(torch.ones(2), torch.ones(2))

    def python() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError) as caught:
        once()
    assert find_failed_op(caught.value, model=model, again=once) is None
    assert find_failed_op(RuntimeError("mine"), model=model, again=python) is None
    gone = torch.OutOfMemoryError("out of memory")
    assert find_failed_op(gone, model=model, again=lambda: calls.clear()) is None
    assert calls == [1, 1]


def test_a_function_that_checks_its_arguments_itself_is_named() -> None:
    def again() -> Tensor:
        return torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 4))

    with pytest.raises(RuntimeError) as caught:
        again()
    failed = find_failed_op(caught.value, model=nn.Linear(2, 2), again=again)
    assert failed is not None
    assert str(failed) in (
        "op `torch.nn.functional.linear` of fp32 tensors",
        "op `addmm` of fp32 tensors",
        "op `mm` of fp32 tensors",
    )
