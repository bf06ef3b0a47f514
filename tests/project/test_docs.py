"""The documentation is built without a warning, its links lead somewhere, and its pictures are up to date."""
import html
import os
import re
import runpy
from pathlib import Path

from theano_mgpu.utils.flag_text import OWN_FLAGS

from support.patches import PAGE, tables, with_table
from support.processes import python

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_and_complete(tmp_path):
    """The test builds the site like `make docs`; a broken reference, or a page in no menu, is a warning."""
    options, = re.findall(r'^docs: .*\n\t@.*-m sphinx (.*)$', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    options = options.replace('build/', '%s/' % tmp_path).replace('$(ARGS)', '').split()
    python('-m', 'sphinx', *options, folder=ROOT, flags='')
    pages = {path: path.read_text(encoding='utf-8') for path in (tmp_path / 'docs').rglob('*.html')}
    check_links(pages)
    check_reference({path.name: html.unescape(re.sub('<[^>]*>', '', text)) for path, text in pages.items()
                     if path.parent.name == 'reference'})


def check_links(pages):
    places = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    n_links = 0
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src|url)="?([^"\s>]+)"', text):
            name, _, place = html.unescape(link).partition('#')
            if re.match(r'\w+:', name):
                continue
            target = Path(os.path.normpath(str(path.parent / name.partition('?')[0]))) if name else path
            assert target.exists(), '%s: %s' % (path, link)
            assert not place or target not in places or place in places[target], '%s: %s' % (path, link)
            n_links += 1
    assert n_links > 1000


def check_reference(texts):
    """Check that the texts from the code are on the pages."""
    assert all(flag in texts['flags.html'] for flag in OWN_FLAGS)
    for room, table in tables().items():
        assert room == 'compat' or all(patch.symptom in texts['patches.html'] for patch in table)
    assert '--restarts R' in texts['commands.html']
    for error in ('GraphError', 'ContextError'):  # the docstring of training_function describes them together
        assert re.search(error + r'\s+.{1,9}If the step cannot', texts['theano_mgpu.html'])


def test_the_table_of_repairs_is_up_to_date():
    """The command `cd tests; PYTHONPATH=.. ../.venv/bin/python -m support.patches` writes the table anew."""
    page = PAGE.read_text(encoding='utf-8')
    assert with_table(page) == page and page.count('\n| ') > len(tables()['compat']) - 2  # not the own flags


def test_pictures_are_up_to_date():
    drawn = runpy.run_path(str(ROOT / 'docs' / 'pictures' / 'draw.py'))['PICTURES']
    for name, draw in drawn.items():
        assert draw().svg() == (ROOT / 'docs' / 'pictures' / name).read_text(encoding='utf-8'), \
            '%s: run python docs/pictures/draw.py' % name
