"""The nodes of a compiled function, by when they run around a CUDA graph."""
from __future__ import annotations

from typing import Any, Collection, Sequence

import theano
from theano.gof.link import gc_helper
from theano.gpuarray.basic_ops import GpuFromHost
from theano.gpuarray.type import GpuArrayType

from ..errors import named
from ..graph.audit import OF_THEANO

BEFORE, DEVICE, AFTER = 'before', 'device', 'after'


class NodeOrder:
    """The order in which the nodes of a function run; `why_not` says why they cannot be run so.

    Parameters
    ----------
    nodes, thunks : list
        Of the function, in a right order.
    outputs : list of Variable
    changing : set of Variable
        Inputs on the host that may have another value in each call. The other values of the host, which depend on
        shapes alone, are the same in each call of a graph.

    Attributes
    ----------
    nodes : dict of str to list of (node, thunk)
        `BEFORE`: nodes that compute values of the host from changing ones. `DEVICE`: nodes of the device, and nodes of
        the host that depend on shapes alone. `AFTER`: nodes that read from the device, and all that take their results.
    copies : set of Apply
        Nodes of `DEVICE` that copy changing values to the device.
    numbers : list of Variable
        Changing values that nodes of `DEVICE` take as they are, such as a factor of a product: a graph has them for
        good.
    saved : set of Variable
        Values of `BEFORE` on which its nodes work in place, and which later nodes take.
    kept : list of Variable
        Values on the device that are outputs, or that nodes of `AFTER` take.
    fixed : list of Variable
        Values of the host that depend on shapes alone, and are outputs, or that nodes of `AFTER` take.
    ended : list of list of Variable
        Values that no node of `DEVICE` takes after the one of the same number.
    """

    def __init__(self, nodes: Sequence[theano.Apply], thunks: Sequence[Any], outputs: Sequence[theano.Variable],
                 changing: Collection[theano.Variable]) -> None:
        self.copies: set[theano.Apply] = set()
        self.numbers: list[theano.Variable] = []
        self.saved: set[theano.Variable] = set()
        self.why_not = ''
        when: dict[Any, str | None] = dict.fromkeys(changing, BEFORE)  # None for what depends on shapes alone
        times: dict[theano.Apply, str] = {}
        roots: dict[Any, Any] = {}  # the values in whose memory others lie
        read_after = set()  # such values that nodes of `AFTER` take
        for node, thunk in zip(nodes, thunks):
            if getattr(thunk, 'lazy', False):
                self._refuse('%s computes one of several values' % named(node.op))
            if not type(node.op).__module__.startswith(OF_THEANO):
                self._refuse("%s is not one of Theano's ops" % named(node.op))
            taken = [roots.get(variable, variable) for variable in node.inputs]
            destroyed, viewed = [_places(node, each) for each in ('destroy_map', 'view_map')]
            if any(taken[i] in read_after for i in destroyed.values()):
                times[node] = AFTER  # it works in place on a value that a node of `AFTER` takes before it
            else:
                times[node] = self._time(node, when)
            if times[node] == AFTER:
                read_after.update(taken)
            roots.update((node.outputs[output], taken[i]) for output, i in [*destroyed.items(), *viewed.items()])
            when.update((output, DEVICE if on_device(output) and times[node] == DEVICE else
                         None if times[node] == DEVICE else times[node]) for output in node.outputs)
        self._add_shapes(times, when)
        self.nodes = {time: [(node, thunk) for node, thunk in zip(nodes, thunks) if times[node] == time]
                      for time in (BEFORE, DEVICE, AFTER)}
        self._find_destroyed(times, roots)
        taken = list(dict.fromkeys([*outputs, *(each for node, _ in self.nodes[AFTER] for each in node.inputs)]))
        self.kept = [each for each in taken if each.owner is not None and when.get(each) == DEVICE]
        self.fixed = [each for each in taken if each.owner is not None and when[each] is None]
        made, last = gc_helper([node for node, _ in self.nodes[DEVICE]])
        stays = {*self.kept, *self.fixed}
        self.ended = [[each for each in {*node.inputs, *node.outputs} if each in made and each not in stays and
                       last.get(each, node) is node] for node, _ in self.nodes[DEVICE]]

    def _time(self, node, when):
        inputs = [when.get(variable) for variable in node.inputs]
        if AFTER in inputs:
            return AFTER
        if any(map(on_device, node.outputs)):
            if isinstance(node.op, GpuFromHost) and BEFORE in inputs:
                self.copies.add(node)
            else:
                self.numbers += [variable for variable, time in zip(node.inputs, inputs) if time == BEFORE]
            return DEVICE
        reads = any(map(on_device, node.inputs)) and type(node.op).__name__ not in ('Shape', 'Shape_i')
        return AFTER if reads else BEFORE if BEFORE in inputs else DEVICE

    def _add_shapes(self, times, when):
        """Add the nodes of the host to `BEFORE` whose results, which depend on shapes alone, its nodes take."""
        for node in reversed(list(times)):
            if times[node] != BEFORE:
                continue
            for made in [each.owner for each in node.inputs if each.owner is not None and times[each.owner] == DEVICE]:
                if any(when.get(each) == DEVICE for each in made.inputs):
                    self._refuse('%s takes the shape of a value on the device' % named(node.op))
                times[made] = BEFORE

    def _find_destroyed(self, times, roots):
        """Find values of `BEFORE` that its nodes work on in place, maybe through a view, and that others take."""
        destroyed = {roots.get(node.inputs[i], node.inputs[i]) for node, time in times.items() if time == BEFORE
                     for i in _places(node, 'destroy_map').values()}
        for variable in [variable for node, time in times.items() if time == BEFORE for variable in node.outputs]:
            clients = {client == 'output' or times[client] for client, _ in variable.clients}
            if roots.get(variable, variable) in destroyed and clients - {BEFORE}:
                self.saved.add(variable)

    def _refuse(self, why):
        self.why_not = self.why_not or why


def on_device(variable: theano.Variable) -> bool:
    """Return whether the values of a variable are on a device."""
    return isinstance(variable.type, GpuArrayType)


def _places(node, kind):
    """Return in whose memory outputs lie: numbers of inputs, by numbers of outputs."""
    return {output: inputs[0] for output, inputs in getattr(node.op, kind, {}).items() if inputs}
