"""Pickles of other machines and other years: arrays of GPUs that are not here, classes of Theano 0.x, Python 2.

Theano reads an array of a GPU only on a machine with this GPU, and a function that was compiled for it not at all.
"""
from __future__ import annotations

import codecs
import functools
import io
import pickle
import sys
from typing import Any

import numpy as np

from ..errors import GraphError
from ..utils import progress
from .theano_keys import reads_keys
from .wrapping import wrap

TEXTS = 'theano_mgpu.python2'  # the handler of errors in the texts of a pickle
OLD_GPU = 'theano.sandbox.cuda', 'theano.sandbox.gpuarray', 'theano.gpuarray'
ABSENT = object()
NEXT = 'Save the values of its shared variables where it was made, or build the model anew and set its values'


def read_pickles_of_python_2() -> None:
    """Have ``pickle`` read byte strings of Python 2 as latin-1, which is right for NumPy's arrays; a note says so.

    A script that reads a pickle with ``encoding='bytes'`` where it is not ASCII gets the error that it expects.
    ``pickle`` finds stand-ins for those ops of Theano's old GPU code that exist no more.
    """
    codecs.register_error(TEXTS, _decode)
    c_loads = pickle.loads

    class Unpickler(pickle.Unpickler):
        """Reads a pickle, also one that Python 2 wrote; see ``pickle.Unpickler`` of Python."""

        def __init__(self, file, *, encoding='ASCII', errors='strict', **options):
            super().__init__(file, encoding=encoding, errors=_handler(encoding, errors), **options)

        def find_class(self, module, name):
            return _find_class(super().find_class, module, name)

    @wrap(pickle._Unpickler, '__init__')  # joblib and Theano use it
    def initialize(original, self, file, *, encoding='ASCII', errors='strict', **options):
        original(self, file, encoding=encoding, errors=_handler(encoding, errors), **options)

    @wrap(pickle._Unpickler)
    def find_class(original, self, module, name):
        return _find_class(functools.partial(original, self), module, name)

    @functools.wraps(pickle.load)
    def load(file, **options):
        return Unpickler(file, **options).load()

    @functools.wraps(c_loads)
    def loads(data, *, encoding='ASCII', errors='strict', **options):
        try:
            return c_loads(data, encoding=encoding, errors=_handler(encoding, errors), **options)
        except (ImportError, AttributeError):
            if not any(name.encode() in bytes(data) for name in OLD_GPU):
                raise
            return Unpickler(io.BytesIO(data), encoding=encoding, errors=errors, **options).load()

    Unpickler.__module__, Unpickler.__qualname__ = 'pickle', 'Unpickler'
    vars(pickle).update(Unpickler=Unpickler, load=load, loads=loads)


def _handler(encoding, errors):
    """Return the handler of errors in texts, unless the script has chosen one, or an encoding."""
    return TEXTS if (encoding, errors) == ('ASCII', 'strict') else errors


def _decode(error):
    """Return the rest of a byte string as text, from its first byte on that is not ASCII, and its end."""
    frame = sys._getframe(1)
    while frame is not None:
        constants = frame.f_code.co_consts
        if 'bytes' in constants and any(isinstance(each, tuple) and 'encoding' in each for each in constants):
            raise error  # after which the script reads the pickle with encoding='bytes'
        frame = frame.f_back
    progress.note('a pickle has byte strings of Python 2 that are not ASCII: they are read as latin-1, as NumPy\'s '
                  "arrays need it. pickle.load(file, encoding='bytes') reads them as bytes")
    return error.object[error.start:].decode('latin-1'), len(error.object)


def _find_class(find, module, name):
    try:
        return find(module, name)
    except (ImportError, AttributeError):
        if not (module + '.').startswith(tuple(each + '.' for each in OLD_GPU)):
            raise
        return _lost_op(module, name)


@functools.lru_cache(None)
def _lost_op(module, name):
    """Return the class that stands for an op of a GPU whose code is not here; its graph can be read, not compiled."""
    from theano import Op

    def make_thunk(self, *args, **kwargs):
        raise _no_op([self])

    return type(name, (Op,), dict(
        __module__=module, is_lost=True, make_thunk=make_thunk, make_node=make_thunk,
        __new__=lambda cls, *args, **kwargs: Op.__new__(cls), __init__=lambda self, *args, **kwargs: None,
        __setstate__=lambda self, state: vars(self).update(state if isinstance(state, dict) else {}),
        __str__=lambda self: '%s.%s' % (module, name)))


def _no_op(ops):
    return GraphError('a pickle has ops for a GPU in its graph that cannot be computed here: %s. %s'
                      % (', '.join(sorted({'%s.%s' % (type(op).__module__, type(op).__name__) for op in ops})), NEXT))


def read_arrays_of_absent_gpus(gpuarray_type: Any) -> None:
    """Read arrays of a GPU as arrays of the host where no context has their name, and variables and functions likewise.

    Shared variables and graphs become variables and graphs of the host, which Theano moves to a GPU as any others. A
    function is compiled anew from its graph. A ``CudaNdarray`` of Theano before 1.0, whose contexts had no names, is an
    array of the default context.
    """
    from theano import compile, tensor
    from theano.compile import function_module
    from theano.gof.graph import Apply, io_toposort
    from theano.scalar import ScalarOp
    from theano.tensor.sharedvar import TensorSharedVariable
    of_the_host = {gpuarray_type.GpuArrayVariable: tensor.TensorVariable,
                   gpuarray_type.GpuArrayConstant: tensor.TensorConstant,
                   gpuarray_type.GpuArraySharedVariable: TensorSharedVariable}

    def is_here(name):
        if reads_keys():  # of compiled code, which are equal only as they were written
            return True
        try:
            gpuarray_type.get_context(name)
        except gpuarray_type.ContextNotDefined:
            return False
        return not gpuarray_type.config.experimental.unpickle_gpu_on_cpu

    def is_on_gpu(variable):
        return isinstance(getattr(variable, 'type', None), gpuarray_type.GpuArrayType)

    def is_lost(node):
        return hasattr(node.op, 'is_lost') or type(node.op).__module__.startswith('theano.gpuarray') and \
            not any(map(is_on_gpu, node.inputs + node.outputs))

    def is_compiled_anew(fgraph, inputs, outputs):
        """Return whether a function had arrays of an absent GPU; raise an error if its graph has ops of GPUs alone."""
        if not any(hasattr(v.type, 'of_gpu') for node in fgraph.apply_nodes for v in node.inputs + node.outputs):
            return False
        variables = [getattr(output, 'variable', output) for output in outputs]
        variables += [each.update for each in inputs if each.update is not None]
        lost = [node.op for node in io_toposort([], variables) if is_lost(node)]
        if lost:
            raise _no_op(lost)
        return True

    @wrap(gpuarray_type)
    def GpuArray_unpickler(original, array, context_name):
        return original(array, context_name) if is_here(context_name) else array

    def set_type(self, state):
        state = {'dtype': 'float32', 'context_name': None, **state}  # a CudaNdarrayType has neither
        if is_here(state['context_name']):
            vars(self).update(state)
            if 'typecode' not in state:
                self.__init__(state['dtype'], state['broadcastable'], state['context_name'], state['name'])
        else:
            self.__class__ = tensor.TensorType
            self.__init__(state['dtype'], state['broadcastable'], state['name'])
            self.of_gpu = True

    def set_variable(self, state):
        vars(self).update(state)
        if not is_on_gpu(self):
            self.__class__ = of_the_host.get(type(self), type(self))

    def set_node(self, state):
        from theano.gpuarray.basic_ops import GpuFromHost, GpuToGpu, HostFromGpu
        vars(self).update(state)
        kind = type(self.op)
        if reads_keys() or isinstance(self.op, ScalarOp) or not kind.__module__.startswith('theano.gpuarray') or \
                not all(hasattr(v, 'type') for v in self.inputs):
            return  # the variables of a compiled graph, which is_compiled_anew looks at, are not read yet
        has_input_on_gpu = any(map(is_on_gpu, self.inputs))
        name = vars(self.op).setdefault('context_name', None) if kind in (GpuFromHost, GpuToGpu) else \
            getattr(self.op, 'context_name', ABSENT)
        ends_here = name is not ABSENT and is_here(name)
        if kind in (HostFromGpu, GpuFromHost, GpuToGpu):
            if has_input_on_gpu:
                self.op = self.op if ends_here else HostFromGpu()
            else:
                self.op = GpuFromHost(name) if ends_here else compile.view_op
        elif not has_input_on_gpu and not ends_here:
            self.op = _lost_op(kind.__module__, kind.__name__)()

    gpuarray_type.GpuArrayType.__setstate__ = set_type
    for cls in of_the_host:
        cls.__setstate__ = set_variable
    Apply.__setstate__ = set_node

    @wrap(function_module)
    def _constructor_FunctionMaker(original, kwargs):  # of Theano before 1.0
        outputs = kwargs['outputs'] if isinstance(kwargs['outputs'], (list, tuple)) else [kwargs['outputs']]
        if is_compiled_anew(kwargs['fgraph'], kwargs['inputs'], outputs):
            kwargs = dict(kwargs, fgraph=None)
        return original(kwargs)

    def set_maker(self, state):
        vars(self).update(state)
        if is_compiled_anew(self.fgraph, self.inputs, self.outputs):
            outputs = None if self.return_none else self.outputs[0] if self.unpack_single else self.outputs
            self.__init__(self.inputs, outputs, self.mode, self.accept_inplace, self.function_builder, self.profile,
                          self.on_unused_input, output_keys=self.output_keys, name=self.name)

    function_module.FunctionMaker.__setstate__ = set_maker


def read_zip_files_of_absent_gpus(pkl_utils: Any) -> None:
    """Read an array of a GPU from a file of ``theano.misc.pkl_utils`` as one of the host where its GPU is not here."""
    @wrap(pkl_utils.PersistentNdarrayLoad)
    def __call__(original, self, persid):
        from theano.gpuarray.type import ContextNotDefined
        try:
            return original(self, persid)
        except ContextNotDefined:
            name = persid.split('.')[1]
            with self.zip_file.open(name) as file:
                pickle.load(file)  # the name of the context
                self.cache[name] = np.lib.format.read_array(file)
            return self.cache[name]
