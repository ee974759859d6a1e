from .eoser import Eoser as Eoser
from .measures import Random as Random
