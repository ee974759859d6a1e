from .runner import quiet as quiet
