from .decoder import Decoder as Decoder
from .rope import wide_rotation as wide_rotation
