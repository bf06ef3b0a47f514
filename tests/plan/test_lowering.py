"""The instructions of a step: each value is made before it is read, made once, and let go after its last use."""
from dataclasses import replace

from theano_mgpu.devices.context_map import HOST, parse_context_map
from theano_mgpu.plan import Machine, buckets
from theano_mgpu.plan.instructions import Add, Finish, Gather, Launch, Save, Send, Store, Wait
from theano_mgpu.plan.lowering import divided, lowered

import numpy as np
import theano
import theano.tensor as T
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import TWO, momentum, placed_pipeline, planned, planned_training, sharded_update
from theano.configparser import change_flags
from theano.sandbox.rng_mrg import MRG_RandomStreams

CPU = parse_context_map('a->cpu;b->cpu')


def training(**options):
    rng, x = np.random.RandomState(0), T.matrix('x')
    params = [theano.shared(rng.randn(4, 4).astype(theano.config.floatX), 'w%d' % i) for i in range(2)]
    h = T.tanh(T.dot(T.tanh(T.dot(x, params[0])), params[1]))
    return planned_training([x], T.sqr(h).mean(), params, momentum, **options)


def meeting(**options):
    """Return the plan of outputs, and a state, with rows of samples that have met in a mean and a maximum."""
    x, scale = T.matrix('x'), T.scalar('scale')
    state = theano.shared(np.zeros((6, 3), theano.config.floatX), 'state')
    centred = x - x.mean(axis=0)
    return planned([x, scale], [centred * scale, centred.max(), x.sum()], {state: centred}, **options)


def draws(micro_batches=1):
    x, streams = T.matrix('x'), MRG_RandomStreams(5)
    noise = streams.uniform((3,), dtype=x.dtype)
    return planned([x], [(x * noise).sum()], [(state, new) for state, new, *_ in streams.updates()],
                   micro_batches=micro_batches)


def on_devices(plan):
    """Return a plan for contexts of the CPU with CUDA devices in their place, which nothing opens."""
    there = {context.name: context for context in TWO}

    def moved(part):
        return replace(part, contexts=tuple(there[context.name] for context in part.contexts))
    return replace(plan, stages=tuple(replace(stage, parts=tuple(map(moved, stage.parts))) for stage in plan.stages),
                   update=tuple(map(moved, plan.update)), mesh=plan.mesh._replace(replicas=[tuple(TWO)]))


def with_shards(make, **options):
    with change_flags(**{'mgpu.logical_shards': 4}):
        return make(**options)


RANKS = Machine(1, (1, 1), ('device',) * 2, (True, True))
PLANS = {
    'cpu': lambda: training(contexts=CPU), 'devices': training, 'NCCL': lambda: training(by_nccl=True),
    'one context': lambda: training(contexts=TWO[:1], machine=Machine()), 'meeting': meeting,
    'micro-batches': lambda: meeting(micro_batches=3), 'pipeline': placed_pipeline, 'sharded update': sharded_update,
    'pipeline on devices': lambda: on_devices(placed_pipeline()), 'draws': draws,
    'draws, micro-batches': lambda: draws(3),
    'overlap': lambda: training(machine=RANKS, contexts=TWO[:1]), 'shards': lambda: with_shards(training),
    'shards by NCCL': lambda: with_shards(training, by_nccl=True), 'update on host': lambda: training(update_on='host')}
made = {}


def plan_of(name):
    if name not in made:
        made[name] = PLANS[name]()
    return made[name]


class Slots:
    """An interpreter that checks, for each instruction, which slots have a value."""

    def __init__(self, program):
        self.full = {slot for slots in program.of_shards.values() for slot in slots} | set(program.common.values())
        self.ended, self.variables, self.added = set(), [], []
        for name, instruction, ended in [*program.stages, *program.update]:
            getattr(self, name)(instruction)
            assert self.full.issuperset(ended) and self.ended.isdisjoint(ended)
            self.full.difference_update(ended)
            self.ended.update(ended)

    def move(self, read, made):
        assert self.full.issuperset(read), 'a slot is read that has no value'
        made = list(made)
        assert len(set(made)) == len(made) and self.full.isdisjoint(made) and self.ended.isdisjoint(made)
        self.full.update(made)

    def send(self, given):
        for context, moves in zip(given.contexts, given.moves):
            assert all(move.context in (context, HOST) for move in moves)
            self.move([move.source for move in moves], [move.target for move in moves])

    def launch(self, given):
        self.move([slot for work in given.works for slot in work.given],
                  [slot for work in given.works for slot in work.made])

    def wait(self, given):
        self.move([slot for work in given.works for slot in work.made[:len(work.part.outputs)]], [])

    def add(self, given):
        self.added.append((given.group, given.round))
        self.move(sum(given.parts, ()), [])

    def finish(self, given):
        self.move([], given.targets)

    def gather(self, given):
        self.move(sum(given.parts, ()), given.targets)

    def save(self, given):
        pass  # a slot whose value is gone stays empty

    def store(self, given):
        self.move([slot for new in given.news for slot in new.slots] + [slot for _, slot in given.rows], [])
        self.variables += [variable for new in given.news for variable in new.part.updates]
        self.variables += [variable for variable, _ in given.rows]

    def fetch(self, given):
        self.move(given.sources, given.targets)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PLANS)), st.integers(1, 9), st.sampled_from([None, 2, 3]))
def test_each_value_is_made_once_and_let_go_after_its_last_use(name, length, slices):
    plan = plan_of(name)
    rounds = plan.shares.rounds(length, slices) or [[(0, (0, 1))]]
    works, division = divided(plan.shares, rounds, slices is not None and len(rounds) > 1)
    inputs = plan.program.inputs
    program = lowered(plan, division, inputs)
    slots = Slots(program)
    given = {slot for of_shards in program.of_shards.values() for slot in of_shards} | set(program.common.values())
    assert slots.full - given == set(program.results)  # nothing may read some of the inputs
    of_ranks = [variable for share in (plan.divided.shares if plan.divided else ()) for variable in share]
    assert set(plan.program.updated) - set(of_ranks) <= set(slots.variables)
    assert len(set(slots.variables)) == len(slots.variables)
    groups = [] if division.alone else [group for part in plan.parts for group in part.sums]
    expected = [(id(group), number) for group in groups for number in range(len(division.rounds))]
    assert sorted((id(group), number) for group, number in slots.added) == sorted(expected)


def test_sums_under_way_end_before_values_are_gathered():
    x, n = T.matrix('x'), T.ivector('n')
    w = theano.shared(np.ones((3, 3), theano.config.floatX), 'w')
    loss = T.tanh(T.dot(x, w) * T.cast(n.sum(), x.dtype)).mean()
    plan = planned_training([x, n], loss, [w], momentum, machine=RANKS, contexts=TWO[:1])
    found = kinds(plan, 8)
    assert plan.overlaps and all(found[i - 1] is Finish for i, kind in enumerate(found) if kind is Gather)
    assert Gather in found


def test_devices_add_the_sums_of_a_piece_beside_the_next_one(monkeypatch):
    """An exchange follows all that its device was given to compute before. The host waits, and then adds."""
    monkeypatch.setattr(buckets, 'LEAST', 1)
    for against, expected in (('', [Launch, Add, Launch, Add]), ('no NCCL', [Launch, Launch, Add, Add])):
        plan = training(machine=Machine(replicas=(2,), overlap=(True,), against_nccl=against))
        assert [kind for kind in kinds(plan, 8) if kind in (Launch, Add)][:4] == expected


def kinds(plan, length, slices=None):
    works, division = divided(plan.shares, plan.shares.rounds(length, slices), slices is not None)
    program = lowered(plan, division, plan.program.inputs)
    return [type(each) for _, each, _ in [*program.stages, *program.update]]


def test_what_a_batch_does_not_need_is_not_in_its_list():
    plan = plan_of('devices')
    assert Wait in kinds(plan, 6) and Finish in kinds(plan, 6) and Send in kinds(plan, 6)
    assert not {Send, Wait, Save} & set(kinds(plan_of('cpu'), 6))
    assert not {Finish, Gather} & set(kinds(plan_of('one context'), 6))
    assert kinds(plan_of('devices'), 6, 3).count(Save) == 3 and Save not in kinds(plan, 6)
    assert kinds(plan_of('micro-batches'), 12).count(Launch) == 3 * len(plan_of('micro-batches').stages)
    assert kinds(plan_of('pipeline'), 8).count(Launch) == 6 + len(plan_of('pipeline').update)
    assert Store in kinds(plan, 1)
