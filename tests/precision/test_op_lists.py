import re
from pathlib import Path

import pytest
import torch

from harness.precision import op_lists
from harness.precision.kernels.registry import exists, functional_overloads
from harness.precision.op_lists import Action, expand, policy_actions
from harness.precision.policy import PrecisionPolicy

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": op_lists.LOWER_PRECISION_FP,
    "AT_FORALL_FP32": op_lists.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": op_lists.FP32_SET_OPT_DTYPE,
    "AT_FORALL_PROMOTE": op_lists.PROMOTE,
}


def header_list(macro, text=None):
    """Parse `_(op)` and `_(op, overload)` entries of one macro."""
    text = HEADER.read_text() if text is None else text
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text).group(1)
    entries = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body)
    return {f"{op}.{variant}" if variant else op for op, variant in entries}


@pytest.mark.parametrize("macro", MACROS)
def test_lists_are_those_of_the_installed_header(macro):
    """Oracle: the header of the installed torch. A torch that moves an op fails here by name."""
    assert set(MACROS[macro]) == header_list(macro)


def test_a_moved_and_a_new_op_fail_by_name():
    """Planted fault: a header in which `exp` is lowered and an op is new."""
    text = HEADER.read_text()
    moved = text.replace("_(exp) ", "").replace("_(expm1)", "_(expm1) _(brand_new, dim)")
    moved = moved.replace("_(matmul)", "_(matmul) _(exp)")
    assert moved.count("_(exp)") == 1
    fp32, low = "AT_FORALL_FP32", "AT_FORALL_LOWER_PRECISION_FP"
    assert header_list(fp32, moved) - header_list(fp32) == {"brand_new.dim"}
    assert header_list(fp32) - header_list(fp32, moved) == {"exp"}
    assert header_list(low, moved) - header_list(low) == {"exp"}


def test_no_macro_of_the_header_is_left_out():
    macros = set(re.findall(r"#define (AT_FORALL_\w+)\(_\)", HEADER.read_text()))
    devices = {"AT_FORALL_DEPRECATED_AUTOCAST_BACKENDS"}
    assert macros - devices == {*MACROS, "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE"}


def test_redispatched_ops_are_those_of_the_installed_header():
    body = re.search(
        r"#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)((?:.*\\\n)*.*)", HEADER.read_text()
    ).group(1)
    assert set(re.findall(r'"([\w.]+)"', body)) == set(op_lists.FP32_APPEND_DTYPE)


def registrations(key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names}


def test_every_cuda_autocast_kernel_has_an_action():
    """Oracle: what torch registers for CUDA; nobody calls cuDNN's own kernels directly."""
    # `_cudnn_rnn` is registered in CUDA builds only; lstm, gru and rnn are what models call.
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    known = set(op_lists.CUDA_ACTIONS) | cudnn
    assert registrations("AutocastCUDA") - known == set()


def test_every_op_that_only_the_cpu_lists_is_settled():
    """What CPU autocast lists beyond CUDA follows its inputs here, or cannot run in 16 bits."""
    extra = registrations("AutocastCPU") - set(op_lists.CUDA_ACTIONS)
    unsettled = extra - {*op_lists.CPU_ONLY_FOLLOW, *op_lists.CPU_WITHOUT_KERNEL}
    fp32_only = re.compile(
        r"fft_|linalg_|cholesky|inverse|pinverse|svd|qr|orm|orgqr|geqrf|lu_solve|_lu_with_info|"
        r"triangular_solve|quantile|nanquantile|stft|polar|view_as_complex|ctc_loss|"
        r"fake_quantize|grid_sampler|_grid_sampler|multilabel_margin_loss_forward"
    )
    low = {"conv1d.padding", "conv2d.padding", "conv3d.padding", "mkldnn_rnn_layer"}
    fused = {"_addmm_activation", "_native_multi_head_attention"}
    assert {op for op in unsettled if not fp32_only.match(op)} == low | fused


def test_ops_lowered_by_the_cpu_itself_are_registered_there():
    assert set(op_lists.CPU_NATIVE_LOW) <= registrations("AutocastCPU")
    assert set(op_lists.CPU_NATIVE_LOW) <= set(op_lists.LOWER_PRECISION_FP)


def test_every_name_in_the_tables_exists():
    names = {*op_lists.CUDA_ACTIONS, *op_lists.CPU_ONLY_FOLLOW, *op_lists.LOSS_OPS}
    names |= {op for ops in op_lists.FAMILIES.values() for op in ops}
    assert sorted(name for name in names if not exists(name)) == []


def policy(**fields):
    return PrecisionPolicy(name="p", compute_format="bf16", **fields)


def test_families_base_names_and_unlisted_ops_expand():
    lookup = {"key": "policy.fp32_ops", "overloads_of": functional_overloads}
    assert expand("softmax", **lookup) == ("softmax.int", "log_softmax.int")
    assert set(expand("sum", **lookup)) == {"sum", "sum.dim_IntList"}
    assert "add.Tensor" in expand("add", **lookup)
    assert not any("out" in name for name in expand("add", **lookup))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sofmax", "softmax"), ("normalisation", "normalization"), ("matmull", "matmul")],
)
def test_unknown_names_get_the_closest(name, hint):
    with pytest.raises(ValueError, match=rf"policy.fp32_ops: '{name}' is no op.*{hint}"):
        policy_actions(policy(fp32_ops=(name,)), functional_overloads)


def test_fp32_ops_win_over_low_precision_ops():
    changes = policy_actions(
        policy(low_precision_ops=("all",), fp32_ops=("softmax",)), functional_overloads
    )
    assert changes["softmax.int"] is Action.FP32
    assert changes["exp"] is Action.FOLLOW
    assert changes["mse_loss"] is Action.FP32  # losses stay in FP32 even then


def test_a_plain_policy_changes_nothing():
    assert policy_actions(policy(), functional_overloads) == {}
