from .checks import Diagnosis as Diagnosis
from .facts import PassFacts as PassFacts
from .gather import Visit as Visit
from .gather import visit as visit
from .setup_report import about as about
from .setup_report import form_of as form_of
