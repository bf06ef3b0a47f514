"""Loops over elements on the host, as code that g++ vectorises."""
import functools
import re

# g++ does not vectorise code that it expects to run less than once in 1,000 calls. Many checks come before these loops,
# so g++ expects that of them. See --param in gcc.gnu.org/onlinedocs/gcc/Optimize-Options.html.
HOT = '--param=hot-bb-frequency-fraction=1000000000'
PATCHED = '_c_all', 'c_code_cache_version_apply', 'c_compile_args'  # the methods of Elemwise that are replaced
_SCALAR = re.compile(r'(dtype_(\w+))& (\2_i = \(\(\1\*\) PyArray_DATA\(\2\)\)\[0\];)')
_LOOP = 'for(int i=0; i<n; i++){'


def vectorize_loops():
    """Have g++ vectorise the loops of elementwise ops over contiguous arrays; the results stay the same, bit by bit.

    Three things keep it from that: it takes the loops for cold code; a scalar is read anew for each element, since
    nothing says that the output does not lie in its memory; and an output may overlap an input by a few elements, as
    far as g++ can know. It never does: it is the memory of an input, or apart from it.
    """
    from theano.gof.cmodule import gcc_version
    from theano.tensor.elemwise import Elemwise
    make_code, make_version, make_args = (getattr(Elemwise, name) for name in PATCHED)

    @functools.wraps(make_code)
    def c_all(self, *args):
        *before, loop = make_code(self, *args)
        if not self.openmp:
            loop = _SCALAR.sub(r'\1 \3', loop).replace(_LOOP, '\n#pragma GCC ivdep\n' + _LOOP)
        return tuple(before) + (loop,)

    @functools.wraps(make_version)
    def c_code_cache_version_apply(self, node):
        version = make_version(self, node)
        return version and version + ('vectorized', 1)

    @functools.wraps(make_args)
    def c_compile_args(self):
        return make_args(self) + [HOT] * bool(gcc_version())

    for name, method in zip(PATCHED, (c_all, c_code_cache_version_apply, c_compile_args)):
        setattr(Elemwise, name, method)
