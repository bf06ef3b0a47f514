"""The keys of Theano's compiled code: which folder has the code of an op. All processes share the folders."""
from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import threading
import zlib
from types import ModuleType, SimpleNamespace

from ..utils import files
from ..utils.attributes import collector_paused, temporarily
from .wrapping import wrap

INDEX = 'theano_mgpu.keys'  # in the folder of compiled code
SAMPLE = 50  # entries of the index that a process examines when it starts: broken or old ones are deleted
_reading = threading.local()  # its attribute `keys` is true in a thread that reads keys


def write_keys_whole() -> None:
    """Write the keys of an entry under a temporary name first, so that no other process sees a part of them.

    Theano 1.0.5 empties the file before it writes. A process that starts at that moment takes the entry for a broken
    one, and deletes it.
    """
    from theano.gof.cmodule import KeyData

    @wrap(KeyData)
    def save_pkl(original, self):
        try:
            keys = pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)
        except pickle.PicklingError:
            return original(self)  # it warns, and removes the file
        with files.whole_file(self.key_pkl, flush=False) as unfinished, open(unfinished, 'wb') as file:
            file.write(keys)


def reads_keys() -> bool:
    """Return whether this thread reads keys of compiled code, which name types of any device."""
    return getattr(_reading, 'keys', False)


def read_keys_without_devices(gpuarray_type: ModuleType) -> None:
    """Leave the test value of a fused op on the host while keys are read."""
    @wrap(gpuarray_type)
    def GpuArray_unpickler(original, array, context_name):
        return array if reads_keys() else original(array, context_name)


def look_up_keys() -> None:
    """Read the keys of an entry when its code is asked for; an index says which entry may have a key.

    Theano reads the keys of all entries when it compiles the first function, tries to open each entry for each module
    that it compiles, and again at the end.
    """
    from theano.gof.cmodule import ModuleCache

    @wrap(ModuleCache)
    @collector_paused()
    def refresh(original, self, age_thresh_use=None, delete_if_problem=False, cleanup=True):
        index = _index(self)
        if age_thresh_use is not None or delete_if_problem:  # theano-cache examines all
            index.examined.update(index.words)
        elif cleanup:  # in time, processes come to each entry
            index.examined.update(random.Random().sample(list(index.words), min(SAMPLE, len(index.words))))
        with _listed(self, index.wanted or index.unknown()), temporarily(_reading, 'keys', True):
            old = original(self, age_thresh_use, delete_if_problem, cleanup)
        if cleanup:
            index.save()
        return old

    @wrap(ModuleCache)
    def _get_from_hash(original, self, module_hash, key, keep_lock=False):
        if module_hash in self.module_hash_to_key_data and key in self.entry_from_key:  # it was not in the index
            return self._get_from_key(key)
        return original(self, module_hash, key, keep_lock)

    @wrap(ModuleCache)
    def check_key(original, self, key, key_pkl):  # it reads all keys that share the code, also of other devices
        with temporarily(_reading, 'keys', True):
            original(self, key, key_pkl)

    @wrap(ModuleCache)
    def clear_unversioned(original, self, min_age=None):  # Theano calls it when a process ends
        with _listed(self, _index(self).unknown()):
            original(self, min_age)
        _index(self).save()


def _index(cache):
    """Return the index of a cache of modules, which is made when it is needed first."""
    if 'mgpu_index' not in vars(cache):
        cache.mgpu_index = index = _Index(cache)
        cache.entry_from_key = _Lazy(index, _digest, cache.entry_from_key)
        cache.module_hash_to_key_data = _Lazy(index, str, cache.module_hash_to_key_data)
    return cache.mgpu_index


class _Index:
    """The knowledge that a cache of modules has of entries whose keys it has not read.

    The index is a hint: what counts is the file of keys in each entry. An entry that is not in the index is read as
    Theano does. So other processes, with this package or without, may add and remove entries at any time.
    """

    def __init__(self, cache):
        self._cache, self._path = cache, os.path.join(cache.dirname, INDEX)
        self.words = self._read()  # name of an entry's folder -> the hash of its module, and a digest of each key
        self.examined = set()      # names from the index of the entries that Theano has read, or has tried to
        self.wanted = None         # names of the entries that a refresh of the cache is limited to
        self.names = {}            # the inverse of `words`
        for name, words in self.words.items():
            for word in words:
                self.names.setdefault(word, []).append(name)

    def _read(self):
        """Return the words of each entry; none where no process has written them, or a file system damaged them."""
        with contextlib.suppress(OSError, ValueError), open(self._path) as file:
            return {name: words for name, *words in map(str.split, file)}
        return {}

    def unknown(self):
        """Return the names in the folder that are not in the index, or that were examined."""
        with contextlib.suppress(OSError):  # the folder is gone
            return self.examined.union(set(os.listdir(self._cache.dirname)).difference(self.words))
        return set()

    def load(self, word):
        """Have Theano read the entries that have a word in the index."""
        names = set(self.names.pop(word, ())).difference(self.examined)
        if names:
            self.examined |= names
            with temporarily(self, 'wanted', names):
                self._cache.refresh(cleanup=False)

    def save(self):
        """Write the words of all entries, if there are new ones."""
        new = {}
        for data in self._cache.module_hash_to_key_data.values():
            name = os.path.basename(os.path.dirname(data.key_pkl))
            if len(data.keys) >= len(self.words.get(name, ())) and all(version for version, _ in data.keys):
                new[name] = [data.module_hash, *map(_digest, data.keys)]
        if not new:
            return
        self.words.update(new)
        # On a full disk, or without permission to write, the next process reads the new entries again.
        with contextlib.suppress(OSError), files.whole_text(self._path) as file:
            words, there = {**self._read(), **new}, os.listdir(self._cache.dirname)
            file.writelines(' '.join([name, *words[name]]) + '\n' for name in there if name in words)


class _Lazy(dict):
    """A dictionary of a cache of modules, which has the entries of a key read when the key is looked for."""

    def __init__(self, index, word_of, items):
        super().__init__(items)
        self._index, self._word_of = index, word_of

    def __contains__(self, key):
        if self._index.names and not super().__contains__(key):
            self._index.load(self._word_of(key))
        return super().__contains__(key)

    def items(self):
        """Return nothing while a few entries are read: Theano would try to open all others."""
        return () if self._index.wanted else super().items()


def _listed(cache, names):
    """Show Theano only certain names in the folder of a cache, in a ``with`` block."""
    from theano.gof import cmodule

    def listdir(folder):
        try:
            return list(names) if folder == cache.dirname else os.listdir(folder)
        except FileNotFoundError:  # another process has removed it meanwhile
            return []
    return temporarily(cmodule, 'os', SimpleNamespace(**{**vars(os), 'listdir': listdir}))


def _digest(key):
    """Return a digest that equal keys have in common in all processes."""
    version, rest = key  # which begins with the options, libraries and folders for g++: long lists, and few
    return '%08x' % zlib.crc32(_text([version, rest[4:]]).encode())


def _text(part):
    if isinstance(part, (str, int)):
        return str(part)
    if isinstance(part, (tuple, list)):
        return '(%s)' % ' '.join(map(_text, part))
    names = [*getattr(part, '__props__', ()), 'dtype', 'broadcastable', '_c_code']
    return type(part).__name__ + _text([getattr(part, name, '') for name in names])


def load_modules_without_a_search() -> None:
    """Tell Python where the package of a module is, when Theano loads it."""
    from theano.gof import cmodule

    @wrap(cmodule)
    def dlimport(original, fullpath, *args):
        folder = os.path.dirname(fullpath)
        package = ModuleType(os.path.basename(folder))
        package.__path__ = [folder]
        if package.__name__.startswith('tmp'):
            sys.modules.setdefault(package.__name__, package)
        return original(fullpath, *args)
