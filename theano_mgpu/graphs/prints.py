"""Values that a graph prints, taken out of the graph: over several contexts they are printed whole, and once."""
from theano.gof.graph import io_toposort
from theano.printing import Print


def take_prints(outputs, updates):
    """Replace each `theano.printing.Print` of a graph by its input.

    A replica would print its part of a value. The whole value becomes a further output, for `print_values`.

    Parameters
    ----------
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable

    Returns
    -------
    list of Print
        In the order in which the graph computes their inputs.
    list of theano.Variable
        The outputs, and after them the input of each Print.
    dict of SharedVariable to theano.Variable
    """
    ops, values, replaced = [], [], {}
    whole = list(outputs) + list(updates.values())
    for node in io_toposort([], whole):
        inputs = [replaced.get(variable, variable) for variable in node.inputs]
        if isinstance(node.op, Print):
            ops.append(node.op)
            values += inputs
            replaced[node.outputs[0]] = inputs[0]
        elif inputs != node.inputs:
            replaced.update(zip(node.outputs, node.clone_with_new_inputs(inputs).outputs))
    whole = [replaced.get(variable, variable) for variable in whole]
    return ops, whole[:len(outputs)] + values, dict(zip(updates, whole[len(outputs):]))


def print_values(prints, values):
    """Print values as these ops do, by the function that each of them calls."""
    for op, value in zip(prints, values):
        op.global_fn(op, value)


def without_prints(outputs):
    """Return a graph without the ops that print."""
    return take_prints(outputs, {})[1][:len(outputs)]
