"""The functions and classes that users of Keras call."""
