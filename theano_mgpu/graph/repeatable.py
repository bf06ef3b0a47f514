"""Ops that may give other results for the same inputs, such as one that takes the next batch of a queue."""
from __future__ import annotations

from typing import Sequence

import theano
from theano.compile.builders import OpFromGraph
from theano.compile.ops import FromFunctionOp
from theano.gof.graph import ancestors
from theano.scan_module.scan_op import Scan
from theano.tensor import io

# The ops of Theano, and of this package, are functions of their inputs, but for these.
UNKNOWN = FromFunctionOp, theano.printing.Print, io.LoadFromDisk, io.MPIRecv, io.MPIRecvWait, io.MPISend, io.MPISendWait


def unrepeatable(op: theano.Op) -> theano.Op | None:
    """Return the op that may give other results for the same inputs: the given one, or one in its graph; else None.

    An op of a script may read a queue, a clock, or random numbers of Python. It is known to be a function of its inputs
    by an attribute, ``mgpu_pure = True``.
    """
    if isinstance(op, (Scan, OpFromGraph)):
        return unrepeatable_in(op.outputs if isinstance(op, Scan) else op.local_outputs)
    is_known = type(op).__module__.partition('.')[0] in ('theano', 'theano_mgpu') and not isinstance(op, UNKNOWN)
    return None if is_known or getattr(op, 'mgpu_pure', False) else op


def unrepeatable_in(outputs: Sequence[theano.Variable]) -> theano.Op | None:
    """Return the first such op of a graph; else None."""
    return next(filter(None, [unrepeatable(v.owner.op) for v in ancestors(outputs) if v.owner]), None)
