"""Optimised graphs on disk: the same results, nothing optimised twice, and nothing taken that is not the same."""
import _weakref
import contextlib
import functools
import linecache
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap

import theano_mgpu as mgpu
from theano_mgpu.compat import kept_graphs

import cuda_on_cpu
import numpy as np
import pytest
import theano
import theano.tensor as T
from support.launch import launch
from support.standin import launched, run
from theano.gof.opt import Optimizer
from theano.sandbox.rng_mrg import MRG_RandomStreams

PY = theano.Mode('py', 'fast_run')


@pytest.fixture
def optimised(monkeypatch, tmp_path):
    """The numbers of nodes of the graphs that are optimised; all are kept, in a new folder."""
    nodes, call = [], Optimizer.__call__

    def counted(self, fgraph):
        if self:  # some have no optimisation
            nodes.append(len(fgraph.apply_nodes))
        return call(self, fgraph)
    monkeypatch.setattr(Optimizer, '__call__', counted)
    monkeypatch.setattr(kept_graphs, 'FOLDER', str(tmp_path))
    monkeypatch.setattr(kept_graphs, 'WORTH', 0)
    monkeypatch.setattr(theano.config.mgpu, 'keep_graphs', 'True')
    return nodes


def run_twice(make, optimised):
    """Make a function twice; return both. Only the first one was optimised."""
    first = make()
    n_optimised = len(optimised)
    assert n_optimised
    second = make()
    assert len(optimised) == n_optimised
    return first, second


# ------------------------------------------------------------------------------------------------- the same results


def shared(value, name):
    return theano.shared(np.asarray(value, theano.config.floatX), name)


def trained():
    x, w, b = T.matrix('x'), shared(np.ones((3, 3)), 'w'), shared(np.zeros(3), 'b')
    loss = (T.nnet.softmax(T.tanh(x.dot(w) + b)) ** 2).mean()
    return [x], [loss, w], [(each, each - 0.1 * T.grad(loss, each)) for each in (w, b)]


def drawn():
    x, random = T.matrix('x'), MRG_RandomStreams(7)
    return [x], [x * random.normal((2, 3)), random.uniform((4,))], None


def drawn_by_numpy():
    x, random = T.matrix('x'), T.shared_randomstreams.RandomStreams(7)
    return [x], [x * random.normal((2, 3)), random.permutation((2,), 5)], None


def scanned():
    x, w = T.matrix('x'), shared(np.full((3, 3), 0.3), 'w')
    states, _ = theano.scan(lambda row, state: T.tanh(row + state.dot(w)), [x], T.zeros(3, x.dtype))
    return [x], [states], [(w, w - T.grad(states[-1].sum(), w))]


def chosen():
    x = T.matrix('x')
    return [x], [theano.ifelse.ifelse(T.gt(x.sum(), 1), x * 2, x + 1), T.constant(3.0), x, x.T], None


def indexed():
    x, table = T.matrix('x'), shared(np.arange(12).reshape(6, 2), 'table')
    rows = T.cast(x[0], 'int32')
    return [x], [table[rows], T.sort(x, 1), x[:, ::-1].sum(0)], [(table, T.inc_subtensor(table[rows], 1))]


def text_of(function):
    """Return the graph of a function as text, without the order of its nodes."""
    return re.sub(r"(?m)''   \d+$", '', theano.printing.debugprint(function, file='str'))


@pytest.mark.slow_with('trained', 'indexed')
@pytest.mark.parametrize('graph', [trained, drawn, drawn_by_numpy, scanned, chosen, indexed])
def test_the_results_are_the_same_to_the_bit(graph, optimised):
    def make():
        inputs, outputs, updates = graph()
        return theano.function(inputs, outputs, updates=updates, mode=PY)
    first, second = run_twice(make, optimised)
    assert text_of(first) == text_of(second)
    x = np.arange(6, dtype=theano.config.floatX).reshape(2, 3)
    for _ in range(3):
        for one, other in zip(first(x), second(x)):
            assert (one == other).all()
    for one, other in zip(first.get_shared(), second.get_shared()):
        assert str(one.get_value()) == str(other.get_value())


@pytest.mark.slow
@pytest.mark.opencl
def test_graphs_of_devices_are_kept(contexts, optimised):
    x, w = T.matrix('x'), shared(np.full((3, 3), 0.3), 'w')

    def make():
        return mgpu.function([x], T.tanh(x.dot(w)).sum(), contexts=contexts('gpu', 2))
    first, second = run_twice(make, optimised)
    values = np.arange(15, dtype=theano.config.floatX).reshape(5, 3)
    assert first(values) == second(values)


# ------------------------------------------------------------------------------------------- what makes another graph


class Doubled(theano.Op):
    """An op of a script: its code is not known in the next process."""

    __props__ = ()
    itypes = otypes = [T.dscalar]

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(2 * inputs[0])


def make_sum(scale=2.0, op=None, mode=PY, **arguments):
    x = T.dscalar('x')
    return theano.function([theano.In(x, **arguments)], (op or T.exp)(x * T.constant(np.asarray(scale))) + 1, mode=mode)


CHANGES = {
    'a constant': dict(scale=3.0),
    'a flag': dict(flag=('conv.assert_shape', True)),
    'an input that may be overwritten': dict(mutable=True),
    'an op': dict(op=T.log),
    'a mode': dict(mode=PY.excluding('fusion')),
}


@pytest.mark.parametrize('change', CHANGES)
def test_another_graph_is_optimised(change, optimised):
    arguments = dict(CHANGES[change])
    make_sum()
    with theano.change_flags(**dict([arguments.pop('flag')] if 'flag' in arguments else [])):
        make_sum(**arguments)
        assert len(optimised) == 2
        make_sum(**arguments)
    assert len(optimised) == 2


@pytest.mark.parametrize('part', ['_environment', '_devices'])
def test_graphs_of_other_versions_and_devices_are_not_taken(part, optimised, monkeypatch):
    make_sum()
    monkeypatch.setattr(kept_graphs, part, lambda: 'another one')
    make_sum()
    assert len(optimised) == 2


class Named(Doubled):
    def __reduce__(self):
        return np.asarray, (1,)


@theano.compile.ops.as_op([T.dscalar], [T.dscalar])
def tripled(x):
    return np.asarray(3 * x)


@pytest.mark.parametrize('op', [Doubled(), Named(), tripled])
def test_what_code_of_a_script_computes_is_not_kept(op, optimised):
    x = T.dscalar('x')
    for _ in range(2):
        f = theano.function([x], x + op(T.constant(2.0, dtype='float64')), mode=PY)
        assert len(f.maker.fgraph.apply_nodes) == 1  # the constant is folded
    assert len(optimised) == 2


def test_the_content_of_a_file_is_not_kept(optimised, tmp_path):
    """The next start took what the file had held when the graph was optimised."""
    path = str(tmp_path / 'array.npy')
    for number in (1, 2):
        np.save(path, np.full(3, float(number)))
        f = theano.function([], 2 * T.load(path, 'float64', (False,)), mode=PY)
        np.testing.assert_array_equal(f(), [2 * number] * 3)


def mine(node):
    return None


@pytest.mark.parametrize('register', [
    lambda: PY.register((theano.gof.opt.FromFunctionOptimizer(mine), 49)),
    lambda: PY.register((theano.gof.opt.FromFunctionOptimizer(functools.wraps(T.exp.__call__)(mine)), 49))])
def test_an_optimisation_of_a_script_is_applied(register, optimised):
    for _ in range(2):
        make_sum(mode=register())
    assert len(optimised) == 2


def test_an_optimisation_that_is_replaced_is_applied(optimised, monkeypatch):
    make_sum()
    monkeypatch.setattr(T.opt.local_add_specialize, 'transform', mine)
    make_sum()
    assert len(optimised) == 2


def both(line):
    """Return two functions of one line of a known module."""
    namespace = {'__name__': 'theano.gof.opt'}
    exec(line, namespace)
    return namespace['f'], namespace['g']


def marked(x, mark):
    y = T.exp(x)
    y.owner.tag.local_log_erfc_applied = mark
    return y


def beside(x, other):
    """Return the first output of a node of two outputs, with another type of the second one."""
    node = T.max_and_argmax(x)[0].owner
    return theano.Apply(node.op, node.inputs, [node.outputs[0].type(), other()]).outputs[0]


CODE = {
    'a number in the code': 'f, g = lambda graph: 1, lambda graph: 2',
    'a name in the code': 'f, g = lambda graph: len, lambda graph: str',
    'code within the code': 'f, g = lambda graph: lambda: 1, lambda graph: lambda: 2',
    'its signature': 'f, g = lambda graph: graph, lambda *graph: graph',
    'a default': 'f, g = lambda graph, n=1: n, lambda graph, n=2: n',
    'its closure': 'f, g = [(lambda n: lambda graph: n)(n) for n in (1, 2)]',
}
VALUES = {
    'the class of a number': (1, 1.0), 'a truth value': (1, True), 'a sign': (0.0, -0.0), 'a set': ({1}, [1]),
    'a frozenset': ({1}, frozenset([1])), 'a tuple': ((1,), [1]), 'nesting': ([1, [2]], [[1], 2]),
    'an order': ({'a': 1, 'b': 2}, {'b': 2, 'a': 1}), 'bytes': (b'a', 'a'), 'a type of data': (np.float32(1), 1.0),
    'a class': (T.TensorType, T.TensorVariable), 'one object twice': (2 * [T.dscalar()], [T.dscalar(), T.dscalar()]),
    'a part of an array': (np.arange(4)[::2], np.arange(2)), 'a shape': (np.zeros((1, 2)), np.zeros((2, 1))),
}


def digest(*objects, inputs=()):
    return kept_graphs._Description(inputs).digest(*objects)


@pytest.mark.parametrize('pair', [*map(both, CODE.values()), *VALUES.values()], ids=[*CODE, *VALUES])
def test_other_objects_have_another_digest(pair):
    one, other = pair
    assert digest(one) != digest(other)
    assert digest(one) == digest(one) and digest([one, other]) == digest([one, other])


@pytest.mark.parametrize('make, values', [(marked, (False, True)), (beside, (T.lscalar, T.fscalar))])
def test_other_nodes_have_another_digest(make, values):
    x = T.dvector('x')
    one, other, again = [digest([x], [make(x, value)], inputs=[x]) for value in [*values, values[0]]]
    assert one != other and one == again


def class_of_a_function():
    namespace = {'__name__': 'theano.gof.opt'}
    exec('def make():\n    class Local:\n        pass\n    return Local', namespace)
    return namespace['make']()


@pytest.mark.parametrize('obj', [
    theano.shared(1.0), theano.shared(1.0).container, class_of_a_function(), class_of_a_function()(),
    np.frompyfunc(lambda x: x, 1, 1), _weakref.getweakrefcount, np.ctypeslib.ctypes, textwrap.dedent])
def test_what_another_process_may_not_know_has_no_digest(obj):
    with pytest.raises((kept_graphs.CannotKeep, pickle.PicklingError, AttributeError)):
        digest(obj)


def test_functions_and_graphs_of_their_own_have_no_digest():
    f = theano.function([], T.constant(1.0), mode=PY)
    for obj in (f, f.maker, f.maker.fgraph):
        with pytest.raises(kept_graphs.CannotKeep):
            digest(obj)


def test_an_optimisation_in_c_is_applied(optimised):
    for _ in range(2):
        make_sum(mode=PY.register((theano.gof.opt.FromFunctionOptimizer(_weakref.getweakrefcount), 49)))
    assert len(optimised) == 2


@pytest.mark.slow
def test_a_deep_graph_that_a_tag_names_is_described():
    """A variable's tag may name a variable that many others come before."""
    x = y = T.dscalar('x')
    for _ in range(3000):
        y = y + 1
    x.tag.stands_for = y
    assert digest([x], inputs=[x]) == digest([x], inputs=[x])


def test_marks_of_nodes_are_kept(optimised):
    x = T.dscalar('x')
    for _ in range(2):
        exp, = theano.function([x], marked(x, 'kept'), mode=PY).maker.fgraph.apply_nodes
        assert exp.tag.local_log_erfc_applied == 'kept'
    assert len(optimised) == 1


def test_what_the_optimiser_logs_is_logged_each_time(optimised, caplog):
    def log(fgraph):
        logging.getLogger('theano.gof.opt').warning('a warning')
    log.__globals__['__name__'], name = 'theano.gof.opt', __name__
    try:
        mode = PY.register((theano.gof.opt.FromFunctionOptimizer(log), 49))
        for _ in range(2):
            make_sum(mode=mode)
    finally:
        log.__globals__['__name__'] = name
    assert len(optimised) == caplog.text.count('a warning') == 2


@pytest.mark.slow_with('flag1')
@pytest.mark.parametrize('flag', [('mgpu.keep_graphs', 'False'), ('compute_test_value_opt', 'ignore')])
def test_nothing_is_kept_with_some_flags(flag, optimised, tmp_path):
    with theano.change_flags(**dict([flag])):
        make_sum()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def notes(monkeypatch):
    """The notes for the user."""
    found = []
    monkeypatch.setattr(kept_graphs.progress, 'note', found.append)
    monkeypatch.setattr(kept_graphs, '_lost', 0.)
    return found


@pytest.mark.parametrize('lasting, n_notes', [(0, 1), (1000, 0)])
def test_graphs_that_cannot_be_kept_are_named_once_if_they_take_long(lasting, n_notes, optimised, notes, monkeypatch):
    monkeypatch.setattr(kept_graphs, 'NOTED', lasting)
    for op in (Doubled(), tripled, Doubled()):
        make_sum(op=op)
    assert kept_graphs._lost > 0 and len(notes) == n_notes
    assert all('Doubled' in note and 'is defined in ' + __name__ in note for note in notes)


def test_a_folder_that_cannot_be_written_is_named(optimised, notes, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_graphs, 'NOTED', 0)
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr(kept_graphs, 'FOLDER', str(tmp_path / 'file' / 'folder'))
    make_sum()
    assert len(notes) == 1 and 'NotADirectoryError' in notes[0]


# -------------------------------------------------------------------------------------------------------- the files


def test_a_file_that_another_process_removes_meanwhile(optimised, notes, tmp_path, monkeypatch):
    """Another process may rename or remove a file while the folder is listed."""
    list_folder = os.scandir

    def scandir(folder='.'):
        if not str(folder).startswith(str(tmp_path)):  # another module lists a folder
            return list_folder(folder)
        (tmp_path / 'removed').write_text('')
        with list_folder(folder) as entries:
            found = list(entries)
        (tmp_path / 'removed').unlink()
        return contextlib.nullcontext(found)
    monkeypatch.setattr(kept_graphs.os, 'scandir', scandir)
    make_sum()
    assert len(os.listdir(str(tmp_path))) == 1 and not kept_graphs._lost


def test_a_damaged_file_is_written_again(optimised, tmp_path):
    make_sum()
    path, = tmp_path.iterdir()
    whole = path.read_bytes()
    for n, damaged in enumerate([whole[:-9], b'', whole[:99] + b'?' + whole[100:]]):
        path.write_bytes(damaged)
        assert make_sum()(1) == np.exp(2.0) + 1
        assert make_sum()(1) == np.exp(2.0) + 1
        assert len(optimised) == n + 2


def test_what_other_users_can_write_is_not_taken(optimised, notes, tmp_path, monkeypatch):
    """A file there runs code: pickle reads it."""
    monkeypatch.setattr(kept_graphs, 'NOTED', 0)
    for n, mode in enumerate([0o600, 0o620, 0o602], 1):
        for path in tmp_path.iterdir():
            path.chmod(mode)
        make_sum(), make_sum()
        assert len(optimised) == n and [each.stat().st_mode & 0o777 for each in tmp_path.iterdir()] == [0o600]
    assert not notes
    for n, mode in enumerate([0o770, 0o707], 4):
        tmp_path.chmod(mode)
        make_sum()
        assert len(optimised) == n and len(notes) == 1 and 'other users can write there' in notes[0]
        assert str(tmp_path) in notes[0]


def test_a_new_folder_is_the_user_s_own(optimised, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_graphs, 'FOLDER', str(tmp_path / 'folder'))
    run_twice(make_sum, optimised)
    assert (tmp_path / 'folder').stat().st_mode & 0o777 == 0o700


def test_files_that_were_not_used_for_long_make_room(optimised, tmp_path, monkeypatch):
    make_sum()
    old, = tmp_path.iterdir()
    os.utime(old, (0, 0))
    monkeypatch.setattr(kept_graphs, 'CAPACITY', 1.5 * old.stat().st_size)
    make_sum(3.0)
    new, = tmp_path.iterdir()
    assert new != old


def test_a_folder_that_cannot_be_written_is_no_error(optimised, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr(kept_graphs, 'FOLDER', str(tmp_path / 'file' / 'folder'))
    assert make_sum()(1) == np.exp(2.0) + 1


def test_variables_come_from_lines_of_the_present_script(optimised):
    for script in ('before', 'after'):
        x = T.dvector('x')
        with theano.change_flags(**{'traceback.limit': 1}):
            linecache.cache[script] = 1, None, ['T.exp(x)'], script
            y = eval(compile('T.exp(x)', script, 'eval'), {'T': T, 'x': x})
        exp, = theano.function([x], y, mode=PY).maker.fgraph.apply_nodes
        (file, *_), = exp.outputs[0].tag.trace[0]
        assert file == script
    assert len(optimised) == 1


def test_messages_name_lines_of_the_present_script(optimised, cpu2):
    """The same graph over contexts: see tests/graph/test_lines_of_scripts.py."""
    for script in ('before', 'after'):
        x = T.dvector('x')
        with theano.change_flags(**{'traceback.limit': 8, 'mgpu.check': 1}):
            linecache.cache[script] = 1, None, ['T.log(x).sum()'], script
            loss = eval(compile('T.log(x).sum()', script, 'eval'), {'T': T, 'x': x})
            w = theano.shared(1.0, name='w')
            step = mgpu.function([x], loss, updates={w: w + loss}, mode=PY)
            with pytest.raises(mgpu.NonFiniteError, match=r'near x \(%s, line 1: ' % script):
                step(np.zeros(4))
        if script == 'before':
            assert optimised
            optimised.clear()
    assert not optimised


# ------------------------------------------------------------------------------------------------------- processes

SCRIPT = '''
    import theano_mgpu, theano, numpy as np, theano.tensor as T
    from theano.gof.opt import Optimizer
    from theano_mgpu.compat import kept_graphs
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    kept_graphs.WORTH, optimised, call = 0, [], Optimizer.__call__
    Optimizer.__call__ = lambda self, fgraph: self and optimised.append(fgraph) or call(self, fgraph)
    x, w = T.matrix('x'), theano.shared(np.ones((3, 3)), 'w')
    states, _ = theano.scan(lambda row, state: T.tanh(row + state.dot(w)), [x], T.zeros(3))
    noise = MRG_RandomStreams(7).normal((3,))
    loss = (T.nnet.softmax(T.tanh(states * noise)) ** 2).mean()
    f = theano.function([x], loss, updates=[(w, w - 0.1 * T.grad(loss, w))])
    print([f(np.ones((2, 3))).tolist() for _ in range(3)], w.get_value().tolist())
    print(len(optimised))
'''


def start(folder, flags='floatX=float64'):
    """Start a process that makes functions, without g++; `output_of` returns its results, and how many it optimised."""
    env = dict(os.environ, THEANO_FLAGS='cxx=,mgpu.keep_graphs=True,base_compiledir=%s,%s' % (folder, flags))
    return subprocess.Popen([sys.executable, '-c', textwrap.dedent(SCRIPT)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def output_of(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    results, optimised = output.splitlines()
    return results, int(optimised)


@pytest.mark.slow
def test_a_second_start_does_not_optimise(tmp_path):
    first, second = [output_of(start(tmp_path)) for _ in range(2)]
    assert first[0] == second[0]
    assert first[1] >= 3 and second[1] == 0


@pytest.mark.slow
def test_processes_that_start_together_share_what_they_keep(tmp_path):
    results = [output_of(process) for process in [start(tmp_path) for _ in range(3)]]
    results.append(output_of(start(tmp_path)))
    assert len({text for text, _ in results}) == 1
    assert results[-1][1] == 0


RANKS = '''
import sys, theano_mgpu as mgpu, theano, numpy as np, theano.tensor as T
from theano.gof.opt import Optimizer
from theano_mgpu.compat import kept_graphs
kept_graphs.WORTH, optimised, call = 0, [], Optimizer.__call__
Optimizer.__call__ = lambda self, fgraph: self and optimised.append(fgraph) or call(self, fgraph)
x, w, v = T.matrix('x'), theano.shared(np.ones((3, 3)), 'w'), theano.shared(np.ones(3), 'v')
hidden = T.tanh(x.dot(w))
loss = ((hidden - hidden.mean(0)).dot(v) ** 2).mean()
step = mgpu.training_function([x], loss, [w, v], lambda gradients: [
    (param, param - 0.1 * gradient) for param, gradient in zip((w, v), gradients)])
losses = [step(np.arange(15.0).reshape(5, 3) % (4 + n)).tolist() for n in range(3)]
with open('%s.%d' % (sys.argv[1], mgpu.rank()), 'w') as file:
    print(losses, w.get_value().tolist(), v.get_value().tolist(), file=file)
    print(len(optimised), int(kept_graphs._lost > 0), file=file)
'''


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_that_start_together_share_what_they_keep(tmp_path):
    """The folder is empty, then it is full, then its files are damaged."""
    script, results = tmp_path / 'script.py', []
    script.write_text(RANKS)
    flags = 'floatX=float64,cxx=,mgpu.keep_graphs=True,contexts=a->cpu,base_compiledir=%s' % (tmp_path / 'base')
    for name in ('empty', 'full', 'damaged'):
        launch(2, tmp_path / name, job=str(script), options=['--timeout', '20'], flags=flags)
        results.append([(tmp_path / ('%s.%d' % (name, rank))).read_text().splitlines() for rank in range(2)])
        if name == 'full':
            for path in (tmp_path / 'base').glob('*/kept_graphs/*'):
                path.write_bytes(path.read_bytes()[:-9])
    texts, counts = zip(*[zip(*of_ranks) for of_ranks in results])
    assert len(set(sum(texts, ()))) == 1
    numbers = [[tuple(map(int, count.split())) for count in of_ranks] for of_ranks in counts]
    assert numbers[1] == [(0, 0), (0, 0)]
    assert all(n_optimised > 1 and n_lost == 0 for of_ranks in (numbers[0][:1], numbers[2][:1])
               for n_optimised, n_lost in of_ranks)


ON_STANDIN = '''
import hashlib, theano, theano.tensor as T
from theano.gof.opt import Optimizer
from theano_mgpu.compat import kept_graphs
kept_graphs.FOLDER, kept_graphs.WORTH, optimised, call = %r, 0, [], Optimizer.__call__
Optimizer.__call__ = lambda self, fgraph: self and optimised.append(fgraph) or call(self, fgraph)
contexts = mgpu.init() if mgpu.size() > 1 else mgpu.init(2)
x, w = T.fmatrix('x'), theano.shared(np.full((3, 3), 0.3, 'float32'), 'w')
hidden = T.tanh(x.dot(w))
step = mgpu.training_function([x], ((hidden - hidden.mean(0)) ** 2).mean(), [w], lambda gradients: [
    (w, w - np.float32(0.1) * gradients[0])])
losses = [step(np.arange(15, dtype='float32').reshape(5, 3) / (4 + n)).tolist() for n in range(3)]
print(losses, w.get_value().tolist())
print(len(optimised), int(kept_graphs._lost > 0))
'''


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
def test_graphs_of_cuda_devices(tmp_path):
    """A second start takes the graphs, unless the devices are others; so do ranks that start together."""
    code, flags = ON_STANDIN % str(tmp_path), 'mgpu.keep_graphs=True,mgpu.shares=equal'
    (first, n_first), (second, n_second), (other, n_other) = [
        run(code, flags=flags, cc=cc) for cc in ('7.0', '7.0', '7.5')]
    assert first == second == other and n_second == '0 0'
    assert n_first == n_other and n_first.endswith(' 0') and int(n_first.split()[0]) > 1
    (ranks, n_ranks), (again, n_again) = [launched(2, code, tmp_path.parent, 2, flags) for _ in range(2)]
    assert ranks == again and n_again == '0 0' and n_ranks.endswith(' 0')
