"""The order of the outputs of a compiled graph, which decides how much memory a call needs."""
from __future__ import annotations

from typing import TypeVar

import theano
from theano.gof.graph import io_toposort

Name = TypeVar('Name')


def by_depth(graphs: dict[Name, theano.Variable]) -> dict[Name, theano.Variable]:
    """Sort outputs by their depth, the number of ops in the longest chain that an output is computed by.

    Theano's virtual machine computes all ops of the first output, then the further ops of the second one, and so on.
    If outputs of little depth come first, the gradient of a layer's weights is computed, and the saved values of the
    layer are freed, before the backward pass goes on to the layer below. If the gradient of the first layer comes
    first, the whole backward pass is computed before anything is freed: that takes up to twice the memory.

    Examples
    --------
    >>> import theano.tensor as T
    >>> x = T.dvector()
    >>> list(by_depth({'two': T.exp(T.exp(x)), 'none': x, 'one': T.exp(x)}))
    ['none', 'one', 'two']
    """
    depths: dict[theano.Variable, int] = {}
    for node in io_toposort([], list(graphs.values())):
        depth = 1 + max((depths.get(v, 0) for v in node.inputs), default=0)
        depths.update((v, depth) for v in node.outputs)
    return {name: graphs[name] for name in sorted(graphs, key=lambda name: depths.get(graphs[name], 0))}
