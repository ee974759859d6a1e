from .aded import AdedDrafter as AdedDrafter
