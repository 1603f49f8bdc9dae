"""Precision policies: what they mean, and how they are made true on a device."""
