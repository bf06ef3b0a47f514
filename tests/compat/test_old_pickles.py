"""Pickles of Python 2, of Theano 0.x, and of machines with other GPUs are read as on the machine that made them."""
import io
import pickle

from theano_mgpu.errors import GraphError

import joblib
import numpy as np
import pytest
import theano
from support.old_pickles import names_in, old_pickle
from theano import tensor as T
from theano.misc import pkl_utils

YEARS = 'gpuarray', 'sandbox.gpuarray', 'sandbox.cuda'
FLOATS = np.linspace(-3, 3, 12, dtype='float32').reshape(3, 4)


# --- Python 2 ------------------------------------------------------------------------------------

@pytest.mark.parametrize('protocol', [0, 2])
@pytest.mark.parametrize('read', [
    pickle.loads, lambda data: pickle.load(io.BytesIO(data)), lambda data: pickle.Unpickler(io.BytesIO(data)).load(),
    lambda data: pickle._Unpickler(io.BytesIO(data)).load(), lambda data: joblib.load(io.BytesIO(data)),
    lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    lambda data: pkl_utils.CompatUnpickler(io.BytesIO(data)).load()],
    ids='loads load Unpickler _Unpickler joblib numpy theano'.split())
def test_pickles_of_python_2_are_read(protocol, read, capsys):
    """Ended with "'ascii' codec can't decode byte 0x80 in position 2: ordinal not in range(128)"."""
    found = read(old_pickle({'W': FLOATS, 'names': ['caf\xe9', u'plain'], 'n': (FLOATS > 0, 7)}, protocol))
    assert found['names'] == ['caf\xe9', 'plain'] and found['n'][1] == 7
    np.testing.assert_array_equal(found['W'], FLOATS)
    np.testing.assert_array_equal(found['n'][0], FLOATS > 0)
    note, = capsys.readouterr().err.splitlines()
    assert 'byte strings of Python 2' in note and "encoding='bytes'" in note


def test_a_script_that_reads_bytes_itself_reads_bytes(capsys):
    def read(data):
        try:
            return pickle.loads(data)
        except UnicodeDecodeError:
            return pickle.loads(data, encoding='bytes')
    assert read(old_pickle({'name': 'caf\xe9'})) == {b'name': b'caf\xe9'}
    for options in {'encoding': 'utf-8'}, {'errors': 'surrogateescape'}, {'encoding': 'latin-1'}:
        text = pickle.loads(old_pickle('caf\xc3\xa9'), **options)
        assert text == b'caf\xc3\xa9'.decode(**{'encoding': 'ascii', **options})
    with pytest.raises(UnicodeDecodeError):
        pickle.loads(old_pickle('caf\xe9'), encoding='utf-8')
    assert not capsys.readouterr().err


def test_pickles_of_today_are_read_as_before():
    class Own(pickle.Unpickler):
        def persistent_load(self, name):
            return name.upper()

        def find_class(self, module, name):
            raise pickle.UnpicklingError('no %s.%s' % (module, name))

    with pytest.raises(pickle.UnpicklingError, match='no collections.OrderedDict'):
        Own(io.BytesIO(b'ccollections\nOrderedDict\n.')).load()
    assert Own(io.BytesIO(b'Pname\n.')).load() == 'NAME'
    with pytest.raises(ModuleNotFoundError, match='nowhere'):
        pickle.loads(b'cnowhere\nThing\n.')
    with pytest.raises(AttributeError, match='Nothing'):
        pickle.load(io.BytesIO(b'ctheano\nNothing\n.'))
    buffers = []
    data = pickle.dumps(FLOATS, protocol=5, buffer_callback=buffers.append)
    np.testing.assert_array_equal(pickle.loads(data, buffers=buffers), FLOATS)
    assert pickle.loads(pickle.dumps(pickle.Unpickler)) is pickle.Unpickler


# --- Arrays of GPUs ------------------------------------------------------------------------------

@pytest.fixture
def place(gpu2):
    return gpu2[0].name


def absent(thing, place, year, protocol=2):
    """Return a pickle whose contexts have names that are not here."""
    return old_pickle(thing, protocol, year=year, names={place: 'gpu_of_before'})


@pytest.mark.slow_with('gpuarray-0')
@pytest.mark.opencl
@pytest.mark.parametrize('protocol', [0, 2])
@pytest.mark.parametrize('year', YEARS)
def test_shared_variables_of_an_absent_gpu_are_read(year, protocol, place):
    """Ended with "context name gpu_of_before not defined", or "No module named 'theano.sandbox.cuda.type'"."""
    shared = theano.shared(FLOATS, 'W', target=place)
    data = absent([shared, shared.container.value, shared.type], place, year, protocol)
    assert len(names_in(data)) == 3 and all(name.startswith('theano.%s.' % year) for name in names_in(data))
    found, array, kind = pickle.loads(data)
    assert type(found) is type(theano.shared(FLOATS)) and kind == found.type == T.fmatrix and found.name == 'W'
    assert type(array) is np.ndarray
    np.testing.assert_array_equal(array, FLOATS)
    np.testing.assert_array_equal(found.get_value(), FLOATS)
    found.set_value(FLOATS * 2)
    x = T.fvector('x')
    np.testing.assert_allclose(theano.function([x], x.dot(found))(np.ones(3, 'float32')), FLOATS.sum(0) * 2, 1e-6)


def step(place, looped):
    """Return the inputs, the loss and the updates of a training step whose parameter is on a context, or the host."""
    W = theano.shared(FLOATS, 'W', target=place)
    x, t = T.fmatrix('x'), T.fmatrix('t')
    y = theano.scan(lambda row, before: T.tanh(row.dot(W) + before), x, T.zeros((4,), 'float32'))[0] if looped else \
        T.nnet.softmax(x.dot(W))
    loss = T.sqr(y - t).mean()
    return [x, t], loss, [(W, W - np.float32(.1) * T.grad(loss, W))]


BATCHES = [(np.cos(np.arange(3. * n)).reshape(n, 3).astype('float32'), np.full((n, 4), .3, 'float32'))
           for n in (5, 2, 7)]


@pytest.mark.slow_but_with('sandbox.cuda-False')
@pytest.mark.opencl
@pytest.mark.parametrize('year, looped', [(year, looped) for looped in (False, True) for year in YEARS])
def test_functions_of_an_absent_gpu_are_compiled_anew(year, looped, place):
    inputs, loss, updates = step(place, looped)
    made = theano.function(inputs, [loss], updates=updates)
    data = absent([made, updates[0][0]], place, year)
    assert any('elemwise' in name.lower() for name in names_in(data)), 'nothing on the GPU'
    found, W = pickle.loads(data)
    graph = [loss, *[new for _, new in updates]]
    of_graph, old = pickle.loads(absent([[*inputs, *graph], updates[0][0]], place, year))
    anew = theano.function(of_graph[:2], of_graph[2:3], updates=[(old, of_graph[3])])
    inputs, loss, updates = step('cpu', looped)
    plain = theano.function(inputs, [loss], updates=updates)  # loops do not run on OpenCL
    for batch in BATCHES:
        expected = plain(*batch)
        np.testing.assert_allclose(found(*batch), expected, 1e-5)
        np.testing.assert_allclose(anew(*batch), expected, 1e-5)
    for variable in old, W:
        np.testing.assert_allclose(variable.get_value(), updates[0][0].get_value(), 1e-5)
        assert np.abs(variable.get_value() - FLOATS).max() > 1e-3


@pytest.mark.opencl
def test_arrays_of_a_gpu_that_is_here_stay_there(place):
    x, W = T.fmatrix('x'), theano.shared(FLOATS, 'W', target=place)
    made = theano.function([x], T.tanh(x.dot(W)), updates=[(W, W * 2)])
    found, copied = pickle.loads(pickle.dumps([made, W]))
    assert copied.type == W.type and W.type.context_name == place
    assert any('Gpu' in str(node.op) for node in found.maker.fgraph.apply_nodes)
    for batch, _ in BATCHES:
        np.testing.assert_array_equal(found(batch), made(batch))


@pytest.mark.opencl
def test_transfers_between_a_gpu_that_is_here_and_an_absent_one(gpu2):
    here, there = (context.name for context in gpu2)
    a, b = theano.shared(FLOATS, 'a', target=here), theano.shared(FLOATS, 'b', target=there)
    graphs = [a.transfer(there) * 2, b.transfer(here) * 2, a.transfer('cpu') + b.transfer('cpu')]
    found = pickle.loads(absent(graphs, there, 'gpuarray'))
    for value, factor in zip(theano.function([], found)(), (2, 2, 2)):
        np.testing.assert_array_equal(value, FLOATS * factor)


@pytest.mark.opencl
def test_a_function_of_an_absent_gpu_returns_what_it_returned(place):
    """One result by itself, results in a list, or none."""
    x, W = T.fmatrix('x'), theano.shared(FLOATS, 'W', target=place)
    made = [theano.function([x], outputs, updates=[(W, W + x.sum())]) for outputs in (x.dot(W), [x.dot(W)], None)]
    one, several, none = [each(BATCHES[0][0]) for each in pickle.loads(absent(made, place, 'gpuarray'))]
    assert isinstance(one, np.ndarray) and isinstance(several, list) and not none


@pytest.mark.opencl
@pytest.mark.parametrize('year', ['gpuarray', 'sandbox.cuda'])
def test_ops_that_only_a_gpu_can_compute_are_named(year, place):
    from theano.gpuarray.basic_ops import gpu_contiguous
    W = theano.shared(FLOATS, 'W', target=place)
    by_hand = gpu_contiguous(W).transfer('cpu').sum()
    with pytest.raises(GraphError, match='ops for a GPU.*GpuContiguous.*Save the values of its shared variables'):
        pickle.loads(absent(theano.function([], by_hand), place, year))
    graph = pickle.loads(absent(by_hand, place, year))
    with pytest.raises(GraphError, match='ops for a GPU.*GpuContiguous'):
        theano.function([], graph)


@pytest.mark.parametrize('name', ['gpu_erfinv', 'gpu_erfcinv'])
def test_fused_ops_with_the_functions_of_a_gpu_are_read_as_they_were_written(name):
    """Theano reads the key of new code at once: T.erfinv failed on GPUs, "must be exclusively composed of ScalarOp"."""
    from theano.gpuarray import elemwise
    x = theano.scalar.float32('x')
    fused = theano.scalar.Composite([x], [getattr(elemwise, name)(x * x)])
    assert pickle.loads(pickle.dumps(fused)) == fused


@pytest.mark.opencl
def test_zip_files_of_theano_with_arrays_of_an_absent_gpu(place, tmp_path, monkeypatch):
    from theano.gpuarray import type as gpuarray_type
    name_of = gpuarray_type._name_for_ctx
    monkeypatch.setattr(gpuarray_type, '_name_for_ctx', lambda context: 'gpu_of_before')
    with open(tmp_path / 'model.zip', 'wb') as file:
        pkl_utils.dump(theano.shared(FLOATS, 'W', target=place).container.value, file)
    monkeypatch.setattr(gpuarray_type, '_name_for_ctx', name_of)
    with open(tmp_path / 'model.zip', 'rb') as file:
        np.testing.assert_array_equal(pkl_utils.load(file), FLOATS)
