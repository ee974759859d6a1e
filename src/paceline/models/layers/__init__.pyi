from .decoder import Decoder as Decoder
from .denoiser import rotation as rotation
