from .freedave import FreeDave as FreeDave
