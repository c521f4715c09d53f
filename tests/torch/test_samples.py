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
from ftcomm.training.catchup_protocol import CatchUpDone, SampleOffer, Wait, receive, send
from ftcomm.training.samples import SampleSource
from ftcomm.training.state import sampled
from ftcomm.training.unsaved import UnsavedBuffers
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
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    for update in range(updates):
        for p in trained:
            p.grad = torch.full_like(p, 1.0 + update)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}


def sources(network, state, replicas=(0, 1, 2), step=STEP):
    for replica in replicas:
        SampleSource(Rank(network, replica), state).at_boundary(step, view(replicas, BEHIND))


def ask(network, state, contributing=(0, 1, 2), step=STEP, **how):
    """What a joiner does that has caught up."""
    here = Rank(network, BEHIND[0])
    how.setdefault("unsaved", UnsavedBuffers(state))
    answer = samples.ask(here, state, step, view(contributing, BEHIND), **how)
    samples.settle(here, state, step, answer, compares=True)


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


def run_forward(state, seed):
    """Change what no optimizer updates."""
    with torch.no_grad():
        state["model"][1].running_mean += seed
        state["average"].module[1].running_mean += 2 * seed
        state["model"].frozen *= seed


def values_of_rest(state):
    model, average = state["model"], state["average"].module
    return [model[1].running_mean.tolist(), average[1].running_mean.tolist(), model.frozen.tolist()]


def test_what_no_optimizer_updates_is_taken_as_it_is_now():
    network, there, here = Network(), training(), training()
    source = SampleSource(Rank(network, 0), there)
    for step in (STEP - 1, STEP):
        source.at_boundary(step, view((0,), BEHIND))
        run_forward(there, 3.0)
        run_forward(here, 5.0)
    source.at_boundary(STEP + 1, view((0,), BEHIND))
    copied = network.handlers[0].__self__._kept[STEP + 1].rest.tensors
    assert sorted(held.numel() for held in copied) == [3, 7, 7], "more than what has moved was copied"
    ask(network, here, (0,), STEP + 1)
    assert values_of_rest(here) == values_of_rest(there)
    weights = [state["model"][0].weight.detach().clone() for state in (here, there)]
    assert torch.equal(*weights)


class Keeping(nn.Module):
    """Has buffers that are in no state_dict."""

    def __init__(self, replica):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(2, 2)
        for name, value in (
            ("mean", torch.zeros(3)),  # what forward passes come to
            ("count", torch.zeros(2, dtype=torch.bfloat16)),
            ("mine", torch.tensor(replica)),  # a constant of this replica
            ("cache", torch.zeros(2 + replica)),  # its size depends on the data
            ("wide", torch.zeros(()).expand(4)),  # all elements at one address
            ("none", None),
        ):
            self.inner.register_buffer(name, value, persistent=False)

    def step(self, by):
        inner = self.inner
        inner.mean += by
        inner.count += by
        inner.cache += by
        inner.wide = torch.tensor(float(by)).expand(4)

    def held(self):
        inner = self.inner
        return [each.tolist() for each in (inner.mean, inner.count, inner.mine, inner.cache, inner.wide)]


def test_buffers_that_are_not_persistent_are_taken_if_training_changes_them(caplog):
    network, there, here = Network(), Keeping(0), Keeping(1)
    source = SampleSource(Rank(network, 0), {"model": there})
    unsaved = UnsavedBuffers({"model": here})
    for step, by in ((STEP - 1, 3), (STEP, 0), (STEP + 1, -3)):
        there.step(by)
        here.step(7)
        source.at_boundary(step, view((0,), BEHIND))
        with caplog.at_level(logging.WARNING):
            ask(network, {"model": here}, (0,), step, unsaved=unsaved)
        assert here.held()[:3] == [there.held()[0], there.held()[1], 1], "or what has changed and is as before"
    assert here.held()[3:] == [[21.0] * 3, [7.0] * 4], "what does not fit was touched"
    assert "keep what they hold: ['inner.cache', 'inner.wide']" in caplog.text
    fresh = Keeping(0)
    source = SampleSource(Rank(network, 0), {"model": fresh})
    source.at_boundary(STEP, view((0,), BEHIND))
    assert network.handlers[0].__self__._kept[STEP].rest.tensors == [], "nothing has changed"


def test_who_gets_no_buffers_that_are_not_persistent_does_not_contribute_if_it_has_changed_its_own():
    network, here = Network(), Keeping(0)
    here.inner.requires_grad_(False)
    optimizer = torch.optim.SGD(here.parameters())
    state = {"model": here, "optimizer": optimizer}
    unsaved = UnsavedBuffers(state)
    ask(network, state, (), unsaved=unsaved)
    here.step(1)
    with pytest.raises(StateError, match="no replica could give it the buffers"):
        ask(network, state, (), unsaved=unsaved)


def test_what_only_the_joiner_has_changed_is_found():
    network, here = Network(), training()
    sources(network, training())
    here["model"][1].running_mean[3] += 1.0
    with pytest.raises(StateError, match="its 'model' differ from what replica 0 has"):
        ask(network, here)


def test_who_gets_no_buffers_does_not_contribute():
    network, here = Network(), training()
    with pytest.raises(StateError, match="no replica could give it the buffers and frozen parameters as they are now"):
        ask(network, here, ())


def test_after_the_last_step_sources_stay_until_all_have_asked(monkeypatch):
    monkeypatch.setattr(samples, "_timeout", lambda group: 1000.0)
    network, state, over = Network(), training(), threading.Event()
    made = [SampleSource(Rank(network, replica), state) for replica in (0, 1)]
    for source in made:
        source.at_boundary(STEP, view((0, 1), BEHIND))
    threads = [threading.Thread(target=source.linger, daemon=True) for source in made]
    for thread in threads:
        thread.start()
    over.wait(0.2)
    assert all(thread.is_alive() for thread in threads)
    ask(network, training(), (0, 1), all_of_them=True)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_after_the_last_step_nobody_is_waited_for_who_left_or_does_not_ask(monkeypatch):
    network, state = Network(), training()
    source = SampleSource(Rank(network, 0, members=(0, 1, 2)), state)
    source.at_boundary(STEP, view((0,), BEHIND))
    source.linger()
    source = SampleSource(Rank(network, 0), state)
    source.at_boundary(STEP, view((0,), BEHIND))
    monkeypatch.setattr(samples, "_timeout", lambda group: 0.05)
    source.linger()


def without_modules():
    return {name: each for name, each in training().items() if name in ("optimizer", "scheduler")}


def test_a_source_that_died_or_lies_is_left_out(caplog):
    network, here = Network(), without_modules()
    sources(network, without_modules())
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
    threading.Thread(
        target=network.handlers[0], args=(there, {"step": STEP, "replica": BEHIND[0]}), daemon=True
    ).start()
    here.settimeout(60)
    assert isinstance(receive(here), Wait)
    source.at_boundary(STEP, view((0,), BEHIND))
    while isinstance(frame := receive(here), Wait):
        pass
    assert isinstance(frame, SampleOffer)
    assert set(frame.digests) == {"model", "optimizer", "scheduler", "average"}


def test_a_source_that_stays_away_is_not_waited_for_without_end(monkeypatch, caplog):
    monkeypatch.setattr(samples, "_WAIT", 0.01)
    network, here = Network(), without_modules()
    sources(network, without_modules(), (0,), STEP - 1)
    monkeypatch.setattr(samples, "_timeout", lambda group: 0.05)
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
