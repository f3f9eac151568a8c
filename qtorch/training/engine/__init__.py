"""The three products of a layer in training, forward and two of its gradient, each quantized as its spec says."""
