"""Bugs that were found and fixed, each under its symptom: changes of later versions of libraries."""
import importlib

from theano_mgpu.compat import theano_flags
from theano_mgpu.errors import MgpuError

import numpy as np
import pytest
import theano
import theano.gpuarray
import theano.tensor as T


@pytest.mark.parametrize('name', ['imdb', 'reuters'])
def test_keras_data_sets_of_texts_are_loaded(name, tmp_path, monkeypatch):
    """NumPy 1.24 refused them: "setting an array element with a sequence ... inhomogeneous shape"."""
    texts = np.empty(5, object)
    texts[:] = [[4, 5], [6], [4, 4, 5], [7], [5, 6]]
    names = ['x_train', 'y_train', 'x_test', 'y_test'] if name == 'imdb' else ['x', 'y']
    np.savez(str(tmp_path / 'texts.npz'), **dict(zip(names, [texts, np.arange(5)] * 2)))
    dataset = importlib.import_module('keras.datasets.' + name)
    monkeypatch.setattr(dataset, 'get_file', lambda path, **where: path)  # as if it was downloaded before
    options = {'num_words': 99} if name == 'imdb' else {'num_words': 99, 'test_split': 0.4}
    (x, labels), (x_test, labels_test) = dataset.load_data(str(tmp_path / 'texts.npz'), **options)
    assert x.dtype == object and len(x) == len(labels) == (5 if name == 'imdb' else 3)
    assert all(list(x[i])[1:] == [word + 3 for word in texts[labels[i]]] and x[i][0] == 1 for i in range(len(x)))
    assert len(x_test) == len(labels_test) > 0
    same = dataset.load_data(str(tmp_path / 'texts.npz'), maxlen=3, **options)[0][0]
    assert same.dtype != object and same.ndim == 2  # as in older NumPy, where all have one length


def test_pooling_by_its_old_name(cpu2):
    """Lasagne 0.1 could not be imported: "cannot import name 'downsample' from 'theano.tensor.signal'"."""
    import theano.tensor.signal.downsample
    from theano.tensor.signal import downsample
    assert theano.tensor.signal.downsample is downsample
    x = T.tensor4()
    pooled = downsample.max_pool_2d(x, ds=(2, 2), st=(1, 2), ignore_border=True, padding=(0, 0))
    values = np.arange(16, dtype=x.dtype).reshape(1, 1, 4, 4)
    np.testing.assert_array_equal(pooled.eval({x: values})[0, 0], [[5, 7], [9, 11], [13, 15]])


def test_the_old_gpu_back_end_is_named_with_what_replaced_it():
    """`import theano.sandbox.cuda` ended with "No module named 'nose'"."""
    with pytest.raises(ImportError, match='theano.gpuarray replaced it.*contexts=dev0->cuda0'):
        import theano.sandbox.cuda.dnn  # noqa: F401


@pytest.mark.parametrize('code, new', [
    ('theano.gpuarray.shared_constructor(1)', "theano.shared(value, target='dev0') replaced it"),
    ('from theano.gpuarray import float32_shared_constructor', "theano.shared(value, target='dev0') replaced it"),
    ("theano.gpuarray.change_flags(device='cuda1')", "with theano_mgpu.device('dev1'):` replaced it"),
    ("theano.sandbox.cuda.use('gpu0')", 'theano.gpuarray replaced it'),
    ('from theano.sandbox import cuda', 'theano.gpuarray replaced it'),
    ('import theano.sandbox.gpuarray', 'theano.gpuarray replaced it'),
])
def test_old_names_of_gpu_code_are_named_with_what_replaced_them(code, new):
    """Old tutorials ended with "module 'theano.gpuarray' has no attribute 'shared_constructor'"."""
    with pytest.raises((AttributeError, ImportError)) as raised:
        exec(code, {'theano': theano})
    assert new in str(raised.value) and 'contexts=dev0->cuda0' in str(raised.value)


def test_other_missing_names_are_missing_as_in_plain_theano():
    assert not hasattr(theano.gpuarray, 'shared_constructor') and not hasattr(theano.gpuarray, 'nothing')
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'theano.gpuarray'"):
        from theano.gpuarray import nothing  # noqa: F401


@pytest.mark.parametrize('flag, new', [('device=gpu0', 'cuda0'), ('init_gpu_device=gpu', 'cuda')])
def test_devices_of_the_old_back_end_are_named_with_their_new_names(flag, new, monkeypatch):
    """Theano's error told of a page in the network, and named neither the new name nor the context map."""
    monkeypatch.setenv('THEANO_FLAGS', flag)
    with pytest.raises(MgpuError, match='flag %s: Theano 1.0 calls this device %s. For several devices map contexts'
                       % (flag, new)):
        theano_flags.refuse_old_devices({})
