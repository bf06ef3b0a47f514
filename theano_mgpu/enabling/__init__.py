"""`mgpu.enable`: runs every `theano.function` over the contexts."""
