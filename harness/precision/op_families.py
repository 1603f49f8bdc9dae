"""Which family an op of the dispatcher belongs to, for tables that a person reads.

`op_lists.FAMILIES` names what a policy can be told; below autograd other names arrive
(`native_layer_norm`, `_softmax_backward_data`), and most of them by the hundred. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping

ELEMENTWISE = "elementwise"
CAST = "cast"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Family -> names of the dispatcher, without `aten::`, overload and in-place underscore.
_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "matmul": _names(
        """
        mm addmm bmm baddbmm addbmm mv addmv addr dot vdot linear matmul einsum _scaled_mm
        _int_mm linalg_vecdot tensordot chain_matmul linalg_multi_dot _addmm_activation
        """
    ),
    "attention": _names(
        """
        scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
        _efficient_attention_forward _flash_attention _efficient_attention
        """
    ),
    "recurrent": _names(
        """
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn
        _thnn_fused_lstm_cell _thnn_fused_lstm_cell_impl _thnn_fused_gru_cell
        """
    ),
    "softmax": _names("softmax log_softmax _softmax _log_softmax _safe_softmax"),
    "normalization": _names(
        """
        native_layer_norm native_batch_norm native_group_norm _native_batch_norm_legit
        _batch_norm_with_update cudnn_batch_norm miopen_batch_norm batch_norm layer_norm group_norm
        instance_norm rms_norm _fused_rms_norm _batch_norm_impl_index local_response_norm renorm
        """
    ),
    "loss": _names(
        """
        nll_loss nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits kl_div soft_margin_loss multi_margin_loss
        multilabel_margin_loss _ctc_loss _cudnn_ctc_loss cross_entropy_loss
        """
    ),
    "reduction": _names(
        """
        sum mean prod cumsum cumprod logsumexp norm linalg_vector_norm std var std_mean var_mean
        amax amin max min aminmax logcumsumexp nansum _cdist cdist _pdist dist trace
        linalg_matrix_norm
        """
    ),
    "embedding": _names("embedding embedding_dense _embedding_bag embedding_bag"),
    "pooling": _names(
        """
        max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_max_pool2d
        adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d
        """
    ),
    "indexing": _names(
        """
        index index_select gather scatter scatter_add scatter_reduce index_put _index_put_impl
        index_add index_copy index_fill masked_fill masked_scatter masked_select where cat stack
        take constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        sort topk roll flip tril triu slice select unfold as_strided repeat
        """
    ),
    CAST: _names("_to_copy copy"),
}
_FAMILY_OF: Mapping[str, str] = {
    name: family for family, members in _MEMBERS.items() for name in members
}
# `convolution`, `cudnn_convolution`, `conv1d`, `_slow_conv2d_forward`, `upsample_bilinear2d`,
# `_fft_r2c`, `linalg_solve`: a prefix says enough.
_PREFIXES = (
    ("convolution", ("conv", "_conv", "cudnn_conv", "mkldnn_conv", "_slow_conv", "slow_conv")),
    ("interpolation", ("upsample_", "_upsample_")),
    ("fourier", ("_fft_", "fft_")),
    ("linear_algebra", ("linalg_", "_linalg_")),
)
_ENDINGS = ("_backward_data", "_double_backward", "_backward", "_forward")


def family_of(op: str) -> str:
    """Return the family of an op of the dispatcher; `elementwise` for what is in none.

    Args:
        op: Registry name without `aten::`, with or without overload, in-place underscore or
            `_backward`: `addmm`, `softmax.int`, `relu_`, `native_layer_norm_backward`.

    Examples:
        >>> family_of("mm"), family_of("native_layer_norm_backward"), family_of("relu_")
        ('matmul', 'normalization', 'elementwise')
    """
    name = op.split(".")[0]
    if name not in _FAMILY_OF:
        name = name.rstrip("_")
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
    found = _FAMILY_OF.get(name)
    if found is not None:
        return found
    for family, prefixes in _PREFIXES:
        if name.startswith(prefixes):
            return family
    return ELEMENTWISE


def is_product(op: str) -> bool:
    """Return whether an op multiplies matrices, in whatever arrangement: what formats are about."""
    return family_of(op) in ("matmul", "convolution", "attention", "recurrent")
