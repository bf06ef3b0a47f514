"""Random graphs over a batch, for tests that compare how they are cut with plain Theano."""
from .graph import RandomGraph

__all__ = ['RandomGraph']
