"""Who may do what, how often, and what the answer tells a browser.

    access = Access.load([(Role.CONTROL, Path("/run/secrets/control"))], shared="")
    access.who("Bearer ...") -> Caller | None          constant time, whatever was brought
    files = TokenFiles([(Role.CONTROL, path)], shared="")   files.access follows what they hold
    Limits(per_minute=60, burst=20).wait("r7", now) -> seconds to wait, 0.0 when it may

A token has a name, which the audit log shows, and a role: `read` looks, `ingest` seals what a
trainer says, `control` looks and gives orders. Tokens come from files, one a line, as NAME TOKEN or
TOKEN alone (its name is then the role's), empty lines and lines beginning with # left out; so one
file may hold a rotation's old and new token. $SENTINEL_TOKEN is a token of every role, named
`shared`. Without any token nothing is asked for, and then nothing but loopback and the Unix socket
may be listened on, and orders are taken on the Unix socket only.

Files are read again while the sidecar runs; what they hold then counts from the next request on. As
one: where any of them makes no sense, or is gone, all the tokens of before stay, and `trouble` says
why. So a last token is not taken away by an empty file, but by another token.

Purity:  reading files aside, no clock and no I/O: `now` is an argument.
Errors:  ConfigError for a file that cannot be used; it names file and line, never a token.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path

from sentinel.core.errors import ConfigError

MIN_TOKEN = 16  # characters; shorter ones can be guessed at 100 tries a minute
MAX_TOKEN = 512
MAX_FILE_BYTES = 65536
SHARED = "shared"
LOCAL = "local"
KEYS = 4096  # callers or runs that one limit remembers


class Role(StrEnum):
    """What a token is good for."""

    READ = "read"
    INGEST = "ingest"
    CONTROL = "control"


_ALSO = {Role.READ: (), Role.INGEST: (), Role.CONTROL: (Role.READ,)}


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who is known.

    Attributes:
        name: the token's name, "local" on the Unix socket; for the audit log.
    """

    name: str
    roles: frozenset[Role]

    def may(self, role: Role) -> bool:
        """Whether a role is among theirs."""
        return role in self.roles


ANYONE = Caller(LOCAL, frozenset(Role))


@dataclass(frozen=True, slots=True)
class Token:
    """One token; its text stays out of every repr."""

    name: str
    roles: frozenset[Role]
    secret: str = field(repr=False)


class Access:
    """The tokens of one sidecar."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._tokens: tuple[Token, ...] = ()
        self._known: tuple[tuple[bytes, Caller], ...] = ()
        self.take(tokens)

    @classmethod
    def load(cls, files: Iterable[tuple[Role, Path]] = (), shared: str = "") -> Access:
        """The tokens of some files, and the shared one.

        Raises:
            ConfigError: a file cannot be read, a line makes no sense, or two tokens are equal.
        """
        return TokenFiles(files, shared).access

    def take(self, tokens: Iterable[Token]) -> None:
        """From now on these, and no other."""
        self._tokens = tuple(tokens)
        self._known = tuple((_digest(t.secret), Caller(t.name, t.roles)) for t in self._tokens)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """All of them."""
        return self._tokens

    @property
    def configured(self) -> bool:
        """Whether there is any token: then everybody needs one."""
        return bool(self._tokens)

    @property
    def seal_keys(self) -> tuple[str, ...]:
        """The keys with which a trainer's message may be sealed; one empty key without tokens."""
        if not self._tokens:
            return ("",)
        return tuple(t.secret for t in self._tokens if Role.INGEST in t.roles)

    def who(self, authorization: str) -> Caller | None:
        """The owner of `Authorization: Bearer TOKEN`; every token is compared, found or not."""
        scheme, _, given = authorization.partition(" ")
        # As digests of one length: neither length nor place of a difference shows in the time.
        digest = _digest(given.strip() if scheme.lower() == "bearer" else "")
        found: Caller | None = None
        for known, caller in self._known:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


@dataclass(frozen=True, slots=True)
class Changed:
    """What reading the files again has brought: names of tokens, never the tokens."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


class TokenFiles:
    """The tokens of some files, and the shared one; see the module docstring.

    read() touches the disk and nothing else, so that it may be called in a thread; take() applies
    what it gave.

    Attributes:
        access: what the newest sound contents say; always the same object.
        trouble: why the newest contents do not count; "" when they do.
    """

    def __init__(self, files: Iterable[tuple[Role, Path]] = (), shared: str = "") -> None:
        """Read them for the first time.

        Raises:
            ConfigError: a file cannot be read, a line makes no sense, or two tokens are equal.
        """
        self._files = tuple(files)
        self._shared = shared
        self.trouble = ""
        self._contents = self.read()
        self.access = Access(self._tokens(self._contents))

    def read(self) -> tuple[bytes | str, ...]:
        """What each file holds now; text says why it cannot be read."""
        return tuple(_bytes(path) for _, path in self._files)

    def take(self, contents: tuple[bytes | str, ...]) -> Changed | None:
        """From now on these; None when nothing changes, or they make no sense: see `trouble`."""
        if contents == self._contents:
            return None
        self._contents = contents
        try:
            tokens = self._tokens(contents)
        except ConfigError as error:
            self.trouble = str(error)
            return None
        self.trouble = ""
        before, after = set(self.access.tokens), set(tokens)
        if before == after:
            return None
        self.access.take(tokens)
        return Changed(
            tuple(sorted(token.name for token in after - before)),
            tuple(sorted(token.name for token in before - after)),
        )

    def _tokens(self, contents: tuple[bytes | str, ...]) -> list[Token]:
        found: list[Token] = []
        if self._shared:
            found.append(Token(SHARED, frozenset(Role), self._shared))
        for (role, path), held in zip(self._files, contents, strict=True):
            found.extend(_parse(role, path, held))
        return _merged(found)


class Limits:
    """So many in a minute for each key, and so many at once: a token bucket per key.

    Bounded: when more keys than `keys` are about, the one unused for longest is forgotten.
    """

    def __init__(self, *, per_minute: float, burst: int, keys: int = KEYS) -> None:
        self._rate = per_minute / 60.0
        self._burst = float(burst)
        self._keys = keys
        self._left: dict[str, tuple[float, float]] = {}  # (left, as of), least recent first

    def wait(self, key: str, now: float, cost: float = 1.0) -> float:
        """Take one of `key`'s; 0.0 when there was one, else the seconds until there is."""
        left = self._at(key, now)
        taken = left >= cost
        self._left.pop(key, None)
        self._left[key] = (left - cost if taken else left, now)
        if len(self._left) > self._keys:
            del self._left[next(iter(self._left))]
        return 0.0 if taken else (cost - left) / self._rate

    def blocked(self, key: str, now: float) -> float:
        """The seconds until `key` has one again, 0.0 when it has; takes nothing."""
        return max(1.0 - self._at(key, now), 0.0) / self._rate

    def _at(self, key: str, now: float) -> float:
        left, since = self._left.get(key, (self._burst, now))
        return min(self._burst, left + max(now - since, 0.0) * self._rate)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def _bytes(path: Path) -> bytes | str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return str(error.strerror)


def _parse(role: Role, path: Path, data: bytes | str) -> list[Token]:
    if isinstance(data, str):
        raise ConfigError(f"token file {path} cannot be read: {data}")
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"token file {path} must hold at most {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"token file {path} is not text (UTF-8)") from error
    roles = frozenset((role, *_ALSO[role]))
    found: list[Token] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"token file {path}, line {number}"
        if len(words) > 2:
            raise ConfigError(f"{where}: must be NAME TOKEN, got {len(words)} words")
        secret = words[-1]
        name = words[0] if len(words) == 2 else role.value
        if not (secret.isascii() and secret.isprintable()):
            raise ConfigError(f"{where}: a token must be printable ASCII")
        if not MIN_TOKEN <= len(secret) <= MAX_TOKEN:
            raise ConfigError(
                f"{where}: a token must have {MIN_TOKEN} to {MAX_TOKEN} characters, got "
                f"{len(secret)}; make one with: openssl rand -hex 32"
            )
        if len(name) > 64 or not name.isprintable() or name == LOCAL:
            raise ConfigError(
                f"{where}: a name must have at most 64 printable characters and not be {LOCAL!r}"
            )
        found.append(Token(name, roles, secret))
    if not found:
        raise ConfigError(f"token file {path} holds no token; put NAME TOKEN on a line of its own")
    return found


def _merged(tokens: list[Token]) -> list[Token]:
    """One token in the files of two roles has both, if its name agrees."""
    by_secret: dict[str, Token] = {}
    for token in tokens:
        old = by_secret.get(token.secret)
        if old is None:
            by_secret[token.secret] = token
        elif SHARED in (old.name, token.name) or _own(old) == _own(token):
            by_secret[token.secret] = Token(old.name, old.roles | token.roles, token.secret)
        else:
            raise ConfigError(
                f"tokens {old.name!r} and {token.name!r} are equal: the audit log could not tell "
                "them apart; give each its own"
            )
    return list(by_secret.values())


def _own(token: Token) -> str:
    """The name that was given, "" for one named after its role."""
    return "" if token.name in tuple(Role) else token.name


# ---- what an answer tells a browser -------------------------------------------------------

# Whatever is no page of ours holds data: nothing in it may run, load or be framed.
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", DATA_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), interest-cohort=()"),
    (b"cache-control", b"no-store"),
)
