"""The same-point probe: what a candidate does at weights and batches of the FP32 run."""
