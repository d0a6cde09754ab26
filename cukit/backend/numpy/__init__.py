"""The CPU backend, which is also the truth of every kernel test. One file an op family, in plain NumPy and in the dtype
that it is given (float64 included). Its names are those of backend.CONTRACT.
"""

from .. import shelf_names

_names = shelf_names(__name__)
globals().update(_names)
__all__ = sorted(_names)
