"""Models of each Keras of Theano's time: over two contexts as on one device."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
KERASES = HERE.parents[1] / 'build' / 'kerases'  # `.ci/setup` installs them there
VERSIONS = '0.3.3', '1.2.2', '2.0.9', '2.1.6', '2.2.4'
KINDS = 'of_sequences', 'of_masked_sequences', 'of_two_branches', 'of_weighted_classes', 'with_a_state'
TOLERANCE = 1e-10  # of float64; the six optimizer steps of a model amplify its rounding


def run(version, *words, flags='cxx=,optimizer=fast_compile', launcher=()):
    """Return what the zoo prints with a Keras of one version."""
    folder = KERASES / version
    if not folder.exists():
        pytest.skip('Keras %s is not installed in %s: make setup' % (version, KERASES))
    environment = dict(os.environ, KERAS_BACKEND='theano', THEANO_FLAGS='floatX=float64,' + flags,
                       PYTHONPATH=os.pathsep.join([str(folder), os.environ.get('PYTHONPATH', '')]))
    done = subprocess.run([sys.executable, *launcher, str(HERE / 'zoo.py'), *words], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


def check(version, kinds, **options):
    found = json.loads(run(version, *kinds, **options).splitlines()[-1])
    assert found['version'] == version
    assert max(found['differences'].values()) < TOLERANCE, found
    assert found['divided'] >= 3 * len(kinds), found  # train, test, predict
