"""The arguments of a function over a batch: which have samples, and how many."""
import numpy as np
import theano

from .errors import BatchError, GraphError
from .scatter_gather import batch_length


class Arguments:
    """Binds the arguments of calls to the inputs of a function.

    Parameters
    ----------
    inputs : list of theano.Variable
    broadcast : list of theano.Variable
        Those that have no samples; scalars have none either.
    allow_downcast : bool, optional
        As for `theano.function`.

    Attributes
    ----------
    split : list of bool
        Which inputs have samples along axis 0.
    """

    def __init__(self, inputs, broadcast=(), allow_downcast=None):
        self.inputs = [check_input(variable) for variable in inputs]
        self.split = split_inputs(self.inputs, broadcast)
        self._allow_downcast = allow_downcast

    @property
    def with_samples(self):
        """The inputs that have samples."""
        return [variable for variable, split in zip(self.inputs, self.split) if split]

    def bind(self, args, kwargs):
        """Arguments in the order of the inputs, each converted to its input's type."""
        names = [str(variable) for variable in self.inputs]
        if len(args) > len(self.inputs):
            raise TypeError('%d arguments were given for the inputs %s' % (len(args), names))
        values = dict(enumerate(args))  # by position: inputs without a name share the text of their type
        for name, value in kwargs.items():
            position = names.index(name) if name in names else None
            if position is None or position in values:
                raise TypeError('%r is %s; the inputs are %s'
                                % (name, 'no input' if position is None else 'given twice', names))
            values[position] = value
        missing = [name for position, name in enumerate(names) if position not in values]
        if missing:
            raise TypeError('no value was given for %s; the inputs are %s' % (', '.join(missing), names))
        return [converted(variable, values[position], self._allow_downcast)
                for position, variable in enumerate(self.inputs)]

    def length(self, values, states):
        """Samples of a batch; a BatchError where its arguments, and states with a row a sample, do not agree.

        Parameters
        ----------
        values : list of ndarray
            As `bind` returns them.
        states : dict of SharedVariable to ndarray
        """
        named = [(value, str(variable)) for value, variable, split in zip(values, self.inputs, self.split) if split]
        named += [(value, 'the state %s' % variable) for variable, value in states.items()]
        return batch_length(*map(list, zip(*named)))

    def first_sample(self, values):
        """The arguments for a batch of the first sample alone."""
        return [np.array(value[:1]) if split else value for value, split in zip(values, self.split)]


def check_input(variable):
    """The Theano variable of an input; a GraphError for `theano.In` and others that cannot be scattered."""
    if isinstance(variable, theano.In):
        raise GraphError('theano.In(%s) is not taken: give the variable itself, and its value at each call'
                         % variable.variable)
    return variable


def split_inputs(inputs, broadcast):
    """For each input, whether its samples are split: all but scalars and those named in `broadcast`."""
    unknown = [variable for variable in broadcast if variable not in inputs]
    if unknown:
        raise GraphError('broadcast names %s, no inputs; the inputs are %s' % (unknown, inputs))
    split = [variable not in set(broadcast) and getattr(variable.type, 'ndim', 1) > 0 for variable in inputs]
    if not any(split):
        raise GraphError('no input has samples to split: %s. A batch needs one at least' % (inputs,))
    return split


def converted(variable, value, allow_downcast):
    """A value as an array of an input's type; a BatchError if it cannot be one."""
    try:
        return variable.type.filter(value, strict=False, allow_downcast=allow_downcast)
    except (TypeError, ValueError) as error:
        raise BatchError('input %s (%s) cannot take what was given: %s'
                         % (variable, variable.type, ' '.join(map(str, error.args)))) from error
