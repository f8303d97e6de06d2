"""A program of several gloo processes without any recorder code. The tests run it with torch's Python.

python traced_program.py WHAT RANK WORLD_SIZE STORE
"""

import contextlib
import importlib
import os
import select
import signal
import sys

import torch
import torch.distributed as dist


def collectives(rank: int, size: int) -> None:
    """Run one collective of each kind, with a tensor of four floats."""
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.broadcast(x, src=0)
    dist.all_gather([torch.empty(4) for _ in range(size)], x)
    dist.all_gather_into_tensor(torch.empty(4 * size), x)
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * size))
    dist.all_to_all_single(torch.empty(4 * size), torch.ones(4 * size))
    dist.reduce(x, dst=0)
    dist.gather(x, [torch.empty(4) for _ in range(size)] if rank == 0 else None, dst=0)
    dist.scatter(x, [torch.empty(4) for _ in range(size)] if rank == 0 else None, src=0)
    dist.barrier()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    peer = rank ^ 1
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(4), peer)]):
        work.wait()
    found = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))


def groups(rank: int, size: int) -> None:
    """Use groups of even and odd ranks, and two groups of the same ranks."""
    even, odd = dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(1, size, 2)))
    again = dist.new_group(list(range(size)))
    x = torch.ones(2)
    dist.all_reduce(x, group=odd if rank % 2 else even)
    dist.all_reduce(x, group=again)
    dist.all_reduce(x)
    assert x.tolist() == [(size // 2) * size * size] * 2


def overlap(rank: int, size: int) -> None:
    """Overlap two collectives: rank 0 joins the first one last, so that the others have both in flight."""
    first, second = torch.ones(1000), torch.ones(1000)
    other = dist.new_group(list(range(size)))
    if rank:
        a = dist.all_reduce(first, async_op=True)
        b = dist.all_reduce(second, group=other, async_op=True)
        _store().set(f"both-{rank}", "1")
    else:
        for peer in range(1, size):
            _store().get(f"both-{peer}")
        a = dist.all_reduce(first, async_op=True)
        b = dist.all_reduce(second, group=other, async_op=True)
    a.wait()
    b.wait()
    assert first[0] == second[0] == size


def functional(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    x = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert (x + 0).tolist() == [size] * 4


def ddp(rank: int, size: int) -> None:
    """Print the bits of the gradients."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        wrapped(torch.randn(11, 7)).pow(2).sum().backward()
    print("gradients", rank, *(p.grad.numpy().tobytes().hex() for p in model.parameters()), flush=True)


def killed(rank: int, size: int) -> None:
    """Enter, on all ranks except 0, a barrier that never ends; rank 1 is killed in it. The others stay alive, because
    an exiting rank ends the barrier of the rest."""
    work = dist.barrier(async_op=True) if rank else None
    if rank == 1:
        _store().set("killed", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    pid = int(_store().get("killed"))
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    del work
    os._exit(0)


def forked(rank: int, size: int) -> None:
    """Fork a child that records a mark, as a data loader may."""
    import recorder

    dist.all_reduce(torch.ones(1))
    child = os.fork()
    if not child:
        recorder.moment("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def many(rank: int, size: int) -> None:
    x = torch.ones(1)
    for _ in range(300):
        dist.all_reduce(x)


def trainer(rank: int, size: int) -> None:
    """Record marks after starting the recorder by its one line."""
    import recorder

    for number in range(2):
        recorder.iteration(number)
        with recorder.mark("forward"):
            dist.all_reduce(torch.ones(1))
        recorder.announce("sync", {"bytes": 5})
    before = dist.ProcessGroup.allreduce
    recorder.stop()
    assert dist.ProcessGroup.allreduce is not before
    dist.all_reduce(torch.ones(1))


def _store() -> "dist.Store":
    return dist.distributed_c10d._get_default_store()


def main() -> None:
    what, size, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if what in ("ddp", "functional"):
        importlib.import_module("torch._dynamo")  # otherwise each rank would import it
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if not ranks[-1]:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
            globals()[what](rank, size)
            dist.barrier()
            dist.destroy_process_group()
            sys.exit()
    print("codes", *(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))


if __name__ == "__main__":
    main()
