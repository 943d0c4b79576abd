"""The only door to Grafana: a few verbs on top of grafana-api, with errors that say what to do.

    target = Target.from_environment(os.environ)          url and token, from $SENTINEL_GRAFANA_*
    with GrafanaPort(target) as grafana:
        grafana.folder("sentinel") · save_dashboard(...) · put_rule_group(...) · annotate(...)

grafana-api knows dashboards, folders and annotations but not unified alerting, which is reached
through its raw client. Nothing else in sentinel talks to Grafana.

Units:   annotation times in Unix seconds.
Threads: one at a time; each thread its own port.
Errors:  GrafanaError, with the status and whether trying again can help. A token appears in no
         message and no repr.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

from sentinel.core.errors import ConfigError, SentinelError

URL_VARIABLE = "SENTINEL_GRAFANA_URL"
TOKEN_VARIABLE = "SENTINEL_GRAFANA_TOKEN"  # noqa: S105 (the name of a variable)
TOKEN_FILE_VARIABLE = "SENTINEL_GRAFANA_TOKEN_FILE"  # noqa: S105
TIMEOUT_S = 10.0

_HINTS = {
    401: "the token is not accepted: make a service account token in Grafana (Administration, "
    f"Service accounts) and give it by --token-file, ${TOKEN_FILE_VARIABLE} or ${TOKEN_VARIABLE}",
    403: "the token may not do that: its service account needs the role Editor (folders, "
    "dashboards, annotations) and, for alert rules, the permission alert.provisioning:write",
    404: "there is no such thing, or this address is not Grafana's: check the URL and its path",
    409: "it conflicts with what is there: a rule group that was made in Grafana's own pages or "
    "provisioned from files has to be deleted there first",
    412: "it was changed in Grafana while this ran: look at it (sentinel dashboards diff), then "
    "push again",
}


class GrafanaError(SentinelError):
    """Grafana could not be asked, or refused.

    Attributes:
        status: HTTP status, 0 when there was no answer.
        transient: whether the same request may succeed later.
    """

    def __init__(self, message: str, status: int = 0, *, transient: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient


@dataclass(frozen=True, slots=True)
class Target:
    """Which Grafana, and as whom.

    Attributes:
        url: http(s)://host[:port][/path], without user and password.
        token: of a service account.
    """

    url: str
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"grafana url cannot be read: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(
                "grafana url must look like https://grafana.example:3000/path, "
                f"got {parts.scheme!r} as scheme and {parts.hostname!r} as host"
            )
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                "grafana url must hold neither user, password, query nor fragment: the token "
                f"goes into ${TOKEN_FILE_VARIABLE} or ${TOKEN_VARIABLE}"
            )
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise ConfigError("grafana token must be printable ASCII without spaces")
        if not self.token:
            raise ConfigError(f"grafana token is missing: {_HINTS[401].partition(': ')[2]}")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, url: str = "", token_file: str = ""
    ) -> Target:
        """The target that arguments and environment name, arguments first.

        Raises:
            ConfigError: there is none, or the file with the token cannot be read.
        """
        chosen = url or environment.get(URL_VARIABLE, "")
        if not chosen:
            raise ConfigError(f"grafana url is missing: give --url or ${URL_VARIABLE}")
        file = token_file or environment.get(TOKEN_FILE_VARIABLE, "")
        if not file:
            return cls(chosen, environment.get(TOKEN_VARIABLE, "").strip())
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"cannot read the grafana token from {file}: {reason}") from None
        return cls(chosen, token)


class GrafanaPort:
    """See the module docstring."""

    def __init__(self, target: Target, *, timeout_s: float = TIMEOUT_S) -> None:
        try:
            from grafana_api.grafana_face import GrafanaFace
        except ModuleNotFoundError as error:
            raise GrafanaError(
                f"talking to Grafana needs {error.name}, which is not installed here; install it "
                "with: pip install 'torch-sentinel[grafana]'"
            ) from error
        parts = urlsplit(target.url)
        assert parts.hostname is not None
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path.strip("/")
        self._where = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._face = GrafanaFace(
            auth=target.token,
            host=host,
            port=parts.port,
            protocol=parts.scheme,
            url_path_prefix=f"{path}/" if path else "",
            timeout=timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._face.api.s.close()

    # ---- the verbs ------------------------------------------------------------------

    def folder(self, uid: str) -> dict[str, Any] | None:
        """The folder, None if there is none."""
        return self._get(f"/folders/{quote(uid, safe='')}")

    def create_folder(self, uid: str, title: str) -> None:
        """Make a folder."""
        self._ask("POST", "/folders", {"uid": uid, "title": title})

    def dashboard(self, uid: str) -> dict[str, Any] | None:
        """{"dashboard": ..., "meta": ...}, None if there is none."""
        return self._get(f"/dashboards/uid/{quote(uid, safe='')}")

    def save_dashboard(self, dashboard: dict[str, Any], folder: str, message: str) -> int:
        """Write a dashboard into a folder; returns its new version.

        Grafana compares dashboard["version"] with what it has: 412 when somebody was faster.
        """
        body = {
            "dashboard": dashboard,
            "folderUid": folder,
            "message": message,
            "overwrite": False,
        }
        saved = self._ask("POST", "/dashboards/db", body)
        return int(saved.get("version", 0))

    def rule_group(self, folder: str, name: str) -> dict[str, Any] | None:
        """The alert rule group, None if there is none."""
        return self._get(_group_path(folder, name))

    def put_rule_group(self, group: dict[str, Any]) -> None:
        """Write an alert rule group; rules that are not in it any more go."""
        self._ask("PUT", _group_path(group["folderUid"], group["title"]), group)

    def prometheus_sources(self) -> list[str]:
        """uids of the Prometheus data sources."""
        found = self._ask("GET", "/datasources")
        return [str(s["uid"]) for s in found if s.get("type") == "prometheus"]

    def annotate(self, at: float, text: str, tags: Sequence[str]) -> None:
        """Write a mark that dashboards find by its tags."""
        body = {"time": int(at * 1000), "text": text, "tags": list(tags)}
        self._ask("POST", "/annotations", body)

    def annotated(self, at: float, text: str, tags: Sequence[str]) -> bool:
        """Whether such a mark is there already."""
        ms = int(at * 1000)
        query = [("from", ms - 1), ("to", ms + 1), ("limit", 1000), *(("tags", t) for t in tags)]
        found = self._ask("GET", f"/annotations?{urlencode(query)}")
        return any(a.get("time") == ms and a.get("text") == text for a in found)

    # ---- asking ---------------------------------------------------------------------

    def _get(self, path: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._ask("GET", path)
        except GrafanaError as error:
            if error.status == 404:
                return None
            raise
        return found

    def _ask(self, verb: str, path: str, body: Any = None) -> Any:
        from grafana_api.grafana_api import GrafanaException
        from requests.exceptions import JSONDecodeError, RequestException

        try:
            return getattr(self._face.api, verb)(path, json=body)
        except GrafanaException as error:
            status = int(error.status_code)
            said = _said(error.response)
            hint = _HINTS.get(status, "")
            raise GrafanaError(
                f"Grafana at {self._where} refused {verb} {path} with {status}"
                + (f" ({said})" if said else "")
                + (f": {hint}" if hint else ""),
                status,
                transient=status >= 500 or status == 429,
            ) from None
        except JSONDecodeError:
            raise GrafanaError(
                f"{self._where} does not answer as Grafana does (no JSON): check the URL and its "
                "path, and whether a login page stands before it"
            ) from None
        except RequestException as error:
            raise GrafanaError(
                f"cannot reach Grafana at {self._where} ({type(error).__name__}): check the URL, "
                "the network and the certificate",
                transient=True,
            ) from None


def _group_path(folder: str, name: str) -> str:
    safe = quote(folder, safe=""), quote(name, safe="")
    return "/v1/provisioning/folder/{}/rule-groups/{}".format(*safe)


def _said(response: Any) -> str:
    """What Grafana gave as its reason; one line of bounded length."""
    text = response.get("message", "") if isinstance(response, dict) else str(response)
    return " ".join(str(text).split())[:200]
