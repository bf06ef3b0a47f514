"""Functions of a vector library in the loops of Theano's elementwise ops on the host.

The library is libmvec, a part of glibc on x86-64. Its functions are within 4 ulp, and call libm for NaN, infinities and
whatever else is out of the ordinary. g++ vectorises a loop by itself if it knows vector forms of the functions that the
loop calls. What remains at the end of a loop, and a loop that is not vectorised, would call libm, and there an element
would have other bits. So every call, of one element or of a vector of any length, becomes a call of the same function.
"""
from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path
from typing import Iterable

from .wrapping import mark_version, wrap

OPTIONS = [
    # Where an element decides which of two values is its result, g++ computes both and selects one. It cannot once it
    # has moved the computation of one of them into a branch.
    '-fno-tree-sink',
    '-mprefer-vector-width=256',      # vectors of 64 bytes would be halved for the library, and joined again
    '-fvect-cost-model=unlimited',    # for g++ a call of libm costs no more than an addition
    # Of two products that are added, g++ fuses one with the sum in vectors, and may fuse the other one at the end of a
    # loop.
    '-ffp-contract=off']
HEADER = Path(__file__).with_suffix('.h')
FORMS = '_ZGVbN4v_%sf', '_ZGVbN2v_%s'  # names of the library's functions of one argument, in both precisions
LIBRARY = 'exp', 'expm1', 'log', 'log1p', 'tanh', 'erf', 'pow'
MADE_OF = {'sigmoid': {'exp'}, 'softplus': {'exp', 'log1p'}}  # functions that are made of those
CALLED_BY = {'Exp': 'exp', 'Expm1': 'expm1', 'Log': 'log', 'Log1p': 'log1p', 'Tanh': 'tanh', 'Erf': 'erf', 'Pow': 'pow',
             'ScalarSigmoid': 'sigmoid', 'ScalarSoftplus': 'softplus'}  # by scalar ops
_BRANCHES = {
    'sigmoid': r'(\S+) = (\S+) < -(?:88\.0f|709\.0) \? 0\.0 : \2 > 1[59]\.0f? \? 1\.0f? : 1\.0f? ?/'
               r'\(1\.0f? ?\+ ?exp\(-\2\)\);',
    'softplus': r'(\S+) = (\S+) < -(?:103\.0f|745\.0) \? 0\.0 : \2 > 1[46]\.0f? \? \2 : log1p\(exp\(\2\)\);'}
_INNERMOST = re.compile(r'(.*)(for ?\(int ITER_\d+ = 0;)', re.DOTALL)


def vectorize_functions() -> None:
    """Have the loops of elementwise ops call libmvec for exp, log, tanh and others, unless mgpu.vector_math is off."""
    from theano.gof.utils import MethodNotDefined
    from theano.tensor.elemwise import Elemwise

    @wrap(Elemwise)
    def _c_all(original, self, *args):
        *before, loop = original(self, *args)
        names = _functions_of(self)
        for name in sorted(_BRANCHES.keys() & set(names)):
            loop = re.sub(_BRANCHES[name], r'\1 = mgpu_math::%s(\2);' % name, loop)
        if names and not self.openmp:  # an output is the memory of an input, or apart from it
            loop = _INNERMOST.sub(r'\1\n#pragma GCC ivdep\n\2', loop, 1)
        using = ''.join('using mgpu_math::%s; ' % name for name in names)
        return tuple(before) + ('{ %s\n%s }' % (using, loop) if names else loop,)

    @wrap(Elemwise)
    def c_support_code_apply(original, self, *args):
        names = _functions_of(self)
        try:
            code = original(self, *args)
        except MethodNotDefined:
            if not names:
                raise
            code = ''
        return code + (support_code(names) if names else '')

    @wrap(Elemwise)
    def c_compile_args(original, self):
        return original(self) + OPTIONS * bool(_functions_of(self))

    mark_version(Elemwise, lambda node: (('vector math', 2, *_functions_of(node.op)),) * bool(_functions_of(node.op)),
                 'c_code_cache_version_apply')


def available() -> list[str]:
    """Return the names of the functions that loops now take from the library, each after those that it is made of."""
    from theano import config
    from theano.gof.cmodule import gcc_version
    is_on = config.mgpu.vector_math == 'auto' and not config.lib.amdlibm  # AMD's library has contiguous loops only
    return _loaded() if is_on and _makes_vector_calls(config.cxx, gcc_version()) else []


def _makes_vector_calls(command, version):
    """Return whether a compiler is a GCC that knows the attribute ``simd`` and the options."""
    major = version.split('.')[0]
    return 'clang' not in command and major.isdigit() and int(major) >= 8


@functools.lru_cache(maxsize=None)
def _loaded():
    """Load the library for all modules of the process; return the names of the functions that it makes possible."""
    if platform.machine() not in ('x86_64', 'AMD64'):
        return []
    try:  # modules are not linked to it: its link may be missing, or be another glibc's
        library = ctypes.CDLL('libmvec.so.1', ctypes.RTLD_GLOBAL)
    except OSError:
        return []
    names = [name for name in LIBRARY if all(
        hasattr(library, form.replace('v_', 'vv_' if name == 'pow' else 'v_') % name) for form in FORMS)]
    return names + [name for name, parts in MADE_OF.items() if parts <= set(names)]


def _functions_of(op):
    """Return the functions that the loop of an elementwise op takes from the library, in the order of `available`."""
    called = _calls_of(op.scalar_op)
    return [name for name in available() if name in called.union(*(MADE_OF.get(each, ()) for each in called))]


def _calls_of(scalar_op):
    """Return the functions that the C code of a scalar op calls."""
    if hasattr(scalar_op, 'fgraph'):
        return set().union(*(_calls_of(node.op) for node in scalar_op.fgraph.apply_nodes))
    return {CALLED_BY[type(scalar_op).__name__]} if type(scalar_op).__name__ in CALLED_BY else set()


def support_code(names: Iterable[str]) -> str:
    """Return C++ code that defines functions in the namespace ``mgpu_math``; a module may have it more than once."""
    return HEADER.read_text(encoding='utf-8') + ''.join(
        '#ifndef MGPU_HAS_{0}\n#define MGPU_HAS_{0}\nMGPU_VECTOR_{0}\n#endif\n'.format(name) for name in names)
