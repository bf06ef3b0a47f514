"""Optimised graphs on disk, so that the next process that makes the same functions need not optimise them again.

A file beside Theano's compiled code has the optimised graph of one function. Its name is a digest of all that Theano's
optimiser sees: the graph, the optimisers, the flags, the devices, the versions. A graph is optimised as ever if a part
of that cannot be described: an op or an optimiser that the script defines, for example.
"""
from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import io
import logging
import marshal
import os
import pickle
import sys
import time
import warnings
from types import CodeType, FunctionType, ModuleType
from typing import Any, Callable, Iterable, Sequence

from ..errors import in_one_line, named
from ..utils import files, progress
from ..utils.attributes import temporarily

FOLDER = 'kept_graphs'   # in the folder of compiled code
CAPACITY = 256 << 20     # bytes of all files; those that were not used for the longest time are removed
WORTH = 0.02             # seconds; a graph that is optimised in less is not kept
NOTED = 2.0              # seconds to optimise graphs that cannot be kept; beyond these, a note tells the user
# Packages whose versions tell their code. Other code, such as the script's, may change from start to start.
KNOWN = {'_operator', 'builtins', 'collections', 'copyreg', 'functools', 'itertools', 'numpy', 'operator', 'pygpu',
         'scipy', 'theano', 'theano_mgpu', 'types'}
_ATOMS = {str, int, float, complex, bool, bytes, type(None)}
# Attributes of optimisers that tell of their use, or of no more than others do. A name may have an address.
_NO_PART = {'__doc__', '_optimizer_idx', 'name', 'pre_profile', 'track_map'}

further: list[Callable[[], Any]] = []  # return what else the optimiser sees, where a room patches it

_logger = logging.getLogger('theano_mgpu')
_lost = 0.  # seconds in which graphs that cannot be kept were optimised


class CannotKeep(Exception):
    """A graph cannot be kept on disk; the text says why."""


def keep_optimised_graphs() -> None:
    """Take the optimised graph of a function from the disk, if the same graph was optimised before.

    Theano 1.0.5 has a flag for this, ``cache_optimizations``, whose code is not finished: it keeps all graphs in one
    file, compares a graph with each of them but for flags, devices and versions, and links the graph that is not
    optimised.
    """
    import theano
    from theano.compile.function_module import FunctionMaker

    FunctionMaker.optimize_graph_with_cache = lambda self, optimizer, *_: _optimise(self.fgraph, optimizer)
    theano.config.cache_optimizations = True


def _optimise(fgraph, optimizer):
    """Optimise a graph, or take the result from the disk; return the optimiser's profile, if there is one."""
    from theano import config, configparser
    if not (_is_on() and optimizer and fgraph.apply_nodes):
        with progress.working():
            return optimizer(fgraph)
    obstacle: Exception | None = None
    try:
        features = [(type(feature), getattr(feature, 'protected', None)) for feature in fgraph._features]
        flags = [(flag.fullname, flag.__get__(True, None)) for flag in configparser._config_var_list
                 if flag.fullname not in ('base_compiledir', 'compiledir')]
        description = _Description(fgraph.inputs)
        path = os.path.join(config.compiledir, FOLDER, description.digest(
            fgraph.inputs, fgraph.outputs, fgraph.update_mapping, features, _Description(()).digest(optimizer),
            _environment(), flags, _devices()))
        kept = _read(path, description.own)
    except Exception as error:  # what cannot be described, or is damaged, raises many kinds
        obstacle, kept = error, None
    if kept is not None:
        return _take(*kept, fgraph)
    began, messages = time.perf_counter(), []
    with _recorded(messages), progress.working():
        profile = optimizer(fgraph)
    seconds = time.perf_counter() - began
    if obstacle is None and seconds > WORTH:
        try:
            if messages:
                raise CannotKeep('Theano says something while it optimises the graph')
            _write(path, _content(fgraph, description.own))
        except Exception as error:
            obstacle = error
    if obstacle is not None:
        _note_lost(seconds, obstacle)
    return profile


def _note_lost(seconds, obstacle):
    """Tell the user, once, why graphs are optimised at each start, if that takes long."""
    global _lost
    before, _lost = _lost, _lost + seconds
    _logger.debug('a graph is not kept: %r', obstacle)
    if before <= NOTED < _lost:
        text = str(obstacle) if isinstance(obstacle, CannotKeep) else in_one_line(obstacle)
        progress.note('Theano has optimised graphs for %.0f s that cannot be kept for the next start (%s); see '
                          '"The next start" in docs/guide/performance.md' % (_lost, text))


def _is_on():
    """Return whether graphs are kept and taken: not where the user looks at what the optimiser does."""
    from theano import config
    return config.mgpu.keep_graphs == 'True' and config.compute_test_value == 'off' and \
        not (config.profile_optimizer or config.optimizer_verbose)


# --------------------------------------------------------------------------------------------------- the description


class _Description:
    """A description of objects, the same in each process that has equal ones.

    Parameters
    ----------
    inputs : list of theano.Variable
        The inputs of a graph. No other shared variable may be among the objects.

    Attributes
    ----------
    own : list
        The inputs, and the user's lines that variables come from, in the order of the description. The lines are not
        described.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.own: list[Any] = list(inputs)
        self._inputs = {id(each) for each in inputs}
        self._variables: set[Any] = set()
        self._seen: dict[int, tuple[int, Any]] = {}  # with the objects: no other ones may get their ids

    def digest(self, *objects: Any) -> str:
        """Return the digest of objects, in hexadecimal digits."""
        # Version 2 of the format writes equal values alike, be they one object or several.
        return hashlib.sha256(marshal.dumps(self._of(objects), 2)).hexdigest()

    def _of(self, obj: Any) -> Any:
        """Describe an object by values in tuples and lists; an object that was described, by its number."""
        kind: Any = type(obj)
        if kind in _ATOMS:
            return obj
        if kind is list or kind is tuple:
            return kind.__name__, [each if type(each) in _ATOMS else self._of(each) for each in obj]
        if kind is dict:
            return 'dict', self._of([*obj.keys(), *obj.values()])
        if kind is set or kind is frozenset:  # their order differs from process to process
            return kind.__name__, [self._of(each) for each in sorted(obj, key=repr)]
        if id(obj) in self._seen:
            return 'seen', self._seen[id(obj)][0]
        self._seen[id(obj)] = len(self._seen), obj
        return kind.__module__, kind.__qualname__, self._of(list(self._parts(obj)))

    def _parts(self, obj: Any) -> Iterable[Any]:
        """Return what an object is made of, without what differs from process to process."""
        import theano
        if isinstance(obj, FunctionType):
            module = obj.__globals__['__name__']  # functools.wraps sets another one
            _check_known(module, obj)
            return (module, _digest_of_code(obj.__code__), [cell.cell_contents for cell in obj.__closure__ or ()],
                    obj.__defaults__, obj.__kwdefaults__)
        if isinstance(obj, ModuleType):
            _check_known(obj.__name__, obj)
            return [obj.__name__]
        _check(obj, self._inputs)
        if isinstance(obj, type):
            return [pickle.dumps(obj, 4)]
        if isinstance(obj, theano.Variable):
            return self._parts_of_variable(obj)
        if isinstance(obj, theano.Apply):
            marks = sorted(name for name, value in vars(obj.tag).items() if value is True)
            return type(obj), obj.op, obj.inputs, obj.outputs, marks
        if isinstance(obj, theano.scan_module.scan_op.Scan):  # it has a hash of its own in each process
            info = sorted((name, value) for name, value in obj.info.items() if name != 'gpu_hash')
            return type(obj), obj.inputs, obj.outputs, info, obj.output_types
        if isinstance(obj, theano.scalar.Composite):  # it gets code and a name at some time
            return type(obj), obj.inputs, obj.outputs
        optimizers = theano.gof.opt.Optimizer, theano.gof.opt.LocalOptimizer
        return _state(obj, _NO_PART if isinstance(obj, optimizers) else {'_hash'})

    def _parts_of_variable(self, variable: Any) -> Iterable[Any]:
        import theano
        in_order = variable.owner is None or id(variable.owner) in self._seen
        # Nodes that are described one within the other may be too deep.
        before = [] if in_order else theano.gof.graph.io_toposort(self._variables, [variable])
        self._variables.add(variable)
        self.own += [trace for trace in getattr(variable.tag, 'trace', ()) if isinstance(trace, list)]
        tag = sorted((name, value) for name, value in vars(variable.tag).items() if name != 'trace')
        return (type(variable), before, variable.owner, variable.index, variable.type, variable.name,
                getattr(variable, 'data', None), len(self.own), tag)


@functools.lru_cache(None)
def _digest_of_code(code):
    values = [_digest_of_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return _Description(()).digest(code.co_name, code.co_firstlineno, code.co_flags, code.co_argcount,
                                   code.co_varnames, code.co_code, code.co_names, values)


def _state(obj, without):
    """Return what pickle makes an object from, without some attributes."""
    reduced: Any = copyreg.dispatch_table.get(type(obj), lambda obj: obj.__reduce_ex__(2))(obj)
    if isinstance(reduced, str):  # a function in C
        _check_known(pickle.whichmodule(obj, reduced), obj)
        return [pickle.dumps(obj, 4)]
    for value in getattr(obj, '__dict__', {}).values():
        if isinstance(value, FunctionType):  # pickle may leave it out
            _check_known(value.__globals__['__name__'], value)
    make, arguments, attributes, *items = tuple(reduced) + (None,)
    attributes = attributes if isinstance(attributes, dict) else {'': attributes}
    names = sorted(set(attributes) - without)
    return (make, len(arguments), *arguments, ' '.join(names), *[attributes[name] for name in names],
            *[each and list(each) for each in items])


@functools.lru_cache(None)
def _opaque_classes():
    """Return the classes of objects that have values, or a graph in a state of its own, or read a file."""
    import theano
    return (theano.compile.Function, theano.compile.FunctionMaker, theano.compile.SharedVariable,
            theano.gof.Container, theano.gof.FunctionGraph, theano.tensor.io.LoadFromDisk)


def _check(obj, inputs=()):
    """Raise CannotKeep if an object or a class is of unknown code, or if an object is opaque and no input."""
    _check_known((obj if isinstance(obj, type) else type(obj)).__module__, obj)
    if isinstance(obj, _opaque_classes()) and id(obj) not in inputs:
        raise CannotKeep('the %s %s is part of it' % (type(obj).__name__, named(obj)))


def _check_known(module, obj):
    if module is None or module.partition('.')[0] not in KNOWN:
        raise CannotKeep('%s is defined in %s' % (named(obj), module))


@functools.lru_cache(None)
def _environment():
    """Return the versions of the code that optimises graphs, and the times when its files changed, as one text."""
    import theano
    changed = []
    for package in (os.path.dirname(theano.__file__), os.path.dirname(os.path.dirname(__file__))):
        for folder, folders, names in os.walk(package):
            folders[:] = sorted(set(folders) - {'tests', '__pycache__'})
            sources = [os.path.join(folder, name) for name in sorted(names) if name.endswith('.py')]
            changed += [(path, os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in sources]
    versions = [getattr(sys.modules.get(name), '__version__', None) for name in ('numpy', 'scipy', 'pygpu')]
    return repr((sys.version, versions, changed))


def _devices():
    """Return all contexts with their devices, and what `further` returns."""
    from theano.gpuarray import dnn
    from theano.gpuarray.type import get_context, list_contexts
    opened = [(name, get_context(name)) for name in list_contexts()]
    return [function() for function in further], [
        (name, each.kind, each.devname, each.bin_id, each.kind == b'cuda' and dnn.dnn_available(name) and dnn.version())
        for name, each in opened]


# --------------------------------------------------------------------------------------------------------- the files


class _Writer(pickle.Pickler):
    """A pickler of an optimised graph."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what cannot be kept; refer to the one type of random states, which equals no other."""
        from theano.tensor.raw_random import random_state_type
        _check(obj)
        return 'random_state_type' if obj is random_state_type else NotImplemented


def _content(fgraph, own):
    """Return an optimised graph as bytes."""
    from theano.gof.graph import clone, io_toposort
    inputs, outputs = clone(fgraph.inputs, fgraph.outputs, copy_inputs=False, copy_orphans=True)
    nodes = io_toposort(inputs, outputs)  # nodes that are pickled one within the other may be too deep
    file, numbers = io.BytesIO(), {id(each): number for number, each in enumerate(own)}
    writer = _Writer(file, protocol=4)
    writer.persistent_id = lambda obj: numbers.get(id(obj))
    writer.dump((nodes, outputs, hasattr(fgraph, 'destroyers')))
    for before, after in zip(nodes, _loaded(file.getvalue(), own)[0]):
        for one, other in zip([*before.inputs, *before.outputs], [*after.inputs, *after.outputs]):
            same = before.op == after.op and one.type == other.type
            if not same or hasattr(one, 'signature') and one.signature() != other.signature():
                raise CannotKeep('%s is another one after it was read again' % named(one))
    return file.getvalue()


def _loaded(content, own):
    """Return the nodes and the outputs of a graph that `_content` has written, and whether it has a DestroyHandler."""
    reader = pickle.Unpickler(io.BytesIO(content))
    reader.persistent_load = own.__getitem__
    return reader.load()


def _take(nodes, outputs, in_place, fgraph):
    """Give a graph the outputs of a kept one."""
    from theano.gof import DestroyHandler
    for i, output in enumerate(outputs):
        fgraph.change_input('output', i, output, reason='kept')
    if in_place:
        fgraph.attach_feature(DestroyHandler())
    fgraph.checkpoint()  # the graph before is needed no more


def _read(path, own):
    """Read a kept graph, see `_loaded`; return None if there is none, or its file is damaged."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    files.check_own(folder)  # who writes there has his code run here
    try:
        files.check_own(path)
        with open(path, 'rb') as file:
            digest, content = file.read(32), file.read()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it was used
    return _loaded(content, own) if hashlib.sha256(content).digest() == digest else None


def _write(path, content):
    """Write a file; remove those that were not used for the longest time, if all take too many bytes."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # Theano has removed it if empty
    with files.whole_file(path, flush=False) as unfinished, open(unfinished, 'wb') as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(hashlib.sha256(content).digest() + content)
    total, folder = 0, os.path.dirname(path)
    for _, size, path in sorted(_files(folder), reverse=True):
        total += size
        if total > CAPACITY:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def _files(folder):
    """Yield the time of its last use, the size and the path of each file; other processes write and remove files."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat().st_mtime, entry.stat().st_size, entry.path


@contextlib.contextmanager
def _recorded(records):
    """Record in a list what Theano logs and warns of in a ``with`` block: the next process would not hear of it."""
    def show(message, *args, **kwargs):
        records.append(message)
        return before(message, *args, **kwargs)
    handler, before, logger = logging.Handler(logging.WARNING), warnings.showwarning, logging.getLogger('theano')
    handler.emit = records.append
    with temporarily(warnings, 'showwarning', show), temporarily(logger, 'handlers', [*logger.handlers, handler]):
        yield
