"""Kernels of the ATen registry that a policy puts in place of torch's own, for a while."""
