"""The functions and classes for users. The import of this module imports Theano, and applies the patches of it."""
import gc

from . import compat, errors
from .comm import patches as of_comm
from .devices import patches as of_devices

compat.import_theano(of_comm.PATCHES, of_devices.PATCHES)  # before the modules below, which import it, too
if of_devices.COMMAND is not None:  # the user has no objects yet
    gc.freeze()  # Theano's live as long as the process: Python need not look for garbage among them

from .auto.checkpoint import Checkpoint  # noqa: E402
from .auto.enabling import disable, enable  # noqa: E402
from .compat.patch import apply  # noqa: E402
from .devices.context_map import Context  # noqa: E402
from .devices.contexts import contexts, init, lease, open_named  # noqa: E402
from .devices.leases import run  # noqa: E402
from .errors import *  # noqa: E402, F403
from .graph.audit import audit  # noqa: E402
from .graph.patches import time_layers  # noqa: E402
from .parallel_function import function  # noqa: E402
from .placement import device, place  # noqa: E402
from .predict.predictor import Predictor  # noqa: E402
from .training import training_function  # noqa: E402
from .utils.flag_text import own_flag  # noqa: E402
from .utils.mpi_environment import rank, size  # noqa: E402
from .utils.tensorboard.event_file import Summary  # noqa: E402
from .utils.timeline import records, start, timeline  # noqa: E402

__all__ = [*errors.__all__, 'Checkpoint', 'Context', 'Predictor', 'Summary', 'audit', 'contexts', 'device', 'disable',
           'enable', 'function', 'init', 'lease', 'place', 'rank', 'size', 'timeline', 'training_function']

apply(of_devices.PATCHES, of_devices.WITH_CONTEXTS, open_named)
if own_flag('mgpu.timeline') and not records():
    start(own_flag('mgpu.timeline'), parent=run())
    time_layers()
