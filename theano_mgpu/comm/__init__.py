"""Several processes: communicators, functions over one, and checks that all processes do the same."""
