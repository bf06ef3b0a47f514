"""A run of another script with seeded random numbers of NumPy and Python: python seeded.py SCRIPT ARGUMENTS."""
import os
import random
import runpy
import sys

import numpy as np

sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
np.random.seed(1)
random.seed(1)
runpy.run_path(sys.argv[0], run_name='__main__')
