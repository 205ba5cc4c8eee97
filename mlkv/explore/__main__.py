"""`python -m mlkv.explore`: look for an order of events that breaks an invariant."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from mlkv.dist.explore import Outcome, World, explore_all, explore_random
from mlkv.explore.chance import RandomWorld, make_world
from mlkv.explore.mutants import MUTANTS
from mlkv.explore.parts import Parts, Shape
from mlkv.explore.small import SCENES, SmallWorld

_EPISODE_ACTIONS = 500


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlkv.explore",
        description="Drives protocol, tasks and store through random orders of events, or through all of them.",
    )
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal runs")
    parser.add_argument("--actions", type=int, default=60_000, help="how many actions in total")
    parser.add_argument("--episode", type=int, help="only this episode of the seed, as a finding names it")
    parser.add_argument("--all", action="store_true", help="every order of events of the small scenes instead")
    parser.add_argument("--ranks", type=int, help="ranks in total, instead of small worlds of random shapes")
    parser.add_argument("--hosts", type=int, default=1, help="hosts over which --ranks are spread")
    parser.add_argument("--replicas", type=int, default=1, help="replicas that --ranks are divided into")
    parser.add_argument("--late", action="store_true", help="with --ranks: decisions come one step late")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with a planted fault, which should be found")
    parser.add_argument("--no-shrink", action="store_true", help="tell what was found at full length")
    return parser.parse_args(argv)


def _maker(args: argparse.Namespace) -> Callable[..., World]:
    parts = MUTANTS[args.mutant] if args.mutant else Parts()
    if args.ranks is None:
        return partial(make_world, parts=parts)
    if args.ranks % args.replicas:
        sys.exit(f"--ranks {args.ranks} cannot be divided into {args.replicas} replicas")
    shape = Shape(
        num_replicas=args.replicas,
        num_ranks=args.ranks // args.replicas,
        num_hosts=args.hosts,
        is_late=args.late,
        parts=parts,
    )
    return lambda rng: RandomWorld(shape)


def _run_random(args: argparse.Namespace) -> Outcome:
    only = args.episode is not None
    return explore_random(
        _maker(args),
        seed=args.seed,
        num_actions=_EPISODE_ACTIONS if only else args.actions,
        episode_actions=_EPISODE_ACTIONS,
        first_episode=args.episode or 0,
        shrinks=not args.no_shrink,
    )


def _run_all() -> Outcome:
    total = Outcome()
    for scene in SCENES:
        started = time.process_time()
        outcome = explore_all(partial(SmallWorld, scene))
        took_s = time.process_time() - started
        print(f"{outcome.num_states:7} states, {outcome.num_actions:7} transitions, {took_s:5.1f} s: {scene.name}")
        total.num_states += outcome.num_states
        total.num_actions += outcome.num_actions
        if outcome.finding is not None:
            total.finding = outcome.finding
            break
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when something was found."""
    args = _parse(argv)
    logging.disable(logging.WARNING)  # the explored code warns about every failure it is given
    started = time.process_time()
    outcome = _run_all() if args.all else _run_random(args)
    took_s = time.process_time() - started
    for verb, times in sorted(outcome.happened.items(), key=lambda item: -item[1]):
        print(f"{times:9} {verb}")
    if outcome.finding is not None:
        print(outcome.finding)
    what = f"{outcome.num_states} states" if args.all else f"{outcome.num_episodes} worlds"
    print(f"{outcome.num_actions} actions, {what}, {took_s:.1f} s of one core: ", end="")
    print("nothing broke" if outcome.finding is None else "BROKEN, see above")
    return int(outcome.finding is not None)


if __name__ == "__main__":
    sys.exit(main())
