"""Calls that have failed over the contexts: plain Theano, or plain Keras, computes them whole.

Its own error, if it has one, is that of one device. Without one, the error over the contexts was one of dividing.
"""
from ..distributed.activities import AGREE
from ..distributed.failures import failing_together
from ..errors import RankError, is_of_call, noting

FAILED = 'it failed over the contexts: %s'  # why plain Theano or Keras has computed a call


def is_for_plain(error):
    """Return whether plain Theano can say what an error over the contexts is, since it is not one of the ranks."""
    return is_of_call(error) and not isinstance(error, RankError)


def by_plain(compute, failure, ranks):
    """Compute a call that has failed over the contexts, and that has changed nothing.

    Parameters
    ----------
    compute : callable
        Computes the call whole, without arguments.
    failure : Exception
        The error over the contexts. The error of `compute` gets its notes, such as the name of the replica.
    ranks : Communicator
        The processes that make the same call: all have failed if one has.

    Returns
    -------
    object
        What ``compute()`` returns.
    """
    with failing_together(ranks), noting(getattr(failure, '__notes__', ())):
        results = compute()
        ranks.handshake((AGREE,))
    return results
