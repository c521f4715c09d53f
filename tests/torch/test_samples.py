"""What a sample of the state finds, and whom a joiner asks for one."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
import torch
from torch import nn

from ftcomm.control import dropped
from ftcomm.errors import StateError
from ftcomm.training import samples
from ftcomm.training.catchup_protocol import CatchUpDone, SampleDigests, Wait, receive, send
from ftcomm.training.samples import SampleSource, compare
from ftcomm.training.state import sampled
from tests.unit.test_catchup import Network, Node, view

STEP = 7
BEHIND = (3,)


class Rank(Node):
    def serve(self, purpose, handler):
        assert purpose == "sample"
        self.network.handlers[self.replica] = handler


def training(updates=3, lr=0.1, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    for update in range(updates):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + update)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}


def sources(network, state, replicas=(0, 1, 2), step=STEP):
    for replica in replicas:
        SampleSource(Rank(network, replica), state).at_boundary(step, view(replicas, BEHIND))


def ask(network, state, contributing=(0, 1, 2)):
    compare(Rank(network, BEHIND[0]), state, STEP, view(contributing, BEHIND))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda state: state["optimizer"].step(), "'optimizer'"),
        (lambda state: state["scheduler"].step(), "'optimizer' and 'scheduler'"),
        (lambda state: state["optimizer"].param_groups[0].update(betas=(0.9, 0.9)), "'optimizer'"),
        (lambda state: state["optimizer"].state[state["model"][0].bias]["step"].add_(1), "'optimizer'"),
        (lambda state: state["model"][0].weight.data.add_(1e-6), "'optimizer'"),
        (lambda state: state["average"].update_parameters(state["model"]), "'average'"),
    ],
    ids=["an update", "a rate", "a setting", "a count", "weights", "an average"],
)
def test_what_differs_is_named(change, wrong):
    network, here = Network(), training()
    sources(network, training())
    ask(network, here)
    change(here)
    with pytest.raises(StateError, match=f"its {wrong} differ from what replica 0 has"):
        ask(network, here)


def test_buffers_are_those_of_each_replica():
    network, here = Network(), training()
    here["model"][1].running_mean.add_(1.0)
    sources(network, training())
    ask(network, here)


def test_a_source_that_died_or_lies_is_left_out(caplog):
    network, here = Network(), training()
    sources(network, training())
    network.dead.add(0)

    def lies(sock, fields):
        send(sock, CatchUpDone())
        sock.close()

    network.handlers[1] = lies
    counted = dropped.counts().get("state", 0)
    ask(network, here)
    assert dropped.counts()["state"] == counted + 1
    here["optimizer"].step()
    with pytest.raises(StateError, match="what replica 2 has"):
        ask(network, here)
    network.dead.update((1, 2))
    with caplog.at_level(logging.WARNING):
        ask(network, here)
    assert "no replica could confirm its state" in caplog.text


def test_a_source_answers_when_it_has_come_to_that_boundary(monkeypatch):
    monkeypatch.setattr(samples, "_WAIT", 0.01)
    network, state = Network(), training()
    source = SampleSource(Rank(network, 0), state)
    source.at_boundary(STEP - 1, view((0,), BEHIND))
    here, there = socket.socketpair()
    threading.Thread(target=network.handlers[0], args=(there, {"step": STEP}), daemon=True).start()
    here.settimeout(60)
    assert isinstance(receive(here), Wait)
    source.at_boundary(STEP, view((0,), BEHIND))
    while isinstance(frame := receive(here), Wait):
        pass
    assert isinstance(frame, SampleDigests)
    assert set(frame.digests) == {"optimizer", "scheduler", "average"}


def test_a_source_that_stays_away_is_not_waited_for_without_end(monkeypatch, caplog):
    monkeypatch.setattr(samples, "_WAIT", 0.01)
    network, here = Network(), training()
    sources(network, training(), (0,), STEP - 1)
    monkeypatch.setattr(samples, "_patience", lambda group: 0.05)
    with caplog.at_level(logging.INFO):
        ask(network, here, (0,))
    assert f"it has not come to boundary {STEP}" in caplog.text


def test_every_tensor_can_be_sampled():
    tensors = [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(9),
        torch.zeros(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        torch.zeros(4, 4).t(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
    ]
    before = sampled(tensors, "all")
    assert sampled([tensor.clone() for tensor in tensors], "all") == before
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            other = tensor.clone()
            other[(-1,) * other.ndim] = 1
            assert sampled([*tensors[:place], other, *tensors[place + 1 :]], "all") != before, tensor
