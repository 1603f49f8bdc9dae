"""Paired training runs that decide which numerical precision a PyTorch model may be trained in."""

__version__ = "0.1.0"
