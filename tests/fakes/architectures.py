"""The shapes that people's models come in, tiny. All take tokens (batch, LENGTH) and return floats."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.models.decoder import DecoderModel
from fullshard.spec.settings.model_section import DecoderConfig
from tests.fakes.models import OddModel

VOCABULARY, LENGTH, WIDTH = 13, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """An encoder or decoder with its embedding, which it may share."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Chain(nn.Module):
    """An embedding and blocks after it."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class EncoderDecoder(nn.Module):
    """As T5: one embedding for both stacks, as one module, or as three of one weight, the head's too."""

    def __init__(self, *, same_module: bool) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        own = [self.shared if same_module else nn.Embedding(VOCABULARY, WIDTH) for _ in range(2)]
        self.encoder, self.decoder = Stack(own[0]), Stack(own[1])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if not same_module:
            for module in (*own, self.head):
                module.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.decoder(tokens) + self.encoder(tokens).mean(1, keepdim=True))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(LENGTH))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class VisionTransformer(nn.Module):
    """Parameters of the root, and in a list; a convolution before the blocks, a norm and a head behind."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.prompts = nn.ParameterList(nn.Parameter(torch.empty(1, 1, WIDTH)) for _ in range(2))
        self.patches = nn.Conv1d(1, WIDTH, kernel_size=2, stride=2)
        self.encoder = nn.Sequential(*(Block() for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            for parameter in (self.class_token, *self.prompts):
                nn.init.normal_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.patches(tokens.float().unsqueeze(1) / VOCABULARY).transpose(1, 2)
        first = [p.expand(len(x), -1, -1) for p in (self.class_token, *self.prompts)]
        return self.head(self.norm(self.encoder(torch.cat([*first, x], dim=1))))


class Repeating(nn.Module):
    """As ALBERT: one block, gone through three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block()] * 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Sharing(Chain):
    """Two blocks that hold the same module, or the same weight in different modules."""

    def __init__(self, *, module: bool, backwards: bool = False) -> None:
        super().__init__(Block(), Block(), Block())
        first, second = (2, 0) if backwards else (0, 2)
        if module:
            self.blocks[second].up = self.blocks[first].up
        else:
            self.blocks[second].up.weight = self.blocks[first].up.weight


class ListedExperts(nn.Module):
    """Each token goes to one expert; experts that no token goes to are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = best == i
            if chosen.any():
                y = y.masked_scatter(chosen.unsqueeze(-1), expert(x[chosen]) * scores[chosen][:, i : i + 1])
        return y


class FusedExperts(nn.Module):
    """All experts in one parameter (expert, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, WIDTH, WIDTH))

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,eio->bso", x, self.weight)


class MixtureBlock(nn.Module):
    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.moe = ListedExperts() if listed else nn.ModuleDict({"experts": FusedExperts()})
        self.listed = listed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + (self.moe(x) if self.listed else self.moe["experts"](x))


class Mixture(Chain):
    def __init__(self, *, listed: bool) -> None:
        super().__init__(*(MixtureBlock(listed=listed) for _ in range(2)))


class Pairs(nn.Module):
    """Layers as lists of their halves, which are called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), Block()])
            for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for mix, block in self.layers:
            x = block(x + torch.tanh(mix(x)))
        return self.out(x)


class Named(nn.Module):
    """Blocks in a dict, inside a list of stages; a plain module between them; one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList([nn.ModuleDict({"a": Block(), "b": Block()}), nn.ModuleList([Block()])])
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.stages[0].values(), *self.stages[1]):
            x = block(x)
        return x


class Encoder(nn.Module):
    """torch's own encoder, with attention that reads its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.embedding(tokens))


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(LENGTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens / VOCABULARY)


class CrossedBlock(Block):
    own: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.own.T).mean(-1, keepdim=True)


class Crossed(Chain):
    """Two blocks, each of which holds itself a weight that a module inside the other holds too."""

    def __init__(self) -> None:
        super().__init__(CrossedBlock(), CrossedBlock())
        one, two = self.blocks
        one.own, two.own = two.up.weight, one.up.weight


class RootReads(Chain):
    """The root multiplies with a weight of a block."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.weight = self.blocks[0].up.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) @ self.weight.T


class PartlyFrozen(nn.Module):
    """Groups of modules that end with one without a backward, though those before it have one.

    As Whisper: the positions are frozen. As a vision-language model whose tower alone is trained: projector
    and embedding are frozen, and gradients pass the projector. As many encoders: nothing uses the pooler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features, self.positions = nn.Linear(1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.projector, self.embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.resampler, self.pooler = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for module in (self.positions, self.projector, self.embedding, self.encoder[1]):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.features(tokens.float().unsqueeze(-1) / VOCABULARY)
        x = x + self.positions(torch.arange(LENGTH))
        for block in self.tower:
            x = block(x)
        x = self.projector(x)
        x = x + self.embedding(tokens)
        for block in self.encoder:
            x = block(x)
        x = self.resampler(x)
        self.pooler(x)
        for block in self.blocks:
            x = block(x)
        return x


class RecurrentBlock(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))[0]


class Recurrent(Chain):
    """Layers that keep their weights in a list besides."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, *, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__(*(RecurrentBlock(kind, width) for _ in range(layers)), width=width)


def _decoder(*, tied: bool = False, layers: int = 2) -> nn.Module:
    return DecoderModel(
        DecoderConfig(
            vocabulary=VOCABULARY,
            d_model=WIDTH,
            d_ff=10,
            heads=2,
            kv_heads=1,
            layers=layers,
            max_sequence=LENGTH,
            tied=tied,
        )
    )


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "decoder": _decoder,
    "tied_decoder": lambda: _decoder(tied=True),
    "one_layer": lambda: _decoder(layers=1),
    "odd": OddModel,
    "odd_tied": lambda: OddModel(tied=True),
    "odd_mixture": lambda: OddModel(mixture=True),
    "encoder": Encoder,
    "perceptron": Perceptron,
    "t5_weights": lambda: EncoderDecoder(same_module=False),
    "t5_module": lambda: EncoderDecoder(same_module=True),
    "gpt2": GPT2,
    "vit": VisionTransformer,
    "albert": Repeating,
    "shared_module": lambda: Sharing(module=True),
    "shared_module_backwards": lambda: Sharing(module=True, backwards=True),
    "shared_weight": lambda: Sharing(module=False),
    "shared_weight_backwards": lambda: Sharing(module=False, backwards=True),
    "listed_experts": lambda: Mixture(listed=True),
    "fused_experts": lambda: Mixture(listed=False),
    "pairs": Pairs,
    "named": Named,
    "crossed": Crossed,
    "root_reads": RootReads,
    "partly_frozen": PartlyFrozen,
    "recurrent": Recurrent,
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return ARCHITECTURES[name]()


def tokens_of(seed: int, *, sequences: int = 3) -> Tensor:
    """(sequences, LENGTH) int64."""
    return torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).float().square().mean()


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
