from .cache import NativeCache as NativeCache
from .recurrence import Recurrence as Recurrence
from .recurrence import read_of as read_of
