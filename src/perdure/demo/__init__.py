"""The demo and the benchmarks: users of the SDK that start a server in a temporary home and leave nothing behind.

``story`` is ``perdure demo``; ``wake`` is ``perdure bench wake``, which also measures its bare ``floor`` with the machine modules
themselves. ``programs`` run inside the workspace and import nothing of Perdure.
"""
