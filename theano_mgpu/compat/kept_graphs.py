"""Optimised graphs on disk, so that the next process that makes the same functions need not optimise them again.

A file beside Theano's compiled code has the optimised graph of one function. Its name is a digest of all that Theano's
optimiser sees: the graph, the optimisers, the flags, the devices, the versions. A graph is optimised as ever if a part
of that cannot be described: an op or an optimiser that the script defines, for example.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import logging
import os
import pickle
import sys
import time
import warnings
from types import FunctionType, ModuleType
from typing import Any, Container, NamedTuple, Sequence

from ..utils import files, rank_process
from ..utils.attributes import temporarily
from . import theano_contexts

FOLDER = 'kept_graphs'   # in the folder of compiled code
CAPACITY = 256 << 20     # bytes of all files; those that were not used for the longest time are removed
WORTH = 0.02             # seconds; a graph that is optimised in less is not kept
NOTED = 2.0              # seconds to optimise graphs that cannot be kept; beyond these, a note tells the user
# Packages whose versions tell their code. Other code, such as the script's, may change from start to start.
KNOWN = {'_operator', 'builtins', 'collections', 'copyreg', 'functools', 'itertools', 'numpy', 'operator', 'pygpu',
         'scipy', 'theano', 'theano_mgpu', 'types'}
_PLAIN = {str, int, float, bool, bytes, type(None), tuple, list, dict}
# Attributes of optimisers that tell of their use, or of no more than others do. A name may have an address.
_NO_PART = {'__doc__', '_optimizer_idx', 'name', 'pre_profile', 'track_map'}

_logger = logging.getLogger('theano_mgpu')
_digests: dict[tuple[Any, ...], tuple[str, Any]] = {}  # of optimisers
_lost = 0.  # seconds in which graphs that cannot be kept were optimised


class CannotKeep(Exception):
    """A graph cannot be kept on disk; the text says why."""


def keep_optimised_graphs() -> None:
    """Take the optimised graph of a function from the disk, if the same graph was optimised before.

    Theano 1.0.5 has a flag for this, ``cache_optimizations``, whose code is not finished: it keeps all graphs in one
    file, compares a graph with each of them but for flags, devices and versions, and links the graph that is not
    optimised. Without this, each process optimises each graph, which takes longer than all else but the imports.
    """
    import theano
    from theano.compile.function_module import FunctionMaker

    def optimize_graph_with_cache(self, optimizer, inputs, outputs):
        return _optimise(self.fgraph, optimizer)
    FunctionMaker.optimize_graph_with_cache = optimize_graph_with_cache
    theano.config.cache_optimizations = True


def _optimise(fgraph, optimizer):
    """Optimise a graph, or take the result from the disk; return the optimiser's profile, if there is one."""
    from theano import config
    if why_off() or not (optimizer and fgraph.apply_nodes):
        return optimizer(fgraph)
    obstacle: Exception | None = None
    try:
        features = [(type(feature), getattr(feature, 'protected', None)) for feature in fgraph._features]
        description = _Description(fgraph.inputs, fgraph.outputs, fgraph.update_mapping, features,
                                   _digest(optimizer), _environment(), _flags(), _devices())
        path = os.path.join(config.compiledir, FOLDER, description.digest())
        kept = _read(path, fgraph, description.traces)
    except Exception as error:  # what cannot be described, or is damaged, raises many kinds
        obstacle, kept = error, None
    if kept is not None:
        return _take(kept, fgraph)
    began, messages = time.perf_counter(), []
    with _recorded(messages):
        profile = optimizer(fgraph)
    seconds = time.perf_counter() - began
    if obstacle is None and seconds > WORTH:
        try:
            if messages:
                raise CannotKeep('Theano says something while it optimises the graph')
            _write(path, fgraph, description.traces)
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
        text = str(obstacle) if isinstance(obstacle, CannotKeep) else \
            '%s: %s' % (type(obstacle).__name__, (str(obstacle).splitlines() or [''])[0])
        rank_process.note('Theano has optimised graphs for %.0f s that cannot be kept for the next start (%s); see '
                          '"The next start" in docs/guide/performance.md' % (_lost, text))


def why_off() -> str | None:
    """Return the flag, with its value, because of which no graph is kept or taken; None if graphs are kept."""
    from theano import config
    for name, wanted in [('mgpu.keep_graphs', 'True'), ('compute_test_value', 'off'), ('profile_optimizer', False),
                         ('optimizer_verbose', False)]:
        value = functools.reduce(getattr, name.split('.'), config)
        if value != wanted:
            return '%s=%s' % (name, value)
    return None


class Store(NamedTuple):
    """The kept graphs of this machine: their folder, their number, and the bytes that they take."""

    folder: str
    n_graphs: int
    n_bytes: int


def store() -> Store:
    """Return the kept graphs that this process would look at."""
    from theano import config
    folder = os.path.join(config.compiledir, FOLDER)
    sizes = [size for _, size, _ in _files(folder)] if os.path.isdir(folder) else []
    return Store(folder, len(sizes), sum(sizes))


# --------------------------------------------------------------------------------------------------- the description


class _Description(pickle.Pickler):
    """A digest of objects, the same in each process that has equal ones.

    Parameters
    ----------
    inputs : list of theano.Variable
        The inputs of a graph. No other shared variable may be among the objects.
    *parts : object
        Further objects, the outputs of the graph, say.

    Attributes
    ----------
    traces : list
        The user's lines that variables come from, in the order of the description. They are not described.
    """

    def __init__(self, inputs: Sequence[Any], *parts: Any) -> None:
        self._hash = hashlib.sha256()
        super().__init__(_Hashing(self._hash), protocol=4)
        self.fast = True  # equal objects are described alike, be they one object or several
        self.traces: list[Any] = []
        self._numbers: dict[int, int] = {}  # of objects that are described once, by their ids
        self._alive: list[Any] = []         # these objects: no other one may get their ids
        self._inputs = set(inputs)
        self._variables: set[Any] = set()
        self.dump((inputs, parts))

    def digest(self) -> str:
        """Return the digest, in hexadecimal digits."""
        return self._hash.hexdigest()

    def persistent_id(self, obj: Any) -> Any:
        """Return what describes an object in its place; None for an object that pickle describes by itself."""
        kind: Any = type(obj)
        describe = None if kind in _PLAIN else _describer(kind)
        if describe is None:
            return None
        if id(obj) in self._numbers:
            return self._numbers[id(obj)]
        return describe(self, obj)

    def reducer_override(self, obj: Any) -> Any:
        """Refuse an object of unknown code."""
        _check_known((obj if isinstance(obj, type) else type(obj)).__module__, obj)
        return NotImplemented

    def _number(self, obj: Any) -> int:
        """Return the number of an object, which stands for it from now on."""
        self._alive.append(obj)
        return self._numbers.setdefault(id(obj), len(self._numbers))

    def _variable(self, variable: Any) -> Any:
        """Describe a variable and its ancestors, but for those that are described; not one within the other."""
        from theano.compile.sharedvalue import SharedVariable
        from theano.gof.graph import ancestors
        found = []
        for each in ancestors([variable], blockers=self._variables):
            if each not in self._variables:
                if isinstance(each, SharedVariable) and each not in self._inputs:
                    raise CannotKeep('an op has the shared variable %s' % each)
                self._variables.add(each)
                self._number(each)
                found.append(each)
        return [(type(each), each.owner, each.index, each.type, each.name, getattr(each, 'data', None),
                 self._tag(each.tag)) for each in found]

    def _tag(self, tag: Any) -> Any:
        """Describe a variable's tag; number the lines that the variable comes from."""
        for trace in getattr(tag, 'trace', ()):
            if id(trace) not in self._numbers:
                self.traces.append(trace)
        traces = [self._number(trace) for trace in getattr(tag, 'trace', ())]
        return traces, sorted((name, value) for name, value in vars(tag).items() if name != 'trace')

    def _node(self, node: Any) -> Any:
        """Describe a node, whose inputs have their numbers."""
        return self._number(node), node.op, node.inputs, len(node.outputs)

    def _function(self, function: FunctionType) -> Any:
        """Describe a function of known code by its place, and the values that it closes over."""
        module, code = function.__globals__['__name__'], function.__code__  # functools.wraps sets other names
        _check_known(module, function)
        return (self._number(function), module, code.co_name, code.co_firstlineno,
                [cell.cell_contents for cell in function.__closure__ or ()], function.__defaults__,
                function.__kwdefaults__)

    def _module(self, module: ModuleType) -> Any:
        """Describe a module of known code by its name."""
        _check_known(module.__name__, module)
        return self._number(module), module.__name__

    def _state(self, obj: Any, without: Container[str] = ()) -> Any:
        """Describe an object by what pickle makes it from, without some attributes."""
        _check_known(type(obj).__module__, obj)
        for value in getattr(obj, '__dict__', {}).values():
            if isinstance(value, FunctionType):  # it may be no part of the pickle
                _check_known(value.__globals__['__name__'], value)
        make, arguments, *state = obj.__reduce_ex__(2)
        if state and isinstance(state[0], dict):
            state[0] = sorted((name, value) for name, value in state[0].items() if name not in without)
        return self._number(obj), make, arguments, [each if isinstance(each, list) else list(each or ())
                                                   for each in state]

    def _optimizer(self, optimizer: Any) -> Any:
        """Describe an optimiser, global or local."""
        return self._state(optimizer, _NO_PART)

    def _scan(self, op: Any) -> Any:
        """Describe a scan by its parts: it keeps a hash, which differs from process to process."""
        info = sorted((name, value) for name, value in op.info.items() if name != 'gpu_hash')
        return self._number(op), type(op), op.inputs, op.outputs, info, op.output_types

    def _composite(self, op: Any) -> Any:
        """Describe a fused op by its graph, without the code and the name that it gets at some time."""
        return self._number(op), type(op), op.inputs, op.outputs

    def _refuse(self, obj: Any) -> Any:
        """Refuse an object that has values, or a graph in a state of its own, or reads a file."""
        raise CannotKeep('a %s is part of it' % type(obj).__name__)

    def _sorted_set(self, values: Any) -> Any:
        """Describe a set in an order that does not differ from process to process."""
        return sorted(values, key=repr)

    def _frozen(self, values: Any) -> Any:
        """Describe a frozendict without the hash that it gets at some time."""
        return sorted(values.items())


@functools.lru_cache(None)
def _describer(kind: Any) -> Any:
    """Return the method of `_Description` that describes objects of a class; None for pickle's own way."""
    from theano.compile.function_module import Function, FunctionMaker
    from theano.gof import Apply, FunctionGraph, Op, Variable, link
    from theano.gof.op import PureOp
    from theano.gof.opt import LocalOptimizer, Optimizer
    from theano.gof.type import PureType
    from theano.misc.frozendict import frozendict
    from theano.scalar.basic import Composite
    from theano.scan_module.scan_op import Scan
    from theano.tensor.io import LoadFromDisk
    ways = [((Function, FunctionMaker, FunctionGraph, link.Container, LoadFromDisk), _Description._refuse),
            (Variable, _Description._variable), (Apply, _Description._node), (Scan, _Description._scan),
            (Composite, _Description._composite),
            ((Optimizer, LocalOptimizer), _Description._optimizer), ((PureOp, Op, PureType), _Description._state),
            (FunctionType, _Description._function), (ModuleType, _Description._module),
            ((set, frozenset), _Description._sorted_set), (frozendict, _Description._frozen)]
    return next((way for classes, way in ways if issubclass(kind, classes)), None)


class _Hashing:
    """A file that only hashes."""

    def __init__(self, hasher: Any) -> None:
        self.write = hasher.update


def _check_known(module, obj):
    if module is None or module.partition('.')[0] not in KNOWN:
        raise CannotKeep('%r is defined in %s' % (obj, module))


def _digest(optimizer):
    """Return a digest of an optimiser. It is kept for the next one that is made of the same objects."""
    from theano.gof.opt import LocalOptimizer, Optimizer
    identity: list[Any] = []
    parts: dict[int, tuple[int, Any]] = {}
    pending = [optimizer]
    while pending:
        part = pending.pop()
        if type(part) in (str, int, float, bool, type(None)):
            identity.append(part)
        elif id(part) in parts:
            identity.append(parts[id(part)][0])
        else:
            parts[id(part)] = len(parts), part
            if isinstance(part, (Optimizer, LocalOptimizer)):
                attributes = {name: value for name, value in vars(part).items() if name not in _NO_PART}
                identity += [type(part), *attributes]
                pending += attributes.values()
            if isinstance(part, dict):
                pending += part.values()
            if isinstance(part, (dict, list, tuple)):
                identity.append(len(part))
                pending += part
            elif not isinstance(part, (Optimizer, LocalOptimizer)):
                identity.append(id(part))
    key = tuple(identity)
    if key not in _digests:
        if len(_digests) == 64:  # each scan has an optimiser of its own
            _digests.clear()
        _digests[key] = _Description((), optimizer).digest(), parts  # which must not be freed: others had their ids
    return _digests[key][0]


@functools.lru_cache(None)
def _environment():
    """Return a digest of the versions of the code that optimises graphs, and of the times when its files changed."""
    import theano
    changed = []
    for package in (os.path.dirname(theano.__file__), os.path.dirname(os.path.dirname(__file__))):
        for folder, folders, _ in os.walk(package):
            folders[:] = sorted(set(folders) - {'tests', '__pycache__'})
            with os.scandir(folder) as entries:
                changed += sorted((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in entries
                                  if each.name.endswith('.py'))
    versions = [getattr(sys.modules.get(name), '__version__', None) for name in ('numpy', 'scipy', 'pygpu')]
    return _Description((), sys.version, versions, changed).digest()


def _flags():
    """Return Theano's flags and their values."""
    from theano import configparser
    return [(flag.fullname, flag.__get__(True, None)) for flag in configparser._config_var_list
            if flag.fullname not in ('base_compiledir', 'compiledir')]


def _devices():
    """Return the context that the graph is compiled for, and all contexts with their devices."""
    from theano.gpuarray import dnn
    from theano.gpuarray.type import get_context, list_contexts
    context = theano_contexts.pinned()
    opened = [(name, get_context(name)) for name in list_contexts()]
    return context and (context.kind, context.kind != 'cpu' and context.name), [
        (name, each.kind, each.devname, each.bin_id, each.kind == b'cuda' and dnn.dnn_available(name) and dnn.version())
        for name, each in opened]


# --------------------------------------------------------------------------------------------------------- the files


class _Writer(pickle.Pickler):
    """A pickler of an optimised graph, which refers to the traces of the graph before its optimisation."""

    def __init__(self, file: Any, traces: Sequence[Any]) -> None:
        super().__init__(file, protocol=4)
        self._numbers = {id(trace): number for number, trace in enumerate(traces)}

    def persistent_id(self, obj: Any) -> Any:
        """Return the number of a trace; None for any other object."""
        kind: Any = type(obj)
        if isinstance(obj, list):
            return self._numbers.get(id(obj))
        if hasattr(obj, 'container') or _describer(kind) is _Description._refuse:
            raise CannotKeep('%s is part of it' % obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Refuse an object of unknown code; refer to the one type of random states, which equals no other."""
        from theano.tensor.raw_random import random_state_type
        _check_known((obj if isinstance(obj, type) else type(obj)).__module__, obj)
        return 'random_state_type' if obj is random_state_type else NotImplemented


class _Reader(pickle.Unpickler):
    """A reader of graphs that a `_Writer` has pickled."""

    def __init__(self, file: Any, traces: Sequence[Any]) -> None:
        super().__init__(file)
        self._traces = traces

    def persistent_load(self, number: int) -> Any:
        """Return the trace of a number."""
        return self._traces[number]


def _ordered(fgraph):
    """Return the constants and the nodes of a graph, in an order in which it can be made again."""
    nodes = fgraph.toposort()
    read = itertools.chain(*[node.inputs for node in nodes], fgraph.outputs)
    return list(dict.fromkeys(each for each in read if each.owner is None and each not in fgraph.inputs)), nodes


def _content(fgraph, traces):
    """Return an optimised graph as bytes."""
    constants, nodes = _ordered(fgraph)
    variables = [*fgraph.inputs, *constants, *[output for node in nodes for output in node.outputs]]
    numbers = {variable: i for i, variable in enumerate(variables)}
    file = io.BytesIO()
    _Writer(file, traces).dump((
        [(type(each), each.type, each.data, each.name, vars(each.tag)) for each in constants],
        [(node.op, [numbers[each] for each in node.inputs],
          [(type(each), each.type, each.name, vars(each.tag)) for each in node.outputs]) for node in nodes],
        [numbers[output] for output in fgraph.outputs], hasattr(fgraph, 'destroyers')))
    for before, after in zip(variables, _graph_of(file.getvalue(), fgraph, traces).variables):
        same = before.type == after.type and (before.owner is None or before.owner.op == after.owner.op)
        if not same or hasattr(before, 'signature') and before.signature() != after.signature():
            raise CannotKeep('%s is another one after it was read again' % before)
    return file.getvalue()


class _Kept(NamedTuple):
    """An optimised graph over the inputs of a graph before its optimisation."""

    variables: list[Any]
    outputs: list[Any]
    in_place: bool  # whether the graph has a DestroyHandler


def _graph_of(content, fgraph, traces):
    """Return the graph that `_content` has written, over the inputs of a graph."""
    from theano.gof import Apply
    constants, nodes, outputs, in_place = _Reader(io.BytesIO(content), traces).load()
    variables = list(fgraph.inputs)
    for kind, type_, data, name, tag in constants:
        variables.append(_tagged(kind(type_, data, name), tag))
    for op, inputs, results in nodes:
        node = Apply(op, [variables[i] for i in inputs], [kind(type_, name=name) for kind, type_, name, _ in results])
        variables += [_tagged(output, tag) for output, (*_, tag) in zip(node.outputs, results)]
    return _Kept(variables, [variables[i] for i in outputs], in_place)


def _tagged(variable, tag):
    vars(variable.tag).clear()
    vars(variable.tag).update(tag)
    return variable


def _take(kept, fgraph):
    """Give a graph the outputs of a kept one."""
    from theano.gof import DestroyHandler
    for i, output in enumerate(kept.outputs):
        fgraph.change_input('output', i, output, reason='kept')
    if kept.in_place:
        fgraph.attach_feature(DestroyHandler())
    fgraph.checkpoint()  # the graph before is needed no more


def _read(path, fgraph, traces):
    """Read a kept graph, see `_graph_of`; return None if there is none, or its file is damaged."""
    try:
        with open(path, 'rb') as file:
            digest, content = file.read(32), file.read()
    except OSError:
        return None
    if hashlib.sha256(content).digest() != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it was used
    return _graph_of(content, fgraph, traces)


def _write(path, fgraph, traces):
    content = _content(fgraph, traces)
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with files.whole_file(path, flush=False) as unfinished, open(unfinished, 'wb') as file:
        file.write(hashlib.sha256(content).digest() + content)
    _make_room(folder)


def _make_room(folder):
    """Remove the files that were not used for the longest time, if all take too many bytes."""
    used = sorted(_files(folder), reverse=True)
    total = 0
    for _, size, path in used:
        total += size
        if total > CAPACITY:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def _files(folder):
    """Return the time of its last use, the size and the path of each file; other processes write and remove files."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    return found


@contextlib.contextmanager
def _recorded(records):
    """Record in a list what Theano logs and warns of in a ``with`` block: the next process would not hear of it."""
    def show(message, *args, **kwargs):
        records.append(message)
        return before(message, *args, **kwargs)
    handler, before = logging.Handler(logging.WARNING), warnings.showwarning
    handler.emit = records.append
    logging.getLogger('theano').addHandler(handler)
    try:
        with temporarily(warnings, 'showwarning', show):
            yield
    finally:
        logging.getLogger('theano').removeHandler(handler)
