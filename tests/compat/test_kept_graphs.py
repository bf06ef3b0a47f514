"""Optimised graphs on disk: the same results, nothing optimised twice, and nothing taken that is not the same."""
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.gof.opt import Optimizer
from theano.sandbox.rng_mrg import MRG_RandomStreams

import theano_mgpu as mgpu
from theano_mgpu.compat import kept_graphs

PY = theano.Mode('py', 'fast_run')


@pytest.fixture
def optimised(monkeypatch, tmp_path):
    """The numbers of nodes of the graphs that are optimised; all are kept, in a new folder."""
    nodes, call = [], Optimizer.__call__

    def counted(self, fgraph):
        nodes.append(len(fgraph.apply_nodes))
        return call(self, fgraph)
    monkeypatch.setattr(Optimizer, '__call__', counted)
    monkeypatch.setattr(kept_graphs, 'FOLDER', str(tmp_path))
    monkeypatch.setattr(kept_graphs, 'WORTH', 0)
    monkeypatch.setattr(theano.config.mgpu, 'keep_graphs', 'True')
    return nodes


def run_twice(make, optimised):
    """Make a function twice, and call both; return the two functions, of which only the first was optimised."""
    first = make()
    n_optimised = len(optimised)
    assert n_optimised
    second = make()
    assert len(optimised) == n_optimised
    return first, second


# ------------------------------------------------------------------------------------------------- the same results


def trained():
    x, w, b = T.matrix('x'), theano.shared(np.ones((3, 3)), 'w'), theano.shared(np.zeros(3), 'b')
    loss = (T.nnet.softmax(T.tanh(x.dot(w) + b)) ** 2).mean()
    return [x], [loss, w], [(each, each - 0.1 * T.grad(loss, each)) for each in (w, b)]


def drawn():
    x, random = T.matrix('x'), MRG_RandomStreams(7)
    return [x], [x * random.normal((2, 3)), random.uniform((4,))], None


def drawn_by_numpy():
    x, random = T.matrix('x'), T.shared_randomstreams.RandomStreams(7)
    return [x], [x * random.normal((2, 3)), random.permutation((2,), 5)], None


def scanned():
    x, w = T.matrix('x'), theano.shared(np.full((3, 3), 0.3), 'w')
    states, _ = theano.scan(lambda row, state: T.tanh(row + state.dot(w)), [x], T.zeros(3, x.dtype))
    return [x], [states], [(w, w - T.grad(states[-1].sum(), w))]


def chosen():
    x = T.matrix('x')
    return [x], [theano.ifelse.ifelse(T.gt(x.sum(), 1), x * 2, x + 1), T.constant(3.0), x, x.T], None


def indexed():
    x, table = T.matrix('x'), theano.shared(np.arange(12.0).reshape(6, 2), 'table')
    rows = T.cast(x[0], 'int32')
    return [x], [table[rows], T.sort(x, 1), x[:, ::-1].sum(0)], [(table, T.inc_subtensor(table[rows], 1))]


@pytest.mark.parametrize('graph', [trained, drawn, drawn_by_numpy, scanned, chosen, indexed])
def test_the_results_are_the_same_to_the_bit(graph, optimised):
    def make():
        inputs, outputs, updates = graph()
        return theano.function(inputs, outputs, updates=updates, mode=PY)
    first, second = run_twice(make, optimised)
    assert theano.printing.debugprint(first, file='str') == theano.printing.debugprint(second, file='str')
    x = np.arange(6, dtype=theano.config.floatX).reshape(2, 3)
    for _ in range(3):
        for one, other in zip(first(x), second(x)):
            assert (one == other).all()
    for one, other in zip(first.get_shared(), second.get_shared()):
        assert str(one.get_value()) == str(other.get_value())
