"""Where settings come from, which one wins, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from cache.api import BlockSettings, PrefixOptions, RedisSettings
from engine.settings import EngineOptions, EngineSettings, FakeSettings, PrefixSwitches
from service.config.settings import BadSettings, Settings
from service.config.sources import load

FAKE = ["--engine=fake"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return f"--config={path}"


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    config = write(
        tmp_path / "c.yaml",
        "scheduler: {max_sequences: 3, max-batch-tokens: 300, threads: 1}\nlimits: {queued_requests: 7}\n",
    )
    env = {"WHIPPET_SCHEDULER__MAX_SEQUENCES": "4", "WHIPPET_SCHEDULER__MAX_BATCH_TOKENS": "400"}
    settings = load([*FAKE, config, "--scheduler.max-sequences=5"], env)
    assert settings.scheduler.max_sequences == 5
    assert settings.scheduler.max_batch_tokens == 400
    assert settings.scheduler.threads == 1
    assert settings.limits.queued_requests == 7
    assert settings.stream.stall_timeout == 30.0


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    write(tmp_path / "c.yaml", "engine: fake\nmodel_name: from-file\n")
    assert load([], {"WHIPPET_CONFIG": str(tmp_path / "c.yaml")}).served_name == "from-file"


def test_defaults_listen_on_the_loopback_alone() -> None:
    settings = load(FAKE, {})
    assert settings.listen == "127.0.0.1:50051"
    assert settings.admin_listen == "127.0.0.1:50052"
    assert settings.health_listen == "127.0.0.1:50053"


@pytest.mark.parametrize(
    ("argv", "env", "yaml", "named"),
    [
        (["--nope=1"], {}, "", "--nope"),
        (["--scheduler.nope=1"], {}, "", "--scheduler.nope"),
        (["--sched"], {}, "", "--sched"),
        ([], {"WHIPPET_NOPE": "1"}, "", "WHIPPET_NOPE"),
        ([], {"WHIPPET_SCHEDULER__NOPE": "1"}, "", "WHIPPET_SCHEDULER__NOPE"),
        ([], {"WHIPPET_SCHEDULER": "1"}, "", "WHIPPET_SCHEDULER"),
        ([], {"WHIPPET_LISTEN__HOST": "1"}, "", "WHIPPET_LISTEN__HOST"),
        ([], {}, "nope: 1", "nope"),
        ([], {}, "scheduler: {nope: 1}", "scheduler.nope"),
        ([], {}, "scheduler: 5", "scheduler"),
        ([], {}, "[1, 2]", "mapping"),
        ([], {}, "a: [", "YAML"),
        ([], {}, "1: 2", "mapping"),
        (["--scheduler.max-sequences=0"], {}, "", "scheduler.max-sequences"),
        (["--scheduler.max-sequences=many"], {}, "", "scheduler.max-sequences"),
        (["--stream.stall-timeout=nan"], {}, "", "stream.stall-timeout"),
        (["--stream.stall-timeout=0"], {}, "", "stream.stall-timeout"),
        (["--listen=nowhere"], {}, "", "listen"),
        (["--listen=host:99999"], {}, "", "listen"),
        (["--admin-listen=:50052"], {}, "", "admin-listen"),
        (["--tls.key=k"], {}, "", "tls"),
        (["--tls.client-ca=c"], {}, "", "tls"),
        (["--optimizations.batching=perhaps"], {}, "", "optimizations.batching"),
        (["--load-format=gguf"], {}, "", "load-format"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    tmp_path: Path, argv: list[str], env: dict[str, str], yaml: str, named: str
) -> None:
    with pytest.raises(BadSettings, match=named) as caught:
        load([*FAKE, write(tmp_path / "c.yaml", yaml), *argv], env)
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadSettings) as caught:
        load([*FAKE, "--listen=x", "--scheduler.max-sequences=0", "--limits.queued-requests=-1"], {})
    assert all(name in str(caught.value) for name in ("listen", "scheduler.max-sequences", "limits.queued-requests"))


@pytest.mark.parametrize("service", ["WHIPPET", "WHIPPET_GRPC", "WHIPPET_TEAM_2"])
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00:10:96::5a1e"])
def test_what_kubernetes_injects_is_none_of_ours(service: str, address: str) -> None:
    env = {
        "SERVICE_HOST": address,
        "SERVICE_PORT": "50051",
        "SERVICE_PORT_GRPC": "50051",
        "PORT": f"tcp://{address}:50051",
        "PORT_50051_TCP": f"tcp://{address}:50051",
        "PORT_50051_TCP_PROTO": "tcp",
        "PORT_50051_TCP_PORT": "50051",
        "PORT_50051_TCP_ADDR": address,
    }
    assert load(FAKE, {f"{service}_{name}": value for name, value in env.items()}) == load(FAKE, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WHIPPET_PORT", "50051"),
        ("WHIPPET_GRPC_SERVICE_HOST", "example.org"),
        ("WHIPPET_SERVICE_PORTS", "50051"),
        ("WHIPPET_GRPC_PORT_50051_TCP_ADDR", "tcp"),
        ("WHIPPET_METRICS_PORT", "9090"),
    ],
)
def test_what_only_looks_like_it_is_refused(name: str, value: str) -> None:
    with pytest.raises(BadSettings, match=name):
        load(FAKE, {name: value})


def test_a_model_is_needed_unless_the_engine_is_fake() -> None:
    with pytest.raises(BadSettings, match="--model"):
        load([], {})
    assert load(["--model=/some/where/tiny"], {}).served_name == "tiny"
    assert load(FAKE, {}).served_name == "fake"


@pytest.mark.parametrize(("text", "value"), [("on", True), ("off", False), ("true", True), ("no", False)])
def test_switches_read_as_people_write_them(text: str, value: bool) -> None:
    assert load([*FAKE, f"--optimizations.batching={text}"], {}).optimizations.batching is value
    assert load(FAKE, {"WHIPPET_OPTIMIZATIONS__BATCHING": text}).optimizations.batching is value


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("--tensor-parallel=4", "less than tensor-parallel"),
        ("--engine.ranks-listen=0.0.0.0:1", "needs engine.ranks-listen"),
        ("--engine.ranks-secret-file=a", "and engine.ranks-secret-file"),
    ],
)
def test_ranks_elsewhere_need_to_know_where_and_what_to_prove(lacking: str, words: str) -> None:
    flags = ["--tensor-parallel=4", "--engine.ranks-listen=0.0.0.0:1", "--engine.ranks-secret-file=a"]
    given = ["--model=x", "--engine.ranks-elsewhere=3"]
    assert load([*given, *flags], {}).engine.ranks_elsewhere == 3
    with pytest.raises(BadSettings, match=words):
        load([*given, *(flag for flag in flags if flag != lacking)], {})
    with pytest.raises(BadSettings, match="HOST:PORT"):
        load([*given, *flags, "--engine.ranks-listen=nowhere"], {})
    with pytest.raises(BadSettings, match="less than tensor-parallel"):
        load([*given, *flags, "--tensor-parallel=3"], {})


def test_settings_cannot_be_written_to() -> None:
    settings = load(FAKE, {})
    with pytest.raises(FrozenInstanceError):
        settings.model = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        settings.scheduler.max_sequences = 2  # type: ignore[misc]


def test_every_setting_of_the_engine_comes_from_the_tree(tmp_path: Path) -> None:
    """No field of EngineSettings can be forgotten: each one changes with some flag."""
    flags = {
        "model": "--model=m",
        "model_digest": f"--model-digest=sha256:{'0' * 64}",
        "kind": "--engine=model",
        "hang_timeout": "--engine.hang-timeout=9",
        "give_up": "--engine.give-up=9",
        "ranks_elsewhere": "--engine.ranks-elsewhere=1",
        "ranks_listen": "--engine.ranks-listen=0.0.0.0:2",
        "ranks_secret_file": "--engine.ranks-secret-file=b",
        "record_steps": "--engine.record-steps=on",
        "log_level": "--log-level=debug",
        "log_format": "--log.format=json",
        "device": "--device=cpu",
        "dtype": "--dtype=float32",
        "decoder": "--decoder=eager",
        "load_format": "--load-format=dummy",
        "quantization": "--quantization=int8",
        "kv_dtype": "--kv-dtype=fp8",
        "max_sequences": "--scheduler.max-sequences=9",
        "max_batch_tokens": "--scheduler.max-batch-tokens=99",
        "target_tpot": "--scheduler.target-tpot=20",
        "max_context": "--scheduler.max-context=99",
        "kv_bytes": "--scheduler.kv-bytes=99999999",
        "threads": "--scheduler.threads=3",
        "tensor_parallel": "--tensor-parallel=2",
        "seed": "--seed=9",
        "draft_model": "--draft-model=y",
        "batching": "--optimizations.batching=off",
        "graphs": "--optimizations.graphs=off",
        "fused_kernels": "--optimizations.fused-kernels=off",
        "speculation": "--optimizations.speculation=off",
        "two_pass_head": "--optimizations.two-pass-head=off",
        "prefix_cache": "--optimizations.prefix-cache=off",
        "prefix_redis": "--optimizations.prefix-redis=off",
        "shared_tier": "--cache.prefix.ttl=9",
        "fake": "--fake.step-time=0.5",
    }
    assert set(flags) == set(EngineSettings.__dataclass_fields__)
    given = ["--model=x", "--engine=fake", "--cache.redis-url=redis://localhost", f"--cache.key-file={tmp_path}/keys"]
    given += ["--tensor-parallel=4", "--engine.ranks-listen=0.0.0.0:1", "--engine.ranks-secret-file=a"]
    base = load(given, {}).engine_settings()
    for name, flag in flags.items():
        changed = load([*given, flag], {}).engine_settings()
        assert getattr(changed, name) != getattr(base, name), name
    for name in FakeSettings.__dataclass_fields__:
        value = {"vocab_size": "300", "max_context": "99", "total_pages": "9", "tokens_per_step": "3"}.get(name, "1")
        changed = load(["--engine=fake", f"--fake.{name.replace('_', '-')}={value}"], {}).engine_settings()
        assert getattr(changed.fake, name) != getattr(base.fake, name), name


def test_every_setting_of_shared_prefixes_comes_from_the_tree(tmp_path: Path) -> None:
    redis = [*FAKE, "--cache.redis-url=redis://localhost", f"--cache.key-file={tmp_path}/keys"]

    def tier(*flags: str) -> BlockSettings:
        settings = load([*redis, *flags], {}).engine_settings().shared_tier
        assert settings is not None
        return settings

    base = tier()
    assert base.redis.url == "redis://localhost"
    assert base == BlockSettings(redis=RedisSettings(url="redis://localhost"), key_file=tmp_path / "keys")
    assert {one.name for one in fields(PrefixOptions)} == {"ttl", "chunk_bytes", "min_tokens"}  # each has a line below
    assert tier("--cache.redis-url=redis://other").redis.url == "redis://other"
    assert tier("--cache.redis-password-file=p").redis.password_file == Path("p")
    assert tier("--cache.redis-ca-file=c").redis.ca_file == Path("c")
    named = tier("--cache.redis-url=rediss://h", "--cache.redis-cert-file=c", "--cache.redis-key-file=k").redis
    assert (named.cert_file, named.key_file) == (Path("c"), Path("k"))
    watched = tier("--cache.redis-sentinels=a:1,b", "--cache.redis-sentinel-password-file=s").redis
    assert (watched.sentinels, watched.sentinel_password_file) == ("a:1,b", Path("s"))
    assert tier("--cache.redis-budget=0.5").redis.budget == 0.5
    assert tier("--cache.key-file=other").key_file == Path("other")
    assert tier("--cache.prefix.ttl=9").ttl == 9
    assert tier("--cache.prefix.chunk-bytes=65536").chunk_bytes == 65536
    assert tier("--cache.prefix.min-tokens=32").min_tokens == 32
    both_on, switches = load(redis, {}).engine_settings(), [one.name for one in fields(PrefixSwitches)]
    assert switches == ["prefix_cache", "prefix_redis"]
    for name in switches:
        off = load([*redis, f"--optimizations.{name.replace('_', '-')}=off"], {}).engine_settings()
        assert (getattr(both_on, name), getattr(off, name)) == (True, False)
    without_keys = load(redis[:-1], {}).engine_settings().shared_tier
    assert without_keys is None, "what no other engine could open is not worth writing"


def test_the_engine_takes_a_plain_word_or_a_group(tmp_path: Path) -> None:
    word, group = "engine: fake\n", "engine: {kind: fake, record-steps: true}\n"
    assert load([write(tmp_path / "c.yaml", word)], {}).engine == EngineOptions(kind="fake")
    assert load([write(tmp_path / "c.yaml", group)], {}).engine == EngineOptions(kind="fake", record_steps=True)
    assert load([], {"WHIPPET_ENGINE": "fake"}).engine == EngineOptions(kind="fake")
    assert load([], {"WHIPPET_ENGINE__KIND": "fake"}).engine == EngineOptions(kind="fake")
    assert load(["--engine.kind=fake"], {}).engine == EngineOptions(kind="fake")
    both = [*FAKE, write(tmp_path / "c.yaml", "engine: model\n")]
    recorded = load(both, {"WHIPPET_ENGINE__RECORD_STEPS": "true"}).engine
    assert recorded == EngineOptions(kind="fake", record_steps=True)
    off = load([*both, "--engine.record-steps=off"], {"WHIPPET_ENGINE__RECORD_STEPS": "1"})
    assert off.engine.record_steps is False
    for wrong, named in (("[fake]", "^engine: "), ("{nope: 1}", "^engine.nope: "), ("diesel", "^engine: ")):
        with pytest.raises(BadSettings, match=named):
            load([write(tmp_path / "c.yaml", f"engine: {wrong}\n")], {})


def test_the_fake_engine_speaks_the_tokenizers_ids() -> None:
    assert load(FAKE, {}).engine_settings(8192).fake.vocab_size == 8192


def test_the_tree_reads_no_environment_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIPPET_MODEL", "from-outside")
    monkeypatch.setenv("MODEL", "from-outside")
    assert Settings(engine=EngineOptions(kind="fake")).model is None
