"""The order of the outputs of a compiled graph: what it computes first decides what memory it needs."""
from theano.gof.graph import io_toposort


def depths(outputs):
    """For each output, the number of ops in the longest chain that it is computed by.

    Theano's virtual machine computes what the first output needs, then what else the second one needs, and so on. If
    outputs of little depth come first, the gradient of a layer's weights is computed, and what the layer has kept for
    it is freed, before the backward pass goes on to the layer below. If the gradient of the first layer comes first,
    the whole backward pass is computed before anything is freed: that takes up to twice the memory.

    Parameters
    ----------
    outputs : list of theano.Variable

    Returns
    -------
    list of int

    Examples
    --------
    >>> import theano.tensor as T
    >>> x = T.dvector()
    >>> depths([T.exp(T.exp(x)), x, T.exp(x)])
    [2, 0, 1]
    """
    found = {}
    for node in io_toposort([], outputs):
        depth = 1 + max((found.get(v, 0) for v in node.inputs), default=0)
        found.update((v, depth) for v in node.outputs)
    return [found.get(output, 0) for output in outputs]


def by_depth(graphs):
    """A dict of names to outputs, in the order of `depths`."""
    depth = dict(zip(graphs, depths(list(graphs.values()))))
    return {name: graphs[name] for name in sorted(graphs, key=depth.get)}
