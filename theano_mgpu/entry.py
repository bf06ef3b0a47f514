"""Where a batch enters a function: which arguments have samples, and along which axis."""
import itertools

from .data_sets import Slices


class Entry:
    """Finds the samples among the arguments of calls.

    Parameters
    ----------
    inputs : list of theano.Variable
    outputs : list of theano.Variable
        The graph, new values included.
    updated : collection of SharedVariable
    """

    def __init__(self, inputs, outputs, updated):
        self._inputs = inputs
        self._slices = Slices(inputs, outputs, updated)

    def __bool__(self):
        """Whether a batch may enter at all."""
        return bool(self._slices) or any(_ndim(variable) for variable in self._inputs)

    def ways(self, values):
        """Ways to take arguments as a batch, the likeliest one first.

        Any of them is exact if the graph can be divided along it; they differ in what it costs.

        Parameters
        ----------
        values : list of ndarray

        Yields
        ------
        dict of theano.Variable to int, int
            The inputs that have samples, and along which axis; how many samples.
        """
        shapes = [value.shape if _ndim(variable) else () for variable, value in zip(self._inputs, values)]
        sliced = set(self._slices.lengths(values).values())
        seen = []
        for length in _by_cover(sliced, shapes):
            for preferred in (0, 1):
                axes = {variable: _axis(shape, length, preferred) for variable, shape in zip(self._inputs, shapes)}
                axes = {variable: axis for variable, axis in axes.items() if axis is not None}
                if (axes or length in sliced) and (axes, length) not in seen:
                    seen.append((axes, length))
                    yield axes, length


def _by_cover(sliced, shapes):
    """Lengths of two samples or more: those of slices, then those that most arguments have along their first axes."""
    found = dict.fromkeys(sorted(sliced, reverse=True))
    sizes = list(itertools.chain(*[shape[:1] for shape in shapes], *[shape[1:2] for shape in shapes]))
    found.update(dict.fromkeys(sorted(sizes, key=lambda size: -sum(size in shape[:2] for shape in shapes))))
    return [length for length in found if length > 1]


def _axis(shape, length, preferred):
    """The axis, one of the first two, along which an argument has samples; None if it has none."""
    axes = [axis for axis, size in enumerate(shape[:2]) if size == length]
    return preferred if preferred in axes else axes[0] if axes else None


def _ndim(variable):
    return getattr(variable.type, 'ndim', 0)
