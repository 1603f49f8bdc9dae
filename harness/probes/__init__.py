"""Measurements on sampled training steps; they read tensors and never change a run."""
