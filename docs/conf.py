"""Settings of Sphinx for `make docs`.

The source is the whole repository: a link between two Markdown files works in the built pages as it does on the disk.
"""
import argparse
import importlib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# The pages do not depend on the user's settings.
os.environ.update(COLUMNS='90', THEANO_FLAGS='', KERAS_BACKEND='theano')

import theano_mgpu  # noqa: E402
from theano_mgpu.cli import COMMANDS  # noqa: E402
from theano_mgpu.cli.output import add_command  # noqa: E402
from theano_mgpu.utils.flag_text import OWN_FLAGS, values_of  # noqa: E402

project = html_title = 'theano_mgpu'
version = release = theano_mgpu.__version__
copyright = author = 'theano_mgpu contributors'

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary', 'sphinx.ext.napoleon',
              'sphinx.ext.intersphinx']
root_doc = 'docs/index'
include_patterns = ['README.md', 'ARCHITECTURE.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'docs/**.md',
                    'examples/README.md', 'benchmarks/RESULTS.md']
exclude_patterns = ['.*', 'build', 'dist']  # only for speed: include_patterns has none of their files
smartquotes = False          # error messages are quoted literally
highlight_language = 'none'  # indented blocks are commands and their output

html_theme = 'furo'     # loads nothing from other hosts, and is readable on phones
html_static_path = ['style.css']
html_css_files = ['style.css']
html_additional_pages = {'index': 'to_start.html'}  # the first page is docs/index.html
templates_path = ['templates']
html_copy_source = False

myst_heading_anchors = 4  # for links such as keras.md#checkpoints

autosummary_generate = False  # its tables lead to entries on the same page
autodoc_member_order = 'bysource'
autodoc_inherit_docstrings = False
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False  # where it is on, napoleon_type_aliases get into signatures
napoleon_preprocess_types = True  # links the types of parameters
napoleon_attr_annotations = False  # else the aliases below are used in signatures, too, which cannot read them
napoleon_type_aliases = {name.rpartition('.')[2]: ':py:class:`~%s`' % name for name in """
    numpy.ndarray theano_mgpu.Context
    theano_mgpu.training.TrainingFunction theano_mgpu.parallel_function.ParallelFunction
    theano_mgpu.utils.timeline.Timings theano_mgpu.graph.audit.Audit theano_mgpu.graph.audit.OpPlacement
    theano_mgpu.checks.verification.VerificationReport theano_mgpu.checks.verification.Row
    theano_mgpu.auto.report.Report theano_mgpu.auto.report.Usage
    theano_mgpu.keras.api.balancing.Balance theano_mgpu.keras.api.balancing.Cost""".split()}

# Plain text files with the names from our docstrings, since the documentation is built without a network.
intersphinx_mapping = {'python': ('https://docs.python.org/3/', 'docs/inventories/python.txt'),
                       'numpy': ('https://numpy.org/doc/1.24/', 'docs/inventories/numpy.txt')}
default_role = 'py:obj'
nitpick_ignore_regex = [
    # Single backticks name parameters, attributes and private code, too.
    ('py:obj', r'.*'),
    # There is no maintained inventory of their documentation.
    ('py:class', r'(theano|keras)\..*|SharedVariable|Callback|Model'),
    # Words of a type, not names.
    ('py:class', r'array_like|callable|context manager|iterable|iterator|of list|lists|pairs|these'),
    ('py:class', r'scalar theano\.Variable'),
]


def commands():
    """Return the --help text of each command, in Markdown."""
    sub = argparse.ArgumentParser(prog='theano-mgpu').add_subparsers()
    for command in COMMANDS:
        add_command(sub, command)
    return '\n'.join('## %s\n\n```text\n%s```\n' % (name, parser.format_help()) for name, parser in sub.choices.items())


def flags():
    """Return the package's own flags, in Markdown."""
    found = []
    for name, (default, _, text) in OWN_FLAGS.items():
        found.append('## %s\n\n%s\n\nValues: %s. Default: %s.\n'
                     % (name, text, values_of(name), '`%s`' % default if default != '' else 'none'))
    return '\n'.join(found)


def tables():
    """Return the table of patches of each room that has one."""
    rooms = [path.parent.relative_to(ROOT).parts for path in sorted(ROOT.glob('theano_mgpu/**/patches.py'))]
    return {'.'.join(room[1:]): importlib.import_module('.'.join([*room, 'patches'])).PATCHES for room in rooms}


def patches():
    """Return the patches of each room for several devices, in Markdown."""
    return '\n\n'.join('## %s\n\n%s' % (name, rows_of(table)) for name, table in tables().items() if name != 'compat')


def rows_of(table):
    """Return a table of patches, in Markdown."""
    rows = ['| library | versions | without the patch | applied |', '|---|---|---|---|']
    for patch in table:
        cells = patch.library, patch.versions, patch.symptom, str(patch.when)
        rows.append('| %s |' % ' | '.join(re.sub(r'([|<>*_`\\])', r'\\\1', cell) for cell in cells))
    return '\n'.join(rows)


FILLED = {'<!-- commands -->': commands, '<!-- flags -->': flags, '<!-- patches -->': patches}


def fill(app, page, source):
    """Insert texts from the code into a page, so that no text is written twice."""
    for mark, text in FILLED.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, text())


def prepare(app, what, name, thing, options, lines):
    """Replace mgpu, as users write, by the full name for links; give each error a line, as Napoleon needs."""
    text = re.sub(r'(?<!`)`mgpu\.(\w+)`(?!`)', r'`mgpu.\1 <theano_mgpu.\1>`', '\n'.join(lines))
    lines[:] = re.sub(r'^(\w+Error(?:, \w+Error)+)\n((?:    .*\n)+)', one_by_one, text + '\n', flags=re.M).split('\n')


def one_by_one(found):
    """Return separate entries of a section Raises for errors with a common entry."""
    errors, text = found.groups()
    return ''.join('%s\n%s' % (error, text) for error in errors.split(', '))


def setup(app):
    app.connect('source-read', fill)
    app.connect('autodoc-process-docstring', prepare, priority=400)  # before napoleon
