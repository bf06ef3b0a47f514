"""The programs of a `theano.function` of `enable`: one for each way to take its arguments as a batch."""
from ..errors import MgpuError, in_one_line
from ..graphs.own_flags import builds_graphs
from ..plan import CannotCut
from .batch_finder import BatchFinder
from .definition import Refusal

REFUSALS = 6  # ways to take the batch that are analysed


class Programs:
    """The ParallelFunctions of a graph, and the one that computes the usual batch.

    What the first calls show is not held for ever. Where a batch is along other axes than before, or where there is a
    batch for the first time, another program is made for it.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
    make : callable
        ``make(inputs, outputs, updates, **options)`` returns a ParallelFunction.

    Attributes
    ----------
    step : ParallelFunction or None
        The one that was chosen last.
    """

    @builds_graphs
    def __init__(self, inputs, outputs, updates, make):
        self._graph, self._make = (inputs, outputs, updates), make
        self._finder = BatchFinder(inputs, outputs + list(updates.values()), updates)
        self._made, self._refused = {}, set()  # by the key of a Way
        self.step = None

    @property
    def may_divide(self):
        """Whether a later call may have a batch that is divided."""
        return bool(self._finder) and len(self._refused) < REFUSALS

    def is_news(self, args, kwargs):
        """Return whether a call may show a batch that no call before has shown."""
        return self._finder.is_news(args, kwargs, of_slices=self.step is None)

    def choose(self, values):
        """Choose the step of the likeliest batch of a call; keep the present one if there is no other.

        Parameters
        ----------
        values : list
            The values of the inputs.

        Returns
        -------
        bool
            Whether another step was chosen.

        Raises
        ------
        Refusal
            If there is a batch that cannot be divided, and this was not known.
        """
        if self.step is not None:
            ways = list(self._finder.ways(values))
            own = [way.length for way in ways if self._made.get(way.key) is self.step]
            if not own or own[0] == ways[0].length:
                return False
        return self.change(values)

    def change(self, values):
        """Choose the step of a batch that the present one cannot compute, see `choose`."""
        before = self.step
        self.step = self._step_for(values) or before
        return self.step is not before

    def choose_made(self, values):
        """Choose a step that was made for a batch such as this one; return whether it is another one."""
        before = self.step
        made = (self._made[way.key] for way in self._finder.ways(values) if way.key in self._made)
        self.step = next(made, before)
        return self.step is not before

    def whole(self):
        """Make the ParallelFunction that divides no batch."""
        return self._make(*self._graph, samples={}, whole=True)

    def forget_refusals(self):
        """Have what was refused analysed, and refused, again."""
        self._refused.clear()
        self._finder.forget_calls()

    def _step_for(self, values):
        """Return the ParallelFunction for a batch such as this one; None without one, or for a known refusal."""
        refusal = None
        for axes, length, key in self._finder.ways(values):
            if key in self._refused or len(self._refused) >= REFUSALS:
                continue
            try:
                if key not in self._made:
                    self._made[key] = self._make(*self._graph, samples=axes, length=length, example=values,
                                                 must_divide=True)
                return self._made[key]
            except Exception as error:  # a GraphError; or Theano's, of a graph that the analysis does not expect
                refusal = refusal or error
                self._refused.add(key)
        if refusal is None:
            return None
        if isinstance(refusal.__cause__, CannotCut):  # the text says all that the errors before this one do
            raise Refusal('it cannot be computed in parts: %s' % refusal.__cause__) from None
        raise Refusal(str(refusal) if isinstance(refusal, MgpuError) else in_one_line(refusal)) from refusal
