"""What the ranks have, gathered for planning."""
from ..devices.mesh import Mesh
from ..distributed.activities import SHARE
from ..distributed.communicator import Communicator
from ..options import UPDATE_ON, Options
from ..plan import Machine


def gather(ranks: Communicator, mesh: Mesh, options: Options) -> Machine:
    """Return the Machine of a function over some contexts of this process; all ranks have to make the call."""
    flags = options.flags
    own = [len(mesh.replicas), UPDATE_ON.index(options.updates_on(mesh.contexts)), flags.overlap,
           flags.exchange == 'float16']
    replicas, update_on, overlap, half = ranks.handshake((SHARE,), own).T.tolist()
    return Machine(ranks.rank, tuple(replicas), tuple(UPDATE_ON[number] for number in update_on),
                   tuple(map(bool, overlap)), tuple(map(bool, half)))
