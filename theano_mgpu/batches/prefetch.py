"""The next batch, scattered and sent while the devices compute this one."""
import operator
from collections import namedtuple

from ..replicas.replicated import within_a_step

Prepared = namedtuple('Prepared', 'args values batch')


class LookAhead:
    """Prepares the next batch, if it is known.

    Parameters
    ----------
    prepare : callable
        ``prepare(args)`` returns the values of a call's arguments and the Batch made of them, or None.

    Attributes
    ----------
    next_batch : callable or None
        Gives the arguments of the next call, or None. It runs within a step: no variable may be read.
    """

    def __init__(self, prepare):
        self._prepare = prepare
        self._prepared = None
        self.next_batch = None

    def prepare(self):
        """Prepare the next batch, if it is known."""
        if self.next_batch is None:
            return
        try:
            with within_a_step():
                args = self.next_batch()
            found = None if args is None else self._prepare(args)
            self._prepared = found and Prepared(args, *found)
        except Exception:
            # An error of the next batch (its shape, no room for it on a device) must not undo the current step.
            # Nothing is prepared: the work is done again, and raises the error, when the batch is due.
            self._prepared = None

    def take(self, args, kwargs):
        """What was prepared, if it is of these arguments."""
        prepared, self._prepared = self._prepared, None
        if prepared and not kwargs and len(args) == len(prepared.args) and all(map(operator.is_, args, prepared.args)):
            return prepared
        return None

    def forget(self):
        """Drop the prepared batch, because it will not be used."""
        self._prepared = None


class PeekableBatches:
    """Iterates over batches, as tuples, and can look one ahead; an error of the source is raised in its turn."""

    def __init__(self, batches):
        self._source = (batch if isinstance(batch, (tuple, list)) else (batch,) for batch in batches)
        self._taken = []    # (item, error)

    def peek(self):
        """The next batch; None if there is none."""
        if not self._taken:
            try:
                self._taken.append((next(self._source), None))
            except Exception as error:  # raised by __next__
                self._taken.append((None, error))
        return self._taken[0][0]

    def __iter__(self):
        return self

    def __next__(self):
        self.peek()
        item, error = self._taken.pop()
        if error is not None:
            raise error
        return item
