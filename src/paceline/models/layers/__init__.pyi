from .decoder import Decoder as Decoder
from .decoder import placement_of as placement_of
from .experts import ACTIVATIONS as ACTIVATIONS
from .linear import make_linear as make_linear
from .positions import relative_biases as relative_biases
from .rope import Rotary as Rotary
from .rope import Rotation as Rotation
from .rope import wide_rotation as wide_rotation
