"""The layout: no import upwards, no cycle, Theano and its patches only where they may be."""
import ast
import re
from collections import Counter
from pathlib import Path

import theano_mgpu

import pytest
from support.patches import tables

TopologicalSorter = pytest.importorskip('graphlib', reason='Python 3.8 has no graphlib').TopologicalSorter
PACKAGE = Path(theano_mgpu.__file__).parent
# Modules and packages from the bottom up: each imports only from earlier ones.
ORDER = ['errors', 'parsing', 'utils', 'compat', 'config', 'options', 'comm', 'devices', 'graph', 'exchange', 'plan',
         'checks', 'runtime', 'parallel_function', 'training', 'placement', 'predict', 'auto', 'public', '__init__',
         'keras', 'cli', '__main__']
# The rooms of ARCHITECTURE.md that have several of them.
ROOMS = {**dict.fromkeys(['errors', 'parsing', 'config', 'utils', 'options'], 'ground'),
         **dict.fromkeys(['parallel_function', 'training', 'placement'], 'functions'),
         **dict.fromkeys(['public', '__init__', '__main__'], '')}
FLOORS = 10


def modules():
    """Yield the name of each module, and its file."""
    for path in sorted(PACKAGE.rglob('*.py')):
        name = '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
        yield name[:-len('.__init__')] if name.endswith('.__init__') else name, path


MODULES = dict(modules())


def imported(path):
    """Yield the modules of the package that a module imports, wherever it does so."""
    folder = path.parent.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split('.')[0] == 'theano_mgpu':
                    yield alias.name.partition('.')[2] or '__init__'
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or '').startswith('theano_mgpu')):
            base = list(folder[:len(folder) - node.level + 1]) if node.level else []
            base += (node.module or '').replace('theano_mgpu', '').strip('.').split('.')
            base = [part for part in base if part]
            for alias in node.names:
                whole = '.'.join(base + [alias.name])
                yield whole if whole in MODULES else '.'.join(base) or '__init__'


def place(name):
    return ORDER.index(name.split('.')[0])


@pytest.mark.parametrize('name', MODULES)
def test_no_import_upwards(name):
    for other in imported(MODULES[name]):
        assert place(other) <= place(name), '%s imports %s, which is above it' % (name, other)


def test_no_cycle():
    """No sub-package has a cycle either; the modules that its __init__ imports come before it."""
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_everything_has_its_place():
    assert {name.split('.')[0] for name in MODULES} == set(ORDER)


def test_ten_floors():
    """A room is one floor above the highest room from which it imports."""
    below = {}
    for name, path in MODULES.items():
        room = ROOMS.get(name.split('.')[0], name.split('.')[0])
        others = {ROOMS.get(other.split('.')[0], other.split('.')[0]) for other in imported(path)}
        below.setdefault(room, set()).update(others - {room, ''})
    floors = {}
    for room in TopologicalSorter({room: others for room, others in below.items() if room}).static_order():
        floors[room] = 1 + max((floors[other] for other in below[room]), default=0)
    assert max(floors.values()) <= FLOORS and len(floors) <= 14, floors


@pytest.mark.parametrize('name', ['config', 'errors', 'utils.timeline', 'utils.mpi_environment', 'utils.rank_process',
                                  'devices.host_memory'])
def test_what_comes_before_theano_never_imports_it(name):
    assert 'import theano' not in MODULES[name].read_text()


def test_the_house_for_one_device():
    """The package `compat` knows no second device, and no other process."""
    waiting, found = [name for name in MODULES if name.split('.')[0] == 'compat'], set()
    for name in waiting:
        assert {other.split('.')[0] for other in imported(MODULES[name])} <= {'compat', 'errors', 'utils'}, name
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imported(MODULES[name])
    others = {name for name in found if name.split('.')[0] not in ('compat', 'utils')}
    assert others == {'errors', 'parsing'}
    assert found.isdisjoint({'utils.mpi_environment', 'utils.rank_process', 'utils.executors'})


def test_monkey_patches_are_where_they_belong():
    """Only `compat`, and the modules of the functions in a table of patches, assign to attributes of a library."""
    patching = {patch.apply.__module__.partition('.')[2] for table in tables().values() for patch in table}
    for name, path in MODULES.items():
        if name.split('.')[0] == 'compat' or name in patching:
            continue
        tree = ast.parse(path.read_text())
        foreign = {alias.asname or alias.name.split('.')[0] for node in ast.walk(tree)
                   for alias in imported_from(node, ('theano', 'keras', 'numpy', 'pygpu'))}
        for node in ast.walk(tree):
            for target in assigned_attributes(node):
                assert target.split('.')[0] not in foreign, '%s patches %s' % (name, target)


def imported_from(node, libraries):
    """Return the names that an import takes from one of the libraries."""
    if isinstance(node, ast.ImportFrom) and not node.level and node.module.split('.')[0] in libraries:
        return node.names
    return [alias for alias in node.names if alias.name.split('.')[0] in libraries] \
        if isinstance(node, ast.Import) else []


def assigned_attributes(node):
    """Return the attributes that a statement assigns to, as text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'setattr':
        return [ast.unparse(node.args[0]) + '.']
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)] \
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
    targets = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)]


# The same idea in two rooms; `config` is a command, too, whose module has its name.
SAME_FILES = {'__init__', '__main__', 'patches', 'checkpoint', 'enabling', 'placement', 'predictor', 'prefetch',
              'verification', 'config'}
SAME_CLASSES = {'Checkpoint', 'Predictor', 'Gather'}  # `Gather`: the analysis asks for it, a step does it


def test_one_meaning_a_name():
    """19 files and 17 classes had the name of another one: a reader of `Found` or `layout.py` asked of what."""
    files = Counter(path.stem for path in MODULES.values())
    classes = Counter(node.name for path in MODULES.values() for node in ast.parse(path.read_text()).body
                      if isinstance(node, ast.ClassDef))
    assert {name for name, n in files.items() if n > 1} == SAME_FILES
    assert {name for name, n in classes.items() if n > 1} == SAME_CLASSES


def test_tests_stand_beside_their_subject():
    """Regression tests were sorted by history: nobody knew where the test of a checkpoint belongs."""
    tests = Path(__file__).parents[1]
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob('*.py')} - {'conftest.py'}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] not in '._'}
    modules = {'test_%s.py' % path.stem for path in PACKAGE.glob('*.py')}
    assert folders - modules == rooms | {'support', 'programs', 'project', 'cuda_on_cpu', 'slurm'}
    assert [name for name, n in Counter(path.name for path in tests.rglob('test_*.py')).items() if n > 1] == []


def test_a_dozen_modules_at_the_top_level():
    assert len([name for name, path in MODULES.items() if path.parent == PACKAGE]) <= 12


def test_attributes_of_theano_s_objects_are_listed():
    """The module `utils.protocol` describes each attribute that the package sets on objects of Theano's."""
    listed = set(re.findall(r'``((?:tag\.)?\w+)``', MODULES['utils.protocol'].read_text()))
    used = {name for path in MODULES.values() for name in attributes_of_theano(ast.parse(path.read_text()))}
    native = {'mgpu_' + name for name in ('exchange', 'failure', 'give_up', 'join', 'lock', 'open', 'unlock', 'use',
                                           'wait')}  # of nccl.cpp
    assert used - native == {name for name in listed if name.startswith(('mgpu_', 'tag.'))}


def attributes_of_theano(tree):
    """Yield the names of attributes with the package's prefix, and of attributes of tags."""
    for node in ast.walk(tree):
        owner, name = (node.value, node.attr) if isinstance(node, ast.Attribute) else (None, '')
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ('getattr', 'setattr', 'hasattr') and \
                isinstance(node.args[1], ast.Constant):
            owner, name = node.args[0], node.args[1].value
        if name.startswith('mgpu_'):
            yield name
        elif owner is not None and ast.unparse(owner).endswith('.tag'):
            yield 'tag.' + name


def test_calls_upwards_are_listed():
    """ARCHITECTURE lists the names that a higher room replaces in a lower one, and the functions that it gives to it.

    A module replaces an attribute of another module, or keeps a function that it is given later than it is made.
    """
    text = (PACKAGE.parent / 'ARCHITECTURE.md').read_text().partition('## What is replaced from above')[2]
    listed = set(re.findall(r'^\| `([\w.]+)`', text.partition('\n## ')[0], re.MULTILINE))
    assert listed == {name for path in MODULES.values() for name in replaced_in(path)}


def replaced_in(path):
    """Yield the names of attributes of other modules that a module assigns, and of functions that it keeps later."""
    tree, folder = ast.parse(path.read_text()), path.parent
    modules = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
               for alias in node.names
               if node.level and (folder.joinpath(*['..'] * (node.level - 1), *(node.module or '').split('.'),
                                                  alias.name + '.py')).exists()}
    for node in ast.walk(tree):
        for target in map(ast.unparse, targets_of(node)):
            if target.split('.')[0] in modules:
                yield target.partition('[')[0]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute) and \
                place(path.relative_to(PACKAGE).with_suffix('').parts[0]) <= place('runtime') and \
                re.match(r"Callable.*None", ast.unparse(node.annotation)):
            yield path.stem + '.' + node.target.attr


def targets_of(node):
    """Return the attributes, or items of attributes, that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] \
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [each for each in flat if isinstance(each, (ast.Attribute, ast.Subscript))]


def test_flags_are_read_in_one_place():
    """The module `options` reads the package's flags for several devices; `compat` has flags of its own."""
    for name, path in MODULES.items():
        uses = re.findall(r'\bconfig\.mgpu\b.*', path.read_text())
        sets = ['config.mgpu', 'config.mgpu.compile_jobs = 1']  # in checks.ledger and comm.patches
        assert set(uses) <= set(sets) or name == 'options' or name.startswith('compat.'), (name, uses)
