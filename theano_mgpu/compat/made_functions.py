"""The making of Theano's functions, and of their copies."""
from __future__ import annotations

import sys

from ..utils.attributes import collector_paused
from .wrapping import wrap


def compile_without_the_collector() -> None:
    """Pause Python's collector while a function is compiled."""
    @wrap(sys.modules['theano.compile.pfunc'])
    def orig_function(original, *args, **kwargs):
        with collector_paused():
            return original(*args, **kwargs)


def order_copies() -> None:
    """Have the ops of a copied function run in an order in which none writes into what another one reads later.

    `Function.copy` copies the optimised graph without its DestroyHandler, which orders ops that work in place. A copy
    without updates also keeps the ops that write new values into the memory of shared variables: it gives them copies.
    """
    import theano

    @wrap(theano.compile.FunctionMaker)
    def __init__(original, self, inputs, outputs, *args, fgraph=None, **kwargs):
        if fgraph is not None and not hasattr(fgraph, 'destroyers'):
            fgraph.attach_feature(theano.gof.DestroyHandler())
            for spec, variable in zip(inputs, fgraph.inputs):
                if spec.update is None and spec.value is not None and fgraph.has_destroyers([variable]):
                    for node, i in list(variable.clients):
                        fgraph.change_input(node, i, theano.compile.deep_copy_op(variable))
        original(self, inputs, outputs, *args, fgraph=fgraph, **kwargs)
