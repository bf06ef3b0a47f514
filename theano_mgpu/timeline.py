"""Where the time of a step goes: seconds a phase."""
import contextlib
import time

PHASES = ('scatter', 'run', 'fetch', 'all_reduce', 'update')
# Of several processes, each waits for the others, and all add what they have.
RANK_PHASES = ('scatter', 'wait', 'run', 'fetch', 'all_reduce', 'exchange', 'update')


class Timings:
    """Accumulated wall-clock seconds of each phase of a function's calls.

    Parameters
    ----------
    phases : tuple of str

    Attributes
    ----------
    calls : int
    seconds : dict of str to float

    Examples
    --------
    >>> timings = Timings()
    >>> with timings.span('scatter'):
    ...     pass
    >>> list(timings.seconds)
    ['scatter']
    """

    def __init__(self, phases=PHASES):
        self.phases = phases
        self.reset()

    def reset(self):
        """Start again from zero."""
        self.calls = 0
        self.seconds = {}

    @contextlib.contextmanager
    def span(self, phase):
        """Add the time spent inside the ``with`` block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def per_call(self):
        """Seconds a call of each phase, in the order in which a step meets them."""
        return {phase: self.seconds.get(phase, 0.0) / max(self.calls, 1) for phase in self.phases}
