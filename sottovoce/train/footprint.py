"""What a talker training takes on its device, in bytes, by arithmetic from the model's shapes: no weights, no device.

Weights, gradients and optimizer state are exact. Marked as estimates are the tensors that autograd keeps of a layer and
what is alive beside them while gradients are computed; `benchmarks/train_talker.py` holds them against a card. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sottovoce.config import ModelConfig, PredictorConfig, TalkerConfig
from sottovoce.formats import part_of, stored_bytes
from sottovoce.manifest import model_tensors
from sottovoce.memory.footprint import CUBLAS_BYTES

OPTIMIZER_TEMPS = 10 * 4 << 22  # estimate: float32 pieces of `optim.CHUNK` numbers alive at once
QUANT_TEMPS = 12 << 22  # estimate: a block of `kernels.quantized.BLOCK_NUMBERS` while it is widened
LOGIT_BYTES = 12  # estimate, of each logit: in the weights' dtype, float32, their logarithms and slopes
TABLE = "talker.model.text_embedding.weight"


@dataclass(frozen=True)
class TrainingWork:
    """What is trained, and on what.

    Args:
        method: "full", "lora" or "qlora".
        rows, positions, frames: clips of a batch, positions of each (prompt and frames, padded), frames of each.
        state_bits, has_masters, is_fused: of the optimizer.
        rank: of the adapters.
        chunk_frames: see `talker.TalkerTask`.
        text_on_device: the text embedding lies beside the rest.
        item_bytes: of a weight and an activation.
    """

    method: str
    rows: int
    positions: int
    frames: int
    state_bits: int = 8
    has_masters: bool = False
    is_fused: bool = False
    rank: int = 16
    chunk_frames: int = 128
    text_on_device: bool = False
    item_bytes: int = 2


def training_bytes(config: ModelConfig, work: TrainingWork) -> dict[str, int]:
    """Bytes of each part at the peak, in which they add up: "weights", "gradients", "optimizer", "activations",
    "workspace"."""
    weights, trained = weight_bytes(config, work), trained_numbers(config, work)
    grad_item = 4 if work.method != "full" else work.item_bytes
    optimizer = trained * (8 if work.state_bits == 32 else 2) + (trained // 32 if work.state_bits == 8 else 0)
    if work.has_masters and work.method == "full" and work.item_bytes < 4:
        optimizer += 4 * trained
    all_gradients = trained * grad_item
    predictor = _predictor_numbers(config) * grad_item if work.method == "full" else 0
    tokens = work.rows * work.positions
    layer = tokens * layer_bytes(config.talker, _kind(work), work.item_bytes, is_busy=True)
    checkpoints = config.talker.num_hidden_layers * tokens * config.talker.hidden_size * work.item_bytes
    ends = _end_bytes(config, work)
    temps = QUANT_TEMPS if work.method == "qlora" else 0
    # The moments at which most is alive: (gradients, activations).
    moments = [
        (predictor, checkpoints + ends + chunk_bytes(config, work)),
        (predictor, checkpoints + tokens * config.talker.hidden_size * work.item_bytes + layer + temps),
    ]
    if work.is_fused:  # weights move while their layer's tensors are there
        moments[1] = (predictor, moments[1][1] + OPTIMIZER_TEMPS)
    else:
        moments += [(all_gradients, layer + temps), (all_gradients, OPTIMIZER_TEMPS)]
    gradients, activations = max(moments, key=sum)
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": activations}
    return {**parts, "workspace": CUBLAS_BYTES[True]}


def weight_bytes(config: ModelConfig, work: TrainingWork) -> int:
    """Of talker and predictor as they are loaded, and of the adapters."""
    total = 0
    for name, shape in model_tensors(config).items():
        if name.startswith("speaker_encoder.") or (name == TABLE and not work.text_on_device):
            continue
        if work.method == "qlora" and part_of(name) == "talker":
            total += stored_bytes("int4", shape)
        else:
            total += prod(shape) * work.item_bytes
    return total + (4 * trained_numbers(config, work) if work.method != "full" else 0)


def trained_numbers(config: ModelConfig, work: TrainingWork) -> int:
    """Numbers that get a gradient; the text embedding never counts."""
    shapes = {name: shape for name, shape in model_tensors(config).items() if not name.startswith("speaker_encoder.")}
    if work.method == "full":
        return sum(prod(shape) for name, shape in shapes.items() if name != TABLE)
    return sum(work.rank * sum(shape) for name, shape in shapes.items() if part_of(name) == "talker")


def layer_bytes(config: TalkerConfig | PredictorConfig, kind: str, item_bytes: int, *, is_busy: bool) -> int:
    """Estimate: what autograd keeps of one layer, a token; `is_busy` adds what is alive within its backward pass.

    `kind`: "full" is trained; "adapted" keeps inputs for adapters; "frozen" only passes gradients on.
    """
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    kept = width + (queries + 2 * keys) + (queries + keys) + queries + 3 * inner + width
    if kind != "frozen":  # inputs of the products
        kept += 2 * width + inner
    if kind == "full":  # normalized values, for the weights of norms
        kept += 2 * width + queries + keys
    busy = (3 if kind == "frozen" else 2) * inner + width  # slopes within the MLP; others replace what they come of
    return item_bytes * (kept + (busy if is_busy else 0))


def chunk_bytes(config: ModelConfig, work: TrainingWork) -> int:
    """Estimate: a piece of the predictor's work while gradients are computed."""
    predictor, frames = config.predictor, min(work.chunk_frames, work.rows * work.frames)
    kind = "full" if work.method == "full" else "frozen"
    layers = predictor.num_hidden_layers * layer_bytes(predictor, kind, work.item_bytes, is_busy=False)
    busy = layer_bytes(predictor, kind, work.item_bytes, is_busy=True) - layer_bytes(
        predictor, kind, work.item_bytes, is_busy=False
    )
    codebooks = predictor.num_code_groups
    logits = (codebooks - 1) * predictor.vocab_size * LOGIT_BYTES
    inputs = codebooks * 2 * (config.talker.hidden_size + predictor.hidden_size) * work.item_bytes
    if kind == "frozen":  # inputs are kept for the gradient of what they are multiplied with
        inputs = 0
    return frames * (codebooks * layers + max(codebooks * busy, logits) + inputs)


def _end_bytes(config: ModelConfig, work: TrainingWork) -> int:
    """Estimate: states before and after the final norm, their slope, and a piece's share of it."""
    return 4 * work.rows * work.positions * config.talker.hidden_size * work.item_bytes


def _kind(work: TrainingWork) -> str:
    return "full" if work.method == "full" else "adapted"


def _predictor_numbers(config: ModelConfig) -> int:
    return sum(prod(s) for name, s in model_tensors(config).items() if name.startswith("talker.code_predictor."))
