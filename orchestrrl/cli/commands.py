"""The table of commands. Help and completion list them from it; only the module of the one in use is imported."""

from orchestrrl.cli.groups import RUNNING_DAEMON, SERVICES

# The first paragraph of each command's help.
COMMANDS = {
    "demo": (
        "Run one generation step without and with OrchestrRL, over several seeds, and compare; then bring new weights."
    ),
    "bench": "Measure what OrchestrRL costs, each figure beside a baseline in the same run; less is better.",
    "daemon": "Watch the fleet, decide, and in mode act move requests. Runs until stopped; SIGHUP reloads the file.",
    "check-config": "Say what a configuration file means, or every fault in it (exit status 2).",
    "gateway": "Serve `/v1/completions` and `/v1/chat/completions` in front of engines.",
    "agent": "Watch engines, report their load to the daemon, carry out its operations on them. Runs until stopped.",
    "status": "Say how the fleet is: mode, workers, nodes, requests, moves, the plan.",
    "workers": "List the engines with their load, room, health and what they offer.",
    "requests": "List the requests in flight: where each is, how far, whether it may move.",
    "mode": "Say or set whether the daemon acts, or only decides and explains.",
    "move": "Move one request to another engine, as the balancer would, whatever the mode.",
    "top": "Watch workers, moves and the plan until Ctrl-C; with --json, one object a line.",
    "pause": "Bring every engine to rest, and say when all is quiet. Renew the lease, or all goes on when it ends.",
    "renew": "Keep the fleet at rest for longer. Refused when the lease has ended: requests have gone on since.",
    "resume": "Let requests go on, under the weights that engines have now.",
    "barrier": "Say whether requests stand still, for whom and how long, and which weights engines have.",
    "cancel": "End answers where they are: their clients get what there is, with finish_reason `abort`.",
    "moves": (
        "Show the fast loop's last decision: load indices before and after, the moves, why no more. And how moves went."
    ),
    "redeploy": (
        "Bring the fleet to other engines, in steps that can be taken back; without a target, say how the "
        "last one stands."
    ),
    "journal": (
        "Print the newest entries of the journal, one a line. Long ones are cut; with --json each is a whole "
        "JSON object."
    ),
    "balance": "Say which requests to move so that no worker straggles, by the load index of equation 5.",
    "sim gen": (
        "Run generation steps of a scenario in virtual time: static baselines, and what OrchestrRL makes of them."
    ),
    "sim run": (
        "Run a whole cluster in virtual time: training, generation and weight sync on a fabric, as the loop joins them."
    ),
    "sim compare": "Fabrics and arms side by side: ratios to the first, and which of them are on the Pareto frontier.",
    "sim report": (
        "One self-contained HTML page of results of `sim run`, `sim compare` and `sim sweep`, with its pictures inside."
    ),
    "sim daemon-config": (
        "Write what was simulated as a daemon's configuration, and beside it the profile of its engines."
    ),
    "sim split": (
        "Try how a cluster's GPUs are best divided between training and generation: the most samples per second."
    ),
    "sim sweep": (
        "Run every combination of values over a base scenario: `base: cluster64`, `grid: {cluster.nic_gbps: "
        "[100, 400]}`."
    ),
    "sim paper": (
        "The paper's figures made again from first principles, beside what it reports; and what is beyond them."
    ),
    "engine simulated": (
        "Serve a simulated engine with vLLM's HTTP surface until SIGTERM. Its URL is the first line of output."
    ),
    "engines list": "List the engines: which take requests, which are drained, who judges their health.",
    "engines add": "Have every gateway send requests to one more engine, until it is removed.",
    "engines drain": (
        "Send an engine nothing new. What is there finishes or, with --move, goes on elsewhere as far as it can."
    ),
    "engines remove": "Forget an engine, whoever goes on to report it, until it is added again.",
    "engines set-version": (
        "Tell which weights engines have that got them without the pause barrier, e.g. after a restart."
    ),
    "plan explain": (
        "Say why a plan is as it is: its inputs' age, the alternatives, the fleet it wants, the reason of "
        "plan admission, predicted against actual."
    ),
    "plan list": "List the newest plans, the latest first.",
    "plan override": "Replace the planner's choice by a configuration of yours, until released or expired.",
    "plan pin": "Keep the deployment as it is, until released or expired.",
    "plan release": "Give the planner its freedom back.",
    "plan solve": (
        "Say which engines to run on which GPUs, and which request each decodes, so that the last one ends soonest."
    ),
    "plan render": (
        "Print the environment and the command line of each engine, to be pasted into a shell. Nothing is run."
    ),
    "plan history": "List the redeployments that were carried out, newest first; with --id, what took how long in one.",
    "profile score": "Compare predicted with measured time per output token, row by row and as ratios between TPs.",
    "profile fit": (
        "Fit the engine constants of the roofline, once on all models and once without each, and write them."
    ),
    "profile predict": (
        "Predict step times, room and costs of every layout worth a look, from data sheets and fitted engine constants."
    ),
    "profile measure": "Measure an engine and put its configuration into a profile file, in the place of its namesake.",
    "profile import": (
        "Make a profile from NVIDIA's measured kernel data, with the optional package aiconfigurator-core."
    ),
    "profile show": (
        "Show a profile: step times, room and costs of each configuration, and where each figure comes from."
    ),
    "fabric status": (
        "Show which circuits are up, for which period, what is masked or pinned, and whose traffic is traced."
    ),
    "fabric periods": "List what became of the latest periods, and count all of them by state and reason.",
    "fabric announce": "Announce a communication period, as a trainer does, and follow what becomes of its circuits.",
    "fabric pin": "Keep circuits as they are, until released or expired.",
    "fabric override": "Have the circuits of one period, whatever else its job announces, until released or expired.",
    "fabric release": "Let circuits follow what is announced again.",
    "fabric mask": "Say what must not be used, beside what switches report of themselves. The whole list each time.",
    "fabric pause": "Hold every change of circuits that periods ask for, until resumed or expired.",
    "fabric resume": "Let it go on.",
    "fabric slack": "Show how long it is quiet between the collectives of a job, and which optical switches fit in.",
    "fabric trace": "Write the collectives and marks that this host's recorders still remember into a trace.",
    "fabric check": (
        "Find what is impossible in the cabling of a site, all of it at once, and say what capacity there is."
    ),
    "fabric generate": (
        "Write the file of a regular site: rail-aligned PoDs, each ToR and uplink fibred to every switch of "
        "its PoD, each uplink to every switch of the core, and lanes kept for responses."
    ),
    "fabric show": "Draw a site: servers on ToRs, ToRs and uplinks on the switches of their PoD, uplinks on the core.",
    "fabric box": "Build a site in a box, and show on real TCP what its circuits do.",
    "fabric allocate": "Say how many circuits each pair of endpoints gets, so that the slowest pair ends soonest.",
    "fabric place": "Say which switch and which ports carry each circuit.",
    "fabric transition": (
        "Say in which stages cross-connects are changed, so that no pair goes dark and every endpoint keeps bandwidth."
    ),
    "balancer pause": "Hold the fast loop's moves; an operator's own go on, until resumed or expired.",
    "balancer resume": "Let it go on.",
    "sync pause": (
        "Hold weight syncs: none begins, and no circuits are changed for one; what is under way goes on, "
        "until resumed or expired."
    ),
    "sync resume": "Let it go on.",
    "sync plan": "Plan a tree broadcast of new weights: who sends which bytes to whom, in waves.",
    "sync peer": "Hold weights on one host: receive versions, pass them on, and install them into the engines here.",
    "sync box": "Bring weights to engines in a box, by a planned tree and by what it is compared with, on real TCP.",
    "sync status": (
        "Show the fleet's version, the sync under way and who is late in it, engines without it, and all peers."
    ),
    "sync history": (
        "List what became of the latest versions: seconds in all, of the transfer and of installing, and "
        "against its plan."
    ),
    "sync profile": "Show where the time of a version went, phase by phase, and what to do about it.",
    "sync watch": "Follow a sync until it is over. Ctrl-C leaves it running.",
    "sync abort": "End a sync that is not committed: every engine keeps the version that it has, or gets it back.",
    "sync install": (
        "Install now what is on every host and waits for the pause barrier to be closed (`install: next_pause`)."
    ),
    "sync publish": (
        "Publish a checkpoint: a folder of safetensors files, one or sharded, as Hugging Face's libraries write them."
    ),
    "ocs list": "List the switches: what they are, and whether they answer.",
    "ocs show": "Show one switch: its circuits with their state, and the ports that are not as they should be.",
    "ocs connect": "Connect ports, all of them or none.",
    "ocs disconnect": (
        "Disconnect ports. Each pair must name the circuit as it is; one that is gone already is no fault."
    ),
    "ocs confirm": (
        "Keep what was changed with --revert-in-s. Exit status 1 where nothing is on trial, or it was undone already."
    ),
    "ocs take-over": "Make circuits ours that somebody else made. From then on they may be evicted and taken down.",
    "ocs verify": (
        "Compare what the switches and ToRs see with the site: which circuit or cable is not where it should be?"
    ),
    "ocs emulate": (
        "Serve an emulated switch until SIGTERM. Its address is the first line of output, then how to configure it."
    ),
    "ocs conformance": "Check that a driver does with your switch what every driver must do.",
}

_PANELS = {
    SERVICES: "daemon gateway agent",
    RUNNING_DAEMON: "status workers requests mode move top pause renew resume barrier cancel moves redeploy journal",
}
PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}

# Modules of orchestrrl.cli, for commands that are not in the module of their own name.
_MODULES = {
    "daemon": ["check-config"],
    "demo.demo": ["demo"],
    "fleet.status": ["status", "workers", "requests", "mode", "move"],
    "fleet.top": ["top"],
    "fleet.pause": ["pause", "renew", "resume", "barrier", "cancel", "engines set-version"],
    "fleet.pause_loops": [f"{part} {verb}" for part in ("balancer", "fabric", "sync") for verb in ("pause", "resume")],
    "fleet.moves": ["moves"],
    "fleet.redeploy": ["redeploy"],
    "fleet.balance": ["balance"],
    "fleet.engine": ["engine simulated"],
    "fleet.engines": ["engines list", "engines add", "engines drain", "engines remove"],
    "plan.live": [f"plan {verb}" for verb in ("explain", "list", "override", "pin", "release")],
    "profile.score": ["profile fit"],
    "profile.measure": ["profile import", "profile show"],
    "fabric.live": [
        f"fabric {verb}" for verb in ("status", "periods", "announce", "pin", "override", "release", "mask")
    ],
    "sync.live": [f"sync {verb}" for verb in ("status", "history", "profile", "watch", "abort", "install")],
    "ocs.live": [f"ocs {verb}" for verb in ("list", "show", "connect", "disconnect", "confirm", "take-over")],
    "sim.generation": ["sim gen"],
    "sim.cluster": ["sim run", "sim compare", "sim report", "sim daemon-config"],
}
MODULE_OF = {path: path.replace(" ", ".") for path in COMMANDS}
MODULE_OF |= {path: module for module, paths in _MODULES.items() for path in paths}
