"""Quantization-aware training: layers that compute what the converted layer will, with a gradient."""
