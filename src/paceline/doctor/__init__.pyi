from .facts import PassFacts as PassFacts
from .gather import Visit as Visit
from .gather import visit as visit
