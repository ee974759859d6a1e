from .about import about as about
from .checks import Diagnosis as Diagnosis
from .facts import PassFacts as PassFacts
from .gather import Visit as Visit
from .gather import visit as visit
