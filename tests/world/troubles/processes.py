"""What happens to processes and to the hosts that they are on."""

from __future__ import annotations

from world.times import LONG, UNNOTICED, VISIBLE
from world.trouble import ANYWHERE, Hit, happens


@happens(*ANYWHERE)
def kill(hit: Hit) -> None:
    """A process gets SIGKILL."""
    harm(hit)
    hit.process.kill()
    hit.world.has_died()


@happens(*ANYWHERE)
def stop(hit: Hit) -> None:
    """A process does nothing for a while: shorter than any deadline, or longer than that for a sign of life."""
    seconds = hit.world.choice(0.5, 5.0, 25.0, 60.0)
    hit.process.stop(seconds)
    harm(hit)
    # Only then may it notice that another one has died, or look for the folder of a save that was given up.
    hit.world.excuse(seconds + UNNOTICED + VISIBLE)


@happens(*ANYWHERE)
def stop_and_kill(hit: Hit) -> None:
    """A process does nothing for a while, and then it gets SIGKILL: meanwhile all others have gone as far as they can."""
    world, process, seconds = hit.world, hit.process, hit.world.choice(0.5, 5.0)
    process.stop(seconds + 1.0)

    def end() -> None:
        if not process.is_dead:
            harm(hit)
            process.kill()
            world.has_died()

    world.simulation.at(world.simulation.now + seconds, end)
    harm(hit)
    world.excuse(seconds)


@happens(*ANYWHERE, is_harmless=True)
def slow(hit: Hit) -> None:
    """What a process does takes thirty times as long, until its job is over."""
    hit.process.slowness = 30.0
    hit.world.excuse(LONG)


@happens(*ANYWHERE, is_harmless=True)
def clock_jump(hit: Hit) -> None:
    """The date of a host jumps by days."""
    hit.process.date_offset = hit.world.choice(-1e6, 1e6)


@happens(*ANYWHERE, storages=("disk", "mounted", "bucket"))
def power_cut(hit: Hit) -> None:
    """All hosts go off, and the disk keeps what it may."""
    hit.world.lose_memory()
    hit.rank.job.kill()
    for process in [*hit.world.clients(), *hit.world.others]:
        process.kill()
    hit.world.files.disk.cut_power(hit.world.case.seed)
    for host in hit.world.local.hosts:
        hit.world.local.cut_power(host)
    hit.world.has_died()


@happens(*ANYWHERE)
def second_run(hit: Hit) -> None:
    """Somebody starts the same run once more, beside this one."""
    hit.world.start("second run")
    hit.world.excuse(LONG)


def harm(hit: Hit) -> None:
    """A process that keeps snapshots in memory may lose them."""
    if hit.process is not hit.rank.process:
        hit.world.lose_memory(hit.process.host)
