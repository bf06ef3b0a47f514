"""Methods, feeding and callbacks that run within the loops of Keras."""
