"""Settings of the client, from the environment: TIDEWHEEL_SERVER, TIDEWHEEL_TIMEOUT_S."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_PORT = 8420


class ClientSettings(BaseSettings):
    """Where the API is, and how long one call may take."""

    model_config = SettingsConfigDict(env_prefix="TIDEWHEEL_", extra="ignore")

    server: str = Field(default=f"http://127.0.0.1:{DEFAULT_PORT}", pattern=r"^https?://[^/\s]+$")
    timeout_s: float = Field(default=15.0, gt=0, le=3600)  # longer than the API itself waits for a decision
