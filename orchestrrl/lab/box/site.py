"""The site that the box builds by default: two PoDs, four ToRs, twelve hosts, three optical switches."""

SITE = """\
# A circuit of 100 Gbps is scaled down to what one machine carries: see `orchestrrl fabric box --help`.
link_gbps: 100
nic_gbps: 100
pods:
  - {id: train0, role: train}
  - {id: gen0, role: gen}
tors:
  - {id: train0/r0, pod: train0}
  - {id: train0/r1, pod: train0}
  - {id: gen0/r0, pod: gen0}
  - {id: gen0/r1, pod: gen0}
uplinks:
  - {id: train0/up0, pod: train0}
  - {id: gen0/up0, pod: gen0}
servers:
  - {id: train0/s0, pod: train0, gpus: 0, tors: [train0/r0]}
  - {id: train0/s1, pod: train0, gpus: 1, tors: [train0/r0]}
  - {id: train0/s2, pod: train0, gpus: 2, tors: [train0/r0]}
  - {id: train0/s3, pod: train0, gpus: 3, tors: [train0/r1]}
  - {id: train0/s4, pod: train0, gpus: 4, tors: [train0/r1]}
  - {id: train0/s5, pod: train0, gpus: 5, tors: [train0/r1]}
  - {id: gen0/s0, pod: gen0, gpus: 6, tors: [gen0/r0]}
  - {id: gen0/s1, pod: gen0, gpus: 7, tors: [gen0/r0]}
  - {id: gen0/s2, pod: gen0, gpus: 8, tors: [gen0/r0]}
  - {id: gen0/s3, pod: gen0, gpus: 9, tors: [gen0/r1]}
  - {id: gen0/s4, pod: gen0, gpus: 10, tors: [gen0/r1]}
  - {id: gen0/s5, pod: gen0, gpus: 11, tors: [gen0/r1]}
devices:
  piezo: {reconfiguration_s: 0.025, ports: 16}
  mems: {reconfiguration_s: 0.010, ports: 16}
switches:
  - {id: train0/agg0, tier: agg, pod: train0, device: piezo,
     ports: {train0/r0: "1-4", train0/r1: "5-8", train0/up0: "9-12"}}
  - {id: gen0/agg0, tier: agg, pod: gen0, device: mems,
     ports: {gen0/r0: "1-4", gen0/r1: "5-8", gen0/up0: "9-12"}}
  - {id: core0, tier: core, device: piezo, ports: {train0/up0: "1-4", gen0/up0: "5-8"}}
"""
