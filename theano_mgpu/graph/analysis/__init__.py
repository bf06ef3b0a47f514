"""The states of the variables of a graph over a batch, and the graph that replicas compute instead of it."""
from . import rules  # noqa: F401  they register themselves
from .known import number  # noqa: F401
from .reductions import MAX, MIN, PROD, SAME, STACK, SUM, Elementwise, Gather, Reduction  # noqa: F401
from .rules.products import any_number  # noqa: F401
from .shards import CannotCut, Shards  # noqa: F401
from .states import CONSTANT, FREE, PARTIAL, ROWS, Value  # noqa: F401
