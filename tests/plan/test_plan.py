"""A plan is a value: made without a device, compared, and explained."""
import dataclasses
import json
import re
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu.devices.context_map import HOST, parse_context_map
from theano_mgpu.errors import GraphError, MgpuWarning
from theano_mgpu.plan import ExchangeWay, Machine, planner
from theano_mgpu.plan.context_layout import placed, spread_over
from theano_mgpu.plan.explain import as_text, explanation
from theano_mgpu.runtime.batch import Splitter

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.plans import GUIDE, TWO, momentum, planned, planned_training
from theano.configparser import change_flags

DOCS = Path(__file__).parents[2] / 'docs' / 'guide' / 'plans.md'
BLOCK = re.compile(r'```text plan=(\w+)\n(.*?)```', re.S)


def layers(n=2, size=100):
    rng, x = np.random.RandomState(0), T.matrix('x')
    params = [theano.shared(rng.randn(size, size).astype(theano.config.floatX), 'w%d' % i) for i in range(n)]
    h = x
    for param in params:
        h = T.tanh(T.dot(h, param))
    return [x], T.sqr(h).mean(), params


def training(**options):
    inputs, loss, params = layers()
    return planned_training(inputs, loss, params, momentum, **options)


def ranks(rank=0, **each):
    found = dict(update_on=('device', 'device'), overlap=(False, False), replicas=(2, 2))
    return Machine(rank=rank, **dict(found, **each))


def chosen(plan, what):
    choice, = [choice for choice in plan.choices if choice.what == what]
    return choice.chosen, choice.reason


def test_a_plan_is_made_for_devices_that_are_not_there_and_cannot_be_changed():
    plan = training()
    assert [[context.device for context in part.contexts] for part in plan.parts] == [['cuda0', 'cuda1']] * 2
    assert [len(stage.parts) for stage in plan.stages] == [1]
    group, = plan.stages[0].parts[0].sums
    assert group.way == ExchangeWay() and plan.last.sums == (group,) and not plan.last.others
    for value in (plan, plan.stages[0], plan.stages[0].parts[0], plan.machine, plan.shares, group):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = None


def test_where_new_values_are_made():
    on_host = training(contexts=parse_context_map('a->cpu;b->cpu'))
    part, = on_host.update
    assert part.contexts == (HOST,) and [context.name for context in part.copied_to] == ['a', 'b']
    assert chosen(on_host, 'update') == ('on the host', 'the contexts are on the CPU, and share arrays without a copy')
    on_devices = training()
    part, = on_devices.update
    assert part.contexts == tuple(TWO) and len(part.updates) == 4
    shares = [part for part in training(update_on='sharded').update if part.is_share]
    assert [[str(v) for v in part.updates] for part in shares] == [
        ['w0', 'velocity of w0'], ['w1', 'velocity of w1']]
    assert [part.contexts for part in shares] == [(TWO[0],), (TWO[1],)]


def test_ranks_that_differ_take_what_all_can():
    plan = training(machine=ranks(update_on=('host', 'device')))
    assert chosen(plan, 'update') == ('on each context', 'the ranks would choose host, device')
    plan = training(machine=ranks(overlap=(True, False)))
    assert not plan.overlaps
    assert chosen(plan, 'exchange') == ('once all are computed', 'mgpu.overlap=True on the ranks 0 alone')


@pytest.mark.parametrize('flags,collectives', [
    ({}, [ExchangeWay()]), ({'update_on': ('sharded', 'sharded')}, [ExchangeWay(), ExchangeWay(owners=(0, 1))])])
def test_collectives_of_the_ranks(flags, collectives):
    """The loss is a sum that all ranks read."""
    plan = training(machine=ranks(replicas=(1, 1), **flags), contexts=TWO[:1])
    assert [group.way for group in plan.last.sums] == collectives


def test_sums_between_cuda_devices():
    plan = training(machine=ranks(against_nccl='', update_on=('sharded', 'sharded')))
    assert [group.way.by_devices for group in plan.last.sums] == [True]
    assert chosen(plan, 'collectives') == ('NCCL', 'each replica is on a CUDA device of its own')
    assert 'NCCL' in str(plan).split('CHOICE')[0]
    plan = training(machine=ranks(against_nccl='CUDA_LAUNCH_BLOCKING=1'))
    assert [group.way for group in plan.last.sums] == [ExchangeWay()]
    assert chosen(plan, 'collectives') == ('the host', 'CUDA_LAUNCH_BLOCKING=1')
    on_host = training(contexts=parse_context_map('a->cpu;b->cpu'), machine=Machine(replicas=(2,), against_nccl=''))
    assert [group.way for group in on_host.last.sums] == [ExchangeWay()]
    assert not [choice for choice in on_host.choices if choice.what == 'collectives']


def test_sums_of_logical_shards_between_cuda_devices():
    """The devices send each other the parts, and add them in the order of the tree."""
    with change_flags(**{'mgpu.logical_shards': 8}):
        plan = training(machine=Machine(replicas=(2,), against_nccl='', update_on=('sharded',)))
        on_host = training(machine=Machine(replicas=(2,), against_nccl='CUDA_LAUNCH_BLOCKING=1'))
    assert [group.way for group in plan.last.sums] == [ExchangeWay(in_tree=True, owners=(0, 1, None), by_devices=True)]
    assert chosen(plan, 'collectives')[0] == 'NCCL by blocks'
    assert 'NCCL by blocks' in str(plan).split('CHOICE')[0]
    assert [group.way for group in on_host.last.sums] == [ExchangeWay(in_tree=True)]
    assert chosen(on_host, 'collectives') == ('the host', 'CUDA_LAUNCH_BLOCKING=1')


@pytest.mark.parametrize('machine', [Machine(replicas=(2,), against_nccl='', update_on=('sharded',)),
                                     ranks(1, replicas=(1, 2), against_nccl='', update_on=('sharded', 'sharded'))])
def test_sums_and_new_values_of_a_divided_update_go_where_they_are_read(machine):
    """Replica 0 updates w0; w1 is updated by the next one, and by the last one where there are three."""
    plan = training(machine=machine)
    last = machine.n_replicas - 1
    way = ExchangeWay(owners=(0, last, None), by_devices=True)  # None: the loss
    assert [group.way for group in plan.last.sums] == [way]
    broadcast, = plan.broadcasts
    assert broadcast.contexts == tuple(TWO)
    assert {str(variable): owner for variable, owner in broadcast.owners.items()} == {'w0': 0, 'w1': last}
    own = {part.contexts[0].name: list(map(str, part.updates)) for part in plan.update if part.is_share}
    first = sum(machine.replicas[:machine.rank])
    assert own == {TWO[owner - first].name: [name, 'velocity of ' + name] for name, owner in (('w0', 0), ('w1', last))
                   if owner >= first}


def test_slices_of_batches_that_did_not_fit_are_explained():
    plan = training()
    splitter = Splitter(plan, [])
    splitter.slices.update({(64,): 4, (9,): 2})
    data = explanation(plan, splitter.changes())
    assert [(each['what'], each['chosen']) for each in data['choices']][-2:] == [
        ('slices', '2 for batches of 9 samples'), ('slices', '4 for batches of 64 samples')]
    assert 'a device had too little memory for fewer' in as_text(data)


def test_each_rank_plans_its_own_part_of_a_divided_update_and_all_the_same_else():
    plans = [training(machine=ranks(rank, update_on=('sharded', 'sharded'), replicas=(1, 1)), contexts=TWO[:1])
             for rank in range(2)]
    names = [[[str(v) for v in share] for share in plan.divided.shares] for plan in plans]
    assert names[0] == names[1] == [['w0', 'velocity of w0'], ['w1', 'velocity of w1']]
    assert [sorted(map(str, plan.divided.sent)) for plan in plans] == [['w0', 'w1']] * 2
    own = [[str(v) for part in plan.update if part.is_share for v in part.updates] for plan in plans]
    assert own == names[0]
    assert [plan.shares.rounds(5) for plan in plans] == [[[(0, (0, 3))]], [[(0, (3, 5))]]]


def test_the_times_of_steps_decide_where_nccl_exchanges_enough_for_several_pieces():
    x, w = T.matrix('x'), theano.shared(np.zeros((800, 800), 'float32'), 'w')
    known, unknown, chosen_by_flag = [planned_training(
        [x], T.sqr(T.dot(x, w)).mean(dtype='float32'), [w], momentum, machine=Machine(
            replicas=(2,), overlap=(overlap,), against_nccl='', rate=rate))
        for overlap, rate in (('auto', 1e9), ('auto', 0), (False, 1e9))]
    assert known.nccl_seconds == chosen_by_flag.nccl_seconds == 2.56e-3 and unknown.nccl_seconds == 0
    assert not known.overlaps and chosen(known, 'exchange') == (
        'once all are computed',
        'mgpu.overlap=auto: it takes 2.56 ms at 1 GB/s, and the times of the first steps decide')
    assert chosen(unknown, 'exchange')[1] == chosen(chosen_by_flag, 'exchange')[1] == 'mgpu.overlap=auto'


def test_overlap_cuts_the_backward_pass():
    inputs, loss, params = layers(4, 600)
    plan = planned_training(inputs, loss, params, momentum, contexts=TWO[:1],
                            machine=ranks(replicas=(1, 1), overlap=(True, True)))
    assert plan.overlaps and len(plan.stages[0].parts) > 1
    assert all(part.sums for part in plan.stages[0].parts)
    assert chosen(plan, 'exchange') == ('while the next gradients are computed', 'mgpu.overlap=True')


def test_a_graph_that_is_not_divided_is_one_stage_on_one_device():
    x = T.matrix('x')
    plan = planned([x], [T.nlinalg.matrix_inverse(x)], {})
    assert [context.name for context in plan.mesh.contexts] == ['dev0'] and plan.shares.n_replicas == 1
    assert str(plan).startswith('a function: whole batches, on dev0->cuda0')
    where, why = chosen(plan, 'division')
    assert where == 'whole batches' and 'MatrixInverse takes its matrix as a whole' in why


def test_an_explanation_is_plain_data(cpu2):
    inputs, loss, params = layers(2, 100)
    step = mgpu.training_function(inputs, loss, params, momentum, mode='FAST_COMPILE')
    found = explanation(step.plan)
    assert json.loads(json.dumps(found)) == found and 'fits' in found
    size, sums = np.dtype(theano.config.floatX).itemsize, 2 * 100 * 100 + 1
    assert [each['instruction'] for each in found['instructions']] == [
        'launch', 'add', 'finish', 'launch', 'store', 'fetch']
    added, stored = found['instructions'][1], found['instructions'][4]
    assert added['where'] == 'the host' and added['what'].startswith('3 sums') and len(added['names']) == 3
    assert stored['names'] == ['velocity of w0', 'w0', 'velocity of w1', 'w1']
    assert found['stages'] == 1 and ' ops, ' in found['instructions'][0]['what']
    assert found['instructions'][1]['bytes'] == found['instructions'][2]['bytes'] == sums * size


@pytest.mark.parametrize('name', GUIDE)
def test_the_guide_shows_plans_as_they_are(name, monkeypatch, contexts):
    """The command `cd tests; ../.venv/bin/python -m support.plans` writes the plans of the guide anew."""
    monkeypatch.setenv('COLUMNS', '118')
    shown = dict(BLOCK.findall(DOCS.read_text()))
    with theano.configparser.change_flags(floatX='float32'):
        assert shown[name] == '%s\n' % GUIDE[name]()


def test_a_sum_that_a_result_reads_is_owned_by_no_rank():
    """The norm of the gradient of w0 is computed on each rank."""
    inputs, loss, params = layers(size=3)
    gradients = T.grad(loss, params)
    plan = planned(inputs, [loss, T.sqr(gradients[0]).sum()], momentum(gradients, params), params=params,
                   contexts=TWO[:1], machine=ranks(replicas=(1, 1), update_on=('sharded', 'sharded')))
    assert [group.way for group in plan.last.sums] == [ExchangeWay(), ExchangeWay(owners=(1,))]


def with_a_slice():
    """Return a step of which a new value and a result read `[[0, 1], :x.shape[1]]`: replicas agree on this slice."""
    (x,), loss, params = layers()
    new = momentum(T.grad(loss, params), params)
    part = (params[0] * loss)[[0, 1], :x.shape[1]]
    return [x], [loss, part], [(variable, value + part.sum() if variable is params[0] else value)
                               for variable, value in new], params


@pytest.mark.parametrize('contexts,machine', [
    ('a->cpu;b->cpu', Machine(replicas=(2,))),
    ('a->cpu', ranks(replicas=(1, 1), update_on=('sharded', 'sharded'), overlap=(True, True), rate=1e9)),
    ('a->cuda0;b->cuda1', Machine(replicas=(2,), against_nccl='', update_on=('sharded',), overlap=(True,), rate=1e9))])
def test_exchanged_values_may_be_other_things_than_arrays(contexts, machine, monkeypatch):
    """A function with a slice such as `[[0, 1], :x.shape[1]]` ended with: 'Variable' object has no attribute 'ndim'."""
    monkeypatch.setattr(planner, 'LARGE', 0)  # the processes of contexts update small values, too
    inputs, results, updates, params = with_a_slice()
    plan = planned(inputs, results, updates, params=params, contexts=parse_context_map(contexts), machine=machine)
    assert any(not hasattr(each.variable, 'ndim') for each in plan.program.every_exchange)
    text = as_text(explanation(plan))
    assert '1 equal value' in text and ' 0 sums' not in text


def test_parameters_are_spread_by_their_bytes(contexts):
    """Each context has about as many bytes, in the order of use; functions that are made later are placed alike."""
    (x,), loss, params = layers(4, 5)
    two = contexts('cpu', 2)
    outputs, updates, mesh = spread_over([loss], {p: p - T.grad(loss, p) for p in params}, two, params)
    assert [p.tag.mgpu_place for p in params] == [context.name for context in two for _ in range(2)]
    assert len(mesh.places) == 2 and list(updates) == params and len(outputs) == 1
    again = placed([loss], {}, two)
    assert again[2].places == mesh.places


def test_parameters_that_cannot_be_spread_stay_where_they_were(monkeypatch):
    (x,), loss, params = layers(2, 5)
    asked = []

    def refused(outputs, updates, contexts):
        asked.append([getattr(p.tag, 'mgpu_place', None) for p in params])
        if len(asked) == 1:
            raise GraphError('an op is on two contexts')
        return outputs, updates, None
    monkeypatch.setattr('theano_mgpu.plan.context_layout.placed', refused)
    with pytest.warns(MgpuWarning, match='cannot be spread over the contexts: an op is on two contexts'):
        assert spread_over([loss], {}, parse_context_map('a->cpu;b->cpu'), params) == ([loss], {}, None)
    assert asked == [['a', 'b'], [None, None]]
