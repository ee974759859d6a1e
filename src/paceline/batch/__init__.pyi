from .inputs import BatchRequest as BatchRequest
from .inputs import DamagedLinesError as DamagedLinesError
from .inputs import Requests as Requests
from .results import ResultFile as ResultFile
from .run import Summary as Summary
from .run import answer_all as answer_all
from .sending import BatchAnswer as BatchAnswer
from .sending import Sender as Sender
