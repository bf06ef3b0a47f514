"""The kinds of nodes that a random graph may have."""
N, CLASSES = 14, 4
KINDS = []


def kind(weight=1):
    """Register a kind of node: a method of RandomGraph that adds an item, or returns False where none fits."""
    def register(function):
        KINDS.extend([function] * weight)
        return function
    return register
