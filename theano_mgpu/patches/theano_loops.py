"""Loops of Theano's ops on the host, as code that g++ makes fast."""
import functools
import re

# g++ does not vectorise code that it expects to run less than once in 1,000 calls. Many checks come before these loops,
# so g++ expects that of them. See --param in gcc.gnu.org/onlinedocs/gcc/Optimize-Options.html.
HOT = '--param=hot-bb-frequency-fraction=1000000000'
ELEMWISE = '_c_all', 'c_code_cache_version_apply', 'c_compile_args'  # the methods of Elemwise that are replaced
_SCALAR = re.compile(r'(dtype_(\w+))& (\2_i = \(\(\1\*\) PyArray_DATA\(\2\)\)\[0\];)')
_LOOP = 'for(int i=0; i<n; i++){'
POOLING = 'c_code', 'c_code_cache_version'  # the methods of MaxPoolGrad that are replaced
_WINDOW = '// go through the pooled region'
_BRANCH = re.compile(r'if \(a == maximum\)\{\s*gx\[0\] = gx\[0\] \+ gz\[0\];\s*\}')


def vectorize_loops():
    """Have g++ vectorise the loops of elementwise ops over contiguous arrays.

    The results stay the same, but for this: of several products that are added, g++ may fuse another one with the sum,
    and so leave out another rounding. The updates of Keras's optimizers stay the same bit by bit.

    Three things keep it from that: it takes the loops for cold code; a scalar is read anew for each element, since
    nothing says that the output does not lie in its memory; and an output may overlap an input by a few elements, as
    far as g++ can know. It never does: it is the memory of an input, or apart from it.
    """
    from theano.gof.cmodule import gcc_version
    from theano.tensor.elemwise import Elemwise
    make_code, make_version, make_args = (getattr(Elemwise, name) for name in ELEMWISE)

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

    for name, method in zip(ELEMWISE, (c_all, c_code_cache_version_apply, c_compile_args)):
        setattr(Elemwise, name, method)


def unbranch_max_pooling():
    """Have the gradient of max pooling add a gradient or 0 to each element; the results stay the same, bit by bit.

    Theano branches on whether an element is the maximum of its window. No processor predicts that: half the op's time
    goes into wrong guesses. g++ makes such a branch of a conditional expression and of a bit mask, too, but not of an
    index. The sums start at +0, so that + 0 changes none of them.
    """
    from theano.tensor.signal.pool import MaxPoolGrad
    make_code, make_version = (getattr(MaxPoolGrad, name) for name in POOLING)

    @functools.wraps(make_code)
    def c_code(self, node, name, inp, out, sub):
        code = make_code(self, node, name, inp, out, sub)
        code = code.replace(_WINDOW, 'const dtype_%s addends[2] = {0, gz[0]};\n%s' % (inp[2], _WINDOW), 1)
        return _BRANCH.sub('gx[0] = gx[0] + addends[a == maximum];', code)

    @functools.wraps(make_version)
    def c_code_cache_version(self):
        return make_version(self) + ('without branches', 1)

    MaxPoolGrad.c_code, MaxPoolGrad.c_code_cache_version = c_code, c_code_cache_version
