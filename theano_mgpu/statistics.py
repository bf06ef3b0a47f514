"""Values that depend on a whole batch: the statistics that each replica computes of its samples, and what
is made of them once those of all replicas are put together.
"""
import numpy as np
import theano
import theano.tensor as T
from theano.gof.graph import ancestors
from theano.tensor.nnet.bn import AbstractBatchNormTrain

from . import graph
from .dependence import CONSTANT, COUNT, MEAN, MIXED, ROWS, SIZES, SUM
from .parallel_graph import HOST
from .samples import analyse


def mean_exact(variable, samples, scale):
    """The same expression, made such that the mean over the replicas is the whole batch's value.

    Parameters
    ----------
    variable : theano.Variable
    samples : Analysis
        Of `variable`.
    scale : scalar theano.Variable
        On each replica: samples of the batch / samples of its sub-batch.

    Returns
    -------
    theano.Variable
        Each term that is a sum over samples is multiplied by `scale`: in the mean over replicas,
        which weighs each with its share of the batch, the sums then add up.
    """
    kind = samples.of(variable).kind
    if kind in (SUM, COUNT):
        return (variable * scale).astype(variable.dtype)
    return _rebuilt(variable, lambda v: mean_exact(v, samples, scale)) if kind in (MIXED, SIZES) else variable


def _rebuilt(variable, convert):
    """The variable, computed by the same op from converted inputs."""
    node = variable.owner
    inputs = [convert(v) for v in node.inputs]
    return node.clone_with_new_inputs(inputs, strict=False).outputs[node.outputs.index(variable)]


class BatchUpdates:
    """New values of shared variables that depend on the batch: running averages, counts, recurrent states.

    What the replicas must compute is cut out of each new value: the statistics, which are sums and
    means over samples. The rest, which may be any function of them and of the old values, is computed once,
    on the host, from the statistics of the whole batch. So a running variance is exact by the law
    of total variance, and a count of the samples that were met is an integer.

    Parameters
    ----------
    updates : dict of SharedVariable to theano.Variable
        Of host variables (see `graph.host_graph`).
    carriers : list of theano.Variable
        The inputs that have samples along axis 0.
    uniform : list of theano.Variable
        Those that are expected to have the same value for each sample; see `samples.analyse`.
    mode : str or theano.Mode, optional
        Of the function that runs on the host.

    Attributes
    ----------
    statistics : list of theano.Variable
        What each replica computes.
    reductions : list of {'mean', 'sum', 'first'}
        How those of the replicas are put together.
    rows : dict of SharedVariable to theano.Variable
        New values that have a row a sample, such as the states of a stateful recurrent layer.
    approximate : dict of SharedVariable to list of Coupling
        Those whose new value is not that of the whole batch: what the replicas compute for it mixes samples at these
        couplings. Without any, it is the mean over the replicas for want of a better rule.
    """

    def __init__(self, updates, carriers, uniform=(), mode=None):
        samples = analyse(list(updates.values()), carriers, uniform)
        self.rows = {v: new for v, new in updates.items() if samples.of(new).kind == ROWS}
        if self.rows:
            samples = analyse(list(updates.values()), carriers + list(self.rows), uniform)
        self.updates = {v: new for v, new in updates.items() if v not in self.rows}
        self.statistics, self.reductions, self._symbols = [], [], []
        self._samples = samples
        self._uniform = set(uniform)
        self._mode = mode
        self._memo = {}
        self._doubts = {}  # symbol of a statistic that is not exact -> its couplings
        self._new_values = [_of_type(variable, self._combined(new)) for variable, new in self.updates.items()]
        self.approximate = self._find_approximate()
        self._function = None

    def new_values(self, merged):
        """The new values of `updates`, in their order.

        Parameters
        ----------
        merged : list of ndarray
            The statistics of the whole batch.

        Returns
        -------
        list
        """
        if self._function is None:
            self._function = graph.compile_for(HOST, self._symbols, self._new_values, {}, {}, mode=self._mode,
                                               name='batch_updates')
        return self._function(*merged)

    def _combined(self, variable):
        """The variable as a function of the statistics of the whole batch."""
        if variable not in self._memo:
            self._memo[variable] = self._combine(variable)
        return self._memo[variable]

    def _combine(self, variable):
        kind = self._samples.of(variable).kind
        if variable.owner and not hasattr(variable.type, 'broadcastable'):
            # An index: no function has one as its output.
            return _rebuilt(variable, self._combined)
        if kind == CONSTANT:
            # What is constant for uniform inputs only is a mean where they are not.
            how = 'mean' if self._uniform & set(ancestors([variable])) else 'first'
            return variable if self._is_local(variable) else self._statistic(variable, how)
        if kind == MEAN and not self._moves_on(variable):
            return self._statistic(variable, 'mean')
        if kind in (SUM, COUNT):
            return self._statistic(variable, 'sum')
        if _is_inverse_deviation(variable):
            return self._inverse_deviation(variable)
        if variable.owner and all(self._samples.of(v).kind != ROWS for v in variable.owner.inputs):
            return _rebuilt(variable, self._combined)
        return self._statistic(variable, 'mean', exact=kind == MEAN)

    def _moves_on(self, variable):
        """Whether a mean is one of an old state and something new, so that replicas need not have the state."""
        return any(v in self.updates for v in ancestors([variable]))

    def _is_local(self, variable):
        """Whether the host has what it takes to compute a constant: no weights, which live on the contexts."""
        return not graph.free_inputs([variable]) and set(graph.shared_variables([variable])) <= set(self.updates)

    def _statistic(self, variable, how, exact=True):
        symbol = graph.host_type(variable)()
        couplings = self._couplings_of(variable)
        if couplings or not exact:
            self._doubts[symbol] = couplings
        self.statistics.append(variable)
        self.reductions.append(how)
        self._symbols.append(symbol)
        return symbol

    def _find_approximate(self):
        found = {}
        for variable, new in self.rows.items():
            couplings = self._couplings_of(new)
            if couplings:
                found[variable] = couplings
        for variable, new in zip(self.updates, self._new_values):
            doubts = [self._doubts[v] for v in ancestors([new]) if v in self._doubts]
            if doubts:
                found[variable] = list(dict.fromkeys(sum(doubts, [])))
        return found

    def _couplings_of(self, variable):
        """The couplings that a variable follows from."""
        coupled = {coupling.node: coupling for coupling in self._samples.couplings}
        found, seen, pending = [], set(), [variable] if coupled else []
        while pending:
            variable = pending.pop()
            if variable in seen or variable.owner is None:
                continue
            seen.add(variable)
            node = variable.owner
            # The statistics of batch normalisation are put together exactly; what it has normalised by them is not.
            if node in coupled and not (isinstance(node.op, AbstractBatchNormTrain) and variable in node.outputs[1:3]):
                found.append(coupled[node])
            pending.extend(node.inputs)
        return list(dict.fromkeys(found))  # a node with several outputs is met once for each

    def _inverse_deviation(self, variable):
        """1 / sqrt(variance + epsilon) of a whole batch, from means and deviations of its parts.

        The law of total variance: the variance is the mean of the parts' variances and squared means,
        less the squared mean. In float64, since the difference cancels where means are large.
        """
        mean = variable.owner.outputs[1].astype('float64')
        square = T.inv(T.sqr(variable.astype('float64'))) + T.sqr(mean)
        mean, square = self._statistic(mean, 'mean'), self._statistic(square, 'mean')
        return T.inv(T.sqrt(square - T.sqr(mean))).astype(variable.dtype)


def _is_inverse_deviation(variable):
    return bool(variable.owner) and isinstance(variable.owner.op, AbstractBatchNormTrain) \
        and variable is variable.owner.outputs[2]


def _of_type(variable, value):
    """A new value as a variable of the type of what it updates."""
    if not hasattr(variable.type, 'broadcastable'):
        return value
    return graph.host_type(variable).filter_variable(graph.on_host(theano.tensor.as_tensor_variable(value)))


def partial(values, how, weights):
    """What one process contributes to a statistic: that of its parts of the batch, to be added to others'.

    Parameters
    ----------
    values : list of ndarray
        One a part.
    how : {'mean', 'sum', 'first'}
    weights : list of float
        The parts' shares of the whole batch; for 'first', 1 or 0 for whether the first one counts.

    Returns
    -------
    ndarray
        Of float64 (complex128), or of int64 for a sum of integers.

    Examples
    --------
    >>> partial([np.array(2), np.array(3)], 'sum', [0.5, 0.5])
    array(5)
    """
    kind = values[0].dtype.kind
    dtype = 'complex128' if kind == 'c' else 'float64' if kind == 'f' or how == 'mean' else 'int64'
    if how != 'mean':
        weights = [float(weight > 0) for weight in weights]
    if how == 'first':
        values, weights = values[:1], weights[:1]
    # A part without weight may hold anything, NaN too.
    parts = [np.asarray(value, dtype) * np.asarray(weight, dtype) if weight else np.zeros(value.shape, dtype)
             for value, weight in zip(values, weights)]
    return np.asarray(sum(parts[1:], parts[0]), dtype)
