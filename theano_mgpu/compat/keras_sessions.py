"""Names of Keras on TensorFlow that scripts call on any back end: sessions, which Theano does not have."""
from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any


class Session(contextlib.ExitStack):
    """A session of TensorFlow, as far as Theano knows one: `run` computes values, and all else changes nothing."""

    def run(self, fetches: Any, feed_dict: Any = None) -> Any:
        """Return the values of a variable or of a list of such.

        Parameters
        ----------
        fetches : variable or list of variables
        feed_dict : dict, optional
            The values of placeholders.
        """
        from keras import backend
        feed, single = feed_dict or {}, not isinstance(fetches, (list, tuple))
        values = backend.function([*feed], [fetches] if single else list(fetches))([*feed.values()])
        return values[0] if single else values

    def as_default(self) -> 'Session':
        """Return the session, a context manager that has nothing to close."""
        return self


def add_sessions(backend: Any) -> None:
    """Give Keras on Theano ``clear_session``, ``get_session`` and the like, which it has on TensorFlow alone."""
    if hasattr(backend, 'clear_session'):
        return  # another back end
    session, learning_phase = Session(), getattr(backend, 'learning_phase', lambda: None)
    of_theano = sys.modules[backend.shape.__module__]
    phase = learning_phase()

    def clear_session():
        """Free the memory of models that nothing refers to, on each device; names of layers begin at 1 again."""
        getattr(backend, 'reset_uids', lambda: None)()
        if phase is not None:
            of_theano._LEARNING_PHASE = phase  # of which set_learning_phase made a number
        gc.collect()  # a model and its functions refer to each other

    def is_symbolic(x):
        """Return whether a value is a variable of Theano."""
        import theano
        return isinstance(x, theano.Variable)

    def set_session(session):
        """Do nothing: Theano has no sessions."""

    def manual_variable_initialization(value):
        """Do nothing: a shared variable has its value from the beginning."""

    names = {'clear_session': clear_session, 'get_session': lambda: session, 'is_symbolic': is_symbolic,
             'set_session': set_session, 'manual_variable_initialization': manual_variable_initialization}
    for name, function in names.items():
        for module in (backend, of_theano):
            vars(module).setdefault(name, function)
