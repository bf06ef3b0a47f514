"""The index of the keys of Theano's compiled code: a process reads the keys that it needs, whoever wrote them."""
import builtins
import os
import pickle
import sys
import types

import theano_mgpu  # noqa: F401  before theano
from theano_mgpu.compat import theano_keys
from theano_mgpu.utils.attributes import temporarily

import pytest
import theano
import theano.tensor as T
from theano.gof import cmodule
from theano.gof.cc import get_module_cache
from theano.gpuarray import type as gpuarray_type


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of compiled code without any; a process that starts examines no entries of its index."""
    monkeypatch.setattr(theano_keys, 'SAMPLE', 0)
    return tmp_path


def key_of(n):
    return (1,), ('CLinker.cmodule_key', ('-O2',), (), (), 'md5:0', (theano.scalar.Scalar('float32'), n))


def add(folder, n, *more):
    """Add an entry as Theano does without this package; return its data."""
    entry = folder / ('tmp%d' % n)
    entry.mkdir()
    module = entry / 'm1.so'
    module.touch()
    data = cmodule.KeyData({key_of(n), *more}, 'hash%d' % n, str(entry / 'key.pkl'), str(module))
    data.save_pkl()
    return data


def start(folder):
    return cmodule.ModuleCache(str(folder))


def run_once(folder):
    start(folder)._on_atexit()


def read_by(cache):
    return sorted(os.path.basename(os.path.dirname(path)) for path in cache.loaded_key_pkl)


def test_a_process_reads_the_keys_that_it_needs(folder, monkeypatch):
    """Each process read all keys: 3 s for 15,000 entries; it tried to open each for each new module, and at the end."""
    data = [add(folder, n) for n in range(20)]
    run_once(folder)
    opened = []
    monkeypatch.setattr(cmodule, 'open', lambda path, *mode: opened.append(path) or builtins.open(path, *mode),
                        raising=False)
    cache = start(folder)
    assert not opened and not cache.entry_from_key
    assert key_of(7) in cache.entry_from_key and cache.entry_from_key[key_of(7)] == data[7].entry
    assert key_of(20) not in cache.entry_from_key
    assert 'hash9' in cache.module_hash_to_key_data and 'hash20' not in cache.module_hash_to_key_data
    assert read_by(cache) == ['tmp7', 'tmp9'] and opened == [data[7].key_pkl, data[9].key_pkl]
    opened.clear()
    cache.refresh(cleanup=False)  # as for a module that was compiled
    cache._on_atexit()
    assert set(opened) <= {each for n in (7, 9) for each in (data[n].key_pkl, data[n].entry)}


def test_looking_a_key_up_examines_no_other_entry(folder, monkeypatch):
    """Entries that were only noted as examined would not be read any more: their ops would be compiled anew."""
    for n in range(3):
        add(folder, n)
    run_once(folder)
    cache = start(folder)
    monkeypatch.setattr(theano_keys, 'SAMPLE', 50)  # of entries that a process examines when it starts, not later
    assert key_of(0) in cache.entry_from_key
    assert key_of(1) in cache.entry_from_key and 'hash2' in cache.module_hash_to_key_data


def test_entries_that_another_process_adds_are_found(folder):
    """A process without theano_mgpu does not write the index."""
    add(folder, 1)
    run_once(folder)
    first, second = start(folder), start(folder)
    add(folder, 2)
    first.refresh(cleanup=False)
    assert key_of(2) in first.entry_from_key and key_of(2) not in second.entry_from_key
    add(folder, 3)
    second.refresh(cleanup=False)
    for cache in (first, second):  # each writes what it knows, and keeps what the other one knew
        cache._on_atexit()
    assert sorted(line.split()[0] for line in open(str(folder / theano_keys.INDEX))) == ['tmp1', 'tmp2', 'tmp3']
    assert not start(folder).loaded_key_pkl


def test_a_key_that_the_index_lacks_is_found_by_its_source(folder):
    """Another process has added it; Theano would add it once more, which is an AssertionError."""
    add(folder, 1)
    run_once(folder)
    other = start(folder)
    assert key_of(1) in other.entry_from_key
    other.module_hash_to_key_data['hash1'].add_key(key_of(5))
    cache = start(folder)
    assert key_of(5) not in cache.entry_from_key
    assert 'hash1' in cache.module_hash_to_key_data
    module = types.ModuleType('m1')
    cache.module_from_name[str(folder / 'tmp1' / 'm1.so')] = module
    assert cache._get_from_hash('hash1', key_of(5)) is module
    cache._on_atexit()
    assert key_of(5) in start(folder).entry_from_key


def removed(folder):
    for path in (folder / 'tmp1').iterdir():
        path.unlink()
    (folder / 'tmp1').rmdir()


def truncated(folder):
    (folder / 'tmp1' / 'key.pkl').write_bytes(b'')


def without_module(folder):
    (folder / 'tmp1' / 'm1.so').unlink()


@pytest.mark.parametrize('damage', [removed, truncated, without_module])
def test_an_entry_that_is_damaged_or_gone_is_not_used(folder, damage, monkeypatch):
    for n in (1, 2):
        add(folder, n)
    run_once(folder)
    damage(folder)
    cache = start(folder)
    assert key_of(1) not in cache.entry_from_key and 'hash1' not in cache.module_hash_to_key_data
    assert key_of(2) in cache.entry_from_key
    cache.refresh(cleanup=False)
    cache._on_atexit()
    monkeypatch.setattr(theano_keys, 'SAMPLE', 50)
    run_once(folder)  # a later process examines it
    assert sorted(path.name for path in folder.iterdir()) == ['theano_mgpu.keys', 'tmp2']


@pytest.mark.parametrize('text', [b'', b'\xff\xfe\x00', b'tmp1', b'tmp1 hash2 wrong\n\n', b'tmp2 hash1 00000000\n'])
def test_a_damaged_index_hides_no_entry(folder, text):
    for n in (1, 2):
        add(folder, n)
    run_once(folder)
    (folder / theano_keys.INDEX).write_bytes(text)
    cache = start(folder)
    found = [key_of(n) in cache.entry_from_key or 'hash%d' % n in cache.module_hash_to_key_data for n in (1, 2)]
    assert all(found) or text.startswith(b'tmp')  # a wrong line costs one compilation, and nothing else
    cache._on_atexit()


def test_a_purge_while_a_process_runs(folder):
    add(folder, 1)
    run_once(folder)
    cache = start(folder)
    removed(folder)
    (folder / theano_keys.INDEX).unlink()
    folder.rmdir()
    assert key_of(1) not in cache.entry_from_key
    cache.refresh(cleanup=False)
    folder.mkdir()
    add(folder, 2)
    cache.refresh(cleanup=False)
    assert key_of(2) in cache.entry_from_key
    cache._on_atexit()


def test_entries_that_nobody_uses_are_deleted_and_others_stay(folder, monkeypatch):
    monkeypatch.setattr(theano_keys, 'SAMPLE', 50)
    for n in range(4):
        add(folder, n)
    run_once(folder)
    os.utime(str(folder / 'tmp2' / 'm1.so'), (0, 0))
    run_once(folder)
    start(folder).refresh(delete_if_problem=True)
    assert sorted(path.name for path in folder.iterdir()) == ['theano_mgpu.keys', 'tmp0', 'tmp1', 'tmp3']


@pytest.mark.parametrize('calls', [1, 2])
def test_a_folder_that_another_process_removes_meanwhile(folder, calls, monkeypatch):
    """Theano's start ended with a FileNotFoundError: two processes saw an empty folder, and one removed it."""
    (folder / 'tmp1').mkdir()
    add(folder, 2)
    listed, listdir = [], os.listdir

    def removed_meanwhile(path):
        if str(path).endswith('tmp1'):
            listed.append(path)
            if len(listed) == calls:
                os.rmdir(path)
        return listdir(path)
    monkeypatch.setattr(os, 'listdir', removed_meanwhile)
    assert read_by(start(folder)) == ['tmp2'] and len(listed) >= calls and not (folder / 'tmp1').exists()


def test_clearing_deletes_all_entries(folder):
    for n in range(3):
        add(folder, n)
    run_once(folder)
    start(folder).clear(unversioned_min_age=-1)
    assert [path.name for path in folder.iterdir() if path.name.startswith('tmp')] == []


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_equal_keys_have_one_digest(monkeypatch):
    """A digest that differs in the next process would have the source of each op made again to find its code."""
    x, y = T.fmatrix('x'), T.fmatrix('named')
    for variable in (x, y):
        theano.function([variable], [T.tanh(variable) * 2 + 1, T.dot(variable, variable.T), variable.sum(axis=0)],
                        mode='FAST_RUN')
    keys = list(get_module_cache().entry_from_key)
    assert any('Composite' in theano_keys._text(key) for key in keys)
    for key in keys:
        try:
            pickled = pickle.dumps(key)
        except (AttributeError, pickle.PicklingError):  # an op of another test, of a local class: Theano keeps no code
            continue
        with temporarily(theano_keys._reading, 'keys', True):  # else a type of a closed context is one of the host
            assert theano_keys._digest(pickle.loads(pickled)) == theano_keys._digest(key)


def test_keys_of_devices_that_are_not_open_are_found_as_they_were_written(folder, monkeypatch):
    """The check of a new key read the others of its code, and opened their devices: `contexts` held dev0, too."""
    pytest.importorskip('pygpu')
    with monkeypatch.context() as while_open:
        of_gpus = []
        for name in ('absent0', 'absent1'):
            while_open.setitem(gpuarray_type._context_reg, name, object())
            type_ = gpuarray_type.GpuArrayType('float32', (False,), name)
            of_gpus.append(((1,), ('key', (), (), (), 'md5:0', (type_,))))
        data = add(folder, 1, *of_gpus)
    for key in of_gpus:
        start(folder).check_key(key, data.key_pkl)


@pytest.mark.needs_compiler
def test_a_module_is_loaded_without_a_list_of_all(monkeypatch):
    """Python listed the folder of all compiled code: 5 ms for each module with 15,000 entries."""
    from theano.gof import cutils  # noqa: F401  for its package, which lies there, Python lists the folder once
    sys.path_importer_cache.pop(theano.config.compiledir, None)
    x = T.dvector()
    cache = get_module_cache()
    theano.function([x], x * 3 + T.exp(x), mode='FAST_RUN')
    monkeypatch.setattr(cache, 'module_from_name', {})
    for name in [name for name in sys.modules if name.startswith('tmp')]:
        del sys.modules[name]
    found = theano.function([x], x * 3 + T.exp(x), mode='FAST_RUN')
    assert found([0.0]) == [1.0] and cache.module_from_name
    assert theano.config.compiledir not in sys.path_importer_cache
