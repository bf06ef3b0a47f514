"""The computation of one batch of a Keras model over contexts."""
