"""Patches for names in scripts: contexts that are opened when Theano asks for them, and names of older Theanos."""
from __future__ import annotations

import dis
import functools
import sys
from typing import Any, Callable

from .import_hooks import refuse_import

MAP = "THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1', or theano_mgpu.init('dev0->cuda0;dev1->cuda1')"
SHARED = "theano.shared(value, target='dev0')"
BLOCK = "the block `with theano_mgpu.device('dev1'):`"
# Attributes of theano.gpuarray that old scripts and tutorials use -> their replacements.
REPLACED = {'shared_constructor': SHARED, 'float32_shared_constructor': SHARED,
            'change_flags': BLOCK, 'set_device': BLOCK, 'gpu_from_host': "x.transfer('dev0')",
            'CudaNdarrayType': 'theano.gpuarray.GpuArrayType', 'CudaNdarray': 'pygpu.gpuarray.GpuArray'}


def open_contexts_on_demand(open_context: Callable[[str], bool]) -> None:
    """Open the device of a mapped context when Theano first asks for the context by its name.

    Theano opens all devices of the flag ``contexts`` when it is imported; `theano_flags.hide_contexts` prevents that.
    Without this, before the first function over contexts, ``theano.shared(value, target='dev0')`` ends with "No
    suitable SharedVariable constructor", ``x.transfer('dev0')`` with "Can't transfer to target dev0", and unpickling a
    function of a GPU with "context name dev0 not defined".

    Parameters
    ----------
    open_context : callable
        ``open_context(name)`` opens the device of a context and returns whether the context has arrays of a GPU. It
        raises ``ContextNotDefined`` for a name that is not mapped.
    """
    from theano import compile, tensor
    from theano.gpuarray import type as gpuarray_type
    from theano.gpuarray.type import ContextNotDefined
    original, registry = gpuarray_type.get_context, gpuarray_type._context_reg

    class OnTheHost(ContextNotDefined, TypeError):
        """The error of an array of a GPU on a context of the CPU; `theano.shared` then tries other constructors."""

    @functools.wraps(original)
    def get_context(name):
        if name is not None and name not in registry and not open_context(name):
            raise OnTheHost('context %s is on the CPU, where no array of a GPU can be' % name)
        return original(name)

    def shared_on_context(value, name=None, strict=False, allow_downcast=None, borrow=False, *, target, **options):
        """Make a shared variable for a target: on a context of the CPU it is a variable of the host."""
        if target == 'cpu':
            raise TypeError('Theano has a constructor for this target')
        if open_context(target):
            return gpuarray_type.gpuarray_shared_constructor(value, name, strict, allow_downcast, borrow, target=target,
                                                             **options)
        return compile.shared(value, name, strict, allow_downcast, borrow=borrow, target='cpu', **options)

    def transfer(variable, target):
        """Leave a variable on the host for a context of the CPU; Theano's own function has looked for a GPU before."""
        try:
            return None if open_context(target) else variable.transfer('cpu')
        except ContextNotDefined:
            if tensor.basic.transfer._others[-1] is transfer:
                raise
            return None  # a function that the script has registered may know this target

    replace_in_gpuarray('get_context', original, get_context)
    compile.shared_constructor(shared_on_context)
    tensor.basic.register_transfer(transfer)


def replace_in_gpuarray(name: str, original: Any, replacement: Any) -> None:
    """Replace a function of theano.gpuarray in each of its modules, since they import one another's functions."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith('theano.gpuarray') and getattr(module, name, None) is original:
            setattr(module, name, replacement)


def name_what_replaced_old_gpu_code() -> None:
    """Name the replacement of ``theano.sandbox.cuda`` and ``theano.sandbox.gpuarray`` when they are imported.

    Theano 1.0.5 answers an import of the first with "No module named 'nose'", or as a skipped test.
    """
    for name in ('cuda', 'gpuarray'):
        refuse_import('theano.sandbox.' + name, _about('theano.sandbox.' + name, 'theano.gpuarray'))


def name_what_replaced_old_gpu_names() -> None:
    """Name the replacement of names that old scripts read from ``theano.gpuarray`` and ``theano.sandbox``.

    Without this, "module 'theano.gpuarray' has no attribute 'shared_constructor'" is all that a reader learns.
    """
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
