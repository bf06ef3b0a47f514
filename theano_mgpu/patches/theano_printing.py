"""A patch of Theano's Print op: nothing is printed while a computation is repeated to be compared."""
import contextlib
import functools
import threading


class _Muted(threading.local):
    is_on = False


_muted = _Muted()


@contextlib.contextmanager
def muted():
    """A block in which Print ops of this thread print nothing."""
    before, _muted.is_on = _muted.is_on, True
    try:
        yield
    finally:
        _muted.is_on = before


def mute_on_demand():
    """Have `theano.printing.Print` print nothing in a block of `muted`.

    Without this, a Keras model that is verified prints each value of its first batch three times.
    """
    from theano.printing import Print
    original = Print.perform

    @functools.wraps(original)
    def perform(self, node, inputs, output_storage):
        if _muted.is_on:
            output_storage[0][0] = inputs[0]
        else:
            original(self, node, inputs, output_storage)
    Print.perform = perform
