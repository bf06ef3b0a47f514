"""Names of Theano's old code for GPUs in scripts: errors name what replaced them."""
from __future__ import annotations

import dis
import sys

from .import_hooks import refuse_import

MAP = "THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1', or theano_mgpu.init('dev0->cuda0;dev1->cuda1')"
SHARED = "theano.shared(value, target='dev0')"
BLOCK = "the block `with theano_mgpu.device('dev1'):`"
# Attributes of theano.gpuarray that old scripts and tutorials use -> their replacements.
REPLACED = {'shared_constructor': SHARED, 'float32_shared_constructor': SHARED,
            'change_flags': BLOCK, 'set_device': BLOCK, 'gpu_from_host': "x.transfer('dev0')",
            'CudaNdarrayType': 'theano.gpuarray.GpuArrayType', 'CudaNdarray': 'pygpu.gpuarray.GpuArray'}


def name_what_replaced_old_gpu_code() -> None:
    """Name the replacement of ``theano.sandbox.cuda`` and ``theano.sandbox.gpuarray`` when they are imported.

    Theano 1.0.5 answers an import of the first with "No module named 'nose'", or as a skipped test.
    """
    for name in ('cuda', 'gpuarray'):
        refuse_import('theano.sandbox.' + name, _about('theano.sandbox.' + name, 'theano.gpuarray'))


def name_what_replaced_old_gpu_names() -> None:
    """Name the replacement of names that old scripts read from ``theano.gpuarray`` and ``theano.sandbox``."""
    import theano.gpuarray
    import theano.sandbox
    _answer(theano.gpuarray, REPLACED)
    _answer(theano.sandbox, {'cuda': 'theano.gpuarray', 'gpuarray': 'theano.gpuarray'})


def _answer(module, replaced):
    def __getattr__(name):
        if name not in replaced:
            raise AttributeError("module '%s' has no attribute '%s'" % (module.__name__, name))
        frame = sys._getframe(1)
        # `from module import name` replaces an AttributeError by one of its own.
        imports = frame.f_code.co_code[frame.f_lasti] == dis.opmap['IMPORT_FROM']
        raise (ImportError if imports else AttributeError)(_about('%s.%s' % (module.__name__, name), replaced[name]))
    module.__getattr__ = __getattr__


def _about(old, new):
    return '%s is not part of Theano 1.0: %s replaced it. Contexts are mapped to devices by %s' % (old, new, MAP)
