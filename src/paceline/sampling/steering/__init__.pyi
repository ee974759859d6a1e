from .base import Steering as Steering
from .base import parse_steering as parse_steering
from .contrastive import ContrastiveDecoding as ContrastiveDecoding
from .dola import DoLa as DoLa
from .dola import divergence as divergence
from .guidance import ClassifierFreeGuidance as ClassifierFreeGuidance
from .lol import LowerLayerMatters as LowerLayerMatters
from .svdecode import SVDecode as SVDecode
