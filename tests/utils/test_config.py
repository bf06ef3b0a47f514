"""Flags and .theanorc, read without Theano."""
from theano_mgpu import config
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import flag_text

import pytest
import theano


@pytest.fixture
def theanorc(tmp_path, monkeypatch):
    path = tmp_path / 'theanorc'
    monkeypatch.setenv('THEANORC', str(path))
    monkeypatch.delenv('THEANO_FLAGS', raising=False)
    return path


def test_flags_win_over_theanorc(theanorc, monkeypatch):
    theanorc.write_text('[global]\ncontexts = dev0->cuda0\nfloatX = float32\n[mgpu]\nexecutor = serial\n')
    assert flag_text.flag('contexts') == 'dev0->cuda0'
    assert flag_text.flag('floatX') == 'float32'
    assert flag_text.own_flag('mgpu.executor') == 'serial'
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=dev1->cuda1,mgpu.executor=threads')
    assert flag_text.flag('contexts') == 'dev1->cuda1'
    assert flag_text.own_flag('mgpu.executor') == 'threads'


def test_defaults(theanorc):
    assert flag_text.flag('contexts') is None
    assert flag_text.flag('contexts', '') == ''
    assert flag_text.own_flag('mgpu.executor') == 'auto'


def test_the_later_theanorc_wins(tmp_path, monkeypatch):
    for name, value in (('a', 'dev0->cuda0'), ('b', 'dev0->cuda1')):
        (tmp_path / name).write_text('[global]\ncontexts = %s\n' % value)
    monkeypatch.setenv('THEANORC', '%s:%s' % (tmp_path / 'a', tmp_path / 'b'))
    monkeypatch.delenv('THEANO_FLAGS', raising=False)
    assert flag_text.flag('contexts') == 'dev0->cuda1'


def test_an_empty_variable_names_no_theanorc(tmp_path, monkeypatch):
    """Flags of the package's own were read from ~/.theanorc all the same, which Theano does not read."""
    (tmp_path / '.theanorc').write_text('[mgpu]\nexecutor = serial\n')
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('THEANO_FLAGS', raising=False)
    for value, executor in (('~/.theanorc', 'serial'), ('', 'auto')):
        monkeypatch.setenv('THEANORC', value)
        assert flag_text.theanorc_files() == theano.configparser.config_files_from_theanorc()
        assert flag_text.own_flag('mgpu.executor') == executor


def test_a_wrong_value_names_the_right_ones(theanorc, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.executor=fast')
    with pytest.raises(MgpuError, match='mgpu.executor=fast is not one of auto, serial, threads'):
        flag_text.own_flag('mgpu.executor')


def test_a_flag_takes_a_boolean_in_code_as_flags_of_theano_do():
    with theano.configparser.change_flags(**{'mgpu.verify': True}):
        assert theano.config.mgpu.verify == 'True'
    with pytest.raises(ValueError, match='Valid options are'):
        theano.config.mgpu.verify = 1


def test_quoted_flags_survive_a_round_trip():
    text = "floatX=float32,gcc.cxxflags='-O2 -g, -w'"
    assert flag_text.parse_flags(text)['gcc.cxxflags'] == '-O2 -g, -w'
    assert flag_text.parse_flags(flag_text.join_flags(flag_text.parse_flags(text))) == flag_text.parse_flags(text)


def test_the_written_theanorc_reads_back(theanorc):
    theanorc.write_text(config.theanorc_text('dev0->cuda0;dev1->cuda1', executor='threads'))
    assert flag_text.flag('contexts') == 'dev0->cuda0;dev1->cuda1'
    assert flag_text.own_flag('mgpu.executor') == 'threads'
