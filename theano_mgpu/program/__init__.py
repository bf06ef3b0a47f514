"""Programs: a graph over a batch, cut into stages between which replicas exchange values."""
from .partition import Output, Program, Stage, partition  # noqa: F401
from .run import CompiledProgram  # noqa: F401
