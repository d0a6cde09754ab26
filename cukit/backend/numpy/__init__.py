"""The CPU backend and the truth of every kernel test: one file an op family, plain NumPy, the dtype it is given
(float64 included). Its names are those of backend.CONTRACT.
"""

from .. import shelf_names

_names = shelf_names(__name__)
globals().update(_names)
__all__ = sorted(_names)
