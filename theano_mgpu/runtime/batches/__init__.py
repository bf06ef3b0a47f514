"""A batch: its arguments, where its samples are, and how it is divided."""
