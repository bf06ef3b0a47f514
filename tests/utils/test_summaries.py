"""`mgpu.Summary` writes files that TensorBoard itself reads."""

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.event_files import pixels, read, scalars
from support.launch import launch
from support.processes import python


def nodes(events):
    return {node.name: node for node in events.Graph().node}


def test_scalars_and_histograms(tmp_path):
    values = np.random.RandomState(0).randn(3, 100)
    with mgpu.Summary(tmp_path) as summary:
        for step in range(3):
            summary.scalar('train/loss', np.float32(0.5 / (1 + step)), step)
            summary.histogram('w', values[step], step)
        summary.scalar('one element', np.array([[7.0]]), 5)
        summary.scalar('diverged', np.nan, 5)
    events = read(tmp_path)
    assert scalars(events, 'train/loss') == [(step, np.float32(0.5 / (1 + step))) for step in range(3)]
    assert scalars(events, 'one_element') == [(5, 7.0)] and np.isnan(scalars(events, 'diverged')[0][1])
    for event, expected in zip(events.Histograms('w'), values):
        found = event.histogram_value
        assert found.num == 100 and sum(found.bucket) == 100 and found.min == expected.min()
        np.testing.assert_allclose([found.sum, found.sum_squares], [expected.sum(), (expected ** 2).sum()])


def test_images(tmp_path):
    grey = np.array([[[0, 0.5, 1], [-3, 2, np.nan]]])
    colours = np.random.RandomState(0).randint(0, 256, (9, 4, 5, 3)).astype('uint8')
    with mgpu.Summary(tmp_path) as summary:
        summary.image('grey', grey, 0)
        summary.image('colours', colours, 0)
        summary.image('two', colours[..., :1] / np.float32(255), 0, max_images=2)
    events = read(tmp_path)
    np.testing.assert_array_equal(pixels(events, 'grey/image/0'), [[0, 128, 255], [0, 255, 0]])
    for i in range(6):
        np.testing.assert_array_equal(pixels(events, 'colours/image/%d' % i), colours[i])
    np.testing.assert_array_equal(pixels(events, 'two/image/1'), colours[1, ..., 0])
    assert len(events.Tags()['images']) == 1 + 6 + 2


def model():
    x, t = T.matrix('x'), T.matrix('t')
    w = theano.shared(np.zeros((3, 1), theano.config.floatX), name='w:0')
    hidden = T.nnet.sigmoid(T.dot(x, w))
    return x, t, w, hidden, ((hidden - t) ** 2).mean()


def test_an_expression_as_a_graph(tmp_path):
    x, t, w, hidden, loss = model()
    with mgpu.Summary(tmp_path) as summary:
        summary.graph(loss, scopes=[('hidden', [hidden])])
    found = nodes(read(tmp_path))
    assert found['hidden/x'].op == 'Placeholder' and found['t'].op == 'Placeholder'
    assert found['hidden/w_0'].op == 'Variable' and found['sub'].input == ['hidden/sigmoid', 't']
    assert found['hidden/dot'].input == ['hidden/x', 'hidden/w_0'] and found['hidden/dot'].op == 'dot'
    assert found['t'].attr['dtype'].type == {'float32': 1, 'float64': 2}[theano.config.floatX]
    shape, = found['hidden/x'].attr['_output_shapes'].list.shape
    assert [each.size for each in shape.dim] == [-1, -1]
    for node in found.values():
        assert all(each.partition(':')[0] in found for each in node.input)


def test_functions_as_graphs(tmp_path, contexts):
    names = {context.name for context in contexts('cpu', 2)}
    x, t, w, hidden, loss = model()
    step = mgpu.training_function([x, t], loss, [w], lambda gradients: {w: w - gradients[0]}, mode='FAST_COMPILE')
    plain = theano.function([x, t], loss, mode='FAST_COMPILE')
    for name, function in [('step', step), ('plain', plain)]:
        with mgpu.Summary(tmp_path / name) as summary:
            summary.graph(function)
    found = nodes(read(tmp_path / 'step'))
    assert names <= {name.partition('/')[0] for name in found}
    assert {node.device for node in found.values()} == {'cpu'}
    assert 'x' in nodes(read(tmp_path / 'plain'))


def test_two_summaries_of_one_folder_do_not_replace_each_other(tmp_path):
    for step in range(2):
        with mgpu.Summary(tmp_path) as summary:
            summary.scalar('loss', step, step)
    assert scalars(read(tmp_path), 'loss') == [(0, 0), (1, 1)]


def test_flush_writes_at_once(tmp_path):
    summary = mgpu.Summary(tmp_path)
    summary.scalar('loss', 1, 0)
    summary.flush()
    assert scalars(read(tmp_path), 'loss') == [(0, 1)]
    summary.close()
    summary.close()


@pytest.mark.slow
def test_a_fork_writes_no_event_a_second_time(tmp_path):
    """Events in memory were written by both processes, and events of the fork between them."""
    done = python('-c', """
import os, sys, theano_mgpu
with theano_mgpu.Summary(sys.argv[1]) as summary:
    summary.scalar('loss', 1, 0)
    if os.fork() == 0:
        summary.scalar('loss', 2, 1)
    os.wait()
    summary.scalar('loss', 3, 2)
""", tmp_path)
    assert 'is of the process' in done.stderr and 'make another one' in done.stderr
    assert scalars(read(tmp_path), 'loss') == [(0, 1), (2, 3)]


@pytest.mark.parametrize('call, message', [
    (lambda summary: summary.scalar('loss', np.zeros(3), 0), r'scalar loss: .*\(3,\).*mean'),
    (lambda summary: summary.histogram('w', [1, np.nan, np.inf], 0), 'histogram w: 2 of 3 values'),
    (lambda summary: summary.histogram('w', [], 0), 'at least one value'),
    (lambda summary: summary.image('x', np.zeros((2, 1, 28, 28)), 0), r'image x: .*\(2, 1, 28, 28\).*moveaxis'),
    (lambda summary: summary.image('x', np.zeros((2, 28, 28), 'int64'), 0), 'dtype int64.*uint8'),
    (lambda summary: summary.graph(print), 'graph: <built-in.*theano.function'),
    (lambda summary: summary.close() or summary.scalar('loss', 1, 0), 'is closed'),
], ids=['scalar', 'not finite', 'empty', 'channels first', 'integers', 'no function', 'closed'])
def test_errors_say_what_to_do(call, message, tmp_path):
    with mgpu.Summary(tmp_path) as summary, pytest.raises(mgpu.MgpuError, match=message):
        call(summary)


def test_tensorboardx_is_imported_when_it_is_needed_and_an_error_names_it_if_it_is_missing():
    code = """
import sys, theano_mgpu
assert 'tensorboardX' not in sys.modules
sys.modules['tensorboardX'] = None
theano_mgpu.Summary('logs')
"""
    assert "pip install 'theano_mgpu[tensorboard]'" in python('-c', code, expected=1).stderr


@pytest.mark.mpi
def test_only_rank_0_writes(tmp_path):
    job = tmp_path / 'job.py'
    job.write_text("""
import sys, theano_mgpu
with theano_mgpu.Summary(sys.argv[1]) as summary:
    summary.scalar('rank', theano_mgpu.rank(), 0)
    summary.flush()
""")
    launch(2, tmp_path / 'logs', job=job)
    assert len(list((tmp_path / 'logs').iterdir())) == 1 and scalars(read(tmp_path / 'logs'), 'rank') == [(0, 0)]
