"""How a Keras model runs over contexts: what is known beside the model itself.

A model that has a ParallelState runs over contexts; any other model is plain Keras. `methods` has what differs.
"""
import weakref

from ..devices.context_map import describe
from ..enabling.fallback import FAILED
from ..errors import in_one_line, warn
from .steps import Count

_models = weakref.WeakSet()  # those that have had a ParallelState


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
        Whether a difference from one device is an error.
    continued : bool
        Whether the optimizer has a state to continue with.
    usage : Usage or None
        What counts the batches of functions that are made for the model.
    functions : dict of str to ModelFunction
        What the package has made for the model, by kind: 'train', 'test', 'predict'. The model's own attributes may be
        functions of the user's that call these.
    """

    strict = False

    def __init__(self, name, contexts):
        self.name, self.contexts, self.usage = name, contexts, None
        self.continued = False
        self.functions = {}
        self._refusals = set()  # reasons that the user knows

    def notify(self, text):
        """Tell the user how the model differs from one device: a sentence whose subject, the model's name, is left out.
        """
        warn('%s %s' % (self.name, text))

    def cannot_divide(self, function):
        """Tell the user that functions run on one context, because they cannot be computed in parts; once a reason."""
        if function.refused not in self._refusals:
            self._refusals.add(function.refused)
            self.notify('runs whole on %s, since it cannot be computed in parts: %s'
                        % (describe(function.contexts), function.refused))

    def use_one_replica(self, contexts, error):
        """Have functions that are made from now on run on the contexts of one replica, since a batch is not divisible.
        """
        several, self.contexts = self.contexts, contexts
        self.notify('runs on %s (%s): its batch succeeds as a whole, and with %d contexts %s'
                    % ('one context' if len(contexts) == 1 else 'one replica', describe(self.contexts), len(several),
                       FAILED % in_one_line(error)))

    def compare(self):
        """Compare what each process has computed by itself, before all compute a batch together."""
        for function in self.functions.values():
            function.compare()

    def count_in(self, usage):
        """Have the batches of functions that are made from now on be counted in a Usage."""
        self.usage = usage

    def leaves_all(self):
        """Return whether all batches are left to plain Keras, since dividing them gains nothing."""
        return False

    def steps(self, kind, plain=None):
        """Return the steps of a function that is made for the model, but for the last one, which computes a batch.

        Parameters
        ----------
        kind : {'train', 'test', 'predict'}
        plain : PlainKeras, optional
            What may compute some batches in place of the last step; none where this is plain Keras itself.
        """
        return [] if self.usage is None else [Count(self.usage, kind)]


def parallel_state_of(model):
    """The ParallelState of a model; None for plain Keras."""
    return model.__dict__.get('_mgpu_parallel_state')


def set_parallel_state(model, state):
    """Have a model run over contexts, from its next function on; None for plain Keras."""
    _models.add(model)
    model.__dict__['_mgpu_parallel_state'] = state  # not by setattr: Keras keeps track of a model's attributes


def models_over_contexts():
    """The models of this process that run over contexts, a list."""
    return [model for model in _models if parallel_state_of(model) is not None]
