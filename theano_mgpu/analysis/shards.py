"""The graph that replicas compute on their shards of a batch, made from the graph of one device, node by node."""
import functools

import theano.tensor as T
from theano.compile.ops import Shape, Shape_i
from theano.gof.graph import io_toposort
from theano.scan_module.scan_op import Scan
from theano.tensor.elemwise import DimShuffle, Elemwise
from theano.tensor.opt import Assert
from theano.tensor.subtensor import Subtensor

from ..patches.placement_tags import place_of_node, placed_on
from .comparisons import compares
from .op_rules import OpRules
from .reductions import Gather
from .shard_graph import NOT_DIVISIBLE, CannotCut, ShardGraph, merge_axis, split_axis
from .states import BACKWARDS, CONSTANT, FREE, LAST, PARTIAL, REFUSED, ROWS, WHOLE, State, Value, rows

ALLOWED = {BACKWARDS: (Scan, Subtensor, Shape, Shape_i), LAST: (Subtensor,)}
RULES = OpRules()
rule = RULES.rule  # for functions ``(shards, node, values) -> list of Value``


class Shards(ShardGraph):
    """What each replica computes of a graph, and what replicas exchange.

    The given graph is that of one device with the whole batch in mind. Each of its variables becomes a `Value`: rows,
    partial or constant. What needs all of a partial value gets it by an exchange, and lies in a later stage.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those that have samples along axis 0.
    outputs : list of theano.Variable
        Of host variables. Every other leaf is constant.
    exchanged : collection of theano.Variable
        Variables to exchange as soon as they are partial, because something needs their whole value anyway.
    statistics : {'exact', 'local'}
        What batch normalisation normalises by: those of the whole batch, or of the shard.
    streams : collection of SharedVariable
        Random states of which each replica may have one of its own.

    Attributes
    ----------
    outputs : list of Value
        PARTIAL ones are to be reduced, and ROWS to be gathered, by the caller.
    independent : list of SharedVariable
        Those of the streams that each replica draws from for its own samples only.
    """

    def __init__(self, inputs, outputs, exchanged=(), statistics='exact', streams=()):
        self._begin({variable: Value(variable, rows(), 0) for variable in inputs}, exchanged)
        self.statistics, self.streams = statistics, streams
        self._walk(outputs)

    @classmethod
    def of_loop(cls, around, known, outputs, sources, recurrences):
        """The Shards of the graph inside of a loop, whose inputs have known Values.

        `sources` maps an input to the variable of the graph around it that it is made of, and to the number of axes
        that this one has ahead. `recurrences` maps a state to the variable around it that it begins with, and to its
        next values.
        """
        inside = cls.__new__(cls)
        inside._begin(known, (), around.numbers)
        inside.around, inside.sources, inside.recurrences = around, sources, recurrences
        inside._walk(outputs)
        return inside

    def _begin(self, known, exchanged, numbers=None):
        ShardGraph.__init__(self, numbers)
        self._at_once = set(exchanged)
        self.compared = set()     # variables of the new graph that are looked for in other ones, bit by bit
        self._values = {}
        self.kept_partial, self.given_whole = set(), set()  # variables of the given graph
        self._copied = {}         # scaled or reshaped copies of shares, to what they are copies of
        self._copies = {}         # that, to those of its copies that are exchanged
        self.statistics, self.streams = 'exact', ()
        self.independent = []
        self.of_shard = {}        # statistics in the given graph, to Values of those of the shard alone
        self.averages = set()     # variables of the given graph that are made of averages of such statistics
        self._given = {}          # variable of the new graph -> that of the given graph
        self._everywhere.update(value.variable for value in known.values())
        self._known, self.inputs = list(known), set() if numbers else set(known)
        self.around, self.sources, self.recurrences = None, {}, {}  # of the graph inside of a loop, see `of_loop`
        self.loops = {}           # outputs of loops, to the Shards inside, the variable there, and what it begins with
        self.rows_of_each, self.uniform = {}, {}  # what `rules.counts` and `rules.uniform` have found out
        for variable, value in known.items():
            self.keep(variable, value)

    def _walk(self, outputs):
        for node in io_toposort(self._known, list(outputs)):
            with placed_on(place_of_node(node)):
                self._convert(node)
        self.outputs = [self._usable(output) for output in outputs]
        check_limits(None, self.outputs)

    # ---------------------------------------------------------------------------------------- walking the graph

    def value(self, variable):
        """The Value of a variable of the given graph."""
        return self._values.get(variable) or Value(variable, WHOLE, FREE)

    def _usable(self, variable):
        found = self.value(variable)
        if found.kind == REFUSED:
            raise CannotCut(found.state.reason)
        return found

    def keep(self, variable, value):
        """Let a variable of the given graph have this Value."""
        self._values[variable] = value
        if value.kind != REFUSED:
            self.stages.setdefault(value.variable, value.stage)
            self._given.setdefault(value.variable, variable)

    def _convert(self, node):
        try:
            values = self.computed(node, [self._usable(variable) for variable in node.inputs])
        except CannotCut as error:  # it may be unused
            values = [Value(None, State(REFUSED, reason=str(error)), FREE)] * len(node.outputs)
        if any(value.kind == PARTIAL for value in values):
            self._note_shares(node)
        for variable, value in zip(node.outputs, values):
            if value.kind == PARTIAL and variable in self._at_once:
                value = self.whole(value)
            self.keep(variable, value)

    def _note_shares(self, node):
        """Record which inputs remain shares of a sum, and which variable the output is a scaled or reshaped copy of."""
        shares = {variable for variable in node.inputs if self.value(variable).kind == PARTIAL}
        self.kept_partial |= shares
        if len(shares) == 1 and isinstance(node.op, (Elemwise, DimShuffle)):
            share, = shares
            self._copied[node.outputs[0]] = self._copied.get(share, share)

    def exchanged_twice(self):
        """Variables of the given graph that are better exchanged at once.

        These are variables that are needed whole while their shares are used further, and variables of which several
        copies are exchanged.
        """
        return self.kept_partial & self.given_whole | {v for v, copies in self._copies.items() if len(copies) > 1}

    def converted(self, expression):
        """The Value of an expression of variables of the given graph."""
        for node in io_toposort(list(self._values), [expression]):
            self._convert(node)
        return self._usable(expression)

    def computed(self, node, values):
        """The Values of a node's outputs, from those of its inputs, by the rule of its op."""
        check_limits(node.op, values)
        if getattr(node.op, 'destroy_map', None):
            self.refuse(node, 'it writes into what it is given')
        found = RULES.of(node.op)
        if compares(node):
            self.compared.update(value.variable for value in values)
        if not getattr(found, 'reads_averages', False):
            self.check_averages(node, values)
        always = getattr(found, 'for_constants', False)
        if all(value.kind == CONSTANT for value in values) and not always:
            return self.constant(node, values)
        if found is not None:
            return found(self, node, values)
        if any(value.kind == ROWS for value in values):
            self.refuse(node, 'it is not known how %s depends on single samples' % type(node.op).__name__)
        return self.constant(node, [self.whole(value) for value in values])  # an op is a function of its inputs

    def check_averages(self, node, values):
        """Refuse samples that meet the average of what each shard has normalised by: its own is another one."""
        if self.averages.intersection(node.inputs):
            if any(value.kind == ROWS for value in values):
                self.refuse(node, 'samples meet statistics of the whole batch, of which each replica has those of its '
                                  'own samples; flag mgpu.batch_statistics=exact computes them')
            self.averages.update(node.outputs)

    def refuse(self, node, reason):
        """Raise a CannotCut for a node."""
        raise CannotCut(refusal_of(node, reason))

    def check(self, node, reason, variable, *conditions):
        """Return a variable that refuses a batch for this reason where the batch does not meet the conditions."""
        # As one condition: where Theano's optimiser takes away some of several, it takes away the text, too.
        text = NOT_DIVISIBLE + refusal_of(node, reason)
        return Assert(text)(variable, functools.reduce(T.and_, conditions))

    def whole(self, value):
        """The value as a CONSTANT: of a partial one, what all replicas' shares come to."""
        if value.kind == CONSTANT:
            return value
        if value.kind != PARTIAL:
            raise AssertionError('rows are not exchanged')
        given = self.given(value.variable)
        if given is not None:
            self.given_whole.add(given)
            self._copies.setdefault(self._copied.get(given, given), set()).add(given)
        return self.exchange(value, value.state.reduction)

    def gathered(self, value):
        """The value as a CONSTANT: of rows, those of all replicas."""
        axis = value.axis
        if value.state.outer is None:
            return self.exchange(value, Gather(axis))
        apart = self.make(lambda v, blocks: split_axis(v, axis, blocks), [value, self.length(value.state.outer)],
                          rows(axis + 1))
        whole = self.exchange(apart, Gather(axis + 1))
        return self.make(lambda v: merge_axis(v, axis), [whole], whole.state, like=value.variable)

    def given(self, variable):
        """The variable of the given graph that one of the new graph is made for, or None."""
        return self._given.get(variable)


def check_limits(op, values):
    """Refuse what is done with a value by an op, or by the caller if there is none, which only others may do."""
    for value in values:
        if value.state.only and not isinstance(op, ALLOWED[value.state.only]):
            raise CannotCut(value.state.reason)


def refusal_of(node, reason):
    """Return the text of the CannotCut of a node, for a reason."""
    return '%s: %s%s' % (node, reason, _line_of(node))


def _line_of(node):
    """Where the user made a node: the end of a message, or nothing."""
    trace = getattr(node.outputs[0].tag, 'trace', None)
    if not trace:
        return ''
    file, line, _, text = trace[-1][-1] if isinstance(trace[-1], list) else trace[-1]
    return ' (%s, line %s: %s)' % (file, line, text)

