"""Families of dispatcher ops: what a table of formats calls them."""

import pytest
import torch

from harness.precision.op_families import family_of, is_product


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("mm", "matmul"),
        ("addmm", "matmul"),
        ("bmm", "matmul"),
        ("convolution", "convolution"),
        ("convolution_backward", "convolution"),
        ("cudnn_convolution", "convolution"),
        ("conv2d.padding", "convolution"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("_flash_attention_forward", "attention"),
        ("mkldnn_rnn_layer_backward", "recurrent"),
        ("_softmax", "softmax"),
        ("_log_softmax_backward_data", "softmax"),
        ("softmax.int", "softmax"),
        ("native_layer_norm_backward", "normalization"),
        ("nll_loss_forward", "loss"),
        ("sum.dim_IntList", "reduction"),
        ("embedding_dense_backward", "embedding"),
        ("index_put_", "indexing"),
        ("_to_copy", "cast"),
        ("copy_", "cast"),
        ("upsample_bilinear2d_backward", "interpolation"),
        ("_fft_r2c", "fourier"),
        ("relu_", "elementwise"),
        ("gelu_backward", "elementwise"),
        ("threshold_backward", "elementwise"),
    ],
)
def test_an_op_has_its_family(op, family):
    assert family_of(op) == family


def test_products_are_what_multiplies():
    assert is_product("mm")
    assert is_product("convolution_backward")
    assert not is_product("mul")
    assert not is_product("_softmax")


def test_every_matrix_op_with_a_flop_formula_is_a_product():
    """Oracle: torch's own registry of products; a new one there must get a family here."""
    from torch.utils.flop_counter import flop_registry

    names = {str(packet).removeprefix("aten.") for packet in flop_registry}
    names = {name for name in names if hasattr(torch.ops.aten, name)}
    assert "mm" in names
    assert [name for name in sorted(names) if not is_product(name)] == []
