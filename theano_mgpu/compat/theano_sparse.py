"""Ops of Theano on sparse matrices."""
from __future__ import annotations

from .wrapping import mark_version, wrap

COLUMN = 'npy_intp Sbj = PyArray_STRIDES(%s)[1] / PyArray_DESCR(%s)->elsize;'


def follow_strides() -> None:
    """Add a sparse matrix and a dense one, and multiply them, by the strides that the dense one has.

    Theano's C code writes a sum by the strides of the dense matrix, also where the result is a copy in another order,
    and reads a factor as if its columns were side by side. So a matrix such as ``x[:, ::2]`` or ``x.T``, or the columns
    of a context, gave wrong numbers, and a sum overwrote foreign memory.
    """
    from theano.sparse import opt

    @wrap(opt.AddSD_ccode)
    def c_code(original, self, node, name, inputs, outputs, sub):
        z, = outputs
        strides = ['npy_intp Z%s = PyArray_STRIDES(%s)[%d] / PyArray_DESCR(%s)->elsize;' % (axis, z, i, z)
                   for i, axis in enumerate('ij')]
        code = original(self, node, name, inputs, outputs, sub)
        return _replaced(_replaced(code, 'zdata[pos]', 'zdata[row * Zi + col * Zj]'),
                        'npy_intp pos;', '\n'.join(['npy_intp pos;', *strides]))

    for op, index in ((opt.MulSDCSC, 'b_row[j]'), (opt.MulSDCSR, 'b_row[i]')):
        @wrap(op, 'c_code')
        def of_product(original, self, node, name, inputs, outputs, sub, index=index):
            code = _replaced(original(self, node, name, inputs, outputs, sub), index, index.replace(']', ' * Sbj]'))
            return _replaced(code, '// loop over columns', COLUMN % (inputs[3], inputs[3]))

    for op in (opt.AddSD_ccode, opt.MulSDCSC, opt.MulSDCSR):
        mark_version(op, lambda: ('by strides', 1))


def _replaced(code: str, old: str, new: str) -> str:
    """Return C code with a part of it replaced; an AssertionError if it lacks the part."""
    assert old in code, old
    return code.replace(old, new)
