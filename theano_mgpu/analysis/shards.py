"""The graph that replicas compute on their shards of a batch, made from the graph of one device, node by node."""
import theano.tensor as T
from theano.gof.graph import io_toposort
from theano.tensor.elemwise import DimShuffle, Elemwise
from theano.tensor.opt import Assert

from ..errors import GraphError
from .comparisons import compares
from .op_rules import OpRules
from .sizes import size_of
from .states import (
    CONSTANT,
    FREE,
    NUMBER,
    PARTIAL,
    REDUCTIONS,
    REFUSED,
    ROWS,
    WHOLE,
    State,
    Value,
    partial,
    rows,
)

RULES = OpRules()
rule = RULES.rule  # for functions ``(shards, node, values) -> list of Value``


class CannotCut(GraphError):
    """A graph cannot be computed exactly from shards; the text names the op and the reason."""


class Shards:
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
        What is exchanged as soon as it is partial, since somebody needs all of it anyway.
    statistics : {'exact', 'local'}
        What batch normalisation normalises by: those of the whole batch, or of the shard.
    streams : collection of SharedVariable
        Random states of which each replica may have one of its own.

    Attributes
    ----------
    total, own, first : int64 scalar theano.Variable
        Further inputs of the replicas: samples of the whole batch, those of the replica, and the place of the first
        one.
    outputs : list of Value
        PARTIAL ones are to be reduced, and ROWS to be gathered, by the caller.
    exchanges : dict of theano.Variable to (theano.Variable, str or (str, int))
        What stands for the exchanged value, to what each replica gives and how it is reduced, ``('gather', axis)``, or
        'stack'.
    carried : dict of theano.Variable to theano.Variable
        What stands for a value in a later stage, to the value of the stage that computes it.
    independent : list of SharedVariable
        Those of the streams that each replica draws from for its own samples only.
    """

    def __init__(self, inputs, outputs, exchanged=(), statistics='exact', streams=()):
        self._begin({variable: Value(variable, rows(), 0) for variable in inputs}, exchanged)
        self.statistics, self.streams = statistics, streams
        self._walk(outputs)

    @classmethod
    def of_loop(cls, around, known, outputs):
        """The Shards of the graph inside of a loop, whose inputs have known Values."""
        inside = cls.__new__(cls)
        inside._begin(known, (), around.numbers)
        inside._walk(outputs)
        return inside

    def _begin(self, known, exchanged, numbers=None):
        self.numbers = numbers or [T.lscalar(name) for name in ('samples', 'own samples', 'first sample')]
        self.total, self.own, self.first = self.numbers
        self.exchanges, self.carried = {}, {}
        self.stages = {}          # variable of the new graph -> its stage
        self._at_once = set(exchanged)
        self.constants = set()    # variables of the new graph
        self.compared = set()     # variables of the new graph that are looked for in other ones, bit by bit
        self._placeholders = {}   # of both kinds
        self._values = {}
        self.kept_partial, self.given_whole = set(), set()  # variables of the given graph
        self._copied = {}         # scaled or reshaped copies of shares, to what they are copies of
        self._copies = {}         # that, to those of its copies that are exchanged
        self._portion = None      # Value of the replica's portion of the samples
        self.statistics, self.streams = 'exact', ()
        self.independent = []
        self.of_shard = {}        # statistics in the given graph, to Values of those of the shard alone
        self.averages = set()     # variables of the given graph that are made of averages of such statistics
        self._given = {}          # variable of the new graph -> that of the given graph
        self._everywhere = set(self.numbers).union(value.variable for value in known.values())
        self._known, self.inputs = list(known), set() if numbers else set(known)
        for variable, value in known.items():
            self.keep(variable, value)

    def _walk(self, outputs):
        for node in io_toposort(self._known, list(outputs)):
            self._convert(node)
        self.outputs = [self._usable(output) for output in outputs]

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
        except CannotCut as error:  # it may be that nobody needs it
            values = [Value(None, State(REFUSED, reason=str(error)), FREE)] * len(node.outputs)
        if any(value.kind == PARTIAL for value in values):
            self._note_shares(node)
        for variable, value in zip(node.outputs, values):
            if value.kind == PARTIAL and variable in self._at_once:
                value = self.whole(value)
            self.keep(variable, value)

    def _note_shares(self, node):
        """Keep in mind which inputs go on as shares of a sum, and of what the output is a scaled or reshaped copy."""
        shares = {variable for variable in node.inputs if self.value(variable).kind == PARTIAL}
        self.kept_partial |= shares
        if len(shares) == 1 and isinstance(node.op, (Elemwise, DimShuffle)):
            share, = shares
            self._copied[node.outputs[0]] = self._copied.get(share, share)

    def exchanged_twice(self):
        """Variables of the given graph that had better be exchanged at once.

        Those that somebody needs whole, while their shares go on, and those of which several copies are exchanged.
        """
        return self.kept_partial & self.given_whole | {v for v, copies in self._copies.items() if len(copies) > 1}

    def converted(self, expression):
        """The Value of an expression of variables of the given graph."""
        for node in io_toposort(list(self._values), [expression]):
            self._convert(node)
        return self._usable(expression)

    def computed(self, node, values):
        """The Values of a node's outputs, from those of its inputs, by the rule of its op."""
        found = RULES.of(node.op)
        if compares(node):
            self.compared.update(value.variable for value in values)
        if not getattr(found, 'reads_averages', False):
            self.check_averages(node, values)
        always = getattr(found, 'for_constants', False)
        if all(value.kind == CONSTANT for value in values) and not always:
            return self.constant(node, values)
        if found is None:
            self.refuse(node, 'it is not known how %s depends on single samples' % type(node.op).__name__)
        return found(self, node, values)

    def check_averages(self, node, values):
        """Refuse samples that meet the average of what each shard has normalised by: its own is another one."""
        if self.averages.intersection(node.inputs):
            if any(value.kind == ROWS for value in values):
                self.refuse(node, 'samples meet statistics of the whole batch, of which each replica has those of its '
                                  'own samples; flag mgpu.batch_statistics=exact computes them')
            self.averages.update(node.outputs)

    def refuse(self, node, reason):
        raise CannotCut('%s: %s%s' % (node, reason, _line_of(node)))

    def check(self, node, reason, variable, *conditions):
        """A variable that refuses a node for this reason where a batch does not meet the conditions."""
        return Assert('%s: %s%s' % (node, reason, _line_of(node)))(variable, *conditions)

    # ------------------------------------------------------------------------------------------- building nodes

    def constant(self, node, values):
        """The Values of a node of constants, computed whole by every replica."""
        sizes = [value.state.size for value in values]
        size = size_of(node, sizes) if any(size is not None for size in sizes) else None
        return self.apply(node, values, State(CONSTANT, size=size))

    def apply(self, node, values, state):
        """The Values of a node's op on these values, all of one state or each of its own."""
        stage = max([value.stage for value in values], default=FREE)
        inputs = [self.at(value, stage) for value in values]
        if inputs == node.inputs:
            outputs = node.outputs
        else:
            outputs = [_of_type(new, old) for new, old in
                       zip(node.clone_with_new_inputs(inputs, strict=False).outputs, node.outputs)]
        states = state if isinstance(state, list) else [state] * len(outputs)
        return [self._made(variable, each, stage) for variable, each in zip(outputs, states)]

    def make(self, function, values, state, like=None):
        """The Value of ``function(*variables)``; `like` is the variable of the given graph whose type it has."""
        stage = max([value.stage for value in values], default=FREE)
        variable = function(*[self.at(value, stage) for value in values])
        return self._made(variable if like is None else _of_type(variable, like), state, stage)

    def make_all(self, function, values, states):
        """The Values of what a function makes, each of its own state."""
        stage = max([value.stage for value in values], default=FREE)
        return [self._made(variable, state, stage)
                for variable, state in zip(function(*[self.at(value, stage) for value in values]), states)]

    def _made(self, variable, state, stage):
        self.stages.setdefault(variable, stage)
        if state.kind == CONSTANT:
            self.constants.add(variable)
        return Value(variable, state, stage)

    def at(self, value, stage):
        """A variable for a value in a stage: itself, or a placeholder for what an earlier stage has computed."""
        if value.stage in (FREE, stage) or self.is_everywhere(value.variable):
            return value.variable
        key = value.variable, stage
        if key not in self._placeholders:
            placeholder = self._placeholders[key] = value.variable.type(value.variable.name)
            self.carried[placeholder] = value.variable
            self.stages[placeholder] = stage
        return self._placeholders[key]

    def is_everywhere(self, variable):
        """Whether a variable of the new graph is known in each stage."""
        stage = self.stages.get(variable)  # None within an expression that a rule has made
        return variable in self._everywhere or stage == FREE or stage is None and variable.owner is None

    def shaped_like(self, value):
        """A value that may hold other numbers, but has the shape of this one, as early as can be.

        It is rows if this one is, else CONSTANT.
        """
        variable = self._earliest(value.variable)
        state = value.state if value.kind == ROWS else WHOLE
        return Value(variable, state, self.stages.get(variable, value.stage))

    def _earliest(self, variable):
        if variable in self.carried:
            return self._earliest(self.carried[variable])
        if variable in self.exchanges and self.exchanges[variable][1] in REDUCTIONS:
            return self._earliest(self.exchanges[variable][0])
        if variable.owner and isinstance(variable.owner.op, Elemwise):
            alike = [self._earliest(v) for v in variable.owner.inputs if v.broadcastable == variable.broadcastable]
            return min(alike + [variable], key=lambda v: self.stages.get(v, FREE if v.owner is None else 0))
        return variable

    # ------------------------------------------------------------------------------------------------ exchanges

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
        return self.exchange(value, value.state.how)

    def gathered(self, node, value):
        """The value as a CONSTANT: of rows, those of all replicas."""
        if value.state.outer is not None:
            self.refuse(node, 'it needs all samples, which are merged into another axis')
        return self.exchange(value, ('gather', value.axis))

    def stacked(self, value):
        """What each shard has, along a new axis 0 in the order of the samples, as a CONSTANT."""
        return self.exchange(value, 'stack')

    def portions(self):
        """Of the samples of the whole batch, the portion that each shard has: a vector of float64, as a CONSTANT."""
        if self._portion is None:
            self._portion = self._made(self.portion(), WHOLE, 0)
        return self.stacked(self._portion)

    def portion(self):
        """Of the samples of the whole batch, the portion that the replica has."""
        return T.cast(self.own, 'float64') / T.cast(self.total, 'float64')

    def exchange(self, value, how):
        """A CONSTANT made of what all replicas have of a value, reduced or gathered."""
        key = value.variable, how
        if not isinstance(value.variable.type, T.TensorType):
            raise CannotCut('%s: only tensors are exchanged, not %s' % (value.variable, value.variable.type))
        if key not in self._placeholders:
            kind = value.variable.type
            if how == 'stack':
                kind = kind.clone(broadcastable=(False,) + kind.broadcastable)
            placeholder = self._placeholders[key] = kind(value.variable.name)
            self.exchanges[placeholder] = key
            self.stages[placeholder] = value.stage + 1
        placeholder = self._placeholders[key]
        # It, or its length, may depend on the number of samples.
        return Value(placeholder, State(CONSTANT, size=NUMBER), self.stages[placeholder])

    def given(self, variable):
        """The variable of the given graph that one of the new graph is made for, or None."""
        return self._given.get(variable)

    def length(self, variable):
        """The Value of the `outer` length of rows."""
        return Value(variable, WHOLE, self.stages.get(variable, FREE))

    def share(self, value):
        """A CONSTANT as a share of a sum: the replica of the first sample has all of it."""
        return self.make(lambda variable: T.switch(T.eq(self.first, 0), variable, T.zeros_like(variable)), [value],
                         partial(), like=value.variable)

    def cut(self, value, axis, outer=None):
        """The replica's rows of a CONSTANT that has the whole batch along an axis."""
        if outer is not None:
            return self.make(lambda variable, blocks: _cut_inner(variable, axis, blocks, self),
                             [value, self.length(outer)], rows(axis, outer), like=value.variable)

        def cut(variable):
            length = variable.shape[axis]
            each = length // self.total
            # NumPy broadcasts a length of 1 that Theano does not know of.
            stop = T.switch(T.eq(each, 0), length, (self.first + self.own) * each)
            return variable[(slice(None),) * axis + (slice(self.first * each, stop),)]
        return self.make(cut, [value], rows(axis, outer), like=value.variable)


def _cut_inner(variable, axis, outer, shards):
    """The rows of the samples out of an axis that has `outer` blocks of the whole batch, one after the other."""
    shape = [variable.shape[i] for i in range(variable.ndim)]
    each = shape[axis] // outer // shards.total
    blocks = variable.reshape(shape[:axis] + [outer, shape[axis] // outer] + shape[axis + 1:], ndim=variable.ndim + 1)
    cut = blocks[(slice(None),) * (axis + 1) + (slice(shards.first * each, (shards.first + shards.own) * each),)]
    return cut.reshape(shape[:axis] + [outer * each * shards.own] + shape[axis + 1:], ndim=variable.ndim)


def _of_type(new, old):
    """A rebuilt variable with the static lengths of 1 that sizes computed anew do not show."""
    if not isinstance(old.type, T.TensorType) or new.type == old.type:
        return new
    return T.patternbroadcast(new, old.broadcastable) if new.broadcastable != old.broadcastable else new


def _line_of(node):
    """Where the user made a node: the end of a message, or nothing."""
    trace = getattr(node.outputs[0].tag, 'trace', None)
    if not trace:
        return ''
    file, line, _, text = trace[-1][-1] if isinstance(trace[-1], list) else trace[-1]
    return ' (%s, line %s: %s)' % (file, line, text)

