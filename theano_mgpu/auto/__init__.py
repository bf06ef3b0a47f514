"""`mgpu.enable`: every `theano.function` runs over the contexts."""
