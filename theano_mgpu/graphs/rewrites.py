"""Copies of graphs in which something is replaced or left out."""
from theano.gof.graph import ancestors, clone_get_equiv
from theano.gpuarray.basic_ops import GpuFromHost, HostFromGpu


def substitute(outputs, replacements):
    """Copy a graph with some of its variables replaced.

    Parameters
    ----------
    outputs : list of theano.Variable
    replacements : dict of theano.Variable to theano.Variable
        Each replacement has the type of what it replaces.

    Returns
    -------
    list of theano.Variable
    """
    memo = {output: output for output in outputs if output.owner is None}  # Theano would clone them
    memo.update(replacements)
    clone_get_equiv(list(replacements), outputs, copy_inputs=False, copy_orphans=False, memo=memo)
    return [memo[output] for output in outputs]


def without_default_device(outputs):
    """Return a graph without transfers to the GPU of the flag ``device`` and back, which gradients of parameters have.

    Such a graph names no context, in contrast to one in which a context was named by its user.
    """
    while True:
        back = {v: v.owner.inputs[0].owner.inputs[0] for v in ancestors(outputs)
                if v.owner and isinstance(v.owner.op, HostFromGpu) and v.owner.inputs[0].type.context_name is None
                and v.owner.inputs[0].owner and isinstance(v.owner.inputs[0].owner.op, GpuFromHost)}
        if not back:
            return outputs
        outputs = substitute(outputs, back)
