"""deepcpg: dcpg_data.py and dcpg_train.py on the CpG profiles of its integration test.

Run in the checkout, with it and its folder scripts on PYTHONPATH.
"""
import glob
import os
import random
import tempfile

import dcpg_data
import dcpg_train
import numpy as np

PROFILES = 'tests/integration_tests/data/cpg_profiles/'

with tempfile.TemporaryDirectory() as folder:
    dcpg_data.App().run(['dcpg_data', '--out_dir', folder, '--chromos', '18', '19', '--nb_sample_chromo', '300',
                         '--cpg_profiles', PROFILES + 'BS27_4_SER.bed.gz', PROFILES + 'BS28_2_SER.bed.gz',
                         '--cpg_wlen', '10'])
    np.random.seed(1)
    random.seed(1)
    dcpg_train.App().run(
        ['dcpg_train', *sorted(glob.glob(os.path.join(folder, 'c18_*.h5'))), '--val_files',
         *sorted(glob.glob(os.path.join(folder, 'c19_*.h5'))), '--out_dir', os.path.join(folder, 'train'),
         '--nb_epoch', '2', '--cpg_model', 'FcAvg', '--joint_model', 'JointL0', '--batch_size', '64', '--seed', '3'])
