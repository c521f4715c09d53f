"""The bounds of numbers, texts and lists from the network, as types that msgspec checks while it decodes.

So the state machines may trust ranges as they trust types. The bounds are far above what any job needs, and far below
what would hurt: a word of shared memory holds an epoch in 21 bits, and no list makes more of the bytes that it came in
than a small multiple.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ftcomm.control.limits import EPOCHS, IN_FLIGHT

_NUMBER = (1 << 31) - 1
MANY = Meta(max_length=IN_FLIGHT)  # for members, ops and sets of contributors

ReplicaNumber = Annotated[int, Meta(ge=0, le=_NUMBER)]
Shard = Annotated[int, Meta(ge=0, le=_NUMBER)]
Epoch = Annotated[int, Meta(ge=0, lt=EPOCHS)]  # 0: none yet
Step = Annotated[int, Meta(ge=-1, le=1 << 53)]  # -1: none yet
Loop = Annotated[int, Meta(ge=0, le=1 << 53)]  # how many step loops a script has entered
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
PortNumber = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=1 << 53)]
OpNumber = Annotated[int, Meta(ge=-16, le=1 << 53)]  # below 0: a wait for something else than an op
ProposalNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

Name = Annotated[str, Meta(max_length=256)]  # a host, a life, a kind
Text = Annotated[str, Meta(max_length=1 << 20)]  # a reason; it may list every member
ReplicaNumbers = Annotated[tuple[ReplicaNumber, ...], MANY]
Bitmap = Annotated[bytes, Meta(max_length=1 << 20)]  # for 8 million chunks, 4 TiB
DIGEST = 16  # bytes
Digest = Annotated[bytes, Meta(min_length=DIGEST, max_length=DIGEST)]
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
