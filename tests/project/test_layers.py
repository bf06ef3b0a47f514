"""The layout: no import upwards, no cycle, Theano and patches only where they may be."""
import ast
from pathlib import Path

import theano_mgpu

import pytest
from graphlib import TopologicalSorter

PACKAGE = Path(theano_mgpu.__file__).parent
# The modules and sub-packages of the package, from the bottom up: each imports only from those before it.
ORDER = ['command_path', 'errors', 'second_import', 'parsing', 'config', 'jobs', 'utils', 'summaries', 'patches',
         'devices', 'profiling', 'options', 'graphs', 'placement', 'replicas', 'executors', 'distributed', 'analysis',
         'plan', 'runtime', 'batches', 'checkpoints', 'building', 'data_parallel', 'verification', 'parallel_function',
         'training', 'prediction', 'enabling', '__init__', 'keras', 'cli', '__main__']


def modules():
    """The name of each module, and its file."""
    for path in sorted(PACKAGE.rglob('*.py')):
        name = '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
        yield name[:-len('.__init__')] if name.endswith('.__init__') else name, path


MODULES = dict(modules())


def imported(path):
    """Modules of the package that a module imports, wherever it does so."""
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
    """In a sub-package neither; what its __init__ imports comes before it."""
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_everything_has_its_place():
    assert {name.split('.')[0] for name in MODULES} == set(ORDER)


@pytest.mark.parametrize('name', ['config', 'errors', 'profiling.timeline', 'jobs.mpi_environment', 'jobs.rank_process',
                                  'devices.host_memory'])
def test_what_comes_before_theano_never_imports_it(name):
    assert 'import theano' not in MODULES[name].read_text()


def test_monkey_patches_are_where_they_belong():
    """Assigning to an attribute of what is imported from a library happens in the package `patches` alone."""
    for name, path in MODULES.items():
        if name.split('.')[0] == 'patches':
            continue
        tree = ast.parse(path.read_text())
        foreign = {alias.asname or alias.name.split('.')[0] for node in ast.walk(tree)
                   for alias in imported_from(node, ('theano', 'keras', 'numpy', 'pygpu'))}
        for node in ast.walk(tree):
            for target in assigned_attributes(node):
                assert target.split('.')[0] not in foreign, '%s patches %s' % (name, target)


def imported_from(node, libraries):
    """What an import takes from one of the libraries."""
    if isinstance(node, ast.ImportFrom) and not node.level and node.module.split('.')[0] in libraries:
        return node.names
    return [alias for alias in node.names if alias.name.split('.')[0] in libraries] \
        if isinstance(node, ast.Import) else []


def assigned_attributes(node):
    """Attributes that a statement assigns to, as text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'setattr':
        return [ast.unparse(node.args[0]) + '.']
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)] \
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
    targets = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)]


# --- Sizes ---------------------------------------------------------------------------------------

PUBLIC = {'parallel_function.function', 'training.training_function', 'prediction.predictor.__init__'}


def test_a_dozen_modules_at_the_top_level():
    assert len([name for name, path in MODULES.items() if path.parent == PACKAGE]) <= 12


@pytest.mark.parametrize('name', MODULES)
def test_no_private_function_with_more_than_eight_parameters(name):
    """`self` does not count."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.FunctionDef) and '%s.%s' % (name, node.name) not in PUBLIC:
            parameters = [each.arg for each in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            assert len([each for each in parameters if each not in ('self', 'cls')]) <= 8, node.name
