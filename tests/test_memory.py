"""Memory of devices: what frees it, and what an error suggests where there is too little; on the CUDA stand-in."""
import pytest

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
