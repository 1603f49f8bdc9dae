"""Triage: what a closer look at a run that ended in trouble finds."""
