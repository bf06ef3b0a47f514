"""Finds the batch among the arguments of a function: which arguments have samples, and along which axis."""
import itertools

from ..batches.data_sets import Slices


class BatchFinder:
    """Finds the arguments that have samples.

    Parameters
    ----------
    inputs : list of theano.Variable
    outputs : list of theano.Variable
        The graph, including new values of shared variables.
    updated : collection of SharedVariable
        The shared variables that get new values.
    """

    def __init__(self, inputs, outputs, updated):
        self._inputs = inputs
        self._slices = Slices(inputs, outputs, updated)

    def __bool__(self):
        """Whether the function can have a batch at all."""
        return bool(self._slices) or any(_ndim(variable) for variable in self._inputs)

    def candidates(self, values):
        """Ways to take arguments as a batch, the likeliest one first.

        Each is exact if the graph can be divided that way; they differ in cost.

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
        for length in sorted(sliced, reverse=True) or _most_shared(shapes):
            for preferred in (0, 1):
                axes = {variable: _axis(shape, length, preferred) for variable, shape in zip(self._inputs, shapes)}
                axes = {variable: axis for variable, axis in axes.items() if axis is not None}
                if length > 1 and axes not in seen:
                    seen.append(axes)
                    yield axes, length


def _most_shared(shapes):
    """The lengths that most arguments have along one of their first two axes; lengths of first axes come first."""
    sizes = dict.fromkeys(itertools.chain(*[shape[:1] for shape in shapes], *[shape[1:2] for shape in shapes]))
    shared = {size: sum(size in shape[:2] for shape in shapes) for size in sizes}
    return [size for size in sizes if shared[size] == max(shared.values()) and not _is_of_features(size, shapes)]


def _is_of_features(size, shapes):
    """Whether only one matrix has rows of this length: it is most likely a number of features, not of samples."""
    return [shape[1] for shape in shapes if len(shape) == 2].count(size) == 1 and \
        not any(size in shape[:1] or len(shape) > 2 and size in shape[:2] for shape in shapes)


def _axis(shape, length, preferred):
    """The axis, one of the first two, along which an argument has samples; None if it has none."""
    axes = [axis for axis, size in enumerate(shape[:2]) if size == length]
    return preferred if preferred in axes else axes[0] if axes else None


def _ndim(variable):
    return getattr(variable.type, 'ndim', 0)
