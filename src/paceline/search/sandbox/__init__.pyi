from .verdicts import Sandbox as Sandbox
