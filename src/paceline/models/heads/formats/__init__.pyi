from .base import HeadFormat as HeadFormat
from .base import Target as Target
from .known import WRITTEN as WRITTEN
from .known import foreign_config as foreign_config
from .known import format_of as format_of
from .known import writer as writer
