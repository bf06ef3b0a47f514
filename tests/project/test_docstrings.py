"""The reference has each public name. Docstrings name each parameter, each result and each error."""
import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import theano_mgpu
import theano_mgpu.keras

import pytest
from numpydoc.validate import validate

PAGES = {theano_mgpu: 'docs/reference/theano_mgpu.md', theano_mgpu.keras: 'docs/reference/keras.md'}
# Checks of numpydoc: no docstring; parameters that are missing or unknown; no Returns; no Yields.
CHECKS = {'GL08', 'PR01', 'PR02', 'RT01', 'YD01'}
REPORTS = ('theano_mgpu.checks.verification', 'theano_mgpu.auto.report')


def text_of(page):
    return (Path(__file__).resolve().parents[2] / page).read_text(encoding='utf-8')


def names(options, option):
    """Return the names that an option of a directive lists."""
    return re.findall(r'\w+', ''.join(re.findall(r':%s:(.*)' % option, options)))


def shown():
    """Return the functions, classes and methods in the reference, by full name."""
    found = {}
    for module, page in PAGES.items():
        for kind, path, options in re.findall(r'^\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)', text_of(page), re.MULTILINE):
            if kind == 'module':
                things = [getattr(module, name) for name in module.__all__]
            else:
                home, _, name = path.rpartition('.')
                things = [getattr(importlib.import_module(home), name)]
            for thing in things:
                found['%s.%s' % (thing.__module__, thing.__qualname__)] = thing
                members = names(options, 'members') + names(options, 'special-members')
                if kind == 'module' and inspect.isclass(thing):  # Keras documents the hooks of a callback
                    members = [name for name, member in vars(thing).items() if inspect.isfunction(member) and
                               not name.startswith(('_', 'on_')) and name not in names(options, 'exclude-members')]
                for method in [getattr(thing, name) for name in members]:
                    found['%s.%s' % (method.__module__, method.__qualname__)] = method
    return found


SHOWN = shown()


@pytest.mark.parametrize('module', PAGES, ids=lambda module: module.__name__)
def test_each_public_name_is_in_the_tables(module):
    tables = ''.join(re.findall(r':nosignatures:\n\n((?:   \w+\n)+)', text_of(PAGES[module])))
    assert sorted(tables.split()) == sorted(module.__all__)


@pytest.mark.parametrize('name', SHOWN)
def test_parameters_and_results_are_documented(name):
    thing = SHOWN[name]
    assert thing.__doc__, name
    # The arguments of errors, reports and named tuples are the package's own business.
    internal = inspect.isclass(thing) and 'Parameters\n' not in thing.__doc__ and (
        issubclass(thing, (Exception, tuple, list)) or name.rpartition('.')[0] in REPORTS)
    errors = [] if internal else [text for code, text in validate(name)['errors'] if code in CHECKS]
    assert not errors, '%s: %s' % (name, '; '.join(errors))


def raised(function, seen=()):
    """Return the names of the errors that a function raises, or a private function of its module that it calls."""
    module, found = inspect.getmodule(function), set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found.add(node.exc.func.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith('_'):
            helper = getattr(module, node.func.id, None)
            if inspect.isfunction(helper) and helper not in seen:
                found |= raised(helper, (*seen, function))
    return found


@pytest.mark.parametrize('name', SHOWN)
def test_errors_are_documented(name):
    thing = SHOWN[name]
    if inspect.isclass(thing) and issubclass(thing, (Exception, tuple)):
        return
    function = thing.__init__ if inspect.isclass(thing) else inspect.unwrap(thing)
    _, _, section = inspect.getdoc(thing).partition('Raises\n------\n')
    missing = [error for error in raised(function) if error not in section] if inspect.isfunction(function) else []
    assert not missing, '%s raises %s' % (name, ', '.join(missing))
