"""The exchange of tables of which a batch touches a few rows: the weights and the state of plain Theano."""
from theano_mgpu.graph.analysis import touched_rows

import numpy as np
import pytest
import theano
from support import touched_tables
from support.launch import launch
from support.modes import PYTHON
from support.processes import python
from support.search_path import ROOT, search_path
from support.standin import run
from support.touched_tables import (
    MODELS,
    OPTIMIZERS,
    SIZE,
    WORDS,
    adam,
    check,
    check_drawn,
    difference,
    made,
    mean_of_words,
    sentences,
    sgd,
    tied,
    tolerance,
    trained,
    two_lookups,
)
from test_combinations import ON_STANDIN
from theano.configparser import change_flags


@pytest.fixture(autouse=True)
def _begin(monkeypatch):
    monkeypatch.setattr(touched_rows, 'LARGE', 0)


QUICK = [(mean_of_words, adam), (two_lookups, sgd)]


def shapes(step):
    """Return the shapes of the sums that a function has exchanged last."""
    return {shape for _, channel in step.executable.exchanges.values() for shape, _ in channel._layout.like}


@pytest.mark.slow
@pytest.mark.parametrize('model, optimizer', [
    pytest.param(model, optimizer, id='%s-%s' % (model.__name__, optimizer.__name__),
                 marks=() if (model, optimizer) in QUICK else pytest.mark.slow)
    for model in MODELS for optimizer in OPTIMIZERS])
def test_contexts_of_the_cpu(model, optimizer, cpu2):
    with change_flags(floatX='float64'):
        check([model], [optimizer])


def test_a_step_exchanges_what_is_smaller(cpu2):
    """A batch that touches few rows exchanges them, and no table; the last batch touches more than half of the rows."""
    rng = np.random.RandomState(0)
    with change_flags(mode=PYTHON):
        step, _ = made(two_lookups, sgd, True)
        step(*sentences(4, rng))
        assert (0, SIZE) in shapes(step) and (WORDS, SIZE) not in shapes(step)
        step(*sentences(40, rng))
        assert (WORDS, SIZE) in shapes(step)
        step(*sentences(4, rng))
        assert (WORDS, SIZE) not in shapes(step)


def test_replicas_with_other_numbers_of_samples_decide_alike(cpu2):
    """The ten samples of the second replica, of 21, would be few enough by themselves to exchange their rows."""
    with change_flags(floatX='float64', mode=PYTHON):
        found, expected = [trained(mean_of_words, sgd, divided, [21])[0] for divided in (True, False)]
        assert difference(found, expected) < tolerance()


def test_a_table_that_is_used_as_a_matrix_too_is_exchanged_whole(cpu2):
    with change_flags(mode=PYTHON):
        step, _ = made(tied, sgd, True)
        step(*sentences(4, np.random.RandomState(0)))
    assert (WORDS, SIZE) in shapes(step)


def test_a_small_table_is_exchanged_whole(cpu2, monkeypatch):
    """The decision costs more than the exchange of a small table."""
    monkeypatch.setattr(touched_rows, 'LARGE', 1 << 20)
    with change_flags(mode=PYTHON):
        step, _ = made(two_lookups, sgd, True)
        step(*sentences(4, np.random.RandomState(0)))
    assert (WORDS, SIZE) in shapes(step)


@pytest.mark.slow
def test_a_word_outside_of_the_table_is_the_error_of_plain_theano(cpu2):
    words, *others = sentences(4, np.random.RandomState(0))
    words[2, 1] = WORDS
    for divided in (False, True):
        step, variables = made(mean_of_words, sgd, divided)
        before = variables[0].get_value()
        with pytest.raises(IndexError, match='index %d is out of bounds|out of range' % WORDS):
            step(words, *others)
        np.testing.assert_array_equal(variables[0].get_value(), before)


@pytest.mark.slow
@pytest.mark.parametrize('model', [mean_of_words, two_lookups])
def test_logical_shards_have_the_bits_of_one_context(model, contexts):
    results = []
    with change_flags(**{'mgpu.logical_shards': 4, 'floatX': 'float32'}):
        for n in (1, 2, 4):
            contexts('cpu', n)
            results.append(trained(model, adam, True)[0])
    for others in zip(*results):
        for other in others[1:]:
            np.testing.assert_array_equal(other, others[0])


@pytest.mark.slow
@pytest.mark.opencl
@pytest.mark.parametrize('model', [mean_of_words, two_lookups])
def test_opencl_devices(model, gpu2):
    check([model], [adam])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('flags', ['', 'mgpu.update_on=sharded,', 'mgpu.logical_shards=4,', 'mgpu.overlap=True,'])
def test_ranks(flags):
    launch(2, flags=flags + 'floatX=float64,optimizer=fast_compile', job=touched_tables.__file__)


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_with_samples_of_their_own():
    """Each would choose by the length of its own samples: they exchange the table."""
    launch(2, 'own', flags='mgpu.data=sharded,cxx=,floatX=float64,optimizer=fast_compile', job=touched_tables.__file__)


@pytest.mark.slow
def test_processes_of_cores():
    python('-c', 'from support import forked_cases, touched_tables\nforked_cases.begin(3)\n'
           'touched_tables.begin()\ntouched_tables.check()',
           flags='floatX=float64', PYTHONPATH=search_path(ROOT / 'tests', ROOT / 'benchmarks'), OMP_NUM_THREADS=None)


ON_DEVICES = '''
from support import touched_tables
mgpu.init(2)
touched_tables.begin()
touched_tables.check(touched_tables.MODELS[:2], touched_tables.OPTIMIZERS[:2])
'''


@pytest.mark.slow
class TestCudaDevices:
    pytestmark = ON_STANDIN

    @pytest.mark.parametrize('flags', ['mgpu.collectives=nccl', 'mgpu.collectives=host', 'mgpu.logical_shards=4'])
    def test_channels(self, flags):
        run(ON_DEVICES, 2, flags, delay_us=50)


@pytest.mark.slow
@pytest.mark.parametrize('seeds', [range(3), *(range(start, start + 50) for start in range(0, 200, 50))], ids=str)
def test_drawn_models(seeds, contexts):
    """Words are repeated, negative, or none; a table is scaled, looked up in several ways, or used as a matrix."""
    with change_flags(floatX='float64', mode=PYTHON if len(seeds) < 10 else theano.config.mode):
        for seed in seeds:
            contexts('cpu', 2 + seed % 3)
            check_drawn([seed])
