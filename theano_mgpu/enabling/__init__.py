"""`mgpu.enable`: every `theano.function` over the contexts."""
