"""Loops of Theano's ops on the host, as code that g++ makes fast."""
import functools
import re

# g++ does not vectorise code that it expects to run less than once in 1,000 calls. Many checks come before these loops,
# so g++ expects that of them. See --param in gcc.gnu.org/onlinedocs/gcc/Optimize-Options.html.
HOT = '--param=hot-bb-frequency-fraction=1000000000'
LOOPING = '_c_all', 'c_code_cache_version_apply', 'c_compile_args'  # the methods of Elemwise and CAReduce to replace
_SCALAR = re.compile(r'(dtype_(\w+))& (\2_i = \(\(\1\*\) PyArray_DATA\(\2\)\)\[0\];)')
_LOOP = 'for(int i=0; i<n; i++){'
POOLING = 'c_code', 'c_code_cache_version'  # the methods of MaxPoolGrad to replace
FLOATS = {'float32', 'float64'}
_SUM_OF_ROWS = """
if (PyArray_IS_C_CONTIGUOUS(%(x)s) && PyArray_IS_C_CONTIGUOUS(%(total)s)) {
    const npy_intp columns = PyArray_SIZE(%(total)s), size = PyArray_SIZE(%(x)s);
    const npy_%(x_dtype)s* row = (npy_%(x_dtype)s*)PyArray_DATA(%(x)s);
    npy_%(dtype)s* totals = (npy_%(dtype)s*)PyArray_DATA(%(total)s);
    for (npy_intp j = 0; j < columns; j++)
        totals[j] = 0;
    for (npy_intp i = 0; i < size; i += columns, row += columns)
        #pragma GCC ivdep
        for (npy_intp j = 0; j < columns; j++)
            totals[j] = totals[j] + row[j];
} else %(loop)s
"""
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
    make_code, make_version, make_args = (getattr(Elemwise, name) for name in LOOPING)

    def c_all(self, *args):
        *before, loop = make_code(self, *args)
        if not self.openmp:
            loop = _SCALAR.sub(r'\1 \3', loop).replace(_LOOP, '\n#pragma GCC ivdep\n' + _LOOP)
        return tuple(before) + (loop,)

    def c_compile_args(self):
        return make_args(self) + [HOT] * bool(gcc_version())
    _replace(Elemwise, LOOPING, c_all, _marked(make_version, 'vectorized'), c_compile_args)


def unbranch_max_pooling():
    """Have the gradient of max pooling add a gradient or 0 to each element; the results stay the same, bit by bit.

    Theano branches on whether an element is the maximum of its window. No processor predicts that: half the op's time
    goes into wrong guesses. g++ makes such a branch of a conditional expression and of a bit mask, too, but not of an
    index. The sums start at +0, so that + 0 changes none of them.
    """
    from theano.tensor.signal.pool import MaxPoolGrad
    make_code, make_version = (getattr(MaxPoolGrad, name) for name in POOLING)

    def c_code(self, node, name, inp, out, sub):
        code = make_code(self, node, name, inp, out, sub)
        code = code.replace(_WINDOW, 'const dtype_%s addends[2] = {0, gz[0]};\n%s' % (inp[2], _WINDOW), 1)
        return _BRANCH.sub('gx[0] = gx[0] + addends[a == maximum];', code)
    _replace(MaxPoolGrad, POOLING, c_code, _marked(make_version, 'without branches'))


def sum_rows_in_the_order_of_memory():
    """Have sums over the first axes add row after row, for contiguous arrays; the results stay the same, bit by bit.

    Theano adds up column after column, so that it skips through memory, and each addition waits for the one before.
    Gradients of biases, and the statistics of batch normalisation, are such sums.
    """
    from theano import scalar
    from theano.gof.cmodule import gcc_version
    from theano.tensor.elemwise import CAReduce
    make_code, make_version, _ = (getattr(CAReduce, name) for name in LOOPING)

    def c_all(self, node, name, inames, onames, sub):
        *code, loop, end = make_code(self, node, name, inames, onames, sub)
        x, total = node.inputs[0].dtype, getattr(self, 'acc_dtype', None) or node.outputs[0].dtype
        if self.scalar_op == scalar.add and _are_first(self.axis, node.inputs[0].ndim) and {x, total} <= FLOATS:
            is_output = total == node.outputs[0].dtype
            loop = _SUM_OF_ROWS % dict(x=inames[0], x_dtype=x, total=onames[0] if is_output else 'acc', dtype=total,
                                       loop=loop)
        return tuple(code) + (loop, end)

    def c_compile_args(self):
        return [HOT] * bool(gcc_version())
    _replace(CAReduce, LOOPING, c_all, _marked(make_version, 'row after row'), c_compile_args)


def _are_first(axes, ndim):
    """Whether axes are the first ones of an array, and not all."""
    return axes is not None and 0 < len(axes) < ndim and tuple(axes) == tuple(range(len(axes)))


def _marked(make_version, mark):
    """A method that adds a mark to the version of C code, unless there is none: then no process keeps the code."""
    def version_of(self, *node):
        version = make_version(self, *node)
        return version and version + (mark, 1)
    return version_of


def _replace(op, names, *methods):
    """Replace methods of an op, which are then the ``__wrapped__`` ones of these."""
    for name, method in zip(names, methods):
        setattr(op, name, functools.wraps(getattr(op, name))(method))
