"""A trainer of Medusa heads, with a setting of how much the later ones count."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.models.heads import HeadConfig
from paceline.training import PathTrainer, TrainConfig


@documented
@dataclass(frozen=True, kw_only=True)
class MyConfig(TrainConfig):
    """Settings of a training, and one of these heads."""

    decay: float = option(0.8, "Weight of a head's loss over that of the one before.", low=0.0, high=1.0)


class MyTrainer(PathTrainer):
    """Trains Medusa heads, of which --decay says how much the later ones count."""

    name = "my_medusa"
    config_class = MyConfig

    def __init__(self, config, rows, depths=4):
        super().__init__(config, rows, depths)
        size = config.hidden_size
        heads = [nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(size, size)])}) for _ in range(config.num_heads)]
        self.heads = nn.ModuleList(heads)  # its parameters are the tensors of the file: heads.0.blocks.0.weight, ...

    @classmethod
    def init(cls, llm, config, vocabulary):
        head, view = super().init(llm, config, vocabulary)
        head.decay = config.decay
        return head, view

    @classmethod
    def config_of(cls, target, layer, draft_vocab_size, depths):
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        return HeadConfig(method="medusa", draft_vocab_size=draft_vocab_size, num_heads=depths, **sizes)

    def head_states(self, batch):
        states = batch.final.flatten(0, 1)
        for depth, head in enumerate(self.heads):
            at, columns = batch.learned(depth + 2)  # the first head says the token after next
            yield at, columns, states[at] + F.silu(head["blocks"][0](states[at]))
