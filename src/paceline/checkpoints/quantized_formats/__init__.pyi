from .bit_streams import fp4_numbers as fp4_numbers
from .bit_streams import unpacked_numbers as unpacked_numbers
from .formats import QUANTIZATION_KEYS as QUANTIZATION_KEYS
from .formats import find_format as find_format
from .integer_matrix import Grid as Grid
from .matrix_rows import quantized_rows as quantized_rows
from .quantized_checkpoint import QuantizedCheckpoint as QuantizedCheckpoint
from .quantized_checkpoint import open_checkpoint as open_checkpoint
