from .verdicts import Sandbox as Sandbox
from .verdicts import Verdict as Verdict
from .verdicts import available_isolation as available_isolation
from .verdicts import run_tests as run_tests
