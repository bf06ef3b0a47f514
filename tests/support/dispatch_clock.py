"""A clock for tests that measure calls: calls on one device, and divided ones, take times that the test chooses."""
from theano_mgpu.auto import choice as module
from theano_mgpu.auto.choice import Chooser, Way

NAMES = {Way.HOST: 'whole', Way.DEVICE: 'first', Way.SEVERAL: 'divided'}


class Clock:
    """A clock that moves only in the calls that a Chooser runs, by some seconds for each way.

    A call of one device takes as long as one of the host, unless `first` says otherwise.

    Attributes
    ----------
    calls : list of str
        How the calls were computed: 'whole' on the host, 'first' on one device, or 'divided'.
    """

    def __init__(self, divided, whole, first=None):
        self._now, self.seconds = 0.0, {Way.SEVERAL: divided, Way.HOST: whole, Way.DEVICE: first or whole}
        self.calls = []

    def perf_counter(self):
        return self._now

    def call(self, way):
        self.calls.append(NAMES[way])
        self._now += self.seconds[way]
        return self.calls[-1], True

    def run(self, chooser, samples, n):
        """Return the ways of n calls with batches of a number of samples."""
        self.calls = []
        for _ in range(n):
            assert chooser.run(samples, self.call) == self.calls[-1]
        return self.calls

    def install(self, setattr):
        """Time the calls of all models and functions by this clock, with `setattr`, or a `MonkeyPatch`'s."""
        original = Chooser.run

        def run(chooser, compute):
            def timed(way):
                self.call(way)
                return compute(way)
            return original(chooser, timed)
        setattr(module, 'time', self)
        setattr(Chooser, 'run', run)
