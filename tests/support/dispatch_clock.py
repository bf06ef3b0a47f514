"""A clock for tests of what is measured about batches: whole ones and divided ones take as long as a test wants."""
from theano_mgpu.enabling import dispatch as module
from theano_mgpu.enabling.dispatch import Dispatch


class Clock:
    """Time that passes only in the calls of a Dispatch: some seconds for a divided batch, others for a whole one.

    Attributes
    ----------
    calls : list of str
        How the batches were computed: 'divided' or 'whole'.
    noted : list of int
        For `Dispatch`: below how many samples batches are computed whole.
    """

    def __init__(self, divided, whole):
        self._now, self._seconds = 0.0, {'divided': divided, 'whole': whole}
        self.calls, self.noted = [], []

    def perf_counter(self):
        return self._now

    def call(self, way, inputs):
        self.calls.append(way)
        self._now += self._seconds[way]
        return way, inputs

    def run(self, dispatch, samples, n):
        """The ways of n calls with batches of a number of samples."""
        self.calls = []
        for _ in range(n):
            assert dispatch.run('a batch', samples) == (self.calls[-1], 'a batch')
        return self.calls

    def install(self, setattr):
        """Time the batches of all models by this clock, with `setattr`, or that of a `MonkeyPatch`."""
        def timed(way, run):
            def method(dispatch, inputs):
                self.call(way, inputs)
                return run(dispatch, inputs)
            return method
        setattr(module, 'time', self)
        setattr(Dispatch, 'run_divided', timed('divided', Dispatch.run_divided))
        setattr(Dispatch, '_run_whole', timed('whole', Dispatch._run_whole))
