"""Loading a configuration file: the result is one configuration, or every fault at once."""

from pathlib import Path

import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.example import EXAMPLE
from orchestrrl.core.config.schema import Config
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.daemon.configuration import ReloadableConfig, load_config, parse_config
from orchestrrl.fleet.launch import deployer_of, start_faults
from planner.model import ConfigurationId, Mode


def faults_in(text: str) -> list[str]:
    with pytest.raises(ProblemFaults) as caught:
        parse_config(text)
    return caught.value.faults


def test_empty_file_gives_defaults_in_mode_advise() -> None:
    assert parse_config("") == Config()
    assert parse_config("").mode is Mode.ADVISE


def test_engines_with_equal_urls_are_refused() -> None:
    engines = ", ".join(
        f'{{id: e{index}, url: "{url}"}}'
        for index, url in enumerate(
            ("http://localhost:8001", "http://127.0.0.1:8001/", "http://[::1]:8001", "http://GPU7", "http://gpu7:80/")
        )
    )
    assert faults_in(f"fleet: {{engines: [{engines}]}}") == [
        "fleet.engines[1].url: must not be that of fleet.engines[0], got 'http://127.0.0.1:8001/'",
        "fleet.engines[4].url: must not be that of fleet.engines[3], got 'http://gpu7:80/'",
    ]


def test_empty_section_gives_defaults() -> None:
    assert parse_config("fleet:\nfast: null\nmetrics:") == Config()


def test_example_is_valid_and_shows_defaults() -> None:
    example = parse_config(EXAMPLE)
    defaults = Config()
    assert (example.mode, example.listen, example.journal) == (defaults.mode, defaults.listen, defaults.journal)
    assert (example.fast, example.slow) == (defaults.fast, defaults.slow)
    assert [c.id for c in example.fleet.configuration_values()] == [ConfigurationId("tp2"), ConfigurationId("tp4")]


def test_former_settings_without_effect_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_config("fast: {settle_share: 0.5, preemption_risk: 0.2, tolerance: 0.1}").fast.tolerance == 0.1
    assert "remove them: settle_share, preemption_risk" in caplog.text
    parse_config("weights: {seeds_per_pod: 2}")
    assert "remove them: seeds_per_pod" in caplog.text
    assert faults_in("fast: {settle: 0.5}")


def test_all_faults_are_reported_with_path_and_value() -> None:
    assert faults_in(
        """
        mode: sometimes
        listen: {address: "0.0.0.0:7070", port: 3}
        fast: {interval_s: -3, theta: .nan, max_moves_per_tick: yes}
        journal: {max_entries: 10}
        fleet:
          gpus: {count: 2}
          configurations: [{id: tp2}]
          engines:
            - {id: a, url: "ftp://x", gpus: [0, 5], configuration: tp9}
            - {id: a, url: "http://x", gpus: [0]}
        ocs: [{id: o1, driver: virtual, timeout_s: 3}]
        """
    ) == [
        "mode: should be 'advise' or 'act', got 'sometimes'",
        "listen.address: is not a loopback address; set listen.allow_remote: true to serve other machines, "
        "got '0.0.0.0:7070'",
        "listen.port: is not a known field, got 3",
        "journal.max_entries: must be >= 1000, got 10",
        "fast.interval_s: must be > 0, got -3",
        "fast.theta: must be >= 0, got nan",
        "fast.max_moves_per_tick: should be a valid integer, got True",
        "fleet.configurations[0].gpus: is missing, got nothing",
        "fleet.configurations[0].alpha_s: is missing, got nothing",
        "fleet.configurations[0].beta_s: is missing, got nothing",
        "fleet.configurations[0].gamma_s: is missing, got nothing",
        "fleet.configurations[0].kv_capacity_tokens: is missing, got nothing",
        "fleet.configurations[0].max_sequences: is missing, got nothing",
        "fleet.configurations[0].prefill_tokens_per_s: is missing, got nothing",
        "fleet.configurations[0].switch_s: is missing, got nothing",
        "fleet.engines[0].url: must be an http:// or https:// URL, got 'ftp://x'",
        "ocs[0].timeout_s: is not a known field, got 3",
        "fleet.engines[1].id: must not be the id of fleet.engines[0], got 'a'",
        "fleet.engines[0].configuration: must be one of fleet.configurations (tp2), got 'tp9'",
        "fleet.engines[0].gpus[1]: must be less than fleet.gpus.count (2), got 5",
        "fleet.engines[1].gpus[0]: must not be in use by fleet.engines[0], got 0",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[1, 2]", "(document): must be a mapping of sections, got [1, 2]"),
        ("7", "(document): must be a mapping of sections, got 7"),
        ("listen: {address: 'localhost'}", "listen.address: must be HOST:PORT with a port of 0 to 65535"),
        ("listen: {address: '127.0.0.1:70000'}", "listen.address: must be HOST:PORT with a port of 0 to 65535"),
        ("mode: act\nmode: advise", "(document): is not valid YAML: found duplicate key"),
        ("mode: [", "(document): is not valid YAML: while parsing"),
        ("? [a]\n: 1", "(document): is not valid YAML: while constructing a mapping"),
        ("? {a: 1}\n: 1", "(document): is not valid YAML: while constructing a mapping"),
        ("1: 2", "[1]: Keys should be strings, got 1"),
        ("fleet: {engines: 3}", "fleet.engines: should be a valid tuple, got 3"),
        ("fleet: 3", "fleet: should be an object, got 3"),
        ("ocs: [3]", "ocs[0]: should be an object, got 3"),
    ],
)
def test_invalid_documents_are_reported_as_faults(text: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults_in(text)), faults_in(text)


@pytest.mark.parametrize("section", ["listen", "metrics"])
@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7070", "[::1]:7070", "127.8.8.8:1"])
def test_loopback_address_needs_no_allow_remote(section: str, address: str) -> None:
    assert getattr(parse_config(f"{section}: {{address: '{address}'}}"), section).address == address


@pytest.mark.parametrize("section", ["listen", "metrics"])
@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:0", "gpu7:7070"])
def test_allow_remote_permits_other_addresses(section: str, address: str) -> None:
    permission = f"set {section}.allow_remote: true to serve other machines"
    fault = f"{section}.address: is not a loopback address; {permission}, got {address!r}"
    assert faults_in(f"{section}: {{address: '{address}'}}") == [fault]
    allowed = parse_config(f"{section}: {{address: '{address}', allow_remote: true}}")
    assert getattr(allowed, section).allow_remote


def test_small_numbers_need_no_decimal_point() -> None:
    assert parse_config("fast: {theta: 1e-4}").fast.theta == 0.0001


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")


PROFILE = """
model: m
gpu: g
engine: vllm
configurations:
  - id: tp2
    parallelism: {tp: 2}
    step_s: {sequences: [1, 1001], seconds: [0.02, 0.12], per_kv_token: 4e-8}
    prefill_tokens_per_s: 18000
    kv_capacity_tokens: 582885
    max_sequences: 1024
    switch_s: 1.7
    provenance: {source: measured, date: 2026-01-31}
"""


class TestProfile:
    def test_profile_configurations_are_added(self, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text(PROFILE)
        (tmp_path / "c.yaml").write_text(
            "fleet: {profile: p.yaml, gpus: {count: 2}, engines: [{id: a, url: 'http://x', configuration: tp2}]}"
        )
        fleet = load_config(tmp_path / "c.yaml").fleet
        (configuration,) = fleet.configuration_values()
        assert (configuration.id, configuration.gpus, configuration.gamma_s) == ("tp2", 2, 4e-8)
        assert configuration.beta_s == pytest.approx(1e-4)
        assert fleet.profile_value() is not None

    def test_profile_faults_are_reported_with_all_others(self, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text(PROFILE)
        (tmp_path / "bad.yaml").write_text(PROFILE.replace("1.7", "-1"))
        with pytest.raises(ProblemFaults) as caught:
            parse_config("fleet: {profile: p.yaml, configurations: [{id: tp2}]}", tmp_path)
        assert caught.value.faults[-1] == (
            "fleet.configurations[0].id: must not be the id of a configuration of fleet.profile, got 'tp2'"
        )
        with pytest.raises(ProblemFaults) as caught:
            parse_config("fleet: {profile: bad.yaml}\nslow: {interval_s: 0}", tmp_path)
        assert caught.value.faults == [
            "slow.interval_s: must be > 0, got 0",
            "fleet.profile: bad.yaml: configurations[0].switch_s: must be >= 0, got -1",
        ]

    def test_kv_transfer_costs_must_be_set_or_in_profile(self, tmp_path: Path) -> None:
        moves = "moves: {kv_bytes_per_token: 196608, transfer_s: {bytes: [0, 1.0e+10], seconds: [0.01, 0.41]}, \
recompute_s: {tokens: [0, 8192], seconds: [0.0, 0.46]}}"
        (tmp_path / "p.yaml").write_text(f"{PROFILE}{moves}\n")
        assert parse_config("fleet: {profile: p.yaml, kv_transfer: {}}", tmp_path).fleet.kv_transfer is not None
        (tmp_path / "q.yaml").write_text(PROFILE)
        with pytest.raises(ProblemFaults) as caught:
            parse_config("fleet: {profile: q.yaml, kv_transfer: {latency_s: -1.0}}", tmp_path)
        missing = "must be given if fleet.profile has no costs of moves, got nothing"
        assert caught.value.faults == [
            "fleet.kv_transfer.latency_s: must be >= 0, got -1.0",
            f"fleet.kv_transfer.inter_node_gbps_per_gpu: {missing}",
            f"fleet.kv_transfer.kv_bytes_per_token: {missing}",
        ]
        assert parse_config("").fleet.kv_transfer is None

    def test_a_missing_file_is_a_fault(self, tmp_path: Path) -> None:
        with pytest.raises(ProblemFaults, match=r"^fleet\.profile: .*absent\.yaml: No such file"):
            parse_config("fleet: {profile: absent.yaml}", tmp_path)

    def test_reload_reads_changed_profile(self, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text(PROFILE)
        (tmp_path / "c.yaml").write_text("fleet: {profile: p.yaml}")
        file = ReloadableConfig.load(tmp_path / "c.yaml")
        before = file.config
        (tmp_path / "p.yaml").write_text(PROFILE.replace("1.7", "2.5"))
        assert file.reload() != before
        assert [c.switch_s for c in file.config.fleet.configuration_values()] == [2.5]


class TestReload:
    def test_reload_of_invalid_file_keeps_configuration(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("fast: {theta: 0.5}")
        file = ReloadableConfig.load(path)
        path.write_text("fast: {theta: -1}")
        with pytest.raises(ProblemFaults, match=r"fast\.theta: must be >= 0, got -1"):
            file.reload()
        assert file.config.fast.theta == 0.5

    def test_reload_keeps_sockets_and_files(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("fast: {theta: 0.5}")
        file = ReloadableConfig.load(path)
        bound = "listen: {address: '127.0.0.1:1'}\njournal: {path: x}\nweights: {attempts: 1}"
        path.write_text(f"fast: {{theta: 0.6}}\n{bound}")
        with pytest.raises(ProblemFaults) as caught:
            file.reload()
        assert caught.value.faults == [
            "listen: cannot change while the daemon runs",
            "journal: cannot change while the daemon runs",
            "weights: cannot change while the daemon runs",
        ]

    def test_reload_applies_valid_file(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("mode: advise")
        file = ReloadableConfig.load(path)
        path.write_text("mode: act")
        assert file.reload().mode is Mode.ACT


def test_deployment_that_cannot_start_is_a_fault() -> None:
    text = """
fleet:
  gpus: {count: 2}
  configurations:
    - {id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 1000, max_sequences: 4,
       prefill_tokens_per_s: 400, switch_s: 1.5}
  launch: {model: m, arguments: [--tensor-parallel-size, "3"]}
  deployer: {product: local, options: {grace_s: -1}}
"""
    config = parse_config(text)
    (fault,) = start_faults(config)
    assert "--tensor-parallel-size" in fault
    with pytest.raises(ProblemFaults, match=r"fleet\.deployer\.options\.grace_s"):
        deployer_of(config, WallClock())
    with pytest.raises(ProblemFaults) as told:
        parse_config("fleet: {deployer: {product: local}}")
    assert told.value.faults == [
        "fleet.launch: must be given if fleet.deployer is given, got nothing",
        "fleet.gpus: must be given if fleet.deployer is given, got nothing",
    ]


def test_unknown_field_suggests_similar_field() -> None:
    assert faults_in(
        """
        fsat: {}
        fast: {intervall_s: 1.0}
        fleet:
          kv_transfer: {latency: 0.1, inter_node_gbps_per_gpu: 1.0, kv_bytes_per_token: 1.0}
          engines: [{id: a, url: "http://x", gpu: [0]}]
          deployer: {product: lokal, optoins: {}}
        weights: {network: {pods: [{id: a, boundary_circuit: 1}]}}
        """
    ) == [
        "fast.intervall_s: is not a known field, got 1.0; did you mean interval_s?",
        "fleet.kv_transfer.latency: is not a known field, got 0.1; did you mean latency_s?",
        "fleet.engines[0].gpu: is not a known field, got [0]; did you mean gpus?",
        "fleet.deployer.optoins: is not a known field, got {}; did you mean options?",
        "weights.network.pods[0].boundary_circuits: is missing, got nothing",
        "weights.network.pods[0].boundary_circuit: is not a known field, got 1; did you mean boundary_circuits?",
        "fsat: is not a known field, got {}; did you mean fast?",
        "fleet.deployer.product: must be one of kubernetes, local, ray, got 'lokal'; did you mean local?",
        "fleet.launch: must be given if fleet.deployer is given, got nothing",
        "fleet.gpus: must be given if fleet.deployer is given, got nothing",
    ]


def test_switch_and_deployer_faults_are_reported_with_others(tmp_path: Path) -> None:
    path = tmp_path / "orchestrrl.yaml"
    path.write_text(
        """
        mode: sometimes
        ocs: [{id: o1, driver: scpy, options: {}}, {id: o2, driver: scpi, options: {adress: x}}]
        fleet:
          gpus: {count: 2}
          launch: {engine: simulated}
          deployer: {product: local, options: {nonsense: 1}}
        """
    )
    with pytest.raises(ProblemFaults) as caught:
        load_config(path, with_parts=True)
    mode, unknown, missing, option, deployer = caught.value.faults
    assert mode == "mode: should be 'advise' or 'act', got 'sometimes'"
    assert unknown.startswith("ocs[0].driver: must be one of ")
    assert option.startswith("ocs[1].options.adress: is not known (known: address")
    assert missing == "ocs[1].options.address: is missing"
    assert deployer.startswith("fleet.deployer.options.nonsense: is not a known field, got 1")
