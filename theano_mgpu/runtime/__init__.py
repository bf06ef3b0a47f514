"""What runs: a plan that is compiled, the batches that are split for it, and the steps."""
from .executable import Executable  # noqa: F401
from .split import Splitter  # noqa: F401
from .step_run import StepResult, StepRun, run, send  # noqa: F401
