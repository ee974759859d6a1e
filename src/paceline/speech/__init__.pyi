from .audio import load_audio as load_audio
from .features import LogMel as LogMel
