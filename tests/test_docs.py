"""The documentation is built without a warning, its links lead somewhere, and its pictures are up to date."""
import html
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The folder of the built pages, as `make docs` makes them."""
    folder = tmp_path_factory.mktemp('docs')
    target, = re.findall(r'^docs: .*\n\t@.*-m sphinx (.*)$', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    options = target.replace('build/', '%s/' % folder).replace('$(ARGS)', '').split()
    done = subprocess.run([sys.executable, '-m', 'sphinx'] + options, cwd=str(ROOT), text=True, capture_output=True,
                          env=dict(os.environ, THEANO_FLAGS=''))
    assert done.returncode == 0, done.stderr
    return folder / 'docs'


def test_links_of_the_pages_lead_somewhere(site):
    pages = {path: path.read_text(encoding='utf-8') for path in site.rglob('*.html')}
    assert len(pages) > 25
    places = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src|url)="?([^"\s>]+)"', text):
            name, _, place = html.unescape(link).partition('#')
            if re.match(r'\w+:', name):
                continue
            target = Path(os.path.normpath(str(path.parent / name.partition('?')[0]))) if name else path
            assert target.exists(), '%s: %s' % (path, link)
            assert not place or target not in places or place in places[target], '%s: %s' % (path, link)


def test_each_page_is_reached_from_the_first_one(site):
    first = (site / 'docs' / 'index.html').read_text(encoding='utf-8')
    menu = {os.path.normpath(link) for link in re.findall(r'class="reference internal" href="([^"#]+)"', first)}
    for path in sorted((site / 'docs').rglob('*.html')):
        name = str(path.relative_to(site / 'docs'))
        assert name in menu or name == 'index.html', name


def test_pages_have_what_is_taken_from_the_code(site):
    from theano_mgpu.config import OWN_FLAGS
    from theano_mgpu.patches import PATCHES
    text = {name: html.unescape(re.sub('<[^>]*>', '', (site / 'docs' / 'reference' / name).read_text(encoding='utf-8')))
            for name in ('flags.html', 'patches.html', 'commands.html', 'theano_mgpu.html')}
    assert all(flag in text['flags.html'] for flag in OWN_FLAGS)
    assert all(patch.library in text['patches.html'] for patch in PATCHES)
    assert text['patches.html'].count('1.0.5') >= sum('1.0.5' in patch.versions for patch in PATCHES)
    assert '--restarts R' in text['commands.html'] and 'micro_batches' in text['theano_mgpu.html']
    # One that is documented together with another one.
    assert re.search(r'GraphError\s+.{1,9}If the step cannot', text['theano_mgpu.html'])
    assert re.search(r'ContextError\s+.{1,9}If the step cannot', text['theano_mgpu.html'])


def test_pictures_are_up_to_date():
    drawn = runpy.run_path(str(ROOT / 'docs' / 'pictures' / 'draw.py'))['PICTURES']
    for name, draw in drawn.items():
        assert draw().svg() == (ROOT / 'docs' / 'pictures' / name).read_text(encoding='utf-8'), \
            '%s: run python docs/pictures/draw.py' % name
