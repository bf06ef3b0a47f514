"""The tables of patches, also in Markdown, and code for fresh interpreters in which one of them is missing."""
import importlib
import re
from pathlib import Path

import theano_mgpu

FOLDER = Path(theano_mgpu.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'guide' / 'one_device.md'


def tables():
    """Return the name of each room that patches a library, and its table."""
    names = ['.'.join(path.relative_to(FOLDER).parent.parts) for path in sorted(FOLDER.rglob('patches.py'))]
    return {name: importlib.import_module('theano_mgpu.%s.patches' % name).PATCHES for name in names}


def table_of_guide():
    """Return the repairs for one device, by library and versions, as a table in Markdown."""
    patches = [patch for patch in tables()['compat'] if 'own_flags' not in patch.apply.__name__]  # ours, and no repair
    libraries = ['Python', 'NumPy', *(patch.library for patch in patches if patch.library != 'Theano'), 'Theano']
    rows = sorted(patches, key=lambda patch: (libraries.index(patch.library), patch.versions))
    return '\n'.join(['| library | versions | without `theano_mgpu` |', '|---|---|---|'] + [
        '| %s |' % ' | '.join(re.sub(r'([|<>*`\\]|\b_|_\b)', r'\\\1', cell) for cell in
                              (patch.library, about(patch), patch.symptom)) for patch in rows])


def about(patch):
    """Return the versions of a patch, in words."""
    return '2 and later' if patch.versions == '2' else patch.versions


def with_table(page):
    """Return the text of the page with the table of today."""
    return re.sub('(?s)(<!-- patches: .*? -->\n).*?(<!-- end -->)',
                  lambda found: '%s%s\n%s' % (found[1], table_of_guide(), found[2]), page)


# Leaves out a patch, given by its function's name, before the package is imported.
WITHOUT_PATCH = """
import importlib.util, sys, types
bare = types.ModuleType('theano_mgpu')
bare.__path__ = importlib.util.find_spec('theano_mgpu').submodule_search_locations
sys.modules['theano_mgpu'] = bare
from theano_mgpu.compat.patch import Patch
is_needed = Patch.is_needed
Patch.is_needed = lambda patch: patch.apply.__name__ != %r and is_needed(patch)
del sys.modules['theano_mgpu']
"""


if __name__ == '__main__':
    PAGE.write_text(with_table(PAGE.read_text(encoding='utf-8')), encoding='utf-8')
