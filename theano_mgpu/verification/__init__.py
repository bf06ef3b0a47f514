"""Several contexts against one device: the comparison, and its certificate."""
