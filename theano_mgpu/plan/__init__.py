"""Plans: a graph over a batch, cut into stages between which replicas exchange values, and where each is computed."""
from ..graph.analysis import CannotCut  # noqa: F401
from ..graph.partition import Program, expressed, undivided  # noqa: F401
from .parts import DeviceBroadcast, ExchangeWay, Part, ShardedUpdate, SumGroup  # noqa: F401
from .planner import plan  # noqa: F401
from .shares import Machine, Shares  # noqa: F401
from .step_plan import Choice, StepPlan  # noqa: F401
