"""How one batch of a Keras model is computed over contexts."""
