"""In processes that one with theano_mgpu has started: have Theano and Keras import theano_mgpu first.

``theano_mgpu.pth`` in site-packages imports this when Python starts, if the environment has MGPU_IMPORTED, which
``import theano_mgpu`` sets. Workers of joblib, spawned processes and notebook kernels, which inherit no module, then
get the fixes that Theano 1.0.5 and Keras 2.3.1 need today, once they import either; a process that imports neither
pays for one comparison an import. With MGPU_IMPORTED=1, which a user sets, NumPy has it imported, too. A rank that
`theano-mgpu launch` has started ends with its mpirun from here on.
"""
import os
import sys
from importlib.machinery import ModuleSpec

# A user who sets the variable to 1 has NumPy import theano_mgpu, too, which chooses the kernels of its BLAS.
NAMES = ('theano', 'keras') + ('numpy',) * (os.environ.get('MGPU_IMPORTED') == '1')


class Finder:
    """Imports theano_mgpu where one of some modules is looked for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in NAMES:
            return None
        sys.meta_path.remove(Finder)
        from importlib.util import find_spec

        import theano_mgpu  # noqa: F401
        module = sys.modules.pop(name, None)
        # Python would go on with the finders after this one, and theano_mgpu has put its own before it.
        return ModuleSpec(name, Loaded(module)) if module else find_spec(name)


class Loaded:
    """Loads a module that is loaded: theano_mgpu has imported Theano; Python would execute it once more."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec


def end_with_mpirun():
    """Have the kernel kill this process when its mpirun ends, as theano_mgpu.utils.rank_process does when imported."""
    try:
        with open('/proc/%d/comm' % os.getppid()) as file:
            started = file.read().strip() in ('mpirun', 'orterun', 'orted', 'prterun', 'prted')
    except OSError:  # it has ended, or its process is hidden
        return
    if started:
        import ctypes
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL


sys.meta_path.insert(0, Finder)
if 'MGPU_QUIET' in os.environ and sys.platform == 'linux':
    end_with_mpirun()
