"""Loops of Theano's ops on the host, as code that g++ makes fast."""
from __future__ import annotations

import re
from pathlib import Path

from .wrapping import mark_version, wrap

# g++ does not vectorise code that it expects to run less than once in 1,000 calls. Many checks come before these loops,
# so g++ takes them for such code. See --param in gcc.gnu.org/onlinedocs/gcc/Optimize-Options.html.
HOT = '--param=hot-bb-frequency-fraction=1000000000'
# From version 14 on, g++ makes a branch of a clip, and so does not vectorise the loop.
NO_BRANCHES = '-fno-ssa-phiopt'
LOOPING = '_c_all', 'c_code_cache_version_apply', 'c_compile_args'  # replaced methods of Elemwise and CAReduce
_SCALAR = re.compile(r'(dtype_(\w+))& (\2_i = \(\(\1\*\) PyArray_DATA\(\2\)\)\[0\];)')
_LOOP = 'for(int i=0; i<n; i++){'
POOLING = 'c_code', 'c_code_cache_version'  # replaced methods of MaxPoolGrad
COLUMNS = 'c_support_code_apply', 'c_code_cache_version'  # replaced methods of BaseCorrMM
_THEIR_COLUMNS = re.compile(r'// \(borrowed from Caffe:.*?(?=// Theano op code)', re.DOTALL)  # im2col and col2im
FLOATS = {'float32', 'float64'}
_WINDOW = '// go through the pooled region'
_BRANCH = re.compile(r'if \(a == maximum\)\{\s*gx\[0\] = gx\[0\] \+ gz\[0\];\s*\}')


def vectorize_loops() -> None:
    """Let g++ vectorise the loops of elementwise ops over contiguous arrays.

    The results stay the same, but for this: of several products that are added, g++ may fuse another one with the sum,
    and so leave out another rounding. The updates of Keras's optimizers stay the same bit by bit.

    Three things keep it from that: it takes the loops for cold code; a scalar is read anew for each element, since
    nothing says that the output does not lie in its memory; and an output may overlap an input by a few elements, as
    far as g++ can know. It never does: it is the memory of an input, or apart from it.
    """
    from theano.gof.cmodule import gcc_version
    from theano.tensor.elemwise import Elemwise

    @wrap(Elemwise)
    def _c_all(original, self, *args):
        *before, loop = original(self, *args)
        if not self.openmp:
            loop = _SCALAR.sub(r'\1 \3', loop).replace(_LOOP, '\n#pragma GCC ivdep\n' + _LOOP)
        return tuple(before) + (loop,)

    @wrap(Elemwise)
    def c_compile_args(original, self):
        return original(self) + options(gcc_version())

    mark_version(Elemwise, lambda node: ('vectorized', 1), 'c_code_cache_version_apply')


def options(version: str) -> list[str]:
    """Return the options of an elementwise op for a version of g++, which is '' for other compilers."""
    return ([HOT] + [NO_BRANCHES] * (int(version.split('.')[0]) > 13)) if version else []


def unbranch_max_pooling() -> None:
    """Add a gradient or 0 to each element in the gradient of max pooling, without a branch.

    The results stay the same, bit by bit.
    Theano branches on whether an element is the maximum of its window. No processor predicts that: half the op's time
    goes into wrong guesses. g++ makes such a branch of a conditional expression and of a bit mask, too, but not of an
    index. The sums start at +0, so that + 0 changes none of them.
    """
    from theano.tensor.signal.pool import MaxPoolGrad

    @wrap(MaxPoolGrad)
    def c_code(original, self, node, name, inp, out, sub):
        code = original(self, node, name, inp, out, sub)
        code = code.replace(_WINDOW, 'const dtype_%s addends[2] = {0, gz[0]};\n%s' % (inp[2], _WINDOW), 1)
        return _BRANCH.sub('gx[0] = gx[0] + addends[a == maximum];', code)

    mark_version(MaxPoolGrad, lambda: ('without branches', 1))


def compute_sums_side_by_side() -> None:
    """Compute sums over all axes but one, or over the first axes, side by side; they stay the same, bit by bit.

    Theano computes one sum after the other, so that it may skip through memory, and each addition waits for the one
    before. Gradients of biases, and the statistics of batch normalisation, are such sums. In contiguous arrays, row
    after row is added to the sums over the first axes; else eight sums are computed at once.
    """
    from theano import scalar
    from theano.gof.cmodule import gcc_version
    from theano.tensor.elemwise import CAReduce
    code_of_sums = Path(__file__).with_name('sums.h').read_text(encoding='utf-8')

    @wrap(CAReduce)
    def _c_all(original, self, node, name, inames, onames, sub):
        *code, loop, end = original(self, node, name, inames, onames, sub)
        x, total = node.inputs[0].dtype, getattr(self, 'acc_dtype', None) or node.outputs[0].dtype
        if self.scalar_op == scalar.add and self.axis and {x, total} <= FLOATS:
            loop = _sums(tuple(self.axis), node.inputs[0].ndim, loop, 'npy_%s, npy_%s' % (total, x), '%s, %s' % (
                inames[0], onames[0] if total == node.outputs[0].dtype else 'acc'))
        return tuple(code) + (loop, end)

    @wrap(CAReduce)
    def c_compile_args(original, self):
        return [HOT] * bool(gcc_version())

    CAReduce.c_support_code = lambda self: code_of_sums
    mark_version(CAReduce, lambda node: ('sums side by side', 2), 'c_code_cache_version_apply')


def _sums(axes, ndim, loop, types, arrays):
    """Return C code of the sums over some axes, which is Theano's own `loop` where no other one suits them."""
    kept = set(range(ndim)) - set(axes)
    if len(kept) == 1 and ndim > 2:
        loop = '{ const int axes[] = {%s}; mgpu_sums::of_each<%d, %s>(%s, %d, axes); }' % (
            ', '.join(map(str, axes)), len(axes), types, arrays, min(kept))
    if kept and axes == tuple(range(len(axes))):
        loop = 'if (!mgpu_sums::of_rows<%s>(%s)) {%s}' % (types, arrays, loop)
    return loop


def move_rows_of_columns() -> None:
    """Have convolutions copy rows between an image and the columns that they multiply; the results stay the same.

    Theano decides for each element whether it lies within the image. In layers of 16 to 64 filters this takes half the
    time of the convolution.
    """
    from theano.tensor.nnet.corr import BaseCorrMM
    ours = Path(__file__).with_name('columns.h').read_text(encoding='utf-8')

    @wrap(BaseCorrMM)
    def c_support_code_apply(original, self, *args):  # clang has other words for vectors
        return _THEIR_COLUMNS.sub(lambda theirs: '#ifdef __clang__\n%s\n#else\n%s\n#endif\n' % (theirs.group(), ours),
                                  original(self, *args), 1)

    mark_version(BaseCorrMM, lambda: ('rows of columns', 1))
