"""The runtime: a plan that is compiled, the batches that are split for it, and the steps."""
