"""Settings and strategies for property tests with hypothesis."""
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

# Sources of choices for a builder of random cases. After a failure hypothesis lowers the choices one by one: the lowest
# choices should give the smallest case.
RANDOMS = st.randoms(use_true_random=False)


def examples(n):
    """Return settings for n examples, the same ones in each run: a failure then comes from a change."""
    return settings(max_examples=n, derandomize=True, database=None, deadline=None,
                    phases=[Phase.explicit, Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
