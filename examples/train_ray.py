"""Ray Train, whose workers may be killed and come back: a small language model on the text of Python's library.

    python examples/train_ray.py --workers 4 --steps 500
    python examples/train_ray.py --detached ...         # on a cluster: the training outlives this process

It differs from a script for Ray Train in two lines: where TorchTrainer comes from, and the loop over steps, by which a
worker that comes back takes over the state of the others while they train.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import prepare_model

from ftcomm.demo.data import library_text
from ftcomm.demo.model import Transformer
from ftcomm.integrations.ray import TorchTrainer, steps

CONTEXT, BATCH = 64, 12  # bytes of a sample, samples of a worker's batch


def train(config: dict[str, Any]) -> None:
    text = torch.from_numpy(library_text()[0].astype("int64"))
    torch.manual_seed(0)  # the same first weights everywhere
    model = Transformer(config["width"], context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parallel = prepare_model(model)
    me, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    for step in steps(config["steps"], {"model": model, "optimizer": optimizer}):
        numbers = torch.arange(BATCH) + (step * workers + me) * BATCH
        samples = torch.stack([text[number * 7919 % (len(text) - CONTEXT - 1) :][: CONTEXT + 1] for number in numbers])
        optimizer.zero_grad()
        loss = parallel(samples)
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            ray.train.report({"step": step, "loss": loss.item()})
    digest = hashlib.blake2b(digest_size=8)
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    print(f"replica {me} trained {config['steps']} steps, weights {digest.hexdigest()}", flush=True)


def fit(arguments: argparse.Namespace) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": arguments.steps, "width": arguments.width},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(storage_path=arguments.storage),
    )
    trainer.fit()


class Runner:
    """An actor that is no part of this process. If this is gone when the training ends, the actor is still there."""

    def fit(self, arguments: argparse.Namespace) -> None:
        fit(arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--storage", help="folder of Ray Train that all nodes can write to")
    parser.add_argument("--address", help="of a cluster; without, Ray starts one on this host")
    parser.add_argument("--detached", action="store_true", help="train on when this process is gone")
    arguments = parser.parse_args()
    ray.init(address=arguments.address)
    if arguments.detached:
        runner = ray.remote(num_cpus=0)(Runner).options(name="training", lifetime="detached").remote()
        ray.get(runner.fit.remote(arguments))
        ray.kill(runner)
    else:
        fit(arguments)


if __name__ == "__main__":
    main()
