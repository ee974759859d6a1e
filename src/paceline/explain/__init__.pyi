from .page import EXPLAIN_MARK as EXPLAIN_MARK
from .page import PAGES as PAGES
from .page import Replay as Replay
from .page import embedded as embedded
from .page import rendered as rendered
from .page import warm_up as warm_up
from .recorder import Recorder as Recorder
from .recorder import plain_step as plain_step
