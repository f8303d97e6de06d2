"""An example of the daemon's configuration, every section with its defaults: `check-config --print-example`."""

EXAMPLE = """\
# OrchestrRL daemon. Every section may be left out; the values shown are the defaults unless said otherwise.

# advise: decide and explain, change nothing. act: also move requests. Begin with advise.
mode: advise

listen:
  address: 127.0.0.1:7070       # gRPC; port 0 takes a free one
  socket: null                  # also listen on this Unix socket, e.g. /run/orchestrrl.sock
  allow_remote: false           # must be true for an address that is not loopback: there is no authentication yet

# What the daemon takes in and remembers at most; what is beyond is refused, with the setting's name. The defaults are
# for 1,024 engines of 1,024 requests each, over several gateways.
limits:
  message_bytes: 67108864       # of one gRPC message
  connections: 16384            # open at a time, on each address
  calls: 16384                  # open at a time, streams included
  requests_per_report: 262144   # that one gateway has in flight, or reports as finished at a time
  requests: 1048576             # in flight, over all gateways
  engines: 8192                 # known at a time, whoever named them
  gateways: 256                 # known at a time
  nodes: 8192                   # agents and gateways known at a time; as many weight peers, and traced hosts

journal:
  path: orchestrrl-journal.sqlite  # and beside it -wal, -shm, .tail and .lock; all belong together
  max_entries: 1000000          # the oldest beyond this are dropped

# Prometheus metrics; without this section there are none.
metrics:
  address: 127.0.0.1:9107
  allow_remote: false           # as for listen

# The fast loop moves requests between engines.
fast:
  interval_s: 1.0
  policy: packing               # by when each engine will end; paper: by the load index; none: no moves
  tolerance: 0.05               # packing: ends that differ by no more than this share of the last are left alone
  theta: 0.0002                 # paper: spread of the load index, (running + waiting) / cap / decode rate, left alone
  settle_share: 1.0             # once something moves, it goes on until this share of tolerance or theta is left
  min_gain_share: 0.001         # packing: of the time until the end, that each move must gain
  crowded_ratio: 2.0            # paper: a running request leaves an engine with so many times the emptiest's requests
  max_moves_per_tick: 8         # at a time, in all: the next ones wait for the results of these
  max_moves_to_engine: 4        # at a time, of running requests, to one engine
  max_moves_per_request: 4
  rest_after_move_s: 10.0       # a request that has moved stays so long, unless its engine stalls
  keep_groups_together: false   # packing: samples of one prompt had rather be on one engine (prefix caching)
  preemption_risk: 0.1          # that a move may bring its destination, as lengths are forecast
  headroom_tokens: 128          # where no lengths are known: of free KV, kept for each running request
  stale_after_s: 5.0            # an engine with older news is left out; without a gateway's news all is held
  operation_expiry_s: 10.0      # a move that a gateway has not begun by then is off
  stall_grace_s: 5.0            # after a step's start, before a decode rate of 0 counts as a stall

# The slow loop proposes which engines to have, and which requests each should decode.
slow:
  interval_s: 30.0
  epsilon_s: 10.0               # gain that a proposal must bring beyond its cost
  cooldown_s: 120.0
  bin_tokens: 512               # of the histogram of remaining lengths
  max_output_tokens: 32768      # where a request does not say
  stale_after_s: 10.0
  scenarios: 8                  # samples of the lengths that plans are judged on
  work_budget: 100000           # bounds the solver's search, deterministically; null: as it thinks fit
  knowledge: forecast           # of lengths; mean: only the average; oracle: as a simulation tells them
  correct_predictions: true     # by how earlier steps came out, by a factor of at most 2

# What agents and gateways cannot tell. All of it is optional; there is none by default.
fleet:
  gpus: {count: 8, per_node: 8}
  profile: null                 # a file of `orchestrrl profile measure` or `import`: its configurations join these
  # Only where engines hand the KV of running requests over to each other, which none does by itself: without this,
  # plans prefill moved requests again. Anything left out is as the profile's `moves` has it:
  # {inter_node_gbps_per_gpu: 200.0, intra_node_gbps_per_gpu: 1600.0, latency_s: 0.002, kv_bytes_per_token: 196608.0}
  # With `connector: kv_handover` (docs/kv-handover.md) gateways use it, for KV of the weights that `weights` names.
  kv_transfer: null
  configurations:
    # One decode iteration over b sequences that hold K KV tokens takes alpha_s + beta_s*b + gamma_s*K.
    # Each is TP over its GPUs, unless it has e.g. `parallelism: {tp: 1, dp: 8, ep: 8}`; AFD: {attention_gpus: 16,
    # ffn_gpus: 8, micro_batches: 2}.
    - {id: tp2, gpus: 2, alpha_s: 0.0184, beta_s: 0.000081, gamma_s: 4.1e-8, kv_capacity_tokens: 582885,
       max_sequences: 1024, prefill_tokens_per_s: 18000.0, switch_s: 1.7}
    - {id: tp4, gpus: 4, alpha_s: 0.0155, beta_s: 0.000078, gamma_s: 2.0e-8, kv_capacity_tokens: 1315307,
       max_sequences: 1024, prefill_tokens_per_s: 36000.0, switch_s: 1.9}
  engines:                      # `orchestrrl engines add` brings more while the daemon runs
    # Engines of one pool are of a kind, which requests' tags may prefer: {..., pool: long-context}.
    - {id: e0, url: "http://127.0.0.1:8000", configuration: tp2, gpus: [0, 1]}
    - {id: e1, url: "http://127.0.0.1:8001", configuration: tp2, gpus: [2, 3], max_sequences: 256}
  # How engines are started: `orchestrrl plan render` prints their command lines. There is none by default.
  launch:
    engine: vllm                # simulated: `orchestrrl engine simulated`, which needs no GPU and no model
    python: null                # of the engines' own environment; by default python3, and ours for simulated ones
    model: Qwen/Qwen2.5-14B-Instruct   # a name or a folder; there is no default
    served_model_name: null     # by default the model's
    device: cuda                # cpu: vLLM's CPU build, where a GPU's id stands for cores_per_gpu cores; 0: not bound
    cores_per_gpu: 0
    host: 127.0.0.1             # that they listen on
    ports: [8100, 8199]         # each GPU of a node has its own four; an engine uses those of its lowest GPU
    nodes: []                   # addresses, in the order of GPUs; engines over several nodes need them
    arguments: []               # for engines, e.g. [--max-model-len, "16384"]; what contradicts a layout is a fault
    environment: {}
    configurations: {}          # more for one of them, or otherwise: {tp4: {arguments: [...], environment: {...}}}
    kv_directory: null          # where kv_transfer has a connector: a folder in it for each configuration
    weight_backend: false       # true: vLLM checks versions of the weights as it loads them, and reads them back
  # Who starts and stops engines: `orchestrrl redeploy`, and the planner in mode act. There is none by default.
  deployer:
    product: local              # processes of this machine; ray and kubernetes are extras, see docs/deployers.md
    options: {}                 # the product's own
    name: orchestrrl            # whose engines are whose, on machines that fleets share
    folder: orchestrrl-engines  # for records and logs
    standby: stop               # keep: replaced engines that can sleep are kept, for a later redeployment to wake
    drain_within_s: 30.0        # limits of a redeployment's steps: for requests that cannot move to finish
    stop_within_s: 60.0
    start_within_s: 60.0
    ready_within_s: 600.0       # from its start until an engine answers
    load_within_s: 300.0        # weights
    check_within_s: 120.0       # warm-up, verification
    compare_tokens: 16          # a new engine must find likely what the old ones answer, over so many tokens,
    compare_nats: 0.1           # but for this mean difference of log-probabilities

# Optical circuit switches; there are none by default. Drivers and their options are in docs/ocs.md. Circuits that
# somebody else made are never taken down, unless `orchestrrl ocs take-over` names them, or nobody else uses the switch:
# `owns: all`.
ocs:
  - {id: ocs1, driver: virtual, owns: made, options: {}}

# Circuits follow what periods announce, inside windows without collectives, see docs/fabric.md. There is none by
# default; `site` is a file of `orchestrrl fabric generate`, and every switch in it must be in `ocs`:
# {site: site.yaml, quantile: 0.05, most_risk: 1.0, margin_s: 0.005, within_s: 30.0, boundary_within_s: 60.0,
#  min_fraction: 0.5, max_moves_per_stage: 1024, route_s: 0.0, routers: [], model: qwen2.5-14b, first_fleet_gpu: 0,
#  tokens_per_period: 1000000.0}
# Packets follow circuits where `routers` has every ToR, else its router must follow links by itself, within `route_s`:
# {tor: train0/r0, driver: iproute, options: {prefix: [ssh, tor1]}, address: 192.0.2.1, prefixes: [10.0.1.0/24],
#  interfaces: [swp1, swp2, swp3, swp4], packet_side: {interface: eth0, address: 198.51.100.1}}
# and beside `routers`, rerouting: {link_up_s: 2.0, neighbour_s: 1.0, settle_s: 0.002, poll_s: 5.0,
#  packet_hops: null}
fabric: null

# New weights reach the engines by way of peers (`orchestrrl sync peer`), see docs/weight-sync.md.
weights:
  transports: [nccl, tcp, gloo] # in order of preference: the first that both ends of an edge have
  chunk_bytes: 4194304
  seeds_per_pod: 1              # that receive the same bytes from outside
  hop_latency_s: 0.001
  rate_share: 1.0               # of NICs and links that a sync takes at most; 1.0: it is not held back
  # Where there is no fabric. Peers say in which PoD and ToR they are; what is not named here has no limit but NICs:
  # {pods: [{id: train0, boundary_circuits: 4}], tors: [{id: t0, circuits: 4}]}
  network: {link_gbps: 100.0, nic_gbps: 100.0, pods: [], tors: []}
  install: at_once              # next_pause: the trainer goes on, and engines take weights at the next pause
  probe: {prompt_ids: [1, 2, 3, 4, 5, 6, 7, 8], max_tokens: 8}  # which every engine answers first; or null
  publish_within_s: 120.0       # from the first trainer rank's word to the last one's
  stall_s: 10.0                 # an edge on which nothing moves for so long is broken
  patience_s: 30.0              # for a peer that has gone
  fence_within_s: 60.0
  install_within_s: 300.0
  probe_within_s: 60.0
  lease_s: 3600.0               # of the pause while engines are changed: how long requests wait for a dead daemon
  attempts: 2                   # of one version
  slowest_edges: 16             # that a report names
"""
