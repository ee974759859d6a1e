from .base import Steering as Steering
from .base import parse_steering as parse_steering
from .svdecode import MAX_MU as MAX_MU
from .svdecode import steering_vector as steering_vector
