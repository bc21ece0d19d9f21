"""Readers: they read more than tokens from predicted rows, or decide the tokens.

A reader is one file with its check, its device part and its result; `Reader` is the interface. A request brings readers
(`Request.readers`), and `remask.readers.implied` adds those that follow from its sampling parameters, its template and
its cache policy.
"""

from remask.readers.base import Reader, ReadPass, RequestView, Start
from remask.sampling.decoder import Predictions
from remask.sampling.rows import DeviceRead, RowGroup

__all__ = ["DeviceRead", "Predictions", "ReadPass", "Reader", "RequestView", "RowGroup", "Start"]
