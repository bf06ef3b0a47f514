"""The loop of Theano's scan in C, on every Python."""
from __future__ import annotations

import contextlib
import re
import sys
import warnings
from typing import Iterator

from ..errors import PREFIX
from ..utils.attributes import temporarily
from . import import_hooks, numpy2

LOOP = 'theano.scan_module.scan_perform_ext'  # the module that compiles the loop, once, and loads it
# Cython 0.28 generated the file. By these macros its code keeps to the interface of Python, instead of reading the
# fields of Python's structures, which have changed.
_MACROS = ('CYTHON_USE_PYLONG_INTERNALS', 'CYTHON_USE_UNICODE_INTERNALS', 'CYTHON_USE_PYTYPE_LOOKUP',
           'CYTHON_FAST_THREAD_STATE', 'CYTHON_FAST_PYCALL')
_SIZE = '__pyx_v_n_mit_mot + __pyx_v_n_mit_sot + __pyx_v_n_sit_sot + __pyx_v_n_nit_sot + 1'
_CHANGES = [
    # The first line of a code object is the line in a traceback, so a frame needs no line of its own.
    (r'(?<!_)PyCode_New\(a, k, l, s, .*\)', 'PyCode_NewEmpty(PyUnicode_AsUTF8(fn), PyUnicode_AsUTF8(name), fline)'),
    (r'\(frame\)->f_lineno = \(lineno\)', '(void)(frame)'),
    (r'#if CYTHON_COMPILING_IN_PYPY(\s+PyObject \*tmp_type)', r'#if 1\1'),  # the error of a thread
    (r'PyUnicode_GET_SIZE', 'PyUnicode_GET_LENGTH'),
    # From Python 3.12 on an assertion of Py_SIZE ends the process if x is an int.
    (r'Py_SIZE\(x\) < 0', 'PyObject_RichCompareBool(x, Py_False, Py_LT) == 1'),
    # To see whether an output lies where it did, Theano compares buffers: on Python 3 these are all elements.
    (r'__Pyx_PyObject_GetAttrStr\((__pyx_v_(?:new_)?var), __pyx_n_s_data\)',
     r'(__Pyx_TypeCheck(\1, __pyx_ptype_5numpy_ndarray) ? PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject*)\1))'
     r' : PyObject_GetAttr(\1, __pyx_n_s_data))'),
    # Arrays of 500 outputs, which nothing checks.
    (r'(int __pyx_v_(?:pos|store_steps))\[0x1F4\];', r'\1[%s];' % _SIZE)]
# NumPy 2 has the fields of a dtype in another struct.
_FOR_NUMPY_2 = [(r'(__pyx_v_\w+)->(subarray|names|fields)', r'((_PyArray_LegacyDescr*)\1)->\2')]
_FROM_PYTHON_3_13 = [(r'(_PyLong_AsByteArray\([^;]*)\);', r'\1, 1);')]  # whether to raise an OverflowError


@contextlib.contextmanager
def build_the_loop() -> Iterator[None]:
    """Compile the loop of scan as code of this Python, while its module is imported; without it, scan runs in Python.

    If the loop cannot be compiled, a warning says so, and the loop in Python runs. So it does without a compiler.
    """
    from theano.gof.cmodule import GCC_compiler
    compile_str = GCC_compiler.compile_str

    def compile_changed(name, code, *args, **kwargs):
        return compile_str(name, _of_this_python(code) if name == 'scan_perform' else code, *args, **kwargs)

    with temporarily(GCC_compiler, 'compile_str', staticmethod(compile_changed)), warnings.catch_warnings():
        warnings.filterwarnings('ignore', r'numpy\.\w+ size changed')  # structures that the loop only knows by name
        try:
            yield
        except ImportError:
            raise
        except Exception as error:
            why = PREFIX + "the C code of scan's loop cannot be compiled; the loop runs in Python, which is slower"
            import_hooks.refuse_import(LOOP, why)
            warnings.warn('%s (%s)' % (why, (str(error).splitlines() or [type(error).__name__])[0]), stacklevel=2)
            raise ImportError(why) from error


def _of_this_python(code):
    """Return the C code of scan's loop, changed for this Python."""
    changes = _CHANGES + _FOR_NUMPY_2 * numpy2.is_needed() + _FROM_PYTHON_3_13 * (sys.version_info >= (3, 13))
    for pattern, replacement in changes:
        code = re.sub(pattern, replacement, code)
    return ''.join('#define %s 0\n' % macro for macro in _MACROS) + code


def keep_values_of_steps() -> None:
    """Have a loop keep what its gradient needs of each step, which the gradient would compute once more.

    Results stay the same. A loop keeps more memory, as Theano's own rewrites of loops do, and like these it does not
    with the flag ``optimizer_excluding=more_mem``.
    """
    from theano.compile import optdb

    from .scan_rewrites import KeepValues
    optdb.register('scan_keep_values', KeepValues(), .04, 'fast_run', 'more_mem', 'scan')  # once graphs are merged
