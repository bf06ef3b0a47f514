"""Ops that may give other results for the same inputs, such as one that takes the next batch of a queue."""
from __future__ import annotations

from typing import Sequence

import theano
from theano.compile.ops import FromFunctionOp
from theano.gof.graph import ancestors
from theano.scalar import Composite
from theano.tensor import io

from .rewrites import inner_outputs

# The ops of Theano, of this package, and of libraries on Theano are functions of their inputs, but for those below.
KNOWN = 'theano', 'theano_mgpu', 'keras', 'lasagne', 'blocks', 'pymc3'
OF_EACH_PROCESS = theano.printing.Print, io.MPIRecv, io.MPIRecvWait, io.MPISend, io.MPISendWait
UNKNOWN = FromFunctionOp, io.LoadFromDisk, *OF_EACH_PROCESS
UNKNOWN_NAMES = 'pymc3.theanof.GeneratorOp',  # of libraries that are not imported here


def unrepeatable(op: theano.Op, but: tuple[type, ...] = (), of_elements: bool = False) -> theano.Op | None:
    """Return the op that may give other results for the same inputs: the given one, or one in its graph; else None.

    An op of a script may read a queue, a clock, or random numbers of Python. It is known to be a function of its inputs
    by an attribute, ``mgpu_pure = True``. Ops of the classes `but` do not count. Theano takes each op `of_elements`, as
    in an Elemwise, for a function of its inputs: such an op counts only where it is asked for.
    """
    if inner_outputs(op):
        return unrepeatable_in(inner_outputs(op), but, of_elements)
    if of_elements and isinstance(getattr(op, 'scalar_op', None), theano.Op):
        return unrepeatable(op.scalar_op, but, of_elements)
    if of_elements and isinstance(op, Composite):
        return unrepeatable_in(op.outputs, but, of_elements)
    cls = type(op)
    is_known = cls.__module__.partition('.')[0] in KNOWN and not isinstance(op, UNKNOWN) and \
        '%s.%s' % (cls.__module__, cls.__name__) not in UNKNOWN_NAMES
    return None if is_known or isinstance(op, but) or getattr(op, 'mgpu_pure', False) else op


def unrepeatable_in(outputs: Sequence[theano.Variable], but: tuple[type, ...] = (),
                    of_elements: bool = False) -> theano.Op | None:
    """Return the first such op of a graph; else None."""
    return next(filter(None, [unrepeatable(v.owner.op, but, of_elements) for v in ancestors(outputs) if v.owner]), None)


def draws(outputs: Sequence[theano.Variable]) -> bool:
    """Return whether a graph has such an op whose results several processes have to share.

    Each process prints by itself, and sends messages of its own by the ops of `theano.tensor.io`.
    """
    return unrepeatable_in(outputs, OF_EACH_PROCESS) is not None
