"""What runs within the loops of Keras: methods, feeding, callbacks."""
