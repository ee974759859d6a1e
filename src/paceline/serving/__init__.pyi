from .app import create_app as create_app
from .limits import Limits as Limits
from .limits import read_keys as read_keys
from .metrics import Metrics as Metrics
from .protocol import ChatRequest as ChatRequest
from .protocol import CompletionRequest as CompletionRequest
from .server import Server as Server
