"""The examples for clusters: Slurm's batch script, and the job of Kubernetes' MPI operator."""
import re
import subprocess
from pathlib import Path

from theano_mgpu.cli import make_parser

import jsonschema
import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'


def test_the_batch_script():
    """The script is checked here; tests/slurm runs it."""
    path = EXAMPLES / 'cluster.sbatch'
    assert subprocess.run(['bash', '-n', str(path)]).returncode == 0
    words = re.search(r'^exec theano-mgpu (.*)$', path.read_text(), re.MULTILINE).group(1).split()
    assert make_parser().parse_args(words[:-1] + [__file__]).restarts == 3


def strict(properties, *required):
    return {'type': 'object', 'properties': properties, 'required': list(required), 'additionalProperties': False}


def pods(**more):
    """Return the schema of a replica: of a pod's specification as far as the example goes."""
    strings = {'type': 'array', 'items': {'type': 'string'}}
    resources = {'type': 'object', 'additionalProperties': {'anyOf': [{'type': 'string'}, {'type': 'integer'}]}}
    container = strict({
        'name': {'type': 'string', 'pattern': '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'}, 'image': {'type': 'string'},
        'command': strings, 'args': strings, 'workingDir': {'type': 'string'},
        'env': {'type': 'array', 'items': strict({'name': {'type': 'string'}, 'value': {'type': 'string'}}, 'name')},
        'resources': strict({'limits': resources, 'requests': resources}),
        'volumeMounts': {'type': 'array', 'items': strict({'name': {'type': 'string'}, 'mountPath': {'type': 'string'}},
                                                          'name', 'mountPath')}}, 'name', 'image')
    claim = strict({'claimName': {'type': 'string'}}, 'claimName')
    volume = strict({'name': {'type': 'string'}, 'persistentVolumeClaim': claim}, 'name')
    spec = strict({'containers': {'type': 'array', 'items': container, 'minItems': 1},
                   'volumes': {'type': 'array', 'items': volume}}, 'containers')
    return strict({'replicas': dict({'type': 'integer', 'minimum': 1}, **more),
                   'restartPolicy': {'enum': ['Never', 'OnFailure']}, 'template': strict({'spec': spec}, 'spec')},
                  'template')


# The CustomResourceDefinition of kubeflow.org/v2beta1, as far as the example goes. An API server drops an unknown
# field without an error: here it is an error.
MPI_JOB = strict({
    'apiVersion': {'const': 'kubeflow.org/v2beta1'}, 'kind': {'const': 'MPIJob'},
    'metadata': strict({'name': {'type': 'string', 'pattern': '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'}}, 'name'),
    'spec': strict({
        'slotsPerWorker': {'type': 'integer', 'minimum': 1},
        'mpiImplementation': {'enum': ['OpenMPI', 'Intel', 'MPICH']},
        'launcherCreationPolicy': {'enum': ['AtStartup', 'WaitForWorkersReady']},
        'sshAuthMountPath': {'type': 'string'}, 'runLauncherAsWorker': {'type': 'boolean'},
        'runPolicy': strict({
            'cleanPodPolicy': {'enum': ['None', 'Running', 'All']}, 'backoffLimit': {'type': 'integer', 'minimum': 0},
            'activeDeadlineSeconds': {'type': 'integer', 'minimum': 1},
            'ttlSecondsAfterFinished': {'type': 'integer', 'minimum': 0}, 'suspend': {'type': 'boolean'}}),
        'mpiReplicaSpecs': strict({'Launcher': pods(maximum=1), 'Worker': pods()}, 'Launcher')},
        'mpiReplicaSpecs')}, 'apiVersion', 'kind', 'metadata', 'spec')


def test_the_mpijob():
    job = yaml.safe_load((EXAMPLES / 'mpijob.yaml').read_text())
    jsonschema.Draft7Validator.check_schema(MPI_JOB)
    jsonschema.validate(job, MPI_JOB)
    launcher = job['spec']['mpiReplicaSpecs']['Launcher']['template']['spec']
    program, *words = launcher['containers'][0]['command'] + launcher['containers'][0]['args']
    arguments = make_parser().parse_args(words)
    assert program.endswith('theano-mgpu') and arguments.ranks is None and arguments.hosts is None
    for each in job['spec']['mpiReplicaSpecs'].values():  # each mount exists
        spec = each['template']['spec']
        volumes = {volume['name'] for volume in spec['volumes']}
        assert {mount['name'] for mount in spec['containers'][0]['volumeMounts']} == volumes
    with pytest.raises(jsonschema.ValidationError, match='slotsPerWorkers'):
        jsonschema.validate(dict(job, spec=dict(job['spec'], slotsPerWorkers=2)), MPI_JOB)
