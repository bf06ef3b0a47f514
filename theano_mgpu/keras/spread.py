"""How a Keras model runs over contexts: what is known of it beside the model itself."""
from ..errors import warn


class Spread:
    """How a model runs over contexts.

    Parameters
    ----------
    contexts : list of Context

    Attributes
    ----------
    continued : bool
        Whether its optimizer has a state to go on with.
    inexact_if_weighted : list of (str, str)
        Parts of the model that are exact as long as no sample or class weights are given, see `exactness`.
    """

    def __init__(self, contexts):
        self.contexts = contexts
        self.continued = False
        self.inexact_if_weighted = []

    def say(self, text):
        """Tell the user what is not as on one device."""
        warn(text)

    def observe(self, kind, function):
        """Called with each function that is made for the model: 'train', 'test' or 'predict'."""


def spread_of(model):
    """The Spread of a model; None where it is left to plain Keras."""
    return model.__dict__.get('_mgpu_spread')


def set_spread(model, spread):
    """Have a model run over contexts: from the next `compile` on, or the first prediction without one."""
    model.__dict__['_mgpu_spread'] = spread  # not by setattr: Keras keeps track of a model's attributes
