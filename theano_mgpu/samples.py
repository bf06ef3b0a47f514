"""How the variables of a graph depend on the samples of a batch: what replicas compute that see only a part of it."""
from collections import namedtuple

from theano.gof.graph import io_toposort

from .dependence import ACROSS, CONSTANT, COUPLED, NUMBER, PLACES, ROWS, SHIFTED, UNIFORM, Dependence, rows
from .errors import warn
from .sample_rules import outcome

Coupling = namedtuple('Coupling', 'node reason')


def warn_of_couplings(what, couplings):
    """Warn, at the user's line, of what replicas do not compute as one device does; nothing for no couplings."""
    if couplings:
        warn('%s cannot be computed exactly from sub-batches, since parts of it depend on several samples at once: %s. '
             'Each replica computes them of its own sub-batch'
             % (what, '; '.join('%s (%s)' % (c.node, c.reason) for c in couplings)))


def analyse(outputs, inputs, uniform=()):
    """Find how the variables of a graph depend on the samples of a batch.

    Parameters
    ----------
    outputs : list of theano.Variable
        Of host variables, not yet optimised.
    inputs : list of theano.Variable
        Those that have samples along axis 0; all other leaves are constants.
    uniform : list of theano.Variable
        Inputs that have the same value for each sample, such as weights that nobody gave.

    Returns
    -------
    Analysis
    """
    return Analysis(outputs, {variable: rows(filled=CONSTANT if variable in uniform else None) for variable in inputs})


class Analysis:
    """The Dependence of each variable of a graph, and where samples are coupled.

    An abstract interpretation, op by op, by the rules of `sample_rules`.

    Attributes
    ----------
    couplings : list of Coupling
        The nodes at which a replica that sees only a part of the batch computes something else than one
        device with all of it, each with the reason; in topological order. What follows from
        one is not listed again: it is taken as each replica computes it.
    """

    def __init__(self, outputs, known):
        self._found = dict(known)
        self.couplings = []
        for node in io_toposort(list(known), list(outputs)):
            self._found.update(zip(node.outputs, self._outputs_of(node)))
        for output in dict.fromkeys(outputs):
            found = self.of(output)
            if found.kind in (PLACES, NUMBER) or found.filled in ACROSS:
                self._found[output] = self.couple(output.owner)

    def of(self, variable):
        """The Dependence of a variable; CONSTANT for one that the graph does not have."""
        return self._found.get(variable, UNIFORM[CONSTANT])

    def _outputs_of(self, node):
        found = outcome(self, node, [self.of(variable) for variable in node.inputs])
        return [found] * len(node.outputs) if isinstance(found, Dependence) else found

    def _cause(self, node):
        """The node that added a mean to the rows which a node takes; the node itself, if there is none."""
        shifted = [v for v in node.inputs if self.of(v).filled == SHIFTED]
        return self._cause(shifted[0].owner) if shifted else node

    def couple(self, node, reason='mixes samples'):
        """Report a node, unless it only goes on with what was reported; returns what its output is taken for."""
        if any(self.of(v).kind not in (CONSTANT, COUPLED) for v in node.inputs):
            found = Coupling(self._cause(node), reason)
            if found not in self.couplings:
                self.couplings.append(found)
        ndim = getattr(node.outputs[0].type, 'ndim', 0)
        axes = [d.axis for d in map(self.of, node.inputs) if d.kind == ROWS and d.axis < ndim]
        return rows(axes[0]) if axes else UNIFORM[COUPLED]
