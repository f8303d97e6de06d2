"""The site on which a box shows weight syncs: one PoD that trains, and two that generate behind one circuit each."""

TRAINERS, PODS, HOSTS_PER_POD = 4, 2, 5


def weights_site(circuit_mbps: float) -> str:
    """As a site's file. A circuit is as fast as a host's NIC, so that a PoD's boundary is scarcer than its NICs by as
    many times as it has hosts; rates are those of the box itself."""
    gbps = circuit_mbps / 1000
    lines = [f"link_gbps: {gbps:g}", f"nic_gbps: {gbps:g}", "pods:", "  - {id: train0, role: train}"]
    gen = [f"gen{number}" for number in range(PODS)]
    lines += [f"  - {{id: {pod}, role: gen}}" for pod in gen]
    lines += ["tors:", "  - {id: train0/r0, pod: train0}"]
    lines += [f"  - {{id: {pod}/r{rack}, pod: {pod}}}" for pod in gen for rack in range(2)]
    lines += ["uplinks:", *(f"  - {{id: {pod}/up0, pod: {pod}}}" for pod in ("train0", *gen))]
    lines += ["servers:"]
    lines += [_server("train0", host, host, "train0/r0") for host in range(TRAINERS)]
    for place, pod in enumerate(gen):
        for host in range(HOSTS_PER_POD):
            gpu = TRAINERS + place * HOSTS_PER_POD + host
            lines.append(_server(pod, host, gpu, f"{pod}/r{host * 2 // HOSTS_PER_POD}"))
    lines += ["devices:", "  mems: {reconfiguration_s: 0.010, ports: 16}", "switches:"]
    lines.append(
        '  - {id: train0/agg0, tier: agg, pod: train0, device: mems, ports: {train0/r0: "1-4", train0/up0: "5-6"}}'
    )
    for pod in gen:
        ports = f'{{{pod}/r0: "1-4", {pod}/r1: "5-8", {pod}/up0: 9}}'
        lines.append(f"  - {{id: {pod}/agg0, tier: agg, pod: {pod}, device: mems, ports: {ports}}}")
    core = ", ".join(f"{pod}/up0: {3 + place}" for place, pod in enumerate(gen))
    lines.append(f'  - {{id: core0, tier: core, device: mems, ports: {{train0/up0: "1-2", {core}}}}}')
    return "\n".join(lines) + "\n"


def _server(pod: str, host: int, gpu: int, tor: str) -> str:
    return f"  - {{id: {pod}/s{host}, pod: {pod}, gpus: {gpu}, tors: [{tor}]}}"
