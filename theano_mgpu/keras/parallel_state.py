"""How a Keras model runs over contexts: what is known of it beside the model itself."""
from ..devices.context_map import describe
from ..errors import warn


class ParallelState:
    """How a model runs over contexts.

    Parameters
    ----------
    name : str
        Of the model.
    contexts : list of Context

    Attributes
    ----------
    strict : bool
        Whether what is not as on one device is an error.
    continued : bool
        Whether its optimizer has a state to go on with.
    """

    strict = False

    def __init__(self, name, contexts):
        self.name, self.contexts = name, contexts
        self.continued = False

    def say(self, text):
        """Tell the user what the model does that is not as on one device: a text that goes on from its name."""
        warn('%s %s' % (self.name, text))

    def cannot_divide(self, function):
        """Tell the user of a function that runs on one context, since it cannot be computed in parts."""
        self.say('runs its %s whole on %s, since it cannot be computed in parts: %s'
                 % (function.options.name, describe(function.contexts), function.refused))

    def use_one_context(self, error):
        """Have the functions that are made from now on run over one context, since a batch could not be divided."""
        several, self.contexts = self.contexts, self.contexts[:1]
        self.say('runs on one context (%s): its batch succeeds there, and fails when divided among %d contexts: %s'
                 % (describe(self.contexts), len(several), error))

    def observe(self, kind, function):
        """Called with each function that is made for the model: 'train', 'test' or 'predict'."""


def parallel_state_of(model):
    """The ParallelState of a model; None where it is left to plain Keras."""
    return model.__dict__.get('_mgpu_parallel_state')


def set_parallel_state(model, state):
    """Have a model run over contexts: from the next `compile` on, or the first prediction without one."""
    model.__dict__['_mgpu_parallel_state'] = state  # not by setattr: Keras keeps track of a model's attributes
