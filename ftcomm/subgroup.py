"""Groups of some replicas of a job, which survive as the group of all does.

    view of the job     epoch 7: 0 1 2 3       the group of 0, 1 and 3 runs in     epoch 7: 0 1 3
    1 is lost           epoch 8: 0   2 3                                           epoch 8: 0   3
    1 comes back        epoch 9: 0 1 2 3                                           epoch 9: 0 1 3

It is an exchange of its own, with a segment and a stream of its own. Nobody decides on its views: they are those of the
job, restricted to its replicas, so they are in order and alike on all members without a word. To enter one a member
does what the control plane does for the group of all. It stops, and asks the others of that view where they stand:

    member i                                   member j
      dial("fixed", name, "ask", epoch) --->   kept until j has stopped for that epoch; parked until j has this group
                                        <---   Account(segment, progress)
      with all accounts: connect, resume

Being made is the same again: a first view, in which nobody has called anything. So a loss while a group is being made
is a loss like others, and a replica that comes back makes it as it did in its first life, and is numbered on.

The thread of a group does all that, one view after the other, so that no view is resumed after a newer one has stopped
the exchange. What it waits for ends when a newer view comes, or the group does.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.chunks import Contributors
from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Stall
from ftcomm.communicator import Communicator, Terms
from ftcomm.control import field_types as t
from ftcomm.control import fork, wire
from ftcomm.control.blame import CHANGE
from ftcomm.control.dropped import drop
from ftcomm.control.framing import Framing, receive_while
from ftcomm.control.messages import Progress
from ftcomm.control.sealed import Connection
from ftcomm.control.timeouts import REPORT
from ftcomm.control.views import Address, Member, View
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, TransportError, fresh
from ftcomm.messages.p2p import JobPost
from ftcomm.own import own_process
from ftcomm.router import ASK, POST, PURPOSE, Incoming
from ftcomm.transport.base import Peer

if TYPE_CHECKING:
    from ftcomm.group import Group

log = logging.getLogger("ftcomm")

_LOOK = 0.05  # s between two looks at whether an answer is still wanted
_PAUSE = 0.02  # s before the next
_NUDGE = 0.001  # s between wake-ups of a driver that sleeps on a word of a dead peer
_SEND = 2.0  # s for an answer to be taken

Dial = Callable[[Address, str, wire.Fields, float], Connection]


class Account(msgspec.Struct, frozen=True, tag=True):
    """Where a member stands before `epoch`, and where its segment lies."""

    epoch: t.Epoch
    address: Address
    progress: Progress


FRAMES: Framing[Account] = Framing(Account, wire.MAX_MESSAGE)


class Subgroup(Communicator):
    """This rank's likes in some replicas of its job. Do not make one: `Group.subgroup` does, on all members.

    Ranks are places in `roster`, which is that of the group of all, in so far as it belongs to this one, and so changes
    at step boundaries alone. A member that catches up contributes nothing, unless all members do.
    """

    _greeting = ASK
    _post: JobPost

    def __init__(
        self,
        group: Group,
        name: str,
        replicas: Collection[int],
        *,
        dial: Dial,
        on_stall: Callable[[int, int, tuple[int, ...]], None],
        on_failed: Callable[[BaseException], None],
        on_divergence: Callable[[Divergence], None] | None,
    ) -> None:
        """See `Group.subgroup`. `on_stall(epoch, op, waiting on)`, every second. `on_failed`: this rank cannot go
        on."""
        settings = group.settings
        if group.replica not in replicas or len(set(replicas)) != len(replicas):
            raise ArgumentError(
                f"group {name!r} of replicas {list(replicas)} at replica {group.replica}; expected this one among "
                "them, and each once"
            )
        self._group, self.replica = group, group.replica
        self.called: tuple[int, int] | None = None  # when, if one thread makes the calls of others; see `Group._when`
        self._among = frozenset(replicas)
        self._dial, self._on_stall, self._on_failed = dial, on_stall, on_failed
        timeouts = settings.timeouts
        terms = Terms(
            (settings.host, group._port),
            settings.transport,
            settings.data,
            (timeouts.op_floor, timeouts.op, timeouts.give_up),
            settings.algorithm,
            settings.tuning,
            settings.ranks_per_replica,
        )
        # Programs have many groups of which they use few.
        super().__init__(name, group.replica, group._router, terms, later=True, on_divergence=on_divergence)
        self._missing: tuple[int, ...] = ()  # whose account is still to come; replaced as a whole
        self._changed = threading.Condition(self._lock)  # of the next six, and of the error
        self._view: View | None = None  # the newest of the job
        self._epoch = 0  # that the exchange runs in
        self._account: Account | None = None  # of the newest epoch for which it has stopped
        self._asked: dict[int, Incoming] = {}  # members that are ahead of us
        self._known: dict[int, tuple[str, str]] = {}  # replica -> life, and nonce of the segment that it has here
        self._waiting = 0  # threads of the user that wait for a view
        self._peers: dict[int, tuple[str, Peer]] = {}  # replica -> nonce of its segment, and the way to it
        self._thread = threading.Thread(target=self._follow, name=f"ftcomm-subgroup-{name}", daemon=True)

    def _make_post(self) -> JobPost:
        return JobPost(self.replica, self._group.shard, self._dial_post)

    def begin(self, timeout: float) -> None:
        """Once: enter the view in force; blocks until its members have come. Without a view, in a replica that joins,
        `entered` and `follow` are to come. Raises `TransportError`."""
        self._router.open(self.name, self)
        self._thread.start()
        view = self._router.newest  # looked at after `open`, so that of every later one we are told
        if view is None:
            return
        self.entered(view)
        try:
            self._wait_for(view.epoch, timeout, "all that live have made this group")
        except CollectiveTimeout as error:
            raise TransportError(f"{error}. Do they run, and make it too (Group.subgroup, dist.new_group)?") from None

    def __str__(self) -> str:
        return f"group {self.name!r}, replica {self.replica}"

    # -- what the calls ask ------------------------------------------------------------------------------------------

    def _may_call(self) -> None:
        self._group._may_call()
        if self._error is not None:
            raise fresh(self._error)

    def _when(self) -> tuple[int, int]:
        return self._group._when() if self.called is None else self.called

    def _carry_out(self, op: Operation, result: Any, finish: Callable[[], Any] | None, async_op: bool) -> Any:
        self._segment.reserve()
        return super()._carry_out(op, result, finish, async_op)

    def _patience(self) -> float:
        return self._group.settings.timeouts.give_up

    @property
    def roster(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(replica for replica in self._group.roster if replica in self._among)

    @property
    def contributors(self) -> tuple[int, ...]:
        """Who contributes, of these."""
        return tuple(replica for replica in self._group.contributors if replica in self._among) or self.roster

    @property
    def _outside(self) -> bool:
        """In a replica that joins a running job, until it has passed its first boundary."""
        return self._group._outside

    @property
    def _on_step_error(self) -> Callable[[Exception], None] | None:
        return self._group._on_step_error

    # -- with the group of all: these are called by it ---------------------------------------------------------------

    def drain(self, timeout: float | None) -> None:
        """Before a boundary: block until nothing is in flight. Raises `CollectiveTimeout`."""
        self._exchange.drain(timeout)

    def common(self, *, reset: bool = False) -> Contributors | None:
        """After `drain`: see `Exchange.common`."""
        return self._exchange.common(reset=reset)

    @property
    def _stood(self) -> float:
        """See `Exchange.stood`."""
        return self._exchange.stood

    @property
    def of_all(self) -> bool:
        """Whether all who are there now are in it."""
        return self._among.issuperset(self._group.roster)

    def follow(self, view: View, timeout: float) -> None:
        """At a boundary that was passed in `view`: block until this group runs in it too, so that it has all who are in
        the roster from now on. Takes an exchange of messages if the view is new, else nothing. Raises
        `CollectiveTimeout`."""
        if self._error is None:
            self._wait_for(view.epoch, timeout, f"they have come to the view of epoch {view.epoch}")

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """On whom this group waits, as `Engine.waiting` says it. Any thread."""
        stall = self._exchange.waiting(seconds)
        if stall is not None:
            return stall.op, stall.waiting_on
        missing = self._missing
        return (CHANGE, missing) if missing and self._needed() else None

    def entered(self, view: View) -> None:
        """A view of the job is in force. Does not block."""
        with self._changed:
            if self._error is not None or (self._view is not None and view.epoch <= self._view.epoch):
                return
            self._view = view
            self._post.enter(view)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The end: every op and every later one fails with `error`. Does not block; the first counts."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            asked, self._asked = self._asked, {}
            self._changed.notify_all()
        for call in asked.values():
            call.sock.close()
        self._fail_all(error)

    def close(self) -> None:
        """Leave the group; idempotent. Ops in flight fail. Blocks until what was sent is received, for 2 seconds."""
        if fork.is_child():
            return
        error = self._closing()
        if self._error is None:
            self._post.close(error)
        self.fail(error)
        self._drain()
        if self._thread.is_alive():
            self._thread.join()
        self._let_go()
        self._group._left(self)

    def _wait_for(self, epoch: int, timeout: float, until: str) -> None:
        own_process()
        with self._changed:
            self._waiting += 1
            try:
                there = self._changed.wait_for(lambda: self._epoch >= epoch or self._error is not None, timeout)
            finally:
                self._waiting -= 1
            missing, error = self._missing, self._error
        if error is not None:
            raise fresh(error)
        if not there:
            raise CollectiveTimeout(
                f"{self} has waited {timeout:g} s for replicas {', '.join(map(str, missing))}, until {until}"
            )

    # -- its thread: from view to view -------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while (view := self._next()) is not None:
                self._enter(view)
        except Exception as error:
            if self._error is None:  # else it is that one
                drop("internal", f"{self}: {error!r}", error=error)
                self.fail(FtcommError(f"{self}: internal error: {error!r}; please report it"))
                self._on_failed(error)
        finally:
            for _, peer in self._peers.values():
                peer.close()

    def _next(self) -> View | None:
        """The newest view that was not entered, as soon as there is one; None at the end."""
        with self._changed:
            tried = 0 if self._account is None else self._account.epoch
            while self._error is None and (self._view is None or self._view.epoch <= tried):
                self._changed.wait()
            return None if self._error is not None else self._view

    def _wanted(self, view: View) -> bool:
        return self._view is view and self._error is None

    def _pause(self, view: View, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted(view), seconds)

    def _enter(self, view: View) -> None:
        """Into `view`, unless a newer one comes."""
        members = [member for member in view.members if member.replica in self._among]
        account = Account(view.epoch, self._here, self._quiesce())
        self._tell(account)
        accounts = self._ask(view, [member for member in members if member.replica != self.replica])
        if accounts is None:
            return
        peers = self._reach_all(view, accounts)
        if peers is None:
            return
        contributing = frozenset(member.replica for member in members if member.contributing)
        others = {replica: told.address for replica, told in accounts.items()}
        progress = {replica: told.progress for replica, told in accounts.items()} | {self.replica: account.progress}
        self._resume(view.epoch, others, contributing or frozenset(progress), peers, progress)
        with self._changed:
            self._epoch = view.epoch
            self._changed.notify_all()

    def _quiesce(self) -> Progress:
        still = threading.Event()
        self._exchange.freeze(still.set)
        while not still.wait(_NUDGE) and self._error is None:
            self._exchange.nudge()
        return self._exchange.progress()

    def _tell(self, account: Account) -> None:
        """All who have asked for it, and who will."""
        with self._lock:
            self._account = account
            due = [call for call in self._asked.values() if call.epoch <= account.epoch]
            self._asked = {member: call for member, call in self._asked.items() if call.epoch > account.epoch}
        for call in due:
            self._answer(call, account)

    def _answer(self, call: Incoming, account: Account) -> None:
        """Who asks for an epoch that is over here gets no answer: it hears of a newer one as we have."""
        with contextlib.suppress(OSError), call.sock as sock:
            if call.epoch == account.epoch:
                sock.settimeout(_SEND)
                sock.sendall(FRAMES.frame(account))

    def _ask(self, view: View, others: list[Member]) -> dict[int, Account] | None:
        """The accounts of `others`, each of whom is asked until it answers; None if `view` is wanted no more."""
        answers: queue.SimpleQueue[tuple[int, Account]] = queue.SimpleQueue()
        for member in others:
            name = f"ftcomm-ask-{member.replica}"
            threading.Thread(target=self._ask_one, args=(view, member, answers), name=name, daemon=True).start()
        accounts: dict[int, Account] = {}
        late = self._late(view)
        try:
            while missing := tuple(member.replica for member in others if member.replica not in accounts):
                self._missing = missing
                try:
                    replica, account = answers.get(timeout=_LOOK)
                    accounts[replica] = account
                except queue.Empty:
                    if not self._wanted(view):
                        return None
                    late(missing, "have not made it; a script makes its groups anew")
            return accounts
        finally:
            self._missing = ()

    def _late(self, view: View) -> Callable[[tuple[int, ...], str], None]:
        """To be called now and then while members are waited for, with what they have not done: a stall, when the time
        for that is over."""
        begun = said = time.monotonic()

        def late(missing: tuple[int, ...], what: str) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= REPORT and now - begun > self._deadline(view) and self._needed():
                if said == begun:
                    log.warning("%s: replicas %s %s", self, ", ".join(map(str, missing)), what)
                said = now
                self._on_stall(view.epoch, CHANGE, missing)

        return late

    def _deadline(self, view: View) -> float:
        """Of a view without a lost member all hear at once. Otherwise one waits for somebody's script, and when the
        group is made, or by one that has just come, as long as that takes."""
        if not self._epoch:
            return float("inf")
        timeouts = self._group.settings.timeouts
        return timeouts.op if view.proposal else timeouts.op_floor

    def _needed(self) -> bool:
        """Whether somebody waits for this group: a script may have closed it elsewhere, and be about to do so here."""
        with contextlib.suppress(CollectiveTimeout):
            self._exchange.drain(0)
            return self._waiting > 0
        return True

    def _ask_one(self, view: View, member: Member, answers: queue.SimpleQueue[tuple[int, Account]]) -> None:
        there = member.ranks[self._group.shard]
        me = view.member(self.replica)
        assert me is not None
        fields = self._fields(ASK, me.incarnation, view.epoch)
        while self._wanted(view):
            with self._lock:
                life, nonce = self._known.get(member.replica, ("", ""))
            if life == member.incarnation:
                fields["there"] = nonce
            try:
                with self._dial(there, PURPOSE, fields, self._patience()) as sock:
                    account = FRAMES.read(receive_while(sock, lambda: self._wanted(view), _LOOK))
                ours = self._ours(member.replica, member.incarnation, account.address.nonce)
                if ours and account.epoch == view.epoch:
                    answers.put((member.replica, account))
                    return
            except (OSError, msgspec.DecodeError):  # not there yet, or gone, of which the next view will tell
                pass
            self._pause(view, _PAUSE)

    def _ours(self, replica: int, life: str, nonce: str) -> bool:
        """Whether a member speaks for this group: one that has closed it may have made the next one of its name, while
        we are still in this one, whose staging holds what the next one must not take for its own."""
        with self._lock:
            known = self._known.get(replica)
            if known is None or known[0] != life:
                self._known[replica] = known = (life, nonce)
        return known[1] == nonce

    def _reach_all(self, view: View, accounts: Mapping[int, Account]) -> dict[int, Peer] | None:
        """The memory of the members; None if `view` is wanted no more."""
        peers: dict[int, tuple[str, Peer]] = {}
        for replica, account in accounts.items():
            there = account.address
            nonce, known = self._peers.get(replica, ("", None))
            if known is not None and known.serves(view.epoch) and nonce == there.nonce:
                peers[replica] = nonce, known
                continue
            late = self._late(view)
            self._missing = (replica,)
            try:
                while (peer := self._attempt(view, replica, there, late)) is None and self._wanted(view):
                    self._pause(view, self._group.settings.timeouts.beat)
            finally:
                self._missing = ()
            if peer is not None:
                peers[replica] = there.nonce, peer
            if not self._wanted(view):
                kept = {id(peer) for _, peer in self._peers.values()}
                for _, peer in peers.values():
                    if id(peer) not in kept:
                        peer.close()
                return None
        self._peers = peers
        return {replica: peer for replica, (_, peer) in peers.items()}

    def _attempt(
        self, view: View, replica: int, there: Address, late: Callable[[tuple[int, ...], str], None]
    ) -> Peer | None:
        """One attempt to connect, in a thread, since a member that is stopped answers late. None if that has failed,
        or `view` is wanted no more. It is no complaint about the member: the control plane dials the same port."""
        made: list[Peer | None] = []  # one, by the thread as long as the view is wanted; what it makes later it closes
        member = view.member(replica)
        assert member is not None
        process = member.ranks[self._group.shard]  # `there` is its segment of this group

        def run() -> None:
            peer: Peer | None = None
            try:
                peer = self._reach(
                    replica, there, view.epoch, lambda fields: self._dial(process, PURPOSE, fields, self._patience())
                )
            except (OSError, TransportError) as error:
                log.info("%s: replica %d cannot be reached: %s", self, replica, error)
            with self._changed:
                if self._wanted(view):
                    made.append(peer)
                    self._changed.notify_all()
                    return
            if peer is not None:
                peer.close()

        threading.Thread(target=run, name=f"ftcomm-reach-{replica}", daemon=True).start()
        while True:
            with self._changed:
                if made or not self._wanted(view):
                    return made[0] if made else None
                self._changed.wait(_LOOK)
            late((replica,), "cannot be reached yet")

    # -- connections -------------------------------------------------------------------------------------------------

    def _belongs(self, member: int) -> bool:
        return member in self._among

    def _meets(self, call: Incoming) -> bool:
        if not self._belongs(call.member):
            call.sock.close()
            return True
        if call.there not in ("", self._here.nonce) or not self._ours(call.member, call.life, call.nonce):
            return False
        with self._lock:
            account = self._account
            keep = self._error is None and (account is None or call.epoch > account.epoch)
            before = self._asked.get(call.member) if keep else None
            if keep:
                self._asked[call.member] = call
        if before is not None:
            before.sock.close()
        if not keep and account is not None:
            self._answer(call, account)
        elif not keep:
            call.sock.close()
        return True

    def _takes_messages(self, call: Incoming) -> None:
        self._post.incoming(call.sock, {"replica": call.member, "life": call.life, "epoch": call.epoch})

    def _dial_post(self, replica: int, purpose: str, fields: wire.Fields) -> Connection:
        ours = self._fields(POST, wire.text(fields, "life"), wire.number(fields, "epoch"))
        return self._group._dial_rank(replica, self._group.shard, PURPOSE, ours, self._patience())

    def _stalled(self, stall: Stall) -> None:
        self._on_stall(stall.epoch, stall.op, tuple(stall.waiting_on))

    def _broken(self, error: BaseException) -> None:
        self._on_failed(error)
