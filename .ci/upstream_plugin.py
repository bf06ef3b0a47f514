"""A plugin of pytest for the tests of Keras, Theano and pygpu: ``-p upstream_plugin``. `.ci/test-upstream` uses it.

The plugin imports theano_mgpu first, enables it, writes the outcome of each test to a file, and replaces the parts of
nose that Theano's tests need. Environment variables:

UPSTREAM_LIBRARY  keras, theano, gpuarray (for Theano's tests of gpuarray) or pygpu, which is run without theano_mgpu
UPSTREAM_WAY      plain (the default), enable, always (the argument of mgpu.enable(always=...)), processes: always, and
                  processes compute all parts that they can, or bare: without theano_mgpu, but with the names without
                  which Theano and Keras cannot be imported
UPSTREAM_REPORT   the file for the outcomes; each rank of a job adds its number to the name
UPSTREAM_LEFT_OUT a file with the names of tests to leave out, one a line
"""
import inspect
import json
import os
import random
import runpy
import sys
import tempfile
import types
import zlib

LIBRARY, WAY = os.environ['UPSTREAM_LIBRARY'], os.environ.get('UPSTREAM_WAY', 'plain')
LEFT_OUT = set()
if 'UPSTREAM_LEFT_OUT' in os.environ:
    with open(os.environ['UPSTREAM_LEFT_OUT']) as lines:
        LEFT_OUT.update(lines.read().splitlines())
RANK = os.environ.get('OMPI_COMM_WORLD_RANK')
if WAY == 'bare':
    path = os.path.join(os.path.dirname(__file__), os.pardir, 'theano_mgpu', 'compat', 'removed_names.py')
    removed_names = runpy.run_path(path)
    removed_names['restore_numpy_aliases']()
    removed_names['restore_collections_abcs']()
elif LIBRARY != 'pygpu':
    import theano_mgpu
if LIBRARY == 'keras':
    import keras  # noqa: F401  before the path has a test folder of this name
import numpy as np  # noqa: E402
import pytest  # noqa: E402

if not hasattr(np.testing, 'dec'):  # since NumPy 1.25
    np.testing.dec = types.SimpleNamespace(skipif=lambda condition, reason=None: pytest.mark.skipif(
        bool(condition), reason=str(reason)))
if not hasattr(np, 'find_common_type'):  # since NumPy 2
    np.find_common_type = lambda arrays, scalars: np.result_type(*arrays, *scalars)

_reports = []
_path = os.environ.get('UPSTREAM_REPORT')
_file = open('%s.%s' % (_path, RANK or 0), 'a', buffering=1) if _path else None


def _write(test, outcome, why=''):
    if _file:
        print(json.dumps({'test': test, 'outcome': outcome, 'why': why.strip().split('\n')[0][:300]}), file=_file)


def _tell(text):
    print('theano-mgpu: note: %s' % text, file=sys.stderr)


def pytest_configure(config):
    """Enable theano_mgpu before tests are imported, as ``theano-mgpu run`` does for a script."""
    if RANK is not None:  # tests write and remove files
        config.option.basetemp = os.path.abspath('files.%s' % RANK)
        os.makedirs('rank.%s' % RANK)
        os.chdir('rank.%s' % RANK)
        tempfile.tempdir = os.getcwd()
    if WAY == 'processes':
        from theano_mgpu.devices import arena, processes
        from theano_mgpu.runtime.batch import Crew
        from theano_mgpu.runtime.forked_parts import ForkedParts
        ForkedParts.crew = lambda self, samples: Crew(2, bool(self._parts) and processes.may_fork())
        arena.SMALL = 64
    if WAY in ('enable', 'always', 'processes'):
        _reports.append(theano_mgpu.enable(always=WAY != 'enable', tell=_tell))


def pytest_terminal_summary(terminalreporter):
    """Print the report of theano_mgpu: the divided functions and models."""
    for report in _reports:
        terminalreporter.write_line(str(report))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Collect as nose does: a class made by a function belongs to the file, and a generator of tests is one test."""
    if LIBRARY == 'keras':
        return None
    if inspect.isclass(obj) and hasattr(obj, 'setUp') and not hasattr(sys.modules[obj.__module__], obj.__name__):
        obj.__module__ = collector.module.__name__
    if not name.lower().startswith('test') or not inspect.isgeneratorfunction(obj):
        return None

    def run_cases(generator):
        for case in generator:
            case = case if isinstance(case, tuple) else (case,)
            case[0](*case[1:])
    run = (lambda self: run_cases(obj(self))) if inspect.isclass(collector.obj) else lambda: run_cases(obj())
    setattr(collector.obj, name, run)
    return pytest.Function.from_parent(collector, name=name)


def pytest_collection_modifyitems(items):
    """Leave out the tests of LEFT_OUT, and tests that a file only imports from another file."""
    items[:] = [item for item in items if item.nodeid not in LEFT_OUT]
    if LIBRARY in ('theano', 'gpuarray'):
        items[:] = [item for item in items
                    if (item.cls or item.function).__module__ in (item.module.__name__, __name__)]


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, 'failed', str(report.longrepr).strip().split('\n')[-1])


def pytest_runtest_setup(item):
    """Seed the random numbers, so that a test draws the same numbers in each way and on each rank."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    _write(item.nodeid, 'started')


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = (yield).get_result()
    if result.when == 'call' or not result.passed:
        why = '%s: %s' % (call.excinfo.typename, call.excinfo.value) if call.excinfo else ''
        _write(item.nodeid, result.outcome, why)
