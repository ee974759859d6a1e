from .app import check_files as check_files
from .app import create_app as create_app
from .fields import field_table as field_table
from .front import front_app as front_app
from .keys import read_keys as read_keys
from .request_log import JsonLines as JsonLines
from .server import Server as Server
from .warming import warm_up as warm_up
