"""Products in formats that the device lacks or is slow in, computed by rounding in FP32."""
