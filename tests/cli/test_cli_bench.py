"""`theano-mgpu bench`: real runs of small models, its files, and its error messages."""
import contextlib
import io
import json
import re

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.bench.measure import start_ranks
from theano_mgpu.utils import mpi_environment, rank_process

import pytest
from support.small_models import saved_classifier

FLAGS = 'floatX=float32,contexts=bench_a->cpu;bench_b->cpu'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Return a folder with a small compiled model."""
    path = tmp_path_factory.mktemp('bench')
    saved_classifier(path)
    return path


@pytest.fixture(scope='module')
def measured(folder):
    """Return the output and the figures of one run over two contexts."""
    return bench(folder, 'small.h5', '--rounds', '3', '--steps', '3', '--batch-size', '24', '--json', 'out.json')


@pytest.fixture(autouse=True)
def own_contexts():
    """Restore the active contexts, which the command changes, for other tests."""
    yield
    mgpu.init('host0->cpu')


def bench(folder, model, *arguments, code=0):
    """Run the command in a folder; return its output, and the figures in out.json."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv('THEANO_FLAGS', FLAGS)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main(['bench', '--model', model] + list(arguments)) == code, err.getvalue()
        figures = json.loads((folder / 'out.json').read_text()) if '--json' in arguments and not code else None
    return out.getvalue() if not code else err.getvalue(), figures


# --- a run ---------------------------------------------------------------------------------------

def test_the_table(measured):
    text, figures = measured
    rows = figures['rows']
    assert list(rows) == ['plain Keras', '1 context', '2 contexts']
    for row in rows.values():
        assert 0 < row['lowest'] <= row['seconds'] <= row['highest'] and len(row['rounds']) == 3
        assert row['samples_per_s'] == pytest.approx(24 / row['seconds'])
    assert rows['1 context']['speedup'] == 1
    ratios = [one / two for one, two in zip(rows['1 context']['rounds'], rows['2 contexts']['rounds'])]
    assert rows['2 contexts']['speedup'] == pytest.approx(sorted(ratios)[1])
    lines = text.partition('speedup over 1 context')[2].splitlines()[1:]
    assert re.split('  +', lines[0].strip()) == list(rows)
    cells = [line.split('  ')[0] for line in lines[1:]]
    assert cells == ['samples/s', 'speedup', 'ms a step', 'lowest', 'highest', *rows['2 contexts']['phases']]


def test_where_the_time_goes(measured):
    text, figures = measured
    plain, *others = figures['rows'].values()
    assert list(plain['phases']) == ['other'] and re.search(r'\nscatter +- ', text)
    for row in others:
        assert {'scatter', 'run', 'all_reduce', 'update', 'other'} <= set(row['phases'])
        assert sum(row['phases'].values()) <= row['seconds'] * 1.5  # medians need not add up


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['bench', '--help'])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for words in ('examples:', 'theano-mgpu bench --model mlp --ranks 2', 'vgg16', 'all_reduce',
                  'benchmarks/predict_scaling.py'):
        assert words in text


@pytest.mark.mpi
def test_ranks(folder):
    text, figures = bench(folder, 'small.h5', '--gpus', '1', '--ranks', '2', '--rounds', '2', '--steps', '2',
                          '--batch-size', '25', '--json', 'out.json')
    assert list(figures['rows']) == ['plain Keras', '1 context', '1 rank', '2 ranks']
    phases = figures['rows']['2 ranks']['phases']
    assert {'wait', 'exchange'} <= set(phases) and re.search(r'\nwait +- +- +- +\d', text)
    assert all(row['seconds'] > 0 and len(row['rounds']) == 2 for row in figures['rows'].values())


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_that_fail(folder, capfd):
    settings = dict(model='nowhere.h5', optimizer='adam', input_shape=None, batch_size=2, steps=1)
    with pytest.raises(mgpu.MgpuError, match='1 rank ended without an answer, with exit code 1: see above'):
        with start_ranks(1, settings):
            pass
    assert 'nowhere.h5' in capfd.readouterr().err


# --- impossible requests -------------------------------------------------------------------------

@pytest.mark.parametrize('model,arguments,message', [
    ('nowhere.h5', [], '--model nowhere.h5: there is no such file, and no model of that name; .* one of cnn, mlp'),
    ('small.h5', ['--json', 'no/out.json'], 'no/out.json cannot be written: there is no folder'),
    ('small.h5', ['--json', 'small.h5'], 'small.h5 is the model itself: choose another name'),
    ('small.h5', ['--batch-size', '1'], '--batch-size 1: each of 2 devices needs a sample; give 2 or more'),
    ('small.h5', ['--gpus', '3'], '3 contexts were asked for; there are 2: bench_a->cpu;bench_b->cpu'),
    ('small.h5', ['--input-shape', '9'], r'--input-shape 9 does not fit the input .* shape \(8,\)'),
    ('text.h5', [], 'Keras cannot load the model text.h5: .* measure training in your script'),
    ('cnn', ['--input-shape', '3'], r'the model cnn cannot be made for inputs of shape \(3,\).* --input-shape 28 28 1'),
    ('mlp', ['--optimizer', 'nope'], 'the model mlp cannot be compiled: .*nope'),
])
def test_mistakes(folder, model, arguments, message):
    (folder / 'text.h5').write_text('no model')
    text, _ = bench(folder, model, *arguments, code=2)
    error = text[text.index('theano-mgpu: error: '):]
    assert re.search(message, error, re.DOTALL), error


def test_no_mpi(folder, monkeypatch):
    monkeypatch.setenv('PATH', str(folder))
    text, _ = bench(folder, 'small.h5', '--ranks', '2', code=1)
    assert 'mpirun, which starts the processes, is not on PATH' in text


def test_within_a_job(folder, monkeypatch):
    for name, value in zip(mpi_environment.MPIRUN.variables, '0202'):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_process, 'end_all', lambda code: None)  # it would end this process, too
    text, _ = bench(folder, 'small.h5', code=2)
    assert 'bench starts its own processes: run it without launch, with --ranks 2' in text
