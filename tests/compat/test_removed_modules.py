"""Modules that newer versions of Python, NumPy and setuptools do not have: Theano is imported without them."""
import os
import sys
import sysconfig

from theano_mgpu.compat import removed_modules

import numpy as np
import pytest
from support.patches import WITHOUT_PATCH
from support.processes import python
from support.search_path import search_path

# Python 3.12 without setuptools, on any Python: nobody finds the modules that it does not have.
WITHOUT = """
import importlib.util, sys, sysconfig, types

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        removed = 'imp', 'distutils', 'numpy.distutils', 'pkg_resources', 'setuptools'
        return None if name in removed else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

for name in [name for name in sys.modules if name.split('.')[0] in ('imp', 'distutils', 'setuptools')]:
    del sys.modules[name]
sys.meta_path[:] = map(Without, sys.meta_path)
sys.version_info = max(tuple(sys.version_info), (3, 12, 0, 'final', 0))
"""
USE = """
import theano_mgpu, theano.gpuarray
x = theano.tensor.dvector()
print(theano.function([x], (x ** 2).sum())([3.0, 4.0]), *theano.gof.cmodule.std_include_dirs())
print({'imp', 'distutils', 'distutils.spawn', 'pkg_resources'} & set(sys.modules))
"""


@pytest.mark.slow
def test_theano_compiles_without_the_removed_modules_and_leaves_no_replacement():
    done = python('-c', WITHOUT + USE)
    first, left = done.stdout.splitlines()
    assert first.split()[:3] == ['25.0', np.get_include(), sysconfig.get_paths()['include']] and left == 'set()'


@pytest.mark.slow_but_with('replace_distutils*')
@pytest.mark.parametrize('fix,symptom', [
    ('restore_numpy_distutils', "No module named 'numpy.distutils'"),
    ('replace_distutils', "No module named 'distutils'"),
    ('replace_imp', "No module named 'imp'"),
    ('replace_pkg_resources', "No module named 'pkg_resources'"),
])
def test_without_a_fix_its_symptom_is_back(fix, symptom):
    assert symptom in python('-c', WITHOUT + WITHOUT_PATCH % fix + USE, expected=1).stderr


def test_scikit_cuda_is_missing_as_without_the_replacement(tmp_path):
    """Theano catches the ImportError of a scikit-cuda that cannot be imported, and nothing else."""
    (tmp_path / 'skcuda').mkdir()
    (tmp_path / 'skcuda' / '__init__.py').write_text(
        'import pkg_resources\npkg_resources.declare_namespace(__name__)\n')
    code = WITHOUT + 'import theano_mgpu, theano.gpuarray; print("fine")'
    assert python('-c', code, PYTHONPATH=search_path(tmp_path)).stdout == 'fine\n'


@pytest.mark.slow
def test_scikit_cuda_finds_the_real_module(tmp_path):
    (tmp_path / 'skcuda').mkdir()
    (tmp_path / 'skcuda' / '__init__.py').write_text('')
    (tmp_path / 'pkg_resources.py').write_text('class DistributionNotFound(Exception):\n    pass\n')
    code = 'import sys, theano_mgpu, theano.gpuarray; print(sys.modules["pkg_resources"].__file__)'
    done = python('-c', code, PYTHONPATH=search_path(tmp_path))
    assert done.stdout.strip() == str(tmp_path / 'pkg_resources.py'), done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 12), reason='Python 3.12 and later have no distutils')
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_the_replacement_answers_as_distutils_did():
    from distutils import spawn
    from distutils import sysconfig as real
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split('.')[0] == 'distutils']:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, 'version_info', (3, 12, 0, 'final', 0))
        with removed_modules.replace_distutils():
            import distutils.spawn
            import distutils.sysconfig
            replacement = distutils.sysconfig
            assert replacement is not real
            assert distutils.spawn.find_executable('sh') == spawn.find_executable('sh')
    for arguments in ((), (True,)):
        assert os.path.samefile(replacement.get_python_inc(*arguments), real.get_python_inc(*arguments))
    assert os.path.samefile(replacement.get_python_lib(plat_specific=1, standard_lib=1),
                            real.get_python_lib(plat_specific=1, standard_lib=1))
    assert replacement.get_python_version() == real.get_python_version()
    assert replacement.get_config_var('EXT_SUFFIX') == real.get_config_var('EXT_SUFFIX')
    assert replacement.get_config_h_filename() == real.get_config_h_filename()
