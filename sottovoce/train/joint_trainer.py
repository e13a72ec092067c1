"""`train_joint`: as `trainer.train_talker`, with the codec's decoder trained along."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from sottovoce.model.weights import load_codec
from sottovoce.train.codec import CodecRecipe
from sottovoce.train.corpus import PromptOptions
from sottovoce.train.export import CODEC_FOLDER, export_codec, export_model
from sottovoce.train.joint import JointOptions, JointStream, JointTask
from sottovoce.train.loop import Loop, LoopOptions, Outcome
from sottovoce.train.optim import AdamOptions, AdamW
from sottovoce.train.progress import Sink
from sottovoce.train.ranks import Ranks
from sottovoce.train.recipe import TalkerRecipe
from sottovoce.train.trainer import VALIDATION_SHARE, open_talker, plain, take_best, talker_card


def train_joint(
    base: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    joint: JointOptions | None = None,
    recipe: TalkerRecipe | None = None,
    codec: CodecRecipe | None = None,
    prompts: PromptOptions | None = None,
    loop: LoopOptions | None = None,
    adam: AdamOptions | None = None,
    max_tokens: int = 4096,
    validation_share: float = VALIDATION_SHARE,
    device: str | torch.device = "cpu",
    sink: Sink | None = None,
    is_quiet: bool = False,
    base_name: str | None = None,
) -> Outcome:
    """Trains talker and decoder of a checkpoint as `joint` says, on a set whose recordings still lie where they were.

    Arguments, `out` and errors as in `train_talker`; `out`/model has the new decoder in its codec. `codec` gives the
    weights of the decoder's losses. A limit on the gradient's norm would tie the two together; None is advised.
    """
    base, out = Path(base), Path(out)
    joint, recipe, codec = joint or JointOptions(), recipe or TalkerRecipe(), codec or CodecRecipe()
    loop, adam = loop or LoopOptions(max_grad_norm=None), adam or AdamOptions()
    ranks = Ranks.join(device)
    opened = open_talker(base, data, recipe, prompts, loop.seed, max_tokens, validation_share, ranks)
    decoder = load_codec(base, device=ranks.device, dtype=torch.float32, parts=("decoder",))
    task = JointTask(opened.task, decoder, joint, codec).to(ranks.device)
    trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
    stream = JointStream(opened.stream, joint.decoder_s, loop.seed)
    runner = Loop(
        task, AdamW(trained, adam, {"decoder.": joint.decoder_factor}), stream, out, loop,
        ranks=ranks, validation=[stream.make(clips, 0) for clips in opened.validation],
        about=opened.about | {"joint": asdict(joint), "codec": asdict(codec), "adam": plain(asdict(adam))},
        sink=sink, is_quiet=is_quiet,
    )  # fmt: skip
    outcome = runner.run()
    take_best(outcome, out, trained, ranks)
    card = talker_card(opened, recipe, loop, outcome, base_name or base.name)
    if ranks.is_first:
        new = {name: tensor.detach() for name, tensor in trained.items() if name.startswith("decoder.")}
        folder = export_codec(base / CODEC_FOLDER, out / "codec", new)
        export_model(
            task.talker.network, base, out / "model",
            config_json=opened.plan.config_json, speaker_rows=opened.plan.speaker_rows, card=card, codec=folder,
        )  # fmt: skip
        shutil.rmtree(folder)
    ranks.barrier()
    return outcome
