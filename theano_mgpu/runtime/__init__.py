"""The runtime: a plan that is compiled, the batches that are split for it, and the steps."""
from .batch import Splitter  # noqa: F401
from .executable import Executable  # noqa: F401
from .step_run import StepResult, StepRun, send  # noqa: F401
