"""Floating-point facts: formats, rounding, exponent histograms, error measures."""
