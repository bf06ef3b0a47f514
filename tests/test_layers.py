"""The layout: no module imports upwards, no cycle, Theano only where it may be."""
import ast
from pathlib import Path

import theano_mgpu

import pytest

PACKAGE = Path(theano_mgpu.__file__).parent
# From the bottom up. A module imports only from rows above it here (or, in a row, from names to its left).
ROWS = [
    ['errors', 'config', 'launched', 'timeline', 'job', 'host_memory', 'files', 'checkpoint_lock', 'opencl_programs',
     'progress', 'tables', 'links', 'scaling'],
    ['compat', 'native', 'cuda_libraries.library', 'cuda_libraries.search', 'cuda_libraries.versions',
     'cuda_libraries.shims', 'cuda_libraries.nvrtc', 'cuda_libraries', 'cuda_contexts', 'devices', 'context_map',
     'contexts'],
    ['retarget', 'graph', 'op_rules',
     'rng', 'analysis.states', 'analysis.comparisons', 'analysis.sizes', 'analysis.shards', 'analysis.rules.base',
     'analysis.rules.batch_norm', 'analysis.rules.elementwise', 'analysis.rules.shapes', 'analysis.rules.reductions',
     'analysis.rules.products', 'analysis.rules.indexing', 'analysis.rules.rows', 'analysis.rules.advanced_indexing',
     'analysis.rules.draws', 'analysis.rules.control_flow', 'analysis.rules', 'analysis', 'any_length',
     'program.carrying', 'program.lowering', 'program.partition', 'audit', 'certificate', 'replicate', 'transfers',
     'scatter_gather', 'host_reduce', 'collectives'],
    ['executors.base', 'executors.serial', 'executors.threads', 'executors.ranks', 'executors.patience',
     'executors.meeting', 'executors.mpi', 'executors'],
    ['parallel_graph', 'state', 'exchange', 'updates', 'arguments', 'options',
     'look_ahead', 'program.exchange', 'program.shard', 'program.compiled', 'program.run', 'program', 'scatter',
     'data_sets', 'division', 'verification', 'data_parallel', 'function', 'training_graph', 'training',
     'one_context', 'resident', 'replica_pool', 'dealing', 'in_order', 'predict', 'entry', 'function_report',
     'every_function'],
    ['__init__'],
    ['keras.spread', 'keras.batch', 'keras.optimizer', 'keras.forms', 'keras.functions',
     'keras.fit_record', 'keras.callback_states', 'keras.checkpoint', 'keras.look_ahead', 'keras.loops',
     'keras.over_contexts', 'keras.parallel_model', 'keras.multi_gpu', 'keras.predictor',
     'keras.verify', 'keras.report', 'keras.every_model', 'keras'],
    ['cli.output', 'cli.array_input', 'cli.array_output', 'cli.mpirun_output', 'cli.libraries', 'cli.checks',
     'cli.device_checks', 'cli.cuda_checks', 'cli.devices', 'cli.config', 'cli.program', 'cli.run', 'cli.supervise',
     'cli.launch',
     'cli.predict', 'cli.mpi_checks', 'cli.doctor',
     'cli.bench_models', 'cli.bench_measure', 'cli.bench_worker', 'cli.bench_rank', 'cli.bench_ranks',
     'cli.bench_costs', 'cli.bench_report', 'cli.bench_plot', 'cli.bench', 'cli', '__main__'],
]
ORDER = [name for row in ROWS for name in row]


def modules():
    for path in sorted(PACKAGE.rglob('*.py')):
        name = '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)
        yield name[:-len('.__init__')] if name.endswith('.__init__') else name, path


def imported(name, path):
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
                yield whole if whole in ORDER else '.'.join(base) or '__init__'


@pytest.mark.parametrize('name,path', list(modules()), ids=[name for name, _ in modules()])
def test_no_import_upwards(name, path):
    assert name in ORDER, 'put %s into its row of ROWS' % name
    for other in imported(name, path):
        assert ORDER.index(other) < ORDER.index(name), '%s imports %s, which is above it' % (name, other)


def test_every_row_is_there():
    assert {name for name, _ in modules()} == set(ORDER)


@pytest.mark.parametrize('name', ['config', 'errors', 'timeline', 'launched', 'job', 'host_memory'])
def test_layer_0_never_imports_theano(name):
    assert 'import theano' not in (PACKAGE / (name + '.py')).read_text()


def test_monkey_patches_are_where_they_belong():
    """Assigning to an attribute of a Theano class or module happens in compat.py and contexts.py alone."""
    for name, path in modules():
        if name in ('compat', 'contexts'):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                text = ast.unparse(target)
                assert not text.startswith(('theano.', 'pygpu.', 'np.', 'numpy.')), '%s patches %s' % (name, text)
