"""The lines of the user's script, and the layers of a model, that made the variables of a graph, for messages."""
from __future__ import annotations

from collections import deque
from typing import Any, Iterable, Sequence

import theano
from theano.compile.mode import AddFeatureOptimizer
from theano.gof import Feature
from theano.gof.graph import stack_search
from theano.scalar import Composite

from ..errors import PACKAGE, frames_of, traces_of, user_frame, user_line


class LayerTrace(list):
    """The lines that made a variable of a layer, with the name of the layer, or of one that an op has a part of."""

    layer: str | None = None
    fused: str | None = None


def name_layer(outputs: Iterable[theano.Variable], inputs: Iterable[theano.Variable], layer: str) -> None:
    """Note on the variables between the inputs and the outputs of a layer that they are part of it.

    Variables of another layer stay as they are.
    """
    pending, stop = list(outputs), set(inputs)
    while pending:
        variable = pending.pop()
        if variable not in stop and variable.owner is not None and layer_of(variable) is None:
            stop.add(variable)
            pending += variable.owner.inputs
            put_in_layer(variable, layer)


def put_in_layer(variable: theano.Variable, layer: str) -> None:
    """Note on a variable that it is part of a layer."""
    traces = traces_of(variable)
    if traces:
        trace = LayerTrace(traces[0])
        trace.layer = layer
        variable.tag.trace = [*traces[:0:-1], trace]


def layer_of(variable: theano.Variable) -> str | None:
    """Return the name of the layer that a variable is part of; None if that is not known."""
    return next((trace.layer for trace in traces_of(variable) if isinstance(trace, LayerTrace) and trace.layer), None)


def nearest_layer(variables: Iterable[theano.Variable], stop: Sequence[theano.Variable] = ()) -> str | None:
    """Return the name of the layer of the nearest op that has made variables, or is part of a fused op that has.

    The ops above those variables at which the search is to stop do not count; None if there is no other.
    """
    traces = (trace for each in _in_breadth(variables, stop) if each not in stop for trace in traces_of(each))
    return next(filter(None, (trace.layer or trace.fused for trace in traces if isinstance(trace, LayerTrace))), None)


def keep_trace(new: Iterable[theano.Variable], old: theano.Variable) -> None:
    """Give variables that stand for an older one its lines, in place of the lines that made them, which are ours."""
    trace = getattr(old.tag, 'trace', None)
    for variable in new:
        if trace and variable is not old:
            variable.tag.trace = trace


def keep_trace_above(new: Iterable[theano.Variable], old: theano.Variable, known: set[theano.Variable]) -> None:
    """Give the lines of a variable to variables that stand for it, and to the ops that were made for them.

    Parameters
    ----------
    known : set of theano.Variable
        The variables that were there before; the new ones are added.
    """
    pending = list(new)
    while pending:
        variable = pending.pop()
        if variable.owner is not None and variable not in known:
            known.add(variable)
            pending += variable.owner.inputs
            if is_ours(variable):
                keep_trace([variable], old)


def line_of(node: theano.Apply) -> str:
    """Return the line in which the user made a node, or one that it reads, as the end of a message; '' for none."""
    above = _in_breadth(node.outputs)
    # A variable without an owner or a name stands for the result of an op elsewhere. Inputs come last.
    computed = [v for v in above if v.owner is not None or v.name is None and not isinstance(v, theano.Constant)]
    return next((' (%s)' % line for line in map(user_line, dict.fromkeys(computed + above)) if line), '')


def is_ours(variable: theano.Variable) -> bool:
    """Return whether code of this package made a variable, be it by calls of Theano or Keras."""
    frames = frames_of(variable)
    return bool(frames) and all(frame[0].startswith(PACKAGE) for frame in frames)


def _in_breadth(variables, stop=()):
    """Return variables and all above, the nearest first, but for those above the ones to stop at."""
    return stack_search(deque(variables), lambda each: each not in stop and each.owner and each.owner.inputs)


class LineFeature(Feature):
    """A feature of a graph that gives each new variable the lines, and the layer, of the variable that it replaces.

    Theano does so in some of its optimisations, but not where it fuses ops or calls BLAS.
    """

    def on_change_input(self, fgraph: Any, node: Any, i: int, r: Any, new_r: Any, reason: Any = None) -> None:
        """Note that a node reads another variable; Theano calls this method."""
        if user_frame(new_r) is None and user_frame(r) is not None or layer_of(new_r) is None and layer_of(r):
            keep_trace([new_r], r)
        op = new_r.owner and new_r.owner.op
        if layer_of(new_r) is None and isinstance(getattr(op, 'scalar_op', None), Composite):
            fused = nearest_layer([r], new_r.owner.inputs)  # the last layer, say, whose op is part of the loss's now
            if fused is not None:
                trace = LayerTrace(*traces_of(r)[:1])
                trace.fused, new_r.tag.trace = fused, [*traces_of(r)[:0:-1], trace]


KEEP_LINES = AddFeatureOptimizer(LineFeature()), -1  # for `Mode.register`: before all other optimisations
