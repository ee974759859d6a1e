from .formats import find_format as find_format
from .quantized_checkpoint import open_checkpoint as open_checkpoint
