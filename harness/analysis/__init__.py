"""Records in, verdicts out; no torch, MLflow or Hydra."""
