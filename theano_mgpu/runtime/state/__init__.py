"""Checkpoint files: the state of a training, and a lock on the file."""
