from .remdm import Remasking as Remasking
