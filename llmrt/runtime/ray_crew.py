"""Crew: gets the actors of one engine from Ray and gives everything back. Runs on its own thread.

    joining Ray ─► the group ─► one actor per rank ─► orders to each ─► waits ─► all of it undone

Whatever calls Ray may wait for the cluster; this thread is the only one that does. It ends when the
other end of its lifeline is shut down, and holds nothing of the engine, so that an engine that is
dropped or broken lets go of its actors, too.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from llmrt.config import Rendezvous, Timeouts
from llmrt.errors import RankFailure
from llmrt.runtime import placement, ray_actors, ray_cluster
from llmrt.runtime.doorway import Doorway
from llmrt.runtime.events import LaunchFailed, Phase
from llmrt.runtime.handshake import new_secret
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.own_ray import OwnRay
from llmrt.runtime.placement import Bundle, PlacementError, RayRequest
from llmrt.runtime.ray_actor import Orders, SharedFile, Whereabouts
from llmrt.runtime.ray_inbox import ActorLost, ActorPlaced, News
from llmrt.version import __version__

_SLICE_SECONDS = 0.2
_SHARE_OF_PATIENCE = 0.8
"""How much of the time without progress goes by before Ray's part is given up, with its reason."""


class _Released(Exception):  # noqa: N818 - nothing is wrong: the engine lets go
    """The lifeline was shut down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """One rank's actor."""

    actor: Any
    bundle: Bundle
    where: Whereabouts


class Crew:
    """The actors of one launch, and the thread's work from the first of them to the last."""

    def __init__(
        self,
        spec: GroupSpec,
        request: RayRequest,
        timeouts: Timeouts,
        own_ray: OwnRay,
        lifeline: socket.socket,
        post: Callable[[News], None],
    ) -> None:
        self._spec = spec
        self._request = request
        self._patience = timeouts.start_progress * _SHARE_OF_PATIENCE
        self._own_ray = own_ray
        self._lifeline = lifeline
        self._post = post
        self._needs_gpu = False
        self._refs: list[Any] = []

    def run(self) -> None:
        """Bring the actors up, wait until they are no longer wanted, and leave nothing."""
        with self._lifeline, contextlib.ExitStack() as undo:
            undo.enter_context(contextlib.suppress(Exception))  # a cluster that is gone
            try:
                self._bring_up(undo)
                self._wait()
            except _Released:
                return
            except Exception as error:
                self._post(launch_failure(error))

    # ---- waiting ----

    def _wait(self) -> None:
        self._lifeline.setblocking(True)
        self._lifeline.recv(1)

    def _check(self) -> None:
        if select.select([self._lifeline], [], [], 0)[0]:
            raise _Released

    def _until(self, is_done: Callable[[float], bool], shortage: Callable[[float], str]) -> None:
        """Wait a slice at a time; past the limit, raise what `shortage` says of these seconds."""
        started_at = time.monotonic()
        while not is_done(_SLICE_SECONDS):
            self._check()
            waited = time.monotonic() - started_at
            if waited > self._patience:
                raise PlacementError(shortage(round(waited, 1)))
        self._check()

    # ---- bringing up ----

    def _bring_up(self, undo: contextlib.ExitStack) -> None:
        self._say("joining Ray")
        if self._own_ray.enter():
            undo.callback(self._own_ray.leave)
        ray_cluster.check_mode()
        self._check()
        own_node = ray_cluster.own_node_id()
        bundles, actors = self._create_actors(own_node, undo)
        members = self._in_order(bundles, actors, own_node)
        self._give_orders(members, own_node)

    def _say(self, phase: str, detail: str = "") -> None:
        self._post(Phase(rank=None, phase=phase, detail=detail))

    def _create_actors(
        self, own_node: str, undo: contextlib.ExitStack
    ) -> tuple[Sequence[Bundle], list[Any]]:
        """Have Ray start an actor in a bundle for every rank."""
        group = self._request.group
        if group is None and ray_cluster.is_worker():
            # A group that a worker of Ray's makes outlives it, if it is killed, until the job ends.
            bundles, group = [self._loose_bundle()] * self._spec.world_size, None
        else:
            bundles, group = self._find_bundles(own_node, undo)
        self._say("starting actors")
        actors = [ray_actors.create(group, bundle, on_gpu=self._needs_gpu) for bundle in bundles]
        undo.callback(ray_actors.kill, actors)
        return bundles, actors

    def _find_bundles(
        self, own_node: str, undo: contextlib.ExitStack
    ) -> tuple[Sequence[Bundle], Any]:
        num_ranks, group = self._spec.world_size, self._request.group
        if group is None:
            name = f"llmrt-{new_secret()[:4].hex()}"
            group = ray_cluster.create_group([self._resources()] * num_ranks, name)
            undo.callback(ray_cluster.remove_group, group)
        self._say("waiting for the placement group", group.id.hex())
        self._until(lambda seconds: ray_cluster.is_ready(group, seconds), self._describe_shortage)
        bundles = ray_cluster.bundles_of(group)
        num_gpus = len(placement.fitting(bundles, needs_gpu=True))
        needs_gpu = placement.wants_gpu(self._request.device, num_ranks, num_gpus)
        self._needs_gpu = needs_gpu
        return placement.choose_bundles(bundles, num_ranks, own_node, needs_gpu=needs_gpu), group

    def _describe_shortage(self, seconds: float) -> str:
        if self._request.group is not None:
            return (
                f"the workers of tp={self._spec.world_size} were not placed in the placement group "
                f"given within {seconds:g} s: it waits for resources, or its bundles are taken."
            )
        return placement.describe_shortage(
            self._spec.world_size, self._resources(), ray_cluster.nodes(), seconds
        )

    def _resources(self) -> dict[str, float]:
        """Return what every rank needs that is placed in no group of the user's."""
        resources = {"CPU": self._request.num_cpus}
        num_gpus = ray_cluster.num_in_cluster("GPU")
        if placement.wants_gpu(self._request.device, self._spec.world_size, num_gpus):
            resources["GPU"] = 1.0
        return resources

    def _loose_bundle(self) -> Bundle:
        """Return what a rank needs as a bundle of no group."""
        resources = self._resources()
        self._needs_gpu = "GPU" in resources
        return Bundle(
            index=-1,
            node_id="",
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0.0),
        )

    def _in_order(
        self, bundles: Sequence[Bundle], actors: Sequence[Any], own_node: str
    ) -> list[_Member]:
        """Wait until the actors say where they are; return them by rank."""
        places = self._ask("starting the actors", [actor.where.remote() for actor in actors])
        members = [
            _Member(actor=actor, bundle=bundle, where=where)
            for actor, bundle, where in zip(actors, bundles, places, strict=True)
        ]
        for member in members:
            _check_version(member.where)
        order = placement.rank_order([where.node_id for where in places], own_node)
        return [members[i] for i in order]

    def _ask(self, what: str, refs: list[Any]) -> list[Any]:
        """Return the answers of actors, waiting a bounded time."""
        ray = import_module("ray")

        def is_done(seconds: float) -> bool:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=seconds)
            if any_failed := [ref for ref in done if ray_actors.error_of(ref) is not None]:
                raise PlacementError(
                    f"{what} failed: {ray_actors.describe(ray_actors.error_of(any_failed[0]))}"
                )
            return len(done) == len(refs)

        self._until(is_done, self._describe_shortage)
        return list(ray.get(refs, timeout=ray_actors.ANSWER_SECONDS))

    # ---- orders ----

    def _give_orders(self, members: Sequence[_Member], own_node: str) -> None:
        secret, num_ranks = new_secret(), len(members)
        doorway = Doorway(ray_cluster.own_address(), secret, num_ranks)
        self._post(doorway)
        memory = self._share_memory(members)
        for rank, member in enumerate(members):
            self._post(ActorPlaced(rank=rank, address=member.where.address))
            is_here = member.where.node_id == own_node
            orders = Orders(
                rank=rank,
                world_size=num_ranks,
                spec=self._spec_of(rank),
                addresses=tuple(a for a in doorway.addresses if is_here or a.kind == "tcp"),
                secret=secret,
                rendezvous=self._rendezvous(members[0].where),
                memory=memory,
                has_own_device=self._needs_gpu,
            )
            self._watch(rank, member.actor.run.remote(orders))

    def _spec_of(self, rank: int) -> GroupSpec:
        # What the group shares is handed in; its guards make nothing of their own.
        return replace(
            self._spec,
            configs=(self._spec.configs[rank],),
            shared_memory_bytes=0,
            rendezvous=False,
        )

    def _rendezvous(self, first: Whereabouts) -> Rendezvous | None:
        if not self._spec.rendezvous:
            return None
        return Rendezvous(host=first.address, port=first.rendezvous_port, listen_fd=None)

    def _share_memory(self, members: Sequence[_Member]) -> SharedFile | None:
        """Have the ranks share a memory file, where all are on one node and can."""
        num_bytes = self._spec.shared_memory_bytes
        if num_bytes == 0 or len({member.where.node_id for member in members}) > 1:
            return None
        first, *others = (member.actor for member in members)
        memory: SharedFile = self._ask("sharing memory", [first.share_memory.remote(num_bytes)])[0]
        can_all = all(self._ask("sharing memory", [a.can_open.remote(memory) for a in others]))
        return memory if can_all else None

    def _watch(self, rank: int, ref: Any) -> None:
        self._refs.append(ref)  # Ray tells nothing about a reference that nobody holds
        post = self._post

        def note_end(future: Any) -> None:
            error = future.exception()
            if error is not None:
                post(ActorLost(rank=rank, cause=ray_actors.describe(error)))

        ref.future().add_done_callback(note_end)


def _check_version(where: Whereabouts) -> None:
    if where.version != __version__:
        raise PlacementError(
            f"node {where.address} has llmrt {where.version}, this process {__version__}: install "
            "the same version on every node."
        )


def launch_failure(error: Exception) -> LaunchFailed:
    """Return what tells an engine that Ray did not do its part."""
    failure = RankFailure.of(-1, error)
    if isinstance(error, PlacementError):  # its message says everything
        failure = replace(failure, traceback="")
    return LaunchFailed(what="placing the workers on Ray", failure=failure)
