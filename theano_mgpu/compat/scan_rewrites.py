"""A rewrite of the graphs of Theano's loops: a loop keeps what its gradient needs."""
from __future__ import annotations

from collections import deque
from typing import Any, Collection, Iterator, Sequence

from theano import Constant, Variable, scalar, tensor
from theano.compile.ops import Shape, Shape_i
from theano.gof import Optimizer, toolbox
from theano.gof.graph import io_toposort, stack_search
from theano.scan_module.scan_op import Scan
from theano.scan_module.scan_utils import clone, reconstruct_graph, safe_new
from theano.tensor.elemwise import DimShuffle, Elemwise
from theano.tensor.subtensor import Subtensor

REVERSED = slice(None, None, -1)
# Ops that a gradient computes again: to keep their results would take longer, or as long.
CHEAP = (DimShuffle, Subtensor, Shape, Shape_i, tensor.Reshape, tensor.Rebroadcast, tensor.Alloc,
         tensor.opt.MakeVector, tensor.TensorFromScalar, tensor.ScalarFromTensor)
CHEAP_SCALARS = (scalar.Add, scalar.Sub, scalar.Mul, scalar.TrueDiv, scalar.Neg, scalar.Sqr, scalar.Abs, scalar.Sgn,
                 scalar.Second, scalar.Identity, scalar.Cast, scalar.Switch, scalar.Clip, scalar.Maximum,
                 scalar.Minimum, scalar.LogicalComparison, scalar.BinaryBitOp, scalar.UnaryBitOp, scalar.Inv)


class KeepValues(Optimizer):
    """An optimiser by which the gradient of a loop reads the values that the loop has computed.

    Theano's gradient of a loop is another loop, backwards. It knows the states of the first one only, and computes
    whatever else each step had computed.
    """

    def add_requirements(self, fgraph: Any) -> None:
        """Have the graph check replacements."""
        fgraph.attach_feature(toolbox.ReplaceValidate())

    def apply(self, fgraph: Any) -> None:
        """Give each gradient, and the loop that it is the gradient of, the values that the gradient needs."""
        for node in filter(_can_be_rewritten, fgraph.toposort()):
            for forward in _forward_loops(node):
                inputs, outputs = reconstruct_graph(node.op.inputs, node.op.outputs)
                same = _same_values(node, inputs, outputs, forward)
                wanted = _values_to_keep(inputs, outputs, same, forward.op)
                if wanted:
                    new_forward, kept = _keep(forward, dict.fromkeys(same[x] for x in wanted))
                    sequences = {value: each[::-1][:node.inputs[0]] for value, each in kept.items()}
                    new = _read(node, inputs, outputs, {x: sequences[same[x]] for x in wanted})
                    outer = [each for each in new_forward.outputs if each not in kept.values()]
                    fgraph.replace_all_validate_remove(
                        list(zip(forward.outputs, outer)) + list(zip(node.outputs, new.outputs)),
                        remove=[forward, node], reason='scan_keep_values')
                    break


def _can_be_rewritten(node: Any) -> bool:
    """Return whether a node is a loop on the host that does not end by a condition."""
    return isinstance(node.op, Scan) and not (node.op.as_while or node.op.info['gpua'])


def _forward_loops(node: Any) -> list[Any]:
    """Return the loops that a loop reads backwards."""
    sources = [_source_of_reversed(sequence, node.inputs[0])[0] for sequence in node.op.outer_seqs(node)]
    loops = [source.owner for source in sources if source is not None and source.owner is not None]
    return list(dict.fromkeys(filter(_can_be_rewritten, loops)))


def _source_of_reversed(sequence: Variable, n_steps: Variable) -> tuple[Variable | None, int, int]:
    """Return the source of a sequence that L_op of `Scan` has reversed, and how many elements it leaves out."""
    base, index = _sliced(sequence)
    if base is None or index.start is not None or index.step is not None or not _is_same_scalar(index.stop, n_steps):
        return None, 0, 0
    base, after, before = _cut(base)  # x[::-1][:-1]
    base, index = _sliced(base)
    if index != REVERSED:
        return None, 0, 0
    source, first, last = _source_of_cut(base)
    return source, before + first, after + last


def _source_of_cut(x: Variable) -> tuple[Variable, int, int]:
    """Return the output of a loop that a variable is a part of, and how many elements it leaves out; else itself."""
    cut = _cut(x)
    return cut if cut[0].owner is not None and isinstance(cut[0].owner.op, Scan) else (x, 0, 0)


def _cut(x: Variable) -> tuple[Variable, int, int]:
    """Return the source of a slice, and how many elements it leaves out at the beginning and the end; else itself."""
    source, index = _sliced(x)
    if source is not None and index.step in (None, 1):
        start, stop = 0 if index.start is None else index.start, index.stop
        if isinstance(start, int) and start >= 0 and (stop is None or isinstance(stop, int) and stop < 0):
            return source, start, -(stop or 0)
    return x, 0, 0


def _sliced(x: Variable) -> tuple[Any, Any]:
    """Return the source of a slice along the first axis, and the slice; else None, None."""
    if x.owner is not None and isinstance(x.owner.op, Subtensor) and len(x.owner.op.idx_list) == 1:
        index, = x.owner.op.get_constant_idx(x.owner.inputs, allow_partial=True)
        if isinstance(index, slice):
            return x.owner.inputs[0], slice(*(each if each is None or isinstance(each, Variable) else int(each)
                                              for each in (index.start, index.stop, index.step)))
    return None, None


def _is_same_scalar(x: Any, tensor_variable: Variable) -> bool:
    """Return whether an element of a slice is the value of a tensor."""
    return isinstance(x, Variable) and x.owner is not None and isinstance(x.owner.op, tensor.ScalarFromTensor) and \
        x.owner.inputs[0] is tensor_variable


def _same_values(node: Any, inputs: Sequence[Any], outputs: Sequence[Any], forward: Any) -> dict[Any, Any]:
    """Return the variables of a step that have values of the same step of another loop, with the variables there."""
    known, values = _values_of_steps(forward)
    same = {x: known[outer] for x, outer in zip(node.op.inner_non_seqs(inputs), node.op.outer_non_seqs(node))
            if outer in known}
    for x, sequence in zip(node.op.inner_seqs(inputs), node.op.outer_seqs(node)):
        value = known.get(_source_of_reversed(sequence, node.inputs[0]))
        if value is not None and value.type == x.type:
            same[x] = value
    for step in io_toposort(inputs, outputs):
        found = values.get(_key_of(step, same))
        if found is not None:
            same.update(zip(step.outputs, found))
    return same


def _values_of_steps(node: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the variables of a step twice: by the variables outside of the loop, and by their ops and inputs."""
    op = node.op
    first: dict[Any, Any] = {}
    known = {outer: x for x, outer in zip(op.inner_non_seqs(op.inputs), op.outer_non_seqs(node))}
    known.update({_source_of_cut(outer): x for x, outer in zip(op.inner_seqs(op.inputs), op.outer_seqs(node))})
    values: dict[Any, Any] = {}
    for step in io_toposort(op.inputs, op.outputs):
        first.update(zip(step.outputs, values.setdefault(_key_of(step, first), step.outputs) or ()))
    for outer, taps, states, output in _states_of(node):
        length = -min(taps, default=0)
        known.update({(outer, length + tap, -tap): state for tap, state in zip(taps, states)})
        known[outer, length, 0] = first.get(output, output)
    return known, values


def _states_of(node: Any) -> Iterator[tuple[Any, Sequence[int], Sequence[Any], Any]]:
    """Yield each output of a loop, the taps of its state, their variables, and the variable of the new value."""
    op = node.op
    states = iter(op.inner_mitsot(op.inputs) + op.inner_sitsot(op.inputs))
    taps = op.mitsot_taps() + [[-1]] * op.n_sit_sot + [[]] * op.n_nit_sot
    outer = op.outer_mitsot_outs(node) + op.outer_sitsot_outs(node) + op.outer_nitsot_outs(node)
    inner = op.inner_mitsot_outs(op.outputs) + op.inner_sitsot_outs(op.outputs) + op.inner_nitsot_outs(op.outputs)
    for each, its_taps, new in zip(outer, taps, inner):
        yield each, its_taps, [next(states) for _ in its_taps], new


def _key_of(node: Any, same: dict[Any, Any]) -> Any:
    """Return an op and its inputs, as a key: constants by their values, variables as `same` has them."""
    return node.op, tuple(x.signature() if isinstance(x, Constant) else same.get(x, x) for x in node.inputs)


def _needed(outputs: Sequence[Any], given: Any) -> list[Any]:
    """Return the variables whose values are needed for outputs, in the order of a search: none above one of `given`."""
    def read_for(x):
        is_known = x.owner is None or x in given
        return [] if is_known else [y for i, y in enumerate(x.owner.inputs) if not _is_for_its_shape(x.owner.op, i)]
    return stack_search(deque(outputs), read_for, 'dfs')


def _is_for_its_shape(op: Any, i: int) -> bool:
    """Return whether an op needs the shape of an input only."""
    return isinstance(op, (Shape, Shape_i)) or \
        isinstance(op, Elemwise) and isinstance(op.scalar_op, scalar.Second) and i == 0


def _values_to_keep(inputs: Sequence[Any], outputs: Sequence[Any], same: dict[Any, Any], forward: Scan) -> list[Any]:
    """Return the variables of a step that it shall read instead of computing them.

    A value with more axes than all that the other loop reads and returns is computed again: it may not fit into memory
    for all steps.
    """
    wanted = set(_needed(outputs, same)) & same.keys() - set(inputs)
    ndim = max(x.ndim for x in forward.inner_seqs(forward.inputs) + list(forward.outputs) if hasattr(x, 'ndim'))
    kept: dict[Any, None] = {}
    for node in io_toposort(inputs, outputs):
        for x in node.outputs:
            if x in wanted and isinstance(x.type, tensor.TensorType) and x.ndim <= ndim and \
                    any(y.owner and not _is_cheap(y.owner.op) for y in _needed([x], kept) if y not in kept):
                kept[x] = None
    return list(kept)


def _is_cheap(op: Any) -> bool:
    """Return whether an op takes no longer than it takes to read its result from memory."""
    return isinstance(op, CHEAP) or isinstance(op, Elemwise) and isinstance(op.scalar_op, CHEAP_SCALARS)


def _keep(node: Any, values: Collection[Any]) -> tuple[Any, dict[Any, Any]]:
    """Return a loop with further outputs, and these outputs: the values of some variables in each step."""
    op, n = node.op, len(values)
    before, outer = len(op.outputs) - op.n_shared_outs, len(node.inputs) - len(op.outer_non_seqs(node))
    inputs, outputs = reconstruct_graph(op.inputs, [*op.outputs[:before], *values, *op.outputs[before:]])
    info = dict(op.info, n_nit_sot=op.n_nit_sot + n)
    new = Scan(inputs, outputs, type(op.info)(info)).make_node(
        *node.inputs[:outer], *[node.inputs[0]] * n, *node.inputs[outer:])
    end = len(node.outputs) - op.n_shared_outs
    return new, dict(zip(values, new.outputs[end:end + n]))


def _read(node: Any, inputs: Sequence[Any], outputs: Sequence[Any], sequences: dict[Any, Any]) -> Any:
    """Return a loop that reads the values of some variables of a step from further sequences."""
    new = {sequence: safe_new(x, '_read') for x, sequence in sequences.items()}
    info = dict(node.op.info, n_seqs=node.op.n_seqs + len(new))
    # Else Theano would compute 1 - x, say, for all steps before the loop. It removes Rebroadcast when it compiles.
    reading = {sequence: tensor.Rebroadcast()(x) for sequence, x in new.items()}
    outputs = clone(list(outputs), replace={x: reading[sequence] for x, sequence in sequences.items()})
    return Scan(list(new.values()) + list(inputs), outputs, type(node.op.info)(info)).make_node(
        node.inputs[0], *new, *node.inputs[1:])
