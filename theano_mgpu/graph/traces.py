"""The lines of the user's script, and the layers of a model, that made the variables of a graph, for messages."""
from __future__ import annotations

import os
import sys
from collections import deque
from typing import Any, Iterable

import theano
from theano.compile.mode import AddFeatureOptimizer
from theano.gof import Feature
from theano.gof.graph import stack_search

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class LayerTrace(list):
    """The lines that made a variable of a layer, with the name of the layer."""

    layer = ''


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
    traces = _traces(variable)
    if traces:
        trace = LayerTrace(traces[0])
        trace.layer = layer
        variable.tag.trace = [*traces[:0:-1], trace]


def layer_of(variable: theano.Variable) -> str | None:
    """Return the name of the layer that a variable is part of; None if that is not known."""
    return next((trace.layer for trace in _traces(variable) if isinstance(trace, LayerTrace)), None)


def nearest_layer(node: theano.Apply) -> str | None:
    """Return the name of the layer of the nearest op above a node; None if there is none."""
    return next((layer for layer in map(layer_of, _in_breadth(node)) if layer is not None), None)


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
    above = _in_breadth(node)
    # A variable without an owner or a name stands for the result of an op elsewhere. Inputs come last.
    computed = [v for v in above if v.owner is not None or v.name is None and not isinstance(v, theano.Constant)]
    for variable in dict.fromkeys(computed + above):
        frame = user_frame(variable)
        if frame is not None:
            file, line, _, text = frame
            return ' (%s, line %s%s)' % (file, line, ': %s' % text if text else '')
    return ''


def user_frame(variable: theano.Variable) -> tuple[str, int, str, str | None] | None:
    """Return the frame of the user's code that made a variable; None where this package or a library made it."""
    frames = map(_outside_libraries, _traces(variable))
    return next((frame for frame in frames if frame is not None and not frame[0].startswith(PACKAGE)), None)


def is_ours(variable: theano.Variable) -> bool:
    """Return whether code of this package made a variable, be it by calls of Theano or Keras."""
    frames = [frame for frame in map(_outside_libraries, _traces(variable)) if frame is not None]
    return bool(frames) and all(frame[0].startswith(PACKAGE) for frame in frames)


def _in_breadth(node):
    """Return the outputs of a node and all variables above, the nearest first."""
    return stack_search(deque(node.outputs), lambda variable: variable.owner and variable.owner.inputs)


def _traces(variable):
    """Return the traces of a variable, the last one first: an optimised variable may have several."""
    trace = getattr(variable.tag, 'trace', None) or []
    return [each for each in reversed(trace) if each] if all(isinstance(each, list) for each in trace) else [trace]


def _outside_libraries(trace: Any) -> Any:
    """Return the innermost frame of a trace that is neither in Theano nor in Keras; None if there is none."""
    libraries = folders('theano', 'keras')
    return next((frame for frame in reversed(trace) if not frame[0].startswith(libraries)), None)


def folders(*packages: str) -> tuple[str, ...]:
    """Return the paths of the folders of imported packages, a tuple of str that end with a separator."""
    files = [getattr(sys.modules.get(package), '__file__', None) for package in packages]
    return tuple(os.path.join(os.path.dirname(file), '') for file in files if file)


class LineFeature(Feature):
    """A feature of a graph that gives each new variable the lines, and the layer, of the variable that it replaces.

    Theano does so in some of its optimisations, but not where it fuses ops or calls BLAS.
    """

    def on_change_input(self, fgraph: Any, node: Any, i: int, r: Any, new_r: Any, reason: Any = None) -> None:
        """Note that a node reads another variable; Theano calls this method."""
        if user_frame(new_r) is None and user_frame(r) is not None or layer_of(new_r) is None and layer_of(r):
            keep_trace([new_r], r)


KEEP_LINES = AddFeatureOptimizer(LineFeature()), -1  # for `Mode.register`: before all other optimisations
