"""DeepMedic: two pathways with residuals, dropout and batch normalisation, on generated volumes, by its deepMedicRun.

Run in the checkout, with it and nibabel on PYTHONPATH.
"""
import glob
import os
import random
import runpy
import sys
import tempfile
import types

import nibabel
import numpy as np
from show import show, show_sums

jobs = types.ModuleType('pp')  # Parallel Python, which draws segments beside the training; not installed
jobs.Server = type('Server', (), {'__init__': lambda *_, **__: None, 'destroy': lambda _: None,
                                  'submit': lambda _, function, arguments, *__: lambda: function(*arguments)})
sys.modules['pp'] = jobs

MODEL = """
modelName, folderForOutput = 'small', 'out'
numberOfOutputClasses, numberOfInputChannels = 3, 2
numberFMsPerLayerNormal = numberFMsPerLayerSubsampled = [4, 4, 5, 5]
kernelDimPerLayerNormal = kernelDimPerLayerSubsampled = [[3, 3, 3]] * 4
layersWithResidualConnNormal, layersWithResidualConnSubsampled = [4], [4]
useSubsampledPathway, subsampleFactor = True, [3, 3, 3]
numberFMsPerLayerFC, kernelDimFor1stFcLayer, layersWithResidualConnFC = [8, 8], [3, 3, 3], [2]
segmentsDimTrain, segmentsDimVal, segmentsDimInference = [15, 15, 15], [13, 13, 13], [17, 17, 17]
batchSizeTrain, batchSizeVal, batchSizeInfer = 5, 4, 3
dropoutRatesFc = [0.0, 0.5, 0.5]
rollAverageForBNOverThatManyBatches = 10
"""
SESSION = """
sessionName, folderForOutput = 'small', 'out'
channelsTraining = channelsValidation = channels = ['channel0', 'channel1']
gtLabelsTraining = gtLabelsValidation = gtLabels = 'labels'
roiMasksTraining = roiMasksValidation = roiMasks = 'mask'
namesForPredictionsPerCaseVal = namesForPredictionsPerCase = 'names'
numberOfEpochs, numberOfSubepochs = 2, 2
numberTrainingSegmentsLoadedOnGpuPerSubep, numberValidationSegmentsLoadedOnGpuPerSubep = 20, 12
reflectImagesPerAxis, performIntAugm = [True, False, False], True
sgd0orAdam1orRms2 = 2
performValidationOnSamplesThroughoutTraining = performFullInferenceOnValidationImagesEveryFewEpochs = True
numberOfEpochsBetweenFullInferenceOnValImages = 2
"""


def write(folder):
    """Write the configurations, two cases, and the lists of their files."""
    r = np.random.RandomState(0)
    names = ['channel0', 'channel1', 'labels', 'mask']
    for case in range(2):
        image = r.randn(2, 24, 24, 24).astype('f')
        labels = (image.sum(axis=0) > .5).astype('i2') + (image[0] > 1)
        for name, volume in zip(names, [*image, labels, np.ones((24, 24, 24), 'i2')]):
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), os.path.join(folder, '%s%d.nii.gz' % (name, case)))
    for name, text in [('model', MODEL), ('session', SESSION), ('names', 'case0\ncase1\n'),
                       *((name, '%s0.nii.gz\n%s1.nii.gz\n' % (name, name)) for name in names)]:
        with open(os.path.join(folder, name), 'w') as stream:
            stream.write(text)


def run(*arguments):
    """Run deepMedicRun with these arguments, and return its names."""
    sys.argv = ['deepMedicRun', *arguments]
    return runpy.run_path('deepMedicRun', run_name='__main__')


random.seed(1)
np.random.seed(1)
with tempfile.TemporaryDirectory() as folder:
    write(folder)
    from deepmedic.loggingAndMonitoring.accuracyMonitor import AccuracyOfEpochMonitorSegmentation as Monitor
    update = Monitor.updateMonitorAccuraciesWithNewSubepochEntries

    def updated(self, cost, counts):
        """Print the cost of a part of an epoch, and the numbers of voxels, before the monitor has them."""
        show('counts', [*([] if isinstance(cost, str) else [cost]), *counts.ravel()])
        update(self, cost, counts)

    Monitor.updateMonitorAccuraciesWithNewSubepochEntries = updated
    model, session = (os.path.join(folder, name) for name in ('model', 'session'))
    network = run('-newModel', model, '-train', session)['cnnInstanceLoaded']
    show_sums('weights', [each.get_value() for each in network._getTrainableParameters(None)])
    saved, = glob.glob(os.path.join(folder, 'out', 'cnnModels', 'small', '*final*.save'))
    run('-test', session, '-model', saved)
    for path in sorted(glob.glob(os.path.join(folder, 'out', 'predictions', '*', 'predictions', '*.nii.gz'))):
        show_sums(path[len(folder):], [nibabel.load(path).get_fdata()])
