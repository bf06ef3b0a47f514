"""A timeline: the activities of each context, and their times, in a file that trace viewers open."""
import json
import sys
import threading
from collections import defaultdict

import theano_mgpu as mgpu

import pytest
import theano
from support.processes import python
from support.small_models import data, dense_model, momentum

timeline_module = sys.modules['theano_mgpu.utils.timeline']

SHAPES = [6, 7, 3]


def training(names, **options):
    model = dense_model()
    return mgpu.training_function(model.inputs, model.loss, model.params, momentum, contexts=names, update_on='device',
                                  **options)


def record(step, path):
    """Train a few ragged steps; return the events of the trace."""
    step(*data(4, 7))
    with mgpu.timeline(str(path)):
        for n in SHAPES:
            step(*data(n, 7))
    return json.loads(path.read_text())['traceEvents']


def check_format(events):
    """Check the rules of Chrome's trace format for complete and metadata events; return the spans of each track."""
    names, spans = {}, defaultdict(list)
    for event in events:
        assert event['ph'] in 'MX' and isinstance(event['pid'], int) and isinstance(event['tid'], int)
        if event['ph'] == 'M':
            assert event['name'] in ('process_name', 'thread_name') and isinstance(event['args']['name'], str)
            if event['name'] == 'thread_name':
                names[event['tid']] = event['args']['name']
        else:
            assert event['dur'] >= 0 and event['ts'] > 0 and event['cat'] and event['name']
            spans[names[event['tid']]].append((event['ts'], event['ts'] + event['dur'], event['name']))
    for track in spans.values():
        track.sort()
        ends = []
        for start, stop, name in track:  # viewers need spans of one track that nest
            while ends and ends[-1] <= start + 1e-3:
                ends.pop()
            assert not ends or stop <= ends[-1] + 1e-3, name
            ends.append(stop)
    return spans


def test_steps_of_another_thread_have_rows_of_their_own(cpu2, tmp_path):
    model = dense_model()
    with mgpu.Predictor(model.inputs[:1], model.probabilities) as predictor:
        with mgpu.timeline(str(tmp_path / 'trace.json')):
            thread = threading.Thread(target=lambda: predictor.predict(data(200, 7)[0]), name='another')
            thread.start()
            thread.join()
    spans = check_format(json.loads((tmp_path / 'trace.json').read_text())['traceEvents'])
    assert {context.name for context in cpu2} | {'step of another', 'host of another'} <= spans.keys()


@pytest.mark.slow_but_with('cpu-serial')
@pytest.mark.parametrize('executor', ['serial', 'threads'])
def test_each_context_has_a_track_with_its_spans(contexts, kind, executor, tmp_path):
    names = [context.name for context in contexts(kind, 2)]
    with theano.configparser.change_flags(**{'mgpu.collectives': 'host'}):
        spans = check_format(record(training(names, executor=executor), tmp_path / 'trace.json'))
    copies = {'host_to_device', 'device_to_host', 'launch', 'broadcast'} if kind == 'gpu' else set()
    for name in names:
        found = {span for _, _, span in spans[name]}
        assert found == {'run', 'update', timeline_module.LOCK} | copies
    assert {'scatter', 'run', 'all_reduce', 'update'} | copies <= {s for _, _, s in spans['host']}
    assert len([1 for _, _, span in spans[names[1]] if span == 'update']) == len(SHAPES)
    steps = [span for _, _, span in spans['step']]
    listed = ['launch', 'add', 'finish', 'launch', 'store', 'fetch'] if kind == 'cpu' else \
        ['send', 'launch', 'wait', 'add', 'finish', 'send', 'launch', 'store', 'fetch']
    assert steps == listed * len(SHAPES)


def test_a_context_that_waits_for_the_interpreter_shows_it(cpu2, tmp_path):
    """One thread serves both contexts: while it runs the first one's function, the second one waits."""
    spans = check_format(record(training(['host0', 'host1'], executor='serial'), tmp_path / 'trace.json'))
    runs = [span for span in spans['host0'] if span[2] == 'run']
    waits = [span for span in spans['host1'] if span[2] == timeline_module.LOCK]
    assert len(runs) == len(SHAPES)
    for start, stop, _ in runs:
        assert any(waited <= start and until >= stop for waited, until, _ in waits)


def test_nothing_is_recorded_outside(cpu2, tmp_path):
    step = training(['host0', 'host1'])
    before = json.dumps(record(step, tmp_path / 'trace.json'))
    step(*data(5, 7))
    assert json.dumps(json.loads((tmp_path / 'trace.json').read_text())['traceEvents']) == before
    tasks = [print]
    assert timeline_module.on_track(tasks, 'run', cpu2) is tasks


def test_one_timeline_at_a_time(tmp_path):
    with mgpu.timeline(str(tmp_path / 'a.json')), pytest.raises(RuntimeError, match='already, to .*a.json'):
        with mgpu.timeline(str(tmp_path / 'b.json')):
            pass
    with mgpu.timeline(str(tmp_path / 'b.json')):
        pass
    assert json.loads((tmp_path / 'a.json').read_text()) and json.loads((tmp_path / 'b.json').read_text())


def test_the_file_is_written_when_the_block_raises(tmp_path):
    with pytest.raises(ZeroDivisionError), mgpu.timeline(str(tmp_path / 'a.json')):
        with timeline_module.span('scatter'):
            raise ZeroDivisionError
    assert [event['name'] for event in json.loads((tmp_path / 'a.json').read_text())['traceEvents']][-1] == 'scatter'


def test_a_long_timeline_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, 'LONGEST', 2)
    with mgpu.timeline(str(tmp_path / 'a.json')):
        for _ in range(5):
            with timeline_module.span('run'):
                pass
    trace = json.loads((tmp_path / 'a.json').read_text())
    assert trace['otherData'] == {'left_out': 3} and len(check_format(trace['traceEvents'])['host']) == 2


def test_each_rank_writes_a_file_of_its_own(tmp_path):
    path = str(tmp_path / 'a.json')
    assert timeline_module.Recorder(path).path == path
    assert timeline_module.Recorder(path, 3).path == str(tmp_path / 'a.rank3.json')


SCRIPT = """
import theano_mgpu as mgpu, theano.tensor as T, numpy as np
x = T.dvector('x')
mgpu.init('dev0->cpu;dev1->cpu')
mgpu.function([x], x * 2, mode='FAST_COMPILE')(np.ones(3))
"""


@pytest.mark.slow
def test_the_flag_records_a_script(tmp_path):
    path = tmp_path / 'trace.json'
    flags = 'floatX=float32,cxx=,mgpu.timeline=%s' % path  # interpreted: compiling takes longer than the steps
    python('-c', SCRIPT, flags=flags)
    spans = check_format(json.loads(path.read_text())['traceEvents'])
    assert {'dev0', 'dev1', 'host', 'step'} == set(spans)
