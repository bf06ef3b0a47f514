"""Version fixes and hooks: what Theano 1.0.5 and Keras 2.3.1 need in order to import and run today.

Every monkey-patch of theano_mgpu is here or in ``contexts.py``. Each names the version that it
mends and the symptom without it, and is applied only where it is needed.
"""
import collections
import collections.abc
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import random
import re
import shutil
import sys
import sysconfig
import threading
import types
import warnings
import weakref
import zlib

from .. import config
from ..jobs import mpi_environment
from ..utils import progress

theano_was_first = False  # whether Theano was imported before theano_mgpu
IMPORTED = 'MGPU_IMPORTED'  # in the environment of processes that this one starts, see theano_mgpu_first.py
NUMPY_ALIASES = {'bool': bool, 'int': int, 'float': float, 'complex': complex,
                 'object': object, 'str': str}
COLLECTIONS_ABCS = ('Callable', 'Container', 'Hashable', 'Iterable', 'Iterator', 'Mapping',
                    'MutableMapping', 'MutableSequence', 'MutableSet', 'Sequence', 'Set', 'Sized')


def restore_numpy_aliases():
    """NumPy 1.24 removed ``np.bool`` and its like; Theano 1.0.5 dies with AttributeError on them."""
    import numpy
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # NumPy 1.20 to 1.23 warn about the very look-up.
        missing = {name: value for name, value in NUMPY_ALIASES.items() if not hasattr(numpy, name)}
    vars(numpy).update(missing)


def restore_collections_abcs():
    """Python 3.10 removed ``collections.Iterable`` and its like; Keras 2.3.1 still imports them."""
    for name in COLLECTIONS_ABCS:
        if not hasattr(collections, name):
            setattr(collections, name, getattr(collections.abc, name))


def disable_scan_extension():
    """Use scan's pure-Python loop: its C file is Cython 0.28's and does not build on Python 3.9+.

    Without this, a compiler's error (``tp_print``, ``longintrepr.h``) ends the first scan.
    """
    if sys.version_info >= (3, 9):
        sys.modules.setdefault('theano.scan_module.scan_perform_ext', None)


@contextlib.contextmanager
def hidden_mpi():
    """Keep Theano 1.0.5 from mpi4py while it is imported, but in a process that mpirun started.

    Theano imports mpi4py wherever it is installed, for two Ops that send and receive. Without this, each
    process starts MPI, which takes half a second and a daemon; and PyPI's mpi4py on a machine without MPI's
    library ends ``import theano`` with "RuntimeError: cannot load MPI library".
    """
    hides = 'mpi4py.MPI' not in sys.modules and (not mpi_environment.is_rank() or not _has_working_mpi())
    if hides:
        sys.modules['mpi4py.MPI'] = None
    try:
        yield
    finally:
        if hides:
            del sys.modules['mpi4py.MPI']


def _has_working_mpi():
    try:
        importlib.import_module('mpi4py.MPI')
    except (ImportError, RuntimeError):  # said once the ranks are needed: see executors/mpi.py
        return False
    return True


def wait_briefly_for_compile_lock():
    """Look for Theano's lock on its compiled code several times a second, where another process has it.

    Theano 1.0.5 sleeps 5 to 10 seconds each time, and draws how long from Python's own generator. Without this, the
    ranks of a job on one host take minutes for what one of them compiles in seconds, and what a script draws depends
    on what else compiles.

    Theano also logs two lines each time that the lock changes hands, which is several times a second while two
    processes compile. With this, a long wait prints one note.
    """
    from theano.gof import compilelock
    compilelock.random = random.Random()
    if compilelock._logger.level == logging.INFO:  # Theano's own choice; what it logs there are waits and refreshes
        compilelock._logger.setLevel(logging.WARNING)
    original = functools.partial(compilelock.lock, min_wait=0.05, max_wait=0.2)

    @functools.wraps(compilelock.lock)
    def lock(folder, *args, **kwargs):
        if not os.path.isdir(folder):  # nobody has it, most likely
            return original(folder, *args, **kwargs)
        with progress.note_if_long(lambda: _about_lock(folder)):
            return original(folder, *args, **kwargs)
    compilelock.lock = lock


def _about_lock(folder):
    """The note of a process that waits for Theano's lock."""
    try:
        with open(os.path.join(folder, 'lock')) as f:
            pid, _, host = f.read().strip().split('_', 2)
        owner = 'process %s on %s' % (pid, host)
    except (OSError, ValueError):  # it is just changing hands
        owner = 'another process'
    return ('waiting for %s, which compiles for Theano, too. This goes on by itself once that is done, or has ended. '
            'Only if that process hangs: end it, and remove the folder %s' % (owner, folder))


def default_keras_backend():
    """Choose Theano as Keras's backend where TensorFlow, Keras's own default, is not installed.

    Without this, ``import keras`` ends with "No module named 'tensorflow'".
    """
    if 'KERAS_BACKEND' in os.environ:
        return
    path = os.path.join(os.path.expanduser(os.environ.get('KERAS_HOME', '~/.keras')), 'keras.json')
    chosen = 'tensorflow'
    if os.path.exists(path):
        with open(path) as f:
            chosen = json.load(f).get('backend', chosen)
    if chosen == 'tensorflow' and importlib.util.find_spec('tensorflow') is None:
        os.environ['KERAS_BACKEND'] = 'theano'


def default_pocl_settings():
    """PoCL shows one device unless POCL_DEVICES says otherwise; it reads its settings at the first OpenCL call.

    Processes of a job on one host get a cache of compiled kernels each: they build the same kernels at the same
    moment. Without this, now and then one of them ends with "clBuildProgram: Unknown error" (PoCL 3.1).
    """
    os.environ.setdefault('POCL_DEVICES', 'pthread pthread')
    if mpi_environment.local_rank() > 0:
        cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
        folder = os.path.join(cache, 'pocl', 'kcache-rank%d' % mpi_environment.local_rank())
        os.environ.setdefault('POCL_CACHE_DIR', folder)


def blas_ldflags():
    """Linker flags of a BLAS that links: ``-lopenblas`` where OpenBLAS's link is there, else none.

    Without a value, Theano 1.0.5 asks ``np.distutils.__config__.blas_opt_info``, which NumPy 1.22
    and later lack, and dies at import.
    """
    multiarch = sysconfig.get_config_var('MULTIARCH') or ''
    folders = ['/usr/lib/' + multiarch, '/usr/local/lib', '/usr/lib64', '/usr/lib', '/lib64', '/lib',
               os.path.join(sys.prefix, 'lib')] + os.environ.get('LIBRARY_PATH', '').split(os.pathsep)
    found = any(os.path.exists(os.path.join(folder, 'libopenblas.so')) for folder in folders if folder)
    return '-lopenblas' if found else ''


def lacks_python_headers():
    """Whether C++ code for this Python cannot be compiled, since Python.h is not installed.

    Without this, Theano finds g++ and its import ends in a compiler's error: "Python.h: No such file".
    """
    return not os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))


def install():
    """Apply the fixes that must come before Theano and Keras are imported."""
    restore_numpy_aliases()
    restore_collections_abcs()
    disable_scan_extension()
    default_keras_backend()
    default_pocl_settings()
    os.environ[IMPORTED] = '1'
    after_import('keras.engine.saving', mend_keras_saving)
    after_import('keras.engine.training_arrays', mend_keras_slicing)
    after_import('keras.utils.data_utils', mend_keras_queues)
    for name in ('keras.datasets.imdb', 'keras.datasets.reuters'):
        after_import(name, keep_ragged_arrays)
    after_import('pymc3.data', index_by_tuples)
    name_what_replaced_old_gpu_code()


# --- Keras ---------------------------------------------------------------------------------------

def after_import(name, mend):
    """Call ``mend(module)`` once a module is imported: at once if it is already, else when somebody does."""
    if name in sys.modules:
        mend(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, mend))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and mends it each time that it was executed."""

    def __init__(self, name, mend):
        self.name, self.mend = name, mend

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.mend(module)
            spec.loader.exec_module = exec_module
        return spec


def before_import(name, fix):
    """Call ``fix()`` before a module is imported; at once if its import has begun."""
    if name in sys.modules:
        fix()
    else:
        sys.meta_path.insert(0, _BeforeImport(name, fix))


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Finds no module, but calls a function once when one is looked for."""

    def __init__(self, name, fix):
        self.name, self.fix = name, fix

    def find_spec(self, name, path, target=None):
        if name == self.name and self in sys.meta_path:
            sys.meta_path.remove(self)
            self.fix()


keras_batches = None  # who is told of the batches of Keras's loops: theano_mgpu.keras.prefetch


def mend_keras_slicing(training_arrays):
    """Tell of each slice that Keras 2.3.1's loops take: they take a batch only once the one before is done."""
    original = training_arrays.slice_arrays

    @functools.wraps(original)
    def slice_arrays(arrays, start=None, stop=None):
        if keras_batches is None or stop is not None:
            return original(arrays, start, stop)
        return keras_batches.slice(original, arrays, start)

    training_arrays.slice_arrays = slice_arrays


def mend_keras_queues(data_utils):
    """Tell of the queues that Keras 2.3.1's loops take batches from."""
    for enqueuer in (data_utils.OrderedEnqueuer, data_utils.GeneratorEnqueuer):
        enqueuer.get = _telling(enqueuer.get)


def _telling(original):
    @functools.wraps(original)
    def get(self):
        if keras_batches is not None:
            keras_batches.queue(self)
        return original(self)
    return get


def switch_keras_methods(methods, applies):
    """Have models of Keras 2.3.1, which knows one device only, use other methods.

    Parameters
    ----------
    methods : dict of str to callable
        For each name, a function that is given Keras's own method and returns the other one.
    applies : callable
        ``applies(model)``: whether a model uses them at that call.
    """
    import keras

    def switched(original, other):
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            return (other if applies(self) else original)(self, *args, **kwargs)
        return method
    for name, wrap in methods.items():
        original = getattr(keras.Model, name)
        setattr(keras.Model, name, switched(original, wrap(original)))


def replace_multi_gpu_model(function, applies):
    """Have ``keras.utils.multi_gpu_model`` call another one while ``applies()``.

    Keras 2.3.1's own ends with "`multi_gpu_model` is only available with the TensorFlow backend".
    """
    import keras.utils.multi_gpu_utils
    original = keras.utils.multi_gpu_utils.multi_gpu_model

    @functools.wraps(original)
    def multi_gpu_model(*args, **kwargs):
        return (function if applies() else original)(*args, **kwargs)
    keras.utils.multi_gpu_model = keras.utils.multi_gpu_utils.multi_gpu_model = multi_gpu_model


def keep_ragged_arrays(dataset):
    """NumPy 1.24 makes no array of lists that differ in length; Keras 2.3.1's data sets of texts are such arrays.

    Without this, ``imdb.load_data()`` and ``reuters.load_data()`` end with "inhomogeneous shape".
    """
    numpy = dataset.np

    def array(values):
        lengths = {len(value) for value in values if isinstance(value, list)}
        return numpy.array(values, dtype=object if len(lengths) > 1 else None)

    dataset.np = types.SimpleNamespace(**dict(vars(numpy), array=array))


def mend_keras_saving(saving):
    """Mend ``keras.engine.saving`` for Python 3 and, where that is the h5py, for h5py 3."""
    give_equal_names_as_bytes(saving)
    if saving.h5py is not None and int(saving.h5py.__version__.split('.')[0]) >= 3:
        read_attributes_as_bytes(saving)
        save_to_streams(saving)


def give_equal_names_as_bytes(saving):
    """Keras 2.3.1 tells weights of one name apart with ``str(name)``, which in Python 3 is "b'name'", no bytes.

    Without this, saving them ends with "No conversion path for dtype('<U12')" on h5py 3; on h5py 2
    it is loading an optimizer's that ends, with "'str' object has no attribute 'decode'".
    """
    original = saving._uniquify

    @functools.wraps(original)
    def _uniquify(names):
        return [name.encode('utf-8') for name in original([name.decode('utf-8') for name in names])]

    saving._uniquify = _uniquify


def save_to_streams(saving):
    """h5py 3 opens files for reading unless told otherwise; Keras 2.3.1 does not say that it will write.

    Without this, ``model.save`` to a BytesIO or an open file ends with "unable to open file".
    """
    original = saving.save_to_binary_h5py

    @functools.wraps(original)
    def save_to_binary_h5py(save_function, stream):
        with saving.h5py.File('in-memory-h5py', 'w', driver='core', backing_store=False) as f:
            result = save_function(f)
            f.flush()
            stream.write(f.id.get_file_image())
        return result

    saving.save_to_binary_h5py = sys.modules[original.__module__].save_to_binary_h5py = save_to_binary_h5py


def read_attributes_as_bytes(saving):
    """h5py 3 gives text attributes as str; Keras 2.3.1 decodes them, as h5py 2 gave bytes.

    Without this, load_model and load_weights end with "'str' object has no attribute 'decode'".
    """
    original = saving.H5Dict.__getitem__

    @functools.wraps(original)
    def __getitem__(self, attr):
        value = original(self, attr)
        return value if isinstance(self.data, dict) else _as_bytes(value)

    def given_bytes(load):
        @functools.wraps(load)
        def wrapper(f, *args, **kwargs):
            return load(_BytesGroup(f), *args, **kwargs)
        return wrapper

    saving.H5Dict.__getitem__ = __getitem__
    for name in ('load_attributes_from_hdf5_group', 'load_weights_from_hdf5_group',
                 'load_weights_from_hdf5_group_by_name'):
        setattr(saving, name, given_bytes(getattr(saving, name)))


def _as_bytes(value):
    """Text as h5py 2 gave it; anything else as it is."""
    if isinstance(value, str):
        return value.encode('utf-8')
    if getattr(getattr(value, 'dtype', None), 'kind', None) == 'O':
        return [_as_bytes(item) for item in value]
    return value


class _BytesGroup:
    """An h5py group whose attributes, and those of its members, are read as bytes."""

    def __init__(self, group):
        self._group = group
        self.attrs = {name: _as_bytes(value) for name, value in group.attrs.items()}

    def __getitem__(self, name):
        member = self._group[name]
        return _BytesGroup(member) if hasattr(member, 'keys') else member

    def __contains__(self, name):
        return name in self._group


def is_command_line():
    """Whether this is ``theano-mgpu``, or ``python -m theano_mgpu``, whose package is imported first."""
    program = os.path.basename(sys.argv[0])
    # Python 3.8 and 3.9 do not tell which module `-m` will run.
    return program == 'theano-mgpu' or program == '-m' and 'theano_mgpu' in getattr(sys, 'orig_argv', ['theano_mgpu'])


def import_theano():
    """Import Theano with the flags that it understands, and give it theano_mgpu's own.

    ``contexts`` is kept from it: Theano would open the devices at import, only log one that fails,
    and lose the second name of a device. ``theano_mgpu.contexts`` opens them instead, on demand.

    Where Theano was imported before, it has read its flags by itself, and `theano_was_first` is True.
    """
    global theano_was_first
    theano_was_first = 'theano' in sys.modules
    if theano_was_first:
        _register_own_flags()
        return
    given = os.environ.get('THEANO_FLAGS')
    flags = config.parse_flags(given or '')
    own = {key: flags.pop(key) for key in list(flags) if key in config.OWN_FLAGS}
    flags['contexts'] = ''
    if config.flag('blas.ldflags') is None:
        flags['blas.ldflags'] = blas_ldflags()
    if config.flag('cxx') is None and shutil.which('g++') and lacks_python_headers():
        flags['cxx'] = ''
        warnings.warn('Python.h is missing, so that Theano cannot compile: it interprets its graphs, slowly, and '
                      'has no convolutions. Debian: apt-get install python3-dev', RuntimeWarning, stacklevel=3)
    os.environ['THEANO_FLAGS'] = config.join_flags(flags)
    try:
        with hidden_mpi():
            import theano
    finally:
        if given is None:
            del os.environ['THEANO_FLAGS']
        else:
            os.environ['THEANO_FLAGS'] = given
    wait_briefly_for_compile_lock()
    theano.configparser.THEANO_FLAGS_DICT.update(own)
    _register_own_flags()


def _register_own_flags():
    from theano.configparser import AddConfigVar, EnumStr, IntParam, StrParam
    for name, (default, allowed, doc) in config.OWN_FLAGS.items():
        config.own_flag(name)  # raises our own message for a value that it cannot have
        if isinstance(allowed, tuple):
            kind = EnumStr(default, *[value for value in allowed if value != default])
        else:
            kind = (IntParam if isinstance(default, int) else StrParam)(default)
        AddConfigVar(name, doc, kind, in_c_key=False)


# --- Names that Theano had -----------------------------------------------------------------------

class _Gone(importlib.abc.MetaPathFinder):
    """Raises an ImportError with a text of ours where a module is looked for."""

    def __init__(self, name, text):
        self.name, self.text = name, text

    def find_spec(self, name, path, target=None):
        if name == self.name:
            raise ImportError(self.text, name=name)


def name_what_replaced_old_gpu_code():
    """Theano 1.0.5 answers ``import theano.sandbox.cuda`` with "No module named 'nose'", or as a skipped test."""
    sys.meta_path.insert(0, _Gone('theano.sandbox.cuda', (
        "theano.sandbox.cuda is not part of Theano 1.0: theano.gpuarray replaced it. Leave the import out, and map "
        "contexts to devices: THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1', or "
        "theano_mgpu.init('dev0->cuda0;dev1->cuda1')")))


def restore_downsample():
    """Theano 0.9 renamed ``theano.tensor.signal.downsample``, which Lasagne 0.1 and scripts of its time import.

    Without this, ``import lasagne`` ends with "cannot import name 'downsample'".
    """
    from theano.tensor import signal
    from theano.tensor.signal import pool

    def max_pool_2d(input, ds, ignore_border=None, st=None, padding=(0, 0), mode='max'):
        return pool.pool_2d(input, ds, ignore_border, st, padding, mode)

    downsample = types.ModuleType(signal.__name__ + '.downsample', 'What Theano had before `pool`.')
    downsample.max_pool_2d, downsample.max_pool_2d_same_size = max_pool_2d, pool.max_pool_2d_same_size
    signal.downsample = sys.modules[downsample.__name__] = downsample


# --- Names of Theano-PyMC, for PyMC3 3.11 --------------------------------------------------------
# PyMC3 3.11 is written for Theano-PyMC 1.1.2, a fork of Theano 1.0.5 that moved modules and renamed a few things.

def spell_flags_as_theano_pymc():
    """Theano-PyMC writes ``theano.config.gcc__cxxflags`` for ``theano.config.gcc.cxxflags``, and for all sections.

    Without this, ``import pymc3`` ends with "'TheanoConfigParser' object has no attribute 'gcc__cxxflags'", and each
    of its models with "no attribute 'change_flags'".
    """
    from theano import configparser

    def change_flags(args=(), **kwargs):
        flags = dict(args, **kwargs)
        return configparser.change_flags({name.replace('__', '.'): value for name, value in flags.items()})

    for flag in configparser._config_var_list:
        if '.' in flag.fullname:  # a flag is a descriptor that looks at no instance: it may have two places
            setattr(configparser.TheanoConfigParser, flag.fullname.replace('.', '__'), flag)
    configparser.TheanoConfigParser.change_flags = staticmethod(change_flags)


def add_modules_of_theano_pymc():
    """Theano-PyMC has ``theano.graph`` for ``theano.gof`` and ``theano.scan`` for ``theano.scan_module``.

    Without this, ``import pymc3`` ends with "No module named 'theano.graph'". Done only where PyMC3 is imported: other
    programs recognise Theano-PyMC by these modules.
    """
    import theano
    from theano import scan_module
    from theano.gof import fg, graph, op
    from theano.sandbox import rng_mrg

    def walk(nodes, expand, bfs=True):
        """Theano-PyMC's name for `stack_search`, which takes no list."""
        return iter(graph.stack_search(collections.deque(nodes), expand, 'bfs' if bfs else 'dfs'))

    package = _alias('theano.graph', {'__path__': []})
    package.basic = _alias('theano.graph.basic', dict(vars(graph), graph_inputs=graph.inputs, walk=walk))
    package.fg = _alias('theano.graph.fg', vars(fg))
    package.op = _alias('theano.graph.op', dict(vars(op), Op=_make_op_of_theano_pymc(op.Op)))
    package.utils = _alias('theano.graph.utils', {'TestValueError': AttributeError})  # what get_test_value raises
    theano.graph = package
    _alias('theano.scan', vars(scan_module))  # the attribute `scan` of Theano stays the function
    rng_mrg.MRG_RandomStream = rng_mrg.MRG_RandomStreams


def index_by_tuples(data):
    """NumPy 1.23 takes a list of slices for an array of indices; ``pm.Minibatch`` of PyMC3 3 cuts data by such a list.

    Without this, it ends with "IndexError: only integers, slices (`:`), ellipsis (`...`) [...] are valid indices".
    """
    original = data.Minibatch.make_static_slices

    @functools.wraps(original)
    def make_static_slices(user_size):
        slices = original(user_size)
        return tuple(slices) if isinstance(slices, list) else slices

    data.Minibatch.make_static_slices = staticmethod(make_static_slices)


def _alias(name, names):
    """A module in `sys.modules` with these names, those of a module's own attributes left out."""
    module = sys.modules[name] = types.ModuleType(name, 'What Theano-PyMC has under this name.')
    vars(module).update({key: value for key, value in names.items() if not key.startswith('__') or key == '__path__'})
    return module


def _make_op_of_theano_pymc(op_class):
    """An op class whose subclasses may infer shapes as Theano-PyMC asks them to: it passes the graph, too.

    Without this, functions over PyMC3's own ops log "Failed to infer_shape from Op", and compute what they need not.
    """
    class Op(op_class):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            own = vars(cls).get('infer_shape')
            if own is not None and len(inspect.signature(own).parameters) == 4:
                @functools.wraps(own)
                def infer_shape(self, node, shapes):
                    return own(self, getattr(node, 'fgraph', None), node, shapes)
                cls.infer_shape = infer_shape
    return Op


# --- Hooks on shared variables -------------------------------------------------------------------
# Theano 1.0.5's shared variables have no hook: a copy on another context goes stale in silence
# when the variable is set, and the variable when the copies are trained. The patches below ask,
# where a variable is watched, its watcher before a read and tell it after a write.

_watchers = weakref.WeakValueDictionary()  # id(storage) -> watcher; a watcher keeps its storage alive
_generation = 0                            # grows with every watch, so that functions look again


def watch(variable, watcher):
    """Have `watcher` told of each use of a shared variable.

    Parameters
    ----------
    variable : theano.compile.SharedVariable
    watcher : object
        Its ``before_read()`` is called before the variable's value is read, ``before_write()`` and
        ``after_write()`` around a change, by get_value, set_value, or any Theano function over the variable; its
        ``step_locks`` are held during the change; ``read_only`` says that a borrowed value must not be written to,
        since no one would know. The caller keeps the watcher alive.
    """
    global _generation
    _watchers[id(variable.container.storage)] = watcher
    _generation += 1


def watcher_of(variable):
    """The watcher of a shared variable; None if it is not watched."""
    return _watchers.get(id(variable.container.storage))


@contextlib.contextmanager
def _writing(watchers):
    """The block in which the variables of these watchers are changed."""
    for watcher in watchers:
        watcher.before_write()
    locks = {id(lock): lock for watcher in watchers for lock in list(watcher.step_locks)}
    with contextlib.ExitStack() as stack:
        for _, lock in sorted(locks.items()):  # in one order, so that two threads cannot wait for each other
            stack.enter_context(lock)
        yield


def _wrap_accessors(cls):
    def wrapped(name, wrap):
        original = cls.__dict__.get(name)
        if original is not None:
            setattr(cls, name, functools.wraps(original)(wrap(original)))

    def reads(original):
        def get_value(self, borrow=False, return_internal_type=False):
            watcher = watcher_of(self)
            if watcher is None:
                return original(self, borrow, return_internal_type)
            watcher.before_read()
            value = original(self, borrow, return_internal_type)
            if borrow and watcher.read_only and hasattr(value, 'setflags'):
                value = value.view()
                value.setflags(write=False)
            return value
        return get_value

    def writes(original):
        def write(self, *args, **kwargs):
            watcher = watcher_of(self)
            if watcher is None:
                return original(self, *args, **kwargs)
            with _writing([watcher]):
                result = original(self, *args, **kwargs)
                watcher.after_write()
            return result
        return write

    wrapped('get_value', reads)
    wrapped('set_value', writes)
    wrapped('zero', writes)


def _watched_by(function):
    """Watchers of the shared variables of a compiled function: (all, those that it updates)."""
    generation, watched, updated = getattr(function, '_mgpu_watched', (None, (), ()))
    if generation != _generation:
        found = [(_watchers.get(id(container.storage)), spec)
                 for container, spec in zip(function.input_storage, function.maker.expanded_inputs)]
        # Weak: a function that outlives the last step over a variable must not keep its copies on the devices.
        watched = [weakref.ref(watcher) for watcher, _ in found if watcher is not None]
        updated = [weakref.ref(watcher) for watcher, spec in found if watcher is not None and spec.update is not None]
        function._mgpu_watched = (_generation, watched, updated)
    return [[watcher for watcher in (reference() for reference in references) if watcher is not None]
            for references in (watched, updated)]


def _wrap_function_call(cls):
    original = cls.__call__

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if not _watchers:
            return original(self, *args, **kwargs)
        watched, updated = _watched_by(self)
        with _writing(updated) if updated else contextlib.nullcontext():  # most functions update nothing
            for watcher in watched:
                watcher.before_read()
            try:
                return original(self, *args, **kwargs)
            finally:  # a function that fails may have updated some variables before
                for watcher in updated:
                    watcher.after_write()

    @functools.wraps(original)
    def dispatched(self, *args, **kwargs):
        if self.mgpu_divided is None:
            return __call__(self, *args, **kwargs)
        return self.mgpu_divided(args, kwargs)

    cls.unwatched_call, cls.plain_call, cls.mgpu_divided = original, __call__, None
    cls.__call__ = dispatched


# --- theano.function -----------------------------------------------------------------------------

_making = threading.local()


@contextlib.contextmanager
def plain_functions():
    """A block in which `theano.function` makes what nobody attaches to: functions of our own, and within other ones.

    It yields whether it is within such a block.
    """
    before = getattr(_making, 'plain', False)
    _making.plain = True
    try:
        yield before
    finally:
        _making.plain = before


def plain_function(*args, **kwargs):
    """A function as `theano.function` makes it where nothing is attached."""
    import theano
    with plain_functions():
        return theano.function(*args, **kwargs)


def after_each_function(attach):
    """Have each function that is made from now on attached to.

    Every `theano.function` calls `pfunc`, whatever name a script has imported it by.

    Parameters
    ----------
    attach : callable
        ``attach(function, arguments)``: what was made, and a dict of the arguments of `theano.compile.pfunc.pfunc`. It
        may set ``function.mgpu_divided``, a callable ``divided(args, kwargs)`` that then runs in place of the
        function; ``function.plain_call`` is Theano's own.
    """
    module = sys.modules['theano.compile.function']
    original = module.pfunc
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def pfunc(*args, **kwargs):
        with plain_functions() as is_within:
            function = original(*args, **kwargs)
        if not is_within:
            given = parameters.bind(*args, **kwargs)
            given.apply_defaults()
            attach(function, given.arguments)
        return function
    module.pfunc = pfunc


# --- Ops of theano.gpuarray ----------------------------------------------------------------------

def give_mrg_its_context(op_class):
    """Theano 1.0.5 makes each MRG draw for the default context, whatever the context of its state.

    Without this, on a named context: "context name None not defined", and all ops stay on the host.
    """
    @classmethod
    def new(cls, rstate, ndim, dtype, size):
        from theano.gpuarray.type import GpuArrayType
        from theano.tensor import as_tensor_variable, get_vector_length
        size = as_tensor_variable(size)
        ndim = get_vector_length(size) if ndim is None else ndim
        output_type = GpuArrayType(dtype, (False,) * ndim, context_name=rstate.type.context_name)
        return cls(output_type)(rstate, size)
    op_class.unmended_new, op_class.new = op_class.new, new


def cast_conv_shape(op_class):
    """Theano 1.0.5 reads a gradient's image shape as int64 on a GPU, whatever integer it is.

    Without this, the transposed convolution to a shape of Python integers (which Theano makes
    int8) asks for "4 x 2 x 442372112 x 404381200". The CPU's op casts, as this does.
    """
    original = op_class.make_node

    @functools.wraps(original)
    def make_node(self, first, topgrad, shape=None):
        from theano.tensor import as_tensor_variable
        if shape is not None:
            shape = [as_tensor_variable(shape[i]).astype('int64') for i in range(len(self.subsample))]
        return original(self, first, topgrad, shape)

    op_class.make_node = make_node


OPENCL_SPELLING = (
    (re.compile(r'nan\(""\)'), 'NAN'),                        # maximum, minimum
    (re.compile(r'\b(floor|fmod)f\('), r'\1('),              # round, integer division
    (re.compile(r'(?<![<>=!])= \(?(\w+)\)? \?'), r'= (\1 != 0) ?'),  # cast to bool, switch: a float is no condition
)


def spell_for_opencl(op_class):
    """Theano 1.0.5 writes some elementwise kernels in what only CUDA and C++ understand.

    Without this, maximum, minimum, round, // and a float as a condition end the whole process on OpenCL:
    the kernel does not build ("1 error generated"), and Theano frees what was not made.
    """
    generate = op_class._generate_op_string

    @functools.wraps(generate)
    def _generate_op_string(self, node):
        support_code, code = generate(self, node)
        if _is_on_opencl(node):
            for pattern, replacement in OPENCL_SPELLING:
                code = pattern.sub(replacement, code)
        return support_code, code

    op_class._generate_op_string = _generate_op_string
    _keep_code_of_opencl_apart(op_class)


def clear_before_gemv(op_class):
    """Theano 1.0.5 has y = 0 * y + A x computed into memory that nobody has written; CLBlast does multiply it by 0.

    Without this, a product of matrix and vector on OpenCL is NaN wherever the memory happened to hold NaN. CLBlast's
    gemm, its batched gemm and its dot do not read their output for a beta of 0; cuBLAS never does.
    """
    original, perform_original = op_class.c_code, op_class.perform

    @functools.wraps(perform_original)
    def perform(self, node, inputs, out_storage, params):
        y, alpha, A, x, beta = inputs
        if _is_on_opencl(node) and beta == 0:
            y = y.copy()
            y[...] = 0
        perform_original(self, node, [y, alpha, A, x, beta], out_storage, params)

    @functools.wraps(original)
    def c_code(self, node, name, inputs, outputs, sub):
        code = original(self, node, name, inputs, outputs, sub)
        if not _is_on_opencl(node):
            return code
        before, test, after = code.partition('if (PyGpuArray_DIM(%s, 1) == 0)' % inputs[2])
        clear = """
        if (((dtype_%(beta)s *)PyArray_DATA(%(beta)s))[0] == 0 && GpuArray_memset(&%(y)s->ga, 0) != GA_NO_ERROR) {
            PyErr_SetString(PyExc_RuntimeError, "Memset failed");
            %(fail)s
        }
        """ % {'beta': inputs[4], 'y': outputs[0], 'fail': sub['fail']}
        return before + clear + test + after

    op_class.perform, op_class.c_code = perform, c_code
    _keep_code_of_opencl_apart(op_class)


def _is_on_opencl(node):
    return node.inputs[0].type.context.kind == b'opencl'


def _keep_code_of_opencl_apart(op_class):
    """A context of the same name may have been on CUDA, or without a patch, when Theano kept a compiled module."""
    version = op_class.c_code_cache_version_apply

    @functools.wraps(version)
    def c_code_cache_version_apply(self, node):
        original = version(self, node)
        return original and original + (1,) * _is_on_opencl(node)

    op_class.c_code_cache_version_apply = c_code_cache_version_apply


# --- The cache of compiled code ------------------------------------------------------------------

def keep_code_of_ops_without_props(linker_class):
    """Theano 1.0.5 takes an op whose ``__props__`` is an empty tuple for one whose code has no version.

    Without this, each process compiles products of matrices, softmax, random draws and others anew, though they are
    in the cache: 4 of the 5 seconds that the first batch of a small Keras model takes.
    """
    original = linker_class.cmodule_key_

    @functools.wraps(original)
    def cmodule_key_(self, fgraph, *args, **kwargs):
        key = original(self, fgraph, *args, **kwargs)
        if key is None or key[0]:
            return key
        version = []
        for node in self.schedule(fgraph):
            if hasattr(node.op, 'c_code_cache_version_apply'):
                version.append(node.op.c_code_cache_version_apply(node))
            version += [props for props in [getattr(node.op, '__props__', ())] if props]
            version += [variable.type.c_code_cache_version() for variable in node.inputs + node.outputs]
        return (tuple(version) if all(version) else ()), key[1]
    linker_class.cmodule_key_ = cmodule_key_


def give_source_a_lasting_version(op_class):
    """Theano 1.0.5 takes the hash of a text for its version, which Python draws anew for each process.

    Without this, each process compiles DimShuffle anew.
    """
    def c_code_cache_version(self):
        version = (zlib.crc32('\n'.join(self.func_codes).encode()),)
        if hasattr(self, 'params_type'):
            version += (self.params_type.c_code_cache_version(),)
        return version
    op_class.c_code_cache_version = c_code_cache_version


def mend_theano():
    """Patch the imported Theano: the hooks that `watch` needs, and the GPU ops; once a process."""
    from theano.compile.function_module import Function
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.cc import CLinker
    from theano.gof.op import COp
    from theano.gpuarray import blas, elemwise, rng_mrg
    from theano.gpuarray.type import GpuArraySharedVariable
    if hasattr(Function, 'unwatched_call'):
        return
    _wrap_accessors(SharedVariable)
    _wrap_accessors(GpuArraySharedVariable)
    _wrap_function_call(Function)
    keep_code_of_ops_without_props(CLinker)
    give_source_a_lasting_version(COp)
    restore_downsample()
    spell_flags_as_theano_pymc()
    before_import('pymc3', add_modules_of_theano_pymc)
    give_mrg_its_context(rng_mrg.GPUA_mrg_uniform)
    spell_for_opencl(elemwise.GpuElemwise)
    clear_before_gemv(blas.GpuGemv)
    for op_class in (blas.GpuCorrMM_gradInputs, blas.GpuCorrMM_gradWeights,
                     blas.GpuCorr3dMM_gradInputs, blas.GpuCorr3dMM_gradWeights):
        cast_conv_shape(op_class)
