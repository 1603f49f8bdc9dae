"""Which op runs in which format: CUDA autocast's lists as the one semantics on every device.

A policy's own choices are laid over the lists here; making them happen is `autocast_kernels`. Op
names are those of the ATen registry without `aten::`, with the overload after a dot.

The lists are transcribed from torch's `include/ATen/autocast_mode.h` (2.13), macros
`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`,
`AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE` and `AT_FORALL_PROMOTE`; a test compares the two.

One consequence surprises: `cross_entropy` is in none of CUDA's lists and asks its `log_softmax` for
the input's own dtype, so its log-probabilities are rounded to 16 bits; only the mean over them is
FP32. The selector `loss` keeps all of it in FP32.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from harness.precision.directions import Direction, split_direction
from harness.precision.policy import PrecisionPolicy


class Action(Enum):
    """What autocast does with an op's floating-point arguments before it runs."""

    LOW = "low"  # cast to the compute format
    LOW_INPUT = "low_input"  # cast the first argument only: the others are updated in place
    LOW_OUTPUT = "low_output"  # run as it is, cast the result: cheaper than casting a whole table
    FP32 = "fp32"  # cast to FP32
    FP32_ROUNDED = "fp32_rounded"  # cast to FP32, round the result to the input's format
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"  # pass dtype=float32 unless the caller chose one
    FP32_APPEND_DTYPE = "fp32_append_dtype"  # redispatch to the overload that takes a dtype
    PROMOTE = "promote"  # cast to the widest format among them
    FOLLOW = "follow"  # leave them: the op runs in the format of its inputs
    FP32_BETWEEN_ACTIVATIONS = "fp32_between_activations"  # FP32, but LOW if one is a weight
    LOW_BUT_KEPT_WEIGHTS = "low_but_kept_weights"  # LOW, but FP32 with a weight kept in FP32
    BANNED = "banned"  # raise, as CUDA autocast does


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION_FP = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
    """
)
FP32_SET_OPT_DTYPE = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
FP32_APPEND_DTYPE = _names("norm.Scalar norm.ScalarOpt_dim")
PROMOTE = _names(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)
# Not a list of the header but a kernel of its own in autocast_mode.cpp.
BANNED = ("binary_cross_entropy",)

# In CPU autocast's own lists but in none of CUDA's, where these ops follow their inputs. Those
# that the CPU cannot compute in 16 bits at all (FFT, linear algebra, quantile) stay as they are.
CPU_ONLY_FOLLOW = _names(
    """
    adaptive_avg_pool3d adaptive_max_pool3d cat cross_entropy_loss fractional_max_pool2d
    fractional_max_pool3d index_copy max_pool3d max_unpool2d max_unpool3d reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d stack trace
    """
)
# These follow their inputs on CUDA, and the CPU has no 16-bit kernel for them.
CPU_WITHOUT_KERNEL = ("avg_pool3d",)
# On CUDA all of a layer goes to cuDNN in the compute format, its state too; on a CPU the layers are
# composites whose state would stay in FP32.
CPU_RECURRENT = _names(
    """
    gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data
    rnn_tanh.input
    """
)
# What CPU autocast lowers by itself as CUDA's does, with a cache of cast weights.
CPU_NATIVE_LOW = _names(
    """
    _convolution.deprecated addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mm
    prelu scaled_dot_product_attention
    """
)

LOSS_OPS = _names(
    """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
    ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
    nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    """
)
_MATMUL = _names(
    """
    addbmm addmm addmv addr baddbmm bmm chain_matmul dot einsum linalg_multi_dot linalg_vecdot
    linear matmul mm mv tensordot vdot
    """
)
_CONVOLUTION = _names(
    """
    _convolution _convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d
    conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution
    """
)
_SOFTMAX = ("softmax.int", "log_softmax.int")
_NORMALIZATION = _names("batch_norm group_norm instance_norm layer_norm native_layer_norm rms_norm")
# Products whose operands may both be activations: attention scores and their weighted sums.
_BETWEEN_ACTIVATIONS = _names("baddbmm bmm einsum matmul")
_REDUCTION = _names(
    """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm logsumexp mean
    mean.dim norm.Scalar norm.ScalarOpt_dim prod prod.dim_int std std.correction std.dim sum
    sum.dim_IntList var var.correction var.dim
    """
)

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "attention_scores": ("scaled_dot_product_attention", "softmax.int", *_BETWEEN_ACTIVATIONS),
    "convolution": _CONVOLUTION,
    "exponential": _names("exp expm1 log log10 log1p log2 softplus"),
    "interpolation": tuple(name for name in FP32 if "upsample" in name),
    "loss": LOSS_OPS,
    "matmul": _MATMUL,
    "normalization": _NORMALIZATION,
    "power": _names("pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal rsqrt sqrt"),
    "reduction": _REDUCTION,
    "softmax": _SOFTMAX,
}

CUDA_ACTIONS: Mapping[str, Action] = {
    **dict.fromkeys(LOWER_PRECISION_FP, Action.LOW),
    **dict.fromkeys(FP32, Action.FP32),
    **dict.fromkeys(FP32_SET_OPT_DTYPE, Action.FP32_SET_OPT_DTYPE),
    **dict.fromkeys(FP32_APPEND_DTYPE, Action.FP32_APPEND_DTYPE),
    **dict.fromkeys(PROMOTE, Action.PROMOTE),
    **dict.fromkeys(BANNED, Action.BANNED),
}

# Resolves the base name of any other op to its functional overloads; () when there is none.
OverloadLookup = Callable[[str], tuple[str, ...]]


def policy_actions(
    policy: PrecisionPolicy,
    overloads_of: OverloadLookup,
    *,
    direction: Direction = "forward",
) -> dict[str, Action]:
    """Return what a policy changes in CUDA's lists in one direction: op name -> action.

    Later ones win: `low_precision_ops`, then selectors, then `fp32_ops`.

    Args:
        policy: The policy; module patterns and module-type selectors are not ops and not here.
        overloads_of: Looks an op that is in no list up in the registry.
        direction: Entries that start with the other one's name do not count.

    Raises:
        ValueError: An op or family name is unknown; the message names the closest ones.
    """
    changes: dict[str, Action] = {}
    low = [e for e in _entries(policy, "low_precision_ops", overloads_of) if e.concerns(direction)]
    if any(entry.name == "all" for entry in low):
        changes.update(_hand_cast_actions())
    for entry in low:
        changes.update(dict.fromkeys(entry.ops, Action.LOW))
    if "attention_scores" in policy.fp32_selectors:
        changes.update(_attention_score_actions())
    if "loss" in policy.fp32_selectors:
        changes.update(dict.fromkeys(LOSS_OPS, Action.FP32))
    for entry in _entries(policy, "fp32_ops", overloads_of):
        if entry.concerns(direction):
            scores = entry.name == "attention_scores"
            kept = dict.fromkeys(entry.ops, Action.FP32)
            changes.update(_attention_score_actions() if scores else kept)
    return changes


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One entry of a policy's op lists; `ops` is empty for `all`."""

    name: str
    direction: Direction | None
    ops: tuple[str, ...]

    def concerns(self, direction: Direction) -> bool:
        return self.direction in (None, direction)


def _entries(policy: PrecisionPolicy, field: str, overloads_of: OverloadLookup) -> list[_Entry]:
    """Return the entries of `fp32_ops` or `low_precision_ops`, each checked."""
    entries = []
    for written in getattr(policy, field):
        direction, name = split_direction(written)
        ops: tuple[str, ...] = ()
        if not (name == "all" and field == "low_precision_ops"):
            ops = expand(name, key=f"policy.{field}", overloads_of=overloads_of)
        entries.append(_Entry(name=name, direction=direction, ops=ops))
    return entries


def expand(name: str, *, key: str, overloads_of: OverloadLookup) -> tuple[str, ...]:
    """Return the registry names that an op or family name of a policy stands for.

    Args:
        name: A family (`softmax`, `matmul`, ...; families win over ops of the same name), or an
            ATen base name (`sum`, `add`), meaning all its functional overloads.
        key: The policy field, for the message.
        overloads_of: Looks an op that is in no list up in the registry.

    Raises:
        ValueError: The name is unknown.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    listed = tuple(op for op in _known_ops() if op.split(".")[0] == name or op == name)
    found = listed or overloads_of(name)
    if not found:
        known = sorted({*FAMILIES, *(op.split(".")[0] for op in _known_ops())})
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"closest: {', '.join(close)}" if close else f"families: {', '.join(FAMILIES)}"
        raise ValueError(f"{key}: {name!r} is no op and no op family; {hint}")
    return found


def _known_ops() -> Iterable[str]:
    return dict.fromkeys((*CUDA_ACTIONS, *(op for ops in FAMILIES.values() for op in ops)))


def _attention_score_actions() -> dict[str, Action]:
    return {
        "scaled_dot_product_attention": Action.FP32,
        "softmax.int": Action.FP32,
        **dict.fromkeys(_BETWEEN_ACTIVATIONS, Action.FP32_BETWEEN_ACTIVATIONS),
    }


def _hand_cast_actions() -> dict[str, Action]:
    """Drop the FP32 lists as if weights and inputs had been cast by hand; losses stay in FP32."""
    fp32_lists = (*FP32, *FP32_SET_OPT_DTYPE, *FP32_APPEND_DTYPE)
    changes = dict.fromkeys(fp32_lists, Action.FOLLOW)
    # A hand-cast layer has low-precision weights, so its result has the compute format even if
    # the input was still FP32 or the harness keeps FP32 weights.
    changes.update(dict.fromkeys(("layer_norm", "group_norm", "rms_norm"), Action.LOW))
    changes.update(dict.fromkeys(("batch_norm", "instance_norm"), Action.LOW_INPUT))
    changes["embedding"] = Action.LOW_OUTPUT
    changes.update(dict.fromkeys(LOSS_OPS, Action.FP32))
    return changes
