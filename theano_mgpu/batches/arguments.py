"""The arguments of a function over a batch: which have samples, along which axis, and how many."""

import numpy as np
import theano
from theano.compile import SharedVariable
from theano.gpuarray.type import GpuArrayType

from ..errors import BatchError, GraphError
from ..graphs.graph import host_type, is_sparse


class Arguments:
    """Binds the arguments of calls to the inputs of a function.

    Parameters
    ----------
    inputs : list of (theano.Variable or theano.In)
    axes : dict of theano.Variable to int
        Those that have samples, and along which axis; see `sample_axes`.
    allow_downcast : bool, optional
        As for `theano.function`.

    Attributes
    ----------
    inputs : list of theano.Variable
        What replicas take. Samples are along axis 0 of each that has samples.
    split : list of bool
        Which inputs have samples.
    replacements : dict of theano.Variable to theano.Variable
        Inputs as they were given, where samples are along another axis, as expressions of `inputs`.
    """

    def __init__(self, inputs, axes, allow_downcast=None):
        given = [_input(each) for each in inputs]
        self._given = [each.variable for each in given]
        self._names = [each.name or str(each.variable) for each in given]
        self._defaults = {i: each.value for i, each in enumerate(given) if each.value is not None}
        self._assigned = {}  # in place of defaults, for the next call
        self._axes = [axes.get(variable) for variable in self._given]
        self._allow_downcast = allow_downcast
        self.split = [axis is not None for axis in self._axes]
        self.inputs = [_samples_first(variable, axis) if axis else variable
                       for variable, axis in zip(self._given, self._axes)]
        self.replacements = {variable: moved(new, 0, axis)
                             for variable, new, axis in zip(self._given, self.inputs, self._axes) if axis}

    @property
    def with_samples(self):
        """The inputs that have samples."""
        return [variable for variable, split in zip(self.inputs, self.split) if split]

    def bind(self, args, kwargs):
        """Arguments in the order of the inputs, each converted to its input's type, samples along axis 0."""
        if len(args) > len(self._given):
            raise TypeError('%d arguments were given for the inputs %s' % (len(args), self._names))
        values = dict(enumerate(args))  # by position: inputs without a name share the text of their type
        for name, value in kwargs.items():
            position = self._names.index(name) if name in self._names else None
            if position is None or position in values:
                raise TypeError('%r is %s; the inputs are %s'
                                % (name, 'no input' if position is None else 'given twice', self._names))
            values[position] = value
        values = {**self._defaults, **self._assigned, **values}
        missing = [name for position, name in enumerate(self._names) if position not in values]
        if missing:
            raise TypeError('no value was given for %s; the inputs are %s' % (', '.join(missing), self._names))
        bound = [converted(variable, values[position], self._allow_downcast)
                 for position, variable in enumerate(self._given)]
        return [np.moveaxis(value, axis, 0) if axis else value for value, axis in zip(bound, self._axes)]

    def position(self, item):
        """The position of an input that is given by its position, its variable or its name; a TypeError for none."""
        if isinstance(item, theano.Variable):
            positions = [i for i, variable in enumerate(self._given) if variable is item]
        else:
            positions = [i for i, name in enumerate(self._names) if item in (i, name)]
        if len(positions) != 1:
            raise TypeError('%s is %s; the inputs are %s' % (
                item, 'the name of several inputs' if positions else 'no input', self._names))
        return positions[0]

    def __getitem__(self, item):
        """The value that an input has in the next call, if it is not given; None if it has to be."""
        position = self.position(item)
        value = self._assigned.get(position, self._defaults.get(position))
        return None if value is None else converted(self._given[position], value, self._allow_downcast)

    def __setitem__(self, item, value):
        """Give an input with a default another value for the next call."""
        position = self.position(item)
        value = converted(self._given[position], value, self._allow_downcast)
        if position in self._defaults:
            self._assigned[position] = value

    def forget_assigned(self):
        """Have the defaults count again, after a call."""
        self._assigned.clear()

    def named(self, values):
        """The number of samples, and the name, of each argument that has samples."""
        return [(value.shape[0], name) for value, name, split in zip(values, self._names, self.split) if split]

    def first_sample(self, values):
        """The arguments for a batch of the first sample alone."""
        return [value[:1].copy() if split else value for value, split in zip(values, self.split)]


def sample_axes(inputs, samples=None, broadcast=()):
    """Which inputs have samples, and along which axis.

    Parameters
    ----------
    inputs : list of (theano.Variable or theano.In)
    samples : dict of theano.Variable to int, optional
        Those that have, by variable. By default all but scalars and those named in `broadcast`, along axis 0.
    broadcast : list of theano.Variable

    Returns
    -------
    dict of theano.Variable to int

    Raises
    ------
    GraphError
        If they name something else than an input, or an axis that it does not have.
    """
    variables = [_input(each).variable for each in inputs]
    for what, named in (('samples', samples or ()), ('broadcast', broadcast)):
        unknown = [variable for variable in named if variable not in variables]
        if unknown:
            raise GraphError('%s names %s, no inputs; the inputs are %s' % (what, unknown, variables))
    if samples is None:
        whole = set(broadcast)
        return {variable: 0 for variable in variables
                if variable not in whole and axes_for_samples(variable)}
    for variable, axis in samples.items():
        if axis not in range(axes_for_samples(variable)):
            raise GraphError('samples=%r: %s of type %s has no axis %r' % (samples, variable, variable.type, axis))
    return dict(samples)


def axes_for_samples(variable):
    """Return the number of axes of an input, from the first one on, along which it may have samples.

    Examples
    --------
    >>> import theano.tensor as T
    >>> [axes_for_samples(variable) for variable in (T.dmatrix(), T.dscalar(), theano.gof.generic())]
    [2, 0, 0]
    """
    if isinstance(variable.type, (theano.tensor.TensorType, GpuArrayType)):
        return variable.type.ndim
    return int(is_sparse(variable))  # the rows of a matrix; lists, slices, random states, ... have no samples


def no_samples(inputs):
    """The GraphError of a function that no batch enters."""
    return GraphError('no input has samples to split: %s. A batch needs one at least, or a slice of a shared data set '
                      'that depends on an input, such as X[index * 20:(index + 1) * 20]' % (inputs,))


def moved(variable, source, target):
    """A variable with one axis moved, as `numpy.moveaxis`."""
    order = list(range(variable.ndim))
    order.insert(target, order.pop(source))
    return variable.dimshuffle(order)


def _samples_first(variable, axis):
    """An input for the values of another one with the axis of the samples moved to the front."""
    return host_type(moved(variable, axis, 0))(variable.name)


def _input(given):
    """The theano.In of an input; a GraphError for one that cannot be scattered."""
    if not isinstance(given, theano.In):
        return theano.In(check_input(given))
    if given.update is not None or isinstance(given.value, (SharedVariable, theano.gof.Container)):
        raise GraphError('theano.In(%s) keeps a value from call to call: make it a shared variable, and give its new '
                         'value by updates' % given.variable)
    return given


def check_input(variable):
    """The Theano variable of an input; a GraphError for what is none."""
    if not isinstance(variable, theano.Variable) or isinstance(variable, (SharedVariable, theano.Constant)):
        raise GraphError('input %r is no plain Theano variable. Shared variables are found in the '
                         'graph by themselves; leave them out of the inputs' % (variable,))
    return variable


def converted(variable, value, allow_downcast):
    """A value as an array of an input's type; a BatchError if it cannot be one."""
    try:
        return variable.type.filter(value, strict=False, allow_downcast=allow_downcast)
    except (TypeError, ValueError) as error:
        raise BatchError('input %s (%s) cannot take what was given: %s'
                         % (variable, variable.type, ' '.join(map(str, error.args)))) from error
