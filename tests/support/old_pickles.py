"""Pickles as other machines and other years wrote them: by Python 2, with contexts of other names, by Theano 0.x.

The formats are from the sources of Python 2.7 and of Theano 0.8.2: sandbox/cuda/type.py, sandbox/cuda/var.py, and
sandbox/gpuarray/type.py.
"""
import io
import pickle
import re

import numpy as np
from theano.gpuarray.basic_ops import GpuFromHost
from theano.gpuarray.type import GpuArrayType

NAMED = {'GpuArrayType': 'theano.sandbox.cuda.type CudaNdarrayType',
         'GpuArrayVariable': 'theano.sandbox.cuda.var CudaNdarrayVariable',
         'GpuArrayConstant': 'theano.sandbox.cuda.var CudaNdarrayConstant',
         'GpuArraySharedVariable': 'theano.sandbox.cuda.var CudaNdarraySharedVariable',
         'GpuArray_unpickler': 'theano.sandbox.cuda.type CudaNdarray_unpickler'}


class OldPickler(pickle._Pickler):
    """Pickles as Python 2 does, with arrays of GPUs as Theano of a year does.

    `year` is 'gpuarray' for Theano 1.0, 'sandbox.gpuarray' for the new code of Theano 0.8, and 'sandbox.cuda' for its
    old code.
    `names` maps names of contexts to those in the pickle.
    """

    dispatch = dict(pickle._Pickler.dispatch)

    def __init__(self, file, protocol, year='gpuarray', names=()):
        super().__init__(file, protocol)
        self.year, self.names = year, dict(names)

    def save_text(self, text):
        self.save_string(self.names.get(text, text).encode('latin-1'), text)

    def save_string(self, value, memoized=None):
        if self.bin:
            self.write(pickle.BINSTRING + len(value).to_bytes(4, 'little') + value)
        else:
            escaped = ''.join(chr(each) if 32 <= each < 127 and each not in b"'\\" else '\\x%02x' % each
                              for each in value)
            self.write(pickle.STRING + ("'%s'" % escaped).encode() + b'\n')
        self.memoize(value if memoized is None else memoized)

    dispatch[str], dispatch[bytes] = save_text, save_string

    def save_global(self, thing, name=None):
        module, name = thing.__module__, name or thing.__qualname__
        if module.startswith('theano.gpuarray') and self.year != 'gpuarray':
            module = module.replace('theano.gpuarray', 'theano.' + self.year)
            if self.year == 'sandbox.cuda':
                module, name = NAMED.get(name, module + ' ' + name).split()
        else:
            module = {'builtins': '__builtin__', 'copyreg': 'copy_reg'}.get(module, module)
        self.write(pickle.GLOBAL + ('%s\n%s\n' % (module, name)).encode())
        self.memoize(thing)

    dispatch[type] = save_global
    dispatch[type(lambda: 0)] = save_global

    def reducer_override(self, thing):
        kind = '%s %s' % (type(thing).__module__, type(thing).__qualname__)  # pygpu is not on every machine
        if kind == 'pygpu.reduction ReductionKernel':  # of OpenCL alone, which refuses to be pickled
            return list, ()
        if isinstance(thing, (str, bytes)) or self.year != 'sandbox.cuda':
            return NotImplemented
        from theano.gpuarray.type import GpuArray_unpickler
        if kind == 'pygpu.gpuarray GpuArray':
            return GpuArray_unpickler, (np.asarray(thing),)
        if isinstance(thing, GpuArrayType):
            return object.__reduce_ex__(thing, 2)[:2] + ({'broadcastable': thing.broadcastable, 'name': thing.name},)
        if isinstance(thing, GpuFromHost):
            return object.__reduce_ex__(thing, 2)[:2] + ({},)
        return NotImplemented


def old_pickle(thing, protocol=2, **options):
    """Return the bytes of a pickle; see `OldPickler`."""
    file = io.BytesIO()
    OldPickler(file, protocol, **options).dump(thing)
    return file.getvalue()


def names_in(data):
    """Return the names of GPU code in a pickle, a sorted list of str."""
    return sorted({name.decode() for name in re.findall(rb'c(theano\.(?:sandbox|gpuarray)[\w.]*\n\w+)\n', data)})
