"""Prediction with each Keras of Theano's time: a Predictor, and the command, as Keras's own predict."""
import json

from theano_mgpu.cli.model_file import load_model
from theano_mgpu.errors import MgpuError

import h5py
import pytest
from support import keras_equivalence  # noqa: F401  chooses Keras's backend first
from test_versions import FOLDER, QUICK, each, with_keras

SCRIPT = str(FOLDER / 'predictions.py')
VERSIONS = '1.2.2', '2.0.9', '2.1.6', '2.2.4', '2.3.1'
QUICK_32 = QUICK.replace('float64', 'float32')


def result(version, *words, **options):
    return json.loads(with_keras(version, SCRIPT, *words, **options).stdout.splitlines()[-1])


@pytest.mark.slow_with('2.2.4')
@each(VERSIONS, quick=('1.2.2', '2.2.4'))
def test_predictor(version):
    """An ImportError of the package said that Predictor is for Keras 2.3.1."""
    assert result(version, 'compare', 'of_normalised_rows', 'of_two_branches') == version


@pytest.mark.slow
@pytest.mark.parametrize('version', VERSIONS)
def test_predictor_of_all_kinds(version):
    assert result(version, 'compare', 'of_weighted_classes', 'of_sequences', 'of_masked_sequences') == version


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('version', VERSIONS)
def test_predictor_of_images(version):
    assert result(version, 'compare', 'of_images', flags='floatX=float64') == version


@each(VERSIONS, quick=('1.2.2', '2.1.6'))
def test_command(version, tmp_path):
    """The command ended with an ImportError."""
    messages = result(version, 'write-and-read', str(tmp_path), 'of_normalised_rows', 'of_two_branches', flags=QUICK_32)
    assert len(messages) == 2 and not any(messages.values()), messages


@pytest.mark.slow
def test_files_of_other_versions(tmp_path):
    """The command loads each file that a Keras loads; for other files it names the version that wrote them."""
    kinds = 'of_normalised_rows', 'of_two_branches'
    for version in VERSIONS:
        result(version, 'write', str(tmp_path), *kinds, flags=QUICK_32)
    for version in VERSIONS:
        messages = result(version, 'read', str(tmp_path), flags=QUICK_32)
        assert len(messages) == len(kinds) * len(VERSIONS)
        for name, message in messages.items():
            written = name.split()[0]
            assert not message or written != version and 'pip install --no-deps Keras==%s' % written in message, message
        loaded = {name.split()[0] for name, message in messages.items() if not message}
        assert loaded >= {'1.2.2': {'1.2.2'}, '2.0.9': {'1.2.2', '2.0.9', '2.1.6', '2.2.4'}}.get(version, set(VERSIONS))


@pytest.mark.parametrize('written,advice', [
    ('1.2.2', 'Keras 1.2.2 wrote the file, and Keras 2.3.1 is installed: pip install --no-deps Keras==1.2.2'),
    ('2.2.4-tf', 'Keras 2.2.4-tf wrote the file, and Keras 2.3.1 is installed: build the model in a script')])
@pytest.mark.parametrize('safe', [False, True])
def test_a_file_that_cannot_be_loaded_names_the_version_that_wrote_it(written, advice, safe, tmp_path):
    path = str(tmp_path / 'model.h5')
    with h5py.File(path, 'w') as file:
        file.attrs['model_config'] = b'{"class_name": "MaxoutDense", "config": {"name": "maxout"}}'
        file.attrs['keras_version'] = written.encode()
    with pytest.raises(MgpuError, match=advice):
        load_model(path, safe)


MERGED = """
import theano_mgpu
from theano_mgpu.cli.model_file import check_safe
from keras.layers import Dense, Merge
from keras.models import Sequential
import json
for mode in ('concat', lambda tensors: tensors[0]):
    branches = [Sequential([Dense(2, input_dim=3)]) for _ in range(2)]
    options = {} if mode == 'concat' else {'output_shape': (2,)}
    model = Sequential([Merge(branches, mode=mode, name='merged', **options), Dense(1)])
    try:
        check_safe('m.h5', json.loads(model.to_json()))
        print('passes')
    except theano_mgpu.MgpuError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_merge_without_code_is_safe():
    """The option --safe refused each Merge of Keras 1, as if there were code in it."""
    passes, refused = with_keras('1.2.2', '-c', MERGED).stdout.splitlines()[-2:]
    assert passes == 'passes' and 'the layer merged has code in the file' in refused
