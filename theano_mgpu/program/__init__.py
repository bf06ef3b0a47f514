"""Programs: a graph over a batch, cut into stages between which replicas exchange values."""
from ..analysis import CannotCut  # noqa: F401
from .compiled import CompiledProgram  # noqa: F401
from .partition import Output, Program, Stage, expressed, partition, undivided  # noqa: F401
from .run import Batch, Runner  # noqa: F401
