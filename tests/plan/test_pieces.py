"""Stages are cut into as few pieces as the devices of a placed graph allow."""
import contextlib

import theano_mgpu as mgpu
from theano_mgpu.devices.mesh import Mesh, mesh_of
from theano_mgpu.plan.instructions import Launch
from theano_mgpu.runtime.replicas.replicated import replicated
from theano_mgpu.runtime.step_run import StepRun

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.small_models import momentum


def chain(devices, penalty=0, widths=3):
    """Return a loss of layers, each on its device, with its input and parameters."""
    rng = np.random.RandomState(0)
    x, params = T.matrix('x'), []
    h = x
    for i, device in enumerate(devices):
        with mgpu.device(device) if device else contextlib.nullcontext():
            w = theano.shared(rng.randn(widths, widths).astype(theano.config.floatX) / 2, name='w%d' % i)
            h = T.tanh(T.dot(h, w))
        params.append(w)
    loss = T.sqr(h).mean()
    return x, loss + penalty * sum(T.sqr(w).sum() for w in params) if penalty else loss, params


def pieces(step):
    """Return the pieces of each stage: level and contexts."""
    return [[(part.level, '+'.join(context.name for context in part.contexts)) for part in stage.parts]
            for stage in step.plan.stages]


def compiled(devices, penalty=0, **options):
    x, loss, params = chain(devices, penalty)
    return mgpu.training_function([x], loss, params, momentum, mode='FAST_COMPILE', **options)


@pytest.fixture(autouse=True)
def four_contexts(contexts):
    contexts('cpu', 4)


@pytest.fixture
def names():
    return [context.name for context in mgpu.contexts()]


@pytest.mark.parametrize('n', [1, 2, 3, 4])
def test_a_chain_of_n_devices_has_2n_minus_1_pieces(n, names):
    step = compiled(names[:n], micro_batches=2, contexts=[names[:n]])
    assert pieces(step) == [list(enumerate(names[:n] + names[:n - 1][::-1]))]


def test_layers_of_one_device_are_one_piece_each_way(names):
    a, b = names[:2]
    assert pieces(compiled([a, a, a, b, b], micro_batches=2, contexts=[[a, b]])) == [[(0, a), (1, b), (2, a)]]


def test_a_penalty_for_all_weights_adds_no_piece_to_the_way_of_the_gradients(names):
    """Theano's gradients begin with the shape of the loss, but need not wait for the loss."""
    a, b = names[:2]
    found, = pieces(compiled([a, b], 0.1, micro_batches=2, contexts=[[a, b]]))
    assert max(level for level, _ in found) == 2


def test_towers_are_computed_at_the_same_time(names):
    a, b = names[:2]
    x, first, _ = chain([a])
    y, second, _ = chain([b])
    with mgpu.device('cpu'):
        both = first * second
    f = mgpu.function([x, y], both, mode='FAST_COMPILE', contexts=[[a, b]])
    assert sorted(pieces(f)[0]) == [(0, a), (0, b), (1, 'the host')]


def given(step, level):
    stage, = [stage.parts for stage in step.plan.stages]
    part, = [part for part in stage if part.level == level]
    return [variable for variable in part.given if variable.owner]


def test_recompute_keeps_only_what_comes_from_other_devices(names):
    """The last piece has the gradients from the next device, and computes its forward pass again."""
    a, b = names[:2]
    layers = [a, a, a, b]
    kept = given(compiled(layers, micro_batches=2, contexts=[[a, b]]), 2)
    again = given(compiled(layers, micro_batches=2, contexts=[[a, b]], recompute=True), 2)
    assert len(again) == 1 < len(kept)


@pytest.mark.parametrize('recompute', [False, True])
def test_values_are_released_once_no_later_piece_needs_them(names, recompute):
    """After a step, a batch holds its results alone."""
    a, b = names[:2]
    step = compiled([a, b, a], micro_batches=2, contexts=[[a, b]], recompute=recompute)
    x = np.ones((6, 3), theano.config.floatX)
    batch = step.built.splitter.split([(step.arguments.inputs[0], x)], [6])
    run = StepRun(step.executable, batch)
    run.start()
    run.end()
    works = [work for _, each, _ in batch.split.program.stages if isinstance(each, Launch) for work in each.works]
    assert works and all(batch.slots[slot] is None for work in works for slot in work.made)


def test_the_mesh_has_a_row_for_each_replica(names):
    step = compiled(names[:2])
    assert [[context.name for context in row] for row in step.mesh.replicas] == [names[:2], names[2:]]
    assert step.n_replicas == 2
    step = compiled(names[1:])
    assert [[context.name for context in row] for row in step.mesh.replicas] == [names[1:]]


def test_contexts_of_another_process_take_the_places_of_those_that_are_named(names):
    """Each process has whole replicas, in flat lists and in lists of lists."""
    a, b, c, d = mgpu.contexts()
    for contexts in ([c, d], [[a, b], [c, d]]):
        assert mesh_of(contexts, names[:2], own=[c, d]) == Mesh(names[:2], [(c, d)])


def test_contexts_that_are_left_over_are_named(names, capsys):
    assert len(compiled(names[:2], contexts=names[:3]).mesh.replicas) == 1
    assert 'host2->cpu stays unused: the graph is placed on 2 contexts, and there are 3' in capsys.readouterr().err


def test_a_context_that_is_not_mapped_any_more(contexts, names):
    x, loss, params = chain(names[:2])
    mgpu.init('a->cpu;b->cpu')
    with pytest.raises(mgpu.ContextError, match='placed on host0, host1, which are not mapped any more; mapped: a'):
        mgpu.function([x], loss)


def test_a_weight_is_not_copied_to_the_device_of_another_one(names):
    """The first device had a copy of every weight, for the penalty in the loss."""
    a, b = names[:2]
    step = compiled([a, b], 0.1, micro_batches=2, contexts=[[a, b]], update_on='device')
    there = [sorted(context.name for context in replicated(param).copies) for param in step.params]
    assert [set(each) - {'the host'} for each in there] == [{a}, {b}]


def test_values_are_taken_in_the_same_order_in_every_process(names):
    """Several outputs of one op had one number, and were ordered by their addresses."""
    a, b = names[:2]
    x = T.matrix('x')
    with mgpu.device(a):
        parts = T.split(x, [1] * 6, 6, axis=1)
    with mgpu.device(b):
        total = sum(T.tanh(i * part) for i, part in enumerate(parts))
    f = mgpu.function([x], total, mode='FAST_COMPILE', contexts=[[a, b]])
    taken = [variable.index for variable in f.plan.stages[0].parts[1].given]
    assert taken == sorted(taken) and len(taken) == 6


A, B, C, D = ['host%d' % i for i in range(4)]


@pytest.mark.parametrize('places, given, message', [
    ([A, 'host9'], None, "context 'host9' is not mapped; known contexts: host0, host1, host2"),
    ([A, B], [A], 'placed on 2 contexts .host0, host1., but is to run on 1: host0.*name all'),
    ([None, None], [[A, B], [C, D]],
     r'has a list for each replica, but nothing in the graph is placed.*Place it by "with mgpu.device\('),
    ([A, B], [[A, B], [C]], 'as many contexts as the first one'),
    ([A, B], [[A, B], [B, C]], 'each named once'),
    ([A, B], [[B, C]],
     'placed on host0, which is not among the contexts of the first replica, host1, host2. Add it there'),
    ([A, B], [A, D], 'placed on host1, which is not among the contexts that it is to run'),
    ([A, B], [[A, B], C], 'mixes contexts with lists')])
def test_errors_of_the_mesh(places, given, message):
    with pytest.raises(mgpu.ContextError, match=message):
        compiled(places, contexts=given)
