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
from typing import Iterable

from .wrapping import wrap

OPTIONS = [
    # Where an element decides which of two values is its result, g++ computes both and selects one. It cannot once it
    # has moved the computation of one of them into a branch.
    '-fno-tree-sink',
    '-mprefer-vector-width=256',      # vectors of 64 bytes would be halved for the library, and joined again
    '-fvect-cost-model=unlimited',    # for g++ a call of libm costs no more than an addition
    # Of two products that are added, g++ fuses one with the sum in vectors, and may fuse the other one at the end of a
    # loop.
    '-ffp-contract=off']
ARGUMENTS = {'exp': 1, 'expm1': 1, 'log': 1, 'log1p': 1, 'tanh': 1, 'erf': 1, 'pow': 2}  # functions of the library
PRECISIONS = {'float': ('f', 4), 'double': ('', 2)}  # the end of a function's name, and elements in 16 bytes
# Functions that are made of those, and their C++ code. Theano's own has branches to keep exp from overflow. Its sigmoid
# is 1 from 15 on, an error of 5 ulp.
MADE_OF = {'sigmoid': ({'exp'}, 'const T e = exp(-std::fabs(x)); return (x < T(0) ? e : T(1)) / (T(1) + e);'),
           'softplus': ({'exp', 'log1p'}, 'return (x > T(0) ? x : T(0)) + log1p(exp(-std::fabs(x)));')}
CALLED_BY = {'Exp': 'exp', 'Expm1': 'expm1', 'Log': 'log', 'Log1p': 'log1p', 'Tanh': 'tanh', 'Erf': 'erf', 'Pow': 'pow',
             'ScalarSigmoid': 'sigmoid', 'ScalarSoftplus': 'softplus'}  # by scalar ops
_BRANCHES = {
    'sigmoid': r'(\S+) = (\S+) < -(?:88\.0f|709\.0) \? 0\.0 : \2 > 1[59]\.0f? \? 1\.0f? : 1\.0f? ?/'
               r'\(1\.0f? ?\+ ?exp\(-\2\)\);',
    'softplus': r'(\S+) = (\S+) < -(?:103\.0f|745\.0) \? 0\.0 : \2 > 1[46]\.0f? \? \2 : log1p\(exp\(\2\)\);'}
_INNERMOST = re.compile(r'(.*)(for ?\(int ITER_\d+ = 0;)', re.DOTALL)

# A call for a vector of any length, or for one element. Elements that the library's vector has besides are 1, where no
# function is slow.
_CALL = """
#include <cmath>
#if defined(__AVX2__) && defined(__FMA__)
#define MGPU_BYTES 32
#define MGPU_LIBRARY(of_sse, of_avx2) of_avx2
#else
#define MGPU_BYTES 16
#define MGPU_LIBRARY(of_sse, of_avx2) of_sse
#endif
namespace mgpu_math {
template <class T, int bytes> struct vector { typedef T type __attribute__((vector_size(bytes))); };
template <class Whole, class Given> static inline Whole part_of(const Given& x, unsigned begin) {
    Whole part = Whole() + 1;
    __builtin_memcpy(&part, (const char*)&x + begin, sizeof x < sizeof part ? sizeof x : sizeof part);
    return part;
}
template <class Whole, class Function, class Given, class... More>
static inline Given call(Function function, const Given& x, const More&... more) {
    Given result;
    for (unsigned begin = 0; begin < sizeof x; begin += sizeof(Whole)) {
        const Whole part = function(part_of<Whole>(x, begin), part_of<Whole>(more, begin)...);
        __builtin_memcpy((char*)&result + begin, &part, sizeof x < sizeof part ? sizeof x : sizeof part);
    }
    return result;
}
}
"""
# Arguments of other types are left to libm: powers of integers, for example, are exact.
_OTHER_TYPES = """
namespace mgpu_math {
template <%(classes)s> static inline auto %(name)s(%(others)s) -> decltype(std::%(name)s(%(x)s)) {
    return std::%(name)s(%(x)s);
}
%(mixed)s
}
"""
# Theano writes constants as numbers of double precision.
_MIXED = {'pow': """
static inline double pow(double x, double y);
static inline double pow(float x, double y) { return pow((double)x, y); }
static inline double pow(double x, float y) { return pow(x, (double)y); }
"""}
_PRECISION = """
extern "C" %(T)s mgpu_%(symbol)s(%(given)s) __attribute__((simd("notinbranch"), const, nothrow));
namespace mgpu_math { static inline %(T)s %(name)s(%(given)s) { return mgpu_%(symbol)s(%(x)s); } }
extern "C" mgpu_math::vector<%(T)s, MGPU_BYTES>::type MGPU_LIBRARY(%(of_sse)s, %(of_avx2)s)(%(wholes)s);
"""
# g++ calls a form by the name in quotation marks.
_FORM = """
static __attribute__((used)) %(form)s mgpu_%(letter)s_%(symbol)s(%(given)s) __asm__("%(called)s");
static %(form)s mgpu_%(letter)s_%(symbol)s(%(given)s) {
    return mgpu_math::call<mgpu_math::vector<%(T)s, MGPU_BYTES>::type>(MGPU_LIBRARY(%(of_sse)s, %(of_avx2)s), %(x)s);
}
"""
# Forms of the vector ABI of x86 (sourceware.org/glibc/wiki/libmvec): letter, macro, and multiples of 16 bytes.
_FORMS = [('b', '__SSE2__', 1), ('c', '__AVX__', 2), ('d', '__AVX2__', 2), ('e', '__AVX512F__', 4)]
_MADE = 'namespace mgpu_math { template <class T> static inline T %s(T x) { %s } }'


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
        return code + support_code(names)

    @wrap(Elemwise)
    def c_compile_args(original, self):
        return original(self) + OPTIONS * bool(_functions_of(self))

    @wrap(Elemwise)
    def c_code_cache_version_apply(original, self, node):
        version, names = original(self, node), _functions_of(self)
        return version and version + (('vector math', 1, *names),) * bool(names)


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
    names = [name for name, n in ARGUMENTS.items() if all(
        hasattr(library, _called('b', lanes, n, name + end)) for end, lanes in PRECISIONS.values())]
    return names + [name for name, (parts, _) in MADE_OF.items() if parts <= set(names)]


def _called(letter, lanes, n, name):
    """Return the name of a form of a function of n arguments."""
    return '_ZGV%sN%d%s_%s' % (letter, lanes, 'v' * n, name)


def _functions_of(op):
    """Return the functions that the loop of an elementwise op takes from the library, in the order of `available`."""
    called = _calls_of(op.scalar_op)
    return [name for name in available() if name in called.union(*map(parts_of, called))]


def parts_of(name: str) -> set[str]:
    """Return the functions that a function is made of, without itself."""
    return MADE_OF[name][0] if name in MADE_OF else set()


def _calls_of(scalar_op):
    """Return the functions that the C code of a scalar op calls."""
    if hasattr(scalar_op, 'fgraph'):
        return set().union(*(_calls_of(node.op) for node in scalar_op.fgraph.apply_nodes))
    return {CALLED_BY[type(scalar_op).__name__]} if type(scalar_op).__name__ in CALLED_BY else set()


def support_code(names: Iterable[str]) -> str:
    """Return C++ code that defines functions in the namespace ``mgpu_math``; a module may have it more than once.

    Parameters
    ----------
    names : iterable of str
        Names out of `ARGUMENTS` and `MADE_OF`, each after those that it is made of.
    """
    code = [_once('vector_math', _CALL)]
    for name in names:
        code.append(_once(name, _function(name) if name in ARGUMENTS else _MADE % (name, MADE_OF[name][1])))
    return ''.join(code) if len(code) > 1 else ''


def _once(name, code):
    """Return C++ code that a file compiles once."""
    return '\n#ifndef MGPU_%s\n#define MGPU_%s\n%s\n#endif\n' % (name, name, code)


def _function(name):
    """Return the C++ code of a function of the library, in both precisions."""
    n = ARGUMENTS[name]
    letters, x = 'AB'[:n], ', '.join('xy'[:n])
    code = [_OTHER_TYPES % dict(name=name, x=x, classes=', '.join('class ' + each for each in letters),
                                others=', '.join(map('%s %s'.__mod__, zip(letters, 'xy'))),
                                mixed=_MIXED.get(name, ''))]
    for precision, (end, lanes) in PRECISIONS.items():
        symbol = name + end
        values = dict(T=precision, name=name, symbol=symbol, x=x, given=_parameters(precision, n),
                      wholes=', '.join(['mgpu_math::vector<%s, MGPU_BYTES>::type' % precision] * n),
                      of_sse=_called('b', lanes, n, symbol), of_avx2=_called('d', 2 * lanes, n, symbol))
        code.append(_PRECISION % values)
        code.append(_FORM % dict(values, letter='1', form=precision, called='mgpu_' + symbol))
        for letter, macro, times in _FORMS:
            form = 'mgpu_math::vector<%s, %d>::type' % (precision, 16 * times)
            code.append('#ifdef %s%s#endif\n' % (macro, _FORM % dict(
                values, letter=letter, form=form, given=_parameters(form, n),
                called=_called(letter, times * lanes, n, 'mgpu_' + symbol))))
    return ''.join(code)


def _parameters(kind, n):
    """Return the parameters of a C++ function of n arguments of one type."""
    return ', '.join('%s %s' % (kind, x) for x in 'xy'[:n])
