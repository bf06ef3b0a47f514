"""`benchmarks/predict_scaling.py`: real runs of small models, its answers, and the costs that it measures."""
import doctest
import json
import os
import time
from types import SimpleNamespace

from theano_mgpu.graph import graph, training_graph
from theano_mgpu.options import Options

import cost_model
import matplotlib.pyplot as plt
import measured_costs
import numpy as np
import predict_scaling
import pytest
import theano
import theano.tensor as T
from cost_model import ONE_HOST, CostModel, Link, predictions
from measured_costs import Block, Findings, costs_of
from support.plans import TWO, momentum
from support.processes import python
from support.small_models import saved_classifier
from theano.configparser import change_flags

FLAGS = 'floatX=float32,contexts=bench_a->cpu;bench_b->cpu'


def predict(folder, model, *arguments, code=0):
    """Run the script in a folder; return its output, and the figures in out.json; or the error."""
    done = python(predict_scaling.__file__, '--model', model, *arguments, folder=folder, flags=FLAGS, expected=code)
    return (done.stdout, json.loads((folder / 'out.json').read_text())) if not code else done.stderr


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Return a folder with a small compiled model."""
    path = tmp_path_factory.mktemp('bench')
    saved_classifier(path)
    return path


# --- a run ---------------------------------------------------------------------------------------

@pytest.mark.slow
def test_two_contexts(folder):
    text, figures = predict(folder, 'small.h5', '--rounds', '3', '--steps', '3', '--batch-size', '24', '--json',
                            'out.json', '--plot', 'out.png', '--link', 'nvlink3+100gbe', '--link', '5:10')
    rows = figures['rows']
    assert [(row['kind'], row['n']) for row in rows] == [('plain', 1), ('contexts', 1), ('contexts', 2)]
    for row in rows:
        assert 0 < row['lowest'] <= row['seconds'] <= row['highest'] and len(row['rounds']) == 3
        assert set(row['parts']) == {'input', 'dispatch', 'compute', 'exchange', 'update'}
    assert rows[1]['speedup'] == 1 and rows[2]['efficiency'] == pytest.approx(rows[2]['speedup'] / 2)
    check_answer(text, figures)
    check_prediction(text, figures)
    assert (folder / 'out.png').read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
    assert min(plt.imread(str(folder / 'out.png')).shape[:2]) > 600


def check_answer(text, figures):
    answer = ' '.join(figures['answer'])
    assert all(sentence in ' '.join(text.split()) for sentence in figures['answer'])
    for words in ('scale', 'What limits 2 contexts is', 'From 1 context the model predicts', 'pay here',
                  'Over NVLink 3 + 100 Gb Ethernet, 8 such devices would be', 'Over 5 us, 10 GB/s, 8 such'):
        assert words in answer
    check, = figures['checks']
    assert (check['kind'], check['n']) == ('contexts', 2) and check['predicted'] > 0 < check['measured']
    assert check['predicted'] == pytest.approx(check['measured'] * (1 + check['error']))


def check_prediction(text, figures):
    predicted = figures['predictions']
    assert {each['devices'] for each in predicted} == {2 ** power for power in range(1, 11)}
    assert {(each['network'], each['scheme'], each['scaling']) for each in predicted} == {
        (network, scheme, scaling) for network in ('nvlink3+100gbe', '5:10')
        for scheme in ('host', 'ring', 'hierarchical') for scaling in ('strong', 'weak')}
    assert {each['scheme'] for each in predicted if each['planned']} == {'host'}  # as of any CPU
    for each in predicted:
        assert 0 < each['efficiency'] <= 1.0001 and sum(each['parts'].values()) == pytest.approx(each['seconds'])
    # One host with all devices: a hierarchy of one host, which has no ring of hosts.
    assert '   1024  ' in text and 'hierarchical' in text
    assert figures['costs']['n_bytes'] == figures['n_bytes'] == 4 * (8 * 16 + 16 + 16 * 3 + 3)


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks(folder):
    text, figures = predict(folder, 'small.h5', '--gpus', '1', '--ranks', '2', '--rounds', '2', '--steps', '2',
                            '--batch-size', '25', '--json', 'out.json')
    assert [(row['kind'], row['n']) for row in figures['rows']] == [('plain', 1), ('contexts', 1), ('ranks', 1),
                                                                    ('ranks', 2)]
    assert {'wait', 'exchange'} <= set(figures['rows'][3]['phases'])
    link = figures['rows'][3]['figures']
    assert 0 < link['latency_s'] < 1 and link['bytes_per_s'] > 1e6
    check, = figures['checks']
    assert (check['kind'], check['n']) == ('ranks', 2) and check['predicted'] > 0
    assert {(each['kind'], each['batch']) for each in figures['blocks'] if each['n'] == 2} == {
        ('ranks', 25), ('apart', 13), ('apart', 26)}
    assert '1 rank ' in text and '2 ranks ' in text and 'From ranks that do not exchange the model predicts' in text


@pytest.mark.slow_but_with('nowhere.h5*')
@pytest.mark.parametrize('model,arguments,message', [
    ('nowhere.h5', [], '--model nowhere.h5: there is no such file'),
    ('small.h5', ['--link', 'isdn'], "'isdn' in 'isdn' is not a link: give one of pcie3"),
    ('small.h5', ['--plot', 'no/out.png'], 'no/out.png cannot be written: there is no folder')])
def test_mistakes(folder, model, arguments, message):
    assert message in predict(folder, model, *arguments, code=2)


def test_help_names_the_links():
    text = predict_scaling.make_parser().format_help()
    for words in ('Examples:', 'vgg16', 'through the host', 'nvlink3    NVLink 3           5 us  200.00 GB/s'):
        assert words in text


def test_examples_in_docstrings():
    assert [doctest.testmod(module).failed for module in (cost_model, measured_costs)] == [0, 0]


# --- from blocks to costs ------------------------------------------------------------------------

def block(batch, run, launched=0.0, kind='contexts', n=1, **figures):
    phases = dict(scatter=1e-6 * batch, launch=launched, run=run, all_reduce=0.0, update=0.004, unknown=0.001,
                  other=0.002)
    return Block(kind, n, batch, sum(phases.values()), phases, figures)


def test_costs_are_those_of_the_phases():
    costs = costs_of([block(n, 0.01 + 0.0001 * n) for n in (32, 64, 128)], 1000)
    assert costs.fixed_s == pytest.approx(0.01) and costs.sample_s == pytest.approx(0.0001)
    assert costs.update_s == pytest.approx(0.004) and costs.input_s == pytest.approx(1e-6)
    assert costs.host_s == pytest.approx(0.003)  # time in no phase, and in one that has no name here
    assert costs.launch_s == 0


def test_costs_of_a_device_that_works_while_the_host_goes_on():
    costs = costs_of([block(n, 0.01 + 0.0001 * n, launched=0.002) for n in (64, 128)], 1000)
    assert costs.launch_s == 0.002
    assert costs.fixed_s == pytest.approx(0.012) and costs.sample_s == pytest.approx(0.0001)


@pytest.mark.slow
def test_only_contexts_on_the_host_update_once(contexts):
    assert Options().updates_on(contexts('cpu', 2))[0] == 'host' != Options().updates_on(contexts('gpu', 2))[0]


def test_two_contexts_are_predicted_from_one():
    blocks = {(kind, n, batch): block(batch, run, kind=kind, n=n, **figures) for kind, n, batch, run, figures in [
        ('contexts', 1, 64, 0.0164, {}), ('contexts', 1, 128, 0.0228, {}),
        ('contexts', 2, 128, 0.0328, {'reduce_bytes_per_s': 1e6})]}
    findings = Findings([blocks], 128, 1000, sharing=[1, 2])
    parts = findings.model(blocks, n=2).parts(2, 128)
    assert parts['compute'] + parts['dispatch'] == pytest.approx(0.0328 + 0.003)
    assert parts['exchange'] == pytest.approx(0.002) and parts['update'] == pytest.approx(0.008)
    for updates_on in 'host', 'sharded':  # once on the host, or each context half of it, one after the other
        others = findings._replace(updates_on=updates_on).model(blocks, n=2).parts(2, 128)
        assert others['update'] == pytest.approx(0.004) and others['exchange'] == parts['exchange']
    by_nccl = findings._replace(scheme='ring', link=Link('wire', 0.001, 1e6)).model(blocks, n=2).parts(2, 128)
    assert by_nccl['exchange'] == pytest.approx(2 * 0.001 + 1000 / 1e6)  # nothing goes to the host, which adds nothing
    n_bytes = 4 << 20  # of gradients: four pieces
    exchanges = [findings._replace(n_bytes=n_bytes, sharing=[1, 1], overlaps=overlaps)
                 .model(blocks, n=2).parts(2, 128)['exchange'] for overlaps in (False, True)]
    assert exchanges[0] - exchanges[1] == pytest.approx(3 / 4 * 2 / 3 * parts['compute'] / 2)
    check = findings.rows()[-1]['check']
    assert check['measured'] == blocks['contexts', 2, 128].seconds
    assert check['predicted'] == pytest.approx(sum(parts.values()))
    sentence = predict_scaling.measured_limit(findings, findings.rows()[-1])
    assert sentence.startswith('What limits 2 contexts is compute') and '--ranks 2' in sentence


@pytest.mark.parametrize('flags,expected', [
    ({}, ('ring', 'ring')), ({'mgpu.collectives': 'host'}, ('host', 'host')),
    ({'mgpu.logical_shards': '8'}, ('blocks', 'blocks')),
    ({'mgpu.update_on': 'sharded'}, ('ring', 'ring'))], ids=str)
def test_the_plan_chooses_the_exchange_of_more_devices(flags, expected, monkeypatch):
    """One GPU exchanges nothing; several of its kind would, and no context is opened to ask."""
    monkeypatch.setattr(measured_costs.nccl, 'reason_against', lambda contexts, flag: flag if flag == 'host' else '')
    x, w = T.matrix('x'), theano.shared(np.zeros((3, 3), theano.config.floatX), name='w')
    loss = T.sqr(T.dot(x, w)).mean()
    updates = training_graph.new_values(momentum, training_graph.loss_gradients(loss, [w]), [w])
    with change_flags(**flags):
        step = SimpleNamespace(_definition=([x], [loss], training_graph.on_host(updates)), contexts=TWO[:1],
                               options=Options(params=[graph.host_view(w)]))
        assert measured_costs.planned_schemes(step) == expected


def test_how_many_devices_pay():
    networks = {'free': ONE_HOST}
    for model, strong, weak in ((CostModel(0, 0.001, 0.0064, 0), 'up to 4 pay', 'all 1,024 pay'),
                                (CostModel(0, 0, 1, 0), 'no number of them pays', 'all 1,024 pay')):
        sentence, = predict_scaling.predicted_answer(64, networks, predictions(model, 64, networks))
        assert ', with sums through the host, limited by ' in sentence
        assert sentence.endswith('With the same whole batch, %s; with 64 samples for each device, %s.'
                                 % (strong, weak)), sentence


# --- the model and the clock ---------------------------------------------------------------------

def idle():
    """Return the share of one second in which this machine is idle."""
    def read():
        with open('/proc/stat') as file:
            numbers = [int(number) for number in file.readline().split()[1:]]
        return numbers[3] + numbers[4], sum(numbers)
    (idle_before, before), _, (idle_after, after) = read(), time.sleep(1), read()
    return (idle_after - idle_before) / max(1, after - before)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['contexts', pytest.param('ranks', marks=pytest.mark.mpi)])
def test_two_are_predicted_within_15_percent(tmp_path, kind):
    """Measurements of one device, and of links, predict the time of two."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip('two ranks need two cores')
    errors = []
    for _ in range(3):
        quiet = idle() > 0.9
        ranks = ['--gpus', '1', '--ranks', '2'] if kind == 'ranks' else []
        _, figures = predict(tmp_path, 'mlp', '--input-shape', '256', '--batch-size', '512', '--json', 'out.json',
                             *ranks)
        error, = [check['error'] for check in figures['checks'] if check['kind'] == kind]
        errors.append((round(error, 3), 'quiet' if quiet else 'others use this machine, too'))
        if abs(error) <= 0.15:
            return
    if all('others' in state for _, state in errors):
        pytest.skip('other programs kept the machine busy: %s' % errors)
    pytest.fail('predicted / measured - 1: %s' % errors)
