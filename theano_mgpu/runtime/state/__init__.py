"""Checkpoint files: the state of a training, the calls before it, and their replay after a restart."""
