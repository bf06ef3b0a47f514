"""The arguments of a function over a batch: which have samples, along which axis, and how many."""
from __future__ import annotations

from typing import Any, Collection, Mapping, Sequence

import numpy as np
import theano
from theano.compile import SharedVariable
from theano.gpuarray.type import GpuArrayType

from ...errors import BatchError, GraphError, named
from ...graph.graph import host_type, is_sparse


class Arguments:
    """The inputs of a function, to which the arguments of calls are bound."""

    def __init__(self, inputs: Sequence[Any], axes: Mapping[theano.Variable, int],
                 allow_downcast: bool | None = None) -> None:
        specs = [_input(each) for each in inputs]
        self._variables = [spec.variable for spec in specs]
        self._names = [spec.name or named(spec.variable) for spec in specs]
        self._defaults = {i: spec.value for i, spec in enumerate(specs) if spec.value is not None}
        self.assigned: dict[int, Any] = {}  # values in place of defaults, by position; for one call
        self._axes = [axes.get(variable) for variable in self._variables]
        self._allow_downcast = allow_downcast
        self.split = [axis is not None for axis in self._axes]
        self._sampled = [i for i, split in enumerate(self.split) if split]  # positions
        self.names_of_lengths = [self._names[i] for i in self._sampled]
        # The inputs of replicas have samples along axis 0; the others are expressed by these.
        self.inputs = [host_type(moved(variable, axis, 0))(variable.name) if axis else variable
                       for variable, axis in zip(self._variables, self._axes)]
        self.with_samples = [self.inputs[i] for i in self._sampled]
        self.replacements = {variable: moved(new, 0, axis)
                             for variable, new, axis in zip(self._variables, self.inputs, self._axes) if axis}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return arguments in the order of the inputs, each converted to its input's type, samples along axis 0."""
        if kwargs or len(args) != len(self._variables):
            args = self._completed(args, kwargs)
        try:
            bound = [variable.type.filter(value, False, self._allow_downcast)
                     for variable, value in zip(self._variables, args)]
        except (TypeError, ValueError):  # this raises the error with the name of the input
            bound = [converted(variable, value, self._allow_downcast) for variable, value in zip(self._variables, args)]
        return [np.moveaxis(value, axis, 0) if axis else value for value, axis in zip(bound, self._axes)] \
            if self.replacements else bound

    def _completed(self, args, kwargs):
        if len(args) > len(self._variables):
            raise TypeError('%d arguments were given for the inputs %s' % (len(args), self._names))
        values = dict(enumerate(args))  # by position: inputs without a name share the text of their type
        for name, value in kwargs.items():
            position = self._names.index(name) if name in self._names else None
            if position is None or position in values:
                raise TypeError('%r is %s; the inputs are %s'
                                % (name, 'no input' if position is None else 'given twice', self._names))
            values[position] = value
        values = {**self._defaults, **self.assigned, **values}
        missing = [name for position, name in enumerate(self._names) if position not in values]
        if missing:
            raise TypeError('no value was given for %s; the inputs are %s' % (', '.join(missing), self._names))
        return [values[position] for position in range(len(self._names))]

    def _positions(self, item):
        """Return the positions of inputs that a position, a variable or a name stands for."""
        if isinstance(item, theano.Variable):
            return [i for i, variable in enumerate(self._variables) if variable is item]
        return [i for i, name in enumerate(self._names) if item in (i, name)]

    def position(self, item: Any) -> int:
        """Return the position of an input, for its position, its variable or its name; raise a TypeError for none."""
        positions = self._positions(item)
        if len(positions) != 1:
            raise TypeError('%s is %s; the inputs are %s' % (
                item, 'the name of several inputs' if positions else 'no input', self._names))
        return positions[0]

    def __contains__(self, item: Any) -> bool:
        return len(self._positions(item)) == 1

    def __getitem__(self, item: Any) -> Any:
        """Return the default value of an input in the next call; None if a value has to be given."""
        position = self.position(item)
        value = self.assigned.get(position, self._defaults.get(position))
        return None if value is None else converted(self._variables[position], value, self._allow_downcast)

    def __setitem__(self, item: Any, value: Any) -> None:
        position = self.position(item)
        value = converted(self._variables[position], value, self._allow_downcast)
        if position in self._defaults:
            self.assigned[position] = value

    def lengths(self, values: Sequence[Any]) -> list[int]:
        """Return the number of samples of each argument that has samples."""
        return [values[i].shape[0] for i in self._sampled]


def sample_axes(inputs: Sequence[Any], samples: Mapping[theano.Variable, int] | None = None,
                broadcast: Collection[theano.Variable] = ()) -> dict[theano.Variable, int]:
    """Return the inputs and shared variables that have samples, and along which axis.

    By default all inputs have samples along axis 0, except scalars and those in `broadcast`. A GraphError says where
    `samples` is no mapping or `broadcast` an input, where they name something else than an input, or `samples` than a
    shared variable, or an axis that it does not have.
    """
    variables = [_input(each).variable for each in inputs]
    if samples is not None and not isinstance(samples, Mapping):
        raise GraphError('samples is a dictionary of inputs and the axis of their samples, such as {x: 0}, not %r'
                         % (samples,))
    if isinstance(broadcast, theano.Variable):
        raise GraphError('broadcast is a list of inputs, such as [x], not the input %s itself' % broadcast)
    for keyword, given in (('samples', samples or ()), ('broadcast', broadcast)):
        unknown = [variable for variable in given if variable not in variables and
                   not (keyword == 'samples' and isinstance(variable, SharedVariable))]
        if unknown:
            raise GraphError('%s names %s, no inputs; the inputs are %s' % (keyword, named(unknown), named(variables)))
    if samples is None:
        return {variable: 0 for variable in variables if variable not in broadcast and axes_for_samples(variable)}
    for variable, axis in samples.items():
        if axis not in range(1 if isinstance(variable, SharedVariable) else axes_for_samples(variable)):
            raise GraphError('samples: %s of type %s has no axis %r' % (named(variable), variable.type, axis))
    return dict(samples)


def axes_for_samples(variable: theano.Variable) -> int:
    """Return the number of axes of an input, from the first one on, along which it may have samples.

    >>> import theano.tensor as T
    >>> [axes_for_samples(variable) for variable in (T.dmatrix(), T.dscalar(), theano.gof.generic())]
    [2, 0, 0]
    """
    if isinstance(variable.type, (theano.tensor.TensorType, GpuArrayType)):
        return variable.type.ndim
    return int(is_sparse(variable))  # the rows of a matrix; lists, slices, random states, ... have no samples


def no_samples(inputs: Sequence[theano.Variable]) -> GraphError:
    """Return the error of a function that no batch enters."""
    return GraphError('no input has samples to split: %s. A batch needs one at least, or a slice of a shared data set '
                      'that depends on an input, such as X[index * 20:(index + 1) * 20]' % named(inputs))


def moved(variable: theano.Variable, source: int, target: int) -> theano.Variable:
    """Return a variable with one axis moved, as `numpy.moveaxis`."""
    if source == target:
        return variable
    order = list(range(variable.ndim))
    order.insert(target, order.pop(source))
    return variable.dimshuffle(order)


def _input(spec):
    """Return the theano.In of an input; raise a GraphError for one that cannot be scattered."""
    if not isinstance(spec, theano.In):
        if not isinstance(spec, theano.Variable) or isinstance(spec, (SharedVariable, theano.Constant)):
            raise GraphError('input %r is no plain Theano variable. Shared variables are found in the '
                             'graph by themselves; leave them out of the inputs' % (spec,))
        return theano.In(spec)
    if spec.update is not None or isinstance(spec.value, (SharedVariable, theano.gof.Container)):
        raise GraphError('theano.In(%s) keeps a value from call to call: make it a shared variable, and give its new '
                         'value by updates' % named(spec.variable))
    return spec


def converted(variable: theano.Variable, value: Any, allow_downcast: bool | None) -> Any:
    """Return a value as an array of an input's type; raise a BatchError if it cannot be one."""
    try:
        return variable.type.filter(value, False, allow_downcast)
    except (TypeError, ValueError) as error:
        raise BatchError('input %s (%s) cannot take what was given: %s'
                         % (named(variable), variable.type, ' '.join(map(str, error.args)))) from error
