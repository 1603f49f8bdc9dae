"""One experiment: expand a sweep into runs, run each, and conclude from what they recorded."""
