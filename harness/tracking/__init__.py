"""MLflow, both directions: copies of runs and reports, and the records read back from them."""
